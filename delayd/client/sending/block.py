"""Block: a piece of one `send_batch`, as columns, without a Python object for each message.

Invariant: errors and receipts name rows by their place in the caller's columns, also when a piece was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from delayd.batch import Int64s, ProducerPart
from delayd.client.instants import ServerClock
from delayd.client.sending.arguments import Columns
from delayd.client.sending.packing import pack_rows
from delayd.client.sending.receipt import Accepted, BatchFailed, BatchReceipt, Failure, ReceiptPart
from delayd.client.sending.unsent import Waiter
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

    __slots__ = (
        "_bodies",
        "_body_bytes",
        "_deliver",
        "_deliver_at_ms",
        "_headers",
        "_progress",
        "_relative",
        "_rows",
        "_subject",
    )

    def __init__(
        self,
        progress: Progress,
        rows: Int64s,
        subject: bytes,
        bodies: Sequence[bytes],
        body_bytes: Int64s,
        deliver: Int64s,
        relative: bool,
        headers: Sequence[bytes] | None,
    ) -> None:
        self._progress = progress
        self._rows = rows
        self._subject = subject
        self._bodies = bodies
        self._body_bytes = body_bytes
        self._deliver = deliver  # ms since the epoch, or monotonic us if `relative`.
        self._relative = relative
        self._headers = headers
        self._deliver_at_ms = deliver

    @classmethod
    def cut(cls, progress: Progress, columns: Columns, run: range) -> Self:
        """The rows ``run`` of a call."""
        piece = slice(run.start, run.stop)
        headers = None if columns.headers is None else columns.headers[piece]
        rows = np.arange(run.start, run.stop)
        deliver = columns.deliver[piece]
        bodies, body_bytes = columns.bodies[piece], columns.body_bytes[piece]
        return cls(progress, rows, columns.subject, bodies, body_bytes, deliver, columns.relative, headers)

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
        self._deliver_at_ms = clock.latest_ms_column(self._deliver) if self._relative else self._deliver
        due, bodies = self._deliver_at_ms, self._bodies
        return pack_rows(part, due, [self._subject], None, self._headers, bodies, self._body_bytes)

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        self._progress.accept(ReceiptPart(self._rows, self._deliver_at_ms, accepted))

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        self._progress.fail(self._rows, error)

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named = np.zeros(len(self._rows), bool)
        named[np.array(rows, np.int64)] = True
        return self._pick(np.flatnonzero(named)), self._pick(np.flatnonzero(~named))

    def _pick(self, rows: Int64s) -> Self:
        chosen = rows.tolist()
        headers = self._headers
        return type(self)(
            self._progress,
            self._rows[rows],
            self._subject,
            [self._bodies[row] for row in chosen],
            self._body_bytes[rows],
            self._deliver[rows],
            self._relative,
            None if headers is None else [headers[row] for row in chosen],
        )
