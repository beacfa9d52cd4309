"""The books of a data directory: what to read, in which order, and the audit of each hour.

Invariant (rule P3): realtime logs are read first, then the sizes of the dispatch logs are taken, then the checkpoint
and the message log's size; later bytes are left out. So each outcome's row and each row's origin is there.
"""

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from delayd.disk import Disk, RealDisk
from delayd.errors import BadArgument, DamagedData
from delayd.log.checkpoint import read_checkpoint
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS, AuditTerms, audit_hour
from delayd.reading.directory import Directory, Role, find_directories, is_running
from delayd.reading.dispatch import dispatch_sizes, read_outcomes
from delayd.reading.findings import UNBALANCING, Finding, FindingKind, Findings
from delayd.reading.groups import LogMoved, TornTail
from delayd.reading.realtime import TargetIndex, index_targets, read_target_rows
from delayd.reading.schedule import MessageTail, ScheduleSnapshot, read_hour, read_tail, take_snapshot
from delayd.reading.summary import HourSummary, sum_up

ATTEMPTS_MAX = 5  # Files move on once a checkpoint, so a second attempt nearly always does.
FINDINGS_LIMIT = 1_000

Progress = Callable[[int, int], None]  # Hours audited, hours in all.
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Origin:
    """What bounds the reading of one delay server's logs; ``hours`` are those to audit."""

    snapshot: ScheduleSnapshot
    dispatch_sizes: dict[int, int]
    terms: AuditTerms
    hours: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Everything that an audit needs to know before it reads hours; small, and can be pickled."""

    origins: tuple[Origin, ...]
    index: TargetIndex
    torn: tuple[TornTail, ...] = ()
    deleted_rows: int = 0  # Rows of the targets whose hours the delay server's retention has removed.

    @property
    def hour_count(self) -> int:
        """Hours to audit."""
        return sum(len(origin.hours) for origin in self.origins)

    def split(self, parts: int) -> "list[AuditPlan]":
        """Deal the hours out to at most ``parts`` plans, each with only what its hours need."""
        every = [(number, hour) for number, origin in enumerate(self.origins) for hour in origin.hours]
        return [self._part(every[first::parts]) for first in range(min(parts, len(every)))]

    def _part(self, chosen: Sequence[tuple[int, int]]) -> "AuditPlan":
        origins: list[Origin] = []
        keep = np.zeros(len(self.index.batches), np.bool_)
        for number, origin in enumerate(self.origins):
            hours = tuple(hour for at, hour in chosen if at == number)
            filed = {hour: origin.snapshot.hours[hour] for hour in hours if hour in origin.snapshot.hours}
            sizes = {hour: origin.dispatch_sizes[hour] for hour in hours if hour in origin.dispatch_sizes}
            origins.append(Origin(replace(origin.snapshot, hours=filed), sizes, origin.terms, hours))
            log_id = origin.snapshot.directory.log_id
            keep |= np.isin(self.index.batches["hour"], hours) & (self.index.batches["origin_log_id"] == log_id)
        return AuditPlan(tuple(origins), replace(self.index, batches=self.index.batches[keep]))


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found; ``hours`` by delay server and hour, ``findings`` at most as many as were asked for."""

    data: str
    read_at_ms: int
    hours: tuple[HourSummary, ...]
    total: HourSummary
    findings: tuple[Finding, ...]
    findings_count: int
    torn: tuple[TornTail, ...]
    deleted_rows: int

    @property
    def balanced(self) -> bool:
        """Whether each hour's books balance."""
        return self.total.balanced


class Collected:
    """Puts the results of hours together; findings that unbalance the books are kept before those that do not."""

    def __init__(self, findings_limit: int | None) -> None:
        self.summaries: list[HourSummary] = []
        self._limit = sys.maxsize if findings_limit is None else findings_limit
        self._faults: list[Finding] = []
        self._late: list[Finding] = []
        self._count = 0

    def add(self, found: Findings, summary: HourSummary) -> None:
        """Add one hour."""
        self.summaries.append(summary)
        self._count += len(found)
        self._faults += found.first(UNBALANCING, self._limit - len(self._faults))
        self._late += found.first([FindingKind.LATE], self._limit - len(self._late))

    def report(self, data: str, now_ms: int, plan: AuditPlan) -> AuditReport:
        """The report on all hours that were added."""
        findings = sorted(self._faults + self._late[: self._limit - len(self._faults)])
        summaries = sorted(self.summaries, key=lambda summary: (summary.log_id, summary.hour))
        return AuditReport(
            *(data, now_ms, tuple(summaries), sum_up(summaries), tuple(findings), self._count),
            *(plan.torn, plan.deleted_rows),
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
) -> AuditReport:
    """Audit every hour of a data directory, live, stopped or copied; nothing in it is changed.

    Args:
        data: the directory that `delayd up --data` was given, or one that holds ``delay*`` and ``realtime*``.
        now_ms: the wall clock. A stopped server is judged by when it last ran: what came due since then waits for it.
        hours: which to audit, as hours since the epoch; None for all.
        late_ms_limit: a message that came more than this after it was due is LATE.
        lost_grace_ms: a due message without an outcome is LOST only after this long.
        findings_limit: how many findings to keep as rows, None for all; they are counted in any case.
        progress: called with the hours done and all hours.
        disk: where ``data`` is.

    Raises:
        BadArgument: there is nothing to audit.
        DamagedData, NewerFormat: a file can't be read.
    """
    disk = disk or RealDisk()

    def audit() -> AuditReport:
        plan, tails = plan_audit(disk, data, now_ms, hours, late_ms_limit, lost_grace_ms)
        collected = Collected(findings_limit)
        for found, summary in audit_plan(disk, plan, tails):
            collected.add(found, summary)
            if progress is not None:
                progress(len(collected.summaries), plan.hour_count)
        return collected.report(data, now_ms, plan)

    return until_still(data, audit)


def plan_audit(
    disk: Disk, data: str, now_ms: int, hours: Container[int] | None, late_ms_limit: int, lost_grace_ms: int
) -> tuple[AuditPlan, list[MessageTail]]:
    """Scan the realtime logs, then take the bounds of all others; with each delay server's tail of its message log.

    Raises:
        LogMoved: files went away meanwhile.
    """
    directories = find_directories(disk, data)
    delays = [directory for directory in directories if directory.role == Role.DELAY]
    if not delays:
        raise BadArgument(f"{data} holds no delay server's directory, so nothing says what was scheduled")
    torn: list[TornTail] = []
    index = index_targets(disk, [directory for directory in directories if directory.role == Role.REALTIME], torn)
    origins: list[Origin] = []
    tails: list[MessageTail] = []
    deleted_rows = 0
    for directory in delays:
        sizes = dispatch_sizes(disk, directory)
        snapshot = take_snapshot(disk, directory)
        tail = read_tail(disk, snapshot, torn)
        own = index.batches[index.batches["origin_log_id"] == directory.log_id]
        alive_ms = now_ms if is_running(directory) else min(now_ms, _last_seen_ms(disk, directory, tail, index))
        known = set(snapshot.hours) | set(sizes) | set(tail.counts())
        # Retention removes whole hours, oldest first: what the targets hold of them has nothing left to compare with.
        deleted = own["hour"] < min(known, default=0)
        deleted_rows += int(own["count"][deleted].sum())
        wanted = sorted(known | set(own["hour"][~deleted].tolist()))
        terms = AuditTerms(now_ms, alive_ms, late_ms_limit, lost_grace_ms)
        chosen = tuple(hour for hour in wanted if hours is None or hour in hours)
        origins.append(Origin(snapshot, sizes, terms, chosen))
        tails.append(tail)
    return AuditPlan(tuple(origins), index, tuple(torn), deleted_rows), tails


def audit_plan(
    disk: Disk, plan: AuditPlan, tails: Sequence[MessageTail] | None = None
) -> Iterator[tuple[Findings, HourSummary]]:
    """Audit the hours of a plan, or of a part of one; without ``tails`` the message logs are read for them.

    Raises:
        LogMoved: files went away meanwhile.
    """
    tails = tails or [read_tail(disk, origin.snapshot) for origin in plan.origins]
    batches = plan.index.batches
    for origin, tail in zip(plan.origins, tails, strict=True):
        directory = origin.snapshot.directory
        own = batches[batches["origin_log_id"] == directory.log_id]
        own = own[np.argsort(own["hour"], kind="stable")]
        for hour in origin.hours:
            first, until = np.searchsorted(own["hour"], [hour, hour + 1])
            realtime = read_target_rows(disk, plan.index, own[first:until])
            outcomes = read_outcomes(disk, directory, hour, origin.dispatch_sizes.get(hour, 0))
            schedule = read_hour(disk, origin.snapshot, tail, hour)
            yield audit_hour(directory.log_id, hour, schedule, outcomes, realtime, origin.terms)


def until_still(data: str, read: Callable[[], Result]) -> Result:
    """Call ``read`` until the files stand still beneath it (rule P3); DamagedData when they never do."""
    for _ in range(ATTEMPTS_MAX):
        try:
            return read()
        except LogMoved as moved:
            last = moved
    raise DamagedData(data, 0, f"{last}, and no newer checkpoint says why") from last


def _last_seen_ms(disk: Disk, directory: Directory, tail: MessageTail, index: TargetIndex) -> int:
    """The last instant that the logs of a stopped delay server, or of its targets, name."""
    own = index.batches["origin_log_id"] == directory.log_id
    claimed_ms = int(index.batches["claimed_at_ms"][own].max(initial=0))
    published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    clock = published.get("clock")
    wall_ms = clock[2] if isinstance(clock, list) and len(clock) == 3 else 0
    return max(claimed_ms, tail.last_appended_at_ms, wall_ms if isinstance(wall_ms, int) else 0)
