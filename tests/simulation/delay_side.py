"""The delay server in a simulated cluster: one life of the real core, with the real realtime servers as its targets.

Invariant: no row leaves on a connection before it is due by the server's judged clock, whatever its batch claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from delayd.batch import Buffer, ColumnId, parse
from delayd.delay.core import DelayCore
from delayd.delay.sender import Wire
from delayd.errors import DelaydError
from delayd.testing.clock import SimClock
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import HeadValue
from delayd.wire.requests import RequestType
from tests.delay_harness import FOLDER, Remains, World
from tests.simulation.moves import Move, executor_moves
from tests.simulation.network import Line, Network, OnAnswer

NAME = "delay"


class Router:
    """Meta as far as routes go: where each target listens, which may be old, and whose a subject is.

    A delay server that has noted a subject's target must not care when meta names another one later (rule H5).
    """

    def __init__(self) -> None:
        self.told: dict[int, str] = {}
        self.routes: dict[bytes, int] = {}
        self.up = True


class DelayLife(World):
    """One life. Its World's targets are views of the realtime servers' files, filled before books are compared."""

    def __init__(
        self,
        remains: Remains,
        network: Network,
        router: Router,
        cluster_moves: Callable[[], list[Callable[[], None]]],
        seed: int,
        settings: dict[str, int],
    ) -> None:
        self.network = network
        self.router = router
        self._cluster_moves = cluster_moves
        super().__init__(remains, core=DelayCore, seed=seed, **settings)

    def next_remains(self, way: PowerLoss | None, seed: int) -> Remains:
        """What the next life starts with; the machine and its surroundings are the same ones."""
        return remains_after(Remains(self.disk, self.state, self.outside, self.clock), way, seed)

    def own_moves(self) -> list[Move]:
        """What this server may do next by itself."""
        threads = zip(("commit", "outcomes", "worker"), self.executors(), strict=True)
        found = executor_moves(NAME, threads)
        if self.asked:
            found.append(Move("the router answers", self.answer_routes))
        return found

    def moves(self) -> list[Callable[[], None]]:
        """See World: everything that could happen next in the cluster."""
        return self._cluster_moves()

    def answer_routes(self) -> None:
        """See World; addresses are those that the router has been told."""
        subjects = self.asked.pop(0)
        dispatcher = self.core.dispatcher
        if not self.router.up:
            dispatcher.routed({}, subjects)
            return
        self._place()
        dispatcher.routed({subject: self.target_of(subject) for subject in subjects}, [])

    def look_around(self) -> None:
        """See World."""
        self.core.reserve(self.disk.free_bytes(FOLDER))
        if self.router.up and self.core.dispatcher.wants_places:
            self._place()

    def target_of(self, subject: bytes) -> int:
        """See World: as meta has it now."""
        return self.router.routes[subject]

    def _place(self) -> None:
        for log_id, place in self.router.told.items():
            self.core.dispatcher.place(log_id, place, 1)

    def _dial(
        self, host: str, port: int, connected: Callable[[Wire], None], lost: Callable[[DelaydError], None]
    ) -> None:
        def opened(line: Line) -> None:
            connected(_Watched(line, self.clock))

        self.network.dial(host, opened, lost, self)


class _Watched:
    """A connection on which nothing may leave early."""

    def __init__(self, line: Line, clock: SimClock) -> None:
        self._line = line
        self._clock = clock

    def call(self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer) -> None:
        if frame_type == RequestType.DISPATCH:
            now_ms = self._clock.now_ms()
            for buffer in body:
                latest_ms = int(parse(buffer).int64s(ColumnId.DELIVER_AT_MS).max())
                assert latest_ms <= now_ms, (
                    f"a row due at {latest_ms} leaves at {now_ms}, {latest_ms - now_ms} ms early"
                )
        self._line.call(frame_type, head, body, on_answer)

    def close(self) -> None:
        self._line.close()


def remains_after(remains: Remains, way: PowerLoss | None, seed: int) -> Remains:
    """What a death leaves; None is a SIGKILL."""
    disk = remains.disk.after_kill() if way is None else remains.disk.after_crash(way, seed)
    clock = SimClock(machine=remains.outside.machine, previous=remains.clock.restart_evidence())
    return Remains(disk, remains.state.after_crash(disk), remains.outside, clock)
