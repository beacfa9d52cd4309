"""Export: the logs of a data directory as files that any engine reads, one a table (docs/audit.md).

Invariant: all tables are read by one plan (rule P3), so they fit together even for a live directory. The files get
their names when all are complete. Only an hour is kept in memory, and in Parquet a group of rows.
"""

import csv
import errno
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from delayd.errors import BadArgument, BadSetting, DiskFull, NotWritable
from delayd.hours import hour_name
from delayd.machine.disk import Disk, RealDisk
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS
from delayd.reading.books import Progress, plan_faults, seal_books
from delayd.reading.files.origins import MessageTail
from delayd.reading.files.stored_groups import until_still
from delayd.reading.findings import Finding
from delayd.reading.plan import AuditedOrigin, AuditPlan, plan_audit, plan_hours
from delayd.reading.tables import (
    CONSUMPTION,
    TABLES,
    Columns,
    HourTables,
    TableKind,
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
# What an audit of the tables needs besides the logs, with a row for each server, hour or sum.
FACTS: Mapping[str, Types] = {
    "span": {"log_id": "id", "subject": "string", "since_ms": "long", "until_ms": "long"},
    "target": {"log_id": "id", "start_offset": "long"},
    "terms": {"now_ms": "long", "grace_ms": "long", "late_ms_limit": "long"},
    "server": {"log_id": "id", "first_sequence": "long", "next_sequence": "long"},
    "skipped": {"log_id": "id", "first_sequence": "long", "count": "long"},
    "hour": {"log_id": "id", "hour": "string", "counted": "long", "dropped": "long"},
    "fault": {"log_id": "id", "hour": "string", "detail": "string"},
    "consumption": CONSUMPTION,
}
CSV_ROWS = 8_192  # Rows that are Python objects at a time.
UNFINISHED = ".part"
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
    """Write the logs of a data directory, live, stopped or copied, as tables: their rows by name.

    Args:
        data: the directory that `delayd up --data` was given.
        folder: a new or empty folder, which receives one file a table.
        now_ms: the wall clock, for the table of terms.
        form: "parquet", which needs pyarrow, or "csv".
        hours: which to write, as hours since the epoch; None for all.
        subject: messages of this subject only.
        late_ms_limit: what an audit of the export takes for LATE.
        lost_grace_ms: and for how long it waits before it calls a row LOST.
        progress: called with the hours done and all hours.
        disk: where ``data`` is; the folder is the operating system's.

    Raises:
        BadArgument: there is nothing to export, or the folder is not empty.
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
    place = Path(folder)
    with _named_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        empty = not any(place.iterdir())
    if not empty:
        raise BadArgument(f"{folder} is not empty: name a new folder, so that no table of another export stays in it")
    paths = {name: place / f"{name}.{form}{UNFINISHED}" for name in (*LOGS, *FACTS)}
    try:
        counts = _write_tables(disk, plan, paths, form, subject, tails, progress)
    except BaseException:
        for path in paths.values():
            path.unlink(missing_ok=True)
        raise
    for path in paths.values():
        with _named_errors(place):
            path.rename(path.with_suffix(""))
    return counts


def _write_tables(
    disk: Disk,
    plan: AuditPlan,
    paths: Mapping[str, Path],
    form: str,
    subject: str | None,
    tails: Sequence[MessageTail] | None,
    progress: Progress | None,
) -> dict[str, int]:
    counts = dict.fromkeys(paths, 0)
    with ExitStack() as opened:
        writers = {name: opened.enter_context(_writing(paths[name], form, TABLES[name].types)) for name in LOGS}
        for done, books in enumerate(plan_hours(disk, plan, tails), 1):
            tables = HourTables(books)
            for name in LOGS:
                columns = _columns(tables, name, TABLES[name], subject)
                counts[name] += count_rows(columns)
                with _named_errors(paths[name]):
                    writers[name].write(columns)
            if progress is not None:
                progress(done, plan.hour_count)
    faults = plan_faults(disk, plan, seal_books(disk, plan))
    for name, columns in _facts(plan, faults, subject).items():
        with _writing(paths[name], form, FACTS[name]) as facts, _named_errors(paths[name]):
            facts.write(columns)
        counts[name] = count_rows(columns)
    return counts


def _columns(tables: HourTables, name: str, table: TableKind[HourTables], subject: str | None) -> Columns:
    columns = {column: make(tables) for column, (_, make) in table.columns.items()}
    if subject is None:
        return columns
    chosen = tables.of_subject(name, subject)
    return {column: cells.take(chosen) for column, cells in columns.items()}


def _facts(plan: AuditPlan, faults: Sequence[Finding], subject: str | None) -> dict[str, Columns]:
    """The tables of FACTS: when servers were up, where targets begin, the terms, and totals of servers and hours (rule
    S5); of a part of the messages no hour's total is known.
    """

    def rows(one: AuditedOrigin, *each: tuple[Value, ...]) -> Iterator[tuple[Value, ...]]:
        return ((f"{one.log_id:016x}", *values) for values in each)

    spans, servers, skipped, hours = (list[tuple[Value, ...]]() for _ in range(4))
    for one in plan.origins:
        known, word = one.terms.spans, one.snapshot.word
        spans += rows(one, (None, known.common.since_ms, known.common.until_ms))
        spans += rows(one, *((name, span.since_ms, span.until_ms) for name, span in known.of_subject.items()))
        servers += rows(one, (one.first_sequence, word.next_sequence))
        skipped += rows(one, *word.skipped)
        counts = ((hour_name(hour), one.snapshot.counted(hour), one.dropped.get(hour, 0)) for hour in one.hours)
        hours += rows(one, *(counts if subject is None else ()))
    terms = plan.terms
    facts: dict[str, Sequence[tuple[Value, ...]]] = {
        "span": spans,
        "target": [(f"{target.log_id:016x}", target.start) for target in plan.index.targets],
        "terms": [(terms.now_ms, terms.lost_grace_ms, terms.late_ms_limit)],
        "server": servers,
        "skipped": skipped,
        "hour": hours,
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
