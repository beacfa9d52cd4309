"""Rows of a batch, one by one, and batches of rows: what a liar changes.

Invariant: a batch that is made anew of its own rows says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from delayd.batch.batch import Batch, encode, encode_subject_table, lay_out
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, KindPart
from delayd.batch.content import content_hash


@dataclass(frozen=True)
class Row:
    """One message as a batch has it; ``left_out`` is the length of a body that is not there."""

    due_ms: int
    sequence: int
    subject: bytes
    headers: bytes
    body: bytes
    accepted_at_ms: int = 0
    left_out: int = 0
    content_hash: int = 0
    key: bytes = b""
    expires_at_ms: int = 0

    def hashed(self) -> Row:
        """The same with the hash that its content has."""
        return replace(self, content_hash=content_hash(self.subject, self.headers, self.body))


def rows_of(batch: Batch) -> list[Row]:
    """All rows of a batch."""
    heap, count = bytes(batch.heap), batch.count
    names = batch.subjects()
    numbers = batch.uint32s(ColumnId.SUBJECT).tolist() if ColumnId.SUBJECT in batch else [0] * count
    sequences = batch.uint64s(ColumnId.SEQUENCE).tolist() if ColumnId.SEQUENCE in batch else [0] * count
    accepted = batch.int64s(ColumnId.ACCEPTED_AT_MS).tolist() if ColumnId.ACCEPTED_AT_MS in batch else [0] * count
    expires = batch.int64s(ColumnId.EXPIRES_AT_MS).tolist() if ColumnId.EXPIRES_AT_MS in batch else [0] * count
    left_out = batch.uint32s(ColumnId.BODY_LEFT_OUT).tolist() if ColumnId.BODY_LEFT_OUT in batch else [0] * count
    headers = _items(batch, ColumnId.HEADERS_END, heap) if ColumnId.HEADERS_END in batch else [b""] * count
    bodies = _items(batch, ColumnId.BODY_END, heap)
    due, hashes = batch.int64s(ColumnId.DELIVER_AT_MS).tolist(), batch.content_hashes().tolist()
    names_of = [names[number] for number in numbers]
    keys = _items(batch, ColumnId.KEY_END, heap) if ColumnId.KEY_END in batch else [b""] * count
    columns = (due, sequences, names_of, headers, bodies, accepted, left_out, hashes, keys, expires)
    return [Row(*fields) for fields in zip(*columns, strict=True)]


def batch_of(like: Batch, rows: Sequence[Row], part: KindPart = None) -> bytes:
    """A batch of the kind of another one, of these rows, with its kind part or another."""
    names = list(dict.fromkeys(row.subject for row in rows))
    table = encode_subject_table(names)
    regions: list[tuple[ColumnId, ColumnArray]] = []
    for column, items in (
        (ColumnId.KEY_END, [row.key for row in rows]),
        (ColumnId.HEADERS_END, [row.headers for row in rows]),
    ):
        if any(items):
            item_ends, region = lay_out(items, len(table))
            regions.append((column, item_ends.astype(np.uint32)))
            table += region + bytes(-len(region) & 7)
    ends, bodies = lay_out([row.body for row in rows], len(table))
    columns: list[tuple[ColumnId, ColumnArray]] = [
        (ColumnId.DELIVER_AT_MS, np.array([row.due_ms for row in rows], np.int64))
    ]
    if ColumnId.SEQUENCE in like:
        columns.append((ColumnId.SEQUENCE, np.array([row.sequence for row in rows], np.uint64)))
    if len(names) > 1:
        columns.append((ColumnId.SUBJECT, np.array([names.index(row.subject) for row in rows], np.uint32)))
    columns += regions
    columns.append((ColumnId.BODY_END, ends.astype(np.uint32)))
    if any(row.accepted_at_ms for row in rows):
        columns.append((ColumnId.ACCEPTED_AT_MS, np.array([row.accepted_at_ms for row in rows], np.int64)))
    if any(row.expires_at_ms for row in rows):
        columns.append((ColumnId.EXPIRES_AT_MS, np.array([row.expires_at_ms for row in rows], np.int64)))
    if any(row.left_out for row in rows):
        columns.append((ColumnId.BODY_LEFT_OUT, np.array([row.left_out for row in rows], np.uint32)))
    if ColumnId.CONTENT_HASH in like:
        columns.append((ColumnId.CONTENT_HASH, np.array([row.content_hash for row in rows], np.uint64)))
    heap = [table, bodies, bytes(-len(bodies) & 7)]
    if part is None:
        part = like.producer if like.kind is BatchKind.PRODUCER else None
        part = like.schedule if like.kind is BatchKind.SCHEDULE else part or like.dispatch
    return encode(like.kind, part, len(rows), columns, heap, len(names))


def _items(batch: Batch, column: ColumnId, heap: bytes) -> list[bytes]:
    starts, ends = batch.region(column)
    return [heap[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
