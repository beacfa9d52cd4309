"""Ordered groups: of each ordering key the next message only when the one before is settled (rule Q8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest

from delayd.errors import BadArgument, NotOrdered
from delayd.testing.executor import StepExecutor
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from realtime import parts
from realtime.groups import Group
from realtime.order import KNOWN_MAX, LOOKED_AT, LOOKED_AT_A_BATCH, Order
from realtime.window import Offer, Stage, pause_after
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head

LEASE_MS = 30_000
HOUR_MS = 3_600_000
SEEDS = 150
STEPS = 60
NAMES: Head = {"subject": SUBJECT, "group": GROUP}


def _pull(world: World, peer: SimPeer, most: int = 1000, **fields: bool) -> Pulled:
    head = {**pull_head(most=most, lease_ms=LEASE_MS), "ordered": True, **fields}
    answer, body = world.ask(peer, RequestType.PULL, head)
    return Pulled(need_u64(answer, "incarnation"), need_rows(answer, "parts", 4), bodies_of(body), body)


def _world(*batches: tuple[list[bytes], list[int]]) -> World:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    for number, (bodies, keys) in enumerate(batches, 1):
        world.dispatch(peer, 1, dispatch_batch(number, bodies, ordering=keys))
    return world


def _killed(world: World) -> World:
    return World(world.disk.after_kill(), world.state.after_crash(), world.clock.restarted(), settings=world.settings)


def _again(how: str, world: World) -> World:
    return world.restarted() if how == "restart" else _killed(world)


def _handle(pulled: Pulled, place: int) -> list[int]:
    """The handle of one message of an answer."""
    for first, _, count, _ in pulled.parts:
        if place < count:
            return [pulled.incarnation, first + place, 1]
        place -= count
    raise LookupError(place)


def test_the_next_of_a_key_comes_when_the_one_before_is_acknowledged() -> None:
    world, peer = _world(([b"a1", b"a2", b"b1"], [1, 1, 2]), ([b"0", b"a3", b"b2"], [0, 1, 2])), SimPeer()
    first = _pull(world, peer)
    assert first.bodies == [b"a1", b"b1", b"0"]
    assert _pull(world, peer).bodies == []
    assert world.ack(peer, [_handle(first, 0)]) == []
    second = _pull(world, peer)
    assert second.bodies == [b"a2"]
    assert world.ack(peer, [_handle(first, 1), _handle(second, 0)]) == []
    assert _pull(world, peer).bodies == [b"a3", b"b2"]


def test_a_pull_that_waits_gets_what_an_acknowledgement_sets_free() -> None:
    world, peer, other = _world(([b"a1", b"a2"], [1, 1])), SimPeer(), SimPeer()
    pulled = _pull(world, peer)
    waiting = world.send(other, RequestType.PULL, {**pull_head(wait_ms=10_000), "ordered": True})
    assert waiting not in other.answers
    world.ack(peer, pulled.handles)
    ((_, body),) = other.answers[waiting]
    assert bodies_of(body) == [b"a2"]


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_start_knows_what_waits_for_what(how: str) -> None:
    world, peer = _world(([b"a1", b"b1", b"a2", b"b2", b"0"], [1, 2, 1, 2, 0])), SimPeer()
    pulled = _pull(world, peer)
    assert pulled.bodies == [b"a1", b"b1", b"0"]
    world.ack(peer, [_handle(pulled, 1)])
    world, peer = _again(how, world), SimPeer()
    assert _pull(world, peer).bodies == [b"b2"]
    # The messages of the life before are held until their lease ends.
    world.pass_time(LEASE_MS)
    assert _pull(world, peer).bodies == [b"a1", b"b2", b"0"]


def test_a_message_that_is_put_off_keeps_its_place_and_its_attempts() -> None:
    world, peer = _world(([b"a1", b"a2", b"b1"], [1, 1, 2])), SimPeer()
    pulled = _pull(world, peer)
    retry: list[HeadValue] = [*_handle(pulled, 0), HOUR_MS, "failed"]
    assert world.ask(peer, RequestType.RETRY, {**NAMES, "retries": [retry]})[0]["stale"] == []
    world.pass_time(HOUR_MS - 1)
    again = _pull(world, peer)
    assert again.bodies == [b"b1"]  # Its lease has ended.
    world.pass_time(1)
    again = _pull(world, peer)
    assert again.bodies == [b"a1"] and again.attempts == [2]
    world.ack(peer, again.handles)
    assert _pull(world, peer).bodies == [b"a2"]


def test_a_dead_letter_leaves_the_order() -> None:
    world, peer = _world(([b"a1", b"a2"], [1, 1])), SimPeer()
    pulled = _pull(world, peer)
    reject: list[HeadValue] = [*_handle(pulled, 0), "broken", ""]
    assert world.ask(peer, RequestType.REJECT, {**NAMES, "rejects": [reject]})[0]["stale"] == []
    assert _pull(world, peer).bodies == [b"a2"]


def test_a_delay_of_more_than_a_day_is_refused_by_name() -> None:
    world, peer = _world(([b"a1"], [1])), SimPeer()
    retry: list[HeadValue] = [*_handle(_pull(world, peer), 0), 24 * HOUR_MS + 1, ""]
    with pytest.raises(BadArgument, match="24 hours at most"):
        world.ask(peer, RequestType.RETRY, {**NAMES, "retries": [retry]})


def test_a_group_that_was_made_without_an_order_refuses_one() -> None:
    world, peer = _world(([b"a1", b"a2"], [1, 1])), SimPeer()
    assert _pull(world, peer, ordered=False).bodies == [b"a1", b"a2"]
    with pytest.raises(NotOrdered, match="was made without an order"):
        _pull(world, peer)


def test_a_consumer_that_asks_for_no_order_gets_that_of_the_group() -> None:
    world, peer = _world(([b"a1", b"a2"], [1, 1])), SimPeer()
    assert _pull(world, peer).bodies == [b"a1"]
    assert _pull(world, SimPeer(), ordered=False).bodies == []


def test_what_an_operator_moves_back_comes_in_order_again() -> None:
    world, peer = _world(([b"a1", b"a2", b"b1"], [1, 1, 2])), SimPeer()
    pulled = _pull(world, peer)
    world.ack(peer, pulled.handles)
    assert _pull(world, peer).bodies == [b"a2"]
    world.ask(peer, RequestType.MOVE_GROUP, {**NAMES, "to": "earliest"})
    assert _pull(world, peer).bodies == [b"a1", b"b1"]


def _put_off(world: World, peer: SimPeer, pulled: Pulled) -> None:
    retry: list[HeadValue] = [*_handle(pulled, 0), HOUR_MS, "failed"]
    assert world.ask(peer, RequestType.RETRY, {**NAMES, "retries": [retry]})[0]["stale"] == []


def test_what_is_put_off_after_a_move_does_not_come_when_an_earlier_pause_ends() -> None:
    world, peer = _world(([b"a1", b"a2"], [1, 1])), SimPeer()
    _put_off(world, peer, _pull(world, peer))
    world.pass_time(HOUR_MS // 2)
    world.ask(peer, RequestType.MOVE_GROUP, {**NAMES, "to": "earliest"})
    _put_off(world, peer, _pull(world, peer))
    world.pass_time(HOUR_MS // 2)
    assert _pull(world, peer).bodies == []
    world.pass_time(HOUR_MS // 2)
    assert _pull(world, peer).bodies == [b"a1"]


@pytest.mark.parametrize("word", [RequestType.ACK, RequestType.REJECT])
def test_the_next_of_a_key_leaves_when_what_was_said_of_the_one_before_is_durable(word: RequestType) -> None:
    world, peer, other, sync = _world(([b"a1", b"a2"], [1, 1])), SimPeer(), SimPeer(), StepExecutor()
    pulled = _pull(world, peer)
    world.core.stop(lambda: None)
    world.core.close()
    world.lock.release()
    world = World(world.disk, world.state, world.clock.restarted(), pulls=sync, settings=world.settings)
    rejects: list[HeadValue] = [[*_handle(pulled, 0), "broken", ""]]
    said: Head = {"handles": [_handle(pulled, 0)]} if word == RequestType.ACK else {"rejects": rejects}
    waiting = world.send(other, RequestType.PULL, {**pull_head(wait_ms=10_000), "ordered": True})
    world.send(peer, word, {**NAMES, **said})
    assert waiting not in other.answers
    sync.run_all()
    ((_, body),) = other.answers[waiting]
    assert bodies_of(body) == [b"a2"]


def test_messages_behind_many_of_one_key_are_found() -> None:
    count = LOOKED_AT + 100
    bodies = [b"%d" % number for number in range(count)]
    world, peer = _world((bodies[:1000], [7] * 1000), (bodies[1000:], [7] * (count - 1000)), ([b"x"], [8])), SimPeer()
    found = [body for _ in range(3) for body in _pull(world, peer, most=2).bodies]
    assert found == [b"0", b"x"]


def test_how_many_messages_it_looks_ahead_is_bounded() -> None:
    order = Order()
    order.begin(0, (), ())
    while order.wants_more(10 * KNOWN_MAX):
        order.add([1] * LOOKED_AT)
    assert order.scanned == KNOWN_MAX and order.ready == 1 and order.waiting == KNOWN_MAX - 1
    order.moved(0, 1, Stage.HELD, 1)
    assert not order.offers_any(10 * KNOWN_MAX)
    order.moved(0, 1, Stage.SETTLED, 1)
    assert order.offers_any(10 * KNOWN_MAX)


@dataclass
class Message:
    """What the model knows of one message."""

    key: int
    state: str = "waits"  # Or held, settled.
    until_ms: int = 0  # Of a message that waits: when its pause ends; of one that is held: its lease.
    attempt: int = 1
    handle: list[int] = field(default_factory=list)


class Walk:
    """Random consumers of an ordered group, and the order that they must see."""

    def __init__(self, seed: int, *, short: bool) -> None:
        self.short = short  # Each pull looks at a few messages only, so a group is loaded in several.
        self.random = Random(seed)
        self.world = World()
        self.peers = [SimPeer(), SimPeer()]
        self.origin = SimPeer()
        self.world.hello(self.origin, 1)
        self.batches, self.session = 0, 1
        self.messages: list[Message] = []

    def dispatch(self) -> None:
        """Some more messages of a few keys."""
        self.batches += 1
        keys = [self.random.choice([0, 1, 1, 2, 3]) for _ in range(self.random.randint(1, 6))]
        bodies = [b"%d" % (len(self.messages) + at) for at in range(len(keys))]
        w = (1, self.batches - 1) if self.batches > 1 else (0, 0)
        self.world.dispatch(self.origin, self.session, dispatch_batch(self.batches, bodies, ordering=keys, w=w))
        self.messages += [Message(key) for key in keys]

    def pull(self, most: int | None = None) -> None:
        """One answer must have the first messages that may come, and no others."""
        most = self.random.choice([1, 2, 100]) if most is None else most
        peer = self.random.choice(self.peers)
        now_ms = self.world.clock.monotonic_ms()
        may = [number for number, each in enumerate(self.messages) if self._may_come(number, each, now_ms)]
        pulled = _pull(self.world, peer, most)
        while self.short and may and not pulled.bodies:
            pulled = _pull(self.world, peer, most)
        got = [int(body) for body in pulled.bodies]
        # An answer may end before a stored batch of which it would have only some messages.
        most = 1 if self.short else most
        assert got == may[: len(got)] and (len(got) == len(may) or (got and most < len(may))), (got, may)
        attempts = [attempt for _, _, count, attempt in pulled.parts for _ in range(count)]
        for place, number in enumerate(got):
            each = self.messages[number]
            assert attempts[place] == each.attempt, number
            each.state, each.until_ms, each.handle = "held", now_ms + LEASE_MS, _handle(pulled, place)

    def _may_come(self, number: int, each: Message, now_ms: int) -> bool:
        if each.state != "waits" or each.until_ms > now_ms:
            return False
        before = [one for one in self.messages[:number] if each.key and one.key == each.key]
        return all(one.state == "settled" for one in before)

    def settle(self) -> None:
        """Say something of one message that is held."""
        held = [each for each in self.messages if each.state == "held"]
        if not held:
            return
        each = self.random.choice(held)
        now_ms = self.world.clock.monotonic_ms()
        word = self.random.choice(["ack", "ack", "nack", "return", "put off", "reject"])
        kind, head = RequestType.ACK, {**NAMES, "handles": [each.handle]}
        pause_ms = 0
        if word == "nack":
            kind, pause_ms = RequestType.NACK, pause_after(each.attempt)
        elif word == "return":
            kind, head = RequestType.NACK, head | {"uncounted": True}
        elif word == "put off":
            pause_ms = self.random.choice([10, 20_000])
            kind, head = RequestType.RETRY, {**NAMES, "retries": [[*each.handle, pause_ms, "failed"]]}
        elif word == "reject":
            kind, head = RequestType.REJECT, {**NAMES, "rejects": [[*each.handle, "broken", ""]]}
        assert self.world.ask(self.peers[0], kind, head)[0]["stale"] == []
        if word in ("ack", "reject"):
            each.state = "settled"
        else:
            each.state, each.until_ms = "waits", now_ms + pause_ms
            each.attempt += word != "return"

    def pass_time(self) -> None:
        """Leases and pauses end."""
        self.world.pass_time(self.random.choice([5, 150, 25_000, 40_000]))
        now_ms = self.world.clock.monotonic_ms()
        for each in self.messages:
            if each.state == "held" and each.until_ms <= now_ms:
                each.state, each.until_ms = "waits", 0
                each.attempt += 1

    def begin_again(self) -> None:
        """Another life: pauses are over, and leases begin again."""
        self.world = _again(self.random.choice(["restart", "kill"]), self.world)
        self.peers, self.origin = [SimPeer(), SimPeer()], SimPeer()
        self.session += 1
        self.world.hello(self.origin, self.session, w=(1, self.batches) if self.batches else (0, 0))
        now_ms = self.world.clock.monotonic_ms()
        for each in self.messages:
            each.until_ms = now_ms + LEASE_MS if each.state == "held" else 0

    def rest(self) -> None:
        """Everything comes to its end."""
        while not all(each.state == "settled" for each in self.messages):
            self.world.pass_time(LEASE_MS)
            now_ms = self.world.clock.monotonic_ms()
            for each in self.messages:
                if each.state == "held" and each.until_ms <= now_ms:
                    each.state, each.until_ms, each.attempt = "waits", 0, each.attempt + 1
            self.pull(100)
            for each in self.messages:
                if each.state == "held":
                    assert self.world.ack(self.peers[0], [each.handle]) == []
                    each.state = "settled"

    def steps(self) -> Iterator[Callable[[], None]]:
        """What happens next, again and again."""
        choices = [self.dispatch, self.pull, self.pull, self.settle, self.settle, self.pass_time, self.begin_again]
        weights = [3, 4, 4, 5, 5, 2, 1]
        while True:
            yield self.random.choices(choices, weights)[0]


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_random_consumers_see_the_order_of_each_key(first: int, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if short:
        monkeypatch.setattr(parts, "LOOKED_AT", 3)
        monkeypatch.setattr(parts, "LOOKED_AT_A_BATCH", 1)
    for seed in range(first, first + 10):
        walk = Walk(seed, short=short)
        walk.dispatch()
        for _, step in zip(range(STEPS), walk.steps(), strict=False):
            step()
        walk.rest()


def test_a_message_that_can_be_read_again_comes_before_a_later_one_that_goes_back() -> None:
    order = Order()
    # 5 was pulled while 3, of the same key, could not be read.
    order.begin(6, [range(5, 6)], [Offer(3, 1, 1)])
    order.load([1])
    order.load([1])
    assert order.is_loaded
    order.moved(5, 6, Stage.OFFERED, 2)
    assert [(offer.consume_first, offer.messages) for offer in order.offers()] == [(3, 1)]
    order.moved(3, 4, Stage.HELD, 1)
    order.moved(3, 4, Stage.SETTLED, 1)
    assert [(offer.consume_first, offer.attempt) for offer in order.offers()] == [(5, 2)]


def _group(world: World) -> Group:
    return world.core._pulls.groups[SUBJECT, GROUP]


def test_one_pull_reads_a_bounded_number_of_batches() -> None:
    count = 3 * LOOKED_AT // LOOKED_AT_A_BATCH
    world, peer = _world(*[([b"%d" % number], [7]) for number in range(count)]), SimPeer()
    assert _pull(world, peer, most=1).bodies == [b"0"]
    order = _group(world).order
    assert order is not None
    before = order.scanned
    assert _pull(world, peer).bodies == [] and order.scanned == before + LOOKED_AT // LOOKED_AT_A_BATCH


def test_messages_that_the_group_does_not_want_hold_up_nobody() -> None:
    world, peer = _world(([b"x"] * 500, [7] * 500)), SimPeer()
    head = {**pull_head(), "ordered": True, "tags_any": ["red"]}
    world.ask(peer, RequestType.PULL, head)
    assert _group(world).next == 500 and _group(world).oldest == 500
