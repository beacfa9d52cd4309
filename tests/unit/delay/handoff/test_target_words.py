"""An operator's words on targets: lost for good, or accepted though data was lost (rules H5, H7, H8, S2)."""

from __future__ import annotations

from random import Random

import pytest

from delayd.delay.handoff.link import Phase
from delayd.errors import BadArgument, DelaydError, NotReady, RestoredOrigin, ServerFenced, UnknownServer
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import Outcome
from delayd.machine.alarms import DAMAGED_AGAIN_MS
from delayd.reading.seals import verify_seals
from delayd.testing.tree import PowerLoss
from delayd.wire.meta import Move
from tests.named_commands import check_commands
from tests.unit.delay.answers import outcomes
from tests.unit.delay.handoff import TARGET, link_of, ready_world, target_of
from tests.unit.delay.sealed import seals_of
from tests.worlds.delay import Remains, World, wanted
from tests.worlds.files import DATA
from tests.worlds.target import FakeTarget

OTHER = 0x7002


def replace_target(world: World) -> FakeTarget:
    """Take the target away, with another server in its place; the new one."""
    del world.outside.targets[TARGET]
    world.outside.targets[OTHER] = FakeTarget(OTHER, world.clock.now_ms)
    return world.outside.targets[OTHER]


def told_of(world: World, done: list[DelaydError | str]) -> str:
    world.settle()
    (told,) = done
    assert isinstance(told, str), told
    return told


def lose(world: World, log_id: int = TARGET) -> str:
    done: list[DelaydError | str] = []
    world.core.handoff.targets.lose(log_id, done.append)
    return told_of(world, done)


def accept(world: World, log_id: int = TARGET) -> str:
    done: list[DelaydError | str] = []
    world.core.handoff.targets.accept(log_id, done.append)
    return told_of(world, done)


def test_a_target_without_an_alarm_is_not_accepted_and_one_that_is_not_known_not_lost() -> None:
    world = ready_world()
    with pytest.raises(BadArgument, match="no alarm"):
        accept(world)
    for word in (lose, accept):
        with pytest.raises(UnknownServer):
            word(world, 0xBAD)


def test_targets_are_listed_with_their_states() -> None:
    world = ready_world()
    (info,) = [each for each in world.core.handoff.targets.listing() if each.log_id == TARGET]
    assert (info.state, info.alarm, info.waiting) == ("ready", "", 0)
    assert info.subjects > 0 and info.address == f"target-{TARGET}:1"
    assert info.to_head()["log_id"] == TARGET


def test_rule_H5_what_a_lost_target_may_hold_is_in_doubt_and_its_subjects_go_elsewhere() -> None:
    world = ready_world()
    target = target_of(world)
    target.hangs = True
    world.send(wanted(5, 0, "under-way"))
    world.pass_ms(200)
    world.send(wanted(5, 20_000, "later"))
    world.settle()
    told = lose(world)
    assert "5 messages that it may hold are in doubt" in told
    assert world.core.standing.counters()["targets_away"] == 0, "nobody waits for a target that was given up"
    # Meta has been told of another server, and the lost one is spoken to no more, whatever it says.
    target.hangs = False
    replace_target(world)
    world.pass_ms(40_000)
    assert {body.partition(b"-")[0] for kept in target.log for body in kept.bodies} == {b"first", b"under"}
    elsewhere = [body for each in world.outside.targets.values() for kept in each.log for body in kept.bodies]
    assert sorted(body for body in elsewhere if body.startswith(b"later")) == [b"later-%d" % n for n in range(5)]
    assert not [body for body in elsewhere if body.startswith(b"under-way")]
    assert outcomes(world)[Outcome.IN_DOUBT] == 5
    assert {each.log_id: each.state for each in world.core.handoff.targets.listing()}[TARGET] == "lost"


def test_rule_S2_an_hour_with_rows_in_doubt_is_sealed() -> None:
    world = ready_world()
    target_of(world).hangs = True
    hour = hour_of_ms(world.clock.now_ms())
    world.send(wanted(5, 0, "under-way"))
    world.pass_ms(200)
    lose(world)
    replace_target(world)
    world.pass_ms(40_000)
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    world.checkpoint()
    world.sweep()
    world.settle()
    assert world.hours().get(hour).sealed
    (seal,) = seals_of(world)
    facts = seal.facts
    assert (facts.in_doubt, facts.dispatched, facts.dead) == (5, facts.rows - 5, 0) and facts.rows > 5
    assert not verify_seals(DATA, disk=world.disk).broken


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", range(12))
def test_rule_S2_a_crash_while_a_target_is_given_up_sends_nothing_that_is_in_doubt(steps: int, seed: int) -> None:
    world = ready_world()
    target = target_of(world)
    target.slow_disk = True
    world.send(wanted(4, 0, "doubt"))
    world.pass_ms(200)
    world.core.handoff.targets.lose(TARGET, lambda _: None)
    draw = Random(seed)
    for _ in range(steps):
        # Any order of the threads, such as the state's before the dispatch logs'.
        if moves := world.moves():
            draw.choice(moves)()
    after = world.after_crash(PowerLoss.ALL_LOST, late=False)
    was_said = TARGET in after.core.handoff.targets._words.lost
    if was_said:
        replace_target(after)
    else:
        after.outside.targets[TARGET].slow_disk = False
    after.pass_ms(40_000)
    bodies = [body for each in after.outside.targets.values() for kept in each.log for body in kept.bodies]
    doubt = [body for body in bodies if body.startswith(b"doubt")]
    assert len(doubt) == len(set(doubt)) == (0 if was_said else 4)
    assert outcomes(after)[Outcome.IN_DOUBT] == (4 if was_said else 0)
    last = after.after_crash()
    last.pass_ms(5_000)
    assert outcomes(last) == outcomes(after)


def test_rule_I5_a_word_on_lost_data_accepts_no_restored_server() -> None:
    """What the target comes to refuse while the word is stored is decided on by a word of its own."""
    world = ready_world()
    link = link_of(world)
    link._raise_alarm("its log ends early")
    told: list[DelaydError | str] = []
    world.core.handoff.targets.accept(TARGET, told.append)
    link._refused(RestoredOrigin("this delay server was restored from a copy"))
    world.settle()
    assert len(told) == 1 and not link._accepts_origin


def test_a_target_is_not_given_up_before_the_clock_is_confirmed() -> None:
    world = ready_world()
    world.core.handoff.dispatcher._trusted = False
    with pytest.raises(NotReady, match="clock"):
        lose(world)


@pytest.mark.parametrize("restarted", [False, True])
def test_rule_H7_a_target_that_lost_data_is_accepted_by_an_operator(restarted: bool) -> None:
    world = ready_world()
    target = target_of(world)
    target.log.clear()
    target.synced = 0
    world.cut(TARGET)
    world.send(wanted(1, 0, "a"))
    world.pass_ms(10_000)
    assert link_of(world).alarm
    (command,) = [wait.command for wait in world.core.standing.waits()]
    assert f"delayd target accept {TARGET:016x}" in command
    check_commands(command)
    assert "accepted as it is" in accept(world)
    world.pass_ms(1_000)
    assert link_of(world).phase is Phase.READY
    assert [body for kept in target.log for body in kept.bodies] == [b"a-0"]
    if restarted:
        # Acknowledgements from before the operator's decision do not show where the log ends, also in the next life.
        world = world.after_crash(PowerLoss.ALL_LOST)
        world.send(wanted(1, 0, "b"))
        world.pass_ms(5_000)
        assert link_of(world).phase is Phase.READY
    target = target_of(world)
    target.log.clear()
    target.synced = 0
    world.cut(TARGET)
    world.pass_ms(2 * DAMAGED_AGAIN_MS)
    assert link_of(world).alarm, "a second loss is noticed like the first"


@pytest.mark.parametrize("restarted", [False, True])
def test_rule_H7_a_target_that_kept_a_part_of_its_log_is_accepted_by_one_word(restarted: bool) -> None:
    world = ready_world()
    target = target_of(world)
    for name in ("a", "b", "c"):
        world.send(wanted(1, 0, name))
        world.pass_ms(2_000)
    # W has passed the first batches: the target knows that their outcomes were recorded.
    del target.log[-1]
    target.synced = len(target.log)
    world.cut(TARGET)
    world.pass_ms(10_000)
    assert link_of(world).alarm
    assert "accepted as it is" in accept(world)
    if restarted:
        world = world.after_crash(PowerLoss.ALL_LOST)
    world.pass_ms(3_000)
    assert link_of(world).phase is Phase.READY and not world.core.fence.is_up
    assert not link_of(world).alarm, "the target takes nobody for a restored delay server"
    world.send(wanted(1, 0, "d"))
    world.pass_ms(2_000)
    assert target_of(world).log[-1].bodies == (b"d-0",)
    # From then on a loss is noticed again, by either side.
    assert world.core.handoff.ends.said(TARGET) == target_of(world).log[-1].offset


def restored(world: World) -> World:
    """The delay server as a copy of its directory from before, its targets as they are."""
    world.checkpoint()
    backup, pairs = world.disk.after_kill(), dict(world.state._pairs)
    world.send(wanted(6, 0, "after the copy"))
    world.pass_ms(5_000)
    world.checkpoint()
    world.pass_ms(2_000)
    remains = world.remains(late=False)
    state = type(world.state)(backup)
    state._pairs = pairs
    return World(Remains(backup, state, remains.outside, remains.clock))


@pytest.mark.parametrize("heard", [True, False])
def test_rule_H8_a_restored_delay_server_sends_nothing_until_an_operator_accepts_it(heard: bool) -> None:
    """Also when its targets have not heard of any durable outcome: they name a message that it never numbered."""
    world = World()
    for name in ("a", "b"):
        world.send(wanted(4, 1_000, name))
    world.pass_ms(5_000)
    again = restored(world)
    if not heard:
        for target in again.outside.targets.values():
            target.forget_outcomes()
    again.core.ask_targets_first()
    before = {log_id: len(target.log) for log_id, target in again.outside.targets.items()}
    again.pass_ms(10_000)
    refused = [log_id for log_id, link in again.core.handoff.dispatcher.links.items() if link.alarm]
    assert refused
    # It gives no receipts either: numbers that it gives now were given before.
    again.outside.refused.clear()
    number = again.send(wanted(1, 0, "new"))
    again.settle()
    assert [(each, type(error)) for each, error in again.outside.refused] == [(number, ServerFenced)]
    assert {log_id: len(target.log) for log_id, target in again.outside.targets.items()} == before
    for log_id in refused:
        accept(again, log_id)
    again.pass_ms(2_000)
    assert not again.core.fence.is_up
    highest = max(seq for target in again.outside.targets.values() for kept in target.log for seq in kept.sequences)
    again.send_again(number)
    again.pass_ms(5_000)
    accepted = again.outside.accepted[number][1]
    assert accepted.base_sequence > highest


def other_target(world: World) -> FakeTarget:
    world.outside.targets[OTHER] = FakeTarget(OTHER, world.clock.now_ms)
    world.core.handoff.dispatcher.place(OTHER, f"target-{OTHER}", 1)
    return world.outside.targets[OTHER]


def test_a_subject_that_an_operator_moves_goes_to_its_new_target_when_the_old_one_holds_nothing_in_doubt() -> None:
    world = ready_world()
    (subject,) = world.core.handoff.dispatcher.targets
    other = other_target(world)
    old = target_of(world)
    old.slow_disk = True
    world.send([(world.clock.now_ms(), subject, b"in doubt")])
    world.pass_ms(100)
    move = Move(3, subject.decode(), OTHER)
    world.core.handoff.moves.take([move])
    world.send([(world.clock.now_ms(), subject, b"new")])
    world.pass_ms(1_000)
    assert not other.log and world.core.handoff.moves.seen == 0
    old.slow_disk = False
    world.pass_ms(1_000)
    world.core.handoff.moves.take([move])
    world.settle()
    assert world.core.handoff.moves.seen == 3
    assert [body for kept in other.log for body in kept.bodies] == [b"new"]
    assert [body for kept in old.log for body in kept.bodies][-1:] == [b"in doubt"]
    again = world.after_crash(PowerLoss.ALL_LOST)
    assert again.core.handoff.moves.seen == 3 and again.core.handoff.dispatcher.targets == {subject: OTHER}
    again.drain()
    again.check_logs()


@pytest.mark.parametrize("steps", range(10))
def test_a_crash_while_a_subject_moves_loses_and_repeats_nothing(steps: int) -> None:
    world = ready_world()
    (subject,) = world.core.handoff.dispatcher.targets
    other_target(world)
    world.send([(world.clock.now_ms(), subject, b"%d" % number) for number in range(4)])
    for _ in range(steps):
        if (step := world.next_move()) is not None:
            step()
    world.core.handoff.moves.take([Move(1, subject.decode(), OTHER)])
    for _ in range(steps):
        if (step := world.next_move()) is not None:
            step()
    after = world.after_crash(PowerLoss.ALL_LOST)
    after.look_around()
    after.core.handoff.moves.take([Move(1, subject.decode(), OTHER)])
    after.drain()
    after.core.handoff.moves.take([Move(1, subject.decode(), OTHER)])
    after.pass_ms(1_000)
    after.check_logs()
    assert not after.missing()
    assert after.core.handoff.moves.seen == 1


def test_a_move_of_a_subject_that_has_no_target_here_is_seen_at_once() -> None:
    world = ready_world()
    world.core.handoff.moves.take([Move(1, "unknown", OTHER), Move(2, "other", OTHER)])
    world.settle()
    assert world.core.handoff.moves.seen == 2
