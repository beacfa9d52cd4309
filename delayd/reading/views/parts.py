"""Parts: what one process reads of a view: hours of data directories and of archives, and rows that are known already.

Invariant: a part that is read again gives the same rows. An hour whose files do not check has no rows, and is DAMAGED
in the view ``hours``; the other hours of the part are read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from delayd.batch.columns import Int64s
from delayd.errors import DamagedData
from delayd.hours import HOUR_MS, hour_name
from delayd.machine.disk import RealDisk
from delayd.reading.archive.carried import PROVED
from delayd.reading.archive.notes import Note
from delayd.reading.archive.pieces import (
    NOT_SEALED,
    ArchivedCheck,
    ArchivedRows,
    audit_pieces,
    fetch_checked,
    fetch_note,
    live_rows,
    seal_of,
    with_bounds,
)
from delayd.reading.archive.rows import join_targets, read_schedule
from delayd.reading.archive.store import ArchiveStore, open_store
from delayd.reading.arrow import TYPES
from delayd.reading.audit import AuditTerms
from delayd.reading.books import audit_books, seal_books
from delayd.reading.conditions import Comparison, due_ms_max
from delayd.reading.files.items import read_items
from delayd.reading.files.origins import MessageTail
from delayd.reading.files.row_arrays import UInt64s
from delayd.reading.files.target_index import NO_INDEX, TargetIndex
from delayd.reading.findings import COUNTS, QUANTILES, Finding, Findings, HourSummary, join_findings, join_parts
from delayd.reading.plan import AuditPlan, HourBooks, plan_hours
from delayd.reading.seals import SealBook
from delayd.reading.tables import TABLES, Cells, Columns, HourTables, Value, columns_of, count_rows
from delayd.reading.views.held import ArchivedAtTargets, PlacedFile, fetch_held
from delayd.reading.views.query import AT_TARGETS, AUDITED, HOURS, ViewQuery

HourOf = tuple[int, int]  # A delay server's log_id, and the hour since the epoch.
# States of an hour besides OPEN and CLOSED; the rows of a BROKEN one are not those of its seal.
BY_SUBJECT = ("schedule", "dispatch", "lifecycle")  # Views whose rows have the subjects of scheduled ones.
SEALED, BROKEN, DAMAGED = "SEALED", "BROKEN", "DAMAGED"
PLACE = "place"  # The order in a log, which an archive does not keep.
# Columns that a schedule in an archive has as the views have them.
SAME_IN_ARCHIVE = ("sequence", "subject", "deliver_at_ms", "outcome")


@dataclass(frozen=True, slots=True)
class DirectoryHours:
    """Hours of a plan, with the ends of their message logs; None: the part reads these itself.

    ``shares`` says of an hour that several parts read which of its pieces this one reads: each n-th from the k-th on.
    ``damaged`` says of hours what is wrong with their files. ``held`` has files of archives that say more than the
    realtime logs do of what targets hold of an hour.
    """

    plan: AuditPlan
    tails: tuple[MessageTail, ...] | None
    shares: Mapping[HourOf, tuple[int, int]]
    damaged: Mapping[HourOf, str]
    held: Mapping[HourOf, Sequence[PlacedFile]]


@dataclass(frozen=True, slots=True)
class ArchivedHour:
    """An hour of an archive: its schedule, and what realtime servers held of it.

    ``live`` has the targets whose logs are here and whose rows of this hour no archive has, with their batches of it.
    """

    schedule: PlacedFile
    messages: tuple[PlacedFile, ...]
    terms: AuditTerms
    live: TargetIndex = NO_INDEX

    @property
    def key(self) -> HourOf:
        return self.schedule.key.origin, self.schedule.key.hour


@dataclass(frozen=True, slots=True)
class ViewPart:
    """What one process reads; it can be pickled."""

    query: ViewQuery
    hours: DirectoryHours | None = None
    archived: tuple[ArchivedHour, ...] = ()
    rows: tuple[Columns, ...] = ()  # Tables that the planner has made already.

    def read(self) -> Iterator[pa.RecordBatch]:
        """Read the rows. Raises LogMoved when a server moved its files on since the plan was made."""
        for table in self.rows:
            yield from self.query.batches(count_rows(table), table.__getitem__)
        if self.hours is not None:
            yield from _read_directories(self.query, self.hours)
        for hour in self.archived:
            yield from _read_archived(self.query, hour)


def hour_row(key: HourOf, state: str, detail: str, summary: HourSummary | None) -> tuple[Value, ...]:
    """An hour as a row of the view ``hours``; figures are null without a summary, and the hour when it is 0."""
    log_id, hour = key
    begins_ms = hour * HOUR_MS if hour else None
    names = hour_name(hour) if hour else None, f"{log_id:016x}", begins_ms, begins_ms, state, detail or None
    if summary is None:
        return (*names, *(None for _ in (*COUNTS, *QUANTILES)), None)
    late = (summary.late_ms(quantile) for quantile in QUANTILES)
    return (*names, *(int(getattr(summary, name)) for name in COUNTS), *late, summary.balanced)


def finding_row(finding: Finding) -> tuple[Value, ...]:
    """A finding as a row of the view ``findings``; one about totals has no message."""
    due_ms = finding.deliver_at_ms if finding.sequence else None
    name = hour_name(finding.hour) if finding.hour else None
    kind, subject = finding.kind.name, finding.subject or None
    return name, f"{finding.log_id:016x}", kind, subject, finding.sequence or None, due_ms, due_ms, finding.detail


def _read_directories(query: ViewQuery, hours: DirectoryHours) -> Iterator[pa.RecordBatch]:
    disk = RealDisk()
    books = seal_books(disk, hours.plan) if query.view in AUDITED else {}
    # A table has no column of bodies but their lengths; an audit verifies each byte.
    whole, wanted = query.view in AUDITED, _wanted_subjects(query)
    for hour in plan_hours(disk, hours.plan, hours.tails, whole=whole, wanted=wanted):
        key = hour.log_id, hour.hour
        if files := hours.held.get(key):
            hour = ArchivedAtTargets.of(hour, files)
        what = hours.damaged.get(key)
        if what is None:
            try:
                if books:
                    yield from _audit_directory_hour(query, hour, hours.plan, books[hour.log_id])
                else:
                    first, step = hours.shares.get(key, (0, 1))
                    for piece in hour.parts()[first::step]:
                        yield from _table(query, HourTables(piece), hour)
            except DamagedData as error:
                what = error.message
        if what is not None:
            yield from _damaged(query, key, what)


def _wanted_subjects(query: ViewQuery) -> Callable[[str], bool] | None:
    """Which scheduled rows can meet the conditions, by subject; None: all.

    An outcome has the subject of its scheduled row, so one without such a row can't be told from one whose row is left
    out: then the condition that it has none is not among them.
    """
    said = [each for each in query.conditions if each.column == "subject"]
    if (
        not said
        or query.view not in BY_SUBJECT
        or any(each.comparison is Comparison.NULL and not each.negated for each in said)
    ):
        return None
    return lambda name: all(each.holds(name) for each in said)


def _audit_directory_hour(
    query: ViewQuery, hour: HourBooks, plan: AuditPlan, book: SealBook
) -> Iterator[pa.RecordBatch]:
    found, summary, differs = audit_books(hour, book)
    snapshot, state = hour.origin.snapshot, "OPEN"
    if snapshot.is_closed(hour.hour):
        state = SEALED if snapshot.is_sealed(hour.hour) else "CLOSED"
    yield from _judged(query, (hour.log_id, hour.hour), state, differs or [], summary, found)


def _read_archived(query: ViewQuery, hour: ArchivedHour) -> Iterator[pa.RecordBatch]:
    key, store = hour.key, open_store(hour.schedule.uri)
    try:
        with TemporaryDirectory() as folder:
            note = fetch_note(store, hour.schedule.key, Path(folder))
            # Without a digest retention was faster than the archiver.
            if note.sha256 and _may_be_due(query, note):
                yield from _archived_rows(query, hour, store, note, Path(folder))
    except FileNotFoundError as error:
        yield from _damaged(query, key, f"a note of the archive is gone: {error}")
    except DamagedData as error:
        yield from _damaged(query, key, error.message)


def _archived_rows(
    query: ViewQuery, hour: ArchivedHour, store: ArchiveStore, note: Note, folder: Path
) -> Iterator[pa.RecordBatch]:
    log_id, number = note.key.origin, note.key.hour
    held = []
    if query.view in AT_TARGETS:
        held = [*(fetch_held(file, folder) for file in hour.messages), *live_rows(hour.live)]
    if query.view == "message":
        for each in held:
            for piece in each.pieces:
                yield from _table(query, ArchivedTables(ArchivedRows(log_id, number, hour.terms, NOT_SEALED, piece)))
        return
    path, name = fetch_checked(store, note, folder), f"{store.uri}/{note.key.file}"
    if query.view in AUDITED:
        check = ArchivedCheck(seal_of(note).facts)
        pieces = with_bounds(read_schedule(name, note.key, path, carried=PROVED))
        found = list(audit_pieces(note.key, pieces, held, hour.terms, check))
        summary, findings = join_parts([each for _, each in found]), join_findings([each for each, _ in found])
        yield from _judged(query, (log_id, number), SEALED, check.differences(), summary, findings)
        return
    conditions = [each for each in query.conditions if each.column in SAME_IN_ARCHIVE]
    for rows, until in with_bounds(read_schedule(name, note.key, path, conditions, query.items)):
        realtime = join_targets([each.below(until) for each in held])
        yield from _table(query, ArchivedTables(ArchivedRows(log_id, number, hour.terms, rows, realtime)))


def _may_be_due(query: ViewQuery, note: Note) -> bool:
    latest_ms = due_ms_max(query.conditions)
    return latest_ms is None or query.view not in TABLES or seal_of(note).facts.due_min_ms <= latest_ms


def _judged(
    query: ViewQuery, key: HourOf, state: str, differs: Sequence[str], summary: HourSummary, findings: Findings
) -> Iterator[pa.RecordBatch]:
    if query.view == HOURS:
        yield from _audited(query, [hour_row(key, BROKEN if differs else state, "; ".join(differs), summary)])
    else:
        yield from _audited(query, [finding_row(each) for each in findings])


def _damaged(query: ViewQuery, key: HourOf, what: str) -> Iterator[pa.RecordBatch]:
    if query.view == HOURS:
        yield from _audited(query, [hour_row(key, DAMAGED, what, None)])


def _audited(query: ViewQuery, rows: Sequence[tuple[Value, ...]]) -> Iterator[pa.RecordBatch]:
    table = columns_of(AUDITED[query.view], rows)
    return query.batches(len(rows), table.__getitem__)


def _table(query: ViewQuery, tables: HourTables, hour: HourBooks | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a table that stand in the logs of an hour; items are read where its files are."""

    def items(rows: Int64s) -> dict[str, pa.Array]:
        if isinstance(tables, ArchivedTables):
            found = tables.carried.take(pa.array(rows))
            return {name: pa.concat_arrays(found.column(name).chunks) for name in found.column_names}
        if hour is None:
            raise AssertionError("an hour that is in no archive is in a directory")
        read = read_items(hour.disk, hour.origin.snapshot, hour.hour, tables.schedule.take(rows), query.items)
        return {name: pa.array(each, TYPES[name]) for name, each in read.items()}

    def make(name: str) -> Cells:
        if name == PLACE and is_mixed:
            return Cells(np.zeros(count, np.int64), np.zeros(count, np.bool_))
        return columns[name][1](tables)

    is_mixed = hour is None or (query.view == "message" and isinstance(hour, ArchivedAtTargets))
    kind = TABLES[query.view]
    columns, count = kind.columns, kind.count(tables)
    return query.batches(count, make, items)


class ArchivedTables(HourTables):
    """Some rows of an archived hour, whose outcomes name other rows in a column of their own."""

    def __init__(self, rows: ArchivedRows) -> None:
        super().__init__(rows)
        self._others, self.carried = rows.sealed.others, rows.sealed.carried

    @cached_property
    def others(self) -> UInt64s:
        found: UInt64s = self._others.of(self.outcomes.sequences).view(np.uint64)
        return found
