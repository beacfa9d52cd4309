"""Hours of a data directory as listings want them: those of a window, one after the other.

Invariant: an hour that is damaged is named, and blanks none of the others.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.disk import RealDisk
from delayd.errors import DamagedData
from delayd.hours import hour_of_ms, hour_start_ms
from delayd.reading.columns import ScheduleRows
from delayd.reading.scheduled import Hour, HourCount, Schedule, schedules

from .damage import NAMED_MAX
from .exits import NOT_BALANCED, OK
from .times import check_order

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Window:
    """Which messages a listing wants: due in [from_ms, to_ms), of one subject; None sets no bound.

    A message that was accepted after its time counts as due when it was accepted, as it is filed (rule P5).
    """

    from_ms: int | None = None
    to_ms: int | None = None
    subject: str | None = None

    def __post_init__(self) -> None:
        check_order(self.from_ms, self.to_ms)

    def holds_hour(self, hour: int) -> bool:
        """Whether any message of an hour may be wanted."""
        if self.from_ms is not None and hour < hour_of_ms(self.from_ms):
            return False
        return self.to_ms is None or hour <= hour_of_ms(self.to_ms - 1)

    def cuts(self, hour: int) -> bool:
        """Whether it holds a part of an hour only."""
        begin_ms, end_ms = hour_start_ms(hour), hour_start_ms(hour + 1)
        after = self.from_ms is not None and self.from_ms > begin_ms
        return after or (self.to_ms is not None and self.to_ms < end_ms)

    def holds(self, rows: ScheduleRows) -> Mask:
        """Which rows are wanted."""
        due_ms = rows.due_from_ms()
        wanted = np.ones(len(rows), np.bool_)
        if self.from_ms is not None:
            wanted &= due_ms >= self.from_ms
        if self.to_ms is not None:
            wanted &= due_ms < self.to_ms
        if self.subject is not None:
            known = [number for number, name in enumerate(rows.subjects) if name == self.subject]
            wanted &= np.isin(rows.subject, known)
        return wanted


class LeftOut:
    """What could not be shown, because it is damaged."""

    def __init__(self) -> None:
        self._named: list[str] = []
        self._count = 0

    def add(self, error: DamagedData) -> None:
        """Remember it, for `end`."""
        self._count += 1
        if len(self._named) < NAMED_MAX:
            self._named.append(error.message)

    def end(self) -> int:
        """Name it on stderr; the exit code of the listing."""
        sys.stdout.flush()
        for sentence in self._named:
            click.echo(f"delayd: left out: {sentence}", err=True)
        if self._count:
            more = self._count - len(self._named)
            others = f" and {more:,} times more;" if more else ""
            click.echo(f"delayd:{others} `delayd log verify` names every file that is damaged", err=True)
        return NOT_BALANCED if self._count else OK


class Listing:
    """Hours read one after the other: one that is damaged is named, and blanks none of the others."""

    def __init__(self, data: str, window: Window) -> None:
        damage: list[DamagedData] = []
        found = schedules(RealDisk(), data, damage)
        self.servers = [each.directory for each in found]
        self.wanted = [(hour, each) for each in found for hour in each.hours() if window.holds_hour(hour)]
        self.wanted.sort(key=lambda pair: (pair[0], pair[1].directory.log_id))
        self._left_out = LeftOut()
        for error in damage:
            self.leave_out(error)
        for each in found:
            if each.tail_damage is not None:
                self.leave_out(each.tail_damage)

    def hours(self) -> Iterator[tuple[int, Schedule, Hour | None]]:
        """Number, server and rows of each hour; None in place of rows that can't be read."""
        for number, each in self.wanted:
            yield number, each, self.read(number, each)

    def read(self, number: int, each: Schedule) -> Hour | None:
        """Rows of an hour of one server; None when they can't be read, and `end` says so."""
        try:
            return each.read(number)
        except DamagedData as error:
            self.leave_out(error)
            return None

    def count(self, number: int, each: Schedule) -> HourCount:
        """Count an hour of one server; `end` says when its files can't be read."""
        damage: list[DamagedData] = []
        count = each.count(number, damage)
        for error in damage:
            self.leave_out(error)
        return count

    def leave_out(self, error: DamagedData) -> None:
        """Remember what could not be shown, for `end`."""
        self._left_out.add(error)

    def end(self) -> int:
        """Name on stderr what could not be shown; the exit code of the listing."""
        return self._left_out.end()


def in_chunks(rows: Int64s, size: int = 1_000) -> Iterator[list[int]]:
    """Indexes as Python numbers, some at a time: a listing ends after a few of millions."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size].tolist()
