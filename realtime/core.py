"""The realtime server's core: it takes requests, gives answers and does what is due by the clock; it does no I/O of its
own.

The loop owns all state; commits of the message log, fsyncs of the pull log and checkpoints run on three executors, and
each comes back with one call. A batch is indexed, and offered to consumers, when it is written; its delay server is
answered when it is durable (rule L2). `Core` makes its parts in this order: the writer of the message log, `Consuming`,
`Housekeeping`, what can't be read, delay servers.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import nlargest

from delayd.config import RealtimeConfig
from delayd.errors import DelaydError, ServerStopped, Stopping
from delayd.log.log import write_again
from delayd.machine.alarms import NEVER_MS, Alarms
from delayd.machine.clock import JudgedClock
from delayd.machine.disk import Disk
from delayd.machine.executor import Executor
from delayd.machine.histogram import Histogram
from delayd.machine.identity import Site
from delayd.machine.operating import CLOCK_UNCONFIRMED, Fence, Wait, WaitKind
from delayd.machine.state import State
from delayd.wire.exposition import Family
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.metrics import (
    ALL_WAITING,
    LATE_DELIVERED,
    LATE_DURABLE,
    TOP,
    Asked,
    families_of,
    families_of_groups,
    family_of_lateness,
    family_of_logs,
    matches,
)
from delayd.wire.requests import RequestType, not_served
from delayd.wire.status import status_head

from .checkpoint import Checkpointer, Snapshot, Snapshots
from .commit import Commit, GroupCommit, PullCommit
from .consumers import Consumers, Joins, aged_group, waiting_for
from .delay_servers import DelayServers, SpaceLook
from .group_records import GroupRecords
from .groups import Group
from .handoff import Peer
from .kept import Marks
from .operators import Operators
from .pulls import Pulls
from .rebuild import Rebuilder
from .recovery import Recovered
from .removal import Trimming, Unseen, remove_old
from .retries import Retries
from .subject_index import Subject
from .unfinished import UnfinishedSearch
from .unread import LogFiles, OnCheckpoint, Unread

log = logging.getLogger(__name__)

Handler = Callable[[Peer, Frame], None]


@dataclass(frozen=True, slots=True)
class Executors:
    """Where the core's slow work runs: each in order, independent of the others."""

    commit: Executor
    pull: Executor
    work: Executor


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the core works with: where its directory lies, what time it is, and who does the slow work.
    ``begin_anew`` has the server begin anew in place, for the reason that it is given.
    """

    disk: Disk
    state: State
    clock: JudgedClock
    executors: Executors
    begin_anew: Callable[[str], None]


class Consuming:
    """The groups of consumers, and who serves them; `begin` is called when all parts are made."""

    def __init__(
        self, config: RealtimeConfig, site: Site, recovered: Recovered, pull: Executor, messages: GroupCommit
    ) -> None:
        alarms, index, stored = site.alarms, recovered.index, recovered.stored
        self.pull_log = PullCommit(pull, site.clock, site.epoch, messages)
        self.pulls = Pulls(recovered, self.pull_log, alarms)
        self.groups = GroupRecords(self.pulls, index, stored, self.pull_log, alarms)
        self.joins = Joins(self.pulls, self.groups, index, alarms)
        index.on_subject = self.joins.came
        self.retries = Retries(site.log_id, self.groups, self.pulls, stored, self.pull_log)
        self.consumers = Consumers(config, self.pulls, self.groups, self.retries, stored)

    def begin(self, recovered: Recovered) -> None:
        """Serve the groups that a start has found; without its pull log no group is known."""
        replay, pull_log = recovered.pulls, recovered.pull_log
        if replay is None or pull_log is None:
            return
        replay.begin_life(recovered.identity.epoch)
        if recovered.message_log.start:
            replay.settle_starts()
        self.pull_log.begin(pull_log, replay.appended_at_ms)
        self.groups.begin(replay)
        self.retries.begin()


class Housekeeping:
    """What keeps the directory: checkpoints, and the removal of what is old."""

    def __init__(
        self, config: RealtimeConfig, site: Site, recovered: Recovered, groups: GroupRecords, clock: JudgedClock
    ) -> None:
        index, marks = recovered.index, recovered.marks
        self.unseen = Unseen(index, groups.roster.has, config.retention_ms)
        self.checkpoints = Checkpointer(site, index, marks, config.checkpoint_every_ms, config.checkpoint_bytes)
        self.trimming = Trimming(index, site.disk, site.worker)
        self.snapshots = Snapshots(recovered, groups, clock, config.retention_ms)


class Core:
    """One realtime server, from its recovery to its stop.

    ``on_failure`` is called once, with the error after which the server must end.
    """

    def __init__(
        self,
        config: RealtimeConfig,
        around: Surroundings,
        recovered: Recovered,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        disk, clock, executors, identity = around.disk, around.clock, around.executors, recovered.identity
        self._clock, self._executors, self._state, self._store = clock, executors, recovered, around.state
        self._on_failure = on_failure
        self._failed = self._last_checkpoint = False
        self._stopping: Callable[[], None] | None = None
        self._told_of: list[OnCheckpoint] = []  # Callbacks for the next checkpoint that begins.
        self._tells: list[OnCheckpoint] = []  # Callbacks for the checkpoint that is under way.
        # The fields that the shell adds to STATUS, about its connections and its loop.
        self.shell_status: Callable[[], Head] = dict
        self.shell_waits: Callable[[], Iterator[Wait]] = lambda: iter(())
        self.cluster_id: Callable[[], int] = lambda: 0  # The shell learns it from meta.
        self.log_id, self.epoch, self.started_at_ms = identity.log_id, identity.epoch, clock.now_ms()
        self.counters = dict.fromkeys(("frames", "batches", "messages"), 0)
        self.durable = Histogram()  # How late each message was when it became durable here, in ms.
        self.fence = Fence("realtime", identity.log_id)
        self._index, self._stored, self._origins = recovered.index, recovered.stored, recovered.origins
        self._indexed_offset, self._indexed_crc32c = recovered.message_log.end, recovered.message_log.crc32c
        self._next_sequence = recovered.next_sequence
        alarms = self._alarms = Alarms(clock)
        site = Site(disk, around.state, config.folder, identity, alarms, executors.work)
        self._commit = GroupCommit(recovered, executors.commit, alarms, ahead=not config.offer_durable_only)
        self._commit.on_written, self._commit.on_durable = self._written, self._durable
        consuming = Consuming(config, site, recovered, executors.pull, self._commit)
        self._pull_log, self._pulls, self.groups = consuming.pull_log, consuming.pulls, consuming.groups
        self._led, self.retries = self._pulls.leads.of_peer, consuming.retries
        house = Housekeeping(config, site, recovered, self.groups, clock)
        self._checkpoints, self._snapshots = house.checkpoints, house.snapshots
        self._unseen, self._trimming = house.unseen, house.trimming
        for part in (self._commit, self._pull_log, self._checkpoints):
            part.on_failure = self.fail
        self._unread = Unread(site, recovered, self._tell_of_checkpoint, around.begin_anew)
        self._operators = self._open_repair(site)
        self._reserve = SpaceLook(disk, config.folder, config.free_bytes_all, clock)
        self._delay_servers = DelayServers(recovered, self._commit, self._unread, self._reserve)
        consuming.begin(recovered)
        self._handlers = self._served(consuming.consumers, consuming.joins)

    def _open_repair(self, site: Site) -> Operators:
        """Notice files that can't be read, or go, and what operators decide about them."""
        recovered, quarantine = self._state, self._pulls.quarantine
        rebuilder = Rebuilder(site, self._index, recovered.message_log, self._checkpoints, self._rebuilt)
        self._index.on_damage = rebuilder.want
        files = LogFiles(site, recovered, self._executors.commit, quarantine.try_soon, self.checkpoint)
        return Operators(self.groups, quarantine, rebuilder, files, self._unread)

    def _served(self, consumers: Consumers, joins: Joins) -> dict[int, Handler]:
        """Who serves each type of request; those about groups are refused while nobody knows which there are."""
        known = self._index, self._stored, self._clock
        search = UnfinishedSearch(self.log_id, self.groups, self._pull_log, *known)
        of_groups: dict[int, Handler] = {
            RequestType.SUBSCRIBE: joins.subscribe,
            RequestType.PULL: consumers.pull,
            RequestType.ACK: consumers.ack,
            RequestType.NACK: consumers.nack,
            RequestType.EXTEND: consumers.extend,
            RequestType.RETRY: consumers.retry,
            RequestType.REJECT: consumers.reject,
            RequestType.PULL_END: consumers.pull_end,
            RequestType.GROUPS: consumers.groups,
            RequestType.DELETE_GROUP: self._operators.delete_group,
            RequestType.MOVE_GROUP: self._operators.move_group,
            RequestType.PAUSE_GROUP: self._operators.pause_group,
            RequestType.UNFINISHED: search.answer,
        }
        if not self.groups.roster.known:
            of_groups = dict.fromkeys(of_groups, lambda peer, frame: self._unread.check_pulls())
        return {
            RequestType.PING: self._ping,
            RequestType.STATUS: self._status,
            RequestType.TRUST_CLOCK: self._trust_clock,
            RequestType.HELLO: self._delay_servers.hello,
            RequestType.DISPATCH: self._delay_servers.dispatch,
            RequestType.ORIGIN_ACCEPT: self._delay_servers.accept,
            RequestType.MEND_LIST: self._operators.list,
            RequestType.MEND: self._operators.mend,
            RequestType.SUBJECTS: consumers.subjects,
            **of_groups,
        }

    def serve_too(self, handlers: Mapping[int, Handler]) -> None:
        """Have requests that concern the directory, and not the core, served like all others."""
        self._handlers.update(handlers)

    def received(self, peer: Peer, frame: Frame) -> None:
        """Serve a request, now or later; a DelaydError raised here is its answer."""
        if self._stopping is not None or self._failed:
            raise Stopping("this realtime server is stopping")
        if peer in self._led:
            self._pulls.leads.heard(peer)
        handler = self._handlers.get(frame.type)
        if handler is None:
            raise not_served("realtime", frame.type)
        try:
            handler(peer, frame)
        except ServerStopped as error:
            self.fail(error)
            raise

    def may_be_a_copy(self) -> None:
        """This directory was moved, restored or copied, or may have been: no group gets an id that the files may have
        given which this directory does not have.
        """
        try:
            self.groups.leave_ids_out()
        except ServerStopped as error:
            self.fail(error)

    def disconnected(self, peer: Peer) -> None:
        """Forget a connection that has ended: nothing is delivered to its waiting requests."""
        self._origins.disconnected(peer)
        self.groups.ephemeral.disconnected(peer)
        self._pulls.disconnected(peer)

    def stood_still(self, ms: int) -> None:
        """No consumer could say anything, and no file could change, for so long."""
        self._alarms.stood_still(ms)
        self._pulls.leads.stood_still(ms)
        self.groups.ephemeral.stood_still(ms)

    def unheard(self, ms: int) -> None:
        """No consumer could be heard for so long, because this server stood still (rule T5)."""
        self._clock.stood_still(ms)
        self._pulls.unheard(ms)
        self._pulls.leads.unheard(ms)
        self.groups.ephemeral.stood_still(ms)

    def next_wake_ms(self, before_ms: int = NEVER_MS) -> int:
        """When `wake` is next needed, monotonic; an answer of ``before_ms`` or later says only that it is not needed
        before.

        This is called after every frame, so anything that is due later than the timer is set for is not computed
        exactly.
        """
        if self._snapshots.copying is not None or self._snapshots.forgetting or self._trimming.left:
            return self._clock.monotonic_ms()
        wake_ms = self._checkpoints.due_ms
        if self._stopping is None:  # A server that stops ends no leases, and tries nothing again.
            for time_ms in (self._alarms.next_ms(before_ms), self._pulls.next_wake_ms(before_ms)):
                if time_ms is not None and time_ms < wake_ms:
                    wake_ms = time_ms
        return wake_ms

    def next_offer_ms(self) -> int | None:
        """When a lease or a pause ends next, monotonic."""
        return self._pulls.next_offer_ms()

    def wake(self) -> None:
        """Do everything that is due by the clock."""
        if self._failed:
            return
        if self._snapshots.copying is not None:
            self._go_on_copying()
        if self._snapshots.forgetting:
            self._snapshots.forget_some()
        if self._trimming.left:
            self._trimming.step()
        if self._stopping is None:
            self._alarms.ring()
            self._pulls.wake()
        if self._checkpoints.is_due(self._indexed_offset):
            self.checkpoint()

    def retain(self) -> None:
        """Take a checkpoint, and then remove what retention allows; housekeeping calls this (rule T3)."""
        self._snapshots.retention_wanted = True
        self._unseen.look()
        self.checkpoint()

    def checkpoint(self) -> None:
        """Take a checkpoint, unless one is under way."""
        if self._checkpoints.under_way or self._failed:
            return
        self._tells, self._told_of = self._told_of, []
        self._checkpoints.begin()
        self._snapshots.begin(self._marks(), ends=self._last_checkpoint)
        self._go_on_copying()

    def _tell_of_checkpoint(self, heard: OnCheckpoint) -> None:
        """Call back with the result of a checkpoint that begins from now on."""
        self._told_of.append(heard)
        self.checkpoint()

    def stop(self, stopped: Callable[[], None]) -> None:
        """Take no more requests, finish what is under way, take a checkpoint, then call back."""
        self._stopping = stopped
        self._pulls.refuse_waiting(Stopping("this realtime server is stopping"))
        self._go_on_stopping()

    def close(self) -> None:
        """Write removed files again and close all, after the executors have ended."""
        for each in (self._state.message_log, self._state.pull_log):
            if each is not None:
                write_again(each.segments)
                each.close()
        self._checkpoints.close()

    def fail(self, error: BaseException) -> None:
        """Serve nothing any more: nobody knows what is durable, or the logs can't grow."""
        if not self._failed:
            self._failed = True
            self._on_failure(error)

    def _written(self, commit: Commit) -> None:
        """Index batches that are written, and serve the consumers that wait for them."""
        self._indexed_offset, self._indexed_crc32c = commit.end, commit.crc32c
        self._next_sequence = commit.next_sequence
        touched: dict[Subject, None] = {}
        for landed in commit.landed:
            frame, origin = landed.frame, landed.frame.origin
            for batch, part, offset, group_offset in zip(
                frame.batches, frame.parts, landed.offsets, landed.group_offsets, strict=True
            ):
                subject = self._index.subject_of(batch)
                subject.add(offset, batch.count, batch.total_bytes)
                self._stored.add(offset, batch)
                # A checkpoint that counts the batch must count it as in doubt, too.
                origin.expected.discard((part.epoch, part.batch_id))
                origin.remember(batch, part, offset, group_offset, commit.appended_at_ms)
                touched[subject] = None
                self.counters["messages"] += batch.count
        if self._stopping is None:
            self._pulls.messages_came(touched)

    def _durable(self, commit: Commit) -> None:
        """Answer for what became durable."""
        for note in commit.notes:
            # Notes come first: a greeting of the same delay server in this commit was queued after the note, because
            # earlier ones were dropped.
            note.origin.accepted()
            note.durable()
        for greeting in commit.greetings:
            self._delay_servers.welcome(greeting, commit.end)
        now_ms = self._clock.now_ms()
        for landed in commit.landed:
            frame = landed.frame
            for batch in frame.batches:
                self.durable.late(batch.due_column(0, batch.count), now_ms)
            rows = [[part.batch_id, offset] for part, offset in zip(frame.parts, landed.offsets, strict=True)]
            self.counters["frames"] += 1
            self.counters["batches"] += len(rows)
            answer: Head = {"log_id": self.log_id, "appended_at_ms": commit.appended_at_ms, "batches": rows}
            frame.peer.answer(frame.request_id, answer)
        if self._stopping is not None:
            self._go_on_stopping()
            return
        if self._checkpoints.is_due(self._indexed_offset):
            self.checkpoint()

    # Any server.

    def _ping(self, peer: Peer, frame: Frame) -> None:
        peer.answer(frame.request_id, {"now_ms": self._clock.now_ms()})

    def _trust_clock(self, peer: Peer, frame: Frame) -> None:
        self._clock.trust()
        log.warning("clock_trusted now_ms=%d", self._clock.now_ms())
        self._ping(peer, frame)

    def waits(self) -> Iterator[Wait]:
        """List the states that only an operator can end."""
        yield from [*self.fence.waits(), *self._store.waits()]
        yield from self._delay_servers.waits()
        yield from self._operators.waits(self.log_id)
        yield from self.retries.waits()
        yield from self.shell_waits()
        if not self._clock.confirmed:
            yield WaitKind.CLOCK.wait(CLOCK_UNCONFIRMED, held="retention", role="realtime")

    def _status(self, peer: Peer, frame: Frame) -> None:
        peer.answer(frame.request_id, self.status())

    def status(self) -> Head:
        """What it says of itself."""
        own: dict[str, HeadValue] = {
            **self.shell_status(),
            "clock_confirmed": self._clock.confirmed,
            "fenced": self.fence.is_up,
            "end_offset": self._commit.durable,
            "next_sequence": self._next_sequence,
            "indexed_offset": self._checkpoints.last.indexed_offset,
            "in_doubt": sum(len(origin.window) for origin in self._origins),
            "subjects": len(self._index),
            "groups": len(self._pulls.groups),
        }
        return status_head(
            role="realtime",
            log_id=self.log_id,
            epoch=self.epoch,
            cluster_id=self.cluster_id(),
            pid=os.getpid(),
            started_at_ms=self.started_at_ms,
            now_ms=self._clock.now_ms(),
            counters={
                **self.counters,
                **self._delay_servers.counters,
                **self._pulls.counters,
                **self.retries.counters,
                **self.retries.undone(),
                "waiting_pulls": self._pulls.waiting.count,
                "leads": len(self._led),
                "checkpoints": self._checkpoints.published,
                "free_bytes": self._reserve.free_bytes,
                "kept_bytes": self._state.message_log.end - self._state.message_log.start,
            },
            waits=self.waits(),
            own=own,
        )

    def families(self) -> Iterator[Family]:
        """Its metrics, with those of the groups that have most messages waiting."""
        name, now_ms = f"{self.log_id:016x}", self._clock.now_ms()
        yield from families_of([Asked("realtime", name, self.status())])
        logs = self._commit, self._pull_log
        yield family_of_logs("realtime", name, [(each.name, each.took.counted()) for each in logs])
        yield family_of_lateness(LATE_DURABLE, "realtime", name, self.durable.counted())
        yield family_of_lateness(LATE_DELIVERED, "realtime", name, self._pulls.delivered.counted())
        waiting = [(waiting_for(group), number, group) for number, group in enumerate(self._listed_groups())]
        yield Family(ALL_WAITING, [(("realtime", name), sum([messages for messages, _, _ in waiting]))])
        top = [aged_group(self._index, self._stored, now_ms, group) for _, _, group in nlargest(TOP, waiting)]
        yield from families_of_groups(lambda: [(name, group) for group in top])

    def families_by_subject(self, pattern: str) -> Iterator[Family]:
        """What there is for each group whose subject fits a pattern; made as it is taken."""
        name, now_ms, fits = f"{self.log_id:016x}", self._clock.now_ms(), matches(pattern)
        found = [group for group in self._listed_groups() if fits(group.subject.name)]
        aged = partial(aged_group, self._index, self._stored, now_ms)
        yield from families_of_groups(lambda: ((name, aged(group)) for group in found))

    def _listed_groups(self) -> Iterator[Group]:
        return self._pulls.roster.listed(None, ("", ""))

    # Checkpoints and the stop.

    def _pull_marks(self) -> tuple[int, int, int, int]:
        """Up to where a checkpoint covers the pull log; while that can't be read, the values of the last checkpoint."""
        if self.groups.roster.known:
            next_ids = self._pulls.next_pull, self.groups.roster.next_id
            return self._pull_log.end, self._pull_log.crc32c, *next_ids
        last = self._checkpoints.last
        return last.pull_offset, last.pull_crc32c, last.next_pull, last.next_group

    def _marks(self) -> Marks:
        """How far a checkpoint that begins now covers each log."""
        unread = self._unread.window_offset(self._indexed_offset)
        return Marks(
            self._indexed_offset,
            self._indexed_crc32c,
            self._next_sequence,
            self._origins.window_offset(self._indexed_offset) if unread is None else unread,
            *self._pull_marks(),
            self._checkpoints.last.kept_from,
        )

    def _go_on_copying(self) -> None:
        snapshot = self._snapshots.step()
        if snapshot is None:
            return
        take = partial(self._checkpoints.take, snapshot, self._checkpointed)
        if self.groups.roster.known:
            # The transaction must not store a newer state of the groups than the durable pull log has, nor count
            # messages that the message log may lose.
            self._pull_log.when_durable(take)
        else:
            self._commit.when_durable(self._commit.end, take)

    def _old_removed(self) -> None:
        self._unseen.removed()
        self._trimming.begin()

    def _rebuilt(self, subject: Subject) -> None:
        """A consume log is whole again: serve the pulls that waited for it."""
        if self._stopping is None:
            self._pulls.rebuilt(subject)

    def _checkpointed(self, snapshot: Snapshot, error: DelaydError | None) -> None:
        if error is not None:
            self._snapshots.refused(snapshot)
        else:
            self._snapshots.stored(snapshot)
            executors = self._executors
            remove_old(self._state, executors.commit, executors.work, snapshot, self._old_removed)
        tells, self._tells = self._tells, []
        for tell in tells:
            # The state may hold a checkpoint that was not published.
            tell(None if snapshot.counted else error)
        if self._told_of and self._stopping is None:
            self.checkpoint()
        self._go_on_stopping()

    def _go_on_stopping(self) -> None:
        if self._stopping is None or self._checkpoints.under_way or not self._commit.settled:
            return
        if self._last_checkpoint:
            self._stopping()
            return
        self._last_checkpoint = True
        self.checkpoint()
