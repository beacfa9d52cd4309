"""The realtime server as judges see it: the one module that knows its insides, beside the bugs that are planted there.

Invariant: methods are named by what a judge wants. A server that is built anew needs this module anew, and no judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from delayd.config import RealtimeConfig
from delayd.machine.executor import Executor
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from delayd.wire.frame import Frame
from realtime.core import Core, Executors, Surroundings
from realtime.handoff import Peer
from realtime.recovery import recover
from realtime.words import SECRET_BITS

__all__ = ["GroupSeen", "Machine", "Peer", "RealtimeAdapter", "life_of"]

STATE = "/data/realtime/state"


class Machine(NamedTuple):
    """What a server runs on."""

    disk: MemoryDisk
    state: MemoryState
    clock: SimClock
    commit: Executor
    pulls: Executor
    work: Executor


class GroupSeen(NamedTuple):
    """How far a group has come: its oldest message that is not acknowledged, and the end of its subject."""

    subject: str
    oldest: int
    end: int


class RealtimeAdapter:
    """One life of a realtime server."""

    def __init__(
        self,
        config: RealtimeConfig,
        machine: Machine,
        log_id: int,
        failed: Callable[[BaseException], None],
        begin_anew: Callable[[str], None],
    ) -> None:
        """Start it, on whatever its disk and state hold; raises what the start meets. It says by ``begin_anew`` that it
        wants to be stopped, and started on what it leaves.
        """
        disk, state, clock, *threads = machine
        self.recovered = recover(config, disk, state, clock, lambda: log_id, STATE)
        around = Surroundings(disk, state, clock, Executors(*threads), begin_anew)
        self.core = Core(config, around, self.recovered, failed)

    @property
    def log_id(self) -> int:
        """Of its directory."""
        return self.core.log_id

    @property
    def epoch(self) -> int:
        """The number of this life."""
        return self.core.epoch

    # Its loop and its connections.

    def received(self, peer: Peer, frame: Frame) -> None:
        """Serve a request; a DelaydError that is raised is its answer."""
        self.core.received(peer, frame)

    def disconnected(self, peer: Peer) -> None:
        """A connection is gone."""
        self.core.disconnected(peer)

    def wake(self) -> None:
        """Do what is due."""
        self.core.wake()

    def next_wake_ms(self) -> int:
        """When something is due, in monotonic time."""
        return self.core.next_wake_ms()

    def checkpoint(self) -> None:
        """Begin a checkpoint."""
        self.core.checkpoint()

    def retain(self) -> None:
        """Begin to remove what is old."""
        self.core.retain()

    def stop(self, done: Callable[[], None]) -> None:
        """Stop cleanly."""
        self.core.stop(done)

    def close(self) -> None:
        """Close all files, after a stop."""
        self.core.close()

    # What it says of itself.

    def groups(self) -> Iterator[GroupSeen]:
        """All groups."""
        for group in self.core._pulls.groups.values():
            yield GroupSeen(group.subject.name, group.oldest, group.subject.end)

    def subjects_with_damage(self) -> list[str]:
        """The subject of each group that is told of damage."""
        pulls = self.core._pulls
        return [group.subject.name for group in pulls.groups.values() if pulls.quarantine.rows_of(group.subject)]

    def remembered(self) -> list[Peer]:
        """The connections for which something waits."""
        return self.core._pulls.waiting.peers

    @property
    def knows_its_consumers(self) -> bool:
        """Whether its pull log could be read."""
        return self.core._pulls.roster.known

    @property
    def makes_consume_logs(self) -> bool:
        """Whether a consume log is damaged, and made again."""
        return any(group.subject.damage is not None for group in self.core._pulls.groups.values())

    @property
    def leaving_below(self) -> int:
        """The offset below which retention has decided to remove."""
        return self.core._index.leaving_below

    @property
    def log_end(self) -> int:
        """Where its message log ends."""
        return self.core._commit._log.end

    # Delay servers.

    def decided_offset(self, delay_server: int) -> int:
        """The offset up to which it knows batches of a delay server to be decided; -1: it does not know that server."""
        origin = self.core._origins.known(delay_server)
        return -1 if origin is None else origin.decided_offset

    def is_connected_to(self, delay_server: int, epoch: int) -> bool:
        """Whether it has heard this very life of a delay server."""
        origin = self.core._origins.known(delay_server)
        return origin is not None and origin.epoch == epoch and origin.peer is not None

    def may_be_of(self, hours: Iterable[int], offset: int, delay_server: int) -> bool:
        """Whether a delay server's batch at an offset is of one of these hours; NotReady when that can't be read."""
        return self.core._stored.may_be_of(set(hours), offset, delay_server)


def life_of(incarnation: int) -> int:
    """The life of the server in which a consumer was given this incarnation."""
    return incarnation >> SECRET_BITS
