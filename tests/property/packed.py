"""Batches that a producer has packed, read back as rows."""

from __future__ import annotations

from collections.abc import Sequence

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId, ProducerPart
from delayd.batch.validate import check_batch
from delayd.client.instants import ServerClock
from delayd.client.sending.send_options import Label
from delayd.errors import LogId

LOG_ID = LogId(5)
PART = ProducerPart(2**64 - 1, 7, 3)

Row = tuple[bytes, bytes, int, bytes, Label]  # Subject, body, deliver_at_ms, headers, key and tags.


def known_clock() -> ServerClock:
    """A server's clock that is exactly known to be 1,000 s ahead of the monotonic one."""
    clock = ServerClock("a server")
    clock.sample(0, 0, 1_000_000, wall_us=1_000_000_000)
    return clock


def unpacked(pieces: Sequence[bytes]) -> list[Row]:
    """The rows of a batch that a producer has packed, once a delay server's checks have passed."""
    encoded = b"".join(pieces)
    batch = parse(encoded)
    batch.verify()
    check_batch(batch)
    assert batch.producer == PART and batch.total_bytes == len(encoded)
    subjects = batch.subjects()
    subject_of = batch.uint32s(ColumnId.SUBJECT).tolist() if ColumnId.SUBJECT in batch else [0] * batch.count
    names = [subjects[index] for index in subject_of]
    due = batch.int64s(ColumnId.DELIVER_AT_MS).tolist()
    bodies = _items(batch, ColumnId.BODY_END)
    headers = _items(batch, ColumnId.HEADERS_END) if ColumnId.HEADERS_END in batch else [b""] * batch.count
    nothing = [b""] * batch.count
    keys = _items(batch, ColumnId.KEY_END) if ColumnId.KEY_END in batch else nothing
    tags = _items(batch, ColumnId.TAGS_END) if ColumnId.TAGS_END in batch else nothing
    flags = batch.column(ColumnId.ROW_FLAGS).tolist() if ColumnId.ROW_FLAGS in batch else [0] * batch.count
    return list(zip(names, bodies, due, headers, map(Label, keys, flags, tags), strict=True))


def _items(batch: Batch, column: ColumnId) -> list[bytes]:
    starts, ends = batch.region(column)
    return [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
