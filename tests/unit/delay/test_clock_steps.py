"""Steps of the wall clock, hours' boundaries, long absences: never early, on time by the clock, nothing lost (T1)."""

from __future__ import annotations

import pytest

from delayd.delay.core import DelayCore
from delayd.delay.rows import COARSE_MS
from delayd.errors import ClockInDoubt, PastHorizon
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.reading.verify import verify_directory
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import DATA, TARGET_IDS, Wanted, World, new_world
from tests.worlds.target import FakeTarget

SECOND_MS, DAY_MS = 1_000, 24 * HOUR_MS
BEGIN_MS = START_MS + HOUR_MS // 2
SUBJECT = b"orders.eu"
WITHIN_MS = 1_000  # The server acts on a step so soon, for it sleeps no longer than half a second.


def begun(**settings: int) -> World:
    """A server in the middle of an hour."""
    return World(new_world(now_ms=BEGIN_MS), core=DelayCore, seed=0, **settings)


def target_of(world: World) -> FakeTarget:
    return world.outside.targets[TARGET_IDS[0]]


def messages_at(name: str, *instants_ms: int) -> list[Wanted]:
    return [(instant, SUBJECT, f"{name}-{index}".encode()) for index, instant in enumerate(instants_ms)]


def check_on_time(world: World, late_ms: int = 0) -> None:
    """Nothing has left that was not due, and nothing is due for ``late_ms`` that has not left."""
    world.check_logs()
    now_ms, missing = world.clock.now_ms(), world.missing()
    dues = [row for sent, _ in world.outside.accepted.values() for row in sent.wanted if row[2] in missing]
    assert all(due_ms > now_ms - late_ms for due_ms, _, _ in dues), f"due by {now_ms} and not there: {min(dues)}"


def live(world: World, ms: int, late_ms: int = 0) -> None:
    for _ in range(ms // WITHIN_MS):
        world.pass_ms(WITHIN_MS)
        check_on_time(world, late_ms)


def booted_ahead(ahead_ms: int) -> World:
    """A server on a machine that was restarted, its clock so far ahead; nothing has confirmed it."""
    world = begun()
    world.send(messages_at("seen", BEGIN_MS))
    live(world, 1_000)
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    remains.outside.machine.reboot(60_000)
    remains.outside.machine.step_wall(ahead_ms)
    return World(remains.after_crash(PowerLoss.ALL_LOST), core=DelayCore, seed=0, **world.settings)


@pytest.mark.parametrize("in_doubt", [True, False])
def test_rule_T4_a_clock_that_is_behind_is_not_held_against_the_caller(in_doubt: bool) -> None:
    world = booted_ahead(-60 * DAY_MS) if in_doubt else begun()
    if not in_doubt:
        world.send(messages_at("seen", BEGIN_MS))
        world.settle()
        world.clock.step_wall(-60 * DAY_MS)
        assert world.clock.confirmed
    world.send(messages_at("far", BEGIN_MS + 725 * DAY_MS))
    world.settle()
    ((_, error),) = world.outside.refused
    assert isinstance(error, ClockInDoubt) and "this server's clock" in str(error)


def test_a_caller_who_is_past_the_horizon_is_told_so() -> None:
    world = begun()
    world.send(messages_at("far", BEGIN_MS + 740 * DAY_MS))
    world.settle()
    ((_, error),) = world.outside.refused
    assert isinstance(error, PastHorizon)


def stamped_ahead(days: int, *, sealed: bool) -> World:
    """A log that was stamped by a clock so far ahead, which was believed; the clock is right again."""
    world = begun()
    world.send(messages_at("before", BEGIN_MS, BEGIN_MS + 3 * HOUR_MS))
    live(world, 1_000)
    world.clock.step_wall(days * DAY_MS)
    world.clock.trust()
    ahead_ms = world.clock.now_ms()
    world.send(messages_at("ahead", ahead_ms, ahead_ms + 2 * HOUR_MS))
    world.pass_ms(3_000)
    if sealed:
        _close_hours(world)
    world.clock.step_wall(-days * DAY_MS)
    return world


@pytest.mark.parametrize("restart", ["", "before", "after", "after a checkpoint"])
@pytest.mark.parametrize("sealed", [False, True])
def test_rule_T4_an_operators_word_sets_a_log_back_that_was_stamped_ahead(sealed: bool, restart: str) -> None:
    world = stamped_ahead(60, sealed=sealed)
    now_ms = world.clock.now_ms()
    world.send(messages_at("far hour", now_ms + 60_000, now_ms + 7_200_000))
    world.settle()
    assert any("stamped the message log" in wait.why for wait in world.core.standing.waits())
    if restart == "before":
        world = world.after_crash(PowerLoss.ALL_LOST)
    before_ms = world.core.logs.intake.appended_at_ms
    told: list[bool] = []
    world.core.follow_clock(lambda: told.append(True))
    world.settle()
    assert told == [True]
    if restart == "after a checkpoint":
        world.checkpoint()
    if restart.startswith("after"):
        world = world.after_crash(PowerLoss.ALL_LOST)
    sealed_until = max(world.hours().sealed(), default=0)
    back_ms = world.core.logs.intake.appended_at_ms
    assert back_ms < before_ms - DAY_MS or sealed
    assert hour_of_ms(back_ms) > sealed_until
    world.send(messages_at("after", world.clock.now_ms() + 1_000, world.clock.now_ms() + 5 * HOUR_MS))
    live(world, 62_000, COARSE_MS)
    filed = {kept.part.hour for kept in target_of(world).log if b"after-0" in kept.bodies}
    assert filed == {hour_of_ms(max(world.clock.now_ms(), back_ms))}
    if not sealed:
        world.clock.advance(HOUR_MS)
        live(world, 3_000, COARSE_MS)
        _close_hours(world)
        assert min(filed) in world.hours().sealed(), "hours close in time"
    world.drain(70 * DAY_MS)
    world.check_books()
    world.check_sealing()
    assert verify_directory(DATA, disk=world.disk).sound, "log verify"


def _close_hours(world: World) -> None:
    """Let housekeeping find what has ended: a tick, a checkpoint behind it, and sweeps."""
    world.pass_ms(3_000)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    world.core.sweep()
    world.settle()
