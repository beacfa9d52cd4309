"""Checkpoint: the message log's rows are filed, counted and published (rule P2).

One replay offset counts for all hours; it is fixed before the first row is gathered. The order is: the files are
durable, then the LMDB transaction counts them, then the checkpoint file publishes the count.

1. On the loop, `begin` fixes the offset, say 5,000,000: the rows between the last one, 4,000,000, and this one are to
   be filed. Producers are packed in pieces, some in each turn of the loop.
2. On the worker thread the rows are appended to the schedule logs of their hours, and these files are synced.
   Keys that rows have taken are written as a run of the index of keys.
3. One LMDB transaction sets the replay offset to 5,000,000, the new lengths of these hours' files, and the runs.
4. The checkpoint file says the same to readers in other processes.
5. On the loop, the hour table takes the new lengths, and the pending rows up to 5,000,000 are forgotten.

A crash before step 3 loses nothing: the next start replays from 4,000,000, and the next writer cuts off what was
appended. A crash after it replays from 5,000,000.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgpack
import numpy as np

from delayd.config import DelayConfig
from delayd.delay.filing.hour_table import BESIDE_PREFIX, FiledHours, OutcomeEnd, hour_puts, merge_hours, outcome_put
from delayd.delay.filing.log_range import HandedOver, sort_handed_over
from delayd.delay.filing.pending import PendingRows, Taken
from delayd.delay.filing.schedule_writer import FILES_A_SYNC, ScheduleWriter
from delayd.delay.intake import Mark
from delayd.delay.keys.index import Frozen, KeyIndex, WrittenKeys
from delayd.delay.producers import Producers
from delayd.delay.state_values import ENDED_KEY, TARGET_PREFIX
from delayd.errors import DamagedData, DataError, DiskFull, Shortage
from delayd.log.checkpoint import CheckpointFile, Value
from delayd.log.hour import END_ROW, HourRows, SealMark, Skipped
from delayd.log.key_run import STATE_KEY as KEYS_KEY
from delayd.log.log import Log
from delayd.machine.alarms import DAMAGED_AGAIN_MS, FULL_AGAIN_MS
from delayd.machine.clock import ClockEvidence
from delayd.machine.executor import Done
from delayd.machine.identity import Site

log = logging.getLogger(__name__)

NEAR_PARTS = 4  # With few hours to write, a checkpoint is a copy into some files, and begins at a quarter of the bytes.
# While little arrives, most of it for later hours, it begins at a sixteenth: then a start has little to replay.
CALM_PARTS = 16
CALM_MS = 1_000
# Fewer new bytes than this in CALM_MS (20,000 messages of 200 B) mean that a flood has ended: its rest is filed now,
# not after a minute.
CALM_BYTES = 4 << 20

Evidence = Callable[[], ClockEvidence]


class AuditWord(NamedTuple):
    """The part of a checkpoint that only the audit reads (rules S5, S7)."""

    skipped: tuple[Skipped, ...]  # Sequences that an operator's decision left unused.
    dropped: list[Value]  # Filed rows that operators gave up: ``[hour, rows]``.
    keep_from: int  # Where the message log may begin.
    # All rows that fell due before this have an outcome, except rows that a target holds up; 0 while nobody knows.
    settled_ms: int
    waits: str  # Why ``settled_ms`` does not advance.
    links: list[Value]  # For each target its log_id, and ``settled_ms`` and ``waits`` for the rows that wait for it.


class CheckpointValues:
    """The values, besides its hours, that a checkpoint puts into the state and removes from it; merged beside the
    loop.
    """

    def __init__(
        self,
        owed: CheckpointValues | None,
        producers: dict[bytes, bytes],
        gone: set[bytes],
        notes: dict[bytes, int],
        moved: dict[int, OutcomeEnd],
        forgotten: Iterable[bytes],
    ) -> None:
        self.producers = producers
        self.gone = gone  # Keys of producers.
        self._owed = owed  # The values of the checkpoint before, if it failed and did not store them.
        self._notes = notes
        self._moved = moved
        self._forgotten = forgotten
        self._merged: tuple[dict[bytes, bytes], set[bytes]] | None = None

    def merged(self) -> tuple[dict[bytes, bytes], set[bytes]]:
        """Return puts and removes by key, the newer value of each key: so what is owed does not grow with every try
        that fails.
        """
        if self._merged is None:
            owed_puts, owed_removes = self._owed.merged() if self._owed is not None else ({}, set())
            puts = {**owed_puts, **self.producers}
            puts.update((TARGET_PREFIX + subject, msgpack.packb(target)) for subject, target in self._notes.items())
            puts.update(outcome_put(hour, end) for hour, end in self._moved.items())
            removes = {*self.gone, *(TARGET_PREFIX + subject for subject in self._forgotten)}
            for key in removes:
                puts.pop(key, None)
            self._merged, self._owed = (puts, (owed_removes | removes) - puts.keys()), None
        return self._merged


NOTHING_TOLD = CheckpointValues(None, {}, set(), {}, {}, ())
COLLECTED = object()


class ToKeep(NamedTuple):
    """What a checkpoint keeps besides the rows that it files; all of it is of one moment of the loop."""

    stop: Mark  # The message log is filed up to here; it is durable and indexed.
    next_sequence: int
    appended_at_ms: int
    notes: dict[bytes, int]  # Targets of subjects that are new.
    forgotten: Iterable[bytes]  # Subjects whose target is not needed any more.
    ends: dict[int, OutcomeEnd]  # The ends of all dispatch logs, by hour.
    moved: Iterable[int]  # The hours whose end is not in the state yet.
    handed_over: list[HandedOver]  # The rows whose bodies need not be filed.
    # Makes a value of the rows that decisions have ended, as far as their outcomes are not durable (rule C2). The
    # worker calls it, for there may be millions.
    owed_rows: Callable[[], bytes]
    books: AuditWord


class Facts(NamedTuple):
    """The contents of a checkpoint besides its hours; taken on the loop before the worker begins."""

    keep: ToKeep
    told: CheckpointValues
    keys: Frozen


class Filed(NamedTuple):
    """The files that a checkpoint wrote; ``unpublished`` says why its own file could not be written; ``damage`` is new
    damage by hour.
    """

    hours: HourRows
    beside: HourRows
    damage: dict[int, DamagedData]
    unpublished: DataError | OSError | None
    keys: WrittenKeys


@dataclass(frozen=True, slots=True)
class Filing:
    """What a checkpoint works on, besides the message log."""

    filed: FiledHours
    pending: PendingRows
    producers: Producers
    keys: KeyIndex


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """How far the last checkpoint in the state goes."""

    replay: Mark
    filed_below: int  # All rows with lower sequences are filed.
    reach_ms: int  # The latest appended_at from before an operator's decision set the log's time back.


@dataclass(frozen=True, slots=True)
class CheckpointCalls:
    """What a checkpoint asks of the other parts of the server, and tells them."""

    evidence: Evidence
    rest: Callable[[], None]  # Leaves the disk to others for a moment.
    damaged: Callable[[], Iterable[int]]  # Hours whose schedule log can't be appended to now.
    on_damaged: Callable[[int, DamagedData], None]  # Called with hours whose schedule log was found damaged.
    seal_end: Callable[[], SealMark | None]


class Checkpointer:
    """Writes checkpoints on the worker thread, one at a time."""

    def __init__(
        self,
        site: Site,
        config: DelayConfig,
        message_log: Log,
        filing: Filing,
        last: LastCheckpoint,
        calls: CheckpointCalls,
    ) -> None:
        self.filed_below = last.filed_below
        self.replay = last.replay
        self.reach_ms = last.reach_ms
        self.appended_at_ms = 0  # When the last group was appended that a checkpoint of this life covers.
        self._site = site
        self._state = site.state
        self._clock = site.clock
        self._executor = site.worker
        self._config = config
        self._log = message_log
        self._hours = filing.filed.hours
        self._beside = filing.filed.beside
        self._filed = filing.filed
        self._pending = filing.pending
        self._producers = filing.producers
        self._keys = filing.keys
        self._calls = calls
        self._file = CheckpointFile(site.disk, site.folder, site.log_id)
        self._published = -1  # The replay offset in the checkpoint file, as far as this life knows it.
        self._waiters: list[tuple[int, Callable[[], None]]] = []
        self._owed = NOTHING_TOLD
        self.collecting: Iterator[None] | None = None  # While it is set, `step` has more to collect.
        self._collected: Callable[[], None] = lambda: None  # Called when everything is collected.
        self._running = False
        self._told = ""  # Why the last one was put off, as the log said it.
        self._next = site.alarms.alarm(self._time_has_come)
        self._next.after(config.checkpoint_every_ms)
        self._is_time = False
        self._rests = False  # Whether the last one failed, and nothing but time asks for the next one.
        self._turn = site.alarms.alarm(self.step)
        self._looked_ms = self._clock.monotonic_ms()
        self._looked_at = self.replay.offset  # The durable end of the log at that look.
        self._calm = False  # Whether little arrived between the last two looks.

    @property
    def running(self) -> bool:
        """Whether one is under way."""
        return self._running

    def _time_has_come(self) -> None:
        self._is_time, self._rests = True, False

    def is_due(self, durable: int) -> bool:
        """Whether time or bytes ask for one."""
        if self._running:
            return False
        now = self._clock.monotonic_ms()
        if now - self._looked_ms >= CALM_MS:
            self._calm = durable - self._looked_at < CALM_BYTES
            self._looked_ms, self._looked_at = now, durable
        asked = bool(self._waiters) or durable - self.replay.offset >= self._bytes_due()
        return self._is_time or (asked and not self._rests)

    def when_covers(self, offset: int, callback: Callable[[], None]) -> None:
        """Call back when a published checkpoint covers the message log up to ``offset``; asks for one."""
        if self._published >= offset:
            callback()
        else:
            self._waiters.append((offset, callback))

    def begin(self, keep: ToKeep, ended: Callable[[bool], None]) -> None:
        """File everything up to ``keep.stop``; call back with whether it was published."""
        self._running, self._is_time = True, False
        self._next.after(self._config.checkpoint_every_ms)
        # If a producer were forgotten too early, its retried batches would be accepted twice (rule T1).
        seen_before_ms = self._clock.now_ms() - self._config.producer_keep_ms if self._clock.confirmed else 0
        owed, self._owed = self._owed, NOTHING_TOLD
        moved = {hour: keep.ends[hour] for hour in keep.moved}
        told = CheckpointValues(owed, {}, set(), keep.notes, moved, keep.forgotten)
        facts = Facts(keep, told, self._keys.freeze())
        # Only the loop may read a producer's batches; all else is packed beside the loop.
        self.collecting = self._producers.collect(seen_before_ms, told.producers, told.gone)
        self._collected = partial(self._submit, facts, self._pending.take(), ended)
        self.step()

    def step(self) -> None:
        """Go on with a checkpoint that is begun in pieces, by as much as one turn of the loop may take (rule B2)."""
        assert self.collecting is not None, "it is begun"
        if next(self.collecting, COLLECTED) is COLLECTED:
            self.collecting = None
            self._collected()
        else:
            self._turn.soon()

    def _submit(self, facts: Facts, taken: Taken, ended: Callable[[bool], None]) -> None:
        now_ms, evidence = self._clock.now_ms(), self._calls.evidence()
        work = partial(self._write, facts, taken.rows, now_ms, evidence, frozenset(self._calls.damaged()))
        self._executor.submit(work, partial(self._written, facts, taken, ended))

    def _bytes_due(self) -> int:
        """After how many new bytes in the message log a checkpoint begins before its time."""
        # A row that is due within the hour may be handed over before a checkpoint: then its body is not filed at all.
        if self._calm and self._pending.mostly_later:
            return self._config.checkpoint_bytes // CALM_PARTS
        if self._pending.hours_apart <= FILES_A_SYNC:
            return self._config.checkpoint_bytes // NEAR_PARTS
        return self._config.checkpoint_bytes

    def reach(self, appended_at_ms: int) -> None:
        """An operator's word has set the log back from this instant: checkpoints say that it came so far."""
        self.reach_ms = max(self.reach_ms, appended_at_ms)

    def close(self) -> None:
        """Close the checkpoint file."""
        self._file.close()

    def _write(self, facts: Facts, rows: int, now_ms: int, evidence: ClockEvidence, damaged: frozenset[int]) -> Filed:
        """File, count and publish, on the worker thread. Reads the hour table, which the loop changes only
        afterwards.
        """
        # This comes first: if anything below fails, the next checkpoint owes these values.
        keep, (puts, removes) = facts.keep, facts.told.merged()
        writer = ScheduleWriter(self._site, self._log, self._filed, now_ms, self._pause, damaged)
        writer.write(
            self.replay.offset,
            keep.stop.offset,
            self.replay.crc32c,
            rows,
            sort_handed_over(keep.handed_over),
        )
        # The writer's last sync, the commit and the publication may each take long, so urgent jobs go first (rule B2).
        self._executor.give_way()
        checkpoint = {
            "replay_offset": keep.stop.offset,
            "replay_crc32c": keep.stop.crc32c,
            "next_sequence": keep.next_sequence,
            "appended_at_ms": keep.appended_at_ms,
            "reach_ms": self.reach_ms,
            "skipped": keep.books.skipped,
        }
        written, beside = writer.written.rows, writer.written_beside.rows
        counted = [(b"checkpoint", msgpack.packb(checkpoint))]
        owed_rows = keep.owed_rows()
        if owed_rows:
            counted.append((ENDED_KEY, owed_rows))
        else:
            removes = removes | {ENDED_KEY}
        rows_of_hours = chain(hour_puts(written), hour_puts(beside, BESIDE_PREFIX))
        keys = self._keys.write(facts.keys)
        counted.append((KEYS_KEY, keys.known.encode()))
        try:
            self._state.commit(chain(rows_of_hours, sorted(puts.items()), counted), sorted(removes))
        except (DataError, OSError):
            self._keys.abandon(keys)
            raise
        self._executor.give_way()
        unpublished: DataError | OSError | None = None
        try:
            tables = merge_hours(self._hours.rows, written), merge_hours(self._beside.rows, beside)
            self._publish(keep, *tables, now_ms, evidence)
        except (DataError, OSError) as error:
            # The state counts this checkpoint all the same. If it were treated as undone, the next one would cut off
            # rows that are counted.
            unpublished = error
        return Filed(written, beside, writer.damage, unpublished, keys)

    def _pause(self) -> None:
        """Called between two parts, where nothing is unsynced."""
        self._calls.rest()
        self._executor.give_way()

    def _publish(self, keep: ToKeep, hours: HourRows, beside: HourRows, now_ms: int, evidence: ClockEvidence) -> None:
        seals, books = self._calls.seal_end(), keep.books
        self._file.publish(
            {
                "replay_offset": keep.stop.offset,
                "replay_crc32c": keep.stop.crc32c,
                "next_sequence": keep.next_sequence,
                "appended_at_ms": keep.appended_at_ms,
                "reach_ms": self.reach_ms,
                "epoch": self._site.epoch,
                "hours": hours.tobytes(),
                "beside": beside.tobytes(),
                "outcomes": np.array([(hour, 0, end.length) for hour, end in keep.ends.items()], END_ROW).tobytes(),
                "clock": [evidence.boot_id, evidence.boottime_ms, evidence.wall_ms],
                "latest_ms": evidence.latest_ms,
                "gaps": [list(gap) for gap in evidence.gaps],
                "seals": None if seals is None else [seals.seals, seals.sha256],
                "skipped": [list(range_) for range_ in books.skipped],
                "dropped": books.dropped,
                "keep_from": books.keep_from,
                "settled_ms": books.settled_ms,
                "waits": books.waits,
                "links": books.links,
            },
            now_ms,
        )

    def _written(self, facts: Facts, taken: Taken, ended: Callable[[bool], None], done: Done[Filed]) -> None:
        self._running = False
        try:
            filed = done.result()
        except (DiskFull, DamagedData, Shortage) as error:
            # Nothing counts the rows that were written. The next checkpoint stores the values of this one.
            self._owed = facts.told
            self._put_off(error, ended)
            return
        self._hours.update(filed.hours)
        self._beside.update(filed.beside)
        self._keys.counted(filed.keys)
        for hour, damage in filed.damage.items():
            self._calls.on_damaged(hour, damage)
        self._pending.drop(taken)
        keep = facts.keep
        self.replay, self.appended_at_ms, self.filed_below = keep.stop, keep.appended_at_ms, keep.next_sequence
        if filed.unpublished is not None:
            self._put_off(filed.unpublished, ended)
            return
        self._published, self._told = keep.stop.offset, ""
        # A checkpoint of an idle server, which moved nothing, is no change of state.
        level = logging.INFO if taken.rows else logging.DEBUG
        log.log(level, "checkpoint replay_offset=%d rows=%d hours=%d", keep.stop.offset, taken.rows, len(filed.hours))
        ready = [callback for offset, callback in self._waiters if offset <= keep.stop.offset]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] > keep.stop.offset]
        for callback in ready:
            callback()
        ended(True)

    def _put_off(self, error: Exception, ended: Callable[[bool], None]) -> None:
        self._is_time, self._rests = False, True
        self._next.after(DAMAGED_AGAIN_MS if isinstance(error, DamagedData) else FULL_AGAIN_MS)
        if self._told != str(error):
            self._told = str(error)
            # A damaged file waits until an operator restores it: messages that were accepted meanwhile are safe in the
            # message log.
            level = logging.CRITICAL if isinstance(error, DamagedData) else logging.WARNING
            log.log(level, "checkpoint_put_off reason=%r", self._told)
        ended(False)
