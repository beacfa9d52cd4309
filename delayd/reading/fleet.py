"""Fleet: one audit of the data directories of several machines, and of archives.

Invariant: a server counts once, and so does each of its hours, however many copies and archives are given. An hour that
stands in a directory and in an archive is audited in both, and their seals and figures are compared.

An example. Delay server D ran on machine A, and realtime server R on machine B. In A's directory alone D's messages are
unproven, because R's log is not there. With both directories each message is found in R's log. An archive has hours of
D that retention has removed from A: they are audited from the archive, and what R still holds of them counts, too.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from delayd.errors import BadArgument, NewerFormat
from delayd.machine.disk import Disk, RealDisk
from delayd.reading.archive.store import is_archive, open_store
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS, AuditTerms
from delayd.reading.books import (
    FINDINGS_LIMIT,
    AuditReport,
    HourResult,
    Progress,
    audit_plan,
    report_hours,
    seal_books,
)
from delayd.reading.files.origins import MessageTail
from delayd.reading.files.row_arrays import NO_INT64S
from delayd.reading.files.stored_groups import until_still
from delayd.reading.files.target_index import NO_INDEX, Scan
from delayd.reading.findings import HourKey, conservation
from delayd.reading.plan import AuditPlan, plan_audit
from delayd.reading.proved import ProvedHours
from delayd.reading.seals import SealBook
from delayd.reading.subject_figures import CLASSES

if TYPE_CHECKING:
    from delayd.reading.archive.archive_audit import ArchivedBooks, ArchivedResult, HourFiles

FAULTS = ("lost", "duplicate", "early", "orphan", "mismatch")


def audit_fleet(
    places: Sequence[str],
    *,
    now_ms: int,
    hours: Container[int] | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    lost_grace_ms: int = LOST_GRACE_MS,
    findings_limit: int | None = FINDINGS_LIMIT,
    progress: Progress | None = None,
    consumption: bool = True,
    proved: ProvedHours | None = None,
) -> AuditReport:
    """Audit the data directories of several machines, and archives, as one; nothing in them is changed.

    Example::

        report = audit_fleet(["/mnt/a", "/mnt/b", "s3://books/delayd"], now_ms=time.time_ns() // 1_000_000)
        print(report.balanced, report.total.lost, [each.sentence for each in report.missing])

    Args:
        places: the directories that `delayd up --data` was given, or copies; and what `delayd archive --to` was given.
        now_ms, late_ms_limit, lost_grace_ms: as for `audit_directory`.
        hours: which hours to audit, counted since the epoch; None for all.
        findings_limit: how many findings to keep as rows, None for all; all are counted.
        progress: is called with the number of hours done, and of all hours.
        consumption: whether to read the pull logs, too, which takes 2 us for each of their entries.
        proved: sealed hours to leave out, by the digests of their seals; see `delayd.reading.proved`.

    Raises:
        BadArgument: a place holds nothing to audit, or nothing says what was scheduled.
        DamagedData: a file of a data directory can't be read.
        NewerFormat: a newer delayd wrote the places, or so many of them that nothing says what was scheduled.
        BadSetting, ServerUnavailable: an archive can't be read.
    """

    def audit() -> AuditReport:
        fleet = plan_fleet(
            RealDisk(),
            places,
            now_ms=now_ms,
            hours=hours,
            late_ms_limit=late_ms_limit,
            lost_grace_ms=lost_grace_ms,
            consumption=consumption,
            proved=proved,
        )
        return fleet.audit(findings_limit, progress)

    return until_still(" ".join(places), audit)


def plan_fleet(
    disk: Disk,
    places: Sequence[str],
    *,
    now_ms: int,
    hours: Container[int] | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    lost_grace_ms: int = LOST_GRACE_MS,
    consumption: bool = True,
    scan: Scan | None = None,
    proved: ProvedHours | None = None,
) -> "Fleet":
    """Read the notes of archives, and then plan the audit of directories; see `plan_audit`.

    A place that a newer delayd wrote is left out and named, as long as others say what was scheduled.
    """
    bounds, refused, left = (now_ms, hours, late_ms_limit, lost_grace_ms), dict[str, str](), tuple(places)
    first: NewerFormat | None = None
    while True:
        try:
            plan, tails, archives = _plan(disk, left, bounds, consumption, scan)
        except NewerFormat as error:
            newer = [place for place in left if error.path.startswith(f"{place.rstrip('/')}/")]
            left = tuple(place for place in left if place not in newer)
            if not newer or not left:
                raise
            refused |= {place: f"{place} is left out: {error.message}" for place in newer}
            first = first or error
        except BadArgument as error:
            raise first or error from None
        else:
            plan = replace(plan, data=left, refused=tuple(refused.values()))
            return Fleet(disk, plan, tails if scan is None else None, archives, proved or {})


def _plan(
    disk: Disk,
    places: Sequence[str],
    bounds: tuple[int, Container[int] | None, int, int],
    consumption: bool,
    scan: Scan | None,
) -> "tuple[AuditPlan, list[MessageTail], ArchivedBooks | None]":
    """Plan the audit of places that can all be read; ``bounds`` are the first arguments of `plan_audit`."""
    now_ms, hours, late_ms_limit, lost_grace_ms = bounds
    directories = tuple(place for place in places if not is_archive(place))
    stores = [open_store(place) for place in places if is_archive(place)]
    archives = None
    if stores:
        # Only archives need pyarrow; `open_store` has seen that it is there.
        from delayd.reading.archive.archive_audit import ArchivedBooks

        # The notes are read first, so each hour that they name is sealed in the directory of its server, too.
        archives = ArchivedBooks(stores, hours)
    terms = AuditTerms(now_ms, late_ms_limit=late_ms_limit, lost_grace_ms=lost_grace_ms)
    plan, tails = AuditPlan((), NO_INDEX, terms), list[MessageTail]()
    if directories:
        plan, tails = plan_audit(
            disk, directories, *bounds, consumption=consumption, scan=scan, need_schedule=not stores
        )
    return plan, tails, archives


class Fleet:
    """The plan of the audit of a fleet, with what archives say of it."""

    def __init__(
        self,
        disk: Disk,
        plan: AuditPlan,
        tails: "Sequence[MessageTail] | None",
        archives: "ArchivedBooks | None",
        proved: ProvedHours,
    ) -> None:
        self.plan = plan
        self.seals: Mapping[int, SealBook] = seal_books(disk, plan)
        self.tails = tails
        self._disk, self._archives = disk, archives
        self._left_out: set[HourKey] = set()  # Hours that were proved before.
        if archives is not None:
            archives.compare_seals(plan, self.seals)
        if proved:
            self._leave_out(proved, archives)
        if archives is None:
            return
        # Messages of hours that archives have are not left out, whatever retention has removed here.
        own = {hour.key for hour in archives.hours} | self._left_out
        both = plan.deleted, plan.strangers
        deleted, strangers = ({key: count for key, count in counts.items() if key not in own} for counts in both)
        self.plan = replace(self.plan, deleted=deleted, strangers=strangers)

    def audit(self, findings_limit: int | None = None, progress: Progress | None = None) -> AuditReport:
        """Audit all hours in this process."""
        live, archived = self._live(findings_limit, progress), self._archived(findings_limit, progress)
        return self.report(live, archived, findings_limit)

    def archived_hours(self) -> "Sequence[HourFiles]":
        """The hours of archives, each with the targets whose logs are here and of which no archive has its rows."""
        if self._archives is None:
            return ()
        from delayd.reading.archive.pieces import live_beside

        index = self.plan.index
        places = index.by_hour()
        return [
            replace(hour, live=live_beside(hour.archived, index, places.get(hour.key, NO_INT64S)))
            for hour in self._archives.hours
        ]

    def report(
        self, live: Iterable[HourResult], archived: "Iterable[ArchivedResult]", findings_limit: int | None
    ) -> AuditReport:
        """The report on the audited hours of directories and archives, whoever has audited them."""
        hours = live if self._archives is None else self._each_once(live, archived, self._archives)
        report = report_hours(self._disk, self.plan, self.seals, hours, findings_limit, self._archives)
        return replace(report, proved_before=len(self._left_out))

    def _live(self, findings_limit: int | None, progress: Progress | None) -> Iterator[HourResult]:
        """Audit the hours of the directories, in this process."""
        total = self._hour_count

        def done(count: int, _: int) -> None:
            if progress is not None:
                progress(count, total)

        return audit_plan(self._disk, self.plan, self.tails, self.seals, findings_limit, done)

    def _archived(self, findings_limit: int | None, progress: Progress | None) -> "Iterator[ArchivedResult]":
        """Audit the hours of the archives, in this process."""
        if self._archives is None:
            return
        from delayd.reading.archive.archive_audit import audit_archived

        for done, hour in enumerate(self.archived_hours(), self.plan.hour_count + 1):
            yield audit_archived(hour, self.plan.terms, findings_limit, open_store)
            if progress is not None:
                progress(done, self._hour_count)

    @property
    def _hour_count(self) -> int:
        return self.plan.hour_count + (0 if self._archives is None else len(self._archives.hours))

    def _each_once(
        self, live: Iterable[HourResult], archived: "Iterable[ArchivedResult]", archives: "ArchivedBooks"
    ) -> Iterator[HourResult]:
        own = {hour.key: hour for hour in archives.hours}
        held: dict[HourKey, HourResult] = {}
        for result in live:
            key = result.summary.log_id, result.summary.hour
            if key in own:
                held[key] = result
            else:
                yield result
        for each in archived:
            found, here = archives.take(each), held.get(each.key)
            if found is not None and here is None:
                yield found
            elif found is not None and here is not None:
                del held[each.key]
                yield self._chosen(here, found, own[each.key], archives)
        # The archives' files of these hours can't be read, or were removed before they were archived.
        yield from held.values()

    def _chosen(self, here: HourResult, there: HourResult, hour: "HourFiles", archives: "ArchivedBooks") -> HourResult:
        """The one of two audits of an hour that proves more; a fault if they say different things of it."""
        log_id, number = hour.key
        (snapshot,) = (origin.snapshot for origin in self.plan.origins if origin.log_id == log_id)
        if not snapshot.is_sealed(number):
            return there._replace(differs=here.differs)
        ours, theirs = here.summary, there.summary
        differ = [name for name in ("scheduled", *CLASSES) if getattr(ours, name) != getattr(theirs, name)]
        # A directory has logs that no archive has, and so it may have findings more.
        differ += [name for name in FAULTS if getattr(theirs, name) > getattr(ours, name)]
        if differ:
            said = ", ".join(f"{name} {getattr(theirs, name):,} and {getattr(ours, name):,}" for name in differ)
            what = f"{hour.schedule.name} and {snapshot.directory.path} differ: {said}"
            archives.faults.append(conservation(number, log_id, what))
        return there._replace(differs=here.differs) if theirs.unproven < ours.unproven else here

    def _leave_out(self, proved: ProvedHours, archives: "ArchivedBooks | None") -> None:
        """Leave out the hours whose seals are still those with which they were proved."""
        origins = []
        for origin in self.plan.origins:
            sealed = {seal.facts.hour: seal.sha256 for seal in self.seals[origin.log_id].seals}
            sealed = {hour: sha256 for hour, sha256 in sealed.items() if origin.snapshot.is_sealed(hour)}
            keys = {(origin.log_id, hour) for hour in origin.hours}
            known = {key for key in keys if key in proved and sealed.get(key[1]) == proved[key]}
            self._left_out |= known
            left = tuple(hour for hour in origin.hours if (origin.log_id, hour) not in known)
            origins.append(replace(origin, hours=left))
        self.plan = replace(self.plan, origins=tuple(origins))
        if archives is not None:
            known = {hour.key for hour in archives.hours if proved.get(hour.key) == hour.seal.sha256}
            self._left_out |= known
            archives.hours = [hour for hour in archives.hours if hour.key not in known]
