"""One sample of each structure on disk, made by today's code; the committed bytes were made by version 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind, Buffer, ColumnId, DispatchPart, ProducerPart, SchedulePart
from delayd.batch.content import Hasher, Names
from delayd.batch.gather import Pick, compose, gather
from delayd.delay.keys.run import new_entries, write_run
from delayd.log.checkpoint import HEADER, CheckpointFile
from delayd.log.control import Ended, encode_known, encode_records
from delayd.log.group import GroupKind, NewGroup, encode_header
from delayd.log.hour import ENDED, NewPart, Seal, SealFacts, encode_outcomes, encode_seal
from delayd.log.key_run import run_path
from delayd.log.pull import PullEntry, PullOp, encode_entries
from delayd.log.segment import FileHeader, FileKind
from delayd.outcome import Outcome, Reason
from delayd.testing.disk import MemoryDisk
from tests.batches import messages

FOLDER = Path(__file__).parent / "v1"
LOG_ID = 0x0123456789ABCDEF
NOW_MS = 1_795_190_400_000  # 2026-11-20T16:00Z
HOUR = 498_664
BODIES = [b'{"order":1}', b"", b"12345678"]
HEADERS = [b"\x81\xa1k\xa1v", b"\x80", b"\x80"]
KEYS = [b"order-42", b"", "gr\u00f6\u00dfe".encode()]
TAGS = [["eu", "urgent"], [], ["eu"]]


def producer_batch() -> bytes:
    """Two subjects, headers, and an empty body."""
    return messages(
        BODIES,
        due=[NOW_MS, NOW_MS + 1, NOW_MS - 5],
        headers=HEADERS,
        subjects=[b"orders.eu", b"mail"],
        subject_of=[0, 1, 0],
        part=ProducerPart(0xA1, 7, 5),
    )


def labelled_batch() -> bytes:
    """The same rows with keys and tags."""
    return messages(
        BODIES,
        due=[NOW_MS, NOW_MS + 1, NOW_MS - 5],
        headers=HEADERS,
        keys=KEYS,
        flags=[2, 0, 1],
        tags=TAGS,
        subjects=[b"orders.eu", b"mail"],
        subject_of=[0, 1, 0],
        part=ProducerPart(0xA1, 9, 5),
    )


def tagged_dispatch_batch() -> bytes:
    """Two of these rows as they are handed over: with their tags, and without their keys."""
    rows = gather([Pick(parse(labelled_batch()), np.array([2, 0]))])
    part = DispatchPart(LOG_ID, 3, 18, 3, 17, NOW_MS + 2, HOUR)
    return compose(BatchKind.DISPATCH, part, rows, np.array([105, 103], np.uint64), [b"orders.eu"]).joined()


def single_batch() -> bytes:
    """What one send makes."""
    return messages([b"hello"], due=[NOW_MS], part=ProducerPart(0xA1, 8, 5))


def schedule_batch() -> bytes:
    """The producer's rows, gathered, with what the delay server adds."""
    rows = gather([Pick(parse(producer_batch()), range(3))])
    return compose(
        kind=BatchKind.SCHEDULE,
        part=SchedulePart(640, 1_280, HOUR),
        gathered=rows,
        sequences=np.array([100, 101, 102], np.uint64),
        subjects=[b"orders.eu", b"mail"],
        others={
            ColumnId.SUBJECT: np.array([0, 1, 0], np.uint32),
            ColumnId.ACCEPTED_AT_MS: np.array([0, 0, NOW_MS]),
        },
    ).joined()


def dispatch_batch() -> bytes:
    """Rows of one subject, handed over."""
    rows = gather([Pick(parse(producer_batch()), np.array([2, 0]))])
    part = DispatchPart(LOG_ID, 3, 9, 3, 7, NOW_MS + 20, HOUR)
    return compose(BatchKind.DISPATCH, part, rows, np.array([102, 100], np.uint64), [b"orders.eu"]).joined()


def outcome_batch() -> bytes:
    """Two parts of different fate."""
    sent = NewPart(
        sequences=np.array([102, 100], np.uint64),
        deliver_at_ms=np.array([NOW_MS - 5, NOW_MS]),
        outcome=Outcome.DISPATCHED,
        claimed_at_ms=NOW_MS + 20,
        target_log_id=0xBEEF,
        epoch=3,
        batch_id=9,
        target_appended_at_ms=NOW_MS + 22,
        target_offset=4_096,
        attempt=1,
        hashes=parse(dispatch_batch()).content_hashes(),
    )
    dead = NewPart(np.array([101], np.uint64), np.array([NOW_MS + 1]), Outcome.DEAD, attempt=5)
    return encode_outcomes(HOUR, [sent, dead])


def control_batch() -> bytes:
    """Records of both servers."""
    return encode_records(
        [
            {"type": "target", "subject": "orders.eu", "log_id": 0xBEEF},
            {"type": "hello", "log_id": LOG_ID, "epoch": 3, "instance": 4, "session": 1, "w": [3, 7]},
        ]
    )


def pull_batch() -> bytes:
    """An entry of each kind."""
    (data,) = encode_entries(
        [
            PullEntry(PullOp.PULL, 1, 2, 4, 10, 1_000, 6, NOW_MS, 60_000),
            PullEntry(PullOp.ACK, 1, 2, 4, 10, 0, 3, NOW_MS + 1),
            PullEntry(PullOp.NACK, 1, 2, 4, 13, 0, 1, NOW_MS + 2),
            PullEntry(PullOp.LAPSED, 2, 2, 4, 14, 0, 1, NOW_MS + 3),
            PullEntry(PullOp.RETURNED, 1, 2, 4, 15, 0, 1, NOW_MS + 4),
        ]
    )
    return data


def ended_batch() -> bytes:
    """A row that was cancelled, and one that met an earlier row with its key."""
    rows = np.zeros(2, ENDED)
    rows["sequence"], rows["deliver_at_ms"], rows["hour"] = [90, 101], [NOW_MS, NOW_MS + 1], HOUR
    rows["reason"], rows["decided_at_ms"] = (Reason.CANCELLED, Reason.KEPT), NOW_MS - 9
    rows[1]["other"], rows[1]["other_at_ms"] = 91, NOW_MS + 7
    return encode_known([Ended(rows.tobytes())])


def cancelled_batch() -> bytes:
    """The outcomes of these rows."""
    first, second = (np.array([sequence], np.uint64) for sequence in (90, 101))
    due = (np.array([NOW_MS]), np.array([NOW_MS + 1]))
    cancelled, kept = Reason.CANCELLED, Reason.KEPT
    parts = [
        NewPart(first, due[0], Outcome.CANCELLED, NOW_MS - 9, reason=cancelled),
        NewPart(second, due[1], Outcome.CANCELLED, NOW_MS - 9, 0, 0, 91, NOW_MS + 7, reason=kept),
    ]
    return encode_outcomes(HOUR, parts)


def seal_batch() -> bytes:
    """The seal of an hour, the third of its log."""
    facts = SealFacts(
        HOUR, 3, 19, 2, 0, 1, 0, 0, NOW_MS - 5, NOW_MS + 1, 11, 12, bytes(range(32)), bytes(range(32, 64))
    )
    return encode_seal(Seal(LOG_ID, 2, facts, bytes(range(64, 96))))


def group(kind: GroupKind, batches: Sequence[Buffer], rows: int) -> bytes:
    """A group at offset 640 of a log that is durable up to 600."""
    new = NewGroup(kind, batches, 3, NOW_MS + 9, 100, rows)
    header, _ = encode_header(new, [len(batch) for batch in batches], LOG_ID, 640, 600, 0xCAFE)
    return b"".join((header, *batches))


def checkpoint_slot() -> bytes:
    """The first slot of a file as far as it was written."""
    disk = MemoryDisk()
    file = CheckpointFile(disk, "/", LOG_ID)
    hours = b"".join(n.to_bytes(size, "little") for n, size in ((HOUR, 4), (0xC0DE, 4), (640, 8), (3, 8), (1, 8)))
    file.publish({"replay_offset": 1_280, "replay_crc32c": 5, "next_sequence": 103, "epoch": 3, "hours": hours}, NOW_MS)
    data = disk.open("/checkpoint").pread(1 << 20, 0)
    assert len(data) > HEADER.size
    return data


def keys_run() -> bytes:
    """Two names, whose order is that of their hashes."""
    disk = MemoryDisk()
    names = Names.of_lists([b"orders.eu", b"mail"], [b"order-42", b"k"])
    sequences, due = np.array([100, 101], np.uint64), np.array([NOW_MS, NOW_MS + 1])
    entries = new_entries(Hasher(LOG_ID), names, sequences, due, np.array([HOUR, HOUR + 1], np.uint32))
    name = write_run(disk, "/", FileHeader(FileKind.KEYS, LOG_ID, 0, 3, NOW_MS), LOG_ID, entries, lambda: None)
    return disk.open(run_path("/", 3)).pread(name.total_bytes, 0)


SAMPLES: dict[str, Callable[[], bytes]] = {
    "batch_producer": producer_batch,
    "batch_labelled": labelled_batch,
    "batch_dispatch_tagged": tagged_dispatch_batch,
    "batch_single": single_batch,
    "batch_schedule": schedule_batch,
    "batch_dispatch": dispatch_batch,
    "batch_outcome": outcome_batch,
    "batch_control": control_batch,
    "batch_outcome_cancelled": cancelled_batch,
    "batch_control_ended": ended_batch,
    "batch_pull": pull_batch,
    "batch_seal": seal_batch,
    "group_data": lambda: group(GroupKind.DATA, [producer_batch(), single_batch(), single_batch()], 5),
    "group_control": lambda: group(GroupKind.CONTROL, [control_batch()], 0),
    "group_decided": lambda: group(GroupKind.DATA, [ended_batch(), producer_batch(), single_batch()], 4),
    "group_tick": lambda: group(GroupKind.TICK, [], 0),
    "file_header": lambda: FileHeader(FileKind.MESSAGE, LOG_ID, 1 << 30, 0, NOW_MS, 0xCAFE).encode(),
    "file_header_schedule": lambda: FileHeader(FileKind.SCHEDULE, LOG_ID, 0, HOUR, NOW_MS, 0).encode(),
    "checkpoint_slot": checkpoint_slot,
    "keys_run": keys_run,
}


def committed(name: str) -> bytes:
    """The bytes of version 1."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def as_text(data: bytes) -> str:
    """Sixteen bytes a line, so that a difference shows its place."""
    return "".join(f"{data[at : at + 16].hex(' ', 8)}\n" for at in range(0, len(data), 16))
