"""Receipt: tells the caller of a producer that its messages are kept, where, and when they are due.

Invariant: a receipt exists only for messages that a delay server has made durable (rule L2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import count, repeat
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.client.instants import utc
from delayd.errors import DelaydError
from delayd.log_id import LogId

Column = TypeVar("Column", bound=np.generic)

_NO_INT64S: Int64s = np.empty(0, np.int64)
_NO_UINT64S: NDArray[np.uint64] = np.empty(0, np.uint64)


class Accepted(NamedTuple):
    """A delay server's answer that one batch is durable; its row i has the sequence ``base_sequence + i``."""

    log_id: LogId
    base_sequence: int
    row_count: int
    accepted_at_ms: int
    duplicate: bool


class Receipt(NamedTuple):
    """Says that one message is kept. No other message ever has the same (log_id, sequence).

    Example::

        receipt = producer.send("orders.cancel", b"42", delay=timedelta(minutes=30))
        print("kept as", receipt.sequence, "of log", receipt.log_id, "due at", receipt.deliver_at)

    Fields:
        log_id: names the delay server whose log holds the message.
        sequence: the message's number in that log.
        deliver_at_ms: when the message is due, in milliseconds since the epoch.
        accepted_at_ms: when the delay server made the message durable, by that server's clock.
        was_due: whether the message was due already when it was accepted; then it is delivered at once.
        duplicate: whether the server knew the message from an earlier try. It has kept the message once.
    """

    log_id: LogId
    sequence: int
    deliver_at_ms: int
    accepted_at_ms: int
    was_due: bool
    duplicate: bool

    @property
    def deliver_at(self) -> datetime:
        """When it is due, in UTC."""
        return utc(self.deliver_at_ms)

    @property
    def accepted_at(self) -> datetime:
        """When the delay server made it durable, in UTC and by that server's clock."""
        return utc(self.accepted_at_ms)


_new_receipt = partial(tuple.__new__, Receipt)


def receipts(accepted: Accepted, deliver_at_ms: Sequence[int]) -> Iterator[Receipt]:
    """The receipt of each single send of a batch, made without a Python call for each."""
    log_id, base_sequence, _, at_ms, duplicate = accepted
    was_due = [due <= at_ms for due in deliver_at_ms]
    columns = zip(repeat(log_id), count(base_sequence), deliver_at_ms, repeat(at_ms), was_due, repeat(duplicate))
    return map(_new_receipt, columns)


class ReceiptPart(NamedTuple):
    """Rows of one `send_batch` that one server accepted together."""

    rows: Int64s  # Rising; row ``rows[i]`` has the sequence ``accepted.base_sequence + i``.
    deliver_at_ms: Int64s
    accepted: Accepted


class BatchReceipt:
    """Says that many messages are kept. Each column has one item for each accepted message, in the order given.

    Example::

        receipt = producer.send_batch("orders.cancel", [b"42", b"43"], delay=timedelta(minutes=30))
        print(len(receipt), "messages are kept as", receipt.sequences)
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[ReceiptPart]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def __repr__(self) -> str:
        batches = "1 batch" if len(self.parts) == 1 else f"{len(self.parts)} batches"
        return f"BatchReceipt({len(self)} messages in {batches})"

    @property
    def rows(self) -> Int64s:
        """int64[n], rising: positions of the accepted messages in `send_batch`; 0 to n - 1 when none was refused."""
        return np.sort(self._given())

    @property
    def log_ids(self) -> NDArray[np.uint64]:
        """uint64[n]: the log_id of the delay server that holds each message."""
        return self._ordered(
            [_NO_UINT64S, *(np.full(len(part.rows), part.accepted.log_id, np.uint64) for part in self.parts)]
        )

    @property
    def sequences(self) -> NDArray[np.uint64]:
        """uint64[n]: the number of each message in its log."""
        return self._ordered([_NO_UINT64S, *map(_sequences, self.parts)])

    @property
    def deliver_at_ms(self) -> Int64s:
        """int64[n]: when each message is due, in milliseconds since the epoch."""
        return self._ordered([_NO_INT64S, *(part.deliver_at_ms for part in self.parts)])

    @property
    def accepted_at_ms(self) -> Int64s:
        """int64[n]: when each message was accepted, by the delay server's clock."""
        return self._ordered(
            [_NO_INT64S, *(np.full(len(part.rows), part.accepted.accepted_at_ms, np.int64) for part in self.parts)]
        )

    @property
    def was_due(self) -> NDArray[np.bool_]:
        """bool[n]: whether each message was due already when it was accepted; then it is delivered at once."""
        return self.deliver_at_ms <= self.accepted_at_ms

    @property
    def duplicates(self) -> int:
        """How many messages a server knew from an earlier try. It has kept each of them once."""
        return sum(len(part.rows) for part in self.parts if part.accepted.duplicate)

    def _given(self) -> Int64s:
        return np.concatenate([_NO_INT64S, *(part.rows for part in self.parts)])

    def _ordered(self, columns: list[NDArray[Column]]) -> NDArray[Column]:
        return np.concatenate(columns)[np.argsort(self._given(), kind="stable")]


class Failure(NamedTuple):
    """Rows of one `send_batch` that share an error."""

    rows: Int64s
    error: DelaydError


class BatchFailed(DelaydError):
    """Some messages of a `send_batch` failed: it is not known that they are kept.

    Example::

        try:
            receipt = producer.send_batch("orders.cancel", bodies, due_ms)
        except delayd.BatchFailed as failed:
            print(len(failed.receipt), "messages are kept")
            for failure in failed.failures:
                print("messages", failure.rows, "failed:", failure.error)

    Attributes:
        receipt: the `BatchReceipt` of the messages that are kept.
        failures: each has ``rows`` (positions in `send_batch`) and the ``error`` that these messages share.
    """

    receipt = BatchReceipt(())
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of(cls, receipt: BatchReceipt, failures: Sequence[Failure]) -> BatchFailed:
        """The error of a batch with ``failures``."""
        failed = sum(len(failure.rows) for failure in failures)
        error = cls(
            f"{failed} of {failed + len(receipt)} messages failed, the first with: {failures[0].error.message}",
            accepted=len(receipt),
            failed=failed,
        )
        error.receipt = receipt
        error.failures = tuple(failures)
        error.__cause__ = failures[0].error
        return error


def _sequences(part: ReceiptPart) -> NDArray[np.uint64]:
    return np.arange(len(part.rows), dtype=np.uint64) + np.uint64(part.accepted.base_sequence)
