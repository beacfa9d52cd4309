"""Dispatch batches of any rows, with hashes that are right or wrong, for the tests of tallies."""

from collections.abc import Sequence

import numpy as np

from delayd.batch.batch import encode, encode_subject_table, lay_out
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, DispatchPart
from delayd.batch.content import content_hash
from delayd.batch.labels import bloom_of, encode_tags

Row = tuple[int, int, bytes, bytes, int]  # Sequence, due, headers, body, hash; a hash of -1: the right one.


def batch(
    subject: bytes,
    rows: Sequence[Row],
    origin: int = 1,
    hour: int = 500_000,
    *,
    headers: bool = False,
    tags: bool = False,
    batch_id: int = 1,
    w: tuple[int, int] = (0, 0),
) -> bytes:
    table = encode_subject_table([subject])
    # Every other row has a tag.
    tagged = [["even"][row[0] & 1 :] for row in rows]
    tags_end, tag_region = lay_out(list(map(encode_tags, tagged)), len(table))
    begin = len(table) + (len(tag_region) if tags else 0)
    headers_end, region = lay_out([row[2] for row in rows], begin)
    region += bytes(-len(region) & 7)
    ends, bodies = lay_out([row[3] for row in rows], begin + (len(region) if headers else 0))
    hashes = [content_hash(subject, row[2], row[3]) if row[4] == -1 else row[4] for row in rows]
    columns: list[tuple[ColumnId, ColumnArray]] = [
        (ColumnId.DELIVER_AT_MS, np.array([row[1] for row in rows], np.int64)),
        (ColumnId.SEQUENCE, np.array([row[0] for row in rows], np.uint64)),
        *([(ColumnId.TAG_BLOOM, np.array(list(map(bloom_of, tagged)), np.uint64))] if tags else []),
        *([(ColumnId.TAGS_END, tags_end.astype(np.uint32))] if tags else []),
        *([(ColumnId.HEADERS_END, headers_end.astype(np.uint32))] if headers else []),
        (ColumnId.BODY_END, ends.astype(np.uint32)),
        (ColumnId.CONTENT_HASH, np.array(hashes, np.uint64)),
    ]
    heap = [table, *([tag_region] if tags else []), *([region] if headers else []), bodies, bytes(-len(bodies) & 7)]
    return encode(BatchKind.DISPATCH, DispatchPart(origin, 1, batch_id, *w, 5, hour), len(rows), columns, heap, 1)
