"""Books: the audit of each hour of a data directory, put together, and whether its totals add up.

Invariant: the figures are sums over hours, so it does not matter who audits which hour, or when.
"""

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from delayd.batch.content import tally
from delayd.hours import hour_name, hour_start_ms
from delayd.log.hour import RESTORED_STEP, OutcomeRows, Seal, dispatch_path
from delayd.machine.disk import Disk, RealDisk
from delayd.outcome import Outcome
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS, NO_OTHERS, audit_hour
from delayd.reading.consumption import GroupBooks, beyond
from delayd.reading.files.directory import ScheduleSnapshot
from delayd.reading.files.origins import MessageTail, read_outcomes
from delayd.reading.files.row_arrays import Sorter, Sparse
from delayd.reading.files.stored_groups import TornTail, file_size, segment_bases, until_still
from delayd.reading.files.target_index import read_target_rows
from delayd.reading.findings import (
    AcceptanceState,
    CausedFindings,
    Finding,
    FindingKind,
    Findings,
    HourKey,
    HourSummary,
    JudgedAcceptance,
    StoredAcceptance,
    conservation,
    join_findings,
    join_parts,
    judge,
    sum_up,
)
from delayd.reading.plan import (
    AuditPlan,
    HourBooks,
    LastLife,
    LifeState,
    MissingServer,
    missing_servers,
    plan_audit,
    plan_hours,
)
from delayd.reading.seals import (
    SealBook,
    SealCheck,
    SealReport,
    SealState,
    held_differs,
)
from delayd.reading.subject_figures import NO_SUBJECTS, SubjectSums
from delayd.secret import Secret

FINDINGS_LIMIT = 1_000
# When two places say something of one seal, the one with the later state is believed.
_WORTH = (SealState.DELETED, SealState.UNREAD, SealState.VERIFIED, SealState.BROKEN)

Progress = Callable[[int, int], None]  # Hours audited, hours in all.


class AbsentServer(NamedTuple):
    """A server that meta knows, and whose directory is not among those that were audited."""

    role: str
    log_id: int
    address: str

    @property
    def sentence(self) -> str:
        server = f"{self.role} server {self.log_id:016x} at {self.address}"
        return f"meta knows {server}, and its directory is not here"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit: ``hours`` by delay server and hour, and at most ``findings_limit`` ``findings``.

    ``faults`` are totals that do not add up; each concerns a delay server and no single message. They are findings,
    too.
    """

    places: tuple[str, ...]  # The data directories and archives that were audited.
    read_at_ms: int
    hours: tuple[HourSummary, ...]
    total: HourSummary
    findings: tuple[Finding, ...]
    findings_count: int
    torn: tuple[TornTail, ...]
    deleted_rows: int
    lives: tuple[LastLife, ...]
    seals: tuple[SealReport, ...]
    faults: tuple[Finding, ...] = ()
    holds_up: tuple[str, ...] = ()  # Why messages wait, by what their delay server says.
    groups: tuple[GroupBooks, ...] = ()  # What became of messages in groups of consumers, if the caller asked for that.
    acceptances: tuple[StoredAcceptance, ...] = ()  # What operators have said of findings; `judged` verifies them.
    # The digests of findings that unbalance the books, by delay server and hour.
    findings_sha256: Mapping[HourKey, str] = field(default_factory=dict)
    caused: tuple[CausedFindings, ...] = ()  # All findings that have a message or an hour, by hour.
    late_ms_limit: int = LATE_MS_LIMIT
    lost_grace_ms: int = LOST_GRACE_MS
    unnoted: tuple[str, ...] = ()  # Files of an archive whose archiver has not written their notes.
    missing: tuple[MissingServer, ...] = ()
    doubled: tuple[str, ...] = ()  # What was given twice, and is left out once.
    refused: tuple[str, ...] = ()  # Places that a newer delayd wrote, and that are left out.
    proved_before: int = 0  # Sealed hours that were left out, because an earlier audit has proved them.
    absent: tuple[AbsentServer, ...] = ()  # What meta knows besides, if the caller has asked it.

    @property
    def data(self) -> str:
        """The places in one line."""
        return " ".join(self.places)

    @property
    def directories(self) -> tuple[str, ...]:
        """The places that are data directories, and not archives."""
        return tuple(place for place in self.places if any(_is_in(life, place) for life in self.lives))

    def directory_of(self, log_id: int) -> str | None:
        """The data directory that a server's own directory is in; None for a server that is not here."""
        homes = (place for life in self.lives if life.log_id == log_id for place in self.places if _is_in(life, place))
        return next(homes, None)

    @property
    def missed(self) -> tuple[LastLife, ...]:
        """The servers that are away, if messages wait."""
        return tuple(life for life in self.lives if life.state is not LifeState.UP and self.total.waiting)

    def judged(self, secret: Secret | None) -> list[JudgedAcceptance]:
        """What operators' acceptances of these hours are worth; None when there is no secret to verify them with."""
        audited = {(summary.log_id, summary.hour) for summary in self.hours}
        own = [each for each in self.acceptances if (each.log_id, each.hour) in audited]
        return judge(own, self.findings_sha256, secret)

    def is_accepted(self, judged: Iterable[JudgedAcceptance]) -> bool:
        """Whether operators have accepted everything that unbalances the books.

        An acceptance is of the findings of one hour. Nobody can accept a broken seal, or totals that do not add up.
        """
        accepted = {each.key for each in judged if each.state is AcceptanceState.ACCEPTED}
        unbalanced = {(summary.log_id, summary.hour) for summary in self.hours if not summary.balanced}
        return unbalanced <= accepted and not self.broken_seals and not self.faults

    @property
    def broken_seals(self) -> tuple[SealReport, ...]:
        """Seals that the hours' rows, or other seals, contradict."""
        return tuple(report for report in self.seals if report.state is SealState.BROKEN)

    @property
    def remarks(self) -> Iterator[str]:
        """Sentences on what was left out, counts twice, or is proved by less than the rows themselves."""
        total = self.total
        if self.proved_before:
            yield f"{self.proved_before:,} sealed hours were proved by an earlier audit, and are left out"
        yield from (each.sentence for each in self.absent)
        yield from (each.sentence for each in self.missing)
        yield from self.refused
        yield from self.doubled
        for torn in self.torn:
            yield torn.sentence
        for path in self.unnoted:
            note = "has no note, so nothing of it counts; the next `delayd archive` compares it and writes the note"
            yield f"{path} {note}"
        if total.moved:
            again = f"; {total.redriven:,} of them were dead letters, and were sent again" if total.redriven else ""
            yield f"{total.moved:,} of the cancelled messages moved, and count again where they went{again}"
        if self.deleted_rows:
            yield f"{self.deleted_rows:,} messages of hours that retention has removed were left out"
        if total.waiting:
            reasons = "; ".join([*self.holds_up, *(life.sentence for life in self.missed)])
            yield f"{total.waiting:,} wait, and are not lost: {reasons or 'their delay server still holds them'}"
        if total.unproven:
            what = "are dispatched by the dispatch log's word alone: their target keeps them no longer, or is not here"
            yield f"{total.unproven:,} {what}; an archive that has them, or the target's directory, would prove them"

    @property
    def balanced(self) -> bool:
        """Whether each hour's books balance, no seal is broken, and each delay server's totals add up."""
        return self.total.balanced and not self.broken_seals and not self.faults


def _is_in(life: LastLife, place: str) -> bool:
    folder = place.rstrip("/")
    return life.path == folder or life.path.startswith(f"{folder}/")


class HourResult(NamedTuple):
    """One audited hour: its figures, its first findings, all by cause, and their digest (`Findings.sha256`).

    ``differs`` says where its rows differ from its seal: None when it has none to compare with.
    """

    summary: HourSummary
    findings: Sequence[Finding]
    caused: Sequence[CausedFindings]
    sha256: str
    differs: Sequence[str] | None

    @property
    def findings_count(self) -> int:
        return sum(each.rows for each in self.caused)

    @classmethod
    def of(
        cls, found: Findings, summary: HourSummary, findings_limit: int | None, differs: Sequence[str] | None = None
    ) -> "HourResult":
        """The result of a comparison."""
        return cls(summary, found.first(findings_limit), found.caused(), found.sha256, differs)


class Archived(Protocol):
    """What archives add to a report, once their hours are audited."""

    unnoted: list[str]
    doubled: list[str]
    deleted_rows: int

    def totals(self) -> list[Finding]:
        """What concerns no single message."""

    def seal_reports(self) -> Iterator[SealReport]:
        """The seals that archives hold."""


class Collected:
    """Puts the results of hours together; findings that unbalance the books are kept before those that do not."""

    def __init__(self, findings_limit: int | None) -> None:
        self.summaries: list[HourSummary] = []
        self._limit = sys.maxsize if findings_limit is None else findings_limit
        self._faults: list[Finding] = []
        self._late: list[Finding] = []
        self._count = 0
        self._sha256: dict[HourKey, str] = {}
        self._caused: list[CausedFindings] = []
        self._subjects = SubjectSums()

    def add(self, result: HourResult) -> None:
        """Add one hour."""
        summary, findings, caused, sha256, _ = result
        # Thousands of hours with thousands of subjects each do not fit into memory; their sum does.
        self._subjects.add(summary.subjects.names, summary.subjects.counts)
        self.summaries.append(replace(summary, subjects=NO_SUBJECTS))
        self._count += sum(each.rows for each in caused)
        self._caused += caused
        if sha256:
            self._sha256[summary.log_id, summary.hour] = sha256
        if findings:
            late = [finding for finding in findings if finding.kind == FindingKind.LATE]
            faults = [finding for finding in findings if finding.kind != FindingKind.LATE]
            self._late = sorted(self._late + late)[: self._limit]
            self._faults = sorted(self._faults + faults)[: self._limit]

    def report(self, plan: AuditPlan, books: Mapping[int, SealBook], totals: Sequence[Finding]) -> AuditReport:
        """The report on all hours that were added, on the seals, and on contradictions between totals."""
        faults = (*totals, *self._faults)[: self._limit]
        findings = [*totals[: self._limit], *sorted((*faults[len(totals) :], *self._late[: self._limit - len(faults)]))]
        summaries = sorted(self.summaries, key=lambda summary: (summary.log_id, summary.hour))
        total = replace(sum_up(summaries), subjects=self._subjects.figures())
        return AuditReport(
            places=plan.data,
            read_at_ms=plan.terms.now_ms,
            hours=tuple(summaries),
            total=total,
            findings=tuple(findings),
            findings_count=self._count + len(totals),
            torn=plan.torn,
            deleted_rows=sum(plan.deleted.values()),
            lives=plan.lives,
            seals=tuple(report for book in books.values() for report in book.reports()),
            faults=tuple(totals),
            holds_up=plan.holds_up if total.waiting else (),
            groups=tuple(books for consumption in plan.consumption for books in consumption.groups),
            acceptances=plan.acceptances,
            findings_sha256=self._sha256,
            caused=tuple(sorted(self._caused, key=lambda each: (each.log_id, each.hour, each.cause))),
            late_ms_limit=plan.terms.late_ms_limit,
            lost_grace_ms=plan.terms.lost_grace_ms,
            missing=missing_servers(summaries, plan),
            doubled=tuple(each.sentence for each in plan.doubled),
            refused=plan.refused,
        )


def audit_directory(
    data: str,
    *,
    now_ms: int,
    hours: Container[int] | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    lost_grace_ms: int = LOST_GRACE_MS,
    findings_limit: int | None = FINDINGS_LIMIT,
    progress: Progress | None = None,
    disk: Disk | None = None,
    consumption: bool = True,
) -> AuditReport:
    """Audit every hour of a data directory. Its servers may run or not, or it is a copy; nothing in it is changed.

    Example::

        report = audit_directory("/var/lib/delayd", now_ms=time.time_ns() // 1_000_000)
        print(report.balanced, report.total.lost, [finding.detail for finding in report.findings])

    Args:
        data: the directory that `delayd up --data` was given, or one that holds ``delay*`` and ``realtime*``.
        now_ms: the wall clock, in milliseconds since the epoch. Messages that came due after a server's last word wait
            for that server; they are not LOST.
        hours: which hours to audit, counted since the epoch; None for all.
        late_ms_limit: a message that left later than this after it was due is LATE.
        lost_grace_ms: a due message without an outcome is LOST only when it was due longer ago than this.
        findings_limit: how many findings to keep as rows, None for all; all are counted.
        progress: is called with the number of hours done, and of all hours.
        disk: the disk that ``data`` is on; None takes this machine's.
        consumption: whether to read the pull logs, too, which takes 2 us for each of their entries.

    Raises:
        BadArgument: there is nothing to audit.
        DamagedData, NewerFormat: a file can't be read.
    """
    disk = disk or RealDisk()

    def audit() -> AuditReport:
        plan, tails = plan_audit(disk, (data,), now_ms, hours, late_ms_limit, lost_grace_ms, consumption=consumption)
        return report_plan(disk, plan, tails, findings_limit, progress)

    return until_still(data, audit)


def report_plan(
    disk: Disk,
    plan: AuditPlan,
    tails: Sequence[MessageTail],
    findings_limit: int | None,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit all hours of a plan, and their seals; LogMoved when files went away meanwhile."""
    books = seal_books(disk, plan)
    hours = audit_plan(disk, plan, tails, books, findings_limit, progress)
    return report_hours(disk, plan, books, hours, findings_limit)


def report_hours(
    disk: Disk,
    plan: AuditPlan,
    books: Mapping[int, SealBook],
    hours: Iterable[HourResult],
    findings_limit: int | None,
    archived: Archived | None = None,
) -> AuditReport:
    """The report on the audited hours of a plan, and of archives."""
    collected = Collected(findings_limit)
    for result in hours:
        summary = result.summary
        # An hour that sealed after the seals were read has none to compare with.
        if result.differs is not None and books[summary.log_id].has_standing(summary.hour):
            books[summary.log_id].note(summary.hour, result.differs)
        collected.add(result)
    totals = plan_faults(disk, plan, books)
    if archived is None:
        return collected.report(plan, books, totals)
    report = collected.report(plan, books, [*totals, *archived.totals()])
    return replace(
        report,
        seals=join_seals(report.seals, archived.seal_reports()),
        deleted_rows=report.deleted_rows + archived.deleted_rows,
        unnoted=tuple(archived.unnoted),
        doubled=(*report.doubled, *archived.doubled),
    )


def join_seals(live: Sequence[SealReport], archived: Iterable[SealReport]) -> tuple[SealReport, ...]:
    """Each seal once, by delay server and number: as the place says it that knows more, or finds it broken."""
    found = {(each.log_id, each.hour): each for each in live}
    for each in archived:
        known = found.get((each.log_id, each.hour))
        if known is None or _WORTH.index(each.state) > _WORTH.index(known.state):
            found[each.log_id, each.hour] = each
    # Seals that are missing have no number, and come behind the others of their server.
    return tuple(
        sorted(found.values(), key=lambda each: (each.log_id, each.seal is None, each.seal.number if each.seal else 0))
    )


def plan_faults(disk: Disk, plan: AuditPlan, books: Mapping[int, SealBook]) -> list[Finding]:
    """Contradictions in the totals of each delay server of a plan (rule S5)."""
    found = [_server_faults(disk, one.snapshot, one.follows, books[one.log_id]) for one in plan.origins]
    found += [list(_deleted_hours(disk, plan, one.log_id, books[one.log_id])) for one in plan.origins]
    found.append([conservation(0, log_id, what) for log_id, what in plan.index.faults])
    for number, consumption in enumerate(plan.consumption):
        log_id = plan.index.targets[number].log_id
        said = [*consumption.faults, *beyond(consumption, plan.index, number)]
        found.append([conservation(0, log_id, what) for what in said])
    return [fault for faults in found for fault in faults]


def audit_plan(
    disk: Disk,
    plan: AuditPlan,
    tails: Sequence[MessageTail] | None,
    books: Mapping[int, SealBook],
    findings_limit: int | None,
    progress: Progress | None = None,
) -> Iterator[HourResult]:
    """Audit the hours of a plan, or of a part of one, with the seals of each delay server; without ``tails`` they are
    read. Raises LogMoved when files went away meanwhile.
    """
    for done, hour in enumerate(plan_hours(disk, plan, tails), 1):
        found, summary, differs = audit_books(hour, books[hour.log_id])
        yield HourResult.of(found, summary, findings_limit, differs)
        if progress is not None:
            progress(done, plan.hour_count)


def audit_books(hour: HourBooks, book: SealBook) -> tuple[Findings, HourSummary, list[str] | None]:
    """Audit an hour of a plan, with its seal in ``book``; see `audit_plan`."""
    check = book.check(hour.hour) if book.has_standing(hour.hour) else None
    parts = hour.parts()
    found: list[tuple[Findings, HourSummary]] = []
    before = 0
    for part in parts:
        result, filed = _audit_part(part, before, check, last=part is parts[-1])
        found.append(result)
        before += filed
    differs = None if check is None else check.differences(hour.torn)
    return join_findings([each for each, _ in found]), join_parts([each for _, each in found]), differs


def seal_books(disk: Disk, plan: AuditPlan) -> dict[int, SealBook]:
    """The seals of each delay server of a plan, by its log_id."""
    return {origin.snapshot.directory.log_id: SealBook(disk, origin.snapshot) for origin in plan.origins}


def _deleted_hours(disk: Disk, plan: AuditPlan, log_id: int, book: SealBook) -> Iterator[Finding]:
    """Compare seals of deleted hours, which are all that is left of them, with what targets still hold of these."""
    deleted = {seal.facts.hour: seal.facts for seal in book.deleted()}
    batches = plan.index.batches
    own = np.flatnonzero((batches["origin_log_id"] == np.uint64(log_id)) & np.isin(batches["hour"], list(deleted)))
    hours = batches["hour"][own]
    held = set(hours.tolist())
    for hour in (hour for hour in deleted if hour in held):
        rows = read_target_rows(disk, plan.index, batches[own[hours == hour]])
        if what := held_differs(tally(rows.sequence, rows.deliver_at_ms, rows.hashes()), deleted[hour]):
            yield conservation(hour, log_id, f"hour {hour_name(hour)} was removed: {what}")


def _audit_part(
    part: HourBooks, before: int, check: SealCheck | None, *, last: bool
) -> tuple[tuple[Findings, HourSummary], int]:
    """Audit an hour or a part of one, and return how many of its rows are filed; nothing else of it stays in memory."""
    sorter = Sorter()
    schedule, found = part.schedule(sorter), part.outcomes()
    others = _named_beside(found)
    sealed = found if check is None else _sealed_outcomes(part, found)
    again = sealed is not found
    outcomes = sorter.outcomes(found)
    if check is not None:
        sealed = sorter.outcomes(sealed) if again else outcomes
        check.add(schedule, sealed)
    del found, sealed
    realtime = sorter.stored(part.realtime())
    del sorter
    accepted = part.accepted()._replace(before=before if last else None, others=others)
    logs = schedule, outcomes, realtime
    return audit_hour(part.log_id, part.hour, *logs, part.terms, accepted), schedule.filed_count()


def _named_beside(outcomes: OutcomeRows) -> Sparse:
    """The rows that cancelled ones name beside theirs; how rows stand in the dispatch log says which, so not sorted."""
    rows = np.flatnonzero((outcomes.parts["outcome"] == Outcome.CANCELLED)[outcomes.part_of])
    return Sparse(outcomes.sequences[rows], outcomes.others(rows)) if len(rows) else NO_OTHERS


def _sealed_outcomes(hour: HourBooks, outcomes: OutcomeRows) -> OutcomeRows:
    """The outcomes to compare with an hour's seal: the plan took its dispatch log's size before the seals were read."""
    snapshot = hour.origin.snapshot
    path = dispatch_path(snapshot.directory.path, hour.hour)
    if file_size(hour.disk, path) == hour.origin.dispatch_sizes.get(hour.hour, 0):
        return outcomes
    # The hour may have had its last outcomes since then.
    hour.torn.clear()
    return read_outcomes(hour.disk, snapshot.directory, hour.hour, None, hour.torn, part=hour.part)


def _server_faults(disk: Disk, snapshot: ScheduleSnapshot, follows: Iterable[str], book: SealBook) -> list[Finding]:
    """Contradictions in the totals of one delay server (rule S5); ``hour`` is 0 for one that concerns no single hour.

    The messages that it has accepted are as many as its table of hours and its seals count. Only the checkpoint, the
    seal log and file names are read, so this costs as much as there are hours::

        next sequence - 1 - what an operator left unused
            = rows of the hours in the table + rows beside damaged schedule logs + rows that operators gave up
            + rows in the seals of hours that are in the table no longer

    ``follows`` says where its message log does not follow.
    """
    found = [(0, what) for what in (*_totals(snapshot, book), *follows, *_missing_seals(snapshot, book))]
    found += [(0, what) for what in _message_log(disk, snapshot)]
    found += _hours(snapshot, book)
    return [conservation(hour, snapshot.directory.log_id, what) for hour, what in sorted(found)]


def _totals(snapshot: ScheduleSnapshot, book: SealBook) -> Iterator[str]:
    word = snapshot.word
    accepted = word.next_sequence - 1 - sum(count for _, count in word.skipped)
    in_table = sum(filed.rows for filed in snapshot.hours.values())
    beside = sum(filed.rows for filed in word.beside.values())
    dropped = sum(word.dropped.values())
    sealed = sum(seal.facts.rows for seal in book.seals if seal.facts.hour not in snapshot.hours)
    filed = in_table + beside + dropped + sealed
    if filed != accepted:
        parts = [f"{in_table:,} in the hour table", f"{sealed:,} in the seals of deleted hours"]
        parts += [f"{beside:,} beside damaged files"] if beside else []
        parts += [f"{dropped:,} given up by an operator"] if dropped else []
        what = f"{accepted - filed:,} messages were accepted and are filed nowhere"
        if filed > accepted:
            what = f"{filed - accepted:,} messages more are filed than were accepted"
        yield f"{what}: {accepted:,} sequences were given up to the checkpoint; {', '.join(parts)}"
    for first, count in word.skipped:
        if count != RESTORED_STEP or first + count > word.next_sequence:
            yield f"{count:,} sequences from {first} on are called unused; an accepted server leaves {RESTORED_STEP:,}"


def _missing_seals(snapshot: ScheduleSnapshot, book: SealBook) -> Iterator[str]:
    """Seals that were cut off the end of the seal log, or written anew: the checkpoint notes how many there were."""
    word, seals = snapshot.word, book.seals
    if len(seals) < word.seals:
        yield f"the seal log has {len(seals)} seals, and had {word.seals} when the checkpoint was published"
    elif word.seals and seals[word.seals - 1].sha256 != word.seals_sha256:
        yield f"seal {word.seals - 1} is another one than when the checkpoint was published"


def _message_log(disk: Disk, snapshot: ScheduleSnapshot) -> Iterator[str]:
    bases, keep_from = segment_bases(disk, snapshot.place), snapshot.word.keep_from
    if bases and bases[0] > keep_from:
        yield f"the message log begins at offset {bases[0]}, and its server has removed nothing from {keep_from} on"
    if keep_from > snapshot.replay_offset:
        yield f"the message log is kept from {keep_from} on, behind the replay offset {snapshot.replay_offset}"


def _hours(snapshot: ScheduleSnapshot, book: SealBook) -> Iterator[tuple[int, str]]:
    seals: dict[int, Seal] = {seal.facts.hour: seal for seal in book.seals}
    for number, each in enumerate(book.seals):
        hour, name = each.facts.hour, hour_name(each.facts.hour)
        # A seal that was written after the checkpoint may be of an hour that has ended since.
        if number < snapshot.word.seals and hour_start_ms(hour + 1) > snapshot.appended_at_ms:
            yield hour, f"hour {name} was sealed before it was over"
        if each.facts.dead and hour not in snapshot.hours:
            yield hour, f"hour {name} had {each.facts.dead:,} DEAD messages, and is deleted"
    for hour, filed in snapshot.hours.items():
        seal, name = seals.get(hour), hour_name(hour)
        if filed.removed and (seal is None or not filed.sealed):
            yield hour, f"hour {name} with {filed.rows:,} messages is called removed, and was never sealed"
        if filed.sealed and seal is not None:
            if seal.facts.rows != filed.rows:
                what = f"the checkpoint counts {filed.rows:,} messages in hour {name}"
                yield hour, f"{what}, its seal {seal.facts.rows:,}"
            if filed.dead != bool(seal.facts.dead):
                yield hour, f"the checkpoint and the seal of hour {name} disagree whether it has DEAD messages"
        if filed.dead and filed.removed:
            yield hour, f"hour {name} has DEAD messages, and is called removed"
        if (filed.rows == 0) != (filed.length == 0):
            yield hour, f"the checkpoint counts {filed.rows:,} messages and {filed.length:,} bytes in hour {name}"
