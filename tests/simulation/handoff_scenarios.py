"""Scenarios of the network: chains of events around the handoff that single steps would hardly ever put together.

Invariant: each is a chain that the rules of docs/rules.md name; it heals no more than it needs to begin.
"""

from __future__ import annotations

from delayd.testing.disk import CAPACITY_BYTES
from tests.simulation.cluster import DEATHS
from tests.simulation.delay_side import NAME
from tests.simulation.network import Line
from tests.simulation.parts import Parts
from tests.simulation.steps import Kinds
from tests.worlds.delay_adapter import RequestWish

SUBJECTS_MAX = 6
PULLS_WAIT_MS = 2_000
GIVEN_WITHIN_MOVES = 200
BELOW_RESERVE_BYTES = 900  # Hellos fit in, and no frames.


class HandoffScenarios(Parts):
    """Late bytes, lost answers, old addresses, retries."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        kinds: Kinds = [(5, self.lost_pulls)]
        if self.cluster.delay_up:
            kinds += [
                (6, self.late_bytes),
                (3, self.late_hello),
                (5, self.lost_answers),
                (6, self.stalled_disk),
                (6, self.swapped_addresses),
                (5, self.retried_send),
                (4, self.first_rows),
                (4, self.lost_offers),
            ]
        return kinds

    def late_bytes(self) -> None:
        """Bytes of an old connection arrive behind the hello of the next one (rules H3, H4)."""
        cluster = self.cluster
        held = {f"{line.name} up" for line in self.lines_of_delay()}
        cluster.hold(*held)
        self.steps.send_due()
        cluster.world.server.wake()
        self.moves(16)
        lines = self.lines_of_delay()
        held.update(f"{line.name} up" for line in lines)
        cluster.hold(*held)
        if self.chance(0.4):
            cluster.delay_dies(self.random.choice(DEATHS))
            cluster.delay_starts(faults=False)
        else:
            for line in lines:
                line.cut()
        if self.chance(0.5):
            cluster.calm(self.random.choice((60, 400)))
        self.some_work()
        cluster.held -= held
        self.moves(6)

    def late_hello(self) -> None:
        """A hello arrives behind the one of a later session (rule H3)."""
        cluster = self.cluster
        before = self.lines_of_delay()
        for line in before:
            line.cut()
        cluster.calm(1)
        cluster.advance(self.random.choice((60, 120)))
        new: list[Line] = []
        while not new and (move := next((each for each in cluster.moves() if "dial" in each.what), None)):
            move.do()
            new = [line for line in self.lines_of_delay() if line not in before]
        held = {f"{line.name} up" for line in new}
        cluster.hold(*held)
        if self.chance(0.3):
            self.delay_dies_and_starts()
        else:
            for line in new:
                line.end()
        cluster.calm(self.random.choice((60, 400)))
        cluster.held -= held
        self.moves(6)
        self.some_work()

    def lost_answers(self) -> None:
        """Frames arrive, and their answers do not, while the delay server lives on (rules H2, H4, H6)."""
        cluster = self.cluster
        lines = self.lines_of_delay()
        held = {f"{line.name} down" for line in lines}
        cluster.hold(*held)
        for _ in range(self.random.randint(1, 2)):
            self.steps.send_due()
            cluster.calm(self.random.choice((1, 60)))
        for line in lines:
            if self.chance(0.8):
                line.lose_answers()
        cluster.held -= held
        cluster.calm(self.random.choice((1, 60, 400)))
        self.some_work()

    def stalled_disk(self) -> None:
        """A realtime server's disk stands still with frames behind it, and a new session begins meanwhile (rule H3)."""
        cluster, side = self.cluster, self.steps.side()
        stalled = f"{side.name} runs a commit"
        cluster.hold(stalled)
        for _ in range(self.random.randint(1, 3)):
            self.steps.send_due()
            cluster.calm(self.random.choice((1, 60)))
        for line in self.lines_of_delay():
            if line.listener is side.life:
                line.cut()
        cluster.calm(self.random.choice((1, 60, 400)))
        cluster.held.discard(stalled)
        self.moves(12)
        cluster.calm(self.random.choice((60, 400)))

    def swapped_addresses(self) -> None:
        """The realtime servers change places while batches are in doubt, and the router hears of it late (rule H7)."""
        cluster = self.cluster
        for side in cluster.sides:
            if side.life is None:
                cluster.side_starts(side, faults=False)
        cluster.router.up = True
        cluster.tell_router()
        for _ in range(self.random.randint(1, 3)):
            self.steps.send_due()
            cluster.calm(self.random.choice((60, 400)))
        self.steps.swap()
        for side in cluster.sides:
            if self.chance(0.7):
                cluster.network.cut(side.life)
        if self.chance(0.3):
            self.delay_dies_and_starts()
        cluster.calm(self.random.choice((60, 400, 2_500)))
        self.some_work()
        cluster.tell_router()
        cluster.calm(self.random.choice((400, 2_500)))
        self.steps.send_due()
        cluster.calm(400)

    def first_rows(self) -> None:
        """A subject's first rows leave, and soon after meta gives it to another realtime server (rule H5)."""
        cluster = self.cluster
        if len(cluster.subjects) < SUBJECTS_MAX:
            cluster.add_subject(b"new-%d" % len(cluster.subjects))
        self.steps.send_rows((-1_000,), [cluster.subjects[-1]])
        if self.chance(0.5):
            while not cluster.world.asked and (move := cluster.next_move()):
                move.do()
            cluster.hold(f"{NAME} runs a commit")
            cluster.calm(1)
            cluster.held.discard(f"{NAME} runs a commit")
        else:
            self.moves(self.random.choice((4, 12, 24)))
        cluster.router.routes[cluster.subjects[-1]] = self.steps.side().log_id
        if self.chance(0.7):
            self.delay_dies_and_starts()
        cluster.calm(self.random.choice((60, 400)))

    def lost_offers(self) -> None:
        """The power fails before a realtime server has fsynced what consumers have, and callers want just these
        messages cancelled (rule C1).
        """
        cluster, side = self.cluster, self.steps.side()
        if side.life is None:
            cluster.side_starts(side, faults=False)
        subjects = [each for each in cluster.subjects if cluster.world.server.targets.get(each) == side.log_id]
        own = [
            each for each in cluster.consumers if each.books.log_id == side.log_id and each.books.subject in subjects
        ]
        for _ in range(3):
            cluster.calm(60)
            for consumer in own:
                if consumer.is_connected() and not consumer.pulling:
                    consumer.pull(100, PULLS_WAIT_MS)
        cluster.calm(1)
        if not own or not cluster.delay_up:
            return
        given = sum(len(consumer.books.rows) for consumer in own)
        self.steps.send_rows((-1_000,), subjects)
        number = cluster.world.outside.last_number
        for _ in range(GIVEN_WITHIN_MOVES):
            if sum(len(consumer.books.rows) for consumer in own) > given:
                break
            if moves := cluster.moves():
                self.random.choice(moves).do()
            else:
                cluster.advance(1)
        self.realtime_dies_and_starts(side)
        if self.chance(0.3):
            self.delay_dies_and_starts()
        if self.chance(0.3):
            side.stop(None, 0)
            cluster.side_starts(side, faults=False)
        # Servers that have a reserve of space refuse the rows, so that these are at no target for a while.
        side.disk.capacity_bytes = side.disk.used_bytes + BELOW_RESERVE_BYTES
        for _ in range(4):
            cluster.calm(self.random.choice((1, 60)))
            asked = cluster.world.receipts_of(number)
            if asked is not None and cluster.delay_up:
                cluster.callers.ask(RequestWish.CANCEL, asked)
            self.moves(12)
        side.disk.capacity_bytes = CAPACITY_BYTES
        cluster.calm(60)

    def retried_send(self) -> None:
        """A batch is sent again while it is under way, after a death, and after a checkpoint (rule I1)."""
        cluster = self.cluster
        self.steps.send()
        for _ in range(self.random.randint(1, 3)):
            self.moves(3)
            self.send_last_again()
        if self.chance(0.5):
            self.steps.checkpoint_delay()
            cluster.calm(self.random.choice((1, 60)))
        if self.chance(0.6):
            self.delay_dies_and_starts()
            self.send_last_again()
        cluster.calm(60)

    def lost_pulls(self) -> None:
        """Answers to pulls are lost, with the connection or with the consumer: only the lease gives them back."""
        cluster = self.cluster
        if cluster.delay_up:
            self.steps.send_due()
        cluster.calm(400)
        for consumer in cluster.consumers:
            consumer.pull_if_connected()
        self.moves(20)
        for line in list(cluster.network.lines):
            if self.chance(0.7) and line.owner in cluster.consumers:
                line.lose_answers()
        for consumer in cluster.consumers:
            if self.chance(0.2):
                consumer.die()
