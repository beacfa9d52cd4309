"""Held rows: due rows whose bodies can't be read are kept here until they can be read (rules L5, L10).

Invariant: a held row is here and nowhere else. Rows of one stored batch are held together, because they are read
together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from delayd.batch.sequences import message_log_offset
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.filing.sources import Sources
from delayd.delay.handoff.waiting import lowest_offset, split_off
from delayd.delay.quarantine import Decided, Entry, Kind, Quarantine
from delayd.delay.rows import Rows, due_at_ms
from delayd.errors import DamagedData, Shortage
from delayd.hours import hour_name
from delayd.log.dispatch import NewPart, Outcome
from delayd.machine.clock import Clock

log = logging.getLogger(__name__)

RETRY_MS = 30_000
READS_MAX = 64  # Batches read in one try, so that the loop is not held for long.
MESSAGE_LOG = "message"


class HeldRows:
    """Rows by the file that holds their bodies; for the loop alone."""

    def __init__(
        self,
        clock: Clock,
        sources: Sources,
        outcomes: OutcomeLog,
        quarantine: Quarantine,
        put_back: Callable[[Rows], None],
    ) -> None:
        self._clock = clock
        self._sources = sources
        self._outcomes = outcomes
        self._quarantine = quarantine
        self._put_back = put_back
        self._held: dict[str, list[Rows]] = {}
        self._due_ms = 0

    def __len__(self) -> int:
        return sum(map(len, self.waiting()))

    def hold(self, rows: Rows, error: DamagedData) -> None:
        """Take rows of one stored batch that can't be read, at least one row."""
        name = _name(rows)
        if not self._held:
            self._due_ms = self._clock.monotonic_ms() + RETRY_MS
        self._held.setdefault(name, []).append(rows)
        sequences = rows["sequence"][:10].tolist()
        log.critical("rows_quarantined rows=%d sequences=%s reason=%r", len(rows), sequences, str(error))
        self._tell(name, error)

    def step(self) -> None:
        """Try again when it is time: rows that can be read go back to the dispatcher."""
        if self._held and self._clock.monotonic_ms() >= self._due_ms:
            self._due_ms = self._clock.monotonic_ms() + RETRY_MS
            for name in list(self._held):
                self._retry(name)

    def decide(self, entry: Entry, drop: bool, done: Decided) -> None:
        """Try the rows of an entry now, or give them up; ``done`` hears what came of it, once that is durable."""
        if drop:
            given_up = self.give_up(entry)
            self._outcomes.when_durable(lambda: done(*given_up))
            self._outcomes.commit()
        else:
            done(*self.retry(entry))

    def retry(self, entry: Entry) -> tuple[bool, str]:
        """Try the rows of an entry now; return whether all of them can be read, and a sentence for the operator."""
        before = sum(len(rows) for rows in self._held.get(entry.name, ()))
        error = self._retry(entry.name)
        left = sum(len(rows) for rows in self._held.get(entry.name, ()))
        return not left, f"{before - left} messages can be read" + (f"; {left} can't: {error}" if left else "")

    def give_up(self, entry: Entry) -> tuple[bool, str]:
        """Declare the rows of an entry DEAD."""
        count = 0
        for rows in self._held.pop(entry.name, ()):
            count += len(rows)
            part = NewPart(rows["sequence"].copy(), due_at_ms(rows), Outcome.DEAD, self._clock.now_ms())
            self._outcomes.record(int(rows["hour"][0]), part, _nothing)
        self._quarantine.lift(Kind.ROWS, entry.name)
        return True, f"{count} messages are given up: they have the outcome DEAD"

    def waiting(self) -> list[Rows]:
        """View all rows that are held, in several arrays."""
        return [rows for parts in self._held.values() for rows in parts]

    def take_out(self, sequences: NDArray[np.uint64], arrays: Collection[int]) -> list[Rows]:
        """Take rows: they have ended; returns them, in several arrays. ``sequences`` rise, and ``arrays`` are the ids
        of the arrays in which the rows stand.
        """
        found: list[Rows] = []
        for name, parts in list(self._held.items()):
            kept, taken = split_off(parts, sequences, arrays)
            if not taken:
                continue
            found += taken
            self._held[name] = kept
            if not kept:
                del self._held[name]
                self._quarantine.lift(Kind.ROWS, name)
        return found

    def lowest_message_log_offset(self) -> int | None:
        """Lowest message log offset that a held row refers to (rule P6)."""
        return lowest_offset(self.waiting())

    def _retry(self, name: str) -> str:
        """Put rows back up to the first batch that can't be read; return why it can't."""
        parts = self._held.pop(name, [])
        if parts and name != MESSAGE_LOG:
            # A copy may have been put in the file's place by a rename, which an open descriptor does not see.
            self._sources.forget_hour(int(parts[0]["hour"][0]))
        for index, rows in enumerate(parts):
            if index == READS_MAX:
                # The other rows are as likely to be readable: the next tick goes on with them.
                self._held[name] = parts[index:]
                self._due_ms = self._clock.monotonic_ms()
                return "not tried yet"
            try:
                self._sources.batch(int(rows["hour"][0]), int(rows["location"][0]))
            except (DamagedData, Shortage) as error:
                # The rows behind the unreadable batch may be readable, so the next try begins with them.
                self._held[name] = [*parts[index + 1 :], rows]
                if isinstance(error, DamagedData):
                    self._tell(name, error)
                return str(error)
            self._put_back(rows)
        self._quarantine.lift(Kind.ROWS, name)
        return ""

    def _tell(self, name: str, error: DamagedData) -> None:
        parts = self._held[name]
        hour = None if name == MESSAGE_LOG else int(parts[0]["hour"][0])
        self._quarantine.put(Kind.ROWS, name, error, sum(map(len, parts)), hour=hour)


def _name(rows: Rows) -> str:
    if message_log_offset(int(rows["location"][0])) is not None:
        return MESSAGE_LOG
    return hour_name(int(rows["hour"][0]))


def _nothing() -> None:
    """Nobody waits for a dead row."""
