"""What became of a pull is known in every later life (rules Q1, Q5), and leases and pauses have their length."""

import pytest

from delayd.wire.requests import RequestType
from realtime import pulls as pulls_module
from realtime.group_window import PAUSE_MS, PAUSE_MS_MAX, Stage, pause_after
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, ready_world


def killed(world: World) -> World:
    """The next life after a SIGKILL: the answer of the last request is lost, what it did is not."""
    return World(world.disk.after_kill(), world.state.after_crash(), world.clock.restarted(), settings=world.settings)


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


def test_what_pauses_is_kept_by_retention_and_offered_at_once_by_the_next_life() -> None:
    world, peer = paused_world()
    group = world.core._pulls.groups[SUBJECT, GROUP]
    assert (group.oldest, group.window.others.runs[Stage.PAUSED]) == (0, 1)
    world.core.checkpoint()
    found = killed(world).pull(peer)
    assert sorted(found.bodies) == [b"a", b"b"]
