"""Intake: it makes what producers send durable in the message log, in group commits.

Nothing is answered, indexed or dispatched before the fsync of its group has returned (rules L1, L2). One commit is
under way at a time; what arrives meanwhile becomes the next group. The core raises a failed fsync, and the server
stops.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Batch, ColumnId
from delayd.clock import JUMP_MS
from delayd.config import DelayConfig
from delayd.delay.producers import Allowance, Producers, Waiter
from delayd.delay.stored import Stored
from delayd.errors import (
    BadInstant,
    ClockInDoubt,
    DelaydError,
    DiskFull,
    DiskReserve,
    HourFull,
    PastHorizon,
    SlowDown,
    Stopping,
)
from delayd.executor import Done
from delayd.hours import INSTANT_MS_MIN, hour_name, hour_of_ms, hours_of
from delayd.log.control import LogTime, SkippedSequences, encode_known
from delayd.log.group import BATCHES_MAX, GroupKind, NewGroup, content_position
from delayd.log.log import Log
from delayd.log.schedule import Skipped
from delayd.site import Site
from delayd.validate import check_batch, check_headers, rows_detail

log = logging.getLogger(__name__)

DAY_MS = 86_400_000
# Two batches with the most rows possible: one turn of the loop indexes a whole group, which then takes some 15 ms.
GROUP_ROWS_MAX = 131_072
BATCH_BYTES = 1_024  # A queued batch holds this much besides its bytes: its view and its waiter.


class Committed(NamedTuple):
    """A durable data group: its batches, when it was appended, and the offset behind it."""

    stored: list[Stored]
    appended_at_ms: int
    end: int


class Mark(NamedTuple):
    """A durable end of the message log: its offset, and header_crc32c of the group that ends there."""

    offset: int
    crc32c: int


class Written(NamedTuple):
    """The result of one commit: where its groups begin, and the new end of the log."""

    offsets: list[int]
    mark: Mark


class Control(NamedTuple):
    """A control batch to be logged, and the function to call when it is durable."""

    batch: bytes
    on_durable: Callable[[], None]


@dataclass(slots=True)
class Reserve:
    """Which batches are refused because disk space or memory is short: housekeeping sets it, each batch reads it (rule
    L8).
    """

    far_from_ms: int | None = None  # Messages due at or after this are refused; None: space is enough.
    closed: bool = False
    full_hours: set[int] = field(default_factory=set)
    behind: bool = False  # Checkpoints are further behind the log than a restart may replay.

    def note_full(self, hours: set[int]) -> None:
        """Take the hours that hold as many messages as they may."""
        self.full_hours = hours

    def take(self, free_bytes: int, config: DelayConfig, far_from_ms: int) -> None:
        """Take a reading of free space; a message counts as far when it is due at ``far_from_ms`` or later."""
        before = (self.closed, self.far_from_ms is not None)
        self.closed = free_bytes < config.free_bytes_all
        self.far_from_ms = far_from_ms if free_bytes < config.free_bytes_far else None
        if before != (self.closed, self.far_from_ms is not None):
            taken = "none" if self.closed else "all" if self.far_from_ms is None else "near"
            log.log(
                logging.INFO if taken == "all" else logging.WARNING,
                "sends_taken which=%s free_bytes=%d",
                taken,
                free_bytes,
            )


@dataclass(frozen=True, slots=True)
class FoundLog:
    """The message log as a start found it."""

    log: Log
    next_sequence: int
    appended_at_ms: int  # When the last durable group was appended; it never decreases (rule P5).
    skipped: tuple[Skipped, ...]  # Sequences that an operator's decision has left unused, once that is durable.


class Intake:
    """The one writer of the message log."""

    def __init__(
        self,
        site: Site,
        config: DelayConfig,
        found: FoundLog,
        producers: Producers,
        on_committed: Callable[[Committed], None],
        knows_subjects: Callable[[Batch], bool],
    ) -> None:
        self.reserve = Reserve()
        self.skipped = found.skipped
        self.next_sequence = found.next_sequence
        self.appended_at_ms = found.appended_at_ms
        self.durable = Mark(found.log.durable, found.log.crc32c)
        # Rows below the offset ``durable`` have lower sequences than this, and no row above it does.
        self.durable_sequence = found.next_sequence
        self.queued_bytes = 0
        self.subjects_full = False  # Whether batches with subjects that are new here are refused (rule B1).
        self._knows_subjects = knows_subjects
        self._log = found.log
        self._executor = site.worker
        self._clock = site.clock
        self._config = config
        self._producers = producers
        self._epoch = site.epoch
        self._on_committed = on_committed
        self._queue: list[Batch] = []
        self._controls: list[Control] = []
        self._tick = False
        self._skip = 0  # The next commit leaves this many sequences unused.
        # After an operator set the log's time back: the next group may be stamped with this instant, though the log is
        # ahead.
        self._set_back_ms: int | None = None
        self._committing = False
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether everything that was accepted is durable."""
        return not (self._committing or self._queue or self._controls)

    @property
    def is_full(self) -> bool:
        """Whether as many bytes wait for the disk as are allowed."""
        return self.queued_bytes > self._config.intake_queue_bytes_max

    def send(self, batch: Batch, waiter: Waiter, allowance: Allowance | None = None) -> None:
        """Take a batch; ``waiter`` is called when it is durable, or with the error if it was refused as a whole.

        ``allowance`` limits the new producers that the batch's connection may introduce.
        """
        # The batch number is looked up before anything can refuse the batch: a repetition gets the first answer again
        # (rule I1).
        if not self._producers.begin(batch, waiter, allowance):
            return
        try:
            self._check(batch)
        except DelaydError as error:
            self._producers.refuse(batch, error)
            return
        self._queue.append(batch)
        self.queued_bytes += batch.total_bytes + BATCH_BYTES
        self._commit()

    def control(self, batch: bytes, on_durable: Callable[[], None]) -> None:
        """Log a control batch."""
        self._controls.append(Control(batch, on_durable))
        self._commit()

    def tick(self) -> None:
        """Append an empty group, so that an idle server's log shows that time has passed (rule P5)."""
        self._tick = True
        self._commit()

    @property
    def filed_from_ms(self) -> int:
        """No row is filed any more in an hour that ended before this instant (rule P5)."""
        return self.appended_at_ms if self._set_back_ms is None else self._set_back_ms

    def set_back(self, to_ms: int, on_durable: Callable[[], None]) -> None:
        """Stamp by the clock again, at ``to_ms`` or later, though the log is ahead of that: an operator's decision
        (rule T4).

        A control record says so, in the first group with the earlier stamp. No hour that ends after ``to_ms`` may be
        sealed.
        """
        record = LogTime(self.appended_at_ms, to_ms)
        self._controls.insert(0, Control(encode_known([record]), on_durable))
        self._set_back_ms = to_ms
        self._commit()

    def skip(self, sequences: int, on_durable: Callable[[], None]) -> None:
        """Leave sequences unused, by an operator's decision; a control record says so, for the books (rule S5)."""
        self._controls.insert(0, Control(encode_known([SkippedSequences(sequences)]), on_durable))
        self._skip += sequences
        self._commit()

    def note_reserve(self, *, behind: bool, subjects_full: bool) -> None:
        """Take what durable groups and checkpoints have made of replay lag and of the subjects in memory."""
        self.reserve.behind, self.subjects_full = behind, subjects_full

    def close(self) -> None:
        """Refuse all batches from now on; batches that were taken are still committed."""
        self._closed = True

    def _check(self, batch: Batch) -> None:
        if self._closed:
            raise Stopping("this server is stopping; send to another one, or again when it is back")
        if self.reserve.closed:
            raise DiskReserve("this server's disk is at its reserve; free space there, or send again later")
        if self.reserve.behind or self.queued_bytes > self._config.intake_queue_bytes_max:
            raise SlowDown("this server is behind with its disk; send again later")
        batch.verify()
        check_batch(batch)
        if ColumnId.HEADERS_END in batch.offsets:
            check_headers(batch)
        if self.subjects_full and not self._knows_subjects(batch):
            raise SlowDown("this server remembers as many subjects as it can; send to those that it knows, or later")
        now_ms = self._clock.now_ms()
        earliest, latest = batch.range_of(ColumnId.DELIVER_AT_MS)
        horizon = now_ms + self._config.horizon_days * DAY_MS
        if latest > horizon:
            days = self._config.horizon_days
            if not self._clock.confirmed or now_ms < self.appended_at_ms - JUMP_MS:
                # A clock that is behind makes any message look too far ahead, and its sender can't help that.
                raise ClockInDoubt(
                    f"due more than {days} days ahead by this server's clock, which is in doubt: it shows the"
                    f" hour {hour_name(hour_of_ms(now_ms))} (UTC); see `delayd clock`, or send again later"
                )
            at_fault = batch.int64s(ColumnId.DELIVER_AT_MS) > horizon
            raise _at_rows(PastHorizon, f"due more than {days} days ahead", at_fault)
        if earliest < INSTANT_MS_MIN:
            # The message would leave at once, though its sender may have meant a time years ahead.
            at_fault = batch.int64s(ColumnId.DELIVER_AT_MS) < INSTANT_MS_MIN
            raise _at_rows(BadInstant, "due before 2001-09-09 (seconds, not milliseconds?)", at_fault)
        far = self.reserve.far_from_ms
        if far is not None and latest >= far:
            raise DiskReserve("this server's disk nears its reserve and takes near messages only; free space there")
        if self.reserve.full_hours:
            # The hour is computed from the instant that the group will be stamped with: after the clock was set back,
            # that is later than now (rule P5).
            filed_from_ms = max(now_ms, self.appended_at_ms)
            filed_ms = np.maximum(batch.int64s(ColumnId.DELIVER_AT_MS), filed_from_ms)
            full = np.isin(hours_of(filed_ms), list(self.reserve.full_hours))
            if full.any():
                raise _at_rows(HourFull, "due in an hour that holds all the messages it can", full)

    def _commit(self) -> None:
        if self._committing or not (self._queue or self._controls or self._tick):
            return
        self._committing = True
        batches = self._take_batches()
        controls, self._controls = self._controls[:BATCHES_MAX], self._controls[BATCHES_MAX:]
        begin, skip, self._skip = self.next_sequence, self._skip, 0
        self.next_sequence += skip
        appended_at_ms = max(self._clock.stamp_ms(), self.filed_from_ms)
        groups: list[NewGroup] = []
        if controls:
            buffers = [control.batch for control in controls]
            groups.append(NewGroup(GroupKind.CONTROL, buffers, self._epoch, appended_at_ms, self.next_sequence))
        stored: list[Stored] = []
        if batches:
            sequence = self.next_sequence
            for batch in batches:
                stored.append(Stored(0, sequence, batch))
                sequence += batch.count
            rows = sequence - self.next_sequence
            buffers_of = [batch.buffer for batch in batches]
            groups.append(NewGroup(GroupKind.DATA, buffers_of, self._epoch, appended_at_ms, self.next_sequence, rows))
            self.next_sequence = sequence
        if not groups:
            groups.append(NewGroup(GroupKind.TICK, [], self._epoch, appended_at_ms, self.next_sequence))
        self._tick = False
        self._executor.submit(
            partial(_write, self._log, groups, appended_at_ms),
            partial(self._committed, stored, controls, appended_at_ms, begin, skip),
        )

    def _take_batches(self) -> list[Batch]:
        taken, size, rows = 0, 0, 0
        for batch in self._queue:
            size += batch.total_bytes
            rows += batch.count
            if taken == BATCHES_MAX or (taken and (size > self._config.group_bytes_max or rows > GROUP_ROWS_MAX)):
                break
            taken += 1
        batches, self._queue = self._queue[:taken], self._queue[taken:]
        return batches

    def _committed(
        self,
        stored: list[Stored],
        controls: list[Control],
        appended_at_ms: int,
        begin: int,
        skip: int,
        done: Done[Written],
    ) -> None:
        self._committing = False
        try:
            offsets, self.durable = done.result()
        except DiskFull as error:
            if not self.reserve.closed:
                log.warning("message_log_full reason=%r", str(error))
            # Nothing was appended, and nobody was told these sequences. They are given again: otherwise the books would
            # miss them (rule S5). Control records are tried again, unless the server stops.
            self.next_sequence = begin
            self._controls, self._skip = ([], 0) if self._closed else (controls + self._controls, self._skip + skip)
            self.reserve.closed = True
            refused, self._queue = [*(entry.batch for entry in stored), *self._queue], []
            self.queued_bytes = 0
            for batch in refused:
                self._producers.refuse(batch, DiskReserve("this server's disk is full; free space there"))
            return
        if appended_at_ms < self.appended_at_ms:
            self._set_back_ms = None
        self.appended_at_ms, self.durable_sequence = appended_at_ms, self.next_sequence
        if skip:
            self.skipped += ((begin, skip),)
        # The next commit begins first: then the thread writes the next group while this one is answered and indexed,
        # which takes about as long.
        self._commit()
        # Each of these calls may begin a checkpoint, so control records take effect before the rows of the same commit.
        for control in controls:
            control.on_durable()
        if stored:
            self._accept(stored, offsets[-1], appended_at_ms)

    def _accept(self, stored: list[Stored], group_offset: int, appended_at_ms: int) -> None:
        offset = group_offset + content_position(len(stored))
        placed: list[Stored] = []
        for entry in stored:
            placed.append(Stored(offset, entry.base_sequence, entry.batch))
            offset += entry.batch.total_bytes
            self.queued_bytes -= entry.batch.total_bytes + BATCH_BYTES
        self._producers.look()
        for entry in placed:
            self._producers.accept(entry.batch, entry.base_sequence, appended_at_ms)
        self._on_committed(Committed(placed, appended_at_ms, offset))

    def resume(self) -> None:
        """Try again what could not be appended to a full disk, once there is space."""
        self._commit()


def _write(log: Log, groups: list[NewGroup], now_ms: int) -> Written:
    offsets = log.append(groups, now_ms)
    log.flush()
    return Written(offsets, Mark(log.durable, log.crc32c))


def _at_rows(kind: type[DelaydError], what: str, at_fault: NDArray[np.bool_]) -> DelaydError:
    rows = np.flatnonzero(at_fault)
    sentence = f"{len(rows)} messages are {what}, the first is row {rows[0]}; send them with another time"
    return kind(sentence, rows=rows_detail(rows))
