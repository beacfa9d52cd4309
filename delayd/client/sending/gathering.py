"""Single sends, of any subjects, that share a batch.

Invariant: columns while they are gathered, so that a send costs a few appends and leaves no object behind that the
garbage collector would visit; arrays are made once, when the batch is bound to a server.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np

from delayd.batch import ProducerPart
from delayd.client.instants import ServerClock
from delayd.client.limits import NO_HEADERS, lengths_of
from delayd.client.sending.arguments import Single
from delayd.client.sending.packing import pack_one, pack_rows
from delayd.client.sending.receipt import Accepted, Receipt, receipts
from delayd.client.sending.unsent import Waiter
from delayd.errors import DelaydError

ROW_BYTES = 64  # What a waiting row holds besides its body: references and columns.


class Gathering:
    """See UnsentRows; each row has a waiter of its own."""

    __slots__ = (
        "_bodies",
        "_deliver",
        "_deliver_at_ms",
        "_headers",
        "_relative",
        "_subjects",
        "held_bytes",
        "waiters",
    )

    def __init__(self) -> None:
        self.waiters: list[Waiter[Receipt]] = []
        self.held_bytes = 0
        self._subjects: list[str] = []
        self._bodies: list[bytes] = []
        self._deliver: list[int] = []
        self._relative: list[int] = []  # Rows whose `_deliver` is in us on the monotonic clock.
        self._headers: dict[int, bytes] = {}  # By row; most sends have none.
        self._deliver_at_ms: list[int] = []

    @property
    def count(self) -> int:
        """Rows gathered."""
        return len(self.waiters)

    def add(self, row: Single, byte_count: int, waiter: Waiter[Receipt]) -> None:
        """Take one row, which holds so many bytes."""
        subject, body, when, relative, headers = row
        if relative:
            self._relative.append(len(self.waiters))
        if headers:
            self._headers[len(self.waiters)] = headers
        self._subjects.append(subject)
        self._bodies.append(body)
        self._deliver.append(when)
        self.waiters.append(waiter)
        self.held_bytes += byte_count

    def encode(self, part: ProducerPart, clock: ServerClock) -> Sequence[bytes]:
        """See UnsentRows."""
        subjects, headers = self._subjects, self._headers
        if len(subjects) == 1 and not headers:
            due = clock.latest_ms(self._deliver[0]) if self._relative else self._deliver[0]
            self._deliver_at_ms = [due]
            return (pack_one(part, due, subjects[0].encode("ascii"), self._bodies[0]),)
        deliver_at_ms = np.array(self._deliver, np.int64)
        self._deliver_at_ms = self._deliver
        if self._relative:
            deliver_at_ms[self._relative] = clock.latest_ms_column(deliver_at_ms[self._relative])
            self._deliver_at_ms = deliver_at_ms.tolist()
        subject_of = None
        names = subjects[:1]
        if subjects.count(names[0]) < len(subjects):
            index = {subject: at for at, subject in enumerate(dict.fromkeys(subjects))}
            names = list(index)
            subject_of = np.array([index[subject] for subject in subjects], np.uint32)
        packed = [headers.get(at, NO_HEADERS) for at in range(len(subjects))] if headers else None
        encoded = [name.encode("ascii") for name in names]
        return pack_rows(part, deliver_at_ms, encoded, subject_of, packed, self._bodies, lengths_of(self._bodies))

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        for waiter, receipt in zip(self.waiters, receipts(accepted, self._deliver_at_ms), strict=True):
            # A caller that was cancelled has stopped waiting; its message is kept all the same.
            if not waiter.done():
                waiter.set_result(receipt)

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        for waiter in self.waiters:
            if not waiter.done():
                # A copy for each: an exception that is raised in many places collects all of their tracebacks.
                own = copy.copy(error)
                own.__cause__ = error.__cause__
                waiter.set_exception(own)

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named, others = type(self)(), type(self)()
        chosen, relative = set(rows), set(self._relative)
        columns = zip(self._subjects, self._bodies, self._deliver, self.waiters, strict=True)
        for at, (subject, body, when, waiter) in enumerate(columns):
            row = (subject, body, when, at in relative, self._headers.get(at, NO_HEADERS))
            (named if at in chosen else others).add(row, row_bytes(row), waiter)
        return named, others


def row_bytes(row: Single) -> int:
    """What a row holds in memory while it waits."""
    return len(row[1]) + len(row[4]) + ROW_BYTES
