"""Fetching ahead, and giving back what no handler was given (rule Q4), against the core in memory."""

import pytest

from delayd.errors import BadRequest
from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_int,
    need_list,
    need_rows,
)
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head, ready_world

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


def test_rule_Q4_what_no_handler_was_given_comes_again_as_the_same_attempt() -> None:
    world, peer = ready_world([b"a", b"b", b"c"])
    pulled = world.pull(peer)
    assert world.give_back(peer, cut(pulled, 1, 3)) == []
    again = world.pull(peer)
    assert (again.bodies, again.attempts) == ([b"b", b"c"], [1])
    world.ack(peer, again.handles, kind=RequestType.NACK)
    third = world.pull(peer)
    assert third.attempts == [2]
    world.give_back(peer, third.handles)
    assert world.pull(peer).attempts == [2]
    assert world.ack(peer, cut(pulled, 0, 1)) == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_rule_Q4_a_restart_counts_no_attempt_that_was_given_back(checkpointed: bool) -> None:
    world, peer = ready_world([b"a", b"b", b"c"])
    first = world.pull(peer, most=1)
    second = world.pull(peer, most=1)
    world.ack(peer, first.handles, kind=RequestType.NACK)
    world.give_back(peer, second.handles)
    if checkpointed:
        world.core.checkpoint()
    state = world.state.after_crash()
    later = World(world.disk.after_crash(), state, world.clock.restarted())
    found = [later.pull(SimPeer(), most=1) for _ in range(3)]
    assert [(one.bodies, one.attempts) for one in found] == [([b"a"], [2]), ([b"b"], [1]), ([b"c"], [1])]


def test_rule_Q5_what_was_given_back_and_what_is_new_are_two_pulls() -> None:
    world, peer = ready_world([b"a", b"b"], [b"c", b"d"])
    world.give_back(peer, world.pull(peer, most=2).handles)
    assert world.pull(peer).bodies == [b"a", b"b", b"c", b"d"]
    held = list(world.core._pulls.groups[SUBJECT, GROUP].window.held())
    assert [(run.consume_first, run.messages) for run in held] == [(0, 2), (2, 2)]


def test_rule_Q4_messages_go_to_those_with_empty_hands_first() -> None:
    world, peer = ready_world()
    ahead, first, second = ask(world, 1, ahead=3), ask(world, 1), ask(world, 1, ahead=0)
    # The one with messages ahead was told that another one waits, and asks again.
    assert answer(ahead)["parts"] == [] and answer(ahead)["wanted"] == 1
    ahead = ask(world, 5, ahead=3)
    world.dispatch(peer, 1, dispatch_batch(1, [b"a", b"b", b"c", b"d"]))
    assert [bodies(first), bodies(second), bodies(ahead)] == [[b"a"], [b"b"], [b"c", b"d"]]


def test_rule_Q4_who_has_messages_ahead_is_told_when_somebody_begins_to_wait_with_empty_hands() -> None:
    world, _ = ready_world([b"%d" % number for number in range(10)])
    hoarder = SimPeer()
    pulled = world.pull(hoarder)
    listening = world.send(hoarder, RequestType.PULL, pull_head(most=1, wait_ms=WAIT_MS, ahead=9))
    assert listening not in hoarder.answers
    hungry = ask(world, 2)
    ((head, _),) = hoarder.answers[listening]
    assert need_rows(head, "parts", 4) == [] and need_int(head, "wanted") == 2
    assert not hungry.answers
    world.give_back(hoarder, cut(pulled, 8, 10))
    assert bodies(hungry) == [b"8", b"9"]
    assert answer(hungry)["wanted"] == 0


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


def test_rule_Q4_an_acknowledgement_is_told_what_others_want() -> None:
    world, peer = ready_world([b"a", b"b"])
    pulled = world.pull(peer)
    names: Head = {"subject": SUBJECT, "group": GROUP}
    head, _ = world.ask(peer, RequestType.ACK, {**names, "handles": cut(pulled, 0, 1)})
    assert head["wanted"] == 0
    ask(world, 5)
    head, _ = world.ask(peer, RequestType.ACK, {**names, "handles": cut(pulled, 0, 1)})
    assert head["wanted"] == 5
    head, _ = world.ask(peer, RequestType.NACK, {**names, "handles": cut(pulled, 1, 2), "uncounted": True})
    assert head["wanted"] == 0


def test_fields_that_may_be_left_out_have_a_type_all_the_same() -> None:
    world, _ = ready_world([b"a"])
    with pytest.raises(BadRequest):
        world.ask(SimPeer(), RequestType.PULL, pull_head(ahead=-1))
    with pytest.raises(BadRequest):
        world.ask(SimPeer(), RequestType.NACK, {"subject": SUBJECT, "group": GROUP, "handles": [], "uncounted": 1})


def test_one_that_fetches_ahead_is_forgotten_with_its_connection() -> None:
    world, peer = ready_world([b"a"])
    world.pull(peer)
    gone = ask(world, 1, ahead=1)
    world.core.disconnected(gone)
    ask(world, 1)
    world.pass_time(WAIT_MS)
    assert not gone.answers


def test_rule_Q4_who_stops_waiting_hears_that_nothing_is_on_its_way() -> None:
    world, peer = ready_world()
    other = SimPeer()
    waiting = world.send(peer, RequestType.PULL, pull_head(wait_ms=30_000))
    another = world.send(peer, RequestType.PULL, pull_head(group="another", wait_ms=30_000))
    world.send(other, RequestType.PULL, pull_head(wait_ms=30_000))
    names: Head = {"subject": pull_head()["subject"], "group": pull_head()["group"]}
    assert world.ask(peer, RequestType.PULL_END, names)[0] == {}
    ((head, body),) = peer.answers[waiting]
    assert head["parts"] == [] and body == b""
    assert another not in peer.answers and not other.answers
    # A group or a connection that waits for nothing has nothing to end.
    assert world.ask(SimPeer(), RequestType.PULL_END, names)[0] == {}
    assert world.ask(peer, RequestType.PULL_END, {**names, "group": "unheard"})[0] == {}
    with pytest.raises(BadRequest):
        world.ask(peer, RequestType.PULL_END, {**names, "group": ""})
    assert len(need_list(world.ask(peer, RequestType.GROUPS, {"subject": None})[0], "groups")) == 2
