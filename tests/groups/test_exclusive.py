"""Random walks of one exclusive group over many lives of its server, which also stands still (rules Q9, T5).

Some consumers pull, work and acknowledge. Their connections break, also because the server is killed, stopped, or
stands still; they come back with a PULL, or while they work with a PULL_END; and some die. Each walk judges every
message that is given out:

1. Nobody else works on a message of the group. Whoever got one works on it until it has said so, has lost its lead by
   its own silence, its own connection or its death, or its lease has ended.
2. A consumer that has done nothing of this acknowledges what it works on, on whatever connection.
3. In the end all messages come, and nobody is left standing by for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from delayd.wire.consuming import read_stale
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from realtime import leads
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head

NAMES: Head = {"subject": SUBJECT, "group": GROUP}
WINDOW_MS = 4_000
LEASE_MS = 60_000
SPEAKS_MS = 1_000  # So often a consumer that lives says something, whatever else it does.
STEPS = 60


@dataclass(eq=False)
class Worker:
    """A consumer: one process, over all its connections."""

    peer: SimPeer = field(default_factory=SimPeer)
    was: list[HeadValue] = field(default_factory=list)
    asked: int = 0  # The PULL that waits; 0: none.
    works_on: dict[bytes, list[HeadValue]] = field(default_factory=dict)  # Handles by body.
    lease_ends_ms: int = 0  # Of the first of them.
    may_have_lost: bool = False  # By its own doing; what it works on may be given to another one.
    hangs: bool = False  # It lives, and says nothing.


class Walk:
    """One group."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World()
        self.delay, self.session, self.sent = SimPeer(), 1, 0
        self.world.hello(self.delay, 1)
        self.workers = [Worker() for _ in range(3)]
        self.acked: set[bytes] = set()

    @property
    def now_ms(self) -> int:
        return self.world.clock.monotonic_ms()

    def run(self) -> None:
        steps = [self._send, self._pull, self._pull, self._ack, self._wait, self._wait, self._break, self._kill]
        steps += [self._stop, self._stand_still, self._hang, self._die]
        for step in self.random.choices(steps, k=STEPS):
            step()
            self._read()
        self._end()

    # Steps.

    def _send(self) -> None:
        self.sent += 1
        batch = dispatch_batch(self.sent, [b"%d" % self.sent], w=(1, self.sent - 1) if self.sent > 1 else (0, 0))
        self.world.dispatch(self.delay, self.session, batch)

    def _pull(self) -> None:
        worker = self.random.choice(self.workers)
        if not worker.asked and not worker.hangs:
            self._ask(worker)

    def _ask(self, worker: Worker) -> None:
        head: Head = {**pull_head(most=1, wait_ms=60_000, lease_ms=LEASE_MS), "exclusive_ms": WINDOW_MS}
        worker.asked = self.world.send(worker.peer, RequestType.PULL, {**head, "was": list(worker.was)})

    def _ack(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.works_on and not worker.hangs:
            self._say(worker, self.random.choice(list(worker.works_on)))

    def _say(self, worker: Worker, body: bytes) -> None:
        head: Head = {**NAMES, "handles": [worker.works_on.pop(body)]}
        stale = read_stale(self.world.ask(worker.peer, RequestType.ACK, head)[0])
        if stale:
            assert self._may_be_another_s(worker), f"{body!r} was taken from a consumer that lives: {stale}"
        else:
            self.acked.add(body)

    def _wait(self) -> None:
        self._pass(self.random.choice((100, 1_000, 3_000, 9_000)))

    def _pass(self, ms: int) -> None:
        while ms > 0:
            self.world.pass_time(min(SPEAKS_MS, ms))
            ms -= SPEAKS_MS
            for worker in self.workers:
                if not worker.hangs:
                    self.world.ask(worker.peer, RequestType.PING, {})
            self._read()

    def _break(self) -> None:
        """The network breaks, and the server notices: another one may take over at once."""
        worker = self.random.choice(self.workers)
        self._disconnect(worker)
        worker.may_have_lost = worker.may_have_lost or bool(worker.works_on)
        self._come_back(worker)

    def _disconnect(self, worker: Worker) -> None:
        worker.peer.close()
        self.world.core.disconnected(worker.peer)
        worker.peer, worker.asked = SimPeer(), 0

    def _come_back(self, worker: Worker) -> None:
        """The client connects again by itself, and says so while its handler works."""
        if worker.was:
            head: Head = {**NAMES, "exclusive_ms": WINDOW_MS, "was": list(worker.was)}
            self.world.ask(worker.peer, RequestType.PULL_END, head)

    def _kill(self) -> None:
        old = self.world
        self._begin(World(old.disk.after_kill(), old.state.after_crash(), old.clock.restarted()))

    def _stop(self) -> None:
        self._begin(self.world.restarted())

    def _begin(self, world: World) -> None:
        self.world = world
        self.delay, self.session = SimPeer(), self.session + 1
        self.world.hello(self.delay, self.session, w=(1, self.sent) if self.sent else (0, 0))
        for worker in self.workers:
            worker.peer, worker.asked = SimPeer(), 0
            if self.now_ms < worker.lease_ends_ms:
                worker.lease_ends_ms = self.now_ms + LEASE_MS  # Whatever survives a start has a whole lease again.
        # They come back in any order, and some only when others have asked already.
        for worker in self.random.sample(self.workers, len(self.workers)):
            if worker.hangs:
                continue
            if self.random.random() < 0.5:
                self._ask(worker)
            else:
                self._come_back(worker)

    def _stand_still(self) -> None:
        """The server stands still; when that is long, clients give up their connections."""
        ms = self.random.choice((500, 3 * WINDOW_MS, 20_000))
        self.world.clock.advance(ms)
        self.world.core.unheard(ms)
        if ms > leads.PATIENCE_MS:
            back = [worker for worker in self.workers if not worker.hangs]
            for worker in self.workers:
                self._disconnect(worker)
            self.random.shuffle(back)
            for worker in back:
                if self.random.random() < 0.5:
                    self._ask(worker)
            self.world.core.wake()
            for worker in back:
                self._come_back(worker)
        self._read()

    def _hang(self) -> None:
        worker = self.random.choice(self.workers)
        worker.hangs = not worker.hangs
        if worker.hangs and worker.works_on:
            worker.may_have_lost = True

    def _die(self) -> None:
        number = self.random.randrange(len(self.workers))
        self._disconnect(self.workers[number])
        self.workers[number] = Worker()

    # Judging.

    def _may_be_another_s(self, worker: Worker) -> bool:
        return worker.may_have_lost or self.now_ms >= worker.lease_ends_ms

    def _read(self) -> None:
        for worker in self.workers:
            if not worker.asked or worker.asked not in worker.peer.answers:
                continue
            ((answer, body),) = worker.peer.answers.pop(worker.asked)
            worker.asked = 0
            incarnation = need_u64(answer, "incarnation")
            if incarnation not in worker.was:
                worker.was.append(incarnation)
            parts = need_rows(answer, "parts", 4)
            if parts:
                self._given(worker, [incarnation, parts[0][0], 1], bodies_of(body)[0])

    def _given(self, worker: Worker, handle: list[HeadValue], body: bytes) -> None:
        for other in self.workers:
            if other is not worker and other.works_on:
                assert self._may_be_another_s(other), (
                    f"two work at once: one on {list(other.works_on)}, one on {body!r}"
                )
        assert body not in self.acked
        if body in worker.works_on:
            assert self._may_be_another_s(worker), f"{body!r} came again to the one that works on it"
        if not worker.works_on:
            worker.may_have_lost, worker.lease_ends_ms = worker.hangs, self.now_ms + LEASE_MS
        worker.works_on[body] = handle

    def _end(self) -> None:
        """All that was not acknowledged comes, to whoever leads."""
        for worker in self.workers:
            worker.hangs = False
        for _ in range(400):
            for worker in self.workers:
                for body in list(worker.works_on):
                    self._say(worker, body)
                if not worker.asked:
                    self._ask(worker)
            self._pass(1_000)
            if len(self.acked) == self.sent:
                return
        raise AssertionError(f"{self.sent - len(self.acked)} of {self.sent} messages never came")


def _walk(seeds: Sequence[int]) -> None:
    for seed in seeds:
        try:
            Walk(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_rule_Q9_an_exclusive_group_has_one_worker_at_a_time_and_a_lead_keeps_what_it_holds(first: int) -> None:
    _walk(range(first, first + 20))
