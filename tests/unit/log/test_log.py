"""A log on a disk in memory: it goes on behind what it holds, rolls, and takes no bytes but its own (rules L1, L5).

Its contents over appends, crashes and full disks are in tests/property/test_log_against_model.py and tests/crash.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from crc32c import crc32c

from delayd.errors import DamagedData, NewerFormat, ServerStopped, SyncFailed
from delayd.log.group import (
    BYTES_MAX,
    BadGroup,
    GroupKind,
    IncompleteGroup,
    NewerGroup,
    NewGroup,
    encode_header,
    parse_header,
    verify_group,
)
from delayd.log.log import Log, LogPlace, list_segments, open_log, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.testing.disk import MemoryDisk, Misread
from tests.batches import messages
from tests.memory_files import content, files, put

PLACE = LogPlace("/data/message", FileKind.MESSAGE, 77, segment_bytes=1_000)
FIRST = f"{PLACE.folder}/{segment_name(0)}"
BATCHES = [messages([b"a"]), messages([b"b", b"c"]), messages([b"d" * 50])]


def group(number: int, body: bytes = b"x" * 100) -> NewGroup:
    return NewGroup(GroupKind.DATA, [messages([body])], 1, number, number, 1)


def filled(count: int, first: int = 0) -> tuple[MemoryDisk, Log]:
    disk = MemoryDisk()
    log = open_log(disk, PLACE, 5)
    for number in range(first, first + count):
        log.append([group(number)], 5)
        log.flush()
    return disk, log


def numbers(log: Log, start: int = 0) -> list[int]:
    return [found.header.base_sequence for found in log.scan(start, log.durable)]


def test_groups_come_back_in_order_over_segments_with_their_batches_and_offsets() -> None:
    disk, log = filled(12)
    assert len(files(disk, PLACE.folder)) == 3 and numbers(log) == [*range(12)]
    offsets = log.append([NewGroup(GroupKind.DATA, BATCHES, 3, 9, 40, 4), NewGroup(GroupKind.TICK, [], 3, 10)], 5)
    assert log.durable == offsets[0]
    log.flush()
    found = list(log.scan(0, log.durable))
    assert [one.header.offset for one in found[12:]] == offsets and numbers(log, found[5].end) == [*range(6, 12), 40, 0]
    assert [bytes(batch.buffer) for _, batch in found[12].batches()] == BATCHES and not [*found[13].batches()]
    for offset, batch in found[12].batches():
        assert log.read(offset, batch.total_bytes) == bytes(batch.buffer) and batch.verified
    assert found[13].header.previous_crc32c == found[12].header.header_crc32c


@pytest.mark.parametrize("known", [True, False])
def test_a_log_opened_at_its_checkpoint_reads_only_what_is_behind_it_and_appends_in_the_chain(known: bool) -> None:
    disk, log = filled(3)
    again = open_log(disk.after_crash(), PLACE, 5, log.end, log.crc32c if known else None)
    assert (again.end, again.crc32c) == (log.end, log.crc32c)
    again.append([group(3)], 5)
    again.flush()
    assert numbers(again) == [0, 1, 2, 3]


def test_a_failed_write_that_cannot_be_cut_back_stops_the_server() -> None:
    disk, log = filled(1)
    disk.faults.fail_write_at, disk.faults.fail_sync_at = disk.writes + 1, disk.syncs + 1
    for said in ("could not be cut back", None):
        with pytest.raises(ServerStopped, match=said):
            log.append([group(1)], 5)


def test_rule_L1_recovery_says_how_much_it_cut_and_wrote_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk, log = filled(2)
    last = list(log.scan(0, log.durable))[-1]
    log.append([group(2)], 5)
    killed = disk.after_kill()
    killed.open(FIRST, write=True).pwritev([b"torn"], FILE_HEADER_BYTES + log.end)
    recovered = open_log(killed, PLACE, 5)
    (told,) = caplog.records
    assert told.levelname == "WARNING" and told.getMessage() == (
        f"tail_recovered path={FIRST} cut_bytes=4 reason='the group is cut short' "
        f"rewritten_bytes={recovered.end - last.end}"
    )
    assert numbers(open_log(killed.after_crash(), PLACE, 5)) == [0, 1, 2]


def test_segments_that_are_missing_or_of_another_log_are_damage() -> None:
    disk, log = filled(12)
    log.close()
    paths = files(disk, PLACE.folder)
    for missing, start in ((paths[0], 0), (paths[1], 0), (paths[2], log.end)):
        broken = disk.after_crash()
        broken.remove(missing)
        with pytest.raises(DamagedData):
            open_log(broken, PLACE, 5, start, log.crc32c if start else 0)
    # The same log with other groups: a copy that went on by itself.
    theirs, _ = filled(12, first=100)
    put(disk, paths[1], content(theirs, paths[1]))
    with pytest.raises(DamagedData, match="does not follow"):
        open_log(disk, PLACE, 5)
    for path in paths:
        disk.remove(path)
    with pytest.raises(DamagedData, match="the log is gone"):
        open_log(disk, PLACE, 5, 100, 1)


def test_a_file_of_another_directory_kind_or_format_is_refused_by_name() -> None:
    disk, log = filled(1)
    log.close()
    for place, said in ((replace(PLACE, log_id=78), "log_id"), (replace(PLACE, kind=FileKind.PULL), "of kind 1")):
        with pytest.raises(DamagedData, match=said):
            open_log(disk.after_crash(), place, 5)
    file = disk.open(FIRST, write=True)
    file.pwritev([b"\x02"], 8)
    # Only a version that its checksum vouches for: no newer delayd reads a flipped bit.
    with pytest.raises(DamagedData, match="checksum of the file header"):
        open_log(disk, PLACE, 5)
    file.pwritev([crc32c(file.pread(60, 0)).to_bytes(4, "little")], 60)
    with pytest.raises(NewerFormat, match="version 2"):
        open_log(disk, PLACE, 5)
    file.pwritev([b"#!/bin/sh"], 0)
    with pytest.raises(DamagedData, match="not a file of delayd"):
        open_log(disk, PLACE, 5)


def test_a_last_file_without_a_header_was_being_created_and_an_earlier_one_is_damage() -> None:
    disk, log = filled(5)
    log.close()
    disk.open(f"{PLACE.folder}/{segment_name(log.end)}", create=True).close()
    assert len(list_segments(disk, PLACE, write=False)) == 2
    assert open_log(disk, PLACE, 5).end == log.end and len(files(disk, PLACE.folder)) == 2
    disk.open(f"{PLACE.folder}/{segment_name(8)}", create=True).close()
    with pytest.raises(DamagedData, match="later segments exist"):
        open_log(disk, PLACE, 5)


def test_rule_L1_a_file_whose_name_could_not_be_synced_is_named_anew_and_outlives_a_power_cut() -> None:
    disk, log = filled(4)
    disk.faults.fail_sync_at = disk.syncs + 3  # Both files are synced, and then the folder.
    with pytest.raises(SyncFailed, match=f"sync of {PLACE.folder} failed"):
        log.append([group(4)], 5)
    assert len(files(disk, PLACE.folder)) == 2
    killed = disk.after_kill()
    again = open_log(killed, PLACE, 5)
    again.append([group(4)], 5)
    again.flush()
    assert numbers(open_log(killed.after_crash(), PLACE, 5)) == [*range(5)]


def test_one_wrong_read_of_a_file_without_groups_does_not_remove_it() -> None:
    disk = MemoryDisk()
    open_log(disk, PLACE, 5).close()
    disk.faults.misreads[FIRST] = Misread(1, 3)
    segments = list_segments(disk, PLACE, write=True)
    assert [segment.path for segment in segments] == [FIRST] == files(disk, PLACE.folder)
    assert FIRST not in disk.faults.misreads


def test_bodies_full_of_magic_numbers_are_no_groups_behind_a_torn_one() -> None:
    disk, log = filled(1)
    start = log.end
    log.append([group(1, b"GRUP" * 2_000)], 5)
    killed = disk.after_kill()
    killed.open(FIRST, write=True).pwritev([b"?"], FILE_HEADER_BYTES + start + 100)
    assert open_log(killed, PLACE, 5).end == start


# One group: valid only at its own place, and never written when no reader would take it.


def test_a_group_is_valid_at_its_place_alone_whole_and_of_a_version_that_is_known() -> None:
    new = NewGroup(GroupKind.DATA, BATCHES, 3, 1_000, 40, 4)
    header, _ = encode_header(new, [len(batch) for batch in BATCHES], 77, 640, 600, 9)
    data = header + b"".join(BATCHES)
    found = parse_header(data, 0, 77, 640)
    verify_group(memoryview(data), found, 9)
    assert (found.batch_count, found.epoch, found.base_sequence, found.row_count) == (3, 3, 40, 4)
    assert (found.appended_at_ms, found.durable_offset, found.total_bytes) == (1_000, 600, len(data))
    for log_id, offset, said in ((78, 640, "belongs to the log"), (77, 648, "belongs at offset 640")):
        with pytest.raises(BadGroup, match=said):
            parse_header(data, 0, log_id, offset)
    with pytest.raises(BadGroup, match="does not follow"):
        verify_group(memoryview(data), found, 10)
    for size in range(len(data)):
        with pytest.raises(IncompleteGroup) as caught:
            verify_group(memoryview(data)[:size], parse_header(data[:size], 0, 77, 640), 9)
        assert size < caught.value.size_bytes <= len(data)
    newer = bytearray(data)
    newer[4] = 2
    with pytest.raises(BadGroup, match="checksum"):
        parse_header(newer, 0, 77, 640)
    newer[76:80] = crc32c(newer[80:92], crc32c(newer[:76])).to_bytes(4, "little")
    with pytest.raises(NewerGroup, match="version 2"):
        parse_header(newer, 0, 77, 640)


@pytest.mark.parametrize("sizes", [[BYTES_MAX], [12], [8] * 65_537], ids=["too large", "not padded", "too many"])
def test_a_group_that_no_reader_would_take_is_not_encoded(sizes: list[int]) -> None:
    with pytest.raises(AssertionError, match="not possible"):
        encode_header(NewGroup(GroupKind.DATA, [], 1, 1), sizes, 1, 0, 0, 0)
