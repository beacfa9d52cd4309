"""DISPATCH batches as a delay server would make them, and what a test reads back from an answer."""

from collections.abc import Sequence

import numpy as np

from delayd.batch.batch import Batch, encode, encode_subject_table, lay_out, parse
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, DispatchPart
from delayd.hours import hour_of_ms

ORIGIN = 0xD31A
DUE_MS = 1_800_000_000_000


def dispatch_batch(
    batch_id: int,
    bodies: Sequence[bytes],
    *,
    subject: str = "orders",
    epoch: int = 1,
    w: tuple[int, int] = (0, 0),
    origin: int = ORIGIN,
    first_sequence: int | None = None,
    headers: Sequence[bytes] = (),
    claimed_at_ms: int = DUE_MS + 1,
    ordering: Sequence[int] = (),
) -> bytes:
    """One batch; sequences count up from ``first_sequence``, by default 1,000 times the batch id. ``ordering`` has the
    hashes of ordering keys.
    """
    table = encode_subject_table([subject.encode()])
    header_ends, packed = lay_out(headers, len(table))
    packed += bytes(-len(packed) & 7)
    ends, heap = lay_out(bodies, len(table) + len(packed))
    first = 1000 * batch_id if first_sequence is None else first_sequence
    columns: list[tuple[ColumnId, ColumnArray]] = [
        (ColumnId.DELIVER_AT_MS, np.full(len(bodies), DUE_MS, np.int64)),
        (ColumnId.SEQUENCE, np.arange(first, first + len(bodies), dtype=np.uint64)),
        *([(ColumnId.HEADERS_END, header_ends.astype(np.uint32))] if headers else []),
        (ColumnId.BODY_END, ends.astype(np.uint32)),
        *([(ColumnId.ORDERING_KEY_HASH, np.array(ordering, np.uint64))] if ordering else []),
    ]
    part = DispatchPart(origin, epoch, batch_id, *w, claimed_at_ms, hour_of_ms(DUE_MS))
    return encode(BatchKind.DISPATCH, part, len(bodies), columns, [table, packed, heap, bytes(-len(heap) & 7)], 1)


def split(body: memoryview | bytes) -> list[Batch]:
    """The batches of a body, verified."""
    found: list[Batch] = []
    position = 0
    while position < len(body):
        batch = parse(body, position)
        batch.verify()
        found.append(batch)
        position += batch.total_bytes
    return found


def bodies_of(body: memoryview | bytes) -> list[bytes]:
    """All message bodies of a body, in order."""
    found: list[bytes] = []
    for batch in split(body):
        starts, ends = batch.region(ColumnId.BODY_END)
        found.extend(bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
    return found
