"""Pull log of the realtime server: which consumer was given which messages, and what became of them
(docs/formats/pull.md).

Entries are applied in the order of the log, live and in recovery alike, so both end in the same state.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from delayd.batch.batch import Batch, encode_column
from delayd.batch.columns import ROWS_MAX, BatchKind, ColumnId
from delayd.errors import BatchMalformed

ENTRY = struct.Struct("<BxHIQQQIIq")
COVERED_MAX = (1 << 32) - 1  # Pull sequences of one entry, a u32.
ATTEMPT_MAX = 65_535  # The attempt of an entry is a u16; it stays at its highest value.


class PullOp(IntEnum):
    """The operation of an entry; a new group is a control record. RETURNED is a NACK of messages that were given to no
    handler.
    """

    PULL = 1
    ACK = 2
    NACK = 3
    LAPSED = 4
    RETURNED = 5


class PullEntry(NamedTuple):
    """One row of the pull log, which covers ``covered`` pull sequences; only a PULL has a consume sequence and a
    lease.
    """

    op: PullOp
    attempt: int
    group_id: int
    incarnation: int
    pull_first: int
    consume_first: int
    covered: int
    at_ms: int
    lease_ms: int = 0


def encode_entries(entries: Sequence[PullEntry]) -> list[bytes]:
    """Make PULL batches of entries, in order."""
    batches: list[bytes] = []
    for start in range(0, len(entries), ROWS_MAX):
        part = entries[start : start + ROWS_MAX]
        packed = b"".join(
            [
                ENTRY.pack(op, attempt, group_id, incarnation, pull_first, consume_first, covered, lease_ms, at_ms)
                for op, attempt, group_id, incarnation, pull_first, consume_first, covered, at_ms, lease_ms in part
            ]
        )
        batches.append(encode_column(BatchKind.PULL, ColumnId.ENTRY, packed, len(part)))
    return batches


def decode_entries(batch: Batch) -> list[PullEntry]:
    """Read the entries of a verified PULL batch.

    Raises:
        BatchMalformed: an entry has an operation that this version does not know.
    """
    start = batch.offsets[ColumnId.ENTRY]
    rows = ENTRY.iter_unpack(batch.buffer[start : start + ENTRY.size * batch.count])
    try:
        return [
            PullEntry(PullOp(op), attempt, group_id, incarnation, pull_first, consume_first, covered, at_ms, lease_ms)
            for op, attempt, group_id, incarnation, pull_first, consume_first, covered, lease_ms, at_ms in rows
        ]
    except ValueError as error:
        raise BatchMalformed(f"an entry of the pull log can't be read: {error}") from error
