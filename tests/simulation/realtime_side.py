"""A realtime server in a simulated cluster: the real core over a fake disk, through all its lives.

Invariant: what it holds is read from its files, as an independent reader would, and never from the core's memory.
"""

from __future__ import annotations

from random import Random

from delayd.batch import ColumnId
from delayd.config import RealtimeConfig
from delayd.errors import BatchMalformed
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, list_segments
from delayd.log.segment import FileKind
from delayd.testing.clock import SimClock, SimMachine
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import Frame
from realtime.core import Core, Executors
from realtime.recovery import recover
from tests.batches import bodies_of
from tests.delay_target import Kept
from tests.simulation.moves import Move, executor_moves
from tests.simulation.network import Network, ServedEnd

DATA = "/data"
STATE = "/data/realtime/state"
LEASE_MS = 2_000
STOP_STEPS = 200


class RealtimeLife:
    """One life: a listener of the network, until it dies."""

    def __init__(self, side: RealtimeSide) -> None:
        self.clock = SimClock(machine=side.machine, previous=side.clock.restart_evidence())
        self.threads = (StepExecutor(), StepExecutor(), StepExecutor())
        self.failure: BaseException | None = None
        side.disk.make_folder(side.config.folder)
        recovered = recover(side.config, side.disk, side.state, self.clock, lambda: side.log_id, STATE)
        executors = Executors(*self.threads)
        self.core = Core(side.config, side.disk, side.state, self.clock, executors, recovered, self._failed)

    def received(self, peer: ServedEnd, frame: Frame) -> None:
        """A request has arrived; what a delay server hands over is never malformed, nor a number sent before."""
        try:
            self.core.received(peer, frame)
        except BatchMalformed as error:
            raise AssertionError(f"a realtime server refuses a batch: {error}") from error

    def disconnected(self, peer: ServedEnd) -> None:
        """A connection is gone."""
        self.core.disconnected(peer)

    def _failed(self, error: BaseException) -> None:
        self.failure = error


class RealtimeSide:
    """One realtime server: what survives its lives, and the life that it is in, if any."""

    def __init__(self, log_id: int, machine: SimMachine, network: Network, settings: dict[str, int]) -> None:
        self.log_id = log_id
        self.name = f"realtime-{log_id:x}"
        self.place = self.name
        self.machine = machine
        self.clock = SimClock(machine=machine)
        self.disk = MemoryDisk()
        self.state = MemoryState(self.disk)
        self.config = RealtimeConfig(data=DATA, **settings)  # type: ignore[arg-type]
        self.life: RealtimeLife | None = None
        self._network = network
        self._place_of_log = LogPlace(f"{DATA}/realtime/message", FileKind.REALTIME, log_id)

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
        self.place = place
        self.listen()

    def die(self, way: PowerLoss | None, seed: int) -> None:
        """Die now; None is a SIGKILL. A side that is down may die again: in the middle of its start."""
        if self.life is not None:
            self._network.process_died(self.life)
        self.life = None
        self.disk = self.disk.after_kill() if way is None else self.disk.after_crash(way, seed)
        self.state = self.state.after_crash(self.disk)

    def stop(self, way: PowerLoss | None, seed: int) -> bool:
        """Stop cleanly, if the disk lets it, and lose power after that; whether the stop came to its end."""
        life = self.life
        if life is None:
            return False
        ends: list[bool] = []
        life.core.stop(lambda: ends.append(True))
        for _ in range(STOP_STEPS):
            if ends or not any(thread.step() for thread in life.threads):
                break
        if ends:
            life.core.close()
        self.die(way, seed)
        return bool(ends)

    def moves(self) -> list[Move]:
        """What may happen next by itself."""
        life = self.life
        if life is None:
            return []
        found = executor_moves(self.name, zip(("commit", "pull", "work"), life.threads, strict=True))
        if life.core.next_wake_ms() <= life.clock.monotonic_ms():
            found.append(Move(f"{self.name} wakes", life.core.wake))
        return found

    def checkpoint(self) -> None:
        """Begin a checkpoint."""
        if self.life is not None:
            self.life.core.checkpoint()

    def log(self) -> list[Kept]:
        """All batches that its files hold, durable or not."""
        found: list[Kept] = []
        segments = list_segments(self.disk, self._place_of_log, write=False)
        for segment in segments:
            for group in segment.scan(segment.base_offset, None):
                if group.header.kind != GroupKind.DATA:
                    continue
                for offset, batch in group.batches():
                    found.append(
                        Kept(
                            batch.dispatch,
                            offset,
                            offset + batch.total_bytes,
                            group.header.appended_at_ms,
                            batch.subjects()[0],
                            tuple(batch.uint64s(ColumnId.SEQUENCE).tolist()),
                            tuple(batch.int64s(ColumnId.DELIVER_AT_MS).tolist()),
                            tuple(bodies_of(batch)),
                        )
                    )
            segment.close()
        return found


def settings_of(random: Random) -> dict[str, int]:
    """Small sizes, so that everything rolls, checkpoints and refuses within a short run."""
    choices: dict[str, tuple[int, ...]] = {
        "checkpoint_every_ms": (300, 2_000, 60_000),
        "segment_bytes": (4_096, 65_536),
        "tail_bytes": (0, 65_536),
        "free_bytes_all": (0, 1_000),
    }
    return {name: random.choice(values) for name, values in choices.items()} | {"lease_ms": LEASE_MS}
