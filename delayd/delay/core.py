"""The delay server's core: it creates the server's parts and connects them. It is synchronous; clock, disk, random
numbers and network are arguments.

The core runs on one loop; the executors run pure functions only. An error that the core raises ends the server: after
it nobody can trust what is in memory, and the next start recovers from the disk.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from delayd.batch import Batch
from delayd.clock import JUMP_MS, Clock
from delayd.config import DelayConfig
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.books.retention import Retention, SegmentRetention
from delayd.delay.damage.file_watch import FileWatch
from delayd.delay.damage.held import HeldRows
from delayd.delay.damage.mending import SEQUENCE_MAX, Mending, Unloaded
from delayd.delay.damage.seal_mending import SealMending
from delayd.delay.filing.checkpoint import Books, Checkpointer, Evidence
from delayd.delay.filing.pending import full_hours
from delayd.delay.filing.sources import Sources
from delayd.delay.handoff.dispatcher import AskRoutes, Dispatcher
from delayd.delay.handoff.link import Dial, Link, Phase
from delayd.delay.handoff.moves import RouteMoves
from delayd.delay.handoff.refusers import Refusers
from delayd.delay.handoff.sender import Sender, ServerLife
from delayd.delay.handoff.target_ends import KeepingEnds, TargetEnds
from delayd.delay.handoff.target_words import AcceptedTarget, TargetWords, accepted_targets
from delayd.delay.handoff.targets import Targets
from delayd.delay.intake import Committed, Intake, Mark
from delayd.delay.producers import AcceptedBatch, Allowance, Waiter
from delayd.delay.quarantine import DROP, RELEASE, Decided, Entry, Kind, Quarantine
from delayd.delay.recovery import BeginLoad, ends_of_all, note_ends, open_seals, recover
from delayd.delay.rows import NO_SEQUENCES, Rows, hour_span
from delayd.delay.settled import settled
from delayd.delay.state_values import TARGET_PREFIX, encode_dropped
from delayd.delay.table import message_rows
from delayd.delay.timers.earlier import EarlierOutcomes
from delayd.delay.timers.loader import LoadedHour
from delayd.delay.timers.loading import Loading
from delayd.disk import Disk
from delayd.errors import BadArgument, DiskFull
from delayd.executor import Done, Executor, Later
from delayd.fence import Fence
from delayd.hours import HOUR_MS, hour_name, hour_of_ms, hour_start_ms
from delayd.identity import open_identity
from delayd.log.control import OperatorWord, encode_known
from delayd.log.dispatch import OutcomeRows
from delayd.log.watch import LOOK_MS, LogWatch, write_again
from delayd.state import State
from delayd.wire.waits import FREE_SPACE, Wait, clock_waits

log = logging.getLogger(__name__)

TICK_MS = 1_000  # How often an idle server looks at hours that ended, hours to load and its clock.
STOP_MS = 2_500  # The last checkpoint may take this long; a stop as a whole has 5 s.


@dataclass(frozen=True, slots=True)
class Threads:
    """The three executors, each of which keeps the order of its own jobs, and how a start loads hours."""

    commit: Executor  # The message log.
    outcomes: Executor  # The dispatch logs.
    worker: Executor  # Checkpoints, loads, seals.
    # How a start loads hours, before any job of the others is submitted.
    begin_load: BeginLoad = field(default=Later, kw_only=True)


class DelayCore:
    """One delay server over one directory."""

    def __init__(
        self,
        disk: Disk,
        state: State,
        clock: Clock,
        config: DelayConfig,
        threads: Threads,
        dial: Dial,
        ask_routes: AskRoutes,
        random_id: Callable[[], int],
        evidence: Evidence,
        rest: Callable[[], None],
    ) -> None:
        self.identity = open_identity(state, f"{config.folder}/state.lmdb", random_id, disk)
        self.fence = Fence("delay", self.identity.log_id)
        self._origin = ServerLife(self.identity.log_id, self.identity.epoch, random_id())
        found = recover(disk, state, clock, config, self.identity, threads.begin_load)
        for damage in found.damage:
            log.critical("found_damaged reason=%r", str(damage))
        words = TargetWords(state)
        found.targets = words.without_freed(found.targets)
        found.targets_owed &= found.targets.keys()
        self._disk = disk
        self._state = state
        self._clock = clock
        self._config = config
        self._threads = threads
        self._dial = dial
        self._log = found.log
        self._hours = found.hours
        self._subjects = found.subjects
        self._pending = found.pending
        self._wheel = found.wheel
        self._ends = TargetEnds(
            state,
            found.target_ends,
            lambda: ends_of_all(disk, config.folder, self.identity.log_id, accepted_targets(state)),
            accepted_targets(state),
            found.quarantined,
            found.given_up,
        )
        keeping = KeepingEnds(state, self._ends)
        self._loaded_from = hour_of_ms(max(clock.stamp_ms(), found.appended_at_ms))
        if hour_of_ms(found.reach_ms) > self._loaded_from:
            self._loaded_from = found.loaded_until + 1
        self._stopped: Callable[[], None] | None = None
        self._tick_due_ms = clock.monotonic_ms()
        self._in_doubt = not clock.confirmed
        self.producers = found.producers
        durable = Mark(found.log.durable, found.log.crc32c)
        self.intake = Intake(
            found.log,
            threads.commit,
            clock,
            config,
            found.producers,
            self.identity.epoch,
            durable,
            found.next_sequence,
            found.appended_at_ms,
            self._index,
            found.subjects.knows,
            found.skipped,
        )
        self._outcomes = OutcomeLog(
            disk,
            config.folder,
            self.identity.log_id,
            self.identity.epoch,
            threads.outcomes,
            clock,
            config.outcomes_flush_ms,
            found.dispatch_logs,
            found.outcome_ends,
            found.quarantined,
            lambda hour, error: self._mending.dispatch_damaged(hour, error),
        )
        self._sources = Sources(disk, config.folder, found.log, config.tail_bytes, config.source_cache_bytes)
        self.quarantine = Quarantine(clock)
        self._held = HeldRows(clock, self._sources, self._outcomes, self.quarantine, self._put_back)
        self._quarantined_ends = found.quarantined_ends
        earlier = (found.decided, found.quarantined, found.hours, found.pending)
        self._earlier = EarlierOutcomes(*earlier, lambda sequences: self.dispatcher.settle(sequences))
        self._refusers = Refusers(state, threads.worker)
        self.dispatcher = Dispatcher(
            found.wheel,
            found.subjects,
            clock,
            self._new_link,
            self.intake.control,
            ask_routes,
            found.targets,
            found.targets_owed,
            words.lost,
            words.is_freed,
        )
        self.moves = RouteMoves(state, self.dispatcher, threads.worker)
        self.targets = Targets(
            state=state,
            words=words,
            dispatcher=self.dispatcher,
            outcomes=self._outcomes,
            ends=self._ends,
            quarantine=self.quarantine,
            refusers=self._refusers,
            intake=self.intake,
            clock=clock,
            worker=threads.worker,
            epoch=self.identity.epoch,
        )
        self._checkpointer = Checkpointer(
            disk,
            keeping,
            clock,
            config,
            threads.worker,
            self.identity,
            found.log,
            found.hours,
            found.pending,
            found.producers,
            found.replay,
            evidence,
            rest,
            found.beside,
            lambda: self._mending.damaged_hours(),
            lambda hour, error: self._mending.schedule_damaged(hour, error),
            found.filed_below,
            lambda: self._retention.seal_end(),
        )
        # Hours whose dispatch log is damaged. Any of their rows may have been handed over, so none leaves until that is
        # known.
        self._withheld = set(found.quarantined)
        self._loading = Loading(
            disk=disk,
            folder=config.folder,
            log_id=self.identity.log_id,
            executor=threads.worker,
            hours=found.hours,
            pending=found.pending,
            wheel=found.wheel,
            subjects=found.subjects,
            earlier=self._earlier,
            until=found.loaded_until,
            replay_offset=lambda: self._checkpointer.replay.offset,
            attached=self._attached,
            beside=found.beside,
            withheld=self._withheld,
            damaged=self._loaded_in_part,
        )
        self._mending = Mending(
            disk=disk,
            state=keeping,
            folder=config.folder,
            log_id=self.identity.log_id,
            epoch=self.identity.epoch,
            clock=clock,
            worker=threads.worker,
            hours=found.hours,
            beside=found.beside,
            outcomes=self._outcomes,
            sources=self._sources,
            wheel=found.wheel,
            subjects=found.subjects,
            pending=found.pending,
            earlier=self._earlier,
            quarantine=self.quarantine,
            damaged=found.quarantined,
            withheld=self._withheld,
            known_ends=found.quarantined_ends,
            in_memory=lambda: [*self._wheel.parts(), *self.dispatcher.parts(), *self._held.parts()],
            next_sequence=lambda: self.intake.next_sequence,
            loaded_until=lambda: self._loaded_until,
            may_begin=lambda: not (self._loading.running or self._checkpointer.running or self._stopped is not None),
            ended=self._attached,
            restored=lambda hour, outcomes: self._outcomes_restored(accepted_targets(state), hour, outcomes),
            dropped=found.dropped,
            given_up=found.given_up,
        )
        for hour, error in found.quarantined.items():
            unloaded = Unloaded(SEQUENCE_MAX, NO_SEQUENCES, found.next_sequence)
            self._mending.dispatch_damaged(hour, error, unloaded)
        for hour, (error, sequences) in found.unloaded.items():
            self._mending.schedule_damaged(hour, error, Unloaded(found.filed_below, sequences))
        for producer_id, error in found.producers_lost.items():
            self.quarantine.put(Kind.PRODUCER, f"{producer_id:016x}", error)
        for subject, error in found.targets_lost.items():
            self.dispatcher.withheld.add(subject)
            self.quarantine.put(Kind.TARGET, subject.decode("ascii"), error, subject=subject.decode("ascii"))
        self._checkpointer.reach_ms = found.reach_ms
        self._segments = SegmentRetention(found.log, threads.commit, threads.worker, clock)
        self._log_watch = LogWatch(
            message_log=found.log,
            append=threads.commit.submit,
            worker=threads.worker,
            clock=clock,
            put=lambda name, damage: self.quarantine.put(Kind.LOG, name, damage),
            lift=lambda name: self.quarantine.lift(Kind.LOG, name),
            rolled=lambda: self.checkpoint(lambda offset: None),
        )
        self._file_watch = FileWatch(
            disk=disk,
            folder=config.folder,
            log_id=self.identity.log_id,
            clock=clock,
            worker=threads.worker,
            hours=found.hours,
            ends=self._outcomes.ends,
            earlier_ends=found.sealed_ends,
            quarantine=self.quarantine,
            damaged=lambda hour, error: self._mending.schedule_damaged(hour, error),
        )
        self._look_due_ms = clock.monotonic_ms() + LOOK_MS
        self._retention = Retention(
            disk,
            keeping,
            config.folder,
            self.identity.log_id,
            threads.worker,
            found.hours,
            self._outcomes,
            self._sources,
            found.wheel,
            found.seals,
            config.retention_hours,
            self.quarantine,
            lambda hour, error: self._mending.file_damaged(hour, error),
            lambda error: self._seal_mending.damaged(error),
        )
        seals = (disk, state, config.folder, self.identity, clock.now_ms(), found.hours)
        open_anew = partial(open_seals, *seals, whole=found.flags_unknown)
        self._seal_mending = SealMending(open_anew, self._retention, self.quarantine, threads.worker, clock)
        if found.seals_damage is not None:
            self._seal_mending.damaged(found.seals_damage)
        log.info(
            "recovered log_id=%016x epoch=%d pending=%d loaded=%d hours=%d",
            *(self.identity.log_id, self.identity.epoch, len(found.pending), len(found.wheel), len(found.hours)),
        )

    def ask_targets_first(self) -> None:
        """Serve nobody until each target has answered: this directory was moved, restored or copied (rule H8)."""
        for link in self.dispatcher.links.values():
            link.ask_first()

    # Requests.

    def send(self, batch: Batch, waiter: Waiter, allowance: Allowance | None = None) -> None:
        """Take a PRODUCER batch; ``waiter`` is called with its outcome, once that is durable."""
        if self.fence.is_up:
            # A batch that is known gets the same answer: this server may be a copy, and then only the right server may
            # give receipts.
            waiter(self.fence.error(), False)
            return
        self.intake.send(batch, waiter, allowance)

    def outcome(self, producer_id: int, number: int) -> AcceptedBatch | None:
        """Return what became of a batch; None when nothing durable is known of it now.

        Raises ServerFenced: this server does not know which batches the right server has.
        """
        self.fence.check()
        return self.producers.find(producer_id, number)

    def ask_outcome(self, producer_id: int, number: int, answer: Callable[[AcceptedBatch | None], None]) -> None:
        """Call back with what became of a batch, once that can't change any more (rules I3, I6).

        Raises ServerFenced: this server does not know which batches the right server has.
        """
        self.fence.check()
        self.producers.ask(producer_id, number, answer)

    def checkpoint(self, done: Callable[[int], None]) -> None:
        """Call back with the replay offset when a checkpoint covers everything that is durable now."""
        self._checkpointer.when_covers(self.intake.durable.offset, lambda: done(self._checkpointer.replay.offset))
        self.wake()

    def release(self, id_: str, done: Decided) -> None:
        """Try a quarantined thing again because an operator said so; BadArgument when no entry has this id."""
        entry = self._entry(id_)
        self._decide("release", entry, done)

    def drop(self, id_: str, done: Decided) -> None:
        """Give a quarantined thing up because an operator said so; BadArgument when this kind can't be given up."""
        entry = self._entry(id_)
        if entry.kind not in DROP:
            raise BadArgument(f"{id_} can't be dropped; release it instead: {RELEASE[entry.kind]}")
        self._decide("drop", entry, done)

    def counters(self) -> dict[str, int]:
        """Figures for STATUS."""
        links = self.dispatcher.links.values()
        return {
            "next_sequence": self.intake.next_sequence,
            "message_log_end": self.intake.durable.offset,
            "replay_offset": self._checkpointer.replay.offset,
            "pending_rows": len(self._pending),
            "loaded_rows": len(self._wheel),
            "scheduled_rows": int(self._hours.rows["rows"].sum()),
            "waiting_rows": sum(len(link.sender.waiting) for link in links) + self.dispatcher.unrouted_rows,
            "undecided_batches": sum(len(link.sender.window) for link in links),
            "targets": len(links),
            "targets_away": sum(link.phase is not Phase.READY for link in links),
            "quarantined_rows": len(self._held),
            "quarantined_hours": self.quarantine.hours(),
            "quarantined": len(self.quarantine),
            "dead_rows": sum(link.sender.dead_rows for link in links),
            "subjects": self._subjects.known,
            "subjects_bytes": self._subjects.held_bytes,
            "producers": len(self.producers),
            "producers_bytes": self.producers.held_bytes,
        }

    def waits(self) -> Iterator[Wait]:
        """List the states that only an operator can end."""
        yield from map(Wait._make, [*self.fence.waits(), *self._state.waits()])
        reserve = self.intake.reserve
        if reserve.closed:
            yield Wait("all sends", "free disk space is at its reserve", FREE_SPACE)
        elif reserve.far_from_ms is not None:
            later = hour_name(hour_of_ms(reserve.far_from_ms))
            yield Wait(f"sends of messages due from {later} on", "free disk space nears its reserve", FREE_SPACE)
        if not self._clock.confirmed:
            yield clock_waits("delay")
        elif self.intake.filed_from_ms - self._clock.now_ms() > HOUR_MS:
            until = hour_name(hour_of_ms(self.intake.filed_from_ms))
            why = (
                f"a clock that was ahead has stamped the message log until {until}; messages leave on time all the same"
            )
            yield Wait("sealing of hours, and what frees their space", why, "delayd clock --role delay --trust")
        if self.dispatcher.unrouted_rows:
            rows = f"{self.dispatcher.unrouted_rows:,} due messages"
            # Either no realtime server serves their subjects, or their subjects are routed to one that an operator gave
            # up.
            why = "their subjects have no realtime server, or one that was given up for good"
            yield Wait(rows, why, "delayd servers, and start one; or delayd subjects, then delayd route move")
        for link in self.dispatcher.links.values():
            yield from link.waits()
        yield from self.quarantine.waits()

    def refuses(self) -> Iterator[Wait]:
        """List what this server refuses for now; each of these states ends by itself."""
        reserve = self.intake.reserve
        if reserve.behind:
            yield Wait("all sends", "checkpoints are further behind the message log than a restart may replay")
        elif self.intake.is_full:
            yield Wait("all sends", "more waits for the message log's fsync than intake_queue_bytes_max")
        if self.intake.subjects_full:
            yield Wait("sends to subjects that are new here", "as many subjects are remembered as memory allows")
        if self.producers.is_full:
            yield Wait("sends of new producers", "as many producers are remembered as memory allows")
        for hour in sorted(reserve.full_hours):
            yield Wait(f"sends of messages due in hour {hour_name(hour)}", "it holds as many as hour_rows_max allows")

    def follow_clock(self, done: Callable[[], None]) -> None:
        """Follow the clock that an operator has just confirmed; call back when that is done.

        A clock that was wrong may have stamped the log further ahead. Then the log's time goes back to the clock, or to
        the end of the last sealed hour if that is later, so that hours close in time again (rule T4).
        """
        if self.intake.filed_from_ms - self._clock.now_ms() <= JUMP_MS:
            done()
            return

        def found(hour: int | None) -> None:
            from_ms = self.intake.filed_from_ms
            to_ms = from_ms if hour is None else max(self._clock.now_ms(), hour_start_ms(hour + 1))
            if to_ms >= from_ms:
                log.warning("log_time_kept appended_at_ms=%d sealed_until=%s", from_ms, hour)
                done()
                return
            log.warning("operator action=set_log_time_back from_ms=%d to_ms=%d", from_ms, to_ms)
            self.intake.set_back(to_ms, partial(set_back, from_ms))

        def set_back(from_ms: int) -> None:
            self._checkpointer.reach_ms = max(self._checkpointer.reach_ms, from_ms)
            # The hours between the two times that had no rows have left the wheel.
            self._loaded_from = self._loaded_until + 1
            done()

        self._retention.last_sealed(found)

    # Time.

    def wake(self) -> None:
        """Do whatever is due."""
        now = self._clock.monotonic_ms()
        if self._in_doubt and self._clock.confirmed:
            # Messages that fell due while the clock was in doubt may be in hours that are not loaded yet.
            self._in_doubt, self._tick_due_ms = False, now
        if now >= self._tick_due_ms:
            self._tick_due_ms = now + TICK_MS
            self._tick()
        self.dispatcher.step()
        self.targets.wake()
        self._outcomes.wake()
        if self._checkpointer.collecting is not None:
            self._checkpointer.step()
        self._begin_checkpoint()

    def next_due_ms(self) -> int | None:
        """Instant by the judged clock at which a message is due next."""
        return self.dispatcher.next_due_ms()

    def next_wake_ms(self) -> int:
        """Latest instant, monotonic, at which to call `wake` though nothing is due."""
        wake_ms = self._tick_due_ms
        dispatcher_ms, outcomes_ms = self.dispatcher.next_wake_ms(), self._outcomes.next_wake_ms()
        if dispatcher_ms is not None and dispatcher_ms < wake_ms:
            wake_ms = dispatcher_ms
        if outcomes_ms is not None and outcomes_ms < wake_ms:
            wake_ms = outcomes_ms
        # No checkpoint begins while an hour is loaded, even if one is due.
        held_up = self._loading.running or self._mending.running is not None
        if not held_up or self._checkpointer.collecting is not None:
            checkpoint_ms = self._checkpointer.next_wake_ms()
            if checkpoint_ms is not None and checkpoint_ms < wake_ms:
                wake_ms = checkpoint_ms
        return wake_ms

    def stop(self, done: Callable[[], None]) -> None:
        """Refuse sends, make everything durable, write a last checkpoint, and call back."""
        self.intake.close()
        for link in self.dispatcher.links.values():
            link.close()
        self._outcomes.flush()
        self._checkpointer.hurry(STOP_MS)
        self._stopped = done
        self._finish()

    def close(self) -> None:
        """Close the files, after `stop` has called back and the executors have ended."""
        self._sources.close()
        self._retention.close()
        self._checkpointer.close()
        self._log.close()

    # Housekeeping, asked for by the shell (rule T3).

    def reserve(self, free_bytes: int) -> None:
        """Take a reading of free space (rule L8)."""
        self.intake.reserve.take(free_bytes, self._config, hour_start_ms(self._loaded_until + 1))
        if not self.intake.reserve.closed:
            self.intake.resume()

    def sweep(self) -> None:
        """Seal closed hours and delete hours past their retention, if the clock is confirmed (rule T1)."""
        if self._clock.confirmed:
            closed_before_ms = min(self._checkpointer.appended_at_ms, self.intake.filed_from_ms)
            self._retention.sweep(closed_before_ms, self._clock.now_ms())
        self.intake.reserve.full_hours = full_hours(self._hours, self._pending, self._config.hour_rows_max)
        self._segments.release(
            self._wheel.lowest_message_log_offset(),
            self.dispatcher.lowest_message_log_offset(),
            self._held.lowest_message_log_offset(),
        )

    # Calls between the parts.

    def _index(self, committed: Committed) -> None:
        """Index a durable group: all its rows enter the pending columns, and rows of loaded hours enter the wheel at
        once.
        """
        rows = message_rows(committed.stored, self._subjects, committed.appended_at_ms)
        self._sources.remember(committed.stored)
        span = hour_span(rows)
        if span[1] > self._loaded_until or self._withheld:
            near = rows["hour"] <= np.uint32(self._loaded_until)
            if self._withheld:
                near &= ~np.isin(rows["hour"], list(self._withheld))
            self._pending.keep(rows.take(np.flatnonzero(~near)))
            rows = rows.take(np.flatnonzero(near))
            span = hour_span(rows) if len(rows) else (self._loaded_from, self._loaded_from)
        self._pending.count(rows, span)
        if span[0] < self._loaded_from:
            # The clock was set back to before the start. Rows that these hours held then were loaded at the start, so
            # only these new rows are missing from the wheel.
            self._put_back(rows)
        else:
            self._wheel.insert(rows, span)
        lag = self.intake.durable.offset - self._checkpointer.replay.offset
        self.intake.reserve.behind = lag > self._config.replay_lag_bytes_max
        self.intake.subjects_full = self._subjects.is_full
        self.dispatcher.came()
        self._begin_checkpoint()

    def _decide(self, action: str, entry: Entry, done: Decided) -> None:
        """Carry out an operator's decision, once it is durable."""
        log.warning("operator action=%s id=%s rows=%d", action, entry.id, entry.rows)
        word = OperatorWord(action, entry.id, entry.rows)
        self.intake.control(encode_known([word]), partial(self._act, action, entry, done))

    def _act(self, action: str, entry: Entry, done: Decided) -> None:
        if entry.hour is not None and entry.kind in (Kind.SCHEDULE, Kind.DISPATCH):
            drop = action == "drop"
            try_now = partial(self._mending.try_now, entry.hour, entry.kind, done, drop=drop)
            if drop and entry.kind is Kind.DISPATCH:
                # This file alone says of some rows that they were handed over. Rows that are not filed yet would be
                # sent again without it, so they are filed first.
                self._checkpointer.when_covers(self.intake.durable.offset, try_now)
                self._tick_due_ms = self._clock.monotonic_ms()
            else:
                try_now()
        elif entry.kind is Kind.ROWS:
            if action == "drop":
                given_up = self._held.give_up(entry)
                self._outcomes.when_durable(lambda: done(*given_up))
                self._outcomes.flush()
            else:
                done(*self._held.retry(entry))
            # The checkpoint begins soon, not here: rows of the commit that made this decision durable are not indexed
            # yet, and a checkpoint that began now would find more of them in the log than it counts.
            self._tick_due_ms = self._clock.monotonic_ms()
        elif entry.kind is Kind.SEAL:
            self._seal_mending.try_now(done)
        elif entry.kind is Kind.LOG:
            self._log_watch.look(done)
        elif entry.kind is Kind.SEALED:
            self._file_watch.look()
            done(True, "its files are looked at")
        elif self.quarantine.find(entry.id) is None:
            done(True, "it was released already")
        elif entry.kind is Kind.TARGET:
            subject = entry.name.encode("ascii")
            told = f"meta is asked where {entry.name} goes"
            self._give_value_up(
                entry, TARGET_PREFIX + subject, None, partial(self.dispatcher.ask_meta, subject), told, done
            )
        else:
            producer_id = int(entry.name, 16)
            pair, go_on = self.producers.kept_of(producer_id), partial(self.producers.find_again, producer_id)
            self._give_value_up(entry, *pair, go_on, "its batches are taken again", done)

    def _give_value_up(
        self, entry: Entry, key: bytes, value: bytes | None, go_on: Callable[[], None], told: str, done: Decided
    ) -> None:
        """Replace or remove a value of the state that does not check. This is made durable, or the next start would
        wait again.
        """

        def stored(ended: Done[None]) -> None:
            try:
                ended.result()
            except DiskFull as error:
                done(False, f"nothing was stored: {error.message}")
                return
            if self.quarantine.lift(entry.kind, entry.name):
                go_on()
            done(True, told)

        puts, removes = ([], [key]) if value is None else ([(key, value)], [])
        self._threads.worker.submit(partial(self._state.commit, puts, removes), stored)

    def _outcomes_restored(self, accepted: Mapping[int, AcceptedTarget], hour: int, outcomes: OutcomeRows) -> None:
        """Take back a dispatch log that is whole again: from here on answers and hellos follow what it says (rules H4,
        H7, S1).
        """
        self._earlier.learn(hour, outcomes.sequences)
        ends: dict[int, int] = {}
        note_ends(ends, outcomes, accepted)
        for target, offset in ends.items():
            self._ends.name(target, offset)

    def _loaded_in_part(self, loaded: LoadedHour) -> None:
        assert loaded.damage is not None, "only then a part is missing"
        self._mending.schedule_damaged(
            loaded.hour, loaded.damage, Unloaded(self._checkpointer.filed_below, loaded.sequences)
        )

    def _entry(self, id_: str) -> Entry:
        entry = self.quarantine.find(id_)
        if entry is None:
            raise BadArgument(f"nothing is quarantined as {id_!r}; see `delayd quarantine list`")
        return entry

    def _new_link(self, target: int) -> Link:
        sender = Sender(
            target,
            self._origin,
            self._clock,
            self._config,
            self._sources,
            self._subjects.names,
            self._outcomes,
            self._ends,
            self._put_back,
            self.fence,
            self._held.hold,
        )
        silence_ms_max = self._config.target_silence_ms_max
        return Link(
            target=target,
            origin=self._origin,
            dial=self._dial,
            clock=self._clock,
            outcomes=self._outcomes,
            sender=sender,
            earlier=self._earlier,
            ends=self._ends,
            silence_ms_max=silence_ms_max,
            fence=self.fence,
            refusers=self._refusers,
            next_sequence=lambda: self.intake.next_sequence,
        )

    def _put_back(self, rows: Rows) -> None:
        for hour in np.unique(rows["hour"]).tolist():
            if not self._wheel.has_hour(hour):
                self._wheel.add_hour(hour)
        self._wheel.insert(rows)

    # Ticks and checkpoints.

    def _tick(self) -> None:
        self._mending.step()
        self._held.step()
        self._log_watch.step()
        self._file_watch.step()
        if self._clock.monotonic_ms() >= self._look_due_ms:
            self._look_due_ms = self._clock.monotonic_ms() + LOOK_MS
            self._outcomes.look()
            self._retention.look_at_seals()
        self._seal_mending.step()
        now_ms = self._clock.now_ms()
        this_hour = hour_of_ms(now_ms)
        last_hour = hour_of_ms(self.intake.appended_at_ms)
        if last_hour < this_hour and self.intake.idle and self._clock.confirmed:
            self.intake.tick()
        for hour in self._wheel.hours():
            if hour < last_hour and not self._wheel.len_of(hour):
                self._wheel.drop_hour(hour)
        if self._earlier and all(link.sender.window.earlier_settled for link in self.dispatcher.links.values()):
            # No answer about an earlier epoch can come any more. Only hours that are still to be loaded need these
            # outcomes.
            self._earlier.forget(self._loaded_until)
        # After the clock was set back, rows are filed in hours that the clock has not reached again, and they are due
        # before (P5).
        filing_ms = max(self._clock.stamp_ms(), self.intake.appended_at_ms)
        due = hour_of_ms(filing_ms + self._config.load_ahead_ms) > self._loaded_until
        due = due and self._mending.running != self._loaded_until + 1
        if due and not self._loading.running and self._stopped is None:
            self._loading.load_next()

    @property
    def _loaded_until(self) -> int:
        return self._loading.until

    def _attached(self) -> None:
        """Go on after an hour was loaded: another hour may be due to load, and the rows of this one may be due."""
        self._tick()
        self.dispatcher.step()
        self._finish()

    def _begin_checkpoint(self) -> None:
        # No checkpoint begins while an hour is loaded: each checkpoint would force that load to be done again.
        mending = self._mending.running is not None
        if self._loading.running or mending or not self._checkpointer.is_due(self.intake.durable.offset):
            return
        notes, self.dispatcher.changed = self.dispatcher.changed, {}
        forgotten, self.dispatcher.forgotten = self.dispatcher.forgotten, set()
        intake, outcomes = self.intake, self._outcomes
        ends, moved = {**self._quarantined_ends, **outcomes.ends}, sorted(outcomes.moved & outcomes.ends.keys())
        outcomes.moved.clear()
        books = self._books()
        self._checkpointer.begin(
            *(intake.durable, intake.durable_sequence, intake.appended_at_ms, notes, ends, moved),
            outcomes.take_handed_over(),
            partial(self._checkpointed, intake.durable_sequence, books.keep_from),
            books,
            forgotten,
        )

    def _books(self) -> Books:
        parts = (self._wheel, self.intake, self.dispatcher, self._held, self.quarantine)
        said = settled(self._clock, *parts, self._loaded_until)
        return Books(self.intake.skipped, encode_dropped(self._mending.dropped), self._segments.keep_from, *said)

    def _checkpointed(self, next_sequence: int, keep_from: int, published: bool) -> None:
        if not published:
            self._end()
            return
        self._outcomes.filed_below = next_sequence
        self._segments.published(self._checkpointer.replay.offset, keep_from)
        lag = self.intake.durable.offset - self._checkpointer.replay.offset
        self.intake.reserve.behind = lag > self._config.replay_lag_bytes_max
        # Rows of later hours have just been filed and left memory, so their subjects may no longer be used.
        self._sweep_subjects()
        self._finish()

    def _sweep_subjects(self) -> None:
        """Give back the names of subjects that no row in memory uses (rule B1)."""
        # A load that is under way already holds numbers of its subjects, but its rows are in none of these places yet.
        if self._subjects.wants_sweep(len(self.dispatcher.targets)) and not self._loading.running:
            rows = chain(self._wheel.parts(), self._pending.views(0), self.dispatcher.parts(), self._held.parts())
            gone = self._subjects.sweep(rows)
            self.dispatcher.forget_targets()
            self.intake.subjects_full = self._subjects.is_full
            log.info("subjects_forgotten subjects=%d kept=%d", gone, self._subjects.known)

    def _finish(self) -> None:
        """While stopping: once everything is durable, write a last checkpoint; once that covers everything, end."""
        if self._stopped is None or self._loading.running or self._checkpointer.running:
            return
        if self._mending.running is not None:
            return
        if not (self.intake.idle and self._outcomes.idle):
            self._outcomes.flush()
            self._outcomes.when_durable(self._finish_soon)
            return
        if self._checkpointer.replay.offset < self.intake.durable.offset:
            self._checkpointer.when_covers(self.intake.durable.offset, self._finish)
            self._begin_checkpoint()
            return
        self._end()

    def _end(self) -> None:
        if self._stopped is not None:
            write_again(self._log.segments)
            self._outcomes.write_again()
            self._retention.write_again()
            stopped, self._stopped = self._stopped, None
            stopped()

    def _finish_soon(self) -> None:
        # The message log's commit has no callback for this; a job on its thread reports back after all commits before
        # it.
        self._threads.commit.submit(_removed_nothing, lambda done: self._finish())


def _removed_nothing() -> None:
    """A job that only marks a place in the order of its thread."""
