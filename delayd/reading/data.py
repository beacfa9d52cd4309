"""Data: the files of a data directory, opened for reading (docs/reading.md).

Invariant: nothing is locked, created or changed, so that a live directory, a stopped one and a copy are read in the
same way (rule P3).
"""

import os
from datetime import datetime

from delayd.disk import Disk, RealDisk
from delayd.errors import BadArgument, DamagedData, NaiveDatetime
from delayd.hours import HOUR_MS, hour_from_name, hour_name, hour_of_ms
from delayd.log.dispatch import NO_OUTCOMES, OutcomeRows
from delayd.reading.cells import Table, Value, columns_of
from delayd.reading.columns import ScheduleRows
from delayd.reading.schedule import NO_HOURS
from delayd.reading.scheduled import HourCount, Schedule, schedules
from delayd.reading.tables import DISPATCHED, SCHEDULED, LogTables, TableKind, table_of
from delayd.reading.trace import Trace, trace

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
}
NEXT, NOT_SEEN = "next", "not seen"

Hour = str | int | datetime


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

    def schedule(self, hour: Hour) -> Table:
        """The messages of an hour, by rising sequence, each with what became of it.

        The columns are those of the table ``schedule`` in docs/audit.md, and ``outcome`` (masked while the message is
        pending), ``reason``, ``target``, ``claimed_at_ms``, ``target_appended_at_ms`` and ``late_ms``.

        Args:
            hour: ten digits YYYYMMDDHH in UTC, an aware datetime in it, or the number of hours since the epoch.

        Raises:
            BadArgument: this is no hour.
            DamagedData: a file of the hour does not check.
        """
        return self._table(SCHEDULED, hour)

    def dispatch(self, hour: Hour) -> Table:
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
        ``position``, ``detail``. The step ``next`` says what the message waits for; ``not seen`` says what no file
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

    def _table(self, kind: TableKind[LogTables], hour: Hour) -> Table:
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
            (log_id, step.what, step.at_ms, step.at_ms, step.path, step.position, step.detail) for step in each.steps
        ]
        if each.waits_for:
            due_ms = each.deliver_at_ms
            rows.append((log_id, NEXT, due_ms, due_ms, None, None, f"waits for {each.waits_for}"))
        rows += [(log_id, NOT_SEEN, None, None, None, None, sentence) for sentence in each.unseen]
    return Table(STEPS, columns_of(STEPS, rows))


def _tables(hour: int, log_id: int, rows: ScheduleRows, outcomes: OutcomeRows) -> LogTables:
    return LogTables(hour, log_id, lambda: rows, lambda: outcomes)


def _number(hour: Hour) -> int:
    if isinstance(hour, str):
        return hour_from_name(hour)
    if isinstance(hour, datetime):
        if hour.utcoffset() is None:
            raise NaiveDatetime.of("hour", hour)
        return hour_of_ms(int(hour.timestamp() * 1_000))
    if type(hour) is not int or not 0 <= hour < 1 << 32:
        raise BadArgument(f"{hour!r} is no hour; give YYYYMMDDHH, an aware datetime, or hours since the epoch")
    return hour
