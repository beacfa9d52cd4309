"""What scenarios are made of: work, stalls, deaths and starts, with random parts.

Invariant: a part draws everything from the run's own chance, and heals nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.simulation.cluster import LOSSES, Cluster
from tests.simulation.delay_side import NAME, DelayLife
from tests.simulation.network import Line
from tests.simulation.realtime_side import RealtimeLife, RealtimeSide
from tests.simulation.steps import Steps
from tests.simulation.threads import ONE, SOME

WITHIN_MOVES = 60
PAUSE_MS = 20  # Outcomes wait as long for their flush.


class Parts:
    """The parts that scenarios of one run share."""

    def __init__(self, cluster: Cluster, steps: Steps, random: Random, tell: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.steps = steps
        self.random = random
        self.tell = tell

    def some_work(self) -> None:
        """Send what is due, and mostly let some of it happen."""
        if self.cluster.delay_up:
            self.steps.send_due()
            if self.chance(0.8):
                self.cluster.calm(self.random.choice((1, 60, 400)))

    def moves(self, count: int) -> None:
        """Up to so many things happen that may happen by themselves."""
        for _ in range(self.random.randint(0, count)):
            moves = self.cluster.moves()
            if not moves:
                return
            self.random.choice(moves).do()

    def stall(self, owner: str) -> str:
        """Let one thread of a server stand still, mostly; what its work is called."""
        stalled = self.random.choice([each for each in self.cluster.threads() if each.startswith(owner)])
        if self.chance(0.7):
            self.cluster.hold(stalled)
            self.tell(f"     {stalled} no job")
        return stalled

    def stop_within(self, owner: DelayLife | RealtimeLife, stalled: str, behind: str = "") -> None:
        """Let a thread of a server stand still within a job, if it soon is: ``behind`` an operation, or anywhere.

        ``stalled`` is what its work is called. Anything that may happen by itself happens meanwhile, up to a bound.
        """
        owner.turns.operations = ONE
        for _ in range(WITHIN_MOVES):
            if owner.own.begun_in(stalled) and owner.disk.last_operation.startswith(behind):
                self.tell(f"     {stalled} job, and stands still within it")
                self.cluster.hold(stalled)
                break
            if moves := self.cluster.moves():
                self.random.choice(moves).do()
            else:
                self.cluster.advance(PAUSE_MS)
        owner.turns.operations = SOME

    def delay_dies_and_starts(self) -> None:
        """Kill the delay server, and start it at once."""
        way = self.random.choice((None, *LOSSES))
        self.tell(f"     {NAME} dies, {way.name if way else 'killed'}")
        self.cluster.delay_dies(way)
        self.cluster.delay_starts(faults=False)

    def realtime_dies_and_starts(self, side: RealtimeSide) -> None:
        """Kill a realtime server, and start it at once."""
        way = self.random.choice((None, *LOSSES))
        self.tell(f"     {side.name} dies, {way.name if way else 'killed'}")
        side.die(way, self.random.randrange(1 << 16))
        self.cluster.side_starts(side, faults=False)

    def send_last_again(self) -> None:
        """Send the last batch again."""
        outside = self.cluster.world.outside
        if outside.last_number in outside.unanswered or outside.last_number in outside.accepted:
            self.cluster.world.send_again(outside.last_number)

    def lines_of_delay(self) -> list[Line]:
        """The connections of this life of the delay server."""
        return [line for line in self.cluster.network.lines if line.owner is self.cluster.world]

    def chance(self, of: float) -> bool:
        """Whether it happens this time."""
        return self.random.random() < of
