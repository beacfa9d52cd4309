"""Pull log of the realtime server: which consumer was given which messages, and what became of them
(docs/formats/pull.md).

Entries are applied in the order of the log, live and in recovery alike, so both end in the same state.

Messages that a group finished with may live on at their delay server (rule Q2). A *decision* concerns messages of one
group that one delay server had handed over. It is a control record, and becomes one batch of that delay server, under
the producer and the number that stand in it.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, cast

import msgpack

from delayd.batch.batch import Batch, encode_column
from delayd.batch.columns import ROWS_MAX, BatchKind, ColumnId
from delayd.errors import BatchMalformed
from delayd.log.control import GroupIdsSkipped

ENTRY = struct.Struct("<BxHIQQQIIq")
COVERED_MAX = (1 << 32) - 1  # Pull sequences of one entry, a u32.
# More groups than are made between a checkpoint, or a backup, and the loss of what came after it. An id is a u32, which
# has room for 2,000 such losses.
GROUP_IDS_LOST_MAX = 1 << 20
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


def skip_group_ids(now_ms: int) -> GroupIdsSkipped:
    """A record that leaves ids unused. How many depends on the clock: two restores of one copy go on at different
    ids.
    """
    return GroupIdsSkipped(GROUP_IDS_LOST_MAX + now_ms % GROUP_IDS_LOST_MAX)


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


class RetryRow(NamedTuple):
    """Neighbouring messages of one stored batch that live on in the same way."""

    incarnation: int  # The pull that gave them out has it.
    pull_first: int
    consume_first: int
    covered: int
    attempt: int  # That pull says how often this life of the message was handed to a handler.
    due_ms: int  # When it is due again; of a dead letter, until when it is kept.
    reason: str  # Why it is a dead letter; empty: it is none.
    error: str  # What its last handler said.


class GroupDecision(NamedTuple):
    """What one batch sends again."""

    producer: int
    number: int
    group_id: int
    origin: int  # The log_id of the delay server.
    at_ms: int
    rows: tuple[RetryRow, ...]

    @property
    def key(self) -> tuple[int, int]:
        """Its name."""
        return self.producer, self.number

    @property
    def messages(self) -> int:
        """How many messages."""
        return sum([row.covered for row in self.rows])

    @property
    def oldest(self) -> int:
        """The lowest consume sequence."""
        return min([row.consume_first for row in self.rows])


_U64_MAX, _INT_MAX, _U32_MAX = (1 << 64) - 1, (1 << 63) - 1, (1 << 32) - 1
_MOST = (_U64_MAX, _INT_MAX, _INT_MAX, _U32_MAX, ATTEMPT_MAX, _INT_MAX)


def encode_rows(rows: Sequence[RetryRow]) -> bytes:
    """The rows of a decision, as its record and a checkpoint keep them."""
    return cast(bytes, msgpack.packb(rows))


def decode_rows(data: bytes) -> tuple[RetryRow, ...]:
    """Read the rows of a decision.

    Raises:
        BatchMalformed: they are not such rows.
    """
    try:
        found = msgpack.unpackb(data)
    except ValueError as error:
        raise BatchMalformed(f"the rows of a retry can't be decoded: {error}") from error
    if not isinstance(found, list) or not found:
        raise BatchMalformed("a retry has no rows")
    return tuple([_row(row) for row in found])


def encode_void(ranges: Sequence[tuple[int, int]]) -> bytes:
    """The pull sequences [first, end) of a `GroupSetBack`."""
    return cast(bytes, msgpack.packb(ranges))


def decode_void(data: bytes) -> list[tuple[int, int]]:
    """Read the pull sequences of a `GroupSetBack`.

    Raises:
        BatchMalformed: they are no such ranges.
    """
    try:
        found = msgpack.unpackb(data)
    except ValueError as error:
        raise BatchMalformed(f"the pulls that a power cut made void can't be decoded: {error}") from error
    if not isinstance(found, list):
        raise BatchMalformed("the pulls that a power cut made void are no list")
    return [_void(each) for each in found]


def _void(each: object) -> tuple[int, int]:
    if not isinstance(each, list) or len(each) != 2 or not all(type(number) is int for number in each):
        raise BatchMalformed("what a power cut made void is no range of pulls")
    first, end = each
    if not 0 <= first < end <= _INT_MAX:
        raise BatchMalformed(f"a power cut made the pulls {first} to {end} void")
    return first, end


def _row(row: object) -> RetryRow:
    if not isinstance(row, list) or len(row) != len(RetryRow._fields):
        raise BatchMalformed("a row of a retry is no row")
    *numbers, reason, error = row
    sound = all(type(number) is int and 0 <= number <= most for number, most in zip(numbers, _MOST, strict=True))
    if not sound or not isinstance(reason, str) or not isinstance(error, str) or not numbers[3]:
        raise BatchMalformed(f"a row of a retry says {numbers}")
    return RetryRow._make(row)
