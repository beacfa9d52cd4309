"""Parts: how a delay server is put together, in the order in which its parts need each other.

     Ground ──▶ Logs ──▶ Memory ──▶ Handoff ──▶ Upkeep ──▶ Asked ──▶ Repair
     what a     what is  which rows who gets    what keeps what may  what an
     start      written  there are, due rows    the        be asked  operator
     found               and where              directory            decides

Each of these rooms gets the rooms before it, and makes its parts from theirs. Where a part has to call one that is made
later, the later room hands it that call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from delayd.config import DelayConfig
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.books.retention import Retention, SealTerms, SegmentRetention
from delayd.delay.books.sealing import open_seal_log
from delayd.delay.damage.keys_rebuild import LogsOfHours, Rebuild
from delayd.delay.damage.mending import Mending, SetAside
from delayd.delay.damage.set_aside import MESSAGE_LOG, FileWatch, HeldRows, LostValues
from delayd.delay.ending.endings import Books as EndingBooks
from delayd.delay.ending.endings import Endings
from delayd.delay.filing.checkpointer import CheckpointCalls, Checkpointer, Evidence, Filing, LastCheckpoint
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.handoff.dispatcher import RECORD, RECURRING, AskRoutes, Dispatcher, Notes, RouteMoves, Routing
from delayd.delay.handoff.link import Dial, Link, LinkTerms
from delayd.delay.handoff.sender import SenderTerms, ServerLife
from delayd.delay.handoff.target_words import KeepingEnds, Refusers, TargetEnds, TargetWords, accepted_targets
from delayd.delay.handoff.targets import TargetBooks, Targets
from delayd.delay.handoff.window import MayHaveLeft
from delayd.delay.intake import DAY_MS, Committed, FoundLog, Intake
from delayd.delay.keys.index import FIRST_NUMBER, KeyIndex, open_index
from delayd.delay.keys.owned_slots import AskSlots
from delayd.delay.ledger.files import HourReader
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.quarantine import OnWord, OperatorWords, Quarantine, SetAsideEntry, SetAsideKind
from delayd.delay.quotas.quotas import Quotas, QuotaSources
from delayd.delay.recovery import Recovered, ends_of_all, recover
from delayd.delay.timers.loading import Attached, Hours, Loading
from delayd.hours import hour_of_ms, hour_start_ms
from delayd.log.hour import HAD_DEAD_LETTERS
from delayd.log.key_run import KnownRuns
from delayd.log.log import LogWatch, OnFiles
from delayd.machine.alarms import Alarms
from delayd.machine.clock import Clock
from delayd.machine.disk import Disk
from delayd.machine.executor import Executor
from delayd.machine.identity import Site, open_identity
from delayd.machine.operating import Fence
from delayd.machine.state import State

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Threads:
    """The three executors; each keeps the order of its own jobs."""

    commit: Executor  # The message log.
    outcomes: Executor  # The dispatch logs.
    worker: Executor  # Checkpoints, loads, seals, and what requests ask of files.


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The server's access to the world outside of its directory."""

    clock: Clock
    dial: Dial
    ask_routes: AskRoutes
    ask_slots: AskSlots
    random_id: Callable[[], int]
    evidence: Evidence
    rest: Callable[[], None]  # Leaves the disk to others for a moment.
    # Asks for a stop of this life and a start of the next one in its place, for the reason that is given.
    begin_anew: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ground:
    """What every part stands on: the directory as a start found it, the threads and the world around."""

    site: Site
    config: DelayConfig
    threads: Threads
    around: Surroundings
    fence: Fence
    life: ServerLife
    found: Recovered


def recover_ground(disk: Disk, state: State, config: DelayConfig, threads: Threads, around: Surroundings) -> Ground:
    """Begin a life of the server: read its directory into memory. Raises as `recover`."""
    identity = open_identity(state, f"{config.folder}/state.lmdb", around.random_id, disk)
    life = ServerLife(identity.log_id, identity.epoch, around.random_id())
    site = Site(disk, state, config.folder, identity, Alarms(around.clock), threads.worker)
    found = recover(site, config)
    for damage in found.damage:
        log.critical("found_damaged reason=%r", str(damage))
    return Ground(site, config, threads, around, Fence("delay", identity.log_id), life, found)


class Logs:
    """The logs that the server writes, and what it remembers of their contents."""

    def __init__(self, ground: Ground, on_committed: Callable[[Committed], None]) -> None:
        site, config, threads, found = ground.site, ground.config, ground.threads, ground.found
        replayed = found.replayed
        self.producers = replayed.producers
        self.intake = Intake(
            replace(site, worker=threads.commit),
            config,
            FoundLog(found.log, replayed.next_sequence, replayed.appended_at_ms, tuple(replayed.skipped)),
            replayed.producers,
            on_committed,
            replayed.subjects.new_rows,
        )
        self.outcomes = OutcomeLog(
            replace(site, worker=threads.outcomes),
            config.outcomes_flush_ms,
            found.outcomes.logs,
            found.outcomes.ends,
            found.ends_apart,
            found.outcomes.quarantined,
        )
        self.sources = Sources(site.disk, site.folder, found.log, config.tail_bytes, config.source_cache_bytes)
        self.keys = _open_keys(site, found, ground.around.random_id)
        self.segments = SegmentRetention(found.log, threads.commit, threads.worker, site.clock)


class Memory:
    """Which rows there are and where, which of them have ended, and what is set aside."""

    def __init__(self, ground: Ground, logs: Logs) -> None:
        site, found = ground.site, ground.found
        self.quarantine = Quarantine(site.clock)
        self.filed = found.kept.files
        self.hours = Hours(
            found.kept.hours,
            found.kept.beside,
            found.replayed.pending,
            found.wheel,
            found.replayed.subjects,
            set(found.outcomes.quarantined),
            found.loaded_hours(site.clock.stamp_ms()),
        )
        self.ledger = Ledger(self.hours, found.outcomes.ended, logs.outcomes, HourReader(site), self.quarantine)
        self.held = HeldRows(site.alarms, logs.sources, logs.outcomes, self.quarantine, self.hours.put_back)
        self.ledger.held = self.held


class Handoff:
    """Due rows and the realtime servers that get them."""

    def __init__(self, ground: Ground, logs: Logs, memory: Memory) -> None:
        site, found = ground.site, ground.found
        words, refusers = TargetWords(site.state), Refusers(site.state, site.worker)
        self.ends = TargetEnds(
            site.state,
            found.outcomes.target_ends,
            lambda: ends_of_all(site.disk, site.folder, site.log_id, accepted_targets(site.state)),
            accepted_targets(site.state),
            found.outcomes.quarantined,
            found.kept.given_up,
        )
        # Each commit of the worker also stores the ends of the targets.
        self.keeping = replace(site, state=KeepingEnds(site.state, self.ends))
        kept, replayed = found.kept, found.replayed
        earlier = MayHaveLeft(replayed.next_sequence, _earlier_until_ms(site.clock, replayed.appended_at_ms))
        terms = self._terms(ground, logs, memory, refusers, earlier)
        noted = words.without_freed(kept.targets)
        self.dispatcher = Dispatcher(
            found.wheel,
            replayed.subjects,
            site.alarms,
            words,
            Notes(noted, replayed.targets_owed & noted.keys(), kept.targets_lost.keys(), earlier),
            Routing(memory.ledger, partial(Link, terms=terms), logs.intake.control, ground.around.ask_routes),
        )
        memory.ledger.handoff = self.dispatcher
        self.moves = RouteMoves(site.state, self.dispatcher, site.worker)
        books = TargetBooks(words, self.ends, refusers)
        self.targets = Targets(site, books, self.dispatcher, logs.outcomes, memory.quarantine, logs.intake)

    def _terms(self, ground: Ground, logs: Logs, memory: Memory, refusers: Refusers, earlier: MayHaveLeft) -> LinkTerms:
        site, around = ground.site, ground.around
        sender = SenderTerms(
            life=ground.life,
            alarms=site.alarms,
            config=ground.config,
            sources=logs.sources,
            hours=memory.hours,
            outcomes=logs.outcomes,
            ends=self.ends,
            fence=ground.fence,
            hold=memory.held.hold,
            earlier=earlier,
        )
        seen_ms = max(ground.found.replayed.appended_at_ms, site.clock.earlier_until_ms or 0)
        return LinkTerms(sender, around.dial, memory.ledger, refusers, logs.intake, seen_ms)


class Upkeep:
    """What keeps the directory: checkpoints, loads of hours, seals, and what becomes of damaged files."""

    def __init__(self, ground: Ground, logs: Logs, memory: Memory, handoff: Handoff, attached: Attached) -> None:
        config, around, found, keeping = ground.config, ground.around, ground.found, handoff.keeping
        ledger, quarantine, self._intake = memory.ledger, memory.quarantine, logs.intake
        kept, replayed, quarantined = found.kept, found.replayed, found.outcomes.quarantined
        aside = SetAside(quarantine, quarantined, found.quarantined_ends, replayed.next_sequence)
        self.mending = Mending(keeping, ledger, logs.outcomes, aside, logs.intake, around.begin_anew)
        logs.outcomes.on_damaged = self.mending.dispatch_damaged
        self.retention = Retention(
            keeping,
            memory.hours,
            logs.outcomes,
            logs.sources,
            quarantine,
            SealTerms(
                found.seals,
                config.retention_hours,
                self.mending.file_damaged,
                self.mending.seals_damaged,
                partial(open_seal_log, ground.site, kept.hours, whole=kept.flags_unknown),
            ),
        )
        self.mending.sealing = self.retention
        self.checkpointer = Checkpointer(
            keeping,
            config,
            found.log,
            Filing(memory.filed, replayed.pending, replayed.producers, logs.keys),
            LastCheckpoint(kept.replay, kept.next_sequence, replayed.reach_ms),
            CheckpointCalls(
                evidence=around.evidence,
                rest=around.rest,
                damaged=self.mending.damaged_hours,
                on_damaged=self.mending.schedule_damaged,
                seal_end=self.retention.seal_end,
            ),
        )
        self.loading = Loading(
            ground.site, memory.hours, ledger.ended_in, config.load_ahead_ms, self.checkpointer, attached
        )
        for hour, error in quarantined.items():
            self.mending.dispatch_damaged(hour, error)
        for hour, (error, unread) in found.unloaded.items():
            self.mending.schedule_damaged(hour, error, unread)
        if found.seals_damage is not None:
            self.mending.seals_damaged(found.seals_damage)

    def when_filed(self, done: Callable[[], None]) -> None:
        """Call back when a checkpoint covers everything that is durable now."""
        self.checkpointer.when_covers(self._intake.durable.offset, done)


class Asked:
    """What clients and operators ask for, besides sends: rows that end, quotas, and the end of the server itself."""

    def __init__(self, ground: Ground, logs: Logs, memory: Memory, handoff: Handoff, upkeep: Upkeep) -> None:
        site, around, ledger = ground.site, ground.around, memory.ledger
        self.fence = ground.fence
        self.endings = Endings(
            site,
            EndingBooks(
                fence=ground.fence,
                intake=logs.intake,
                ledger=ledger,
                sources=logs.sources,
                keys=logs.keys,
                producers=logs.producers,
            ),
            around.ask_slots,
        )
        self.endings.carriers.draw = around.random_id
        for subject, rows in ((RECURRING, self.endings.carriers.rows), (RECORD, self.endings.records)):
            rows.due = partial(handoff.dispatcher.own, subject)
            handoff.dispatcher.on_own[subject] = rows.come
        handoff.targets.on_restored = self.endings.carriers.restored
        self.endings.overlaps.dispatcher = handoff.dispatcher
        handoff.dispatcher.on_ready = self.endings.carriers.targets_changed
        self.endings.drain.draw = around.random_id
        self.endings.drain.when_filed = upkeep.when_filed
        self.quotas = Quotas(
            site,
            QuotaSources(
                log=ground.found.log,
                filed=memory.filed,
                outcomes=logs.outcomes,
                checkpointer=upkeep.checkpointer,
                intake=logs.intake,
                ended=ledger.owed.parts,
                peers=lambda: self.endings.owned_slots.claims.peers,
            ),
            ground.config.horizon_days * DAY_MS,
        )
        if ground.found.replayed.has_letters or memory.filed.have(HAD_DEAD_LETTERS):
            self.quotas.count_dead_letters()
        logs.outcomes.on_ended = ledger.owed.on_ended = self.quotas.ended
        self.rebuild = Rebuild(site, logs.keys, LogsOfHours(memory.filed, lambda: logs.outcomes.ends, ledger.owed.all))


class Repair:
    """Files and values that someone has changed: they are noticed, and operators decide about them."""

    def __init__(self, ground: Ground, logs: Logs, memory: Memory, handoff: Handoff, upkeep: Upkeep) -> None:
        site, found, threads, quarantine = ground.site, ground.found, ground.threads, memory.quarantine
        self._held = memory.held
        values = LostValues(site, quarantine, handoff.dispatcher, logs.producers)
        values.found(found.kept.producers_lost, found.kept.targets_lost)
        self._log_watch = LogWatch(
            message_log=found.log,
            append=threads.commit.submit,
            worker=threads.worker,
            alarms=site.alarms,
            on_files=OnFiles(
                put=partial(quarantine.put, SetAsideKind.LOG),
                lift=partial(quarantine.lift, SetAsideKind.LOG),
                rolled=partial(upkeep.when_filed, _nobody_waits),
            ),
        )
        mending = upkeep.mending
        file_watch = FileWatch(
            site, found.kept.hours, logs.outcomes.ends, found.sealed_ends, quarantine, mending.schedule_damaged
        )
        self.words = OperatorWords(
            quarantine,
            logs.intake.control,
            {
                SetAsideKind.SCHEDULE: mending.obey,
                SetAsideKind.DISPATCH: mending.obey,
                SetAsideKind.ROWS: self._obey_about_rows,
                SetAsideKind.SEALED: file_watch.obey,
                SetAsideKind.SEAL: mending.obey,
                SetAsideKind.LOG: lambda entry, drop, done: self._log_watch.look(done),
                SetAsideKind.TARGET: values.release_target,
                SetAsideKind.PRODUCER: values.release_producer,
            },
        )

    def _obey_about_rows(self, entry: SetAsideEntry, drop: bool, done: OnWord) -> None:
        obey = partial(self._held.obey, entry, drop, done)
        if entry.name == MESSAGE_LOG and not drop:
            # A copy may have been put in the place of a file of the message log: the log takes it first.
            self._log_watch.look(lambda whole, found: obey())
        else:
            obey()


def _earlier_until_ms(clock: Clock, appended_at_ms: int) -> int:
    """How far earlier lives may have come: rows that are due later were not sent by them (rule H5)."""
    until_ms = clock.earlier_until_ms
    if until_ms is None:
        # They append when an hour has passed, also when they have nothing to do.
        until_ms = hour_start_ms(hour_of_ms(appended_at_ms) + 1)
    return max(clock.now_ms(), appended_at_ms, until_ms)


def _open_keys(site: Site, found: Recovered, random_seed: Callable[[], int]) -> KeyIndex:
    """Open the index of keys, and add the rows above the checkpoint to it."""
    known = found.kept.keys
    if known is None:
        known = KnownRuns(random_seed(), FIRST_NUMBER, whole=not found.kept.keys_lost)
    opened = open_index(site.disk, site.folder, site.log_id, known)
    if not opened.known.whole:
        log.warning("keys_not_whole reason='the index is made again from the logs'")
    elif opened.damage is not None:
        log.critical("keys_damaged reason=%r", str(opened.damage))
    keys = KeyIndex(site, opened, found.kept.files.all)
    for rows in found.replayed.keyed:
        keys.add(rows)
    return keys


def _nobody_waits() -> None:
    """A checkpoint is wanted for its own sake."""
