"""The delay server's core: it creates the server's parts and connects them. It is synchronous; clock, disk, random
numbers and network are arguments.

The core runs on one loop; the executors run pure functions only. An error that the core raises ends the server: after
it nobody can trust what is in memory, and the next start recovers from the disk.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.config import DelayConfig
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.books.retention import Retention, SealTerms, SegmentRetention
from delayd.delay.books.seals import open_seal_log
from delayd.delay.damage.keys_rebuild import LogsOfHours, Rebuild
from delayd.delay.damage.mending import Mending, SetAside
from delayd.delay.damage.set_aside import MESSAGE_LOG, FileWatch, HeldRows, LostValues
from delayd.delay.ending.endings import Books as EndingBooks
from delayd.delay.ending.endings import Endings
from delayd.delay.filing.checkpoint import Books, CheckpointCalls, Checkpointer, Evidence, Filing, LastCheckpoint
from delayd.delay.filing.hour_table import FiledHours
from delayd.delay.filing.pending import full_hours
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.handoff.dispatcher import AskRoutes, Dispatcher, EarlierLives, Notes, Routing
from delayd.delay.handoff.link import Dial, Link, LinkTerms
from delayd.delay.handoff.moves import RouteMoves
from delayd.delay.handoff.refusers import Refusers
from delayd.delay.handoff.sender import SenderTerms, ServerLife
from delayd.delay.handoff.target_ends import KeepingEnds, TargetEnds
from delayd.delay.handoff.target_words import TargetWords, accepted_targets
from delayd.delay.handoff.targets import TargetBooks, Targets
from delayd.delay.intake import DAY_MS, Committed, FoundLog, Intake
from delayd.delay.keys.index import FIRST_NUMBER, KeyIndex, open_index
from delayd.delay.keys.owned_slots import AskSlots
from delayd.delay.keys.run import sent_rows
from delayd.delay.ledger.files import HourReader
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.ledger.owed import joined_bytes
from delayd.delay.producers import AcceptedBatch, Allowance, Waiter
from delayd.delay.quarantine import Decided, Decisions, Entry, Kind, Quarantine
from delayd.delay.quotas.quotas import Books as QuotaBooks
from delayd.delay.quotas.quotas import OnPlaces, OnSet, Quotas
from delayd.delay.recovery import Recovered, ends_of_all, recover
from delayd.delay.retiring import Retiring
from delayd.delay.settled import settled
from delayd.delay.standing import Standing
from delayd.delay.state_values import encode_dropped
from delayd.delay.stopping import Stopping
from delayd.delay.table import message_rows
from delayd.delay.timers.hours import Hours
from delayd.delay.timers.loader import LoadedHour
from delayd.delay.timers.loading import Loading
from delayd.hours import hour_of_ms, hour_start_ms
from delayd.log.control import Limits
from delayd.log.key_run import KnownRuns
from delayd.log.log import LOOK_MS, LogWatch, OnFiles, write_again
from delayd.machine.clock import JUMP_MS, Clock
from delayd.machine.disk import Disk
from delayd.machine.executor import Executor
from delayd.machine.identity import Site, open_identity
from delayd.machine.operating import Fence, Wait
from delayd.machine.state import State

log = logging.getLogger(__name__)

TICK_MS = 1_000  # How often an idle server looks at hours that ended, hours to load and its clock.


@dataclass(frozen=True, slots=True)
class Threads:
    """The three executors; each keeps the order of its own jobs."""

    commit: Executor  # The message log.
    outcomes: Executor  # The dispatch logs.
    worker: Executor  # Checkpoints, loads, seals, and what requests ask of files.


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The core's access to the world outside of its directory."""

    clock: Clock
    dial: Dial
    ask_routes: AskRoutes
    ask_slots: AskSlots
    random_id: Callable[[], int]
    evidence: Evidence
    rest: Callable[[], None]  # Leaves the disk to others for a moment.
    # Asks for a stop of this life and a start of the next one in its place, for the reason that is given.
    begin_anew: Callable[[str], None]


class DelayCore:
    """One delay server over one directory."""

    def __init__(self, disk: Disk, state: State, config: DelayConfig, threads: Threads, around: Surroundings) -> None:
        self.identity = open_identity(state, f"{config.folder}/state.lmdb", around.random_id, disk)
        clock = around.clock
        site = Site(disk, state, config.folder, self.identity, clock, threads.worker)
        self.fence = Fence("delay", self.identity.log_id)
        life = ServerLife(self.identity.log_id, self.identity.epoch, around.random_id())
        found = recover(site, config)
        for damage in found.damage:
            log.critical("found_damaged reason=%r", str(damage))
        self._state = state
        self._clock = clock
        self._config = config
        self._log = found.log
        self._tick_due_ms = self._look_due_ms = clock.monotonic_ms()
        self._look_due_ms += LOOK_MS
        self._in_doubt = not clock.confirmed
        self._quarantined_ends = found.quarantined_ends
        self._dropped = found.dropped
        self.producers = found.producers
        self.quarantine = Quarantine(clock)
        words, accepted = TargetWords(state), accepted_targets(state)
        ends = self._ends = TargetEnds(
            state,
            found.target_ends,
            lambda: ends_of_all(disk, config.folder, self.identity.log_id, accepted_targets(state)),
            accepted,
            found.quarantined,
            found.given_up,
        )
        # Each commit of the worker also stores the ends of the targets.
        keeping = replace(site, state=KeepingEnds(state, ends))
        self.intake = Intake(
            replace(site, worker=threads.commit),
            config,
            FoundLog(found.log, found.next_sequence, found.appended_at_ms, tuple(found.skipped)),
            found.producers,
            self._index,
            found.subjects.knows,
        )
        self._outcomes = OutcomeLog(
            replace(site, worker=threads.outcomes),
            config.outcomes_flush_ms,
            found.dispatch_logs,
            found.outcome_ends,
            found.quarantined,
            lambda hour, error: self._mending.dispatch_damaged(hour, error),
        )
        self._sources = Sources(disk, config.folder, found.log, config.tail_bytes, config.source_cache_bytes)
        filed = FiledHours(found.hours, found.beside)
        hours = self._hours = Hours(
            found.hours,
            found.beside,
            found.pending,
            found.wheel,
            found.subjects,
            set(found.quarantined),
            found.loaded_hours(clock.stamp_ms()),
        )
        ledger = self.ledger = Ledger(hours, found.decided, self._outcomes, HourReader(site), self.quarantine)
        self._wheel = found.wheel
        self._loading = Loading(
            site,
            hours,
            ledger.ended_in,
            config.load_ahead_ms,
            lambda: self._checkpointer.replay.offset,
            self._loaded,
        )
        self._held = HeldRows(clock, self._sources, self._outcomes, self.quarantine, hours.put_back)
        refusers = Refusers(state, threads.worker)
        sender_terms = SenderTerms(
            life=life,
            clock=clock,
            config=config,
            sources=self._sources,
            names=found.subjects.names,
            outcomes=self._outcomes,
            ends=ends,
            fence=self.fence,
            put_back=hours.put_back,
            hold=self._held.hold,
        )
        link_terms = LinkTerms(
            sender_terms,
            around.dial,
            ledger,
            refusers,
            lambda: self.intake.next_sequence,
            lambda sequence: self.intake.has_given(sequence),
        )
        noted = words.without_freed(found.targets)
        self.dispatcher = Dispatcher(
            found.wheel,
            found.subjects,
            clock,
            words,
            Notes(
                noted,
                found.targets_owed & noted.keys(),
                found.targets_lost.keys(),
                EarlierLives(found.next_sequence, _earlier_until_ms(clock, found.appended_at_ms)),
            ),
            Routing(ledger, lambda target: Link(target, link_terms), self.intake.control, around.ask_routes),
        )
        ledger.handoff, ledger.held = self.dispatcher, self._held
        self.moves = RouteMoves(state, self.dispatcher, threads.worker)
        books = TargetBooks(words, ends, refusers)
        self.targets = Targets(site, books, self.dispatcher, self._outcomes, self.quarantine, self.intake)
        self._keys = _open_keys(site, found, around.random_id)
        self._checkpointer = Checkpointer(
            keeping,
            config,
            found.log,
            Filing(filed, found.pending, found.producers, self._keys),
            LastCheckpoint(found.replay, found.filed_below, found.reach_ms),
            CheckpointCalls(
                evidence=around.evidence,
                rest=around.rest,
                damaged=lambda: self._mending.damaged_hours(),
                on_damaged=lambda hour, error: self._mending.schedule_damaged(hour, error),
                seal_end=lambda: self._retention.seal_end(),
            ),
        )
        self._stopping = Stopping(
            self.intake,
            self._outcomes,
            self._checkpointer,
            lambda: threads.worker if self.intake.looks_up else threads.commit,
            lambda: self._loading.running,
            self._begin_checkpoint,
        )
        self._mending = Mending(
            keeping,
            ledger,
            self._outcomes,
            SetAside(self.quarantine, found.quarantined, found.quarantined_ends, found.next_sequence),
            lambda: self.intake.next_sequence,
            around.begin_anew,
        )
        self.quotas = Quotas(
            site,
            QuotaBooks(
                log=found.log,
                filed=filed,
                outcomes=self._outcomes,
                checkpointer=self._checkpointer,
                intake=self.intake,
                ended=ledger.owed.parts,
                peers=lambda: self.endings.owned_slots.claims.peers,
            ),
            config.horizon_days * DAY_MS,
        )
        self._rebuild = Rebuild(site, self._keys, LogsOfHours(filed, lambda: self._outcomes.ends, ledger.owed.all))
        self._outcomes.on_ended = ledger.owed.on_ended = self.quotas.ended
        self.endings = Endings(
            site,
            EndingBooks(
                fence=self.fence,
                intake=self.intake,
                ledger=ledger,
                sources=self._sources,
                keys=self._keys,
                producers=self.producers,
            ),
            around.ask_slots,
        )
        self.endings.drain.draw = around.random_id
        self.endings.drain.when_filed = lambda done: self._checkpointer.when_covers(self.intake.durable.offset, done)
        self.retiring = Retiring(
            self.intake,
            self.endings,
            ledger,
            self.dispatcher,
            self.quarantine,
            clock.now_ms,
        )
        self._standing = Standing(
            log_id=self.identity.log_id,
            clock=clock,
            state=state,
            fence=self.fence,
            intake=self.intake,
            producers=self.producers,
            checkpointer=self._checkpointer,
            dispatcher=self.dispatcher,
            held=self._held,
            quarantine=self.quarantine,
            quotas=self.quotas,
            endings=self.endings,
            ledger=ledger,
            outcomes=self._outcomes,
        )
        for hour, error in found.quarantined.items():
            self._mending.dispatch_damaged(hour, error)
        for hour, (error, loaded) in found.unloaded.items():
            self._mending.schedule_damaged(hour, error, loaded)
        values = LostValues(site, self.quarantine, self.dispatcher, self.producers)
        values.found(found.producers_lost, found.targets_lost)
        self._segments = SegmentRetention(found.log, threads.commit, threads.worker, clock)
        self._log_watch = LogWatch(
            message_log=found.log,
            append=threads.commit.submit,
            worker=threads.worker,
            clock=clock,
            on_files=OnFiles(
                put=lambda name, damage: self.quarantine.put(Kind.LOG, name, damage),
                lift=lambda name: self.quarantine.lift(Kind.LOG, name),
                rolled=lambda: self.checkpoint(lambda offset: None),
            ),
        )
        self._file_watch = FileWatch(
            site, found.hours, self._outcomes.ends, found.sealed_ends, self.quarantine, self._mending.schedule_damaged
        )
        self._retention = Retention(
            keeping,
            self._hours,
            self._outcomes,
            self._sources,
            self.quarantine,
            SealTerms(
                found.seals,
                config.retention_hours,
                self._mending.file_damaged,
                lambda error: self._mending.seals_damaged(self._retention, error),
                partial(open_seal_log, site, found.hours, whole=found.flags_unknown),
            ),
        )
        if found.seals_damage is not None:
            self._mending.seals_damaged(self._retention, found.seals_damage)
        self._decisions = Decisions(
            self.quarantine,
            self.intake.control,
            {
                Kind.SCHEDULE: self._mending.decide,
                Kind.DISPATCH: self._mending.decide,
                Kind.ROWS: self._decide_rows,
                Kind.SEALED: self._file_watch.decide,
                Kind.SEAL: self._mending.decide,
                Kind.LOG: lambda entry, drop, done: self._log_watch.look(done),
                Kind.TARGET: values.release_target,
                Kind.PRODUCER: values.release_producer,
            },
        )
        if len(found.owed):
            ledger.owed.take(found.owed)
        for hour, rows in found.in_doubt.items():
            self._mending.doubt(hour, rows, found.given_up[hour], lacks_rows=hour in found.unloaded)
        log.info(
            "recovered log_id=%016x epoch=%d pending=%d loaded=%d hours=%d",
            *(self.identity.log_id, self.identity.epoch, len(found.pending), len(found.wheel), len(found.hours)),
        )

    def ask_targets_first(self) -> None:
        """Serve nobody until each target has answered: this directory was moved, restored or copied (rule H8).

        It may be older than what it served last, so the sequences that it may have given since are left out (rule I5).
        """
        for link in self.dispatcher.links.values():
            link.ask_first()
        self.intake.jump(_nobody_waits)

    # Requests.

    def send(self, batch: Batch, waiter: Waiter, allowance: Allowance | None = None) -> None:
        """Take a PRODUCER batch; ``waiter`` is called with its outcome, once that is durable."""
        if self.fence.is_up:
            # A batch that is known gets the same answer: this server may be a copy, and then only the right server may
            # give receipts.
            waiter(self.fence.error(), False)
            return
        self.intake.send(batch, waiter, allowance)

    def send_again(self, batch: Batch, waiter: Waiter, allowance: Allowance) -> None:
        """As `send`, for a realtime server's messages that come again to their group (rule Q2)."""
        if self.fence.is_up:
            waiter(self.fence.error(), False)
            return
        self.intake.send(batch, waiter, allowance, again=True)

    def send_drained(self, batch: Batch, waiter: Waiter) -> None:
        """As `send`, for messages that another delay server held (docs/drain.md)."""
        if self.fence.is_up:
            waiter(self.fence.error(), False)
            return
        self.intake.send(batch, waiter, drained=True)

    def cordon(self, cordoned: bool) -> None:
        """Hear from meta whether an operator has cordoned this server."""
        if cordoned != self.intake.cordoned:
            log.warning("cordoned cordoned=%s", cordoned)
        self.intake.cordoned = cordoned

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

    def set_quota(self, subject: bytes, limits: Limits, done: OnSet) -> None:
        """Give a subject a quota; ``done`` is called when it is durable and in force, or with the error.

        Raises ServerFenced, BadArgument, SlowDown, Stopping: nothing is done.
        """
        self.fence.check()
        self.quotas.set(subject, limits, done)

    def places(self, subject: bytes, due_ms: Int64s, spread_ms: int, answer: OnPlaces) -> None:
        """Call back with the least loaded instants in the windows of messages; raises as `set_quota`."""
        self.fence.check()
        self.quotas.places(subject, due_ms, spread_ms, answer)

    def checkpoint(self, done: Callable[[int], None]) -> None:
        """Call back with the replay offset when a checkpoint covers everything that is durable now."""
        self._checkpointer.when_covers(self.intake.durable.offset, lambda: done(self._checkpointer.replay.offset))
        self.wake()

    def release(self, id_: str, done: Decided) -> None:
        """Try a quarantined thing again because an operator said so; BadArgument when no entry has this id."""
        self._decisions.release(id_, done)

    def drop(self, id_: str, done: Decided) -> None:
        """Give a quarantined thing up because an operator said so; BadArgument when no entry has this id."""
        self._decisions.drop(id_, done)

    def counters(self) -> dict[str, int]:
        """Figures for STATUS."""
        return self._standing.counters()

    def waits(self) -> Iterator[Wait]:
        """List the states that only an operator can end."""
        return self._standing.waits()

    def refuses(self) -> Iterator[Wait]:
        """List what this server refuses for now; each of these states ends by itself."""
        return self._standing.refuses()

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
            self._checkpointer.reach(from_ms)
            self._loading.reopen()
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
        self.endings.keyed_sends.wake()
        if self._checkpointer.collecting is not None:
            self._checkpointer.step()
        self._begin_checkpoint()

    def stood_still(self, ms: int) -> None:
        """No file could change for so long."""
        self._log_watch.stood_still(ms)
        self._file_watch.stood_still(ms)
        self._look_due_ms += ms

    def next_due_ms(self) -> int | None:
        """Instant by the judged clock at which a message is due next."""
        return self.dispatcher.next_due_ms()

    def next_stop_ms(self) -> int | None:
        """The same, or the start of the first hour with messages that is not loaded, if that comes first."""
        due_ms, hour = self.next_due_ms(), self._loading.next_hour
        if hour is None:
            return due_ms
        return hour_start_ms(hour) if due_ms is None else min(due_ms, hour_start_ms(hour))

    def next_wake_ms(self) -> int:
        """Latest instant, monotonic, at which to call `wake` though nothing is due."""
        wake_ms = self._tick_due_ms
        dispatcher_ms, outcomes_ms = self.dispatcher.next_wake_ms(), self._outcomes.next_wake_ms()
        if dispatcher_ms is not None and dispatcher_ms < wake_ms:
            wake_ms = dispatcher_ms
        if outcomes_ms is not None and outcomes_ms < wake_ms:
            wake_ms = outcomes_ms
        keyed_ms = self.endings.keyed_sends.next_wake_ms()
        if keyed_ms is not None and keyed_ms < wake_ms:
            wake_ms = keyed_ms
        # No checkpoint begins while an hour is loaded, even if one is due.
        if not self._loading.running or self._checkpointer.collecting is not None:
            checkpoint_ms = self._checkpointer.next_wake_ms()
            if checkpoint_ms is not None and checkpoint_ms < wake_ms:
                wake_ms = checkpoint_ms
        return wake_ms

    def stop(self, done: Callable[[], None]) -> None:
        """Refuse sends, make everything durable, write a last checkpoint, and call back."""
        for link in self.dispatcher.links.values():
            link.close()
        self.quotas.stop()
        self._stopping.begin(done)

    def close(self) -> None:
        """Write removed files again and close all, after the executors have ended."""
        write_again(self._log.segments)
        self._outcomes.write_again()
        self._retention.write_again()
        self._sources.close()
        self._retention.close()
        self._checkpointer.close()
        self._keys.close()
        self._log.close()

    # Housekeeping, asked for by the shell (rule T3).

    def reserve(self, free_bytes: int) -> None:
        """Take a reading of free space (rule L8)."""
        self.intake.reserve.take(free_bytes, self._config, hour_start_ms(self._hours.loaded_until + 1))
        if not self.intake.reserve.closed:
            self.intake.commit()

    def sweep(self) -> None:
        """Seal closed hours and delete hours past their retention, if the clock is confirmed (rule T1)."""
        if self._clock.confirmed:
            closed_before_ms = min(self._checkpointer.appended_at_ms, self.intake.filed_from_ms)
            self._retention.sweep(closed_before_ms, self._clock.now_ms())
        full = full_hours(self._hours.filed, self._hours.pending, self._config.hour_rows_max)
        self.intake.reserve.note_full(full)
        self._segments.release(
            self._wheel.lowest_message_log_offset(),
            self.dispatcher.lowest_message_log_offset(),
            self._held.lowest_message_log_offset(),
            self.quotas.lowest_message_log_offset(),
            decided_from_ms=self.ledger.owed.earliest_ms(),
        )

    # Calls between the parts.

    def _index(self, committed: Committed) -> None:
        """Index a durable group: rows of loaded hours enter the wheel at once, all of them the pending columns."""
        rows = message_rows(committed.stored, self._hours.subjects, committed.appended_at_ms)
        self._sources.remember(committed.stored)
        if self.intake.gate is not None:
            self.quotas.took(committed.stored, committed.appended_at_ms)
        for entry in committed.stored:
            batch = entry.batch
            # Rows that a client sent took their keys when their commit became durable. Moved rows name a first one, and
            # so do those of another delay server.
            if ColumnId.KEY_END in batch.offsets and ColumnId.ORIGIN_SEQUENCE in batch.offsets:
                self.endings.taken_names.add(sent_rows(entry, committed.appended_at_ms))
        self._loading.take(rows)
        self._note_reserve()
        self.dispatcher.came()
        self._begin_checkpoint()

    def _decide_rows(self, entry: Entry, drop: bool, done: Decided) -> None:
        decide = partial(self._held.decide, entry, drop, done)
        if entry.name == MESSAGE_LOG and not drop:
            # A copy may have been put in the place of a file of the message log: the log takes it first.
            self._log_watch.look(lambda whole, found: decide())
        else:
            decide()
        # The checkpoint begins soon, not here: rows of the commit that made this decision durable are not indexed
        # yet, and a checkpoint that began now would find more of them in the log than it counts.
        self._tick_due_ms = self._clock.monotonic_ms()

    # Ticks and checkpoints.

    def _note_reserve(self) -> None:
        lag = self.intake.durable.offset - self._checkpointer.replay.offset
        behind = lag > self._config.replay_lag_bytes_max
        self.intake.note_reserve(behind=behind, subjects_full=self._hours.subjects.is_full)

    def _tick(self) -> None:
        self._mending.step()
        self._held.step()
        self._log_watch.step()
        self._file_watch.step()
        if self._clock.monotonic_ms() >= self._look_due_ms:
            self._look_due_ms = self._clock.monotonic_ms() + LOOK_MS
            self._outcomes.look()
            self._retention.look_at_seals()
        self.quotas.step()
        self._rebuild.step()
        self.endings.drain.step()
        now_ms = self._clock.now_ms()
        this_hour = hour_of_ms(now_ms)
        last_hour = hour_of_ms(self.intake.appended_at_ms)
        if last_hour < this_hour and self.intake.idle and self._clock.confirmed:
            self.intake.tick()
        self._loading.drop_empty(last_hour)
        self._forget_ended()
        if not self._stopping.begun:
            # After the clock was set back, rows are filed in hours that the clock has not reached again, and they are
            # due before (P5).
            filing_ms = max(self._clock.stamp_ms(), self.intake.appended_at_ms)
            passed = hour_of_ms(min(self.intake.appended_at_ms, self.intake.filed_from_ms))
            self._loading.step(filing_ms, passed, self.ledger.ending_hours)

    def _forget_ended(self) -> None:
        """Forget which rows have ended, of hours of which nothing is delivered any more."""
        links = self.dispatcher.links.values()
        self.ledger.forget(answers_may_come=not all(link.sender.window.earlier_settled for link in links))

    def _loaded(self, hours: Sequence[LoadedHour]) -> None:
        """Go on after hours were loaded, or those of their rows that can be read."""
        for loaded in hours:
            if loaded.damage is not None:
                self._mending.schedule_damaged(loaded.hour, loaded.damage, len(loaded.prepared.rows))
        self._attached()

    def _attached(self) -> None:
        """Go on after an hour was loaded: another hour may be due to load, and the rows of this one may be due."""
        self._tick()
        self.dispatcher.step()
        self._stopping.step()

    def _begin_checkpoint(self) -> None:
        if self._loading.running or not self._checkpointer.is_due(self.intake.durable.offset):
            return
        notes, forgotten = self.dispatcher.take_changes()
        intake, outcomes = self.intake, self._outcomes
        books = self._books()
        self._checkpointer.begin(
            *(intake.durable, intake.durable_sequence, intake.appended_at_ms, notes),
            *({**self._quarantined_ends, **outcomes.ends}, outcomes.take_moved()),
            outcomes.take_handed_over(),
            partial(self._checkpointed, intake.durable_sequence, books.keep_from),
            books,
            forgotten,
            partial(joined_bytes, self.ledger.owed.parts()),
        )

    def _books(self) -> Books:
        parts = (self._wheel, self.intake, self.dispatcher, self._held, self.quarantine)
        said = settled(self._clock, *parts, self._hours.loaded_until, self.ledger.owed.lowest_ms())
        return Books(self.intake.skipped, encode_dropped(self._dropped), self._segments.keep_from, *said)

    def _checkpointed(self, next_sequence: int, keep_from: int, published: bool) -> None:
        if not published:
            self._stopping.end()
            return
        self._outcomes.filed(next_sequence)
        self._segments.published(self._checkpointer.replay.offset, keep_from)
        # Rows of later hours have just been filed and left memory, so their subjects may no longer be used.
        self._sweep_subjects()
        self._note_reserve()
        self._stopping.step()

    def _sweep_subjects(self) -> None:
        """Give back the names of subjects that no row in memory uses (rule B1)."""
        subjects = self._hours.subjects
        # A load that is under way already holds numbers of its subjects, but its rows are in none of these places yet.
        if subjects.wants_sweep(len(self.dispatcher.targets)) and not self._loading.running:
            pending = self._hours.pending
            rows = chain(self._wheel.parts(), pending.views(0), self.ledger.outside())
            gone = subjects.sweep(rows)
            self.dispatcher.forget_targets()
            log.info("subjects_forgotten subjects=%d kept=%d", gone, subjects.known)


def _earlier_until_ms(clock: Clock, appended_at_ms: int) -> int:
    """How far earlier lives may have come: rows that are due later were not sent by them (rule H5)."""
    until_ms = clock.earlier_until_ms
    if until_ms is None:
        # They append when an hour has passed, also when they have nothing to do.
        until_ms = hour_start_ms(hour_of_ms(appended_at_ms) + 1)
    return max(clock.now_ms(), appended_at_ms, until_ms)


def _nobody_waits() -> None:
    """Requests are refused until meta has taken this directory; the next commit is behind the jump in any case."""


def _open_keys(site: Site, found: Recovered, random_seed: Callable[[], int]) -> KeyIndex:
    """Open the index of keys, and add the rows above the checkpoint to it."""
    known = found.keys
    if known is None:
        known = KnownRuns(random_seed(), FIRST_NUMBER, whole=not found.keys_lost)
    opened = open_index(site.disk, site.folder, site.log_id, known)
    if opened.damage is not None:
        log.critical("keys_damaged reason=%r", str(opened.damage))
    keys = KeyIndex(site, opened, FiledHours(found.hours, found.beside).all)
    for rows in found.keyed:
        keys.add(rows)
    return keys
