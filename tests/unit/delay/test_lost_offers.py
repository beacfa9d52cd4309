"""A target lost messages that its consumers had: they are in flight until they have an outcome (rule C1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from delayd.errors import DelaydError, SlowDown
from delayd.hours import INSTANT_MS_MAX
from delayd.outcome import MessageState, Reason
from delayd.testing.clock import START_MS
from delayd.wire.asked import (
    AnswerRows,
    Asked,
    AskedKeys,
    CancelAnswer,
    RescheduleAnswer,
    encode_asked_keys,
    read_asked_keys,
)
from delayd.wire.meta import Move
from tests.worlds.delay import TARGET_IDS, World, new_world, wanted
from tests.worlds.delay_adapter import RequestWish
from tests.worlds.key_books import REPLACE

SUBJECT, KEY = b"orders.eu", b"invoice-7"
IN_FLIGHT = [CancelAnswer.IN_FLIGHT]
CLOCKS_MS = 5_000
KEPT_MS = 6_000  # A send with a key waits as long for a row that may be at a target.
REFUSALS = 20


def lost(*, keyed: bool = False, wrong_ms: int = 0, was_ahead_ms: int = 0) -> World:
    """A world with one row that the target's consumers had, and that a power cut took; the target takes nothing now.
    The delay server's clock may have been ahead before, when something left.
    """
    world = World(new_world(TARGET_IDS))
    if was_ahead_ms:
        world.clock.step_wall(was_ahead_ms)
        world.clock.trust()
    world.send(wanted(1, 0, "first"))
    world.pass_ms(200)
    world.clock.step_wall(-was_ahead_ms)
    world.server.own_all_keys()
    world.settle()
    rows = wanted(1, world.clock.now_ms() - START_MS + 100, "a")
    world.send(rows, [KEY] if keyed else None, [REPLACE] if keyed else None)
    world.work()
    world.clock.advance(100)
    world.server.wake()
    target = world.outside.targets[target_of(world)]
    target.now_ms = lambda: world.clock.now_ms() + wrong_ms
    world.cable.carry_up()
    assert target.given and target.synced < len(target.log)
    del target.log[target.synced :]
    world.crash_target(target.log_id)
    target.restart()
    return refusing(world)


def target_of(world: World) -> int:
    (target,) = set(world.server.targets.values())
    return target


def refusing(world: World) -> World:
    """Let the targets be greeted, and take nothing, so that rows wait for them."""
    for target in world.outside.targets.values():
        target.refusals[:] = [SlowDown("no room", retry_after_ms=60_000)] * REFUSALS
    world.pass_ms(3_000)
    assert world.target_info()["state"] == "ready"
    return world


def cancelled(world: World, asked: Asked) -> list[CancelAnswer]:
    told = world.cancel(asked)
    world.settle()
    return told[0]


def by_key(world: World, wish: RequestWish) -> list[int]:
    told: list[AnswerRows | DelaydError] = []
    instants = np.array([world.clock.now_ms() + 60_000]) if wish is RequestWish.MOVE else None
    names = read_asked_keys(encode_asked_keys(AskedKeys(SUBJECT, [KEY]), instants))
    assert names is not None
    world.server.ask_by_key(wish, names, told.append, instants)
    world.settle()
    (answer,) = told
    assert not isinstance(answer, DelaydError)
    found: list[int] = answer["answer"].tolist()
    return found


def delivered(world: World, asked: Asked) -> None:
    """The message comes, and only now it is dispatched."""
    for target in world.outside.targets.values():
        target.refusals.clear()
    world.drain(120_000)
    assert cancelled(world, asked) == [CancelAnswer.ALREADY_DISPATCHED]
    world.check_books()


def the_same(world: World) -> World:
    return world


def delay_server_restarted(world: World) -> World:
    return refusing(world.after_crash(late=False))


def target_restarted_cleanly(world: World) -> World:
    target = world.outside.targets[target_of(world)]
    said = target.lost_life, target.lost_ms
    world.crash_target(target.log_id)
    target.restart()
    target.lost_life, target.lost_ms = said
    return refusing(world)


@pytest.mark.parametrize("then", [the_same, delay_server_restarted, target_restarted_cleanly])
def test_rule_C1_what_consumers_had_is_in_flight_by_receipt_until_it_has_an_outcome(
    then: Callable[[World], World],
) -> None:
    world = then(lost())
    asked = world.receipts("a")
    assert world.states(asked) == [MessageState.IN_FLIGHT]
    assert cancelled(world, asked) == IN_FLIGHT
    moved = world.reschedule(asked, world.clock.now_ms() + 60_000)
    world.settle()
    assert moved[0]["answer"].tolist() == [RescheduleAnswer.IN_FLIGHT]
    delivered(world, asked)


@pytest.mark.parametrize("then", [the_same, delay_server_restarted, target_restarted_cleanly])
def test_rule_C1_what_consumers_had_is_in_flight_by_key_and_is_not_replaced(then: Callable[[World], World]) -> None:
    world = then(lost(keyed=True))
    world.server.own_all_keys()
    world.settle()
    for wish, answer in ((RequestWish.CANCEL, CancelAnswer.IN_FLIGHT), (RequestWish.MOVE, RescheduleAnswer.IN_FLIGHT)):
        assert by_key(world, wish) == [answer]
    number = world.send_keyed(wanted(1, 90_000, "b"), [KEY], REPLACE)
    world.pass_ms(KEPT_MS)
    ((reason, _),) = world.verdicts(number)
    assert reason == Reason.IN_FLIGHT
    delivered(world, world.receipts("a"))


def test_rule_C1_a_subject_that_moves_takes_along_what_consumers_of_its_former_target_had() -> None:
    world = lost()
    asked, former = world.receipts("a"), target_of(world)
    (other,) = set(TARGET_IDS) - {former}
    world.core.handoff.moves.take([Move(1, SUBJECT.decode(), other)])
    world.server.wake()
    world.settle()
    assert target_of(world) == other
    assert cancelled(world, asked) == IN_FLIGHT
    delivered(world, asked)


def test_rule_C1_so_does_the_subject_of_a_target_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = lost()
    asked, former = world.receipts("a"), target_of(world)
    world.meta_up = False
    world.server.lose(former, lambda told: None)
    world.settle()
    assert cancelled(world, asked) == IN_FLIGHT, "it has no target"
    (other,) = set(TARGET_IDS) - {former}
    monkeypatch.setattr(world, "target_of", lambda subject: other)
    world.meta_up = True
    world.pass_ms(2_000)
    assert target_of(world) == other
    assert cancelled(world, asked) == IN_FLIGHT
    delivered(world, asked)


@pytest.mark.parametrize("then", [the_same, delay_server_restarted])
def test_what_falls_due_after_the_target_is_back_can_be_cancelled_and_so_can_what_is_sent_then(
    then: Callable[[World], World],
) -> None:
    world = lost()
    now_ms = world.clock.now_ms() - START_MS
    world.send(wanted(1, now_ms + CLOCKS_MS + 1_000, "later"))
    world.send(wanted(1, 0, "new"))
    world.settle()
    assert cancelled(world, world.receipts("new")) == [CancelAnswer.CANCELLED]
    world.pass_ms(CLOCKS_MS + 2_000)
    world = then(world)
    assert cancelled(world, world.receipts("later")) == [CancelAnswer.CANCELLED]
    delivered(world, world.receipts("a"))


def test_what_never_left_can_be_cancelled_though_the_clock_was_an_hour_ahead_once() -> None:
    world = lost(was_ahead_ms=3_600_000)
    world.send(wanted(1, world.clock.now_ms() - START_MS + 1_800_000, "later"))
    world.send(wanted(1, 0, "new"))
    world.settle()
    world.crash_target(target_of(world))
    world.outside.targets[target_of(world)].restart()
    world = refusing(world)
    assert cancelled(world, world.receipts("a")) == IN_FLIGHT
    assert cancelled(world, world.receipts("later")) == [CancelAnswer.CANCELLED]
    delivered(world, world.receipts("a"))


@pytest.mark.parametrize("back_ms", [3_600_000, 2_000_000_000])
@pytest.mark.parametrize("boots", [False, True])
def test_rule_C1_a_start_whose_clock_was_set_back_does_not_claim_what_consumers_had(back_ms: int, boots: bool) -> None:
    world = lost()
    world.clock.step_wall(-back_ms)
    if boots:
        world.clock = world.clock.reboot()
    target = world.outside.targets[target_of(world)]
    world.crash_target(target.log_id)
    target.restart()
    target.now_ms = world.clock.now_ms
    world = delay_server_restarted(world)
    for _ in range(8):
        # The clock is in doubt for half a minute after a boot.
        assert cancelled(world, world.receipts("a")) == IN_FLIGHT
        world.pass_ms(10_000)
    world.send(wanted(1, 0, "new"))
    world.settle()
    assert cancelled(world, world.receipts("new")) == [CancelAnswer.CANCELLED]


@pytest.mark.parametrize("wrong_ms", [-3_600_000, 3_600_000])
def test_rule_C1_no_clock_of_a_target_says_which_rows_it_may_have_lost(wrong_ms: int) -> None:
    world = lost(wrong_ms=wrong_ms)
    assert cancelled(world, world.receipts("a")) == IN_FLIGHT
    delivered(world, world.receipts("a"))


def test_a_target_that_does_not_know_when_it_began_may_have_lost_all_that_had_left_by_now() -> None:
    world = delay_server_restarted(lost())
    target = world.outside.targets[target_of(world)]
    target.lost_life, target.lost_ms = target.lost_life + 1, INSTANT_MS_MAX
    world.send(wanted(1, world.clock.now_ms() - START_MS + 2_000, "later"))
    world.settle()
    world.cut(target_of(world))
    world.pass_ms(1_000)
    assert cancelled(world, world.receipts("a")) == IN_FLIGHT
    world.pass_ms(2_000)
    assert cancelled(world, world.receipts("later")) == [CancelAnswer.CANCELLED]
    delivered(world, world.receipts("a"))
