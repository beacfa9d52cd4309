"""Targets that are away, elsewhere, not who they were, or make no sense (rule H7)."""

import pytest

from delayd.address import Endpoint
from delayd.delay.handoff.link import Phase
from delayd.wire.frame import ANSWER, Frame, Head
from tests.unit.delay.handoff import TARGET, cable_of, link_of, put_on_cable, ready_world, target_of
from tests.worlds.delay import World, wanted


def test_a_target_that_listens_elsewhere_is_tried_at_once_though_its_last_address_raised_the_alarm() -> None:
    world = ready_world()
    target = target_of(world)
    world.cut(TARGET)
    target.log_id = 0xBAD
    world.send(wanted(1, 0, "a"))
    world.pass_ms(1_000)
    assert link_of(world).alarm
    target.log_id = TARGET
    world.core.handoff.dispatcher.place(TARGET, Endpoint(f"target-{TARGET}", 2))
    world.settle()
    assert link_of(world).phase is Phase.READY and not link_of(world).alarm


def answer_with(world: World, head: Head, body: bytes = b"") -> None:
    """Answer the request that is under way with a frame that the target would not send."""
    cable = cable_of(world)
    call = cable.up.popleft()
    cable.down.append(lambda: call.on_answer(Frame(call.asked.kind, ANSWER, 0, head, memoryview(body))))


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"log_id": TARGET, "end_offset": -1, "batches": []},
        {"log_id": TARGET, "end_offset": 10_000, "batches": [[1, 1, 500_000, 0, 0, 0, 5]]},
    ],
)
def test_a_window_that_makes_no_sense_ends_the_session_and_nothing_else(head: Head) -> None:
    world = ready_world()
    world.cut(TARGET)
    world.cables[0].carry_down()
    world.clock.advance(100)
    world.core.wake()
    cable_of(world).carry_down()
    answer_with(world, head)
    world.settle()
    assert link_of(world).phase is not Phase.READY
    world.send(wanted(1, 0, "a"))
    world.drain()
    world.check_books()


def test_a_target_that_is_away_is_tried_again_with_rising_waits() -> None:
    world = ready_world()
    world.crash_target(TARGET)
    world.settle()
    assert link_of(world).phase is Phase.CLOSED
    tries = [link_of(world)._session]
    for _ in range(10):
        world.pass_ms(1_000)
        tries.append(link_of(world)._session)
    assert tries[1] - tries[0] >= 3 and tries[-1] - tries[-3] == 1
    target_of(world).restart()
    world.pass_ms(2_100)
    assert link_of(world).phase is Phase.READY


@pytest.mark.parametrize("sent_in_vain", [False, True])
def test_rows_that_wait_for_a_target_that_is_away_are_told_also_those_that_it_was_sent(sent_in_vain: bool) -> None:
    world = ready_world()
    if sent_in_vain:
        put_on_cable(world, 2)
        world.crash_target(TARGET)
    else:
        world.crash_target(TARGET)
        world.settle()
        world.send(wanted(2, 0, "a"))
    world.pass_ms(3_000)
    (wait,) = world.core.standing.waits()
    assert wait.what == f"2 due messages for realtime server {TARGET:016x}"


def test_a_connection_that_is_lost_before_it_stood_counts_as_away() -> None:
    world = World()
    lost: list[str] = []
    world.core.handoff.dispatcher.place(TARGET, Endpoint(f"target-{TARGET}", 1))
    world.send(wanted(1, 0, "a"))
    target_of(world).up = False
    world.pass_ms(1_000)
    lost.append(link_of(world).phase.value)
    target_of(world).restart()
    world.drain()
    world.check_books()
    assert lost == ["closed"]
