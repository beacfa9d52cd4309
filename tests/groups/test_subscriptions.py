"""Random walks of consumers with lists, patterns and single subjects in one group: no message is lost or held twice."""

from __future__ import annotations

from random import Random

import pytest

from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_list,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import SimPeer, World

GROUP = "g"
SUBJECTS = [f"s.{number}" for number in range(6)]
WHAT: list[Head] = [
    {"pattern": "s.*"},
    {"pattern": "s.>"},
    {"subjects": [*SUBJECTS[:3]]},
    {"subjects": [*SUBJECTS[2:]]},
    {"subject": "s.2"},
    {"subject": "s.5"},
]
LEASE_MS = 1_000
STEPS = 150


class Walk:
    """One walk, and the book of who holds what."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world, self.origin = World(), SimPeer()
        self.world.hello(self.origin, 1)
        self.sent: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.held: dict[bytes, int] = {}  # When the lease of each ends.
        self.answers: list[tuple[SimPeer, str, Head, list[bytes]]] = []
        self.waiting: list[tuple[SimPeer, str, int]] = []
        self.consumers: list[tuple[SimPeer, Head, str]] = []
        for what in WHAT:
            self.join(what)

    def join(self, what: Head) -> None:
        """A consumer connects."""
        peer = SimPeer()
        if "subject" in what:
            self.consumers.append((peer, {**what, "group": GROUP}, str(what["subject"])))
        else:
            answer, _ = self.world.ask(peer, RequestType.SUBSCRIBE, {"group": GROUP, **what})
            self.consumers.append((peer, {"subscription": need_int(answer, "subscription")}, ""))

    def step(self) -> None:
        often, seldom = [self.put, self.pull, self.settle], [self.pull, self.pass_time, self.leave]
        self.random.choice([*often, *often, *seldom])()
        self.hear()

    def put(self) -> None:
        bodies = [b"%d" % (len(self.sent) + number) for number in range(self.random.randrange(1, 6))]
        self.sent.update(bodies)
        batch = dispatch_batch(len(self.sent), bodies, subject=self.random.choice(SUBJECTS))
        self.world.dispatch(self.origin, 1, batch)

    def pull(self) -> None:
        peer, who, subject = self.random.choice(self.consumers)
        terms: Head = {"max_messages": self.random.randrange(1, 9), "max_bytes": 1 << 20, "lease_ms": LEASE_MS}
        terms |= {"wait_ms": self.random.choice([0, 0, 300]), "consumer": "", "ahead": self.random.choice([0, 0, 3])}
        self.waiting.append((peer, subject, self.world.send(peer, RequestType.PULL, {**who, **terms})))

    def hear(self) -> None:
        """Note what came: nobody else may hold it."""
        now = self.world.clock.monotonic_ms()
        for entry in list(self.waiting):
            peer, subject, request_id = entry
            if peer.errors.get(request_id) is not None:
                raise peer.errors[request_id]
            if request_id not in peer.answers:
                continue
            self.waiting.remove(entry)
            ((head, body),) = peer.answers.pop(request_id)
            bodies = bodies_of(body)
            for each in bodies:
                assert each not in self.acked, f"{each!r} came again after its acknowledgement"
                assert self.held.get(each, 0) <= now, f"{each!r} is held by another consumer"
                self.held[each] = now + LEASE_MS
            if bodies:
                self.answers.append((peer, subject, head, bodies))

    def settle(self) -> None:
        if not self.answers:
            return
        peer, subject, head, bodies = self.answers.pop(self.random.randrange(len(self.answers)))
        kind = self.random.choice([RequestType.ACK, RequestType.ACK, RequestType.NACK])
        handles: HeadValue = [
            [need_u64(head, "incarnation"), first, n] for first, _, n, _ in need_rows(head, "parts", 4)
        ]
        names: Head = {"subject": subject} if subject else {"subjects": need_list(head, "subjects")}
        more: Head = {"uncounted": self.random.random() < 0.5} if kind == RequestType.NACK else {}
        answer, _ = self.world.ask(peer, kind, {"group": GROUP, "handles": handles, **names, **more})
        pulls = [first + row for first, _, count, _ in need_rows(head, "parts", 4) for row in range(count)]
        stale = {first + row for _, first, count in need_rows(answer, "stale", 3) for row in range(count)}
        for each in (body for body, pull in zip(bodies, pulls, strict=True) if pull not in stale):
            self.held.pop(each, None)
            if kind == RequestType.ACK:
                self.acked.add(each)

    def pass_time(self) -> None:
        self.world.pass_time(self.random.choice([1, 10, 200, LEASE_MS]))
        self.settle_groups()

    def leave(self) -> None:
        """A connection ends, and its consumer comes back on another one."""
        number = self.random.randrange(len(self.consumers))
        peer, _, _ = self.consumers.pop(number)
        peer.closed = True
        self.world.core.disconnected(peer)
        self.waiting = [entry for entry in self.waiting if entry[0] is not peer]
        self.join(WHAT[0] if number == 0 else self.random.choice(WHAT))

    def settle_groups(self) -> None:
        while self.world.core.next_wake_ms() <= self.world.clock.monotonic_ms():
            self.world.core.wake()

    def drain(self) -> None:
        """All that is left comes, to whoever pulls."""
        # The group of a subject that only a single consumer takes may have nobody left.
        self.join(WHAT[0])
        for _ in range(400):
            self.settle_groups()
            self.pull()
            self.hear()
            while self.answers:
                self.settle()
            self.world.pass_time(100)
            if self.acked == self.sent:
                return
        raise AssertionError(f"these never came: {sorted(self.sent - self.acked)}")


@pytest.mark.parametrize("seed", range(25))
def test_whatever_consumers_of_one_group_do_each_message_comes_and_has_one_holder(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(STEPS):
        walk.step()
    walk.drain()
