"""Fetching ahead, and giving back what no handler was given (rule Q4), against the core in memory."""

from delayd.wire.frame import Head
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import Pulled, SimPeer, World, pull_head, ready_world

WAIT_MS = 5_000


def ask(world: World, most: int, ahead: int | None = None) -> SimPeer:
    """A consumer of its own whose PULL waits, unless it is answered at once."""
    peer = SimPeer()
    world.send(peer, RequestType.PULL, pull_head(most=most, wait_ms=WAIT_MS, ahead=ahead))
    return peer


def answer(peer: SimPeer) -> Head:
    """What its PULL was answered."""
    ((head, _),) = peer.answers[1]
    return head


def bodies(peer: SimPeer) -> list[bytes]:
    ((_, body),) = peer.answers[1]
    return bodies_of(body)


def cut(pulled: Pulled, begin: int, end: int) -> list[list[int]]:
    """Handles of some messages of an answer with one part."""
    ((pull_first, _, _, _),) = pulled.parts
    return [[pulled.incarnation, pull_first + begin, end - begin]]


def test_rule_Q4_who_fetches_ahead_while_others_wait_is_told_after_a_moment() -> None:
    world, peer = ready_world([b"a", b"b"])
    pulled = world.pull(peer)
    hungry = ask(world, 7)
    ahead = ask(world, 1, ahead=2)
    world.pass_time(9)
    assert not ahead.answers
    world.pass_time(1)
    assert answer(ahead)["wanted"] == 7
    world.give_back(peer, cut(pulled, 1, 2))
    assert bodies(hungry) == [b"b"]


def test_nothing_is_given_to_a_connection_that_ends_whose_end_was_not_told_yet() -> None:
    world, peer = ready_world()
    gone, other = ask(world, 5), ask(world, 5)
    gone.close()
    world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))
    assert not gone.answers and not gone.errors
    assert bodies(other) == [b"a"]
    world.core.disconnected(gone)


def test_rule_Q4_no_more_are_told_than_have_what_is_wanted() -> None:
    world, peer = ready_world([b"a"])
    world.pull(peer)
    holders = [ask(world, 1, ahead=4) for _ in range(3)]
    ask(world, 3)
    assert [len(holder.answers) for holder in holders] == [1, 1, 0]
    assert [answer(holder)["wanted"] for holder in holders[:2]] == [3, 1]
