"""Retention: hours are sealed when their books are complete, and only sealed hours are ever deleted (rules S1, S2, P6).

The comparison is of sets of sequences, never of counters. Files are read and removed on the worker thread.
"""

import logging
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch import ColumnId
from delayd.clock import Clock
from delayd.delay.hour_table import HourFile, HourTable, hour_key, hour_put
from delayd.delay.loader import read_schedule_log
from delayd.delay.outcomes import OutcomeLog
from delayd.delay.recovery import read_outcomes
from delayd.delay.sources import Sources
from delayd.delay.wheel import Wheel
from delayd.disk import Disk
from delayd.errors import DamagedData
from delayd.executor import Done, Executor
from delayd.hours import HOUR_MS, hour_name, hour_start_ms
from delayd.log.dispatch import Outcome
from delayd.log.log import Log
from delayd.log.schedule import DEAD, SEALED, dispatch_path, schedule_path
from delayd.log.segment import FileKind, Segment, open_segment
from delayd.state import State

log = logging.getLogger(__name__)

SEGMENTS_KEPT_MS = 300_000  # Readers in other processes hold a checkpoint for so long before they read on from it (P3).
HOURS_A_SWEEP = 24  # A server that was off for days seals what it missed over a few sweeps.


class Verdict(NamedTuple):
    """What comparing an hour's two logs gave."""

    complete: bool
    dead: bool
    damage: DamagedData | None


class Retention:
    """Seals and deletes hours, a few at a time."""

    def __init__(
        self,
        disk: Disk,
        state: State,
        folder: str,
        log_id: int,
        executor: Executor,
        hours: HourTable,
        outcomes: OutcomeLog,
        sources: Sources,
        wheel: Wheel,
        retention_hours: int,
    ) -> None:
        self._disk = disk
        self._state = state
        self._folder = folder
        self._log_id = log_id
        self._executor = executor
        self._hours = hours
        self._outcomes = outcomes
        self._sources = sources
        self._wheel = wheel
        self._retention_hours = retention_hours
        self._busy: set[int] = set()

    def sweep(self, closed_before_ms: int, now_ms: int) -> None:
        """Begin to seal hours that ended by ``closed_before_ms``, and to delete sealed ones past their retention.

        ``closed_before_ms`` is the appended_at of a group that the last checkpoint covers: no row can be filed in an
        hour that ended before it any more (rule P5).
        """
        for hour in self._hours.unsealed(closed_before_ms // HOUR_MS - 1)[:HOURS_A_SWEEP]:
            if hour not in self._busy and not self._wheel.len_of(hour):
                self._busy.add(hour)
                self._outcomes.close_hour(hour, partial(self._compare, hour))
        expired_ms = now_ms - self._retention_hours * HOUR_MS
        for hour, file in sorted(self._hours.files.items()):
            if hour_start_ms(hour + 1) > expired_ms or len(self._busy) >= HOURS_A_SWEEP:
                break
            if file.sealed and not file.flags & DEAD and hour not in self._busy:
                self._busy.add(hour)
                self._sources.forget_hour(hour)
                self._executor.submit(partial(self._delete, hour), partial(self._deleted, hour))

    def _compare(self, hour: int) -> None:
        file = self._hours.get(hour)
        self._executor.submit(partial(self._verdict, hour, file), partial(self._compared, hour, file))

    def _verdict(self, hour: int, file: HourFile) -> Verdict:
        """Compare the hour's logs as they are on the disk, and make the seal durable if they agree."""
        stored, damage = read_schedule_log(self._disk, self._folder, self._log_id, hour, file)
        if damage is not None:
            return Verdict(False, False, damage)
        scheduled = [entry.batch.uint64s(ColumnId.SEQUENCE) for entry in stored]
        try:
            segment = open_segment(
                self._disk, dispatch_path(self._folder, hour), FileKind.DISPATCH, self._log_id, write=False
            )
        except FileNotFoundError:
            return Verdict(not scheduled, False, None)
        try:
            outcomes = read_outcomes(segment)
        except DamagedData as error:
            return Verdict(False, False, error)
        finally:
            segment.close()
        wanted = np.concatenate(scheduled) if scheduled else np.empty(0, np.uint64)
        complete = bool(np.array_equal(wanted, np.sort(outcomes.sequences)))
        dead = bool((outcomes.parts["outcome"] == Outcome.DEAD).any())
        if complete:
            self._state.commit([hour_put(hour, _sealed(file, dead))])
        return Verdict(complete, dead, None)

    def _compared(self, hour: int, file: HourFile, done: Done[Verdict]) -> None:
        self._busy.discard(hour)
        verdict = done.result()
        if verdict.damage is not None:
            log.critical("hour_damaged hour=%s reason=%r", hour_name(hour), str(verdict.damage))
        elif verdict.complete:
            self._hours.files[hour] = _sealed(file, verdict.dead)
            if self._wheel.has_hour(hour):
                self._wheel.drop_hour(hour)
            self._sources.forget_hour(hour)
            log.info("hour_sealed hour=%s rows=%d dead=%s", hour_name(hour), file.rows, verdict.dead)

    def _delete(self, hour: int) -> None:
        for path in (schedule_path(self._folder, hour), dispatch_path(self._folder, hour)):
            if self._disk.exists(path):
                self._disk.remove(path)
                self._disk.sync_folder(path.rpartition("/")[0])
        self._state.commit([], [hour_key(hour)])

    def _deleted(self, hour: int, done: Done[None]) -> None:
        done.result()
        self._busy.discard(hour)
        self._hours.files.pop(hour, None)
        log.info("hour_deleted hour=%s", hour_name(hour))


class SegmentRetention:
    """Removes message log segments that no checkpoint, reader or row needs any more (rule P6)."""

    def __init__(self, message_log: Log, commit: Executor, worker: Executor, clock: Clock) -> None:
        self._log = message_log
        self._commit = commit
        self._worker = worker
        self._clock = clock
        self._covered: list[tuple[int, int]] = []  # Monotonic instants and replay offsets of published checkpoints.

    def published(self, replay_offset: int) -> None:
        """A checkpoint was published."""
        self._covered.append((self._clock.monotonic_ms(), replay_offset))

    def release(self, *lowest: int | None) -> None:
        """Begin to remove what lies below an old checkpoint and below each of ``lowest``, where rows refer to."""
        until = self._clock.monotonic_ms() - SEGMENTS_KEPT_MS
        # The newest old one stays: rows may hold its segments until later.
        while len(self._covered) > 1 and self._covered[1][0] <= until:
            self._covered.pop(0)
        if self._covered and self._covered[0][0] <= until:
            limit = min([self._covered[0][1], *(offset for offset in lowest if offset is not None)])
            # On the thread that appends: a roll at the same time would be forgotten.
            self._commit.submit(partial(self._log.detach_below, limit), self._detached)

    def _detached(self, done: Done[list[Segment]]) -> None:
        if detached := done.result():
            self._worker.submit(partial(self._log.remove, detached), _removed)


def _removed(done: Done[int]) -> None:
    log.info("segments_removed bytes=%d", done.result())


def _sealed(file: HourFile, dead: bool) -> HourFile:
    return file._replace(flags=file.flags | SEALED | (DEAD if dead else 0))
