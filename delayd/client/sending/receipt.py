"""What a producer gets back: that its messages are kept, where, and when they are due.

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
    """A delay server's word that one batch is durable; its row i has the sequence ``base_sequence + i``."""

    log_id: LogId
    base_sequence: int
    row_count: int
    accepted_at_ms: int
    duplicate: bool


class Receipt(NamedTuple):
    """One message is kept; (log_id, sequence) names it for ever."""

    log_id: LogId
    sequence: int
    deliver_at_ms: int
    accepted_at_ms: int
    was_due: bool  # It was due when it was accepted, so it is delivered at once.
    duplicate: bool  # The server knew the batch from an earlier try and has kept it once.

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
    """Many messages are kept: columns, one item for each accepted row, in the order in which they were given."""

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
        """int64[n], rising: which of the given rows these are; all of them unless some were refused."""
        return np.sort(self._given())

    @property
    def log_ids(self) -> NDArray[np.uint64]:
        """uint64[n]: the delay server's log that holds each."""
        return self._ordered(
            [_NO_UINT64S, *(np.full(len(part.rows), part.accepted.log_id, np.uint64) for part in self.parts)]
        )

    @property
    def sequences(self) -> NDArray[np.uint64]:
        """uint64[n]: the number of each within its log."""
        return self._ordered([_NO_UINT64S, *map(_sequences, self.parts)])

    @property
    def deliver_at_ms(self) -> Int64s:
        """int64[n]: when each is due."""
        return self._ordered([_NO_INT64S, *(part.deliver_at_ms for part in self.parts)])

    @property
    def accepted_at_ms(self) -> Int64s:
        """int64[n]: when each was accepted, by the delay server's clock."""
        return self._ordered(
            [_NO_INT64S, *(np.full(len(part.rows), part.accepted.accepted_at_ms, np.int64) for part in self.parts)]
        )

    @property
    def was_due(self) -> NDArray[np.bool_]:
        """bool[n]: due when it was accepted, so delivered at once."""
        return self.deliver_at_ms <= self.accepted_at_ms

    @property
    def duplicates(self) -> int:
        """How many rows a server knew from an earlier try and has kept once."""
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
    """Some messages of a `send_batch` are not known to be kept; `receipt` says which are, `failures` why others not."""

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
