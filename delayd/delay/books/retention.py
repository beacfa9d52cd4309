"""Retention: hours are sealed when their books are complete, and only sealed hours are ever deleted (rules S1, S2, P6).

The order matters. To seal: the seal is durable, then the state calls the hour sealed. To delete: the published table
calls the hour removed, then its files are removed. Files are read and removed on the worker thread.

An hour is compared when one of its two logs has changed since, and nothing of it is in memory. When the comparison
names a reason for an operator, it is repeated after ever more sweeps: one that fails in sweep 3 is repeated in the
sweeps 4, 6, 10 and 18, and so on, until an hour lies between two of them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from delayd.delay.books.outcomes import OutcomeLog, read_outcomes
from delayd.delay.books.sealing import ContentDiffers, SealDiffers, SealLog, compare
from delayd.delay.filing.hour_table import (
    GIVEN_UP_PREFIX,
    OUTCOME_PREFIX,
    PREFIX,
    HourFile,
    OutcomeEnd,
    hour_key,
    hour_put,
    outcome_put,
)
from delayd.delay.filing.schedule_log import Sources, scan_schedule_log
from delayd.delay.quarantine import Quarantine
from delayd.delay.timers.loading import Hours
from delayd.errors import DamagedData, DataError, DiskFull, Shortage
from delayd.hours import HOUR_MS, hour_name
from delayd.log.checkpoint import read_checkpoint
from delayd.log.hour import (
    DEAD,
    NO_OUTCOMES,
    REMOVED,
    SEALED,
    OutcomeRows,
    Seal,
    SealFacts,
    SealMark,
    decode_hours,
    dispatch_path,
    schedule_path,
)
from delayd.log.log import Log
from delayd.log.segment import FileKind, Segment, UnfinishedFile, open_segment
from delayd.machine.clock import Clock
from delayd.machine.executor import Done, Executor, Priority
from delayd.machine.identity import Site

log = logging.getLogger(__name__)

# Readers in other processes may hold a checkpoint for this long before they read on from it (P3).
SEGMENTS_KEPT_MS = 300_000
HOURS_A_SWEEP = 24  # A server that was off for days seals the hours that it missed over several sweeps.
SWEEPS_UNTOLD = 10  # A closed hour that is not sealed after 5 min is logged; before that, rows may be on their way.
# A damaged hour is read again at least once an hour, because an operator may have restored its copy.
SWEEPS_PUT_OFF_MAX = 120

NOT_SEALED = "hour_not_sealed"  # The event of an hour that was not sealed because space was short.

Compared = tuple[HourFile, OutcomeEnd | None]
"""The facts that a comparison read; while they stay the same, its result stays the same too."""


@dataclass(slots=True)
class Unsealed:
    """A closed hour that is not sealed yet."""

    sweeps: int = 0
    compared: Compared | None = None
    reason: str = ""  # Why it can't be sealed, as the log said it last.
    put_off: int = 0  # Sweeps to wait before a damaged hour is read again; doubled each time.
    not_before: int = 0


class SealVerdict(NamedTuple):
    """The result of comparing an hour's two logs: its seal, counted by now, or why it has none ("": rows wait)."""

    seal: SealFacts | None
    event: str = ""
    reason: str = ""
    damage: DamagedData | None = None
    seals_damage: DamagedData | None = None


@dataclass(frozen=True, slots=True)
class SealTerms:
    """What hours are sealed with, how long they are kept, and who is called when a file is damaged."""

    seals: SealLog | None  # None: the seal log is damaged, and nothing is sealed.
    retention_hours: int
    on_damaged: Callable[[int, DamagedData], None]  # Called with hours whose files do not check.
    on_seals_damaged: Callable[[DamagedData], None]
    open_seals: Callable[[], SealLog]


class Retention:
    """Seals and deletes hours, a few at a time."""

    def __init__(
        self,
        site: Site,
        hours: Hours,
        outcomes: OutcomeLog,
        sources: Sources,
        quarantine: Quarantine,
        terms: SealTerms,
    ) -> None:
        # Whether hours are kept, because a command is still to hear of their seals.
        self.waits: Callable[[], bool] = lambda: False
        site.alarms.look(self._look_at_seals)
        self._disk = site.disk
        self._state = site.state
        self._folder = site.folder
        self._log_id = site.log_id
        self._executor = site.worker
        self._hours = hours.filed
        self._wheel = hours.wheel
        self._outcomes = outcomes
        self._sources = sources
        self._quarantine = quarantine
        self._seals = terms.seals
        self._retention_hours = terms.retention_hours
        self._on_damaged = terms.on_damaged
        self._on_seals_damaged = terms.on_seals_damaged
        self._open_seals = terms.open_seals
        self._aside: list[SealLog] = []  # Earlier seal logs whose files were found changed; they are closed at the end.
        self._sealing: set[int] = set()
        self._unsealed: dict[int, Unsealed] = {}
        self._deleting = False

    def sweep(self, closed_before_ms: int, now_ms: int) -> None:
        """Begin to seal hours that ended by ``closed_before_ms``, and to delete sealed hours past their retention.

        ``closed_before_ms`` is the appended_at of a group that the last checkpoint covers: no row can be filed in an
        hour that ended before it any more (rule P5). Both instants are of a confirmed clock (rule T1).
        """
        if self._seals is not None:
            unwritten = self._outcomes.unwritten_hours()
            for hour in self._hours.unsealed(closed_before_ms // HOUR_MS - 1):
                if hour not in self._sealing and not self._quarantine.has_hour(hour):
                    self._look_at(hour, self._seals, now_ms, hour in unwritten)
        expired = self._hours.deletable(now_ms // HOUR_MS - self._retention_hours - 1)[:HOURS_A_SWEEP]
        if expired and not self._deleting and not self.waits():
            self._deleting = True
            for hour in expired:
                self._sources.forget_hour(hour)
            files = {hour: self._hours.get(hour) for hour in expired}
            self._executor.submit(partial(self._delete, files), self._deleted, Priority.SPACE)

    def last_sealed(self, done: Callable[[int | None], None]) -> None:
        """Call back with the latest hour that was ever sealed, -1 for none; None while nobody can tell."""

        def read(found: Done[int]) -> None:
            try:
                done(None if self._sealing else max(found.result(), *self._hours.sealed(), -1))
            except DamagedData as error:
                log.warning("seals_unreadable reason=%r", str(error))
                done(None)

        if self._seals is None:
            done(None)
        else:
            self._executor.submit(self._seals.last_hour, read)

    def seals_since(self, number: int, done: Callable[[Sequence[Seal]], None]) -> None:
        """Call back with the durable seals from a number on; with none while the seal log can't be read."""

        def read(found: Done[list[Seal]]) -> None:
            try:
                done(found.result())
            except DataError as error:
                log.warning("seals_unreadable reason=%r", str(error))
                done(())

        if self._seals is None:
            done(())
        else:
            self._executor.submit(partial(self._seals.since, number), read, Priority.SPARE)

    def seal_end(self) -> SealMark | None:
        """Up to where the seal log is durable; None while it is damaged. For the thread that seals."""
        return None if self._seals is None else self._seals.end

    def _look_at_seals(self) -> None:
        """Check whether the seal log is still in place and whole."""

        def looked(done: Done[DamagedData | None]) -> None:
            try:
                damage = done.result()
            except DataError:
                return  # The process can't tell now; the next look may.
            if damage is not None:
                self._on_seals_damaged(damage)

        if self._seals is not None:
            self._executor.submit(self._seals.look, looked)

    def set_seals_aside(self) -> None:
        """Seal nothing more in this life."""
        if self._seals is not None:
            # A comparison that is under way will notice that the hour can't be sealed.
            self._aside.append(self._seals)
            self._seals = None

    def try_seals(self) -> None:
        """Open the seal log again, and close it; on the worker thread.

        Raises:
            DamagedData, Shortage: it does not check or can't be read.
        """
        self._open_seals().close()

    def write_again(self) -> None:
        """Write the seal log again if it was removed, when nothing is under way any more."""
        for seals in self._all_seals():
            seals.write_again()

    def close(self) -> None:
        """Close the seal log."""
        for seals in self._all_seals():
            seals.close()

    def _all_seals(self) -> list[SealLog]:
        return self._aside if self._seals is None else [*self._aside, self._seals]

    # Sealing.

    def _look_at(self, hour: int, seals: SealLog, now_ms: int, unwritten: bool) -> None:
        unsealed = self._unsealed.setdefault(hour, Unsealed())
        unsealed.sweeps += 1
        waiting = self._wheel.len_of(hour)
        compared = (self._hours.get(hour), self._outcomes.ends.get(hour))
        if unsealed.sweeps == SWEEPS_UNTOLD and not unsealed.reason:
            rows = compared[0].rows
            ended = compared[1].rows if compared[1] else 0
            log.warning(
                "hour_waits hour=%s rows=%d without_outcome=%d held=%d",
                *(hour_name(hour), rows, rows - ended, waiting),
            )
        asked = unsealed.compared != compared if not unsealed.reason else unsealed.sweeps >= unsealed.not_before
        # An outcome that is on its way to the file would change what a comparison reads.
        if asked and not waiting and not unwritten and len(self._sealing) < HOURS_A_SWEEP:
            unsealed.compared = compared
            self._sealing.add(hour)
            self._outcomes.close_hour(hour, partial(self._compare, hour, seals, now_ms))

    def _compare(self, hour: int, seals: SealLog, now_ms: int) -> None:
        file = self._hours.get(hour)
        # The file may be opened and written again meanwhile: only bytes that are durable now are read.
        end = self._outcomes.ends.get(hour, OutcomeEnd())
        work = partial(self._verdict, hour, file, end, seals, now_ms)
        self._executor.submit(work, partial(self._compared, hour, file), Priority.SPARE)

    def _verdict(self, hour: int, file: HourFile, end: OutcomeEnd, seals: SealLog, now_ms: int) -> SealVerdict:
        """Compare the durable part of the hour's two logs, and make the seal durable if they agree."""
        stored = scan_schedule_log(self._disk, self._folder, self._log_id, hour, file)
        try:
            outcomes = self._outcomes_of(hour, end)
            facts = compare(hour, (entry.batch for entry in stored), outcomes, self._executor.give_way)
            if facts is None:
                return SealVerdict(None)
            try:
                seals.add(facts, now_ms)
            except DamagedData as error:
                return SealVerdict(None, seals_damage=error)
            self._executor.give_way()
            # The next start does not open the log of a sealed hour, so it has to be told what the log holds.
            self._state.commit([hour_put(hour, _sealed(file, facts)), outcome_put(hour, end), seals.put(hour)])
        except DamagedData as error:
            return SealVerdict(None, damage=error)
        except SealDiffers as error:
            return SealVerdict(None, "seal_differs", str(error))
        except ContentDiffers as error:
            return SealVerdict(None, "content_differs", str(error))
        except (DiskFull, Shortage) as error:
            return SealVerdict(None, NOT_SEALED, str(error))
        seals.counted(hour)
        return SealVerdict(facts)

    def _outcomes_of(self, hour: int, end: OutcomeEnd) -> OutcomeRows:
        path = dispatch_path(self._folder, hour)
        try:
            segment = open_segment(self._disk, path, FileKind.DISPATCH, self._log_id, write=False)
        except (FileNotFoundError, UnfinishedFile):
            return NO_OUTCOMES
        try:
            return read_outcomes(segment, end.length, self._executor.give_way)
        finally:
            segment.close()

    def _compared(self, hour: int, file: HourFile, done: Done[SealVerdict]) -> None:
        self._sealing.discard(hour)
        verdict = done.result()
        if verdict.damage is not None:
            # The hour is compared again when the file is whole.
            del self._unsealed[hour]
            self._on_damaged(hour, verdict.damage)
            return
        if verdict.seals_damage is not None:
            del self._unsealed[hour]
            self._on_seals_damaged(verdict.seals_damage)
            return
        unsealed = self._unsealed[hour]
        if verdict.reason:
            # When only space is short, the hour waits until the next sweep and no longer.
            again = 1 if verdict.event == NOT_SEALED else max(1, 2 * unsealed.put_off)
            unsealed.put_off = min(again, SWEEPS_PUT_OFF_MAX)
            unsealed.not_before = unsealed.sweeps + unsealed.put_off
            if unsealed.reason != verdict.reason:
                # A full disk is logged where sends are refused because of it; the other reasons ask for an operator.
                level = logging.WARNING if verdict.event == NOT_SEALED else logging.CRITICAL
                log.log(level, "%s hour=%s reason=%r", verdict.event, hour_name(hour), verdict.reason)
        unsealed.reason = verdict.reason
        if verdict.seal is not None:
            del self._unsealed[hour]
            self._hours.set(hour, _sealed(file, verdict.seal))
            if self._wheel.has_hour(hour):
                self._wheel.drop_hour(hour)
            self._sources.forget_hour(hour)
            log.info("hour_sealed hour=%s rows=%d dead=%d", hour_name(hour), verdict.seal.rows, verdict.seal.dead)

    # Deleting.

    def _delete(self, files: dict[int, HourFile]) -> tuple[list[int], dict[int, HourFile]]:
        """Remove the files of hours that the published table calls removed, and mark the others as removed; return
        which are which.
        """
        try:
            published = read_checkpoint(self._disk, self._folder, self._log_id) or {}
            table = published.get("hours", b"")
            assert isinstance(table, bytes), "this server wrote the table"
            self._executor.give_way()
            told = {int(row["hour"]) for row in decode_hours(table) if row["flags"] & REMOVED}
            gone = [hour for hour in files if hour in told]
            for hour in gone:
                self._remove(schedule_path(self._folder, hour))
                self._remove(dispatch_path(self._folder, hour))
            marked = {
                hour: file.with_flags(REMOVED) for hour, file in files.items() if hour not in told and not file.removed
            }
            if gone or marked:
                prefixes = (PREFIX, OUTCOME_PREFIX, GIVEN_UP_PREFIX)
                removes = [hour_key(hour, prefix) for hour in gone for prefix in prefixes]
                self._state.commit([hour_put(hour, file) for hour, file in marked.items()], removes)
        except (DamagedData, DiskFull, Shortage) as error:
            # A damaged slot is written anew by the next checkpoint; until then readers can't be told, so nothing is
            # removed. The next sweep finds the same hours, some of them without files.
            log.warning("hours_not_deleted reason=%r", str(error))
            return [], {}
        return gone, marked

    def _remove(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        if self._disk.exists(path):
            self._disk.remove(path)
        # An earlier sweep may have removed the file and found no descriptor for this sync.
        if self._disk.exists(folder):
            self._disk.sync_folder(folder)
        # Each sync may take long, and the coming hour may wait to be loaded (rule B2).
        self._executor.give_way()

    def _deleted(self, done: Done[tuple[list[int], dict[int, HourFile]]]) -> None:
        self._deleting = False
        gone, marked = done.result()
        for hour, file in marked.items():
            self._hours.set(hour, file)
        self._hours.remove(gone)
        for hour in gone:
            self._outcomes.forget(hour)
            log.info("hour_deleted hour=%s", hour_name(hour))


class SegmentRetention:
    """Removes message log segments that no checkpoint, reader or row needs any more (rule P6).

    An example: checkpoints with the replay offsets 100, 200 and 300 were published 20, 6 and 1 minutes ago.

    1. Readers may still use a checkpoint that is younger than 5 minutes, and the one before it: the limit is 200.
    2. A row in the wheel, waiting or under way refers to a batch at 150: the limit is 150.
    3. The next checkpoint publishes where the log may begin: at the segment that holds 150.
    4. When that is published, the segments that end at or below 150 are removed.
    """

    def __init__(self, message_log: Log, commit: Executor, worker: Executor, clock: Clock) -> None:
        self.keep_from = message_log.start  # Where the log may begin; a checkpoint says so before anything is removed.
        self._told = self.keep_from
        self._log = message_log
        self._commit = commit
        self._worker = worker
        self._clock = clock
        self._covered: list[tuple[int, int]] = []  # Monotonic instants and replay offsets of published checkpoints.

    def published(self, replay_offset: int, keep_from: int) -> None:
        """A checkpoint was published; it says that the log may begin at ``keep_from``."""
        self._covered.append((self._clock.monotonic_ms(), replay_offset))
        self._told = keep_from

    def release(self, *lowest: int | None, decided_from_ms: int | None = None) -> None:
        """Begin to remove segments below an old checkpoint and below each of ``lowest``, the offsets that rows refer
        to. Decisions from ``decided_from_ms`` on stay readable, because no other file tells them yet.
        """
        until = self._clock.monotonic_ms() - SEGMENTS_KEPT_MS
        # The newest old checkpoint stays in the list: rows may keep its segments for longer.
        while len(self._covered) > 1 and self._covered[1][0] <= until:
            self._covered.pop(0)
        if self._covered and self._covered[0][0] <= until:
            needed = [*lowest, None if decided_from_ms is None else self._log.older_than(decided_from_ms)]
            limit = min([self._covered[0][1], *(offset for offset in needed if offset is not None)])
            # When a reader misses a segment, the checkpoint tells it whether retention removed it or somebody else did
            # (rule S5).
            self.keep_from = max(self.keep_from, self._log.base_below(limit))
            # This runs on the thread that appends: a roll at the same time would get lost.
            self._commit.submit(partial(self._log.detach_below, min(limit, self._told)), self._detached)

    def _detached(self, done: Done[list[Segment]]) -> None:
        if detached := done.result():
            self._worker.submit(partial(self._log.remove, detached, self._worker.give_way), _removed, Priority.SPACE)


def _removed(done: Done[int]) -> None:
    try:
        log.info("segments_removed bytes=%d", done.result())
    except Shortage as error:
        log.warning("segments_not_removed reason=%r", error.message)  # The next removal takes them along.


def _sealed(file: HourFile, facts: SealFacts) -> HourFile:
    return file.with_flags(SEALED | (DEAD if facts.dead else 0))
