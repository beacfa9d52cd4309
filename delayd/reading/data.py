"""Data: the files of a data directory, opened for reading, hour by hour (docs/reading.md).

Invariant (rule P3): nothing is locked, created or changed. An hour's dispatch log is read before its schedule side, so
that each outcome finds its row; when a running server moves its files on meanwhile, the hour is read again below its
new checkpoint.
"""

import os
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.errors import BadArgument, DamagedData, NaiveDatetime
from delayd.hours import HOUR_MS, hour_from_name, hour_name, hour_of_ms
from delayd.log.hour import NO_OUTCOMES, OutcomeRows, SealFacts, dispatch_path
from delayd.machine.disk import Disk, RealDisk
from delayd.outcome import Outcome
from delayd.reading.files.directory import (
    Directory,
    Role,
    ScheduleSnapshot,
    find_undamaged,
    take_snapshot,
    take_what_is_there,
    was_removed,
)
from delayd.reading.files.origins import (
    NO_HOURS,
    HourRows,
    MessageTail,
    dispatch_sizes,
    hours_on_disk,
    read_body,
    read_hour,
    read_outcomes,
    read_tail,
)
from delayd.reading.files.row_arrays import Join, ScheduleRows
from delayd.reading.files.stored_groups import file_size, until_still
from delayd.reading.seals import sealed_facts
from delayd.reading.tables import DISPATCHED, SCHEDULED, LogTables, Table, TableKind, Value, columns_of, table_of
from delayd.reading.trace import Trace, trace

NONE = -1  # In place of an index: there is none.

Mask = NDArray[np.bool_]
HOURS = {
    "hour": "string",
    "log_id": "id",
    "begins_at_ms": "long",
    "begins_at": "timestamp",
    "messages": "long",
    "pending": "long",
    "dispatched": "long",
    "other_outcomes": "long",
    "stored_bytes": "long",
    "state": "string",
}
STEPS = {
    "log_id": "id",
    "step": "string",
    "at_ms": "long",
    "at": "timestamp",
    "path": "string",
    "position": "long",
    "detail": "string",
    "late_ms": "long",
}
NEXT, NOT_SEEN = "next", "not seen"
AnyHour = str | int | datetime


class HourSize(NamedTuple):
    """How many messages an hour has by the checkpoint's table and the message log above it, and the bytes they take."""

    messages: int
    stored_bytes: int


NOTHING = HourSize(0, 0)


class HourState(StrEnum):
    """How far an hour is."""

    OPEN = "open"  # Messages may still be filed in it.
    CLOSED = "closed"  # No more are, and not each of them has an outcome yet, or no sweep has looked since.
    SEALED = "sealed"
    DAMAGED = "damaged"  # A file of it does not check.


@dataclass(frozen=True, slots=True)
class Hour:
    """An hour of one delay server: its rows by rising sequence, and for each the index of its first outcome or NONE."""

    hour: int
    rows: ScheduleRows
    outcomes: OutcomeRows
    outcome_of: Int64s
    state: HourState

    def counts(self, wanted: Mask | slice = slice(None)) -> tuple[int, int, int]:
        """How many of the wanted rows there are, wait, and were handed over."""
        found = self.outcome_of[wanted]
        done = found[found != NONE]
        kinds = self.outcomes.parts["outcome"][self.outcomes.part_of[done]]
        return len(found), len(found) - len(done), int((kinds == Outcome.DISPATCHED).sum())

    def row_of(self) -> Int64s:
        join = Join(self.rows.sequence, self.outcomes.sequences)
        found = np.full(len(join.known), NONE, np.int64)
        found[join.rows] = join.scheduled
        return found


class HourCount(NamedTuple):
    """What is known of an hour without each of its rows; None in place of counts where a file is damaged."""

    hour: int
    messages: int | None
    pending: int | None
    dispatched: int | None
    other_outcomes: int | None
    stored_bytes: int | None
    state: HourState


def damaged(hour: int) -> HourCount:
    """The count of an hour with a damaged file."""
    return HourCount(hour, None, None, None, None, None, HourState.DAMAGED)


class Schedule:
    """What one delay server's files hold, read as it is asked for."""

    def __init__(self, disk: Disk, directory: Directory) -> None:
        """Raises DamagedData when the checkpoint can't be read."""
        self.directory = directory
        self._disk = disk
        self._sizes: dict[int, int] = {}
        self._sealed: frozenset[int] = frozenset()  # Hours that were sealed before the sizes were taken.
        self.tail_damage: DamagedData | None = None  # Why messages that are not filed yet are left out.
        self._unfiled: dict[int, HourSize] = {}  # Hours with rows in the tail.
        self._facts: dict[int, SealFacts] | None = None  # What the seals say; None: not read yet.
        self._snapshot, self._tail = self._look()

    def hours(self) -> list[int]:
        known = self._sizes.keys() | self._snapshot.hours.keys() | self._unfiled.keys()
        return sorted(hour for hour in known if not self._was_removed(hour))

    def counted(self, hour: int) -> HourSize:
        """Count the messages of an hour without reading its files, whatever became of them."""
        filed, beside = self._snapshot.hours.get(hour), self._snapshot.word.beside.get(hour)
        tail = self._unfiled.get(hour, NOTHING)
        stored = sum(each.length for each in (filed, beside) if each is not None)
        return HourSize(self._snapshot.counted(hour) + tail.messages, stored + tail.stored_bytes)

    def count(self, hour: int, damage: list[DamagedData]) -> HourCount:
        """Count the messages of an hour and what became of them; ``damage`` receives what does not check.

        An hour that is sealed, or that has no outcome yet, is counted by its seal and the checkpoint, and its files are
        not read.
        """
        messages, stored_bytes = self.counted(hour)
        sealed = self._sealed_facts(damage).get(hour) if hour in self._sealed else None
        if sealed is not None and sealed.rows == messages:
            dispatched, other = sealed.dispatched, sealed.rows - sealed.dispatched
            return HourCount(hour, messages, 0, dispatched, other, stored_bytes, HourState.SEALED)
        if not self.has_outcomes(hour):
            return HourCount(hour, messages, messages, 0, 0, stored_bytes, self._state(hour))
        try:
            read = self.read(hour)
        except DamagedData as error:
            damage.append(error)
            return damaged(hour)
        messages, pending, dispatched = read.counts()
        stored_bytes = self.counted(hour).stored_bytes
        return HourCount(hour, messages, pending, dispatched, messages - pending - dispatched, stored_bytes, read.state)

    def has_outcomes(self, hour: int) -> bool:
        """Whether anything is known to have become of messages of an hour."""
        return hour in self._sealed or self._sizes.get(hour, 0) > 0 or hour in self._tail.decisions.hours()

    def read(self, hour: int) -> Hour:
        """Read an hour; DamagedData when a file does not check, or the files never stand still."""
        return until_still(self.directory.path, lambda: self._read(hour), self._look_again)

    def body(self, hour: Hour, row: int) -> bytes:
        rows = hour.rows

        def read() -> bytes:
            return read_body(self._disk, self._snapshot, hour.hour, int(rows.location[row]))

        def look_again() -> None:
            # It was in the message log, which a checkpoint has passed: by now its schedule log has it.
            nonlocal rows, row
            sequence = rows.sequence[row]
            self._look_again()
            rows = self.read(hour.hour).rows
            row = int(np.searchsorted(rows.sequence, sequence))

        return until_still(self.directory.path, read, look_again)

    def _read(self, hour: int) -> Hour:
        if self._was_removed(hour):
            return Hour(hour, NO_HOURS.rows, NO_OUTCOMES, np.empty(0, np.int64), HourState.SEALED)
        durable = self._snapshot.outcome_ends.get(hour, 0)
        size = self._sizes.get(hour, 0)
        if hour in self._sealed:
            size = file_size(self._disk, dispatch_path(self.directory.path, hour))
        outcomes = read_outcomes(self._disk, self.directory, hour, size, durable=durable)
        outcomes = self._tail.decisions.behind(hour, outcomes)
        rows = read_hour(self._disk, self._snapshot, self._tail.unfiled, hour)
        return Hour(hour, rows, outcomes, Join(rows.sequence, outcomes.sequences).first, self._state(hour))

    def _sealed_facts(self, damage: list[DamagedData]) -> dict[int, SealFacts]:
        if self._facts is None:
            self._facts = {}
            try:
                self._facts = sealed_facts(self._disk, self._snapshot)
            except DamagedData as error:
                damage.append(error)  # The files of the sealed hours are read instead.
        return self._facts

    def _state(self, hour: int) -> HourState:
        if self._snapshot.is_sealed(hour):
            return HourState.SEALED
        return HourState.CLOSED if self._snapshot.is_closed(hour) else HourState.OPEN

    def _was_removed(self, hour: int) -> bool:
        # Also when its number is not in the newest table any more: then none of its files is there.
        gone = not (self._snapshot.counted(hour) or hour in self._unfiled or hour in self._sizes)
        return was_removed(self._disk, self._snapshot, hour) or gone

    def _look_again(self) -> None:
        self._snapshot, self._tail = self._look()

    def _look(self) -> tuple[ScheduleSnapshot, MessageTail]:
        return until_still(self.directory.path, self._look_once)

    def _look_once(self) -> tuple[ScheduleSnapshot, MessageTail]:
        # A sealed hour gets no more outcomes, so the sizes of all its dispatch logs need not be taken first.
        table = take_snapshot(self._disk, self.directory, tail=False).hours
        self._sealed = frozenset(hour for hour, each in table.items() if each.sealed)
        hours = [hour for hour in hours_on_disk(self._disk, self.directory) if hour not in self._sealed]
        self._sizes = dispatch_sizes(self._disk, self.directory, hours)
        # Hours that are filed already lie elsewhere, and are as good as ever.
        damage: list[DamagedData] = []
        snapshot = take_what_is_there(self._disk, self.directory, damage)
        tail = read_tail(self._disk, snapshot, filed=False, damage=damage)
        self.tail_damage = damage[0] if damage else None
        self._facts = None
        # Once for all hours: two years of them would each count millions of rows.
        self._unfiled = count_hours(tail.unfiled)
        return snapshot, tail


def schedules(disk: Disk, data: str, damage: list[DamagedData]) -> list[Schedule]:
    """The delay servers' files in a directory; ``damage`` receives what is left out. BadArgument without any."""
    found: list[Schedule] = []
    delays = [each for each in find_undamaged(disk, data, damage) if each.role == Role.DELAY]
    for directory in delays:
        try:
            found.append(Schedule(disk, directory))
        except DamagedData as error:
            damage.append(error)
    if not delays and not damage:
        raise BadArgument(f"{data} holds no delay server's directory; give the one that `delayd up --data` was given")
    return found


def count_hours(rows: HourRows) -> dict[int, HourSize]:
    """Count the rows of each hour, and the bytes of their bodies."""
    if not len(rows.hours):
        return {}
    firsts = np.flatnonzero(np.diff(rows.hours, prepend=rows.hours[0] - 1))
    counts = np.diff(firsts, append=len(rows.hours))
    sizes = np.add.reduceat(rows.rows.body_bytes, firsts, dtype=np.int64)
    listed = zip(rows.hours[firsts].tolist(), counts.tolist(), sizes.tolist(), strict=True)
    return {hour: HourSize(count, size) for hour, count, size in listed}


class Data:
    """The files of a data directory, open for reading; made by `delayd.open_data`.

    It sees what was in the files when it was opened, or at the last `refresh`. When a running server moves files on
    meanwhile, an hour is read from where its rows stand by then. It holds no file open, so it need not be closed.

    Example::

        data = delayd.open_data("/var/lib/delayd")
        hours = data.hours()
        print(hours["hour"], hours["pending"])
        frame = data.schedule("2026112216").to_pandas()
        print(data.trace("orders.cancel", 4711)["step"])
        for damage in data.damage:
            print(damage.path, damage.position, damage.what)
    """

    def __init__(self, path: str, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self._damage: dict[tuple[str, int], DamagedData] = {}
        self._schedules: list[Schedule] = []
        self.refresh()

    def __repr__(self) -> str:
        return f"<Data {self.path}: {len(self._schedules)} delay servers, {len(self._damage)} damaged>"

    @property
    def damage(self) -> tuple[DamagedData, ...]:
        """What was found damaged so far: each has ``path``, ``position`` and ``what``.

        `hours` reads everything else, and its state of a damaged hour is ``damaged``. `schedule` and `dispatch` raise
        the damage of the hour that they are to read.
        """
        known = dict(self._damage)
        for each in self._schedules:
            if each.tail_damage is not None:
                known[each.tail_damage.path, each.tail_damage.position] = each.tail_damage
        return tuple(known.values())

    def refresh(self) -> None:
        """Look at the files anew.

        Raises:
            BadArgument: there is no delay server's directory.
        """
        damage: list[DamagedData] = []
        self._schedules = schedules(self._disk, self.path, damage)
        self._damage = {}
        self._note(damage)

    def hours(self) -> Table:
        """Each hour (UTC) that has messages or outcomes, rising; one row for each delay server that has it.

        Columns: ``hour`` (YYYYMMDDHH), ``log_id`` of the delay server, ``begins_at``, ``messages``, ``pending``
        (without an outcome), ``dispatched``, ``other_outcomes``, ``stored_bytes`` (in the schedule log, and as bodies
        of rows that are not filed), ``state`` (open, closed, sealed or damaged). Counts of a damaged hour are masked.
        Two years of hours take a fraction of a second: files of hours that are sealed or ahead are not read.
        """
        counted = [(count, each.directory.log_id) for each in self._schedules for count in self._count(each)]
        counted.sort(key=lambda pair: (pair[0].hour, pair[1]))
        rows: list[tuple[Value, ...]] = []
        for count, log_id in counted:
            begins_ms = count.hour * HOUR_MS
            rows.append(
                (hour_name(count.hour), f"{log_id:016x}", begins_ms, begins_ms, *count[1:-1], count.state.value)
            )
        return Table(HOURS, columns_of(HOURS, rows))

    def schedule(self, hour: AnyHour) -> Table:
        """The messages of an hour, by rising sequence, each with what became of it.

        The columns are those of the table ``schedule`` in docs/audit.md, and ``outcome`` (masked while the message is
        pending), ``reason``, ``other_sequence``, ``other_deliver_at_ms``, ``target``, ``claimed_at_ms``,
        ``target_appended_at_ms`` and ``late_ms``.

        Args:
            hour: ten digits YYYYMMDDHH in UTC, an aware datetime in it, or the number of hours since the epoch.

        Raises:
            BadArgument: this is no hour.
            DamagedData: a file of the hour does not check.
        """
        return self._table(SCHEDULED, hour)

    def dispatch(self, hour: AnyHour) -> Table:
        """The outcomes of an hour, in the order in which its delay server learned them.

        The columns are those of the table ``dispatch`` in docs/audit.md.

        Args:
            hour: as for `schedule`.

        Raises:
            BadArgument, DamagedData: as `schedule`.
        """
        return self._table(DISPATCHED, hour)

    def trace(self, subject: str, which: int | str) -> Table:
        """What happened to one message, step by step, with the file and the byte where each step stands.

        ``which`` is its sequence, or its key: then the newest message that took the key is followed.

        Columns: ``log_id`` of the delay server, ``step``, ``at_ms`` (masked where the log has no time of it), ``path``,
        ``position``, ``detail``, ``late_ms`` (of the steps ``claimed`` and ``appended``, from the later of due and
        accepted; masked elsewhere). The step ``next`` says what the message waits for; ``not seen`` says what no file
        tells.

        Raises:
            BadArgument: no delay server here has it.
            DamagedData: a file does not check.
        """
        return trace_table(trace(self._disk, self.path, subject, which))

    def _count(self, each: Schedule) -> list[HourCount]:
        damage: list[DamagedData] = []
        counts = [each.count(hour, damage) for hour in each.hours()]
        self._note(damage)
        return [count for count in counts if count.messages != 0]

    def _table(self, kind: TableKind[LogTables], hour: AnyHour) -> Table:
        number = _number(hour)
        parts: list[LogTables] = []
        for each in self._schedules:
            try:
                read = each.read(number)
            except DamagedData as error:
                self._note([error])
                raise
            parts.append(_tables(number, each.directory.log_id, read.rows, read.outcomes))
        return table_of(kind, parts or [_tables(number, 0, NO_HOURS.rows, NO_OUTCOMES)])

    def _note(self, damage: list[DamagedData]) -> None:
        self._damage |= {(error.path, error.position): error for error in damage}


def open_data(path: str | os.PathLike[str]) -> Data:
    """Open a data directory for reading: of running servers, of stopped ones, or a copy.

    Nothing is locked or changed. A damaged or half copied part is in ``damage`` of the result, and everything else can
    be read.

    Example::

        import delayd

        data = delayd.open_data("/var/lib/delayd")
        print(data.hours().to_pandas())

    Args:
        path: the directory that `delayd up --data` was given, or one delay server's directory in it.

    Raises:
        BadArgument: there is no delay server's directory.
    """
    if not isinstance(path, str | os.PathLike):
        raise BadArgument(f"path is that of a directory, such as './data', not {path!r:.100}")
    return Data(os.fspath(path), RealDisk())


def trace_table(found: list[Trace]) -> Table:
    """The steps of traces as a table."""
    rows: list[tuple[Value, ...]] = []
    for each in found:
        log_id = f"{each.log_id:016x}"
        rows += [
            (log_id, step.what, step.at_ms, step.at_ms, step.path, step.position, step.detail, step.late_ms)
            for step in each.steps
        ]
        if each.waits_for:
            due_ms = each.deliver_at_ms
            rows.append((log_id, NEXT, due_ms, due_ms, None, None, f"waits for {each.waits_for}", None))
        rows += [(log_id, NOT_SEEN, None, None, None, None, sentence, None) for sentence in each.unseen]
    return Table(STEPS, columns_of(STEPS, rows))


def _tables(hour: int, log_id: int, rows: ScheduleRows, outcomes: OutcomeRows) -> LogTables:
    return LogTables(hour, log_id, lambda: rows, lambda: outcomes)


def _number(hour: AnyHour) -> int:
    if isinstance(hour, str):
        return hour_from_name(hour)
    if isinstance(hour, datetime):
        if hour.utcoffset() is None:
            raise NaiveDatetime.of("hour", hour)
        return hour_of_ms(int(hour.timestamp() * 1_000))
    if type(hour) is not int or not 0 <= hour < 1 << 32:
        raise BadArgument(f"{hour!r} is no hour; give YYYYMMDDHH, an aware datetime, or hours since the epoch")
    return hour
