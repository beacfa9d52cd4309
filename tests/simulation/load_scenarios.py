"""Scenarios of load: a flood over an hour's edge with a slow worker, a queue that is full (rules B1, B2, P7).

Invariant: what is slow is one thread of the delay server; everything else has all the turns that it wants.
"""

from __future__ import annotations

from delayd.hours import hour_of_ms
from delayd.machine.executor import Priority
from tests.simulation.cluster import HOUR_MS
from tests.simulation.delay_side import NAME
from tests.simulation.parts import Parts
from tests.simulation.steps import Kinds
from tests.simulation.threads import ONE, SOME, SteppedExecutor

WORKER = f"{NAME} runs a worker"
COMMIT = f"{NAME} runs a commit"
WORKER_HEARD = f"{NAME} hears of a worker"
BEFORE_EDGE_MS = 5_500  # The next hour is loaded some seconds before it begins at the earliest.
STEP_MS = 50  # The time that the worker needs for one operation.
PIECE_OPERATIONS = 24  # A checkpoint reads rows, and opens, writes and syncs files between two of its pauses.
FLOOD_MS = 2_000
QUEUED_SENDS = 24
QUEUED_BYTES = 2_000
LAST_BYTES = 6 * (QUEUED_BYTES + 100) + 2_000  # One batch may go over the bound.
FLOOD_HOURS = 12  # Each is a file of its own for a checkpoint.
FLOOD_TURNS = 10  # The turns from one batch of the flood to the next.


class LoadScenarios(Parts):
    """More work than one thread has turns for."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        if not self.cluster.delay_up:
            return []
        return [(2, self.flood_over_an_edge), (3, self.load_beside_a_checkpoint), (2, self.queue_is_full)]

    def flood_over_an_edge(self) -> None:
        """Far messages flood while an hour ends, and the worker is slow: the next hour is loaded all the same (B2)."""
        cluster = self.cluster
        edge_ms = self._come_near_an_edge()
        if edge_ms is None:
            return
        world = cluster.world
        self.steps.send_rows((BEFORE_EDGE_MS + 500,))
        cluster.hold(WORKER)
        turns = waits = 0
        waited: object = None
        while world.server.loaded_until < hour_of_ms(edge_ms) and world.clock.now_ms() < edge_ms + FLOOD_MS:
            if turns % FLOOD_TURNS == 0:
                self.steps.send_each([edge_ms + hour * HOUR_MS for hour in range(1, 1 + FLOOD_HOURS)])
            turns += 1
            self.steps.checkpoint_delay()
            if self.chance(0.1):
                world.server.sweep()
            cluster.calm(STEP_MS)
            if cluster.world is not world or not cluster.delay_up:
                break
            before, waited = waited, self._first_that_waits(Priority.DUE)
            waits = 0 if waited is None else waits + 1 if waited is before else 1
            assert waits <= PIECE_OPERATIONS, f"a load waits for {waits} operations of what is less urgent"
            self._give_the_worker_a_turn()
        cluster.held.discard(WORKER)
        cluster.calm(1_200)

    def load_beside_a_checkpoint(self) -> None:
        """The next hour is loaded while a checkpoint that counts rows of it has ended and was not heard of (P7)."""
        cluster = self.cluster
        edge_ms = self._come_near_an_edge()
        if edge_ms is None:
            return
        world = cluster.world
        self.steps.send_rows((BEFORE_EDGE_MS + 500,))
        cluster.calm(60)
        cluster.hold(WORKER_HEARD)
        self.steps.checkpoint_delay()
        cluster.calm(60)
        load_at_ms = edge_ms - world.server.config.load_ahead_ms
        cluster.advance(max(0, load_at_ms - world.clock.now_ms() + self.random.choice((-200, 100))))
        cluster.calm(self.random.choice((60, 1_200)))
        cluster.held.discard(WORKER_HEARD)
        self.moves(self.random.choice((2, 12)))
        cluster.calm(1_200)

    def queue_is_full(self) -> None:
        """The disk stands still and producers go on: what waits for it is bounded in bytes (rule B1)."""
        cluster = self.cluster
        world = cluster.world
        bound = world.server.config.intake_queue_bytes_max
        cluster.hold(COMMIT)
        for _ in range(QUEUED_SENDS):
            self.steps.send_rows((-1_000, 1_500), more_bytes=QUEUED_BYTES)
            most = bound + LAST_BYTES
            queued = world.server.queued_bytes
            assert queued <= most, f"{queued} bytes wait for the disk, and {bound} may"
        cluster.calm(1)
        cluster.held.discard(COMMIT)
        cluster.calm(400)

    def _come_near_an_edge(self) -> int | None:
        """Let time pass until an hour is about to end whose next one is not loaded; when it ends, or None."""
        cluster = self.cluster
        cluster.held.clear()
        into_ms = cluster.machine.wall_ms % HOUR_MS
        cluster.advance(max(0, HOUR_MS - BEFORE_EDGE_MS - into_ms))
        cluster.calm(1_200)
        if not cluster.delay_up or cluster.delay_damages.any(cluster.world.disk):
            return None
        server, now_ms = cluster.world.server, cluster.world.clock.now_ms()
        near = HOUR_MS - now_ms % HOUR_MS <= BEFORE_EDGE_MS
        if not near or server.loaded_until != hour_of_ms(now_ms) or not cluster.world.clock.confirmed:
            return None
        return HOUR_MS * (hour_of_ms(now_ms) + 1)

    def _give_the_worker_a_turn(self) -> None:
        world = self.cluster.world
        move = next((move for move in world.own_moves() if move.what.startswith(WORKER)), None)
        if move is not None:
            world.turns.operations = ONE
            move.do()
            world.turns.operations = SOME

    def _first_that_waits(self, priority: Priority) -> object:
        """The oldest job of this priority that waits for the worker; None when none does."""
        worker = self.cluster.world.threads.worker
        assert isinstance(worker, SteppedExecutor)
        return next(iter(worker._waiting.jobs[priority]), None)
