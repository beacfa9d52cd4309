"""The realtime server dies at each disk operation of retries and dead letters, in each way, and loses nothing.

Promises (rule Q2): each message that was not acknowledged is in one place: with its group, or with its delay server as
a new message. What a RETRY or REJECT was answered for comes from the delay server only.
"""

from collections import Counter
from dataclasses import dataclass, field

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId
from delayd.wire.frame import HeadValue
from delayd.wire.requests import RequestType
from tests.crash.realtime_deaths import check_each_next, live
from tests.worlds.dispatch_batches import ORIGIN, bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World

LEASE_MS = 30_000
SETTINGS = {"segment_bytes": 4096, "tail_bytes": 0, "lease_ms": LEASE_MS, "free_bytes_all": 0}
RETENTION = {"retention_ms": 1_000}  # Of the life that dies.


@dataclass
class DelayServer:
    """What the delay server knows; it lives on when the realtime server dies."""

    session: int = 0
    handed_over: dict[int, bytes] = field(default_factory=dict)  # Batches by id, which may have arrived.
    taken: dict[tuple[int, int], bytes] = field(default_factory=dict)  # Retry batches by producer and number.
    begun: set[tuple[int, int]] = field(default_factory=set)  # Those of them that were handed over again.

    def greet(self, world: World) -> SimPeer:
        """A new session; what did not arrive is handed over again."""
        peer = SimPeer()
        self.session += 1
        landed = {row[1] for row in world.hello(peer, self.session)}
        for batch_id, data in self.handed_over.items():
            if batch_id not in landed:
                world.dispatch(peer, self.session, data)
        return peer

    def hand_over(self, world: World, peer: SimPeer, subject: str, bodies: list[bytes], headers: list[bytes]) -> None:
        """Messages become due."""
        batch_id = len(self.handed_over) + 1
        self.handed_over[batch_id] = dispatch_batch(batch_id, bodies, subject=subject, headers=headers)
        world.dispatch(peer, self.session, self.handed_over[batch_id])

    def take(self, world: World) -> None:
        """Take what is to come again, each number once."""
        for undone in list(world.core.retries.waiting(ORIGIN)):
            self.taken.setdefault((undone.producer, undone.number), world.core.retries.batch_of(undone))
            world.core.retries.accepted(undone)

    def bring_back(self, world: World, peer: SimPeer) -> None:
        """All that was taken is due again."""
        for key in self.taken.keys() - self.begun:
            batch = parse(self.taken[key])
            self.begun.add(key)
            self.hand_over(world, peer, batch.subjects()[0].decode(), bodies_of(batch.buffer), _headers(batch))


@dataclass
class Promises:
    """What consumers were answered, and what the delay server has."""

    delay: DelayServer = field(default_factory=DelayServer)
    sent: list[bytes] = field(default_factory=list)
    acked: set[bytes] = field(default_factory=set)
    maybe_acked: set[bytes] = field(default_factory=set)
    left: list[bytes] = field(default_factory=list)  # One entry for each life that a RETRY or REJECT has ended.


def workload(world: World, promises: Promises) -> None:
    """Messages are retried, rejected, come again, are retried again and acknowledged."""
    delay = promises.delay
    peer = delay.greet(world)
    for bodies in (["a", "b", "c"], ["d", "e"]):
        padded = [body.encode().ljust(400, b".") for body in bodies]
        promises.sent += padded
        delay.hand_over(world, peer, SUBJECT, padded, [])
    pulled = world.pull(peer)
    _later(world, peer, promises, "retries", [*pulled.handles[0][:2], 1, 60_000, "no"], pulled.bodies[:1])
    world.core.checkpoint()
    delay.take(world)
    _later(world, peer, promises, "rejects", [*pulled.handles[1][:2], 2, "bad", "no"], pulled.bodies[3:])
    delay.bring_back(world, peer)
    delay.take(world)
    again = world.pull(peer)
    _later(world, peer, promises, "retries", [*again.handles[0], 60_000, "no"], again.bodies)
    world.core.checkpoint()
    promises.maybe_acked.update(pulled.bodies[1:2])
    assert world.ack(peer, [[*pulled.handles[0][:1], pulled.handles[0][1] + 1, 1]]) == []
    promises.acked.update(pulled.bodies[1:2])
    delay.take(world)
    world.core.retain()
    delay.bring_back(world, peer)
    world.core.stop(lambda: None)


def _later(
    world: World, peer: SimPeer, promises: Promises, kind: str, row: list[HeadValue], bodies: list[bytes]
) -> None:
    request = RequestType.RETRY if kind == "retries" else RequestType.REJECT
    answer, _ = world.ask(peer, request, {"subject": SUBJECT, "group": GROUP, kind: [row]})
    assert answer["stale"] == []
    promises.left += bodies


def check(world: World, promises: Promises) -> None:
    """Hold a restarted server to what its former life answered."""
    delay = promises.delay
    peer = delay.greet(world)
    delay.take(world)
    taken = Counter(body for data in delay.taken.values() for body in bodies_of(data))
    assert all(taken[body] >= lives for body, lives in Counter(promises.left).items()), "a decision was forgotten"
    delay.bring_back(world, peer)
    world.clock.advance(LEASE_MS)
    world.core.wake()
    found: list[bytes] = []
    while (pulled := world.pull(peer, most=2)).bodies:
        found += pulled.bodies
        assert world.ack(peer, pulled.handles) == []
    assert len(found) == len(set(found)), "a message is in two places"
    handed_over = {body for data in delay.handed_over.values() for body in bodies_of(data)}
    assert handed_over - promises.maybe_acked <= set(found) <= set(promises.sent) - promises.acked
    world.pass_time(LEASE_MS * 2)
    assert world.pull(peer).bodies == []
    assert world.core.retries.origins() == []


def _headers(batch: Batch) -> list[bytes]:
    starts, ends = batch.region(ColumnId.HEADERS_END)
    return [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def test_rule_Q2_nothing_is_lost_or_doubled_whichever_disk_operation_it_dies_at() -> None:
    whole = live(workload, Promises(), SETTINGS | RETENTION)
    promises = whole.told
    assert len(promises.left) == 4 and len(promises.delay.handed_over) == 5
    for crash_at in range(1, len(whole.disk.operations) + 1):
        check_each_next(live(workload, Promises(), SETTINGS | RETENTION, crash_at), SETTINGS, check)
