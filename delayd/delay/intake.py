"""Intake: it makes what producers send durable in the message log, as `delayd.log.committer` explains.

A group that finds no space on the disk is refused (rule L8); what waits behind it is refused with it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import Buffer, ColumnId, Int64s
from delayd.batch.labels import check_again, check_drained, check_own
from delayd.batch.validate import check_batch, check_expiry, check_headers, rows_detail
from delayd.config import COMMIT_BYTES_MAX, DelayConfig
from delayd.delay.producers import Allowance, Producers, Waiter
from delayd.delay.rows import Stored
from delayd.errors import (
    BadInstant,
    ClockInDoubt,
    DelaydError,
    DiskFull,
    DiskReserve,
    HourFull,
    PastHorizon,
    ServerCordoned,
    SlowDown,
    Stopping,
)
from delayd.hours import INSTANT_MS_MIN, hour_name, hour_of_ms, hours_of
from delayd.log.committer import Committer
from delayd.log.control import LogTime, SkippedSequences, encode_known
from delayd.log.group import BATCHES_MAX, GroupKind, NewGroup, content_position
from delayd.log.hour import RESTORED_STEP, Skipped
from delayd.log.log import Log, LogWrite, Written
from delayd.machine.clock import JUMP_MS
from delayd.machine.executor import Done
from delayd.machine.identity import Site

log = logging.getLogger(__name__)

DAY_MS = 86_400_000
# Two batches with the most rows possible: one turn of the loop indexes a whole group, which then takes some 15 ms.
GROUP_ROWS_MAX = 131_072
NEAR_PART = 8  # Checkpoints may be an eighth further behind the log for near messages.
# The room that a group keeps for decisions and moved batches, when something waits to be decided.
DECIDED_BYTES_MAX = 24 << 20
DECIDED_BATCHES_MAX = 256
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


NO_VERDICTS: Mapping[int, bytes] = {}


class OpenGroup(NamedTuple):
    """The group commit that is being closed, as it is before anything is decided."""

    appended_at_ms: int
    stored: list[Stored]  # The producers' batches; their offsets are not known yet.
    next_sequence: int  # That of the first moved row, if there is one.


class Decided(NamedTuple):
    """What a decider has decided: at most DECIDED_BYTES_MAX and DECIDED_BATCHES_MAX, the record counted too."""

    record: bytes | None = None  # A CONTROL batch with the decisions; None when nothing is to be logged.
    with_rows: bool = False  # The record stands before the rows of the commit, in one group with them.
    moved: Sequence[Batch] = ()  # Batches that this server makes; they stand behind those of the producers.
    # By base sequence of a batch whose rows met others by their keys: what its sender is told, as `decided_about` has
    # it.
    verdicts: Mapping[int, bytes] = NO_VERDICTS
    # Whether a batch has keys: the next commit decides when the rows of this one are indexed.
    keyed: bool = False


NOTHING_DECIDED = Decided()


class Decider(Protocol):
    """Decides about rows when a group is closed (rule P1)."""

    @property
    def waiting(self) -> bool:
        """Whether there is something to decide."""

    def close(self, group: OpenGroup) -> Decided:
        """Decide what waits. With moved batches there is a record, and it stands with the rows."""

    def committed(self) -> None:
        """What `close` has decided is durable, and takes effect."""

    def answer(self) -> None:
        """Tell those who asked."""

    def refused(self, error: DelaydError) -> None:
        """The batch could not be stored: undo what was decided, and refuse what waits."""


class KeyedBatches(Protocol):
    """Looks keys up before a batch with keys is queued."""

    def check(self) -> None:
        """Raise why no batch with keys can be taken now."""

    def take(self, batch: Batch) -> None:
        """Look the keys of a batch up, and then `Intake.join` it, or `Intake.refuse` it."""


class Gate(Protocol):
    """Judges batches by what is pending (docs/quotas.md)."""

    def admit(self, batch: Batch) -> None:
        """Count the rows of a batch, or raise why it is refused."""

    def refused(self, batch: Batch) -> None:
        """A batch is refused: if it was admitted, its rows do not count any more."""


class Control(NamedTuple):
    """A control batch to be logged, and the function to call when it is durable. With ``on_full`` it is not tried again
    on a full disk: somebody waits for it, and hears why.
    """

    batch: bytes
    on_durable: Callable[[], None]
    on_full: Callable[[DiskFull], None] | None = None


class _SetBack(NamedTuple):
    """An operator's decision that is not durable yet: the log is stamped by the clock again, at ``to_ms`` or later."""

    to_ms: int
    control: Control


class _Commit(NamedTuple):
    """The commit that is under way."""

    group: OpenGroup
    decided: Decided
    controls: list[Control]
    begin: int  # The next sequence before this commit.
    skip: int  # So many sequences before the first row are left unused.
    asked: bool  # Whether the decider decided.
    end: int  # The next sequence behind this commit.

    def groups(self, epoch: int) -> list[NewGroup]:
        """The groups to be appended: a CONTROL group, if there is one, then a DATA group, or else a TICK."""
        (at_ms, stored, _), (record, with_rows, moved, *_) = self.group, self.decided
        base = self.begin + self.skip
        records: list[Buffer] = [] if record is None else [record]
        controls: list[Buffer] = [control.batch for control in self.controls] if self.controls else []
        rows: list[Buffer] = [entry.batch.buffer for entry in stored]
        if moved:
            rows += [batch.buffer for batch in moved]
        if with_rows:
            rows = records + rows
        else:
            controls = records + controls
        groups: list[NewGroup] = []
        if controls:
            groups.append(NewGroup(GroupKind.CONTROL, controls, epoch, at_ms, base))
        if rows:
            groups.append(NewGroup(GroupKind.DATA, rows, epoch, at_ms, base, self.end - base))
        return groups or [NewGroup(GroupKind.TICK, [], epoch, at_ms, base)]


@dataclass(slots=True)
class Reserve:
    """Which batches are refused because disk space or memory is short: housekeeping sets it, each batch reads it (rule
    L8).
    """

    free_bytes: int = 0  # The last reading of the disk.
    far_from_ms: int | None = None  # Messages due at or after this are refused; None: space is enough.
    closed: bool = False
    full_hours: set[int] = field(default_factory=set)
    behind_from_ms: int | None = None  # Messages due at or after this wait for a checkpoint; None: none waits.
    behind: bool = False  # All messages wait for it.
    _later_ms: int | None = None  # When the first hour begins that is not loaded, as of the last reading of the disk.

    def take_lag(self, lag_bytes: int, lag_bytes_max: int) -> None:
        """Take how many bytes of log no checkpoint covers. A flood of far messages ends at the limit; near ones, which
        would be late, are taken on while the checkpoint is written.
        """
        self.behind_from_ms = self._later_ms if lag_bytes > lag_bytes_max else None
        self.behind = lag_bytes > lag_bytes_max + lag_bytes_max // NEAR_PART

    def note_full(self, hours: set[int]) -> None:
        """Take the hours that hold as many messages as they may."""
        self.full_hours = hours

    def take(self, free_bytes: int, config: DelayConfig, far_from_ms: int) -> None:
        """Take a reading of free space; a message counts as far when it is due at ``far_from_ms`` or later."""
        self.free_bytes, self._later_ms = free_bytes, far_from_ms
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
    skipped: tuple[Skipped, ...]  # Sequences that were left unused because the directory was restored, durably.


class Intake(Committer[_Commit, Written]):
    """The one writer of the message log."""

    def __init__(
        self,
        site: Site,
        config: DelayConfig,
        found: FoundLog,
        producers: Producers,
        on_committed: Callable[[Committed], None],
        new_rows: Callable[[Batch], NDArray[np.intp]],
    ) -> None:
        super().__init__("message log", site.worker, site.clock)
        self.reserve = Reserve()
        self.skipped = found.skipped
        self.next_sequence = found.next_sequence
        self.appended_at_ms = found.appended_at_ms
        self.durable = Mark(found.log.durable, found.log.crc32c)
        # Rows below the offset ``durable`` have lower sequences than this, and no row above it does.
        self.durable_sequence = found.next_sequence
        self.queued_bytes = 0
        self.subjects_full = False  # Whether batches with subjects that are new here are refused (rule B1).
        self.decider: Decider | None = None
        self.gate: Gate | None = None
        self.cordoned = False  # By an operator, as meta tells: new messages go to other servers (docs/drain.md).
        self.keyed: KeyedBatches | None = None
        self._looked_up = 0  # Batches with keys that are looked up and not queued yet.
        self._to_decide = False  # Whether something waits for the decider.
        self._new_rows = new_rows  # Those of a batch whose subjects are new here.
        self._log = found.log
        self._config = config
        self._producers = producers
        self._epoch = site.epoch
        self._on_committed = on_committed
        self._queue: list[Batch] = []
        self._controls: list[Control] = []
        self._tick = False
        self._skip = 0  # The next commit leaves this many sequences unused.
        self._jumping = False  # Whether this life leaves sequences unused, or has done so.
        self._jumped = False  # Whether that is durable.
        self._jumps: list[Control] = []  # They wait for that.
        # After an operator set the log's time back: the next group may be stamped with this instant, though the log is
        # ahead.
        self._set_back: _SetBack | None = None
        # Until when no group is closed: moved rows, and rows with keys, are indexed before anybody decides about them,
        # and a turn of the loop decides so many requests only.
        self._holding = False
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether everything that was accepted is durable, and was told."""
        waits = self._queue or self._controls or self._to_decide or self._looked_up
        return super().idle and not (waits or self._holding)

    @property
    def looks_up(self) -> bool:
        """Whether keys of batches are being looked up."""
        return bool(self._looked_up)

    @property
    def closed(self) -> bool:
        """Whether the server is stopping."""
        return self._closed

    @property
    def is_full(self) -> bool:
        """Whether as many bytes wait for the disk as are allowed."""
        return self.queued_bytes > self._config.intake_queue_bytes_max

    def send(
        self,
        batch: Batch,
        waiter: Waiter,
        allowance: Allowance | None = None,
        *,
        again: bool = False,
        drained: bool = False,
        own: bool = False,
    ) -> None:
        """Take a batch; ``waiter`` is called when it is durable, or with the error if it was refused as a whole.

        ``allowance`` limits the new producers that the batch's connection may introduce. ``again``: a realtime server
        sends messages that come again to their group (rule Q2). ``drained``: another delay server, which held them, is
        drained (docs/drain.md). ``own``: this server itself makes them.
        """
        # The batch number is looked up before anything can refuse the batch: a repetition gets the first answer again
        # (rule I1).
        if not self._producers.begin(batch, waiter, allowance, drained=drained):
            return
        try:
            self._check(batch, again, drained, own)
        except DelaydError as error:
            self._refuse(batch, error)
            return
        self.queued_bytes += batch.total_bytes + BATCH_BYTES
        # The keys of drained rows meet nobody: until their slots move, the server that sends them is their owner.
        if ColumnId.KEY_END in batch.offsets and self.keyed is not None and not drained:
            self._looked_up += 1
            self.keyed.take(batch)
            return
        self._queue.append(batch)
        self.commit()

    def join(self, batches: Sequence[Batch]) -> None:
        """Queue batches whose keys were looked up."""
        self._looked_up -= len(batches)
        self._queue += batches
        self._to_decide = True
        self.commit()

    def refuse(self, batch: Batch, error: DelaydError) -> None:
        """Refuse a batch whose keys could not be looked up."""
        self._looked_up -= 1
        self.queued_bytes -= batch.total_bytes + BATCH_BYTES
        self._refuse(batch, error)

    def control(
        self, batch: bytes, on_durable: Callable[[], None], on_full: Callable[[DiskFull], None] | None = None
    ) -> None:
        """Log a control batch; see `Control`."""
        self._controls.append(Control(batch, on_durable, on_full))
        self.commit()

    def decide(self) -> None:
        """Have the decider decide, with the next group."""
        self._to_decide = True
        self.commit()

    def tick(self) -> None:
        """Append an empty group, so that an idle server's log shows that time has passed (rule P5)."""
        self._tick = True
        self.commit()

    @property
    def filed_from_ms(self) -> int:
        """No row is filed any more in an hour that ended before this instant (rule P5)."""
        return self.appended_at_ms if self._set_back is None else self._set_back.to_ms

    @property
    def stamped_ms(self) -> int:
        """How far the log has been stamped, with the group that is under way."""
        under_way = self._under_way
        return max(self.appended_at_ms, 0 if under_way is None else under_way.group.appended_at_ms)

    def set_back(self, to_ms: int, on_durable: Callable[[int], None], on_full: Callable[[DiskFull], None]) -> None:
        """Stamp by the clock again, at ``to_ms`` or later, though the log is ahead of that: an operator's decision
        (rule T4). ``on_durable`` is called with the time from which it was set back. On a full disk nothing is done,
        and ``on_full`` is called.

        A control record says so, in the first group with the earlier stamp. No hour that ends after ``to_ms`` may be
        sealed.
        """

        def undone(error: DiskFull) -> None:
            self._set_back = None
            on_full(error)

        from_ms = self.stamped_ms
        control = Control(encode_known([LogTime(from_ms, to_ms)]), partial(on_durable, from_ms), undone)
        self._controls.insert(0, control)
        self._set_back = _SetBack(to_ms, control)
        self.commit()

    def jump(self, on_durable: Callable[[], None], on_full: Callable[[DiskFull], None] | None = None) -> None:
        """Leave RESTORED_STEP sequences unused, once in a life: this directory was restored, or may have been, and the
        sequences that the lost files gave are not given twice (rule I5). A control record says so, for the books (rule
        S5).

        A full disk is tried again until it has space, for what is left unused costs nothing. With ``on_full`` the
        caller does not wait for that: it is called in place of ``on_durable``.
        """
        if self._jumped:
            on_durable()
            return
        control = Control(encode_known([SkippedSequences(RESTORED_STEP)]), self._has_jumped)
        if not self._jumping:
            self._jumping = True
            self._controls.insert(0, control)
            self._skip += RESTORED_STEP
        self._jumps.append(Control(control.batch, on_durable, on_full))
        self.commit()

    def has_given(self, sequence: int) -> bool:
        """Whether this server may have given a sequence. In a life that began with a `jump`, as a restored server's
        does, the files that it does not have may have given those that were left unused.
        """
        if not self._jumped:
            return sequence < self.next_sequence
        begin, count = self.skipped[-1]
        end = begin + count
        # Lives that ended before their targets had answered left sequences unused, too, and gave none.
        for first, before in reversed(self.skipped[:-1]):
            if first + before == begin:
                begin = first
        return sequence < begin or end <= sequence < self.next_sequence

    def _has_jumped(self) -> None:
        self._jumped = True
        waiting, self._jumps = self._jumps, []
        for each in waiting:
            each.on_durable()

    def close(self) -> None:
        """Refuse all batches from now on; batches that were taken are still committed."""
        self._closed = True

    def _check(self, batch: Batch, again: bool, drained: bool, own: bool) -> None:
        if self._closed:
            raise Stopping("this server is stopping; send to another one, or again when it is back")
        # Keyed messages go to the owner of their keys, whether or not it is cordoned.
        if self.cordoned and not again and not drained and ColumnId.KEY_END not in batch.offsets:
            raise ServerCordoned("an operator has cordoned this server; send to another one")
        if self.reserve.closed:
            raise DiskReserve("this server's disk is at its reserve; free space there, or send again later")
        if self.reserve.behind or self.queued_bytes > self._config.intake_queue_bytes_max:
            raise SlowDown("this server is behind with its disk; send again later")
        batch.verify()
        check_batch(batch)
        if ColumnId.KEY_END in batch.offsets and self.keyed is not None and not drained:
            self.keyed.check()
        if ColumnId.HEADERS_END in batch.offsets:
            check_headers(batch)
        if drained:
            check_drained(batch)
        elif again:
            check_again(batch)
        elif not own:
            check_own(batch)
        if self.subjects_full and len(new := self._new_rows(batch)):
            raise SlowDown(
                "this server remembers as many subjects as it can; send to those that it knows, or later",
                rows=rows_detail(new),
            )
        if ColumnId.EXPIRES_AT_MS in batch.offsets:
            check_expiry(batch, again=again or drained)
        earliest, latest = batch.range_of(ColumnId.DELIVER_AT_MS)
        self._check_instants(earliest, latest, batch.int64s(ColumnId.DELIVER_AT_MS))
        # No quota refuses what was accepted elsewhere; it counts when it is durable.
        if self.gate is not None and not drained:
            # This comes last: a batch that is admitted counts, so nothing may refuse it any more.
            self.gate.admit(batch)

    def check_move(self, wanted_at_ms: Int64s) -> None:
        """Judge the instants to which rows are to be moved, like those of a send; raises why they are refused."""
        if self.reserve.closed:
            raise DiskReserve("this server's disk is at its reserve; free space there, or ask again later")
        if self.reserve.behind:
            raise SlowDown("this server is behind with its disk; ask again later")
        self._check_instants(int(wanted_at_ms.min()), int(wanted_at_ms.max()), wanted_at_ms)

    def _check_instants(self, earliest: int, latest: int, instants: Int64s) -> None:
        now_ms = self._clock.now_ms()
        horizon = now_ms + self._config.horizon_days * DAY_MS
        if latest > horizon:
            days = self._config.horizon_days
            if not self._clock.confirmed or now_ms < self.appended_at_ms - JUMP_MS:
                # A clock that is behind makes any message look too far ahead, and its sender can't help that.
                raise ClockInDoubt(
                    f"due more than {days} days ahead by this server's clock, which is in doubt: it shows the"
                    f" hour {hour_name(hour_of_ms(now_ms))} (UTC); see `delayd clock`, or send again later",
                    rows=rows_detail(np.flatnonzero(instants > horizon)),
                )
            at_fault = instants > horizon
            raise _at_rows(PastHorizon, f"due more than {days} days ahead", at_fault)
        if earliest < INSTANT_MS_MIN:
            # The message would leave at once, though its sender may have meant a time years ahead.
            at_fault = instants < INSTANT_MS_MIN
            raise _at_rows(BadInstant, "due before 2001-09-09 (seconds, not milliseconds?)", at_fault)
        far = self.reserve.far_from_ms
        if far is not None and latest >= far:
            what = "this server's disk nears its reserve and takes near messages only; free space there"
            raise _too_far(DiskReserve, what, instants, far)
        far = self.reserve.behind_from_ms
        if far is not None and latest >= far:
            what = "this server is behind with its disk and takes near messages only; try again later"
            raise _too_far(SlowDown, what, instants, far)
        if self.reserve.full_hours:
            # The hour is computed from the instant that the group will be stamped with: after the clock was set back,
            # that is later than now (rule P5).
            filed_from_ms = max(now_ms, self.appended_at_ms)
            filed_ms = np.maximum(instants, filed_from_ms)
            full = np.isin(hours_of(filed_ms), list(self.reserve.full_hours))
            if full.any():
                raise _at_rows(HourFull, "due in an hour that holds all the messages it can", full)

    def _refuse(self, batch: Batch, error: DelaydError) -> None:
        """Refuse a batch that has begun; whoever has admitted it hears that it does not count."""
        if self.gate is not None:
            self.gate.refused(batch)
        self._producers.refuse(batch, error)

    def _close(self) -> _Commit | None:
        if self._holding:
            return None
        begin, skip = self.next_sequence, self._skip
        group = self._open_group(begin + skip)
        decided, asked = NOTHING_DECIDED, self._to_decide and self.decider is not None
        if self._to_decide and self.decider is not None:
            decided = self.decider.close(group)
            self._to_decide = self.decider.waiting
        if not (group.stored or self._controls or self._tick or decided.record):
            if self._to_decide:
                # None of the requests that this turn has decided had anything to log.
                self._holding = True
                self._executor.submit(_nothing, self._decide_on)
            return None
        most = BATCHES_MAX - 1  # A record of decisions may stand before them.
        controls, self._controls = self._controls[:most], self._controls[most:]
        self._skip, self._tick = 0, False
        self.next_sequence = group.next_sequence
        if decided.moved:
            self.next_sequence += sum([batch.count for batch in decided.moved])
        self._holding = decided.keyed or bool(decided.moved)
        if self._queue or self._controls or self._to_decide:
            self.commit()
        return _Commit(group, decided, controls, begin, skip, asked, self.next_sequence)

    def _jobs(self, group: _Commit) -> tuple[LogWrite, None]:
        return LogWrite(self._log, group.groups(self._epoch), group.group.appended_at_ms, sync=True), None

    def _decide_on(self, done: Done[None]) -> None:
        done.result()
        self._go_on()

    def _go_on(self) -> None:
        self._holding = False
        self.commit()

    def _open_group(self, sequence: int) -> OpenGroup:
        """Take what is queued, as far as it fits a group; ``sequence`` is that of the first row."""
        most, size_max = BATCHES_MAX, self._config.group_bytes_max
        if self._to_decide:
            most -= DECIDED_BATCHES_MAX
            size_max = min(size_max, COMMIT_BYTES_MAX - DECIDED_BYTES_MAX)
        stored: list[Stored] = []
        taken, size, next_sequence = 0, 0, sequence
        for batch in self._queue:
            size += batch.total_bytes
            rows = next_sequence - sequence + batch.count
            if taken == most or (taken and (size > size_max or rows > GROUP_ROWS_MAX)):
                break
            stored.append(Stored(0, next_sequence, batch))
            next_sequence += batch.count
            taken += 1
        self._queue = self._queue[taken:]
        from_ms = self.appended_at_ms if self._set_back is None else self._set_back.to_ms
        return OpenGroup(max(self._clock.stamp_ms(), from_ms), stored, next_sequence)

    def _no_space(self, group: _Commit, error: DiskFull) -> None:
        # Nobody was told these sequences. They are given again: otherwise the books would miss them (rule S5). Control
        # records for which nobody waits are tried again, unless the server stops.
        if not self.reserve.closed:
            log.warning("message_log_full reason=%r", str(error))
        self._holding = False
        self.next_sequence = group.begin
        controls = group.controls + self._controls
        self._controls = [] if self._closed else [each for each in controls if each.on_full is None]
        self._skip = 0 if self._closed else self._skip + group.skip
        self.reserve.closed = True
        refused, self._queue = [*(entry.batch for entry in group.group.stored), *self._queue], []
        for batch in refused:
            self.queued_bytes -= batch.total_bytes + BATCH_BYTES
            self._refuse(batch, DiskReserve("this server's disk is full; free space there"))
        self._to_decide = False
        told, self._jumps = self._jumps, [each for each in self._jumps if each.on_full is None]
        if self.decider is not None:
            self.decider.refused(DiskReserve("this server's disk is full; free space there"))
        for each in [*controls, *told]:
            if each.on_full is not None:
                each.on_full(error)

    def _note(self, group: _Commit, written: Written) -> None:
        appended_at_ms = group.group.appended_at_ms
        self.durable = Mark(written.end, written.crc32c)
        if self._set_back is not None and self._set_back.control in group.controls:
            self._set_back = None
        self.appended_at_ms, self.durable_sequence = appended_at_ms, group.end
        if group.skip:
            self.skipped += ((group.begin, group.skip),)
        if group.asked and self.decider is not None:
            # The next commit decides, and the next checkpoint counts, with these decisions in effect (rule C2).
            self.decider.committed()

    def _durable(self, group: _Commit, written: Written) -> None:
        # Each of these calls may begin a checkpoint, so control records take effect before the rows of the same commit.
        for control in group.controls:
            control.on_durable()
        if group.group.stored or group.decided.moved:
            self._accept(group, written.offsets[-1])
        if group.asked and self.decider is not None:
            self.decider.answer()
        if group.decided.keyed or group.decided.moved:
            self._go_on()

    def _accept(self, commit: _Commit, group_offset: int) -> None:
        (appended_at_ms, stored, sequence), (record, with_rows, moved, verdicts, _) = commit.group, commit.decided
        offset = group_offset + content_position(len(stored) + len(moved) + with_rows)
        if with_rows and record is not None:
            offset += len(record)
        placed: list[Stored] = []
        for entry in stored:
            placed.append(Stored(offset, entry.base_sequence, entry.batch))
            offset += entry.batch.total_bytes
            self.queued_bytes -= entry.batch.total_bytes + BATCH_BYTES
        self._producers.look()
        for entry in placed:
            decided = verdicts.get(entry.base_sequence, b"") if verdicts else b""
            self._producers.accept(entry.batch, entry.base_sequence, appended_at_ms, decided)
        for batch in moved:
            placed.append(Stored(offset, sequence, batch))
            offset += batch.total_bytes
            sequence += batch.count
        self._on_committed(Committed(placed, appended_at_ms, offset))


def _nothing() -> None:
    """Another turn of the loop goes on after it."""


def _too_far(kind: type[DelaydError], what: str, instants: Int64s, far_from_ms: int) -> DelaydError:
    """The error names the far rows, so that near ones need not wait for them; none when all are far. An error names so
    many rows only: a large batch would be sent in pieces, each of which is refused again.
    """
    rows = np.flatnonzero(instants >= far_from_ms)
    return kind(what) if len(rows) == len(instants) else kind(what, rows=rows_detail(rows))


def _at_rows(kind: type[DelaydError], what: str, at_fault: NDArray[np.bool_]) -> DelaydError:
    rows = np.flatnonzero(at_fault)
    sentence = f"a message is {what}" if len(rows) == 1 else f"{len(rows)} messages are {what}"
    return kind(f"{sentence}; send with another time", rows=rows_detail(rows))
