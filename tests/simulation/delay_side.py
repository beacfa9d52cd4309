"""The delay server in a simulated cluster: one life of the real core, with the real realtime servers as its targets.

Invariant: no row leaves on a connection before it is due by the server's judged clock, whatever its batch claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Protocol

import numpy as np

from delayd.address import Endpoint
from delayd.batch.batch import Batch, parse
from delayd.batch.columns import Buffer, ColumnId
from delayd.errors import DamagedData, DelaydError, DiskFull, ServerStopped, ServerUnavailable
from delayd.testing.clock import SimClock
from delayd.testing.disk import Crash
from delayd.testing.executor import StepExecutor
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import HeadValue
from delayd.wire.meta import SLOTS, SlotOwners
from delayd.wire.requests import RequestType
from tests.simulation.books import EXPIRED, NO_TARGET, DelayBooks, Told
from tests.simulation.damage import Damages
from tests.simulation.moves import Move, Threads
from tests.simulation.network import Line, Network, OnAnswer
from tests.simulation.threads import SteppedExecutor, Turns
from tests.simulation.wall import WallBound
from tests.worlds.delay import Remains, World
from tests.worlds.delay_adapter import DelayCore, Wire

NAME = "delay"
THREADS = ("commit", "outcomes", "worker")


class Failed(Crash):
    """The server has stopped by itself (rule L1): nothing of it goes on, and only an operator starts it again."""


class Surroundings(Protocol):
    """What a life needs of the cluster that it lives in."""

    network: Network
    router: Router
    wall: WallBound
    delay_books: DelayBooks | None
    delay_damages: Damages

    def moves(self) -> list[Move]:
        """Everything that could happen next."""

    def next_move(self) -> Move | None:
        """The first of them."""


class Router:
    """Meta as far as routes and keys go: where each target listens, which may be old, and whose a subject is.

    A delay server that has noted a subject's target must not care when meta names another one later (rule H5).
    """

    def __init__(self) -> None:
        self.told: dict[int, str] = {}
        self.routes: dict[bytes, int] = {}
        self.slots_given = 1  # So often has an operator given all keys to the delay server.
        self.up = True


class DelayLife(World):
    """One life. Its World's targets are views of the realtime servers' files, filled before books are compared."""

    def __init__(self, remains: Remains, cluster: Surroundings, seed: int, settings: dict[str, int]) -> None:
        self.failure: Exception | None = None
        self.dispatched: set[object] = set()  # Listeners that got frames of this life.
        self.swept = False  # Whether hours may be sealed or removed by what the worker does next.
        self.network = cluster.network
        self.router = cluster.router
        self._cluster = cluster
        self.turns = Turns(remains.disk, Random(seed))
        super().__init__(remains, core=DelayCore, seed=seed, **settings)
        if cluster.delay_books is None:
            cluster.delay_books = DelayBooks(self.server.log_id)
        self.books = cluster.delay_books

    def _start(self) -> None:
        super()._start()
        threads = [thread for thread in self.executors() if isinstance(thread, SteppedExecutor)]
        self.own = Threads(NAME, list(zip(THREADS, threads, strict=True)))
        self.own.wrap(self._guarded)

    def live_again(self) -> None:
        """See World: the same machine, and surroundings that are told as if the process had died."""
        if not self._begins_anew:
            return
        self._begins_anew = False
        try:
            self.stop()
        except Crash:
            # A realtime server died meanwhile: this one goes on to begin anew.
            self._begins_anew = True
            raise
        self.server.close()
        self.network.process_died(self)
        self.own.die()
        self.asked.clear()
        try:
            self._start()
        except (DamagedData, DiskFull, ServerStopped, OSError) as error:
            self.failure = error
            raise Failed(f"the server does not begin anew: {error}") from error

    def next_remains(self, way: PowerLoss | None, seed: int) -> Remains:
        """What the next life starts with; the machine and its surroundings are the same ones."""
        remains = remains_after(Remains(self.disk, self.state, self.outside, self.clock), way, seed)
        self.own.die()
        return remains

    def new_thread(self) -> StepExecutor:
        """See World: one whose jobs stand still between operations."""
        return SteppedExecutor(self.turns)

    def own_moves(self) -> Iterator[Move]:
        """What this server may do next by itself."""
        yield from self.own.moves()
        if self.asked:
            yield Move("the router answers", self.answer_routes)

    def next_move(self) -> Callable[[], None] | None:
        """See World: the first thing that could happen next in the cluster."""
        move = self._cluster.next_move()
        return None if move is None else move.do

    def moves(self) -> list[Callable[[], None]]:
        """See World: everything that could happen next in the cluster."""
        return [move.do for move in self._cluster.moves()]

    def outcomes(self) -> dict[int, Told]:
        """See World: also of hours that were removed since."""
        return {sequence: told for sequence, told in self.told().items() if told[1] != NO_TARGET}

    def cancelled(self) -> dict[int, int]:
        """See World: also of hours that were removed since."""
        ended = {sequence: told for sequence, told in self.told().items() if told[1] == NO_TARGET}
        return {sequence: told[0] for sequence, told in ended.items() if told[2] != EXPIRED}

    def expired(self) -> dict[int, int]:
        """See World: also of hours that were removed since."""
        ended = {sequence: told for sequence, told in self.told().items() if told[1] == NO_TARGET}
        return {sequence: told[3] for sequence, told in ended.items() if told[2] == EXPIRED}

    def told(self) -> dict[int, Told]:
        """What became of each row that ever had an outcome."""
        with self._cluster.delay_damages.as_written(self.disk):
            # A start leaves a damaged dispatch log as it is, with whatever end a power loss gave it.
            torn = self.own.begun or self.server.dispatch_log_is_damaged
            return self.books.outcomes(self.disk, self.hours(), torn=torn)

    def sweep(self) -> None:
        """Seal and remove what may be; the books are read before each job that may do so."""
        self.swept = True
        self.server.sweep()

    def _guarded(self, what: str, do: Callable[[], None]) -> None:
        """Do a move; an error that stops the server leaves nothing of it running."""
        if self.swept and what == f"{NAME} runs a worker job":
            self.outcomes()
        try:
            do()
        except (ServerStopped, OSError) as error:
            self.failure = error
            raise Failed(f"the server stops: {error}") from error

    def answer_routes(self) -> None:
        """See World; addresses are those that the router has been told."""
        subjects = self.asked.pop(0)
        if not self.router.up:
            self.server.hears_routes({}, subjects)
            return
        self._place()
        known = {subject: self.target_of(subject) for subject in subjects if subject in self.router.routes}
        self.server.hears_routes(known, [subject for subject in subjects if subject not in known])

    def slots(self) -> SlotOwners | DelaydError:
        """See World: meta may be down, and versions rise with each word of an operator."""
        if not self.router.up:
            return ServerUnavailable("meta is down")
        versions = np.full(SLOTS, self.router.slots_given, np.uint32)
        return SlotOwners(np.full(SLOTS, self.server.log_id, np.uint64), versions)

    def look_around(self) -> None:
        """See World."""
        if self.router.up and self.server.wants_places:
            self._place()

    def target_of(self, subject: bytes) -> int:
        """See World: as meta has it now."""
        return self.router.routes[subject]

    def _place(self) -> None:
        for log_id, place in self.router.told.items():
            self.server.hears_place(log_id, place)

    def dial(self, endpoint: Endpoint, connected: Callable[[Wire], None], lost: Callable[[DelaydError], None]) -> None:
        def opened(line: Line) -> None:
            connected(_Watched(line, self, self._cluster.wall))

        self.network.dial(endpoint.host, opened, lost, self)


class _Watched:
    """A connection on which nothing may leave early, or when it has expired."""

    def __init__(self, line: Line, life: DelayLife, wall: WallBound) -> None:
        self._dispatched = life.dispatched
        self._expiries = life.outside.expiries
        self._clock = life.clock
        self._line = line
        self._wall = wall

    def call(self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer) -> None:
        if frame_type == RequestType.DISPATCH:
            self._dispatched.add(self._line.listener)
            now_ms = min(self._clock.now_ms(), self._wall.latest_ms())
            data, position = b"".join(map(bytes, body)), 0
            while position < len(data):
                batch = parse(data, position)
                position += batch.total_bytes
                latest_ms = int(batch.int64s(ColumnId.DELIVER_AT_MS).max())
                assert latest_ms <= now_ms, (
                    f"a row due at {latest_ms} leaves at {now_ms}, {latest_ms - now_ms} ms early"
                )
                if self._expiries:
                    self._look_at_expiries(batch)
        self._line.call(frame_type, head, body, on_answer)

    def _look_at_expiries(self, batch: Batch) -> None:
        """Rows leave before they expire, and with the expiry that they were sent with (rule S8)."""
        known = batch.int64s(ColumnId.EXPIRES_AT_MS) if ColumnId.EXPIRES_AT_MS in batch.offsets else [0] * batch.count
        claimed_at_ms = batch.dispatch.claimed_at_ms
        for start, end, expires_ms in zip(*batch.region(ColumnId.BODY_END), known, strict=True):
            body = bytes(batch.heap[start:end])
            sent_ms = self._expiries.get(body, 0)
            assert expires_ms == sent_ms, f"{body!r} expires at {sent_ms}, and leaves to expire at {expires_ms}"
            assert not 0 < sent_ms <= claimed_at_ms or not self._clock.confirmed, (
                f"{body!r} expires at {sent_ms}, and leaves at {claimed_at_ms}"
            )

    def close(self) -> None:
        self._line.close()


def remains_after(remains: Remains, way: PowerLoss | None, seed: int) -> Remains:
    """What a death leaves; None is a SIGKILL."""
    disk = remains.disk.after_kill() if way is None else remains.disk.after_crash(way, seed)
    clock = SimClock(machine=remains.outside.machine, previous=remains.clock.restart_evidence())
    return Remains(disk, remains.state.after_crash(disk), remains.outside, clock)
