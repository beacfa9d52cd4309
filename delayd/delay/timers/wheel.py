"""The wheel: timers of all loaded hours in memory, handed out when they are due.

Invariant: no row leaves before ``hour_start_ms(hour) + due_ms``, checked on the rows themselves at the last step.

The wheel reads no clock: time is an argument. If it stands still or runs backwards, rows wait longer; if it jumps
ahead, they leave at once. Rows are due before their filing hours end, so hours are emptied one after the other and
never merged. Rows are due before their hour begins only if the clock was set back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from delayd.batch.sequences import Sequences, message_log_offset
from delayd.delay.rows import NO_ROWS, Rows, hour_span, join_rows, latest_due_ms
from delayd.delay.timers.hour_wheel import OPEN_AHEAD_MS, TAIL_ROWS, HourWheel, PreparedRows, prepare

__all__ = ["OPEN_AHEAD_MS", "PreparedRows", "Wheel", "prepare"]


class Wheel:
    """Pending rows of several hours. Owned by the loop; only `prepare` may run elsewhere."""

    def __init__(self, tail_rows: int = TAIL_ROWS) -> None:
        self._tail_rows = tail_rows
        self.hours_dropped = 0  # How many hours were unloaded so far.
        self._hours: dict[int, HourWheel] = {}  # In ascending order of the hour.

    def __len__(self) -> int:
        return sum(map(len, self._hours.values()))

    def len_of(self, hour: int) -> int:
        """Rows held of one hour; 0 for an hour that is not loaded."""
        return len(self._hours[hour]) if hour in self._hours else 0

    def has_hour(self, hour: int) -> bool:
        """Whether rows of this hour may be inserted."""
        return hour in self._hours

    def hours(self) -> tuple[int, ...]:
        """Loaded hours, ascending."""
        return tuple(self._hours)

    def holds(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows are of loaded hours: bool[n], a new array."""
        hours = rows["hour"]
        loaded = np.zeros(len(rows), np.bool_)
        for hour in self._hours:
            loaded |= hours == np.uint32(hour)
        return loaded

    def add_hour(self, hour: int, prepared: PreparedRows | None = None) -> None:
        """Load an hour. If it is loaded already, empty or in use, it takes the prepared rows in addition."""
        if hour not in self._hours:
            self._put(HourWheel(hour, self._tail_rows), hour)
        if prepared is not None:
            hours = prepared.rows["hour"]
            assert not len(hours) or int(hours[0]) == hour == int(hours[-1]), "prepared rows are of the hour they join"
            self._hours[hour].attach(prepared)

    def add_closed(self, rows: Rows) -> None:
        """Load hours that have passed, with all of their rows: they come in the order of their hours, each hour a few
        of them. Hours without rows are not loaded.
        """
        if not len(rows):
            return
        hours = rows["hour"]
        bounds = np.flatnonzero(hours[1:] != hours[:-1]) + 1
        for first, of_hour in zip([0, *bounds.tolist()], np.split(rows, bounds), strict=True):
            hour = int(hours[first])
            if hour not in self._hours:
                self._put(HourWheel(hour, all_open=True), hour)
            self._hours[hour].insert(of_hour)

    def drop_hour(self, hour: int) -> None:
        """Unload an hour, which must be empty."""
        assert not len(self._hours[hour]), "a loaded hour is dropped only when its last row has left"
        del self._hours[hour]
        self.hours_dropped += 1

    def insert(self, rows: Rows, span: tuple[int, int] | None = None) -> None:
        """Copy rows in, in any order; the hour of each row must be loaded.

        ``span`` is the lowest and highest of their hours, where the caller knows it.
        """
        if not len(rows):
            return
        first, last = span or hour_span(rows)
        if first == last:
            assert first in self._hours, "rows are inserted into loaded hours"
            self._hours[first].insert(rows)
            return
        hours = rows["hour"]
        assert bool(self.holds(rows).all()), "rows are inserted into loaded hours"
        for hour, wheel in self._hours.items():
            picked = np.flatnonzero(hours == np.uint32(hour))
            if len(picked):
                wheel.insert(rows.take(picked))

    def take_due(self, now_ms: int, rows_max: int) -> Rows:
        """Hand out up to ``rows_max`` rows due at ``now_ms``, hour by hour in due order; the caller must not write into
        them.

        When nothing is due it opens slots ahead instead, so that a caller who only takes rows and asks `next_due_ms`
        never spins.
        """
        parts: list[Rows] = []
        for wheel in self._hours.values():
            if rows_max <= 0:
                break
            rows = wheel.take_due(now_ms, rows_max)
            if len(rows):
                parts.append(rows)
                rows_max -= len(rows)
        if not parts:
            if rows_max > 0:
                self.open_ahead(now_ms)
            return NO_ROWS
        due = parts[0] if len(parts) == 1 else join_rows(parts)
        assert latest_due_ms(due) <= now_ms, "no row leaves before it is due"
        return due

    def open_ahead(self, now_ms: int) -> None:
        """Open slots that begin within OPEN_AHEAD_MS, so that gathering and sorting them delays no row."""
        for wheel in self._hours.values():
            if wheel.start_ms > now_ms + OPEN_AHEAD_MS:
                break
            wheel.open_ahead(now_ms)

    def next_due_ms(self, now_ms: int) -> int | None:
        """Instant, ``now_ms`` or later, at which to call `take_due` next; None when no row is held.

        It may be the instant at which a slot is to be opened. Then nothing is due, and the next answer is exact.
        """
        earliest: int | None = None
        for wheel in self._hours.values():
            instant = wheel.next_due_ms()
            if instant is not None and (earliest is None or instant < earliest):
                earliest = instant
        return None if earliest is None else max(now_ms, earliest)

    def count_until(self, until_ms: int) -> int:
        """How many rows are due before an instant, to half a second; some microseconds an hour."""
        return sum([wheel.count_until(until_ms) for wheel in self._hours.values()])

    def lowest_message_log_offset(self) -> int | None:
        """Lowest message log offset of a batch that a held row refers to (rule P6); None when no row refers to one.

        The wheel forgets rows that were taken: their new holder must answer for them. Costs some 0.1 ms an hour.
        """
        lowest = [location for wheel in self._hours.values() if (location := wheel.lowest_location()) is not None]
        return message_log_offset(min(lowest)) if lowest else None

    def find(
        self, hour: int, due_ms: npt.NDArray[np.int32], wanted: Callable[[Sequences], npt.NDArray[np.bool_]]
    ) -> list[Rows]:
        """Copy or view the rows of one hour that are wanted and due at these instants, in several arrays; others may be
        among them. ``due_ms`` counts from the hour's start.
        """
        return self._hours[hour].find(due_ms, wanted)

    def parts(self, first: int = 0, last: int | None = None) -> Iterator[Rows]:
        """View all rows held, in several arrays; or those of the hours from ``first`` to ``last``.

        Other threads may read the arrays, also after their rows have left.
        """
        for hour, wheel in self._hours.items():
            if first <= hour and (last is None or hour <= last):
                yield from wheel.parts()

    def closed_from_ms(self, hour: int) -> int:
        """Rows of a loaded hour that are due so long after its start, or later, have not begun to leave the wheel."""
        return self._hours[hour].closed_from_ms

    def _put(self, wheel: HourWheel, hour: int) -> None:
        is_last = not self._hours or hour > next(reversed(self._hours))
        self._hours[hour] = wheel
        if not is_last:
            self._hours = dict(sorted(self._hours.items()))

    def rows_of(self, hour: int) -> Rows:
        """Copy all rows held of one hour, in no particular order, for listings."""
        return self._hours[hour].rows()
