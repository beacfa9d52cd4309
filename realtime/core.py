"""The realtime server's core: it takes requests, gives answers and does what is due by the clock; it does no I/O of its
own.

The loop owns all state; commits of the message log, fsyncs of the pull log and checkpoints run on three executors, and
each comes back with one call. A batch is indexed, and offered to consumers, only when it is durable.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from delayd.config import RealtimeConfig
from delayd.errors import (
    DelaydError,
    ServerStopped,
    Stopping,
)
from delayd.log.log import Log, write_again
from delayd.machine.alarms import NEVER_MS, Alarms
from delayd.machine.clock import JudgedClock
from delayd.machine.disk import Disk
from delayd.machine.executor import Executor
from delayd.machine.identity import Site
from delayd.machine.operating import CLOCK_UNCONFIRMED, Fence, Wait, WaitKind
from delayd.machine.state import State
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.requests import RequestType, not_served
from delayd.wire.status import status_head

from .checkpoint import Checkpointer, Snapshot, Snapshots
from .closed import ClosedSegments, SegmentIndexes
from .commit import Commit, GroupCommit, PullCommit
from .consumers import Consumers, Joins
from .delay_servers import DelayServers, Reserve
from .group_records import GroupRecords
from .handoff import Peer
from .index import Subject
from .kept import Marks
from .operators import Operators
from .pulls import Pulls
from .rebuild import Rebuilder
from .recovery import Recovered
from .retention import Trimming, Unseen, remove_old
from .retries import Retries
from .unread import LogFiles, OnCheckpoint, Unread

log = logging.getLogger(__name__)


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
        identity = recovered.identity
        disk, state, clock, executors = around.disk, around.state, around.clock, around.executors
        alarms = self._alarms = Alarms(clock)
        site = Site(disk, state, config.folder, identity, alarms, executors.work)
        # The fields that the shell adds to STATUS, about its connections and its loop.
        self.shell_status: Callable[[], Head] = dict
        self.shell_waits: Callable[[], Iterator[Wait]] = lambda: iter(())
        self.log_id = identity.log_id
        self.epoch = identity.epoch
        self.counters = dict.fromkeys(("frames", "batches", "messages"), 0)
        self.started_at_ms = clock.now_ms()
        self.fence = Fence("realtime", identity.log_id)
        self.cluster_id: Callable[[], int] = lambda: 0  # The shell learns it from meta.
        self._config = config
        self._clock = clock
        self._executors = executors
        self._state, self._store = recovered, state
        self._index, self._stored, self._origins = recovered.index, recovered.stored, recovered.origins
        self._on_failure = on_failure
        self._commit = GroupCommit(
            recovered.message_log,
            executors.commit,
            alarms,
            identity.epoch,
            recovered.next_sequence,
            recovered.appended_at_ms,
        )
        self._commit.on_commit, self._commit.on_failure = self._committed, self.fail
        self._pull_log = PullCommit(executors.pull, clock, identity.epoch)
        self._pull_log.on_failure = self.fail
        self._pulls = Pulls(identity.log_id, identity.epoch, self._index, self._stored, self._pull_log, alarms)
        self._led = self._pulls.leads.of_peer
        self._groups = GroupRecords(self._pulls, self._index, self._stored, self._pull_log, alarms)
        self._joins = Joins(self._pulls, self._groups, self._index, alarms)
        self._index.on_subject = self._joins.came
        self._unseen = Unseen(self._index, self._groups.roster.has, config.retention_ms)
        self._indexed_offset, self._indexed_crc32c = recovered.message_log.end, recovered.message_log.crc32c
        self._next_sequence = recovered.next_sequence
        self._checkpoints = Checkpointer(
            site, self._index, recovered.marks, config.checkpoint_every_ms, config.checkpoint_bytes
        )
        self._checkpoints.on_failure = self.fail
        self._rebuilder = Rebuilder(disk, self._index, recovered.message_log, executors.work, alarms)
        self._rebuilder.on_rebuilt = self._rebuilt
        self._index.on_damage = self._rebuilder.want
        self._told_of: list[OnCheckpoint] = []  # Callbacks for the next checkpoint that begins.
        self._tells: list[OnCheckpoint] = []  # Callbacks for the checkpoint that is under way.
        self._stopping: Callable[[], None] | None = None
        self._last_checkpoint = False
        self._trimming = Trimming(self._index, disk, executors.work)
        self._failed = False
        self._rebuilder.begin(lambda: self._checkpoints.last.indexed_offset)
        self._files = LogFiles(site, recovered, alarms, executors.commit)
        self._files.on_whole = self._pulls.quarantine.try_soon
        self._files.on_pull_log_rolled = self.checkpoint
        self._unread = Unread(site, recovered, alarms, around.begin_anew)
        self._unread.on_checkpoint_wanted = self._tell_of_checkpoint
        indexes = SegmentIndexes(disk, recovered.message_log.place, recovered.identity.epoch)
        self._closed = ClosedSegments(recovered.message_log, recovered.tally_log, indexes, executors.work, alarms)
        self._closed.on_failure = self.fail
        self._snapshots = Snapshots(recovered, self._groups, self._closed, clock, config.retention_ms)
        self._operators = Operators(self._groups, self._pulls.quarantine, self._rebuilder, self._files, self._unread)
        reserve = self._reserve = Reserve(disk, config.folder, config.free_bytes_all, clock)
        self._delay_servers = DelayServers(recovered, self._commit, self._unread, reserve)
        self.retries = Retries(self.log_id, self._groups, self._pulls, self._stored, self._pull_log)
        consumers = Consumers(config, self._pulls, self._groups, self.retries, self._stored)
        self._handlers: dict[int, Callable[[Peer, Frame], None]] = {
            RequestType.PING: self._ping,
            RequestType.STATUS: self._status,
            RequestType.TRUST_CLOCK: self._trust_clock,
            RequestType.HELLO: self._delay_servers.hello,
            RequestType.DISPATCH: self._delay_servers.dispatch,
            RequestType.ORIGIN_ACCEPT: self._delay_servers.accept,
            RequestType.MEND_LIST: self._operators.list,
            RequestType.MEND: self._operators.mend,
            RequestType.SUBJECTS: consumers.subjects,
        }
        of_groups: dict[int, Callable[[Peer, Frame], None]] = {
            RequestType.SUBSCRIBE: self._joins.subscribe,
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
        }
        replay, pull_log = recovered.pulls, recovered.pull_log
        if replay is None or pull_log is None:
            # No group is known.
            of_groups = dict.fromkeys(of_groups, lambda peer, frame: self._unread.check_pulls())
        else:
            replay.begin_life(self.epoch)
            if recovered.message_log.start:
                replay.settle_starts()
            self._pull_log.begin(pull_log, replay.appended_at_ms)
            self._groups.begin(replay)
            self.retries.begin()
        self._handlers.update(of_groups)

    @property
    def groups(self) -> GroupRecords:
        """Makes and ends groups."""
        return self._groups

    def serve_too(self, handlers: Mapping[int, Callable[[Peer, Frame], None]]) -> None:
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

    def disconnected(self, peer: Peer) -> None:
        """Forget a connection that has ended: nothing is delivered to its waiting requests."""
        self._origins.disconnected(peer)
        self._groups.ephemeral.disconnected(peer)
        self._pulls.disconnected(peer)

    def stood_still(self, ms: int) -> None:
        """No consumer could say anything, and no file could change, for so long."""
        self._alarms.stood_still(ms)
        self._pulls.leads.stood_still(ms)
        self._groups.ephemeral.stood_still(ms)

    def unheard(self, ms: int) -> None:
        """No consumer could be heard for so long, because this server stood still (rule T5)."""
        self._pulls.unheard(ms)
        self._pulls.leads.unheard(ms)
        self._groups.ephemeral.stood_still(ms)

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
        self._closed.hurry()
        self.checkpoint()

    def checkpoint(self) -> None:
        """Take a checkpoint, unless one is under way."""
        if self._checkpoints.under_way or self._failed:
            return
        self._tells, self._told_of = self._told_of, []
        self._checkpoints.begin()
        self._snapshots.begin(self._marks())
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
        for each in self._logs():
            write_again(each.segments)
            each.close()
        self._closed.close()
        self._checkpoints.close()

    def fail(self, error: BaseException) -> None:
        """Serve nothing any more: nobody knows what is durable, or the logs can't grow."""
        if not self._failed:
            self._failed = True
            self._on_failure(error)

    def _committed(self, commit: Commit) -> None:
        """Index batches that became durable, answer for them, and serve the consumers that wait."""
        self._indexed_offset, self._indexed_crc32c = commit.end, commit.crc32c
        self._next_sequence = commit.next_sequence
        for note in commit.notes:
            # Notes come first: a greeting of the same delay server in this commit was queued after the note, because
            # earlier ones were dropped.
            note.origin.accepted()
            note.durable()
        for greeting in commit.greetings:
            self._delay_servers.welcome(greeting, commit.end)
        touched: dict[Subject, None] = {}
        for landed in commit.landed:
            rows: list[list[int]] = []
            frame, origin = landed.frame, landed.frame.origin
            for batch, part, offset, group_offset in zip(
                frame.batches, frame.parts, landed.offsets, landed.group_offsets, strict=True
            ):
                subject = self._index.subject_of(batch)
                subject.add(offset, batch.count, batch.total_bytes)
                self._stored.add(offset, batch)
                origin.expected.discard((part.epoch, part.batch_id))
                origin.remember(batch, part, offset, group_offset, commit.appended_at_ms)
                touched[subject] = None
                rows.append([part.batch_id, offset])
                self.counters["messages"] += batch.count
            self.counters["frames"] += 1
            self.counters["batches"] += len(rows)
            answer: Head = {"log_id": self.log_id, "appended_at_ms": commit.appended_at_ms, "batches": rows}
            frame.peer.answer(frame.request_id, answer)
        if self._stopping is not None:
            self._go_on_stopping()
            return
        if self._indexed_offset >= self._closed.rolls_at:
            self._closed.look()
        self._pulls.messages_came(touched)
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
        yield from self._closed.waits()
        if not self._clock.confirmed:
            yield WaitKind.CLOCK.wait(CLOCK_UNCONFIRMED, held="retention", role="realtime")

    def _status(self, peer: Peer, frame: Frame) -> None:
        own: dict[str, HeadValue] = {
            **self.shell_status(),
            "clock_confirmed": self._clock.confirmed,
            "fenced": self.fence.is_up,
            "end_offset": self._indexed_offset,
            "next_sequence": self._next_sequence,
            "indexed_offset": self._checkpoints.last.indexed_offset,
            "differing": self._closed.differing,
            "in_doubt": sum(len(origin.window) for origin in self._origins),
            "subjects": len(self._index),
            "groups": len(self._pulls.groups),
        }
        head = status_head(
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
        peer.answer(frame.request_id, head)

    # Checkpoints and the stop.

    def _pull_marks(self) -> tuple[int, int, int]:
        """Up to where a checkpoint covers the pull log; while that can't be read, the values of the last checkpoint."""
        if self._groups.roster.known:
            return self._pull_log.end, self._pull_log.crc32c, self._pulls.next_pull
        last = self._checkpoints.last
        return last.pull_offset, last.pull_crc32c, last.next_pull

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
            self._closed.end,
        )

    def _go_on_copying(self) -> None:
        snapshot = self._snapshots.step()
        if snapshot is None:
            return
        take = partial(self._checkpoints.take, snapshot, self._checkpointed)
        if self._groups.roster.known:
            # The transaction must not store a newer state of the groups than the durable pull log has.
            self._pull_log.when_durable(take)
        else:
            take()

    def _old_removed(self) -> None:
        self._unseen.removed()
        self._closed.sweep()
        self._trimming.begin()

    def _logs(self) -> list[Log]:
        """The open logs."""
        return [each for each in (self._state.message_log, self._state.pull_log) if each is not None]

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
        self._closed.look()  # The log may have rolled because a file was damaged.
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
