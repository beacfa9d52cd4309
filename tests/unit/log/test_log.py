"""A log on a disk in memory: appended groups come back, segments roll, a full disk does no harm."""

from __future__ import annotations

import logging

import pytest
from crc32c import crc32c

from delayd.errors import DamagedData, NewerFormat, ServerStopped
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, list_segments, open_log, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.testing.disk import Faults, MemoryDisk
from tests.batches import messages

PLACE = LogPlace("/data/message", FileKind.MESSAGE, 77, segment_bytes=1_000)


def group(number: int, body_bytes: int = 100) -> NewGroup:
    return NewGroup(GroupKind.DATA, [messages([b"x" * body_bytes])], 1, number, number, 1)


def filled(disk: MemoryDisk, count: int) -> Log:
    log = open_log(disk, PLACE, 5)
    for number in range(count):
        log.append([group(number)], 5)
        log.flush()
    return log


def numbers(log: Log, start: int = 0) -> list[int]:
    return [found.header.base_sequence for found in log.scan(start, log.durable)]


def test_groups_come_back_in_order_with_their_batches_and_offsets() -> None:
    log = open_log(MemoryDisk(), PLACE, 5)
    first, second = messages([b"a"]), messages([b"b", b"c"])
    offsets = log.append([NewGroup(GroupKind.DATA, [first, second], 3, 9, 40, 3)], 5)
    offsets += log.append([NewGroup(GroupKind.TICK, [], 3, 10)], 5)
    assert log.durable == 0
    log.flush()
    found = list(log.scan(0, log.durable, 0))
    assert [one.header.offset for one in found] == offsets
    batches = list(found[0].batches())
    assert [bytes(batch.buffer) for _, batch in batches] == [first, second]
    for offset, batch in batches:
        assert log.read(offset, batch.total_bytes) == bytes(batch.buffer)
        assert batch.verified
    assert list(found[1].batches()) == []
    assert found[1].header.previous_crc32c == found[0].header.header_crc32c


def test_a_full_segment_rolls_and_a_scan_goes_on_in_the_next_one() -> None:
    disk = MemoryDisk()
    log = filled(disk, 12)
    names = disk.list_folder(PLACE.folder)
    assert len(names) == 3
    assert names[0] == segment_name(0)
    assert numbers(log) == list(range(12))
    middle = list(log.scan(0, log.durable))[5]
    assert numbers(log, middle.end) == list(range(6, 12))


def test_a_failed_write_that_cannot_be_cut_back_stops_the_server() -> None:
    disk = MemoryDisk(Faults())
    log = filled(disk, 1)
    disk.faults.fail_write_at = disk.writes + 1
    disk.faults.fail_sync_at = disk.syncs + 1
    with pytest.raises(ServerStopped, match="could not be cut back"):
        log.append([group(1)], 5)
    with pytest.raises(ServerStopped):
        log.append([group(1)], 5)


def test_rule_L1_recovery_says_how_much_it_cut_and_wrote_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk = MemoryDisk()
    log = filled(disk, 2)
    last = list(log.scan(0, log.durable))[-1]
    log.append([group(2)], 5)
    killed = disk.after_kill()
    file = killed.open(f"{PLACE.folder}/{segment_name(0)}", write=True)
    file.pwritev([b"torn"], FILE_HEADER_BYTES + log.end)
    recovered = open_log(killed, PLACE, 5)
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert told.getMessage() == (
        f"tail_recovered path={recovered.segments[0].path} cut_bytes=4 reason='the group is cut short' "
        f"rewritten_bytes={recovered.end - last.end}"
    )
    assert numbers(open_log(killed.after_crash(), PLACE, 5)) == [0, 1, 2]


@pytest.mark.parametrize("known", [True, False])
def test_a_log_opened_at_its_checkpoint_reads_only_what_is_behind_it_and_appends_in_the_chain(known: bool) -> None:
    disk = MemoryDisk()
    log = filled(disk, 3)
    end, crc32c = log.end, log.crc32c
    again = open_log(disk.after_crash(), PLACE, 5, end, crc32c if known else None)
    assert (again.end, again.crc32c) == (end, crc32c)
    again.append([group(3)], 5)
    again.flush()
    assert [one.header.base_sequence for one in again.scan(0, again.durable, 0)] == [0, 1, 2, 3]


def test_segments_that_are_missing_before_the_checkpoint_or_in_the_middle_are_damage() -> None:
    disk = MemoryDisk()
    log = filled(disk, 12)
    log.close()
    first, second, last = (f"{PLACE.folder}/{name}" for name in disk.list_folder(PLACE.folder))
    for missing, start in ((first, 0), (second, 0), (last, log.end)):
        broken = disk.after_crash()
        broken.remove(missing)
        with pytest.raises(DamagedData):
            open_log(broken, PLACE, 5, start, log.crc32c if start else 0)
    for name in disk.list_folder(PLACE.folder):
        disk.remove(f"{PLACE.folder}/{name}")
    with pytest.raises(DamagedData, match="the log is gone"):
        open_log(disk, PLACE, 5, 100, 1)


def test_a_segment_of_another_log_put_between_is_damage() -> None:
    ours, theirs = MemoryDisk(), MemoryDisk()
    filled(ours, 12).close()
    other = open_log(theirs, PLACE, 6)
    for number in range(12):
        other.append([group(number + 100)], 6)
        other.flush()
    other.close()
    name = ours.list_folder(PLACE.folder)[1]
    copied = theirs.open(f"{PLACE.folder}/{name}")
    ours.remove(f"{PLACE.folder}/{name}")
    file = ours.open(f"{PLACE.folder}/{name}", create=True)
    file.pwritev([copied.pread(1 << 20, 0)], 0)
    file.sync()
    with pytest.raises(DamagedData, match="does not follow"):
        open_log(ours, PLACE, 5)


def test_a_file_of_another_directory_kind_or_format_is_refused_by_name() -> None:
    disk = MemoryDisk()
    filled(disk, 1).close()
    path = f"{PLACE.folder}/{segment_name(0)}"
    with pytest.raises(DamagedData, match="log_id"):
        open_log(disk.after_crash(), LogPlace(PLACE.folder, PLACE.kind, 78), 5)
    with pytest.raises(DamagedData, match="of kind 1"):
        open_log(disk.after_crash(), LogPlace(PLACE.folder, FileKind.PULL, 77), 5)
    file = disk.open(path, write=True)
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
    disk = MemoryDisk()
    log = filled(disk, 5)
    log.close()
    disk.open(f"{PLACE.folder}/{segment_name(log.end)}", create=True).close()
    assert len(list_segments(disk, PLACE, write=False)) == 2
    assert open_log(disk, PLACE, 5).end == log.end
    assert len(disk.list_folder(PLACE.folder)) == 2
    disk.open(f"{PLACE.folder}/{segment_name(8)}", create=True).close()
    with pytest.raises(DamagedData, match="later segments exist"):
        open_log(disk, PLACE, 5)


def test_bodies_full_of_magic_numbers_are_no_groups_behind_a_torn_one() -> None:
    disk = MemoryDisk()
    log = filled(disk, 1)
    start = log.end
    log.append([NewGroup(GroupKind.DATA, [messages([b"GRUP" * 2_000, b"x"])], 1, 1, 1, 2)], 5)
    killed = disk.after_kill()
    killed.open(f"{PLACE.folder}/{segment_name(0)}", write=True).pwritev([b"?"], FILE_HEADER_BYTES + start + 100)
    assert open_log(killed, PLACE, 5).end == start
