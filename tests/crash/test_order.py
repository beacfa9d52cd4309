"""The realtime server dies at each disk operation of a group that keeps an order (rule Q8).

Promises: after the next start the group keeps its order. What was answered as settled never comes, what was not said to
be settled comes, and nothing comes again of a key once a later message of it was given.
"""

from dataclasses import dataclass, field

from delayd.wire.frame import Head
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from tests.crash.realtime_deaths import check_each_next, live
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head

# The first letter is the ordering key.
BATCHES = ([b"a1", b"b1", b"a2", b"b2"], [b"a3", b"c1", b"b3", b"c2", b"a4"])
KEYS = {b"a": 1, b"b": 2, b"c": 3}
LEASE_MS = 30_000
PUT_OFF_MS = 3_600_000
SETTINGS = {"segment_bytes": 4096, "tail_bytes": 0, "lease_ms": LEASE_MS, "free_bytes_all": 0}


@dataclass
class Told:
    """What consumers were given, and what they said, over two lives."""

    handed_over: list[bytes] = field(default_factory=list)
    given: list[bytes] = field(default_factory=list)
    said: set[bytes] = field(default_factory=set)  # Settled as far as a consumer knows.
    answered: set[bytes] = field(default_factory=set)  # Those of them that the server answered.
    waiting: tuple[SimPeer, int] | None = None
    holds: dict[bytes, list[int]] = field(default_factory=dict)  # By body: the handle.

    def hand_over(self, world: World, peer: SimPeer, number: int) -> None:
        bodies = BATCHES[number - 1]
        w = (1, number - 1) if number > 1 else (0, 0)
        world.dispatch(peer, 1, dispatch_batch(number, bodies, ordering=[KEYS[body[:1]] for body in bodies], w=w))
        self.handed_over += bodies

    def pull(self, world: World, peer: SimPeer) -> list[bytes]:
        return self._read(*world.ask(peer, RequestType.PULL, _pull_head()))

    def wait(self, world: World, peer: SimPeer) -> None:
        """Pull, and wait until a message is set free."""
        self.waiting = (peer, world.send(peer, RequestType.PULL, _pull_head(wait_ms=PUT_OFF_MS)))
        assert self.read() == []

    def read(self) -> list[bytes]:
        """What that pull has got, if anything; a server that has died may have answered it."""
        if self.waiting is None or not (answers := self.waiting[0].answers.get(self.waiting[1])):
            return []
        self.waiting = None
        return self._read(*answers[0])

    def _read(self, head: Head, body: bytes) -> list[bytes]:
        bodies = bodies_of(body)
        of_key = [each[:1] for each in bodies]
        assert len(set(of_key)) == len(of_key), f"one answer has {bodies}"
        for each in bodies:
            later = [one for one in self.given if one[:1] == each[:1] and one > each]
            assert not later, f"{each!r} came after {later}"
        self.given += bodies
        incarnation = need_u64(head, "incarnation")
        handles = [
            [incarnation, first + row, 1] for first, _, count, _ in need_rows(head, "parts", 4) for row in range(count)
        ]
        self.holds.update(zip(bodies, handles, strict=True))
        return bodies

    def settle(self, world: World, peer: SimPeer, body: bytes, kind: RequestType = RequestType.ACK) -> None:
        self.said.add(body)
        handle = self.holds[body]
        said = {"rejects": [[*handle, "no", ""]]} if kind == RequestType.REJECT else {"handles": [handle]}
        answer, _ = world.ask(peer, kind, {"subject": SUBJECT, "group": GROUP, **said})  # type: ignore[dict-item]
        assert answer["stale"] == []
        self.answered.add(body)


def _pull_head(wait_ms: int = 0) -> Head:
    return {**pull_head(wait_ms=wait_ms, lease_ms=LEASE_MS), "ordered": True}


def workload(world: World, told: Told) -> None:
    """Messages of three keys are acknowledged, rejected, given back and put off, with two checkpoints."""
    peer = SimPeer()
    world.hello(peer, 1)
    told.hand_over(world, peer, 1)
    assert told.pull(world, peer) == [b"a1", b"b1"]
    told.wait(world, SimPeer())
    told.settle(world, peer, b"a1")
    assert told.read() == [b"a2"]
    world.core.checkpoint()
    told.hand_over(world, peer, 2)
    told.settle(world, peer, b"b1", RequestType.REJECT)
    assert told.pull(world, peer) == [b"b2", b"c1"]
    names = {"subject": SUBJECT, "group": GROUP}
    world.ask(peer, RequestType.RETRY, {**names, "retries": [[*told.holds[b"a2"], PUT_OFF_MS, "no"]]})
    world.ask(peer, RequestType.NACK, {**names, "handles": [told.holds[b"c1"]]})
    assert told.pull(world, peer) == [b"c1"]
    world.core.checkpoint()
    told.settle(world, peer, b"b2")
    told.settle(world, peer, b"c1")
    assert told.pull(world, peer) == [b"b3", b"c2"]
    world.core.stop(lambda: None)


def check(world: World, told: Told) -> None:
    """All that is left comes, in order, and nothing else."""
    peer = SimPeer()
    said, answered = set(told.said), set(told.answered)
    came: list[bytes] = []
    # What the life before held comes when its lease ends, and holds up others until then.
    for wait_ms in (0, LEASE_MS):
        world.pass_time(wait_ms)
        while bodies := told.pull(world, peer):
            came += bodies
            for body in bodies:
                told.settle(world, peer, body)
    assert len(set(came)) == len(came), f"something came twice: {came}"
    assert not set(came) & answered, f"{set(came) & answered} came again"
    missing = set(told.handed_over) - said - set(came)
    assert not missing, f"{missing} never came"


def test_rule_Q8_a_group_keeps_its_order_whichever_disk_operation_it_dies_at() -> None:
    whole = live(workload, Told(), SETTINGS)
    told = whole.told
    assert told.answered == {b"a1", b"b1", b"b2", b"c1"}
    for crash_at in range(1, len(whole.disk.operations) + 1):
        life = live(workload, Told(), SETTINGS, crash_at)
        life.told.read()
        check_each_next(life, SETTINGS, check)
