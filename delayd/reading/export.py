"""Export: the logs of a data directory as tables that any engine reads (docs/audit.md).

Invariant: all tables are read by one plan (rule P3), so they fit together even for a live directory. The files get
their names when all are complete. Only an hour is kept in memory, and in Parquet a group of rows.

An example. The first run finds the hours 16 and 17 sealed and 18 open: it writes schedule/sealed-00001 with the rows of
16 and 17, and schedule/open with those of 18. An hour later 18 is sealed and 19 has begun. The second run reads only
these: it writes schedule/sealed-00002 with 18, and schedule/open anew with 19.
"""

import csv
import errno
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delayd.errors import BadArgument, BadSetting, DiskFull, NotWritable
from delayd.hours import hour_name
from delayd.machine.disk import Disk, RealDisk
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS
from delayd.reading.books import Progress, plan_faults, seal_books
from delayd.reading.files.origins import MessageTail
from delayd.reading.files.stored_groups import until_still
from delayd.reading.findings import Finding
from delayd.reading.plan import AuditedOrigin, AuditPlan, HourBooks, plan_audit, plan_hours
from delayd.reading.tables import (
    CONSUMPTION,
    TABLES,
    Columns,
    HourTables,
    Types,
    Value,
    columns_of,
    consumption,
    count_rows,
)

if TYPE_CHECKING:
    from delayd.reading.parquet import ParquetRows

FORMATS = ("parquet", "csv")
LOGS = ("accepted", "decision", "schedule", "dispatch", "message")
HOUR: Types = {"log_id": "id", "hour": "string", "counted": "long", "dropped": "long"}
# Tables with rows of hours: a file for the sealed hours of each run, and one for all other hours.
BY_HOUR: Mapping[str, Types] = {**{name: TABLES[name].types for name in LOGS}, "hour": HOUR}
# What an audit of the tables needs besides the logs, with a row for each server or sum.
FACTS: Mapping[str, Types] = {
    "span": {"log_id": "id", "subject": "string", "since_ms": "long", "until_ms": "long"},
    "target": {"log_id": "id", "start_offset": "long"},
    "terms": {"now_ms": "long", "grace_ms": "long", "late_ms_limit": "long"},
    "server": {"log_id": "id", "first_sequence": "long", "next_sequence": "long"},
    "skipped": {"log_id": "id", "first_sequence": "long", "count": "long"},
    "fault": {"log_id": "id", "hour": "string", "detail": "string"},
    "consumption": CONSUMPTION,
}
CSV_ROWS = 8_192  # Rows that are Python objects at a time.
UNFINISHED = ".part"
LIST = "exported.json"  # The runs, and which sealed hours each has added.
CSV_ID_PREFIX = "id:"  # With this prefix no engine reads an id as a number, as DuckDB does with 0x.


def export_directory(
    data: str,
    folder: str,
    *,
    now_ms: int,
    form: str = "parquet",
    hours: Container[int] | None = None,
    subject: str | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    lost_grace_ms: int = LOST_GRACE_MS,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> dict[str, int]:
    """Write the logs of a data directory, live, stopped or copied, as tables: by name the rows that were written.

    An hour that is sealed is written once; the others, and what is of no hour, anew each time.

    Args:
        data: the directory that `delayd up --data` was given.
        folder: an empty folder, or one with an export of the same format and subject, which goes on.
        now_ms: the wall clock, for the table of terms.
        form: "parquet", which needs pyarrow, or "csv".
        hours: which to write, as hours since the epoch; None for all.
        subject: messages of this subject only.
        late_ms_limit: what an audit of the export takes for LATE.
        lost_grace_ms: and for how long it waits before it calls a row LOST.
        progress: called with the hours done and all hours.
        disk: where ``data`` is; the folder is the operating system's.

    Raises:
        BadArgument: there is nothing to export, or the folder has something else.
        BadSetting: pyarrow is missing.
        NotWritable, DiskFull: the folder can't be made, or the tables can't be written in it.
        DamagedData, NewerFormat: a file can't be read.
    """
    disk = disk or RealDisk()

    def export() -> dict[str, int]:
        plan, tails = plan_audit(disk, (data,), now_ms, hours, late_ms_limit, lost_grace_ms)
        return export_plan(disk, plan, folder, form=form, subject=subject, tails=tails, progress=progress)

    return until_still(data, export)


def export_plan(
    disk: Disk,
    plan: AuditPlan,
    folder: str,
    *,
    form: str = "parquet",
    subject: str | None = None,
    tails: Sequence[MessageTail] | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write everything that a plan reads; see `export_directory`."""
    if form not in FORMATS:
        raise BadArgument(f"format {form!r} is not one of {', '.join(FORMATS)}")
    if form == "parquet" and find_spec("pyarrow") is None:
        raise BadSetting("an export to Parquet needs pyarrow: pip install 'delayd[spark]', or export with --format csv")
    out = _Folder(Path(folder), form, subject)
    new = out.without_exported(plan)
    try:
        counts = _write_hours(disk, new, out, tails, progress)
        faults = plan_faults(disk, plan, seal_books(disk, plan))
        for name, columns in _facts(plan, faults, subject).items():
            with out.writing(Path(name), FACTS[name]) as facts, _named_errors(out.path):
                facts.write(columns)
            counts[name] = count_rows(columns)
        out.publish(new)
    finally:
        out.remove_unfinished()
    return {name: counts[name] for name in (*BY_HOUR, *FACTS)}


def _write_hours(
    disk: Disk,
    plan: AuditPlan,
    out: "_Folder",
    tails: Sequence[MessageTail] | None,
    progress: Progress | None,
) -> dict[str, int]:
    """Write the tables that have rows of hours: those of sealed hours behind those of earlier runs, others anew."""
    counts = dict.fromkeys(BY_HOUR, 0)
    any_sealed = any(one.snapshot.is_sealed(hour) for one in plan.origins for hour in one.hours)
    with ExitStack() as opened:
        writers = {
            (name, is_sealed): opened.enter_context(out.writing(out.part_of(name, is_sealed), types))
            for name, types in BY_HOUR.items()
            for is_sealed in (False, True)
            if any_sealed or not is_sealed
        }
        for done, books in enumerate(plan_hours(disk, plan, tails), 1):
            tables, is_sealed = HourTables(books), books.origin.snapshot.is_sealed(books.hour)
            for name in BY_HOUR:
                columns = _columns(tables, name, out.subject) if name in LOGS else _totals(books, out.subject)
                counts[name] += count_rows(columns)
                with _named_errors(out.path):
                    writers[name, is_sealed].write(columns)
            if progress is not None:
                progress(done, plan.hour_count)
    return counts


class _Folder:
    """Where tables go. Files get their names when all of a run are complete; then its list names the sealed hours.

    A run that dies before that leaves files that the next one replaces, because it has the same number.
    """

    def __init__(self, path: Path, form: str, subject: str | None) -> None:
        """Raises BadArgument unless the folder is empty, or has an export of the same kind."""
        self.subject = subject
        self.path, self._form = path, form
        self._kind = {"version": 1, "format": form, "subject": subject}
        self._written: list[Path] = []
        with _named_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            is_empty = not any(path.iterdir())
            listed = path / LIST
            if not is_empty and not listed.exists():
                raise BadArgument(f"{path} is not empty, and has no export: name a new folder, or one with an export")
            said: dict[str, Any] = {"runs": []} | (self._kind if is_empty else _said(listed))
        self._runs: list[list[str]] = said.pop("runs")  # The hours that each run has added.
        if said != self._kind:
            raise BadArgument(f"{path} has an export of another format or subject: name another folder")

    def without_exported(self, plan: AuditPlan) -> AuditPlan:
        """The plan without the hours that the folder has for good."""
        known = {name for run in self._runs for name in run}
        origins = [
            replace(one, hours=tuple(hour for hour in one.hours if _name_of(one, hour) not in known))
            for one in plan.origins
        ]
        return replace(plan, origins=tuple(origins))

    def part_of(self, table: str, is_sealed: bool) -> Path:
        """The file of a table with rows of hours, without its ending."""
        return Path(table) / (f"sealed-{len(self._runs) + 1:05}" if is_sealed else "open")

    @contextmanager
    def writing(self, name: Path, types: Types) -> Iterator["_CsvWriter | ParquetRows"]:
        """Write a file, which has no name yet."""
        path = self.path / name.with_name(f"{name.name}.{self._form}{UNFINISHED}")
        with _named_errors(path):
            path.parent.mkdir(exist_ok=True)
        self._written.append(path)
        with _writing(path, self._form, types) as writer:
            yield writer

    def publish(self, new: AuditPlan) -> None:
        """Give all files their names, those of sealed hours first, and then list the hours that they have."""
        hours = [_name_of(one, hour) for one in new.origins for hour in one.hours if one.snapshot.is_sealed(hour)]
        listed = self.path / f"{LIST}{UNFINISHED}"
        self._written.append(listed)
        with _named_errors(self.path):
            listed.write_text(json.dumps({**self._kind, "runs": [*self._runs, *([hours] if hours else [])]}, indent=0))
            for path in self._written:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            for path in sorted(self._written, key=lambda path: (path == listed, "sealed" not in path.name)):
                if path == listed:
                    self._sync()
                path.rename(path.with_suffix(""))
            self._sync()

    def remove_unfinished(self) -> None:
        """Remove files that have no name yet, and folders without any file."""
        for path in self._written:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in self._written} - {self.path}:
            if not any(folder.iterdir()):
                folder.rmdir()

    def _sync(self) -> None:
        for folder in {path.parent for path in self._written}:
            RealDisk().sync_folder(str(folder))


def _said(path: Path) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise BadArgument(f"{path} is no list of an export ({error}): name another folder") from error
    return said


def _name_of(origin: AuditedOrigin, hour: int) -> str:
    return f"{origin.log_id:016x}/{hour_name(hour)}"


def _columns(tables: HourTables, name: str, subject: str | None) -> Columns:
    columns = {column: make(tables) for column, (_, make) in TABLES[name].columns.items()}
    if subject is None:
        return columns
    chosen = tables.of_subject(name, subject)
    return {column: cells.take(chosen) for column, cells in columns.items()}


def _totals(books: HourBooks, subject: str | None) -> Columns:
    """The row of an hour in the table `hour` (rule S5); of a part of the messages no hour's total is known."""
    one, hour = books.origin, books.hour
    row = f"{one.log_id:016x}", hour_name(hour), one.snapshot.counted(hour), one.dropped.get(hour, 0)
    return columns_of(HOUR, [row] if subject is None else [])


def _facts(plan: AuditPlan, faults: Sequence[Finding], subject: str | None) -> dict[str, Columns]:
    """The tables of FACTS: when servers were up, where targets begin, the terms, and totals of servers (rule S5)."""

    def rows(one: AuditedOrigin, *each: tuple[Value, ...]) -> Iterator[tuple[Value, ...]]:
        return ((f"{one.log_id:016x}", *values) for values in each)

    spans, servers, skipped = (list[tuple[Value, ...]]() for _ in range(3))
    for one in plan.origins:
        known, word = one.terms.spans, one.snapshot.word
        spans += rows(one, (None, known.common.since_ms, known.common.until_ms))
        spans += rows(one, *((name, span.since_ms, span.until_ms) for name, span in known.of_subject.items()))
        servers += rows(one, (one.first_sequence, word.next_sequence))
        skipped += rows(one, *word.skipped)
    terms = plan.terms
    facts: dict[str, Sequence[tuple[Value, ...]]] = {
        "span": spans,
        "target": [(f"{target.log_id:016x}", target.start) for target in plan.index.targets],
        "terms": [(terms.now_ms, terms.lost_grace_ms, terms.late_ms_limit)],
        "server": servers,
        "skipped": skipped,
        "fault": [(f"{fault.log_id:016x}", hour_name(fault.hour), fault.detail) for fault in faults],
    }
    columns = {name: columns_of(FACTS[name], listed) for name, listed in facts.items()}
    return columns | {"consumption": consumption(plan, subject)}


@contextmanager
def _writing(path: Path, form: str, types: Types) -> Iterator["_CsvWriter | ParquetRows"]:
    with _named_errors(path):
        writer = _CsvWriter(path, types) if form == "csv" else _parquet(path, types)
    try:
        yield writer
    finally:
        with _named_errors(path):
            writer.close()


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Only writing is done within this context: if a log can't be read, that is no fault of the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(str(path)) from error
        raise NotWritable(str(path), os.strerror(error.errno) if error.errno else str(error)) from error


def _parquet(path: Path, types: Types) -> "ParquetRows":
    # Only this form needs pyarrow, which may be missing.
    from delayd.reading.parquet import ParquetRows

    return ParquetRows(path, types)


class _CsvWriter:
    """Writes a null as an empty field."""

    def __init__(self, path: Path, types: Mapping[str, str]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(types)
        self._types = types

    def write(self, columns: Columns) -> None:
        for first in range(0, count_rows(columns), CSV_ROWS):
            part = {name: cells.take(slice(first, first + CSV_ROWS)) for name, cells in columns.items()}
            listed = (map(partial(_csv_cell, self._types[name]), cells.to_list()) for name, cells in part.items())
            self._writer.writerows(zip(*listed, strict=True))

    def close(self) -> None:
        self._file.close()


def _csv_cell(kind: str, value: Value) -> Value:
    if kind == "boolean":
        return "true" if value else "false"
    # Digits alone would be read as a number, which drops leading zeros, or as a number with an exponent.
    return f"{CSV_ID_PREFIX}{value}" if kind == "id" and value is not None else value
