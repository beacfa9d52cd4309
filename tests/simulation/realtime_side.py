"""A realtime server in a simulated cluster: the real core over a fake disk, through all its lives.

Invariant: what it holds is read from its files, as an independent reader would, and never from the core's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random

from delayd.batch.columns import ColumnId
from delayd.config import RealtimeConfig
from delayd.errors import BatchMalformed, DamagedData, DiskFull, ServerStopped
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.segment import FileKind
from delayd.testing.clock import SimClock, SimMachine
from delayd.testing.disk import Crash, MemoryDisk
from delayd.testing.state import MemoryState
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Frame, HeadValue
from delayd.wire.heads import need_u64
from delayd.wire.requests import RequestType
from tests.batches import bodies_of
from tests.simulation.damage import Damages
from tests.simulation.moves import Move, Threads
from tests.simulation.network import Network, ServedEnd
from tests.simulation.readings import Readings
from tests.simulation.threads import SteppedExecutor, Turns
from tests.worlds.realtime_adapter import Machine, RealtimeAdapter
from tests.worlds.target import Kept

DATA = "/data"
MESSAGE_LOG = "/data/realtime/message"
THREADS = ("commit", "pull", "work")
LEASE_MS = 2_000
STOP_STEPS = 200


class RealtimeLife:
    """One life: a listener of the network, until it dies."""

    def __init__(self, side: RealtimeSide) -> None:
        self.clock = SimClock(machine=side.machine, previous=side.clock.restart_evidence())
        self.disk = side.disk
        self.turns = Turns(side.disk, Random(side.random.randrange(1 << 16)))
        self.threads = tuple(SteppedExecutor(self.turns) for _ in THREADS)
        self.failure: BaseException | None = None
        side.disk.make_folder(side.config.folder)
        machine = Machine(side.disk, side.state, self.clock, *self.threads)
        self.server = RealtimeAdapter(side.config, machine, side.log_id, self._failed, self._begin_anew)
        self._begins_anew = False
        self.retaining = False  # Whether segments may be removed by what the worker does next.
        self.own = Threads(side.name, list(zip(THREADS, self.threads, strict=True)))
        self.own.wrap(self._guarded)
        self._side = side
        wakes = f"{side.name} wakes"
        self._wakes = Move(wakes, partial(self._guarded, wakes, self.server.wake))

    def received(self, peer: ServedEnd, frame: Frame) -> None:
        """A request has arrived; what a delay server hands over is never malformed, nor a number sent before."""
        try:
            self.server.received(peer, frame)
        except BatchMalformed as error:
            if peer.hostile:
                raise
            raise AssertionError(f"a realtime server refuses a batch: {error}") from error

    def disconnected(self, peer: ServedEnd) -> None:
        """A connection is gone."""
        self.server.disconnected(peer)

    def answers(self, asked: Frame, head: Mapping[str, HeadValue]) -> None:
        """An answer leaves; hellos that are answered rise, over all lives of this server (rule H3)."""
        if asked.type == RequestType.HELLO and "end_offset" in head:
            heard = (need_u64(asked.head, "epoch"), need_u64(asked.head, "session"))
            origin = need_u64(asked.head, "log_id")
            newest, request_id = self._side.greeted.get(origin, ((0, 0), 0))
            assert heard > newest or (heard == newest and request_id == asked.request_id), (
                f"the hello of epoch and session {heard} is answered after that of {newest}"
            )
            self._side.greeted[origin] = (heard, asked.request_id)

    def moves(self) -> Iterator[Move]:
        """What may happen next by itself; nothing once it has stopped."""
        if self.failure is not None:
            return
        yield from self.own.moves()
        if self._begins_anew:
            yield Move(f"{self._side.name} begins anew", self._side.begin_anew)
        if self.server.next_wake_ms() <= self.clock.monotonic_ms():
            yield self._wakes

    def _guarded(self, what: str, do: Callable[[], None]) -> None:
        if self.retaining and what == self._side.removes:
            self._side.log()
        try:
            do()
        except ServerStopped as error:
            # Raised to the program, which ends with it.
            self.failure = error
        self._side.look_at_retention()

    def _failed(self, error: BaseException) -> None:
        self.failure = error

    def _begin_anew(self, why: str) -> None:
        self._begins_anew = True


class RealtimeSide:
    """One realtime server: what survives its lives, and the life that it is in, if any."""

    def __init__(self, log_id: int, machine: SimMachine, network: Network, random: Random) -> None:
        self.log_id = log_id
        self.name = f"realtime-{log_id:x}"
        self.place = self.name
        self.machine = machine
        self.random = random
        self.clock = SimClock(machine=machine)
        self.disk = MemoryDisk()
        self.state = MemoryState(self.disk)
        self.config = RealtimeConfig(data=DATA, **settings_of(random))  # type: ignore[arg-type]
        self.life: RealtimeLife | None = None
        self.damages = Damages()
        # By delay server, epoch and session of the newest hello that was answered, and its request.
        self.greeted: dict[int, tuple[tuple[int, int], int]] = {}
        self.lost_power = False  # Whether it did since its last start.
        self.leaving_below = 0
        self.removed: dict[int, Kept] = {}  # By offset, what retention took away.
        self.removes = f"{self.name} runs a work job"
        self._network = network
        self._readings = Readings(FileKind.REALTIME, log_id, _decode)
        self._start = 0
        self._last: list[Kept] = []

    def start(self) -> None:
        """Begin the next life; raises what the start meets."""
        self.life = RealtimeLife(self)
        self.clock = self.life.clock
        self.listen()

    def listen(self) -> None:
        """Listen at the present place."""
        if self.life is not None:
            self._network.listeners[self.place] = self.life

    def move(self, place: str) -> None:
        """Listen elsewhere from now on; connections that stand are kept."""
        if self.life is not None and self._network.listeners.get(self.place) is self.life:
            del self._network.listeners[self.place]
        self.place = place
        self.listen()

    def die(self, way: PowerLoss | None, seed: int) -> None:
        """Die now; None is a SIGKILL. A side that is down may die again: in the middle of its start."""
        life, self.life = self.life, None
        self.lost_power |= way is not None
        if life is not None:
            self._network.process_died(life)
        self.disk = self.disk.after_kill() if way is None else self.disk.after_crash(way, seed)
        self.state = self.state.after_crash(self.disk)
        if life is not None:
            life.own.die()

    def stop(self, way: PowerLoss | None, seed: int) -> bool:
        """Stop cleanly, if the disk lets it, and lose power after that; whether the stop came to its end."""
        life = self.life
        if life is None:
            return False
        ends: list[bool] = []
        if life.retaining:
            self.log()  # A removal that was asked for may be done now: what goes is known before.
        life.server.stop(lambda: ends.append(True))
        for _ in range(STOP_STEPS):
            if ends or not any(thread.step() for thread in life.threads):
                break
        if ends:
            life.server.close()
        self.die(way, seed)
        return bool(ends)

    def begin_anew(self) -> None:
        """Stop, and begin the next life in the same process; one that can't begin stays down."""
        self.stop(None, 0)
        try:
            self.start()
        except (DamagedData, DiskFull, ServerStopped, OSError) as error:
            raise Crash(f"{self.name} does not begin anew: {error}") from error

    def moves(self) -> Iterator[Move]:
        """What may happen next by itself."""
        return iter(()) if self.life is None else self.life.moves()

    def retain(self) -> None:
        """Ask for the removal of old segments."""
        if self.life is not None:
            self.life.retaining = True
            self.life.server.retain()
            self.look_at_retention()

    def look_at_retention(self) -> None:
        """Note below which offset retention has decided to remove: groups that begin later need not get that."""
        if self.life is not None:
            self.leaving_below = max(self.leaving_below, self.life.server.leaving_below)

    def checkpoint(self) -> None:
        """Begin a checkpoint."""
        if self.life is not None:
            self.life.server.checkpoint()

    def log(self) -> list[Kept]:
        """All batches that its files hold, durable or not, behind those that retention removed."""
        with self.damages.as_written(self.disk):
            return self._log()

    def _log(self) -> list[Kept]:
        names = [name for name in self.disk.list_folder(MESSAGE_LOG) if name.endswith(".log")]
        found: list[Kept] = []
        writes = self.life is None or self.life.own.begun
        for name in names:
            path = f"{MESSAGE_LOG}/{name}"
            found.extend(self._readings.of(self.disk, path, torn=writes or name != names[-1]))
        start = int(names[0].removesuffix(".log")) if names else 0
        if start > self._start:
            self._start = start
            self.removed.update((kept.offset, kept) for kept in self._last if kept.offset < start)
        self._last = found
        if self.removed:
            found = [*self.removed.values(), *(kept for kept in found if kept.offset not in self.removed)]
        return found


def _decode(group: CommitGroup) -> list[Kept]:
    if group.header.kind != GroupKind.DATA:
        return []
    return [
        Kept(
            batch.dispatch,
            offset,
            offset + batch.total_bytes,
            group.header.appended_at_ms,
            batch.subjects()[0],
            tuple(batch.uint64s(ColumnId.SEQUENCE).tolist()),
            tuple(batch.int64s(ColumnId.DELIVER_AT_MS).tolist()),
            tuple(bodies_of(batch)),
            tuple(batch.content_hashes().tolist()),
        )
        for offset, batch in group.batches()
    ]


def settings_of(random: Random) -> dict[str, int]:
    """Small sizes, so that everything rolls, checkpoints and refuses within a short run."""
    choices: dict[str, tuple[int, ...]] = {
        "checkpoint_every_ms": (500, 2_000, 60_000),
        "segment_bytes": (4_096, 65_536),
        "tail_bytes": (0, 65_536),
        "free_bytes_all": (0, 1_000),
        "retention_ms": (1_000, 10_000, 3_600_000),
    }
    return {name: random.choice(values) for name, values in choices.items()} | {"lease_ms": LEASE_MS}
