"""Steps of the wall clock, hours' boundaries, long absences: never early, on time by the clock, nothing lost (T1)."""

from __future__ import annotations

import pytest

from delayd.delay.core import DelayCore
from delayd.delay.rows import COARSE_MS
from delayd.errors import ClockInDoubt, PastHorizon
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.machine.clock import BELIEVED_AFTER_MS
from delayd.reading.verify import verify_directory
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import DATA, TARGET_IDS, Wanted, World, new_world
from tests.worlds.target import FakeTarget

SECOND_MS, DAY_MS = 1_000, 24 * HOUR_MS
BEGIN_MS = START_MS + HOUR_MS // 2
STEPS_MS = [sign * step for step in (SECOND_MS, HOUR_MS, DAY_MS) for sign in (1, -1)]
SUBJECT = b"orders.eu"
WITHIN_MS = 1_000  # The server acts on a step so soon, for it sleeps no longer than half a second.
AHEAD_MS = (0, 1, 300, 700, 1_500, 2_999, HOUR_MS - 200, HOUR_MS + 5, DAY_MS + 100, 40 * DAY_MS)


def begun(**settings: int) -> World:
    """A server in the middle of an hour."""
    return World(new_world(now_ms=BEGIN_MS), core=DelayCore, seed=0, **settings)


def target_of(world: World) -> FakeTarget:
    return world.outside.targets[TARGET_IDS[0]]


def messages_at(name: str, *instants_ms: int) -> list[Wanted]:
    return [(instant, SUBJECT, f"{name}-{index}".encode()) for index, instant in enumerate(instants_ms)]


def arrived(world: World) -> list[tuple[bytes, int, int]]:
    """What the target has, in its order: body, when it was due, when it was claimed."""
    return [
        (body, due_ms, kept.part.claimed_at_ms)
        for kept in target_of(world).log
        for body, due_ms in zip(kept.bodies, kept.deliver_at_ms, strict=True)
    ]


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


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_rule_T1_messages_leave_at_their_time_by_the_clock_after_any_step(step_ms: int) -> None:
    world = begun()
    world.send(messages_at("before", *(BEGIN_MS + ahead for ahead in AHEAD_MS)))
    live(world, 2_000)
    stamps = [world.core.logs.intake.appended_at_ms]
    world.clock.step_wall(step_ms)
    believed_ms = world.clock.now_ms()
    # By the clock that the server goes by, and by the wall clock that a producer may read: they differ while in doubt.
    world.send(messages_at("after", *(believed_ms + ahead for ahead in AHEAD_MS)))
    world.send(messages_at("wall", *(world.clock.machine.wall_ms + ahead for ahead in AHEAD_MS)))
    live(world, 4_000)
    stamps.append(world.core.logs.intake.appended_at_ms)
    world.checkpoint()
    world = world.after_crash(PowerLoss.ALL_LOST)
    live(world, 2_000)
    in_doubt = step_ms > 5_000
    assert world.clock.confirmed is not in_doubt
    if in_doubt:
        assert all(due_ms <= BEGIN_MS + 60_000 for _, due_ms, _ in arrived(world)), "nothing leaves by a doubtful clock"
    live(world, BELIEVED_AFTER_MS)
    assert world.clock.confirmed and world.clock.now_ms() == world.clock.machine.wall_ms
    world.send(messages_at("last", *(world.clock.now_ms() + ahead for ahead in AHEAD_MS)))
    live(world, 4_000)
    stamps.append(world.core.logs.intake.appended_at_ms)
    assert stamps == sorted(stamps), "appended_at never decreases (rule P5)"
    world.drain(50 * DAY_MS)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("days", [3, 30, 400])
def test_rule_T4_a_message_is_on_time_though_the_clock_is_long_behind_its_log(days: int, restart: bool) -> None:
    world = begun()
    world.send(messages_at("seen", BEGIN_MS))
    live(world, 1_000)
    world.clock.step_wall(-days * DAY_MS)
    now_ms = world.clock.now_ms()
    world.send(messages_at("short", *(now_ms + ahead for ahead in (-5, 0, 1_400, 5_250, 90_000))))
    world.settle()
    filed = hour_of_ms(world.core.logs.intake.appended_at_ms)
    assert filed == hour_of_ms(BEGIN_MS), "the log does not go back"
    if restart:
        world.checkpoint()
        world = world.after_crash(PowerLoss.ALL_LOST)
    late_ms_max = COARSE_MS if days > 12 else 0
    live(world, 92_000, late_ms_max)
    assert not world.missing()
    late_ms = {body: claimed_ms - due_ms for body, due_ms, claimed_ms in arrived(world)}
    assert 0 <= max(late_ms[b"short-3"], late_ms[b"short-4"]) <= late_ms_max
    assert {kept.part.hour for kept in target_of(world).log} == {filed}
    world.check_books()


@pytest.mark.parametrize("step_ms", [HOUR_MS, DAY_MS])
def test_rule_T1_an_operators_word_lets_out_what_is_due_at_once(step_ms: int) -> None:
    world = begun()
    world.send(messages_at("a", *(BEGIN_MS + ahead for ahead in AHEAD_MS)))
    world.pass_ms(500)
    world.clock.step_wall(step_ms)
    live(world, 2_000)
    world.clock.trust()
    live(world, 1_000)
    assert sum(due_ms > BEGIN_MS + 60_000 for _, due_ms, _ in arrived(world)) == (2 if step_ms == HOUR_MS else 3)


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_rule_T3_checkpoints_keep_their_pace_after_any_step(step_ms: int) -> None:
    world = begun(checkpoint_every_ms=5_000)
    replayed: list[int] = []
    for number in range(8):
        if number == 2:
            world.clock.step_wall(step_ms)
        world.send(messages_at(f"m{number}", BEGIN_MS + 3_000_000))
        world.pass_ms(5_000)
        replayed.append(world.core.standing.counters()["replay_offset"])
    assert replayed == sorted(set(replayed)), "each interval has its checkpoint"


@pytest.mark.parametrize("step_ms", [HOUR_MS, DAY_MS])
def test_rule_T1_nothing_is_ticked_sealed_or_deleted_by_a_doubtful_clock(step_ms: int) -> None:
    world = begun(retention_hours=1, checkpoint_every_ms=2_000)
    world.send(messages_at("first", BEGIN_MS))
    world.pass_ms(1_000)
    world.clock.advance(HOUR_MS)
    _close_hours(world)
    assert world.hours().get(hour_of_ms(BEGIN_MS)).sealed
    world.send(messages_at("second", world.clock.now_ms()))
    world.pass_ms(1_000)
    known, appended_ms = set(world.hours().rows["hour"]), world.core.logs.intake.appended_at_ms
    world.clock.step_wall(step_ms)
    world.pass_ms(BELIEVED_AFTER_MS // 2)
    _close_hours(world)
    assert world.core.logs.intake.appended_at_ms == appended_ms, "no tick ends an hour that may not have ended"
    assert known <= set(world.hours().rows["hour"])
    assert not world.hours().get(hour_of_ms(appended_ms)).sealed
    world.pass_ms(BELIEVED_AFTER_MS)
    for _ in range(3):
        _close_hours(world)
    assert hour_of_ms(BEGIN_MS) not in world.hours(), "believed, the first hour is past its retention"
    assert world.core.logs.intake.appended_at_ms > appended_ms


def test_messages_at_an_hours_boundary_leave_at_their_millisecond_and_are_filed_on_their_side() -> None:
    edge_ms = START_MS + HOUR_MS
    world = World(new_world(now_ms=edge_ms - 3_000))
    world.send(messages_at("edge", edge_ms - 1, edge_ms, edge_ms + 1))
    world.pass_ms(2_998)
    world.send(messages_at("past", edge_ms - 10_000))
    world.settle()
    world.clock.advance(2)
    world.send(messages_at("over", edge_ms - 10_000, edge_ms - 1, edge_ms))
    world.pass_ms(1_000)
    found = {body: (kept.part.hour, kept.part.claimed_at_ms) for kept in target_of(world).log for body in kept.bodies}
    before, after = hour_of_ms(edge_ms - 1), hour_of_ms(edge_ms)
    assert found[b"past-0"] == (before, edge_ms - 2)
    assert found[b"edge-0"][0] == before
    assert found[b"edge-1"][0] == after and found[b"edge-2"] == (after, edge_ms + 1)
    assert {found[b"over-%d" % index][0] for index in range(3)} == {after}, "filed in the hour of appended_at"
    check_on_time(world)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("edge_ms", [-1, 0])
def test_a_message_at_an_hours_edge_leaves_neither_early_nor_late(edge_ms: int) -> None:
    due_ms = START_MS + HOUR_MS + edge_ms
    world = World(new_world(now_ms=due_ms - 5_000))
    world.send(messages_at("edge", due_ms))
    world.pass_ms(4_999)
    assert not arrived(world)
    world.pass_ms(1)
    assert arrived(world) == [(b"edge-0", due_ms, due_ms)]


def test_an_idle_hour_is_closed_by_a_tick_and_seals_without_anyone_sending() -> None:
    world = begun()
    world.send(messages_at("only", BEGIN_MS + 500))
    world.pass_ms(70_000)
    hour = hour_of_ms(BEGIN_MS)
    world.core.sweep()
    world.settle()
    assert not world.hours().get(hour).sealed
    world.clock.advance(HOUR_MS // 2)
    world.pass_ms(62_000)
    world.core.sweep()
    world.settle()
    assert world.hours().get(hour).sealed


@pytest.mark.parametrize("machine", ["kept on", "off too"])
@pytest.mark.parametrize("hours", [3, 72])
def test_after_an_absence_everything_due_meanwhile_comes_in_due_order_and_near_messages_on_time(
    hours: int, machine: str
) -> None:
    world = begun(checkpoint_every_ms=HOUR_MS)
    for hour in range(hours + 2):
        world.send(
            messages_at(f"h{hour}", *(BEGIN_MS + hour * HOUR_MS + 60_000 * minute for minute in range(0, 60, 7)))
        )
    world.settle()
    world.checkpoint()
    world.send(messages_at("logged", BEGIN_MS + HOUR_MS + 30_000, BEGIN_MS + (hours - 1) * HOUR_MS + 10))
    world.settle()
    count = len(target_of(world).log)
    if machine == "kept on":
        remains = world.remains(PowerLoss.ALL_LOST)
        remains.outside.machine.advance(hours * HOUR_MS)
    else:
        remains = world.remains(PowerLoss.ALL_LOST)
        remains.outside.machine.reboot(hours * HOUR_MS)
        remains = remains.after_crash(PowerLoss.ALL_LOST)
    world = World(remains, core=DelayCore, seed=0, **world.settings)
    if machine == "off too":
        assert not world.clock.confirmed
        world.pass_ms(5_000)
        assert len(target_of(world).log) == count, "nothing leaves by a clock that nobody has confirmed"
        world.clock.reference(world.clock.now_ms())
    now_ms = world.clock.now_ms()
    near = messages_at("near", now_ms + 900, now_ms + 1_500)
    world.send(near)
    world.pass_ms(2_000)
    check_on_time(world)
    found = arrived(world)
    dues = [due_ms for body, due_ms, _ in found if not body.startswith(b"near")]
    assert dues == sorted(dues) and len(dues) >= hours * 9
    assert all(claimed_ms >= due_ms for _, due_ms, claimed_ms in found)
    assert {claimed_ms - due_ms for body, due_ms, claimed_ms in found if body.startswith(b"near")} == {0}
    late_ms = max(claimed_ms - due_ms for _, due_ms, claimed_ms in found)
    assert late_ms > (hours - 1) * HOUR_MS, "what was due meanwhile is told as late as it is"
    world.checkpoint()
    for _ in range(hours // 24 + 2):
        world.core.sweep()
        world.settle()
    assert not world.hours().unsealed(hour_of_ms(now_ms) - 1), "the hours of the gap are sealed"
    world.drain(4 * HOUR_MS)
    world.check_books()


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


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("ahead_ms", [60 * DAY_MS, 3_650 * DAY_MS, -60 * DAY_MS])
def test_rule_T4_what_is_sent_while_a_boot_is_in_doubt_stamps_nothing_ahead(ahead_ms: int, restart: bool) -> None:
    world = booted_ahead(ahead_ms)
    before_ms = world.core.logs.intake.appended_at_ms
    assert not world.clock.confirmed
    world.send(messages_at("in doubt", BEGIN_MS + 2 * HOUR_MS, BEGIN_MS + 62_000))
    world.settle()
    assert not world.outside.unanswered, "it is taken, for its instants are its sender's"
    assert world.core.logs.intake.appended_at_ms == before_ms
    assert world.core.standing.counters()["loaded_rows"] + world.core.standing.counters()["pending_rows"] < 10
    if restart:
        world = world.after_crash(PowerLoss.ALL_LOST)
        assert not world.clock.confirmed, "a restart confirms nothing"
    world.pass_ms(10_000)
    world.clock.step_wall(-ahead_ms)
    world.pass_ms(40_000)
    assert world.clock.confirmed
    now_ms = world.clock.now_ms()
    world.send(messages_at("after", now_ms + 1_800_000, now_ms - 5))
    world.settle()
    assert world.core.logs.intake.appended_at_ms == now_ms, "the log goes by the right clock"
    live(world, 2_000)
    assert world.missing() == {b"after-0", b"in doubt-0"}
    world.drain(4 * HOUR_MS)
    world.check_books()
    world.check_sealing()


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


def test_rule_P5_a_clock_set_back_before_the_hour_is_loaded_holds_up_nothing() -> None:
    world = World(new_world(now_ms=START_MS + HOUR_MS - 5 * SECOND_MS), core=DelayCore, seed=0, load_ahead_ms=500)
    world.send(messages_at("first", START_MS))
    live(world, 2_000)
    # A group of the next hour becomes durable before that hour is loaded, and the clock goes back.
    world.clock.advance(6 * SECOND_MS)
    world.send(messages_at("last", world.clock.now_ms()))
    assert world.executors()[0].step()
    world.clock.step_wall(-HOUR_MS // 2)
    world.send(messages_at("after", world.clock.now_ms(), world.clock.now_ms() + 1_500))
    live(world, 4_000)
    assert [body for body, _, _ in arrived(world)] == [b"first-0", b"after-0", b"after-1"]
