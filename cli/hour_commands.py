"""Hours: those that --from and --to choose, read one after the other, and what is damaged among them.

Invariant: an hour that is damaged is named, and blanks none of the others. The hour that holds either instant is one of
those that are chosen, but for an hour that only begins with --to.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import click
import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_from_name, hour_of_ms, hour_start_ms
from delayd.machine.disk import RealDisk
from delayd.machine.operating import counted
from delayd.reading.data import Hour, HourCount, Schedule, schedules
from delayd.reading.files.row_arrays import ScheduleRows
from delayd.reading.verify import verify_directory

from .listing import Advance, progress
from .main import NOT_BALANCED, OK
from .shared_options import bundle, data_option, from_option, offer_instants, subject_option, to_option
from .times import check_order, instant


@dataclass(frozen=True, slots=True)
class HourRange:
    """Hours from one up to another, which is not one of them; None sets no bound."""

    first: int | None
    until: int | None

    @classmethod
    def of(cls, from_ms: int | None, to_ms: int | None) -> "HourRange":
        """The hours that hold an instant from one up to another, the second left out."""
        check_order(from_ms, to_ms)
        return cls(
            None if from_ms is None else hour_of_ms(from_ms), None if to_ms is None else hour_of_ms(to_ms - 1) + 1
        )

    def __contains__(self, hour: object) -> bool:
        if not isinstance(hour, int):
            return False
        return (self.first is None or hour >= self.first) and (self.until is None or hour < self.until)


EVERY_HOUR = HourRange(None, None)
hours_options = bundle(
    "hours",
    HourRange.of,
    click.option(
        "--from",
        "from_ms",
        type=instant,
        metavar="INSTANT",
        shell_complete=offer_instants,
        help="From the hour that holds this, in UTC.",
    ),
    click.option(
        "--to",
        "to_ms",
        type=instant,
        metavar="INSTANT",
        help="Up to the hour that holds this; an hour that begins exactly then is left out.",
    ),
)


def hour_of_name(text: str) -> int:
    """Read an hour of an option, as listings show it: ten digits, in UTC."""
    try:
        return hour_from_name(text)
    except BadArgument as error:
        raise click.BadParameter(error.message) from error


class HourSteps:
    """Turns "so many of so many" into steps."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        self._advance(done - self._done, total)
        self._done = done


NAMED_MAX = 20  # A screen; a disk that went bad damages thousands.


@contextmanager
def all_damage_named(places: Sequence[str], named: list[str] | None = None) -> Iterator[None]:
    """Name the other damaged files of data directories on stderr when the block ends with DamagedData, which goes on.

    ``named`` is given the sentences of all of them.
    """
    try:
        yield
    except DamagedData as error:
        with progress("files", None) as advance:
            reports = [verify_directory(place, progress=lambda done, total: advance(1, total)) for place in places]
        damaged = [file for report in reports for file in report.damaged]
        others = [file.sentence for file in damaged if file.path != error.path]
        if named is not None:
            named += [error.message, *others]
        for sentence in others[:NAMED_MAX]:
            click.echo(f"delayd: {sentence}", err=True)
        if len(others) > NAMED_MAX:
            more = counted(len(others) - NAMED_MAX, "more file is|more files are") + " damaged"
            click.echo(f"delayd: {more}; `delayd log verify --data {' '.join(places)}` names all", err=True)
        raise


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ListedWindow:
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


class HourListing:
    """Hours read one after the other: one that is damaged is named, and blanks none of the others."""

    def __init__(self, data: str, window: ListedWindow) -> None:
        self.window = window
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

    @classmethod
    def of(cls, data: str, subject: str | None, from_ms: int | None, to_ms: int | None) -> Self:
        """Take the options of a command."""
        return cls(data, ListedWindow(from_ms, to_ms, subject))

    @classmethod
    def ahead(cls, data: str, subject: str | None, from_ms: int | None, to_ms: int | None) -> Self:
        """The same, from now on unless told."""
        return cls.of(data, subject, instant("now") if from_ms is None else from_ms, to_ms)

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


_LISTED = (data_option, subject_option, from_option, to_option)
listing_options = bundle("listing", HourListing.of, *_LISTED)
ahead_options = bundle("listing", HourListing.ahead, *_LISTED)


def in_chunks(rows: Int64s, size: int = 1_000) -> Iterator[list[int]]:
    """Indexes as Python numbers, some at a time: a listing ends after a few of millions."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size].tolist()
