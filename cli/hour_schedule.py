"""Messages of a data directory hour by hour, each with what became of it.

Invariant: an hour's dispatch log is read before its schedule side, so that each outcome finds its row (rule P3); when a
running server moves its files on meanwhile, the hour is read again below its new checkpoint.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import click
import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.disk import Disk
from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_of_ms
from delayd.log.dispatch import OutcomeRows, decode_outcomes
from delayd.reading.columns import ScheduleRows
from delayd.reading.directory import Directory, Role, find_directories
from delayd.reading.dispatch import dispatch_sizes, read_outcomes
from delayd.reading.groups import LogMoved
from delayd.reading.schedule import (
    MessageTail,
    ScheduleSnapshot,
    read_body,
    read_hour,
    read_tail,
    take_snapshot,
    was_removed,
)
from delayd.reading.seals import NO_TAIL

from .damage import NAMED_MAX
from .exits import NOT_BALANCED, OK
from .times import check_order

TRIES_MAX = 5  # Files move on once a checkpoint, so a second try nearly always does.
NONE = -1  # In place of an index: there is none.
_NO_ROWS = np.empty(0, np.int64)

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


class HourState(StrEnum):
    """How far an hour is."""

    OPEN = "open"  # Messages may still be filed in it.
    CLOSED = "closed"  # No more are, and not each of them has an outcome yet, or no sweep has looked since.
    SEALED = "sealed"


@dataclass(frozen=True, slots=True)
class Hour:
    """An hour of one delay server: its rows by rising sequence, and for each the index of its last outcome or NONE."""

    hour: int
    rows: ScheduleRows
    outcomes: OutcomeRows
    outcome_of: Int64s
    state: HourState

    def row_of(self) -> Int64s:
        """For each outcome the index of its row or NONE."""
        return _find(self.rows.sequence, self.outcomes.sequences)


class Schedule:
    """What one delay server's files hold, read as it is asked for."""

    def __init__(self, disk: Disk, directory: Directory) -> None:
        self.directory = directory
        self._disk = disk
        self._sizes: dict[int, int] = {}
        self.tail_damage: DamagedData | None = None  # Why messages that are not filed yet are left out.
        self._snapshot, self._tail = self._look()

    def hours(self, window: Window) -> list[int]:
        """The hours that may have wanted messages, rising."""
        known = set(self._sizes) | set(self._snapshot.hours) | set(self._tail.counts())
        return sorted(hour for hour in known if window.holds_hour(hour) and not self._was_removed(hour))

    def read(self, hour: int) -> Hour:
        """Read an hour.

        Raises:
            DamagedData: a file does not check, or the files never stand still.
        """
        moved: LogMoved | None = None
        for _ in range(TRIES_MAX):
            try:
                return self._read(hour)
            except LogMoved as error:
                moved = error
                self._snapshot, self._tail = self._look()
                if self._was_removed(hour):
                    return Hour(hour, NO_TAIL.rows, decode_outcomes([]), _NO_ROWS, HourState.SEALED)
        raise DamagedData(self.directory.path, 0, f"{moved}, and no newer checkpoint says why")

    def body(self, hour: Hour, row: int) -> bytes:
        """The body of one row."""
        try:
            return read_body(self._disk, self._snapshot, hour.hour, int(hour.rows.location[row]))
        except LogMoved:
            # It was in the message log, which a checkpoint has passed: by now its schedule log has it.
            self._snapshot, self._tail = self._look()
            moved = self.read(hour.hour).rows
            place = int(np.searchsorted(moved.sequence, hour.rows.sequence[row]))
            return read_body(self._disk, self._snapshot, hour.hour, int(moved.location[place]))

    def _read(self, hour: int) -> Hour:
        durable = self._snapshot.outcome_ends.get(hour, 0)
        outcomes = read_outcomes(self._disk, self.directory, hour, self._sizes.get(hour, 0), durable=durable)
        rows = read_hour(self._disk, self._snapshot, self._tail, hour)
        filed = self._snapshot.hours.get(hour)
        found = _find(outcomes.sequences, rows.sequence)
        state = HourState.CLOSED if self._snapshot.is_closed(hour) else HourState.OPEN
        return Hour(hour, rows, outcomes, found, HourState.SEALED if filed is not None and filed.sealed else state)

    def _was_removed(self, hour: int) -> bool:
        # Also when its number is not in the newest table any more: then none of its files is there.
        gone = hour not in self._snapshot.hours and hour not in self._tail.counts()
        return was_removed(self._disk, self._snapshot, hour) or (gone and hour not in self._sizes)

    def _look(self) -> tuple[ScheduleSnapshot, MessageTail]:
        for tries_left in reversed(range(TRIES_MAX)):
            try:
                self._sizes = dispatch_sizes(self._disk, self.directory)
                snapshot = take_snapshot(self._disk, self.directory)
                return snapshot, self._read_tail(snapshot)
            except LogMoved as error:
                if not tries_left:
                    raise DamagedData(self.directory.path, 0, f"{error}, and no newer checkpoint says why") from error
        raise AssertionError("the last try returns or raises")

    def _read_tail(self, snapshot: ScheduleSnapshot) -> MessageTail:
        self.tail_damage = None
        try:
            return read_tail(self._disk, snapshot)
        except DamagedData as error:
            # Hours that are filed already lie elsewhere, and are as good as ever.
            self.tail_damage = error
            return NO_TAIL


def schedules(disk: Disk, data: str) -> list[Schedule]:
    """The delay servers' files in a data directory; BadArgument when there are none."""
    found = [directory for directory in find_directories(disk, data) if directory.role == Role.DELAY]
    if not found:
        raise BadArgument(f"{data} holds no delay server's directory; give the one that `delayd up --data` was given")
    return [Schedule(disk, directory) for directory in found]


class Listing:
    """Hours read one after the other: one that is damaged is named, and blanks none of the others."""

    def __init__(self, found: list[Schedule], window: Window) -> None:
        self.wanted = [(hour, each) for each in found for hour in each.hours(window)]
        self.wanted.sort(key=lambda pair: (pair[0], pair[1].directory.log_id))
        self._named: list[str] = []
        self._left_out = 0
        for each in found:
            if each.tail_damage is not None:
                self.leave_out(each.tail_damage)

    def hours(self) -> Iterator[tuple[int, Schedule, Hour | None]]:
        """Number, server and rows of each hour; None in place of rows that can't be read."""
        for number, each in self.wanted:
            try:
                yield number, each, each.read(number)
            except DamagedData as error:
                self.leave_out(error)
                yield number, each, None

    def leave_out(self, error: DamagedData) -> None:
        """Remember what could not be shown, for `end`."""
        self._left_out += 1
        if len(self._named) < NAMED_MAX:
            self._named.append(error.message)

    def end(self) -> int:
        """Name on stderr what could not be shown; the exit code of the listing."""
        sys.stdout.flush()
        for sentence in self._named:
            click.echo(f"delayd: left out: {sentence}", err=True)
        if self._left_out:
            more = self._left_out - len(self._named)
            others = f" and {more:,} times more;" if more else ""
            click.echo(f"delayd:{others} `delayd log verify` names every file that is damaged", err=True)
        return NOT_BALANCED if self._left_out else OK


def in_chunks(rows: Int64s, size: int = 1_000) -> Iterator[list[int]]:
    """Indexes as Python numbers, some at a time: a listing ends after a few of millions."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size].tolist()


def _find(known: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> Int64s:
    """For each wanted number the index of its last place among the known ones, or NONE."""
    if not len(known):
        return np.full(len(wanted), NONE, np.int64)
    order = np.argsort(known, kind="stable")
    behind = np.searchsorted(known, wanted, side="right", sorter=order) - 1
    index = order[np.maximum(behind, 0)]
    return np.where((behind >= 0) & (known[index] == wanted), index, NONE)
