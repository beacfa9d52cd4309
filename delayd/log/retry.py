"""Retries in the pull log: messages that a group finished with and that live on at their delay server (rule Q2,
docs/formats/pull.md, Retries).

A *decision* concerns messages of one group that one delay server had handed over. It is a control record, and becomes
one batch of that delay server, under the producer and the number that stand in it.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgpack

from delayd.errors import BatchMalformed
from delayd.log.pull import ATTEMPT_MAX


class RetryRow(NamedTuple):
    """Neighbouring messages of one stored batch that live on in the same way."""

    incarnation: int  # Of the pull that gave them out.
    pull_first: int
    consume_first: int
    covered: int
    attempt: int  # Of that pull: how often this life of the message was handed to a handler.
    due_ms: int  # When it is due again; of a dead letter, until when it is kept.
    reason: str  # Why it is a dead letter; empty: it is none.
    error: str  # What its last handler said.


class Decision(NamedTuple):
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


def _row(row: object) -> RetryRow:
    if not isinstance(row, list) or len(row) != len(RetryRow._fields):
        raise BatchMalformed("a row of a retry is no row")
    *numbers, reason, error = row
    sound = all(type(number) is int and 0 <= number <= most for number, most in zip(numbers, _MOST, strict=True))
    if not sound or not isinstance(reason, str) or not isinstance(error, str) or not numbers[3]:
        raise BatchMalformed(f"a row of a retry says {numbers}")
    return RetryRow._make(row)
