"""DISPATCH batches as a delay server would make them, and what a test reads back from an answer."""

from collections.abc import Sequence

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BatchKind, DispatchPart
from delayd.batch.content import content_hash
from delayd.hours import hour_of_ms
from tests import batches
from tests.batches import messages

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
    first = 1000 * batch_id if first_sequence is None else first_sequence
    return messages(
        bodies,
        due=[DUE_MS] * len(bodies),
        headers=headers or None,
        subjects=[subject.encode()],
        sequences=range(first, first + len(bodies)),
        ordering=ordering or None,
        kind=BatchKind.DISPATCH,
        part=DispatchPart(origin, epoch, batch_id, *w, claimed_at_ms, hour_of_ms(DUE_MS)),
    )


Row = tuple[int, int, bytes, bytes, int]
"""Sequence, due instant, headers, body, and the hash of its content; a hash of -1: the right one."""


def hashed_batch(
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
    """One batch of any rows, with hashes that are right or wrong; with ``tags`` every other row has one."""
    return messages(
        [row[3] for row in rows],
        due=[row[1] for row in rows],
        headers=[row[2] for row in rows] if headers else None,
        tags=[["even"][row[0] & 1 :] for row in rows] if tags else None,
        subjects=[subject],
        sequences=[row[0] for row in rows],
        hashes=[content_hash(subject, row[2], row[3]) if row[4] == -1 else row[4] for row in rows],
        kind=BatchKind.DISPATCH,
        part=DispatchPart(origin, 1, batch_id, *w, 5, hour),
    )


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
    return [each for batch in split(body) for each in batches.bodies_of(batch)]
