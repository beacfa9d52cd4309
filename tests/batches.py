"""Batches that tests are about, made the way a client, a server or an adversary would make them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from crc32c import crc32c

from delayd.batch.batch import Batch, encode, encode_subject_table, lay_out, parse
from delayd.batch.columns import HEADER, BatchKind, Buffer, ColumnArray, ColumnId, KindPart, ProducerPart
from delayd.batch.content import content_hash
from delayd.batch.labels import bloom_of, decode_tags, encode_tags

SUBJECT = b"orders.eu"
PRODUCER = ProducerPart(1, 2, 0)


def messages(
    bodies: Sequence[bytes],
    *,
    due: Sequence[int] | None = None,
    headers: Sequence[bytes] | None = None,
    keys: Sequence[bytes] | None = None,
    flags: Sequence[int] | None = None,
    tags: Sequence[Sequence[str]] | None = None,
    expires: Sequence[int] | None = None,
    subjects: Sequence[bytes] = (SUBJECT,),
    subject_of: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
    ordering: Sequence[int] | None = None,
    hashes: Sequence[int] | None = None,
    kind: BatchKind = BatchKind.PRODUCER,
    part: KindPart = PRODUCER,
) -> bytes:
    """Encode one batch of messages; ``ordering`` has the hashes of ordering keys, ``hashes`` those of contents."""
    heap: list[Buffer] = [encode_subject_table(subjects)]
    begin = len(heap[0])
    columns: list[tuple[ColumnId, ColumnArray]] = [
        (ColumnId.DELIVER_AT_MS, np.array(due if due is not None else range(len(bodies)), np.int64))
    ]
    if sequences is not None:
        columns.append((ColumnId.SEQUENCE, np.array(sequences, np.uint64)))
    if subject_of is not None:
        columns.append((ColumnId.SUBJECT, np.array(subject_of, np.uint32)))
    if tags is not None:
        columns.append((ColumnId.TAG_BLOOM, np.array([bloom_of(row) for row in tags], np.uint64)))
    if expires is not None:
        columns.append((ColumnId.EXPIRES_AT_MS, np.array(expires, np.int64)))
    if flags is not None:
        columns.append((ColumnId.ROW_FLAGS, np.array(flags, np.uint16)))
    for column, items in (
        (ColumnId.KEY_END, keys),
        (ColumnId.TAGS_END, None if tags is None else [encode_tags(row) for row in tags]),
        (ColumnId.HEADERS_END, headers),
        (ColumnId.BODY_END, bodies),
    ):
        if items is not None:
            ends, data = lay_out(items, begin)
            columns.append((column, ends))
            heap.append(data)
            begin += len(data)
    if ordering is not None:
        columns.append((ColumnId.ORDERING_KEY_HASH, np.array(ordering, np.uint64)))
    if kind is BatchKind.SCHEDULE:
        rows = range(len(bodies))
        names = [subjects[0 if subject_of is None else subject_of[row]] for row in rows]
        hashes = [content_hash(names[row], b"" if headers is None else headers[row], bodies[row]) for row in rows]
    if hashes is not None:
        columns.append((ColumnId.CONTENT_HASH, np.array(hashes, np.uint64)))
    columns.sort(key=itemgetter(0))
    return encode(kind, part, len(bodies), columns, heap, len(subjects))


def tags_of(batch: Batch) -> list[tuple[str, ...]]:
    """The tags, one by one."""
    if ColumnId.TAGS_END not in batch:
        return [()] * batch.count
    bounds = zip(*(side.tolist() for side in batch.region(ColumnId.TAGS_END)), strict=True)
    return [decode_tags(bytes(batch.heap[start:end])) for start, end in bounds]


def with_true_checksums(data: Buffer) -> bytes:
    """Repair the three checksums of a batch that was tampered with, as far as its header makes sense."""
    changed = bytearray(data)
    fields = HEADER.unpack_from(changed)
    total_bytes, heap_offset, kind_bytes = fields[4], fields[6], fields[8]
    changed[28:32] = crc32c(changed[HEADER.size + kind_bytes : heap_offset]).to_bytes(4, "little")
    changed[32:36] = crc32c(changed[heap_offset:total_bytes]).to_bytes(4, "little")
    kind_part = changed[HEADER.size : HEADER.size + kind_bytes]
    changed[36:40] = crc32c(kind_part, crc32c(changed[:36])).to_bytes(4, "little")
    return bytes(changed)


def bodies_of(batch: Batch) -> list[bytes]:
    """The bodies, one by one, without the code under test for many rows."""
    starts, ends = batch.region(ColumnId.BODY_END)
    return [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def parsed(data: bytes) -> Batch:
    """Parse and verify."""
    batch = parse(data)
    batch.verify()
    return batch
