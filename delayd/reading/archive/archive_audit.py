"""Archive audit: the books of archives, from their files alone (docs/archive.md).

Invariant: an hour is judged by the same comparison as in a data directory, so it has the same findings, and its rows
are compared with its seal. A file that is missing, or is not the one that its note names, is named by its path, and the
others are audited. Only pieces of an hour's schedule are in memory.

Notes are read first, by one process. Then each hour can be audited by itself, by whoever has its `HourFiles`.

Importing it needs pyarrow.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from delayd.batch.content import Tally, tally
from delayd.errors import BadArgument, DamagedData
from delayd.log.hour import NO_SEAL, Seal
from delayd.machine.disk import RealDisk
from delayd.reading.archive.carried import PROVED
from delayd.reading.archive.notes import (
    CONSUMPTION,
    MESSAGE,
    NOTES,
    SCHEDULE,
    TABLES,
    ArchivedKey,
    Note,
    key_of_note,
)
from delayd.reading.archive.pieces import (
    ArchivedCheck,
    HeldRows,
    audit_pieces,
    fetch_checked,
    fetch_note,
    held_rows,
    live_rows,
    seal_of,
    with_bounds,
)
from delayd.reading.archive.rows import read_groups, read_schedule
from delayd.reading.archive.store import ArchiveStore
from delayd.reading.audit import LATE_MS_LIMIT, AuditTerms
from delayd.reading.books import FINDINGS_LIMIT, AuditReport, HourResult, report_hours
from delayd.reading.files.target_index import NO_INDEX, TargetIndex
from delayd.reading.findings import Finding, Findings, HourKey, HourSummary, conservation, join_findings, join_parts
from delayd.reading.plan import AuditPlan
from delayd.reading.seals import SealBook, SealReport, SealState, held_differs

Progress = Callable[[int, int], None]  # Hours audited, hours in all.
Open = Callable[[str], ArchiveStore]  # Gives the store of an archive by its URI.


def audit_archive(
    store: ArchiveStore,
    *,
    now_ms: int,
    hours: Container[int] | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    findings_limit: int | None = FINDINGS_LIMIT,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit every hour of an archive; nothing in it is changed.

    Example::

        report = audit_archive(open_store("s3://books/delayd"), now_ms=time.time_ns() // 1_000_000)
        print(report.balanced, report.total.lost, [fault.detail for fault in report.faults])

    Args:
        store: where the archive is.
        now_ms: the wall clock, in milliseconds since the epoch, for the report.
        hours: which hours to audit, counted since the epoch; None for all. The chain of seals is followed in any case.
        late_ms_limit: a message that left later than this after it was due is LATE.
        findings_limit: how many findings to keep as rows, None for all; all are counted.
        progress: called with the hours done and all hours.

    Raises:
        BadArgument: there is no archive.
        NewerFormat: a newer delayd wrote a file of it.
        BadSetting, ServerUnavailable: the store can't be read.
    """
    books = ArchivedBooks([store], hours)
    terms = AuditTerms(now_ms, late_ms_limit=late_ms_limit)

    def audited() -> Iterator[HourResult]:
        for done, hour in enumerate(books.hours, 1):
            found = books.take(audit_archived(hour, terms, findings_limit, lambda _: store))
            if found is not None:
                yield found
            if progress is not None:
                progress(done, len(books.hours))

    plan = AuditPlan((), NO_INDEX, terms, data=(store.uri,))
    return report_hours(RealDisk(), plan, {}, audited(), findings_limit, books)


class ArchivedFile(NamedTuple):
    """One file of an archive, by the URI of the archive and its note."""

    uri: str
    note: Note

    @property
    def name(self) -> str:
        return f"{self.uri}/{self.note.key.file}"


@dataclass(frozen=True, slots=True)
class HourFiles:
    """What there is of one hour of one delay server; it can be pickled.

    ``live`` has the targets whose logs are here and whose rows of this hour no archive has, with their batches of it.
    """

    schedule: ArchivedFile
    messages: tuple[ArchivedFile, ...]
    live: TargetIndex = NO_INDEX
    consumed: tuple[ArchivedFile, ...] = ()

    @property
    def key(self) -> HourKey:
        return self.schedule.note.key.origin, self.schedule.note.key.hour

    @property
    def archived(self) -> set[int]:
        """The realtime servers of which archives have a file, by log_id."""
        return {file.note.key.log_id for file in self.messages}

    @property
    def seal(self) -> Seal:
        """The seal of the hour."""
        return seal_of(self.schedule.note)


class ArchivedResult(NamedTuple):
    """What the audit of an archived hour found; ``hour`` is None when its schedule is not there, or can't be read."""

    key: HourKey
    hour: HourResult | None
    differs: tuple[str, ...] | None = None  # How its rows differ from its seal; None when they were not compared.
    faults: tuple[Finding, ...] = ()
    deleted_rows: int = 0  # Rows at targets of an hour whose schedule retention removed before it was archived.


def audit_archived(hour: HourFiles, terms: AuditTerms, findings_limit: int | None, open_: Open) -> ArchivedResult:
    """Compare the tables of an hour with each other, and its rows with its seal."""
    run = _HourRun(hour, terms, open_)
    with TemporaryDirectory() as folder:
        try:
            held = list(run.held(Path(folder)))
            run.compare_groups(Path(folder))
            if not hour.schedule.note.sha256:
                rows = run.compare_removed(held)
                return ArchivedResult(hour.key, None, None, tuple(run.faults), rows)
            parts = list(run.pieces(Path(folder), held))
        except DamagedData as error:
            run.fault(hour.schedule.note.key, f"{error.path}: {error.what}")
            return ArchivedResult(hour.key, None, None, tuple(run.faults))
    found, summary = join_findings([each for each, _ in parts]), join_parts([each for _, each in parts])
    result = HourResult.of(found, summary, findings_limit)
    return ArchivedResult(hour.key, result, tuple(run.differs), tuple(run.faults))


class _HourRun:
    """The audit of one archived hour."""

    def __init__(self, hour: HourFiles, terms: AuditTerms, open_: Open) -> None:
        self._hour, self._terms, self._open = hour, terms, open_
        self.faults: list[Finding] = []
        self.differs: list[str] = []

    def pieces(self, folder: Path, held: Sequence[HeldRows]) -> Iterator[tuple[Findings, HourSummary]]:
        """Audit the hour in pieces."""
        key, name = self._hour.schedule.note.key, self._hour.schedule.name
        check = ArchivedCheck(self._hour.seal.facts)
        path = self._fetch(self._hour.schedule, folder)
        pieces = with_bounds(read_schedule(name, key, path, carried=PROVED))
        yield from audit_pieces(key, pieces, held, self._terms, check)
        self.differs += [f"{name}: {what}" for what in check.differences()]

    def held(self, folder: Path) -> Iterator[HeldRows]:
        """What each realtime server holds of the hour; one with a damaged file is left out."""
        for file in self._hour.messages:
            try:
                yield held_rows(self._open(file.uri), file.note, folder)
            except DamagedData as error:
                self.fault(file.note.key, f"{error.path}: {error.what}")
        yield from live_rows(self._hour.live)

    def compare_groups(self, folder: Path) -> None:
        """Check that what groups were given is what became of it."""
        for file in self._hour.consumed:
            if not file.note.sha256:
                continue
            try:
                groups = read_groups(file.name, file.note.key, self._fetch(file, folder))
            except DamagedData as error:
                self.fault(file.note.key, f"{error.path}: {error.what}")
                continue
            for books in groups:
                became = books.acknowledged + books.given_back + books.sent_back + books.lapsed + books.outstanding
                if books.pulled != became:
                    what = f"group {books.group} of {books.subject} was given {books.pulled} messages, and"
                    self.fault(file.note.key, f"{file.name}: {what} {became} became of them")

    def compare_removed(self, held: Sequence[HeldRows]) -> int:
        """Compare the seal of an hour whose rows are nowhere any more with what realtime servers held of it; count
        that.
        """
        found = Tally()
        for each in held:
            for rows in each.pieces:
                found += tally(rows.sequence, rows.deliver_at_ms, rows.hashes())
        if what := held_differs(found, self._hour.seal.facts):
            self.fault(self._hour.schedule.note.key, what)
        return found.rows

    def fault(self, key: ArchivedKey, what: str) -> None:
        """Note what is wrong with a file or a total."""
        self.faults.append(_fault(key, what))

    def _fetch(self, file: ArchivedFile, folder: Path) -> Path:
        return fetch_checked(self._open(file.uri), file.note, folder)


class ArchivedBooks:
    """The notes of some archives, each hour once, and what the audits of the hours have found so far."""

    def __init__(self, stores: Sequence[ArchiveStore], wanted: Container[int] | None = None) -> None:
        """Read all notes, and follow the chains of their seals; ``wanted`` are the hours to audit, None for all.

        Raises:
            BadArgument: a store holds no archive.
            NewerFormat: a newer delayd wrote a note.
        """
        self.hours: list[HourFiles] = []  # By delay server, and number of the seal.
        self.faults: list[Finding] = []
        self.unnoted: list[str] = []
        self.deleted_rows = 0
        self.doubled: list[str] = []
        self._files: dict[ArchivedKey, ArchivedFile] = {}
        self._seals: dict[HourKey, list[str]] = {}  # What breaks them.
        self._verified: set[HourKey] = set()
        self._gaps: dict[tuple[int, int], Finding] = {}  # By delay server and number: seals whose hours are missing.
        for store in stores:
            self._read_notes(store)
        self._every = self._join()
        for one in sorted({hour.key[0] for hour in self._every}):
            self._follow([hour for hour in self._every if hour.key[0] == one])
        self.hours = [hour for hour in self._every if wanted is None or hour.key[1] in wanted]

    def take(self, result: ArchivedResult) -> HourResult | None:
        """Take what the audit of one of the hours found; its figures are the caller's to add."""
        self.faults += result.faults
        self.deleted_rows += result.deleted_rows
        if result.differs is not None:
            self._seals[result.key] += result.differs
            self._verified.add(result.key)
        return result.hour

    def compare_seals(self, plan: AuditPlan, books: Mapping[int, SealBook]) -> None:
        """Compare with the seals of the delay servers of a plan, by their log_ids; they have the rows of those that are
        standing.
        """
        for origin in plan.origins:
            book = books[origin.log_id]
            for number, seal in enumerate(book.seals):
                if book.has_standing(seal.facts.hour):
                    self._gaps.pop((origin.log_id, number), None)
            own = [hour for hour in self._every if hour.key[0] == origin.log_id]
            self._compare(origin.snapshot.directory.path, book.seals, own)

    def _compare(self, path: str, seals: Sequence[Seal], hours: Sequence[HourFiles]) -> None:
        for hour in hours:
            number = hour.seal.number
            if number >= len(seals):
                what = f"{hour.schedule.uri}/{hour.schedule.note.key.note}: {path} has no seal {number}"
                self.faults.append(_fault(hour.schedule.note.key, f"{what}, so it is an older copy"))
            elif seals[number].sha256 != hour.seal.sha256:
                self._seals[hour.key].append(f"{path} has another seal {number}")

    def totals(self) -> list[Finding]:
        """What concerns no single message."""
        return sorted([*self.faults, *self._gaps.values()])

    def seal_reports(self) -> Iterator[SealReport]:
        """What became of the seals, by delay server and number."""
        for hour in self._every:
            state = SealState.VERIFIED if hour.key in self._verified else SealState.UNREAD
            if not hour.schedule.note.sha256:
                state = SealState.DELETED
            if self._seals[hour.key]:
                state = SealState.BROKEN
            yield SealReport(*hour.key, hour.seal, state, "; ".join(self._seals[hour.key]))

    def _read_notes(self, store: ArchiveStore) -> None:
        files = [name for table in TABLES for name in store.names(table)]
        found = {key: name for name in store.names(NOTES) if (key := key_of_note(name)) is not None}
        if not found:
            raise BadArgument(f"{store.uri} holds no archive; give what `delayd archive --to` was given")
        known = {key.file for key in found}
        self.unnoted += [f"{store.uri}/{name}" for name in files if name not in known]
        twice = dict[str, int]()
        with TemporaryDirectory() as folder:
            for key in sorted(found):
                other = self._read_note(store, key, Path(folder))
                if other is not None:
                    twice[other] = twice.get(other, 0) + 1
        self.doubled += [
            f"{count:,} files of {store.uri} are left out: {other} has them, too, and an hour counts once"
            for other, count in twice.items()
        ]

    def _read_note(self, store: ArchiveStore, key: ArchivedKey, folder: Path) -> str | None:
        """Read a note; returns the archive that has this file already, if one has."""
        name = f"{store.uri}/{key.note}"
        try:
            note = fetch_note(store, key, folder)
        except FileNotFoundError:
            return None  # Somebody removes the archive at this moment.
        except DamagedData as error:
            self.faults.append(_fault(key, f"{error.path}: {error.what}"))
            return None
        first = self._files.setdefault(key, ArchivedFile(store.uri, note))
        if first.uri == store.uri and first.note is note:
            return None
        if (first.note.rows, first.note.seal) != (note.rows, note.seal):
            self.faults.append(_fault(key, f"{first.uri}/{key.note} and {name} are of the same hour, and differ"))
        return first.uri

    def _join(self) -> list[HourFiles]:
        tables: dict[str, dict[HourKey, list[ArchivedFile]]] = {table: {} for table in TABLES}
        for key, file in self._files.items():
            tables[key.table].setdefault((key.origin, key.hour), []).append(file)
        messages, consumed = tables[MESSAGE], tables[CONSUMPTION]
        joined = [
            HourFiles(file, tuple(messages.pop(hour, ())), consumed=tuple(consumed.pop(hour, ())))
            for hour, files in tables[SCHEDULE].items()
            for file in files
        ]
        for files in (*messages.values(), *consumed.values()):
            for file in files:
                what = f"{file.uri}/{file.note.key.note}: the archive has no schedule of this hour"
                self.faults.append(_fault(file.note.key, what))
        return sorted(joined, key=lambda hour: (hour.key[0], hour.seal.number))

    def _follow(self, hours: Sequence[HourFiles]) -> None:
        """Follow the chain of one delay server's seals, from the first one on."""
        number, before = -1, NO_SEAL
        for hour in hours:
            seal, broken = hour.seal, self._seals.setdefault(hour.key, [])
            if seal.number == number:
                broken.append(f"another hour has seal {number}, too")
                continue
            for missing in range(number + 1, seal.number):
                what = f"{hour.schedule.uri}: the hour of seal {missing} is missing, and later ones are there"
                self._gaps[hour.key[0], missing] = _fault(hour.schedule.note.key._replace(hour=0), what)
            if seal.number == number + 1 and seal.previous_sha256 != before:
                broken.append("the seal before it is not the one that it follows")
            number, before = seal.number, seal.sha256


def _fault(key: ArchivedKey, what: str) -> Finding:
    return conservation(key.hour, key.log_id, what)
