"""What operators decide at meta: servers forgotten, routes moved; and the bound on routes that nobody uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

from delayd.errors import BadArgument, FencedInstance, RetryLater, SlowDown, StaleEpoch, TooManySubjects, UnknownServer
from delayd.testing.executor import StepExecutor
from meta import routes
from meta.core import MOVES_MAX
from tests.worlds.executor import InlineExecutor

from .servers import LEASE_MS, SteppedMeta, realtime_server


def move(world: SteppedMeta, subject: str, log_id: int) -> str:
    told: list[str | RetryLater] = []
    world.meta.move(subject, log_id, told.append)
    (message,) = told
    assert isinstance(message, str)
    return message


def operator_entries(world: SteppedMeta) -> int:
    return len(world.state.scan(b"operator/"))


def test_moves_are_told_in_parts() -> None:
    world = SteppedMeta()
    world.register(realtime_server(1))
    for number in range(MOVES_MAX + 5):
        move(world, f"s{number}", 1)
    assert len(world.meta.moves_after(0)) == MOVES_MAX
    assert len(world.meta.moves_after(MOVES_MAX)) == 5


def slow_world() -> tuple[SteppedMeta, StepExecutor]:
    executor = StepExecutor()
    world = SteppedMeta(executor=executor)
    world.register(realtime_server(1, epoch=9), realtime_server(2))
    executor.run_all()
    world.ask(["a"])
    executor.run_all()
    world.clock.advance(LEASE_MS)
    world.register(realtime_server(2))
    return world, executor


def told(message: str | RetryLater) -> None:
    assert isinstance(message, str)


def test_an_operators_word_waits_for_what_is_being_stored() -> None:
    world, executor = slow_world()
    world.ask(["b"])
    words: list[Callable[[], None]] = [
        lambda: world.meta.move("b", 2, told),
        lambda: world.meta.forget("realtime", 1, False, told),
    ]
    for word in words:
        with pytest.raises(SlowDown, match="say it again"):
            word()
    executor.run_all()
    world.meta.move("b", 2, told)
    executor.run_all()
    assert world.routes("b", assign=False).routes == {"b": 2}


def test_nothing_is_decided_by_a_state_that_an_operators_word_changes() -> None:
    world, executor = slow_world()
    world.meta.forget("realtime", 1, False, told)
    for decision in (
        lambda: world.meta.forget("realtime", 1, True, told),
        lambda: world.meta.move("b", 1, told),
        lambda: world.register(realtime_server(1, epoch=10)),
        lambda: world.register(realtime_server(3)),
        lambda: world.ask(["b"]),
    ):
        with pytest.raises(SlowDown, match="meta is storing"):
            decision()
    # Requests that change nothing are answered: leases are renewed, and known routes are told.
    assert world.register(realtime_server(2)) == [None]
    assert world.routes("a").routes == {"a": 1}
    executor.run_all()
    world.register(realtime_server(1))
    assert world.ask(["b"]) == []
    executor.run_all()
    assert world.routes("b").routes == {"b": 2}


@given(steps=lists(tuples(integers(0, 5), integers(1, 2)), min_size=30, max_size=60))
def test_what_meta_says_is_what_it_says_after_a_restart(steps: list[tuple[int, int]]) -> None:
    """Words, registrations and routes in any order, at any moment of a transaction."""
    world, executor = slow_world()
    for kind, number in steps:
        try:
            if kind == 0:
                world.clock.advance(LEASE_MS)
            elif kind == 1:
                world.register(realtime_server(number, epoch=1 + number % 2, port=2_000 + number % 3))
            elif kind == 2:
                world.ask([f"s{number}"])
            elif kind == 3:
                world.meta.forget("realtime", number, number % 2 == 0, told)
            elif kind == 4:
                world.meta.move(f"s{number}", 1 + number % 3, told)
            else:
                executor.step()
        except (BadArgument, RetryLater, StaleEpoch, FencedInstance, UnknownServer):
            continue
    executor.run_all()
    names = ["a", *(f"s{number}" for number in range(1, 5))]
    before = world.routes(*names, assign=False), sorted(world.alive())
    world.executor = InlineExecutor()
    world.restart()
    assert (world.routes(*names, assign=False).routes, sorted(world.alive())) == (before[0].routes, before[1])


def test_rule_B1_routes_that_no_message_has_used_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "UNUSED_MAX", 3)
    world = SteppedMeta()
    world.register(realtime_server(1))

    def look(*subjects: str) -> object:
        answers: list[object] = []
        world.meta.routes(list(subjects), True, answers.append, used=False)
        return answers

    look("a", "b", "c")
    for _ in range(2):
        with pytest.raises(TooManySubjects):
            look("d")
        # Known routes are answered, and a subject with messages gets its route, however many others are only looked up.
        look("a", "b", "c")
        world.restart()
    assert world.routes("e").routes == {"e": 1}
    # A message has come for one of them: it counts no more.
    world.routes("a")
    look("d")
    world.restart()
    with pytest.raises(TooManySubjects):
        look("f")
    assert world.routes("a", "b", "c", "d", "e", assign=False).unrouted == []


def test_rule_B1_routes_that_no_message_has_used_are_given_back_when_nobody_looks_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "UNUSED_MAX", 4)
    monkeypatch.setattr(routes, "GIVEN_BACK_MAX", 2)
    world = SteppedMeta()
    world.register(realtime_server(1), realtime_server(2))

    def look(*subjects: str) -> None:
        world.meta.routes(list(subjects), True, lambda answer: None, used=False)

    look("a", "b", "c", "waited")
    world.routes("used")
    world.clock.advance(routes.UNUSED_MS - 1)
    look("waited")
    world.clock.advance(2)
    for _ in range(3):
        world.register(realtime_server(1), realtime_server(2))
    for _ in range(2):
        kept = [name for name, _ in world.meta.subjects("", "", 10).subjects]
        assert kept == ["used", "waited"]
        world.restart()
        world.register(realtime_server(1), realtime_server(2))
    # There is room again, and what was given back is routed as if nobody had ever looked; a message keeps its route.
    look("a", "d", "e")
    world.routes("a")
    world.clock.advance(2 * routes.UNUSED_MS)
    for _ in range(3):
        world.register(realtime_server(1), realtime_server(2))
    world.restart()
    assert [name for name, _ in world.meta.subjects("", "", 10).subjects] == ["a", "used"]


def test_rule_B1_a_route_that_is_used_while_it_would_be_given_back_stays() -> None:
    world = SteppedMeta(executor=StepExecutor())
    executor = world.executor
    assert isinstance(executor, StepExecutor)
    world.register(realtime_server(1), realtime_server(2))
    executor.run_all()
    world.meta.routes(["a", "b"], True, lambda answer: None, used=False)
    executor.run_all()
    before = world.routes("a", "b", assign=False).routes
    world.clock.advance(2 * routes.UNUSED_MS)
    world.ask(["a"])
    world.register(realtime_server(1), realtime_server(2))
    world.ask(["b"])
    executor.run_all()
    now = world.routes("a", "b", assign=False).routes
    assert now["a"] == before["a"]
    world.executor = InlineExecutor()
    world.restart()
    assert world.routes("a", "b", assign=False).routes == now


def test_only_the_newest_entries_of_operators_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.machine.state.ENTRIES_MAX", 5)
    world = SteppedMeta()
    world.register(realtime_server(1))
    for number in range(12):
        move(world, f"s{number}", 1)
        if number == 6:
            world.restart()
    assert operator_entries(world) == 5
