"""An operator's words on targets: lost for good, or accepted though data was lost (rules H5, H7, H8, S2)."""

from __future__ import annotations

import pytest

from delayd.address import Endpoint
from delayd.errors import BadArgument, DelaydError, NotReady, UnknownServer
from delayd.testing.tree import PowerLoss
from delayd.wire.meta import Move
from tests.unit.delay.handoff import TARGET, ready_world, target_of
from tests.worlds.delay import World
from tests.worlds.target import FakeTarget

OTHER = 0x7002


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


def test_a_target_is_not_given_up_before_the_clock_is_confirmed() -> None:
    world = ready_world()
    world.core.handoff.dispatcher._trusted = False
    with pytest.raises(NotReady, match="clock"):
        lose(world)


def other_target(world: World) -> FakeTarget:
    world.outside.targets[OTHER] = FakeTarget(OTHER, world.clock.now_ms)
    world.core.handoff.dispatcher.place(OTHER, Endpoint(f"target-{OTHER}", 1))
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


def test_a_move_of_a_subject_that_has_no_target_here_is_seen_at_once() -> None:
    world = ready_world()
    world.core.handoff.moves.take([Move(1, "unknown", OTHER), Move(2, "other", OTHER)])
    world.settle()
    assert world.core.handoff.moves.seen == 2
