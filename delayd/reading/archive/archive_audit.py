"""Archive audit: the books of an archive, from its files alone (docs/archive.md).

Invariant: an hour is judged by the same comparison as in a data directory, so it has the same findings, and its rows
are compared with its seal. A file that is missing, or is not the one that its note names, is named by its path, and the
others are audited. Only pieces of an hour's schedule are in memory.

Importing it needs pyarrow.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from delayd.batch.content import Tally, tally
from delayd.errors import BadArgument, DamagedData
from delayd.log.hour import NO_SEAL
from delayd.reading.archive.notes import (
    MESSAGE,
    NOTES,
    TABLES,
    ArchivedKey,
    Note,
    key_of_note,
)
from delayd.reading.archive.pieces import HeldRows, audit_pieces, fetch_checked, fetch_note, seal_of, with_bounds
from delayd.reading.archive.rows import read_message, read_schedule
from delayd.reading.archive.store import ArchiveStore
from delayd.reading.audit import LATE_MS_LIMIT, AuditTerms, Span, Spans
from delayd.reading.books import FINDINGS_LIMIT, AuditReport, Collected
from delayd.reading.files.row_arrays import BATCH, Target, TargetRows
from delayd.reading.files.target_index import TargetIndex
from delayd.reading.findings import FINDING, Finding, FindingKind, Findings, HourSummary, join_findings, join_parts
from delayd.reading.plan import AuditPlan
from delayd.reading.seals import SealCheck, SealReport, SealState

Progress = Callable[[int, int], None]  # Hours audited, hours in all.
NO_INDEX = TargetIndex((), np.empty(0, BATCH), (), ())


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
    run = _Books(store, AuditTerms(now_ms, Spans(Span(0, 0)), late_ms_limit))
    run.read_notes()
    collected = Collected(findings_limit)
    wanted = [note for note in run.schedules if hours is None or note.key.hour in hours]
    for done, note in enumerate(wanted, 1):
        found, summary = run.audit(note)
        if summary is not None:
            collected.add(summary, found.first(findings_limit), found.caused(), found.sha256)
        if progress is not None:
            progress(done, len(wanted))
    report = collected.report(store.uri, run.terms, AuditPlan((), NO_INDEX), {}, sorted(run.faults))
    return replace(report, seals=tuple(run.seal_reports()), deleted_rows=run.deleted_rows, unnoted=tuple(run.unnoted))


@dataclass(slots=True)
class _Books:
    store: ArchiveStore
    terms: AuditTerms
    schedules: list[Note] = field(default_factory=list)  # By delay server, and number of the seal.
    faults: list[Finding] = field(default_factory=list)
    unnoted: list[str] = field(default_factory=list)
    deleted_rows: int = 0
    _messages: dict[tuple[int, int], list[Note]] = field(default_factory=dict)  # By delay server and hour.
    _seals: dict[ArchivedKey, list[str]] = field(default_factory=dict)  # What breaks them.
    _verified: set[ArchivedKey] = field(default_factory=set)

    def read_notes(self) -> None:
        """Read all notes, and follow the chains of their seals."""
        files = [name for table in TABLES for name in self.store.names(table)]
        found = {key: name for name in self.store.names(NOTES) if (key := key_of_note(name)) is not None}
        if not found:
            raise BadArgument(f"{self.store.uri} holds no archive; give what `delayd archive --to` was given")
        known = {key.file for key in found}
        for name in files:
            if name not in known:
                self.unnoted.append(self._uri(name))
        with TemporaryDirectory() as folder:
            for key in sorted(found):
                self._read_note(key, Path(folder))
        self.schedules.sort(key=lambda note: (note.key.origin, seal_of(note).number))
        for one in sorted({note.key.origin for note in self.schedules}):
            self._follow([note for note in self.schedules if note.key.origin == one])
        known_hours = {(note.key.origin, note.key.hour) for note in self.schedules}
        for (origin, hour), notes in self._messages.items():
            if (origin, hour) not in known_hours:
                for note in notes:
                    self._fault(note.key, f"{self._uri(note.key.note)}: the archive has no schedule of this hour")

    def audit(self, note: Note) -> tuple[Findings, HourSummary | None]:
        """Compare the tables of an hour, and its rows with its seal; no figures if its schedule can't be read."""
        key = note.key
        nothing = Findings(key.origin, key.hour, np.empty(0, FINDING), ())
        with TemporaryDirectory() as folder:
            try:
                held = list(self._held(key, Path(folder)))
                if not note.sha256:
                    self._compare_removed(note, held)
                    return nothing, None
                found = list(self._audit_pieces(note, fetch_checked(self.store, note, Path(folder)), held))
            except DamagedData as error:
                self._fault(key, f"{error.path}: {error.what}")
                return nothing, None
        return join_findings([each for each, _ in found]), join_parts([each for _, each in found])

    def seal_reports(self) -> Iterator[SealReport]:
        """What became of the seals, by delay server and number."""
        for note in self.schedules:
            key, seal = note.key, seal_of(note)
            state = SealState.VERIFIED if key in self._verified else SealState.UNREAD
            if not note.sha256:
                state = SealState.DELETED
            if self._seals[key]:
                state = SealState.BROKEN
            yield SealReport(key.origin, key.hour, seal, state, "; ".join(self._seals[key]))

    def _audit_pieces(self, note: Note, path: Path, held: Sequence[HeldRows]) -> Iterator[tuple[Findings, HourSummary]]:
        key = note.key
        check = SealCheck(seal_of(note).facts)
        pieces = with_bounds(read_schedule(self._uri(key.file), key, path))
        yield from audit_pieces(key, pieces, held, self.terms, check)
        self._seals[key] += [f"{self._uri(key.file)}: {what}" for what in check.differences()]
        self._verified.add(key)

    def _held(self, key: ArchivedKey, folder: Path) -> Iterator[HeldRows]:
        """What each realtime server that is in the archive holds of an hour; one with a damaged file is left out."""
        for note in self._messages.get((key.origin, key.hour), ()):
            name = self._uri(note.key.file)
            rows: Iterator[TargetRows] = iter(())
            if note.sha256:
                try:
                    rows = read_message(name, note.key, fetch_checked(self.store, note, folder))
                except DamagedData as error:
                    self._fault(note.key, f"{error.path}: {error.what}")
                    continue
            yield HeldRows(Target(name, note.key.log_id, note.start_offset), rows)

    def _read_note(self, key: ArchivedKey, folder: Path) -> None:
        try:
            note = fetch_note(self.store, key, folder)
        except FileNotFoundError:
            return  # Somebody removes the archive at this moment.
        except DamagedData as error:
            self._fault(key, f"{error.path}: {error.what}")
            return
        if key.table == MESSAGE:
            self._messages.setdefault((key.origin, key.hour), []).append(note)
        else:
            self.schedules.append(note)
            self._seals[key] = []

    def _follow(self, notes: Sequence[Note]) -> None:
        """Follow the chain of one delay server's seals, from the first one on."""
        number, before = -1, NO_SEAL
        for note in notes:
            seal = seal_of(note)
            if seal.number == number:
                self._seals[note.key].append(f"another hour has seal {number}, too")
                continue
            for missing in range(number + 1, seal.number):
                what = f"{self.store.uri}: the hour of seal {missing} is missing, and later ones are there"
                self._fault(note.key._replace(hour=0), what)
            if seal.number == number + 1 and seal.previous_sha256 != before:
                self._seals[note.key].append("the seal before it is not the one that it follows")
            number, before = seal.number, seal.sha256

    def _compare_removed(self, note: Note, held: Sequence[HeldRows]) -> None:
        """Compare the seal of an hour whose rows are nowhere any more with what realtime servers held of it."""
        facts = seal_of(note).facts
        sealed, found = Tally(facts.dispatched, facts.tally_first, facts.tally_second), Tally()
        for each in held:
            for rows in each.pieces:
                found += tally(rows.sequence, rows.deliver_at_ms, rows.hashes())
        self.deleted_rows += found.rows
        same = found == sealed or found.rows < sealed.rows or facts.in_doubt
        if found.rows > sealed.rows + facts.in_doubt or not same:
            what = f"its realtime servers held {found.rows} messages of it with the tally {found.digest}"
            self._fault(note.key, f"{what}, its seal says {sealed.rows} with {sealed.digest}")

    def _fault(self, key: ArchivedKey, what: str) -> None:
        self.faults.append(Finding(key.hour, FindingKind.CONSERVATION, 0, 0, "", what, key.log_id))

    def _uri(self, name: str) -> str:
        return f"{self.store.uri}/{name}"
