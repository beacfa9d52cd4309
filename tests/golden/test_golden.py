"""The bytes of format version 1: today's code makes exactly these, and reads them."""

from __future__ import annotations

import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BatchKind, ColumnId, DispatchPart, OutcomePart, ProducerPart, SchedulePart
from delayd.batch.content import Hasher
from delayd.batch.validate import check_batch
from delayd.delay.keys.run import open_run
from delayd.delay.rows import stored_batches
from delayd.log.checkpoint import read_checkpoint
from delayd.log.control import Ended, decode_known, decode_records
from delayd.log.group import CommitGroup, GroupKind, parse_header, verify_group
from delayd.log.hour import decode_ended, decode_hours, decode_outcomes, decode_seals
from delayd.log.key_run import RunName, run_path
from delayd.log.pull import PullEntry, PullOp, decode_entries
from delayd.log.segment import FileHeader, FileKind, open_segment
from delayd.outcome import Outcome, Reason
from delayd.testing.disk import MemoryDisk
from tests.batches import bodies_of, tags_of
from tests.golden.samples import (
    BODIES,
    FOLDER,
    HEADERS,
    HOUR,
    KEYS,
    LOG_ID,
    NOW_MS,
    SAMPLES,
    TAGS,
    as_text,
    committed,
)


def batch(name: str) -> Batch:
    found = parse(committed(f"batch_{name}"))
    found.verify()
    check_batch(found)
    return found


@pytest.mark.parametrize("name", SAMPLES)
def test_todays_code_makes_the_bytes_of_version_1(name: str) -> None:
    assert as_text(SAMPLES[name]()) == as_text(committed(name))


def test_every_committed_file_has_its_sample() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SAMPLES)


def test_a_producer_batch_of_version_1_is_read() -> None:
    found = batch("producer")
    assert found.kind is BatchKind.PRODUCER
    assert found.producer == ProducerPart(0xA1, 7, 5)
    assert found.int64s(ColumnId.DELIVER_AT_MS).tolist() == [NOW_MS, NOW_MS + 1, NOW_MS - 5]
    assert found.uint32s(ColumnId.SUBJECT).tolist() == [0, 1, 0]
    assert found.subjects() == [b"orders.eu", b"mail"]
    assert bodies_of(found) == BODIES
    starts, ends = found.region(ColumnId.HEADERS_END)
    assert [bytes(found.heap[start:end]) for start, end in zip(starts, ends, strict=True)] == HEADERS
    assert bodies_of(batch("single")) == [b"hello"]


def test_keys_and_tags_of_version_1_are_read() -> None:
    found = batch("labelled")
    starts, ends = found.region(ColumnId.KEY_END)
    assert [bytes(found.heap[start:end]) for start, end in zip(starts, ends, strict=True)] == KEYS
    assert found.column(ColumnId.ROW_FLAGS).tolist() == [2, 0, 1]
    assert tags_of(found) == list(map(tuple, TAGS))
    assert found.uint64s(ColumnId.TAG_BLOOM).tolist() == [0xE00082004000, 0, 0x600000004000]
    assert bodies_of(found) == BODIES
    sent = batch("dispatch_tagged")
    assert tags_of(sent) == [("eu",), ("eu", "urgent")] and bodies_of(sent) == [BODIES[2], BODIES[0]]
    assert sent.uint64s(ColumnId.TAG_BLOOM).tolist() == [0x600000004000, 0xE00082004000]
    starts, ends = sent.region(ColumnId.KEY_END)
    assert [bytes(sent.heap[start:end]) for start, end in zip(starts, ends, strict=True)] == [KEYS[2], KEYS[0]]
    assert ColumnId.ROW_FLAGS not in sent


def test_a_schedule_batch_of_version_1_is_read() -> None:
    found = batch("schedule")
    assert found.schedule == SchedulePart(640, 1_280, HOUR)
    assert found.uint64s(ColumnId.SEQUENCE).tolist() == [100, 101, 102]
    assert found.int64s(ColumnId.ACCEPTED_AT_MS).tolist() == [0, 0, NOW_MS]
    assert bodies_of(found) == BODIES


def test_a_dispatch_batch_of_version_1_is_read() -> None:
    found = batch("dispatch")
    assert found.dispatch == DispatchPart(LOG_ID, 3, 9, 3, 7, NOW_MS + 20, HOUR)
    assert found.uint64s(ColumnId.SEQUENCE).tolist() == [102, 100]
    assert found.subjects() == [b"orders.eu"]
    assert bodies_of(found) == [BODIES[2], BODIES[0]]


def test_outcome_parts_of_version_1_are_read() -> None:
    found = batch("outcome")
    assert found.outcome == OutcomePart(HOUR)
    rows = decode_outcomes([found])
    assert rows.sequences.tolist() == [102, 100, 101]
    assert rows.part_of.tolist() == [0, 0, 1]
    assert rows.parts.tolist() == [
        (0xBEEF, 3, 9, NOW_MS + 20, NOW_MS + 22, 4_096, 2, 1, 0, 1, 0),
        (0, 0, 0, 0, 0, 0, 1, 3, 0, 5, 0),
    ]


def test_control_records_of_version_1_are_read() -> None:
    target, hello = decode_records(batch("control"))
    assert target == {"type": "target", "subject": "orders.eu", "log_id": 0xBEEF}
    assert (hello["epoch"], hello["w"]) == (3, [3, 7])


def test_pull_entries_of_version_1_are_read() -> None:
    pulled, acknowledged, refused, lapsed, returned = decode_entries(batch("pull"))
    assert pulled == PullEntry(PullOp.PULL, 1, 2, 4, 10, 1_000, 6, NOW_MS, 60_000)
    assert acknowledged == PullEntry(PullOp.ACK, 1, 2, 4, 10, 0, 3, NOW_MS + 1)
    assert (refused.op, lapsed.op, lapsed.attempt) == (PullOp.NACK, PullOp.LAPSED, 2)
    assert (returned.op, returned.attempt) == (PullOp.RETURNED, 1)


def test_a_seal_of_version_1_is_read() -> None:
    (seal,) = decode_seals(batch("seal"))
    assert (seal.log_id, seal.number, seal.previous_sha256) == (LOG_ID, 2, bytes(range(64, 96)))
    facts = seal.facts
    assert (facts.hour, facts.rows, facts.body_bytes) == (HOUR, 3, 19)
    assert (facts.dispatched, facts.cancelled, facts.dead, facts.expired, facts.in_doubt) == (2, 0, 1, 0, 0)
    assert (facts.due_min_ms, facts.due_max_ms) == (NOW_MS - 5, NOW_MS + 1)
    assert facts.schedule_sha256 + facts.outcomes_sha256 == bytes(range(64))


@pytest.mark.parametrize(("kind", "batches"), [(GroupKind.DATA, 3), (GroupKind.CONTROL, 1), (GroupKind.TICK, 0)])
def test_groups_of_version_1_are_read(kind: GroupKind, batches: int) -> None:
    data = memoryview(committed(f"group_{kind.name.lower()}"))
    header = parse_header(data, 0, LOG_ID, 640)
    verify_group(data, header, 0xCAFE)
    assert (header.kind, header.epoch, header.base_sequence, header.appended_at_ms) == (kind, 3, 100, NOW_MS + 9)
    assert header.durable_offset == 600
    found = list(CommitGroup(header, data).batches())
    assert len(found) == batches
    for offset, one in found:
        assert data[offset - 640 :][: one.total_bytes] == one.buffer


def test_decisions_before_the_rows_of_their_group_take_no_numbers() -> None:
    data = memoryview(committed("group_decided"))
    header = parse_header(data, 0, LOG_ID, 640)
    verify_group(data, header, 0xCAFE)
    group = CommitGroup(header, data)
    assert [(stored.base_sequence, stored.batch.count) for stored in stored_batches(group)] == [(100, 3), (103, 1)]
    (record,) = decode_known(next(group.batches())[1])
    assert isinstance(record, Ended)
    rows = decode_ended(record.rows)
    assert rows["sequence"].tolist() == [90, 101]
    assert rows["reason"].tolist() == [Reason.CANCELLED, Reason.KEPT]
    assert (rows[1]["other"], rows[1]["other_at_ms"]) == (91, NOW_MS + 7)


def test_cancelled_outcomes_name_reason_and_other_row() -> None:
    outcomes = decode_outcomes([batch("outcome_cancelled")])
    assert outcomes.sequences.tolist() == [90, 101]
    assert outcomes.parts["outcome"].tolist() == [Outcome.CANCELLED] * 2
    assert outcomes.parts["reason"].tolist() == [Reason.CANCELLED, Reason.KEPT]
    assert outcomes.parts["batch_id"].tolist() == [0, 91]
    assert outcomes.parts["target_appended_at_ms"].tolist() == [0, NOW_MS + 7]


def test_file_headers_of_version_1_are_read() -> None:
    expected = {
        "file_header": FileHeader(FileKind.MESSAGE, LOG_ID, 1 << 30, 0, NOW_MS, 0xCAFE),
        "file_header_schedule": FileHeader(FileKind.SCHEDULE, LOG_ID, 0, HOUR, NOW_MS, 0),
    }
    for name, header in expected.items():
        disk = MemoryDisk()
        disk.open("/file", create=True).pwritev([committed(name)], 0)
        assert open_segment(disk, "/file", FileKind(header.kind), LOG_ID, write=False).header == header


def test_a_checkpoint_slot_of_version_1_is_read() -> None:
    disk = MemoryDisk()
    disk.open("/checkpoint", create=True).pwritev([committed("checkpoint_slot")], 0)
    payload = read_checkpoint(disk, "/", LOG_ID)
    assert payload is not None
    hours = payload.pop("hours")
    assert payload == {"replay_offset": 1_280, "replay_crc32c": 5, "next_sequence": 103, "epoch": 3, "log_id": LOG_ID}
    assert isinstance(hours, bytes)
    assert decode_hours(hours).tolist() == [(HOUR, 0xC0DE, 640, 3, 1)]


def test_a_run_of_keys_of_version_1_is_read() -> None:
    disk, data = MemoryDisk(), committed("keys_run")
    disk.make_folder("/keys")
    disk.open(run_path("/", 3), create=True).pwritev([data], 0)
    name = RunName(3, 2, len(data), int.from_bytes(data[104:108], "little"))
    run = open_run(disk, "/", LOG_ID, LOG_ID, name)
    entries = run.read(0, run.blocks, Hasher(LOG_ID))
    rows = dict(zip(entries.names.texts(), entries.rows.tolist(), strict=True))
    assert rows == {(b"orders.eu", b"order-42"): (100, NOW_MS, HOUR), (b"mail", b"k"): (101, NOW_MS + 1, HOUR + 1)}
