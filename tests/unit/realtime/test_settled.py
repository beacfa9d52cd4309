"""What became of a pull is known in every later life (rules Q1, Q5), and leases and pauses have their length."""

from collections.abc import Callable

import pytest

from delayd.wire.requests import RequestType
from realtime import pulls as pulls_module
from realtime import window as window_module
from realtime.window import PAUSE_MS, PAUSE_MS_MAX, Stage, pause_after
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head, ready_world

HOUR_MS = 3_600_000


def killed(world: World) -> World:
    """The next life after a SIGKILL: the answer of the last request is lost, what it did is not."""
    return World(world.disk.after_kill(), world.state.after_crash(), world.clock.restarted(), settings=world.settings)


def crashed(world: World) -> World:
    """The next life after a power loss."""
    return World(world.disk.after_crash(), world.state.after_crash(), world.clock.restarted(), settings=world.settings)


def checkpointed(world: World) -> World:
    """One whose checkpoint has passed the pull log, of which retention keeps nothing."""
    world.core.checkpoint()
    return killed(world)


LIVES: list[Callable[[World], World]] = [killed, crashed, checkpointed, World.restarted]


@pytest.mark.parametrize("first", LIVES)
@pytest.mark.parametrize("second", LIVES)
def test_rule_Q5_a_durable_acknowledgement_is_done_in_whatever_life_it_is_repeated(
    first: Callable[[World], World], second: Callable[[World], World]
) -> None:
    world, peer = ready_world([b"a", b"b"], [b"c"], [b"d"], segment_bytes=4096)
    acked, returned, lapsed = (world.pull(peer, most=most) for most in (2, 1, 1))
    assert world.ack(peer, acked.handles) == []
    assert world.give_back(peer, returned.handles) == []
    world.pass_time(30_000)
    # The end of a lease is durable with the next acknowledgement.
    world.ack(peer, [])
    for life in (first, second):
        world = life(world)
        for _ in range(2):
            assert world.ack(SimPeer(), acked.handles) == []
            assert world.ack(SimPeer(), returned.handles) == returned.handles
            assert world.give_back(SimPeer(), returned.handles) == []
            assert world.ack(SimPeer(), returned.handles, kind=RequestType.NACK) == []
            assert world.ack(SimPeer(), lapsed.handles) == lapsed.handles
            assert world.ack(SimPeer(), lapsed.handles, kind=RequestType.NACK) == lapsed.handles
    assert drained(world) == [b"c", b"d"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_rule_Q5_what_a_life_gave_out_and_lost_is_stale_though_a_later_one_acknowledged_its_numbers(
    checkpoint: bool,
) -> None:
    world, peer = ready_world([b"a"], [b"b"])
    kept = world.pull(peer, most=1)
    world.ack(peer, kept.handles)
    lost = world.pull(peer, most=1)
    world = crashed(world)
    again = world.pull(peer, most=1)
    assert again.parts[0][0] == lost.parts[0][0]
    assert world.ack(peer, again.handles) == []
    if checkpoint:
        world.core.checkpoint()
    for life in (killed, crashed, crashed):
        assert world.ack(SimPeer(), lost.handles) == lost.handles
        assert world.ack(SimPeer(), again.handles) == []
        assert world.ack(SimPeer(), kept.handles) == []
        world = life(world)
    assert world.pull(peer).bodies == []


def test_rule_Q5_a_range_names_what_is_stale_of_it_and_nothing_else_in_a_later_life() -> None:
    world, peer = ready_world(*([b"%d" % number] for number in range(6)))
    pulls = [world.pull(peer, most=1) for _ in range(6)]
    world.ack(peer, pulls[0].handles)
    world.ack(peer, pulls[2].handles, kind=RequestType.NACK)
    world.ack(peer, pulls[5].handles)
    world = killed(world)
    ((incarnation, first, _),) = pulls[0].handles
    # Done, held, given back, held, held, done, and two that were never given out.
    assert sorted(world.ack(SimPeer(), [[incarnation, first, 8]])) == [*pulls[2].handles, [incarnation, first + 6, 2]]
    assert drained(world) == [b"2"]


def test_rule_Q5_a_group_that_was_made_again_knows_nothing_of_the_one_before() -> None:
    world, peer = ready_world([b"a"])
    pulled = world.pull(peer)
    world.ack(peer, pulled.handles)
    world.ask(peer, RequestType.DELETE_GROUP, {"subject": SUBJECT, "group": GROUP})
    again = world.pull(peer)
    assert again.bodies == [b"a"]
    assert world.ack(peer, pulled.handles) == pulled.handles
    world = killed(world)
    assert world.ack(peer, pulled.handles) == pulled.handles
    assert world.ack(peer, again.handles) == []


def test_rule_Q5_what_is_not_known_any_more_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "GIVEN_BACK_RUNS_MAX", 3)
    world, peer = ready_world([b"%d" % number for number in range(12)])
    pulls = [world.pull(peer, most=1) for _ in range(12)]
    world.ack(peer, pulls[0].handles)
    for pulled in pulls[1::2]:
        world.ack(peer, pulled.handles, kind=RequestType.NACK)
    # The oldest that were given back are forgotten, and nobody can tell them from the first one, which was not.
    assert [world.ack(peer, pulls[number].handles) for number in (0, 1, 3)] == [
        pulls[number].handles for number in (0, 1, 3)
    ]
    # What is held is not concerned, and what is newer is known.
    assert [world.ack(peer, pulls[number].handles) for number in (2, 4, 6, 8, 10)] == [[]] * 5
    assert [world.ack(peer, pulls[number].handles) for number in (8, 10)] == [[], []]


def test_rule_B1_what_was_given_back_is_bounded_over_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls_module, "GIVEN_BACK_MAX", 20)
    monkeypatch.setattr(pulls_module, "GIVEN_BACK_LEFT", 2)
    world, peer = ready_world([b"%d" % number for number in range(30)])
    for group in ("a", "b", "c"):
        pulls = [world.pull(peer, group, most=1) for _ in range(30)]
        for pulled in pulls[::2]:
            world.ack(peer, pulled.handles, group, kind=RequestType.NACK)
        kept = sum(
            world.core._pulls.groups[SUBJECT, name].window.given_back for name in "abc"[: "abc".index(group) + 1]
        )
        assert kept <= 20 + 2 * 3
    world.ask(peer, RequestType.DELETE_GROUP, {"subject": SUBJECT, "group": "a"})
    assert world.core._pulls._given_back == sum(group.window.given_back for group in world.core._pulls.groups.values())


def drained(world: World) -> list[bytes]:
    """All that is offered now, sorted."""
    found: list[bytes] = []
    while bodies := world.pull(SimPeer()).bodies:
        found += bodies
    return sorted(found)


def one_pulled(lease_ms: int) -> tuple[World, Pulled]:
    world, peer = ready_world([b"long work"])
    head, _ = world.ask(peer, RequestType.PULL, pull_head(lease_ms=lease_ms))
    return world, Pulled(head["incarnation"], head["parts"], [], b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("first", LIVES)
@pytest.mark.parametrize("second", LIVES)
def test_rule_Q1_a_lease_keeps_its_length_over_restarts(
    first: Callable[[World], World], second: Callable[[World], World]
) -> None:
    world, pulled = one_pulled(HOUR_MS)
    # A power loss keeps what is durable.
    world.ack(SimPeer(), [], GROUP)
    for life in (first, second):
        world = life(world)
        world.pass_time(HOUR_MS - 1)
        assert world.pull(SimPeer()).bodies == []
    world.pass_time(1)
    again = world.pull(SimPeer())
    assert (again.bodies, again.attempts) == ([b"long work"], [2])
    assert world.ack(SimPeer(), pulled.handles) == pulled.handles


@pytest.mark.parametrize("step_ms", [-30 * 24 * HOUR_MS, 30 * 24 * HOUR_MS])
def test_rule_T3_a_lease_keeps_its_length_though_the_clock_was_stepped_meanwhile(step_ms: int) -> None:
    world, _ = one_pulled(HOUR_MS)
    clock = world.clock.restarted()
    clock.step_wall(step_ms)
    world = World(world.disk.after_kill(), world.state.after_crash(), clock)
    world.pass_time(HOUR_MS - 1)
    assert world.pull(SimPeer()).bodies == []
    world.pass_time(1)
    assert world.pull(SimPeer()).bodies == [b"long work"]


def test_a_message_that_is_only_given_back_comes_ever_more_slowly() -> None:
    world, peer = ready_world([b"poison"])
    came: list[int] = []
    begin_ms = world.clock.monotonic_ms()
    while world.clock.monotonic_ms() - begin_ms < 60_000:
        pulled = world.pull(peer)
        if pulled.bodies:
            came.append(world.clock.monotonic_ms() - begin_ms)
            assert pulled.attempts == [len(came)]
            assert world.ack(peer, pulled.handles, kind=RequestType.NACK) == []
        else:
            world.pass_time(20)
    assert came[:5] == [0, 0, 100, 300, 700]
    assert came[-1] - came[-2] == PAUSE_MS_MAX and len(came) < 16
    assert [pause_after(attempt) for attempt in (1, 2, 3, 65_535)] == [0, PAUSE_MS, 2 * PAUSE_MS, PAUSE_MS_MAX]


def paused_world() -> tuple[World, SimPeer]:
    """One of whose two messages waits for the end of its pause."""
    world, peer = ready_world([b"a", b"b"])
    for _ in range(2):
        world.ack(peer, world.pull(peer, most=1).handles, kind=RequestType.NACK)
    return world, peer


def test_others_are_offered_during_a_pause_and_who_waits_is_served_at_its_end() -> None:
    world, peer = paused_world()
    assert world.pull(peer).bodies == [b"b"]
    waiting = SimPeer()
    world.send(waiting, RequestType.PULL, pull_head(wait_ms=5_000))
    assert world.core.next_wake_ms() <= world.clock.monotonic_ms() + PAUSE_MS
    world.pass_time(PAUSE_MS - 1)
    assert not waiting.answers
    world.pass_time(1)
    assert waiting.answers[1][0][0]["parts"][0][3] == 3  # type: ignore[index]


def test_what_pauses_is_kept_by_retention_and_offered_at_once_by_the_next_life() -> None:
    world, peer = paused_world()
    group = world.core._pulls.groups[SUBJECT, GROUP]
    assert (group.oldest, group.window.others.runs[Stage.PAUSED]) == (0, 1)
    world.core.checkpoint()
    found = killed(world).pull(peer)
    assert sorted(found.bodies) == [b"a", b"b"]


def test_a_pause_ends_with_its_group() -> None:
    world, peer = paused_world()
    world.ask(peer, RequestType.DELETE_GROUP, {"subject": SUBJECT, "group": GROUP})
    world.pass_time(PAUSE_MS)
    assert world.pull(peer).bodies == [b"a", b"b"]


def test_what_no_handler_was_given_never_pauses() -> None:
    world, peer = ready_world([b"a"])
    world.ack(peer, world.pull(peer).handles, kind=RequestType.NACK)
    for _ in range(50):
        pulled = world.pull(peer)
        assert pulled.attempts == [2]
        world.give_back(peer, pulled.handles)
