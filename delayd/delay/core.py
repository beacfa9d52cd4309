"""The delay server's core: it says in which order the server's parts do their work. It is synchronous; clock, disk,
random numbers and network are arguments.

The core runs on one loop; the executors run pure functions only. An error that the core raises ends the server: after
it nobody can trust what is in memory, and the next start recovers from the disk. A stop ends with a checkpoint:

sends refused, links closed ──▶ all is durable ──▶ a checkpoint covers all of it ──▶ done
                                (or flush)         (or it is begun)
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.labels import dead_letters
from delayd.config import DelayConfig
from delayd.delay.filing.checkpointer import AuditWord, ToKeep
from delayd.delay.filing.pending import full_hours
from delayd.delay.intake import Committed
from delayd.delay.keys.run import sent_rows
from delayd.delay.ledger.owed import joined_bytes
from delayd.delay.parts import Asked, Handoff, Logs, Memory, Repair, Surroundings, Threads, Upkeep, recover_ground
from delayd.delay.producers import AcceptedBatch, Allowance, Waiter
from delayd.delay.quotas.quotas import OnPlaces, OnSet
from delayd.delay.rows import message_rows
from delayd.delay.standing import Standing
from delayd.delay.state_values import encode_dropped
from delayd.delay.timers.loading import LoadedHour
from delayd.errors import DelaydError, DiskFull, DiskReserve
from delayd.hours import hour_of_ms, hour_start_ms
from delayd.log.control import QuotaLimits
from delayd.log.log import write_again
from delayd.machine.clock import JUMP_MS
from delayd.machine.disk import Disk
from delayd.machine.executor import Done
from delayd.machine.state import State

__all__ = ["DelayCore", "Surroundings", "Threads"]  # The core, and what it is made with.

log = logging.getLogger(__name__)

TICK_MS = 1_000  # How often an idle server looks at free space, hours that ended, hours to load and its clock.


class DelayCore:
    """One delay server over one directory; `delayd.delay.parts` has its rooms, each with its parts."""

    def __init__(self, disk: Disk, state: State, config: DelayConfig, threads: Threads, around: Surroundings) -> None:
        ground = recover_ground(disk, state, config, threads, around)
        self.site, self.config, self.fence, found = ground.site, config, ground.fence, ground.found
        self.logs = Logs(ground, self._index)
        self.memory = Memory(ground, self.logs)
        self.handoff = Handoff(ground, self.logs, self.memory)
        self.upkeep = Upkeep(ground, self.logs, self.memory, self.handoff, self._loaded)
        self.asked = Asked(ground, self.logs, self.memory, self.handoff, self.upkeep)
        self.repair = Repair(ground, self.logs, self.memory, self.handoff, self.upkeep)
        self.standing = Standing(self.site, self.logs, self.memory, self.handoff, self.upkeep, self.asked)
        self._stopping = StopSteps(self.logs, self.upkeep, threads, self._begin_checkpoint)
        self._clock = around.clock
        self._log, self._dropped, self._quarantined_ends = found.log, found.kept.dropped, found.quarantined_ends
        self._ticks = self.site.alarms.every(TICK_MS, self._tick)
        self._ticks.soon()
        self._in_doubt = not self._clock.confirmed
        self._read_space()
        if len(found.owed):
            self.memory.ledger.owed.take(found.owed)
        for hour, rows in found.in_doubt.items():
            self.upkeep.mending.doubt(hour, rows, found.kept.given_up[hour], lacks_rows=hour in found.unloaded)
        if found.replaced:
            # Readers go by the checkpoint file, and would call the new files short until the next one is published.
            self.upkeep.checkpointer.when_covers(self.logs.intake.durable.offset, _nobody_waits)
        log.info(
            "recovered log_id=%016x epoch=%d pending=%d not_filed=%d loaded=%d hours=%d",
            *(self.site.log_id, self.site.epoch, self.standing.pending),
            *(len(found.replayed.pending), len(found.wheel), len(found.kept.hours)),
        )

    def ask_targets_first(self) -> None:
        """Serve nobody until each target has answered: this directory was moved, restored or copied (rule H8).

        It may be older than what it served last, so the sequences that it may have given since are left out (rule I5).
        """
        for link in self.handoff.dispatcher.links.values():
            link.ask_first()
        # Nobody waits for that: requests are refused until meta has taken this directory, and the next commit is behind
        # the jump in any case.
        self.logs.intake.jump(_nobody_waits)

    # Requests.

    def send(self, batch: Batch, waiter: Waiter, allowance: Allowance | None = None) -> None:
        """Take a PRODUCER batch; ``waiter`` is called with its outcome, once that is durable."""
        if self.fence.is_up:
            # A batch that is known gets the same answer: this server may be a copy, and then only the right server may
            # give receipts.
            waiter(self.fence.error(), False)
            return
        self.logs.intake.send(batch, waiter, allowance)

    def send_again(self, batch: Batch, waiter: Waiter, allowance: Allowance) -> None:
        """As `send`, for a realtime server's messages that come again to their group (rule Q2)."""
        if self.fence.is_up:
            waiter(self.fence.error(), False)
            return
        self.logs.intake.send(batch, waiter, allowance, again=True)

    def send_drained(self, batch: Batch, waiter: Waiter) -> None:
        """As `send`, for messages that another delay server held (docs/drain.md)."""
        if self.fence.is_up:
            waiter(self.fence.error(), False)
            return
        self.logs.intake.send(batch, waiter, drained=True)

    def cordon(self, cordoned: bool) -> None:
        """Hear from meta whether an operator has cordoned this server."""
        if cordoned != self.logs.intake.cordoned:
            log.warning("cordoned cordoned=%s", cordoned)
        self.logs.intake.cordoned = cordoned

    def outcome(self, producer_id: int, number: int) -> AcceptedBatch | None:
        """Return what became of a batch; None when nothing durable is known of it now.

        Raises ServerFenced: this server does not know which batches the right server has.
        """
        self.fence.check()
        return self.logs.producers.find(producer_id, number)

    def ask_outcome(self, producer_id: int, number: int, answer: Callable[[AcceptedBatch | None], None]) -> None:
        """Call back with what became of a batch, once that can't change any more (rules I3, I6).

        Raises ServerFenced: this server does not know which batches the right server has.
        """
        self.fence.check()
        self.logs.producers.ask(producer_id, number, answer)

    def set_quota(self, subject: bytes, limits: QuotaLimits, done: OnSet) -> None:
        """Give a subject a quota; ``done`` is called when it is durable and in force, or with the error.

        Raises ServerFenced, BadArgument, SlowDown, Stopping: nothing is done.
        """
        self.fence.check()
        self.asked.quotas.set(subject, limits, done)

    def places(self, subject: bytes, due_ms: Int64s, spread_ms: int, answer: OnPlaces) -> None:
        """Call back with the least loaded instants in the windows of messages; raises as `set_quota`."""
        self.fence.check()
        self.asked.quotas.places(subject, due_ms, spread_ms, answer)

    def checkpoint(self, done: Callable[[int], None]) -> None:
        """Call back with the replay offset when a checkpoint covers everything that is durable now."""
        self.upkeep.checkpointer.when_covers(
            self.logs.intake.durable.offset, lambda: done(self.upkeep.checkpointer.replay.offset)
        )
        self.wake()

    def follow_clock(self, done: Callable[[DelaydError | None], None]) -> None:
        """Follow the clock that an operator has just confirmed; call back when that is done, or with why it can't be.

        A clock that was wrong may have stamped the log further ahead. Then the log's time goes back to the clock, or to
        the end of the last sealed hour if that is later, so that hours close in time again (rule T4).
        """
        if self.logs.intake.stamped_ms - self._clock.now_ms() <= JUMP_MS:
            done(None)
            return

        def found(hour: int | None) -> None:
            from_ms = self.logs.intake.stamped_ms
            to_ms = from_ms if hour is None else max(self._clock.now_ms(), hour_start_ms(hour + 1))
            if to_ms >= from_ms:
                log.warning("log_time_kept appended_at_ms=%d sealed_until=%s", from_ms, hour)
                done(None)
                return
            log.warning("operator action=set_log_time_back from_ms=%d to_ms=%d", from_ms, to_ms)
            self.logs.intake.set_back(to_ms, set_back, has_no_space)

        def set_back(from_ms: int) -> None:
            self.upkeep.checkpointer.reach(from_ms)
            self.upkeep.loading.reopen()
            done(None)

        def has_no_space(error: DiskFull) -> None:
            done(DiskReserve(f"the clock is trusted, but the log's time can't be set back: {error.message}"))

        self.upkeep.retention.last_sealed(found)

    # Time.

    def wake(self) -> None:
        """Do whatever is due."""
        if self._in_doubt and self._clock.confirmed:
            # Messages that fell due while the clock was in doubt may be in hours that are not loaded yet.
            self._in_doubt = False
            self._ticks.soon()
        self.site.alarms.ring()
        self.handoff.dispatcher.step()
        self._begin_checkpoint()

    def stood_still(self, ms: int) -> None:
        """No file could change for so long."""
        self.site.alarms.stood_still(ms)

    def next_due_ms(self) -> int | None:
        """Instant by the judged clock at which a message is due next."""
        return self.handoff.dispatcher.next_due_ms()

    def next_stop_ms(self) -> int | None:
        """The same, or the start of the first hour with messages that is not loaded, if that comes first."""
        due_ms, hour = self.next_due_ms(), self.upkeep.loading.next_hour
        if hour is None:
            return due_ms
        return hour_start_ms(hour) if due_ms is None else min(due_ms, hour_start_ms(hour))

    def next_wake_ms(self) -> int:
        """Latest instant, monotonic, at which to call `wake` though nothing is due."""
        wake_ms = self.site.alarms.next_ms()
        assert wake_ms is not None, "the ticks never end"
        return wake_ms

    def stop(self, done: Callable[[], None]) -> None:
        """Refuse sends, make everything durable, write a last checkpoint, and call back."""
        for link in self.handoff.dispatcher.links.values():
            link.close()
        self.asked.quotas.stop()
        self._stopping.begin(done)

    def close(self) -> None:
        """Write removed files again and close all, after the executors have ended."""
        write_again(self._log.segments)
        self.logs.outcomes.write_again()
        self.upkeep.retention.write_again()
        self.logs.sources.close()
        self.upkeep.retention.close()
        self.upkeep.checkpointer.close()
        self.logs.keys.close()
        self._log.close()

    # Housekeeping, asked for by the shell (rule T3).

    def sweep(self) -> None:
        """Seal closed hours and delete hours past their retention, if the clock is confirmed (rule T1)."""
        if self._clock.confirmed:
            closed_before_ms = min(self.upkeep.checkpointer.appended_at_ms, self.logs.intake.filed_from_ms)
            self.upkeep.retention.sweep(closed_before_ms, self._clock.now_ms())
        full = full_hours(self.memory.hours.filed, self.memory.hours.pending, self.config.hour_rows_max)
        self.logs.intake.reserve.note_full(full)
        self.logs.segments.release(
            self.memory.hours.wheel.lowest_message_log_offset(),
            self.handoff.dispatcher.lowest_message_log_offset(),
            self.memory.held.lowest_message_log_offset(),
            self.asked.quotas.lowest_message_log_offset(),
            decided_from_ms=self.memory.ledger.owed.earliest_ms(),
        )

    # Calls between the parts.

    def _index(self, committed: Committed) -> None:
        """Index a durable group: rows of loaded hours enter the wheel at once, all of them the pending columns."""
        rows = message_rows(committed.stored, self.memory.hours.subjects, committed.appended_at_ms)
        self.logs.sources.remember(committed.stored)
        has_letters = False
        for entry in committed.stored:
            batch = entry.batch
            # Rows that a client sent took their keys when their commit became durable. Moved rows name a first one, and
            # so do those of another delay server.
            if ColumnId.KEY_END in batch.offsets and ColumnId.ORIGIN_SEQUENCE in batch.offsets:
                self.asked.endings.taken_names.add(sent_rows(entry, committed.appended_at_ms))
            # Each message of a schedule comes in such a batch: with a carrier, moved, drained, or to its group again.
            if ColumnId.ORIGIN_SEQUENCE in batch.offsets and ColumnId.HEADERS_END in batch.offsets:
                self.asked.endings.overlaps.note(entry, committed.appended_at_ms)
            if ColumnId.TAG_BLOOM in batch.offsets and len(dead_letters(batch)):
                has_letters = True
        if has_letters:
            self.asked.quotas.count_dead_letters()
        if has_letters or self.logs.intake.gate is not None:
            self.asked.quotas.took(committed.stored, committed.appended_at_ms)
        self.upkeep.loading.take(rows)
        self._note_reserve()
        self.handoff.dispatcher.came()
        self._begin_checkpoint()

    # Ticks and checkpoints.

    def _note_reserve(self) -> None:
        intake = self.logs.intake
        lag_bytes = intake.durable.offset - self.upkeep.checkpointer.replay.offset
        intake.reserve.take_lag(lag_bytes, self.config.replay_lag_bytes_max)
        intake.subjects_full = self.memory.hours.subjects.is_full

    def _read_space(self) -> None:
        """Read how much space is free (rule L8)."""
        reserve, free_bytes = self.logs.intake.reserve, self.site.disk.free_bytes(self.site.folder)
        reserve.take(free_bytes, self.config, hour_start_ms(self.memory.hours.loaded_until + 1))
        if not reserve.closed:
            self.logs.intake.commit()

    def _tick(self) -> None:
        self._read_space()
        self._step_hours()

    def _step_hours(self) -> None:
        now_ms = self._clock.now_ms()
        this_hour = hour_of_ms(now_ms)
        last_hour = hour_of_ms(self.logs.intake.appended_at_ms)
        if last_hour < this_hour and self.logs.intake.idle and self._clock.confirmed:
            self.logs.intake.tick()
        self.upkeep.loading.drop_empty(last_hour)
        self._forget_ended()
        if not self._stopping.begun:
            # After the clock was set back, rows are filed in hours that the clock has not reached again, and they are
            # due before (P5).
            filing_ms = max(self._clock.stamp_ms(), self.logs.intake.appended_at_ms)
            passed = hour_of_ms(min(self.logs.intake.appended_at_ms, self.logs.intake.filed_from_ms))
            reach = hour_of_ms(self.upkeep.checkpointer.reach_ms)
            self.upkeep.loading.step(filing_ms, reach, passed, self.memory.ledger.ending_hours)

    def _forget_ended(self) -> None:
        """Forget which rows have ended, of hours of which nothing is delivered any more."""
        links = self.handoff.dispatcher.links.values()
        self.memory.ledger.forget(answers_may_come=not all(link.sender.window.earlier_settled for link in links))

    def _loaded(self, hours: Sequence[LoadedHour]) -> None:
        """Go on after hours were loaded, or those of their rows that can be read."""
        for loaded in hours:
            if loaded.damage is not None:
                self.upkeep.mending.schedule_damaged(loaded.hour, loaded.damage, loaded.unread)
        self._attached()

    def _attached(self) -> None:
        """Go on after an hour was loaded: another hour may be due to load, and the rows of this one may be due."""
        self._step_hours()
        self.handoff.dispatcher.step()
        self._stopping.step()

    def _begin_checkpoint(self) -> None:
        if self.upkeep.loading.running or not self.upkeep.checkpointer.is_due(self.logs.intake.durable.offset):
            return
        notes, forgotten = self.handoff.dispatcher.take_changes()
        intake, outcomes = self.logs.intake, self.logs.outcomes
        keep = ToKeep(
            stop=intake.durable,
            next_sequence=intake.durable_sequence,
            appended_at_ms=intake.appended_at_ms,
            notes=notes,
            forgotten=forgotten,
            ends={**self._quarantined_ends, **outcomes.ends},
            moved=outcomes.take_moved(),
            handed_over=outcomes.take_handed_over(),
            owed_rows=partial(joined_bytes, self.memory.ledger.owed.parts()),
            books=self._books(),
        )
        self.upkeep.checkpointer.begin(keep, partial(self._checkpointed, keep))

    def _books(self) -> AuditWord:
        settled = self.standing.settled()
        return AuditWord(
            self.logs.intake.skipped, encode_dropped(self._dropped), self.logs.segments.keep_from, *settled
        )

    def _checkpointed(self, keep: ToKeep, published: bool) -> None:
        if not published:
            self._stopping.end()
            return
        self.logs.outcomes.filed(keep.next_sequence)
        self.logs.segments.published(self.upkeep.checkpointer.replay.offset, keep.books.keep_from)
        # Rows of later hours have just been filed and left memory, so their subjects may no longer be used.
        self._sweep_subjects()
        self._note_reserve()
        self._stopping.step()

    def _sweep_subjects(self) -> None:
        """Give back the names of subjects that no row in memory uses (rule B1)."""
        subjects = self.memory.hours.subjects
        # A load that is under way already holds numbers of its subjects, but its rows are in none of these places yet.
        if subjects.wants_sweep(len(self.handoff.dispatcher.targets)) and not self.upkeep.loading.running:
            pending = self.memory.hours.pending
            rows = chain(self.memory.hours.wheel.parts(), pending.views(0), self.memory.ledger.outside())
            gone = subjects.sweep(rows)
            self.handoff.dispatcher.forget_targets()
            log.info("subjects_forgotten subjects=%d kept=%d", gone, subjects.known)


def _nobody_waits() -> None:
    """Called when a jump is durable, or a checkpoint is published, after which this core has nothing to do."""


class StopSteps:
    """A stop, from the request to stop to its end; for the loop alone. Before `begin` it does nothing."""

    def __init__(
        self,
        logs: Logs,
        upkeep: Upkeep,
        threads: Threads,
        begin_checkpoint: Callable[[], None],
    ) -> None:
        self._intake = logs.intake
        self._outcomes = logs.outcomes
        self._upkeep = upkeep
        self._checkpointer = upkeep.checkpointer
        self._threads = threads
        self._begin_checkpoint = begin_checkpoint
        self._stopped: Callable[[], None] | None = None

    @property
    def begun(self) -> bool:
        """Whether a stop is under way."""
        return self._stopped is not None

    def begin(self, stopped: Callable[[], None]) -> None:
        """Make everything durable, write a last checkpoint, and call back."""
        self._intake.close()
        self._outcomes.commit()
        self._stopped = stopped
        self.step()

    def step(self) -> None:
        """Go on with a stop: once everything is durable, write a last checkpoint; once that covers everything, end."""
        if self._stopped is None or self._upkeep.loading.running or self._checkpointer.running:
            return
        if not (self._intake.idle and self._outcomes.idle):
            self._outcomes.commit()
            self._outcomes.when_durable(self._step_soon)
            return
        if self._checkpointer.replay.offset < self._intake.durable.offset:
            self._upkeep.when_filed(self.step)
            self._begin_checkpoint()
            return
        self.end()

    def end(self) -> None:
        """End the stop: the last checkpoint is written, or can't be."""
        if self._stopped is not None:
            stopped, self._stopped = self._stopped, None
            stopped()

    def _step_soon(self) -> None:
        # The intake has no callback for this; a job on the thread reports back after all that came before it.
        thread = self._threads.worker if self._intake.looks_up else self._threads.commit
        thread.submit(_do_nothing, self._step_after)

    def _step_after(self, done: Done[None]) -> None:
        self.step()


def _do_nothing() -> None:
    """A job that only marks a place in the order of its thread."""
