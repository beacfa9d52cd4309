"""A clock that was wrong: callers are not blamed, and an operator's word sets back what was stamped ahead (rule T4)."""

from __future__ import annotations

from random import Random

import pytest

from delayd.errors import ClockInDoubt, DiskReserve, NotReady, PastHorizon
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.reading.trace import Step, trace
from delayd.reading.verify import verify_directory
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from delayd.wire.requests import RequestType
from tests.worlds.delay import DATA, TARGET_IDS, World, new_world, wanted

DAY_MS = 24 * HOUR_MS
BEGIN_MS = START_MS + HOUR_MS // 2  # In the middle of an hour.
COARSE_MS = 1_000  # A row that is due weeks before its hour may be so much later.


def begun(name: str = "seen") -> World:
    world = World(new_world(now_ms=BEGIN_MS))
    world.send(wanted(1, HOUR_MS // 2, name))
    world.pass_ms(1_000)
    return world


def send(world: World, name: str, *after_ms: int) -> None:
    """Messages that are due so long after what the clock says now."""
    now_ms = world.clock.now_ms() - START_MS
    world.send([wanted(1, now_ms + ms, f"{name}{index}")[0] for index, ms in enumerate(after_ms)])
    world.settle()


def live(world: World, ms: int) -> None:
    """Nothing leaves before it is due, and nothing is due for long that has not left."""
    for _ in range(ms // 1_000):
        world.pass_ms(1_000)
        world.check_logs()
        now_ms, missing = world.clock.now_ms(), world.missing()
        dues = [row for sent, _ in world.outside.accepted.values() for row in sent.wanted if row[2] in missing]
        assert all(due_ms > now_ms - COARSE_MS for due_ms, _, _ in dues), f"due by {now_ms} and not there: {min(dues)}"


@pytest.mark.parametrize("in_doubt", [True, False])
def test_rule_T4_a_clock_that_is_behind_is_not_held_against_the_caller(in_doubt: bool) -> None:
    world = begun()
    world.send(wanted(1, 740 * DAY_MS, "past the horizon"))
    world.settle()
    assert isinstance(world.outside.refused.pop()[1], PastHorizon)
    world.outside.unanswered.clear()
    if in_doubt:
        world.checkpoint()
        remains = world.remains(PowerLoss.ALL_LOST)
        remains.outside.machine.reboot(60_000)
        remains.outside.machine.step_wall(-60 * DAY_MS)
        world = World(remains.after_crash(PowerLoss.ALL_LOST))
        with pytest.raises(NotReady, match="clock"):
            world.ask(RequestType.TARGET_LOST, {"log_id": TARGET_IDS[0]})
    else:
        world.clock.step_wall(-60 * DAY_MS)
        assert world.clock.confirmed
    world.send(wanted(1, 725 * DAY_MS, "far"))
    world.settle()
    ((_, error),) = world.outside.refused
    assert isinstance(error, ClockInDoubt) and "this server's clock" in str(error)


def close_hours(world: World) -> None:
    """Let housekeeping find what has ended: a tick, a checkpoint behind it, and sweeps."""
    world.pass_ms(3_000)
    world.checkpoint()
    for _ in range(2):
        world.sweep()


@pytest.mark.parametrize("restart", ["", "before", "after", "after a checkpoint"])
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("ahead_for_ms", [0, 3_000])  # 0: the hour of what was stamped ahead is not loaded yet.
def test_rule_T4_an_operators_word_sets_a_log_back_that_was_stamped_ahead(
    ahead_for_ms: int, sealed: bool, restart: str
) -> None:
    world = begun()
    send(world, "far", 3 * HOUR_MS)
    world.clock.step_wall(60 * DAY_MS)
    world.clock.trust()
    send(world, "ahead", 0, 2 * HOUR_MS)
    world.pass_ms(ahead_for_ms)
    if sealed:
        close_hours(world)
    world.clock.step_wall(-60 * DAY_MS)  # The clock is right again.
    send(world, "far hour", 60_000, 7_200_000)
    assert "stamped the message log" in str(world.ask(RequestType.STATUS)[0]["waits"])
    if restart == "before":
        world = world.after_crash(PowerLoss.ALL_LOST)
    before_ms = world.server.appended_at_ms
    world.ask(RequestType.TRUST_CLOCK)
    if restart == "after a checkpoint":
        world.checkpoint()
    if restart.startswith("after"):
        world = world.after_crash(PowerLoss.ALL_LOST)
    back_ms = world.server.appended_at_ms
    assert (back_ms < before_ms - DAY_MS or sealed) and hour_of_ms(back_ms) > max(world.hours().sealed(), default=0)
    send(world, "after", 1_000, 5 * HOUR_MS)
    live(world, 62_000)
    (filed,) = {kept.part.hour for kept in world.outside.targets[TARGET_IDS[0]].log if b"after0-0" in kept.bodies}
    assert filed == hour_of_ms(max(world.clock.now_ms(), back_ms))
    if not sealed:
        world.clock.advance(HOUR_MS)
        live(world, 3_000)
        close_hours(world)
        assert filed in world.hours().sealed(), "hours close in time"
    world.drain(70 * DAY_MS)
    world.check_books()
    world.check_sealing()
    assert verify_directory(DATA, disk=world.disk).sound, "log verify"


@pytest.mark.parametrize("seed", range(30))
def test_rule_T4_a_log_is_set_back_while_hours_that_had_passed_are_loaded(seed: int) -> None:
    world, draw = begun(), Random(seed)
    world.clock.step_wall(DAY_MS)
    world.clock.trust()
    send(world, "ahead", 0)
    world.clock.advance(1_000)
    world.server.wake()  # The hours of a day begin to load.
    world.clock.step_wall(HOUR_MS)
    world.clock.trust()
    world.send(wanted(1, HOUR_MS, "under way"))
    world.clock.step_wall(-DAY_MS - HOUR_MS)
    world.begin(RequestType.TRUST_CLOCK)
    now_ms = world.clock.now_ms() - START_MS
    for hour in (1, 2, 7, 23):
        while (moves := world.moves()) and draw.random() < 0.8:
            draw.choice(moves)()
        world.send(wanted(1, now_ms + hour * HOUR_MS, f"in hour {hour}"))
    while moves := world.moves():
        draw.choice(moves)()
    world.drain()
    world.check_books()


def test_rule_L8_an_operators_word_about_a_clock_is_answered_on_a_full_disk_and_can_be_said_again() -> None:
    world = begun()
    world.clock.step_wall(60 * DAY_MS)
    world.clock.trust()
    send(world, "ahead", 0)
    world.clock.step_wall(-60 * DAY_MS)
    ahead_ms = world.server.appended_at_ms
    world.disk.capacity_bytes = world.disk.used_bytes
    for _ in range(2):
        with pytest.raises(DiskReserve, match=r"no space is left for .*/message/.*; free some or move the directory"):
            world.ask(RequestType.TRUST_CLOCK)
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(3_000)
    send(world, "before", 0)
    assert world.server.appended_at_ms >= ahead_ms, "what was refused is not carried out later"
    world.ask(RequestType.TRUST_CLOCK)
    assert world.server.appended_at_ms < ahead_ms
    world.drain(70 * DAY_MS)
    world.check_books()


def test_a_trace_says_that_the_clock_was_set_back_while_the_message_waited() -> None:
    world = begun()
    send(world, "waits", 60_000)
    world.pass_ms(1_000)
    was_ms = world.clock.now_ms()
    world.clock.step_wall(-40_000)
    live(world, 110_000)
    send(world, "after", 1_000)
    world.pass_ms(3_000)
    world.checkpoint()
    kept = {each.bodies[0]: each for target in world.outside.targets.values() for each in target.log}

    def steps(body: bytes) -> list[Step]:
        (found,) = trace(world.disk, DATA, kept[body].subject.decode(), kept[body].sequences[0])
        return found.steps

    found = steps(b"waits0-0")
    assert [step.what for step in found] == ["accepted", "filed", "clock set back", "due", "claimed"]
    assert found[2].at_ms == was_ms and found[2].detail.endswith(", by 40000 ms")
    assert "clock set back" not in [step.what for step in steps(b"after0-0")]
