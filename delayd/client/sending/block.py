"""Block: a piece of one `send_batch`, as columns, without a Python object for each message.

Invariant: errors and receipts name rows by their place in the caller's columns, also when a piece was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from delayd.batch import ColumnId, Int64s, ProducerPart
from delayd.batch import Columns as PackedColumns
from delayd.client.instants import ServerClock
from delayd.client.limits import lengths_of
from delayd.client.sending.options import Columns
from delayd.client.sending.packing import Items, pack_rows
from delayd.client.sending.receipt import Accepted, BatchFailed, BatchReceipt, Failure, ReceiptPart
from delayd.client.sending.unsent import NO_KEYED_ROWS, KeyedRows, Waiter
from delayd.errors import DelaydError


class Progress:
    """The results so far of the rows of one `send_batch`."""

    __slots__ = ("_failures", "_parts", "_remaining", "_waiter")

    def __init__(self, count: int, waiter: Waiter[BatchReceipt]) -> None:
        self._remaining = count
        self._waiter = waiter
        self._parts: list[ReceiptPart] = []
        self._failures: list[Failure] = []

    def accept(self, part: ReceiptPart) -> None:
        """Note that these rows are kept."""
        self._parts.append(part)
        self._finish(len(part.rows))

    def fail(self, rows: Int64s, error: DelaydError) -> None:
        """Note that these rows failed."""
        self._failures.append(Failure(rows, error))
        self._finish(len(rows))

    def _finish(self, count: int) -> None:
        self._remaining -= count
        assert self._remaining >= 0, "a row ended twice"
        if self._remaining or self._waiter.done():
            return
        receipt = BatchReceipt(self._parts)
        if not self._failures:
            self._waiter.set_result(receipt)
        elif len(self._failures) == 1 and not self._parts:
            # All rows failed together, so the error is the same as that of a single send.
            self._waiter.set_exception(self._failures[0].error)
        else:
            self._waiter.set_exception(BatchFailed.of(receipt, self._failures))


class Block:
    """See UnsentRows; all of one subject."""

    __slots__ = ("_columns", "_deliver_at_ms", "_progress", "_rows")

    def __init__(self, progress: Progress, rows: Int64s, columns: Columns) -> None:
        self._progress = progress
        self._rows = rows  # Their numbers in the call.
        self._columns = columns
        self._deliver_at_ms = columns.deliver

    @classmethod
    def cut(cls, progress: Progress, columns: Columns, run: range) -> Self:
        """The rows ``run`` of a call."""
        return cls(progress, np.arange(run.start, run.stop), columns.cut(run))

    @property
    def count(self) -> int:
        """See UnsentRows."""
        return len(self._rows)

    @property
    def held_bytes(self) -> int:
        """See UnsentRows; 0, because the caller holds the bodies and waits with them."""
        return 0

    def encode(self, part: ProducerPart, clock: ServerClock) -> Sequence[bytes]:
        """See UnsentRows."""
        columns = self._columns
        if columns.relative:
            self._deliver_at_ms = clock.latest_ms_column(columns.deliver)
        regions = {ColumnId.BODY_END: Items(columns.bodies, columns.body_bytes)}
        if columns.headers is not None:
            regions[ColumnId.HEADERS_END] = Items(columns.headers, lengths_of(columns.headers))
        packed: dict[ColumnId, PackedColumns] = {ColumnId.DELIVER_AT_MS: self._deliver_at_ms}
        if columns.labels is not None:
            columns.labels.add_to(packed, regions)
        return pack_rows(part, [columns.subject], packed, regions)

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        self._progress.accept(ReceiptPart(self._rows, self._deliver_at_ms, accepted))

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        self._progress.fail(self._rows, error)

    def keyed_rows(self) -> KeyedRows:
        """See UnsentRows."""
        labels = self._columns.labels
        rows = [] if labels is None else labels.keyed_rows()
        if labels is None or not rows:
            return NO_KEYED_ROWS
        return KeyedRows(rows, [self._columns.subject] * len(rows), [labels.keys[row] for row in rows])

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named = np.zeros(len(self._rows), bool)
        named[np.array(rows, np.int64)] = True
        return self._pick(np.flatnonzero(named)), self._pick(np.flatnonzero(~named))

    def _pick(self, rows: Int64s) -> Self:
        return type(self)(self._progress, self._rows[rows], self._columns.pick(rows))
