"""Gathering: single sends, of any subjects, that share a batch.

Invariant: a send costs two appends and leaves no object that the garbage collector would visit again and again: a row
is a tuple of plain values, which the collector stops tracking. Columns are made once, when the batch is bound to a
server.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np

from delayd.batch import ColumnId, Columns, ProducerPart
from delayd.client.instants import ServerClock
from delayd.client.limits import lengths_of
from delayd.client.sending.options import NO_LABEL, Labels, Single
from delayd.client.sending.packing import Items, pack_rows
from delayd.client.sending.receipt import Accepted, Receipt, receipts
from delayd.client.sending.unheard import Unheard
from delayd.client.sending.unsent import NO_KEYED_ROWS, KeyedRows, Waiter
from delayd.encode import encode_single
from delayd.errors import DelaydError

LABEL_BYTES = 160  # A label holds this much besides the bytes of its key and tags.
ROW_BYTES = 168  # A waiting row holds this much besides its body: the tuple, its number, and two references.


class Gathering:
    """See UnsentRows; each row has a waiter of its own."""

    __slots__ = ("_deliver_at_ms", "_unheard", "held_bytes", "rows", "waiters")

    def __init__(self, unheard: Unheard | None = None) -> None:
        self._unheard = Unheard() if unheard is None else unheard
        self.rows: list[Single] = []
        self.waiters: list[Waiter[Receipt]] = []
        self.held_bytes = 0
        self._deliver_at_ms: list[int] | tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Rows gathered."""
        return len(self.waiters)

    def add(self, row: Single, byte_count: int, waiter: Waiter[Receipt]) -> None:
        """Take one row, which holds ``byte_count`` bytes; the outbox does the same without this call."""
        self.rows.append(row)
        self.waiters.append(waiter)
        self.held_bytes += byte_count

    def encode(self, part: ProducerPart, clock: ServerClock) -> Sequence[bytes]:
        """See UnsentRows."""
        rows = self.rows
        if len(rows) == 1 and not rows[0][4] and rows[0][5] is None:
            subject, body, when, is_relative, _, _ = rows[0]
            due = clock.latest_ms(when) if is_relative else when
            self._deliver_at_ms = (due,)
            return (encode_single(part, due, subject.encode("ascii"), body),)
        subjects, bodies, deliver, are_relative, headers, labels = zip(*rows, strict=True)
        deliver_at_ms = np.array(deliver, np.int64)
        self._deliver_at_ms = deliver
        if any(are_relative):
            relative = np.array(are_relative, np.bool_)
            deliver_at_ms[relative] = clock.latest_ms_column(deliver_at_ms[relative])
            self._deliver_at_ms = deliver_at_ms.tolist()
        columns: dict[ColumnId, Columns] = {ColumnId.DELIVER_AT_MS: deliver_at_ms}
        names: Sequence[str] = subjects[:1]
        if subjects.count(names[0]) < len(subjects):
            index = {subject: at for at, subject in enumerate(dict.fromkeys(subjects))}
            names = list(index)
            columns[ColumnId.SUBJECT] = np.array([index[subject] for subject in subjects], np.uint32)
        regions = {ColumnId.BODY_END: Items(bodies, lengths_of(bodies))}
        if any(headers):
            regions[ColumnId.HEADERS_END] = Items(headers, lengths_of(headers))
        if any(labels):
            Labels(*zip(*(label or NO_LABEL for label in labels), strict=True)).add_to(columns, regions)
        return pack_rows(part, [name.encode("ascii") for name in names], columns, regions)

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        given = receipts(accepted, self._deliver_at_ms)
        for waiter, row, receipt in zip(self.waiters, self.rows, given, strict=True):
            # A cancelled caller has stopped waiting; its message is kept all the same.
            if not waiter.done():
                if isinstance(receipt, DelaydError):
                    self._fail(waiter, _named(receipt, row))
                else:
                    waiter.set_result(receipt)

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        for waiter in self.waiters:
            if not waiter.done():
                # Each waiter gets a copy, because an exception that is raised in many places collects all of their
                # tracebacks.
                own = copy.copy(error)
                own.__cause__ = error.__cause__
                self._fail(waiter, own)

    def _fail(self, waiter: Waiter[Receipt], error: DelaydError) -> None:
        waiter.set_exception(error)
        self._unheard.add(waiter)

    def keyed_rows(self) -> KeyedRows:
        """See UnsentRows."""
        keyed = [(at, row[0].encode("ascii"), row[5].key) for at, row in enumerate(self.rows) if row[5] and row[5].key]
        return KeyedRows(*map(list, zip(*keyed, strict=True))) if keyed else NO_KEYED_ROWS

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named, others = type(self)(self._unheard), type(self)(self._unheard)
        chosen = set(rows)
        for at, (row, waiter) in enumerate(zip(self.rows, self.waiters, strict=True)):
            (named if at in chosen else others).add(row, row_bytes(row), waiter)
        return named, others


def _named(error: DelaydError, row: Single) -> DelaydError:
    """The error of a row that met another one by its key, with the key and the subject in its text."""
    key = "" if row[5] is None else row[5].key.decode()
    text = f"{row[0]}, key {key!r}: {error.message}"
    return type(error)(text, retry_after_ms=error.retry_after_ms, **error.details)


def row_bytes(row: Single) -> int:
    """How many bytes a row holds in memory while it waits."""
    label = row[5]
    labelled = 0 if label is None else len(label.key) + len(label.tags) + LABEL_BYTES
    return len(row[1]) + len(row[4]) + labelled + ROW_BYTES
