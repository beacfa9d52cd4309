"""Targets that hang: their connections stay open and nothing comes any more (rules H3, H4)."""

import logging

import pytest

from delayd.config import DelayConfig
from delayd.delay.handoff.link import Phase
from delayd.delay.handoff.wire import STOOD_STILL_MS
from delayd.testing.clock import START_MS
from delayd.wire.requests import RequestType
from tests.unit.delay.handoff import TARGET, cable_of, link_of, put_on_cable, ready_world, target_of
from tests.worlds.delay import World, wanted

LIMIT_MS = DelayConfig().target_silence_ms_max


def send_due(world: World, count: int, name: str, subject: bytes = b"orders.eu") -> None:
    """Messages that come due in 100 ms."""
    world.send(wanted(count, world.clock.now_ms() - START_MS + 100, name, subject))


def session_of(world: World) -> int:
    return link_of(world)._session


def test_a_target_that_hangs_is_given_up_after_the_limit_and_what_it_has_is_asked_for_when_it_is_back() -> None:
    world = ready_world(frame_rows_max=1)
    target = target_of(world)
    target.hangs = True
    send_due(world, 3, "a")
    world.pass_ms(LIMIT_MS)
    assert session_of(world) == 1 and link_of(world).phase is Phase.READY
    world.pass_ms(1_000)
    assert session_of(world) == 2 and link_of(world).phase is Phase.ASKED
    world.pass_ms(5 * LIMIT_MS)
    assert session_of(world) > 4 and len(target.log) == 1
    target.hangs = False
    world.drain()
    world.check_books()
    assert sorted(body for kept in target.log for body in kept.bodies) == [b"a-0", b"a-1", b"a-2", b"first-0"]


def test_a_target_whose_disk_is_slow_answers_pings_and_keeps_its_session() -> None:
    world = ready_world()
    target_of(world).slow_disk = True
    send_due(world, 2, "a")
    world.pass_ms(10 * LIMIT_MS)
    assert session_of(world) == 1 and link_of(world).phase is Phase.READY
    target_of(world).slow_disk = False
    world.pass_ms(1_000)
    world.check_books()


def test_nothing_is_asked_of_a_target_for_which_nothing_is_due() -> None:
    world = ready_world()
    target_of(world).hangs = True
    world.pass_ms(10 * LIMIT_MS)
    assert session_of(world) == 1 and not cable_of(world).up


def test_time_in_which_the_delay_server_stood_still_itself_is_no_silence_of_the_target() -> None:
    world = ready_world()
    put_on_cable(world, 1)
    world.clock.advance(LIMIT_MS + STOOD_STILL_MS)
    world.core.wake()
    assert session_of(world) == 1 and link_of(world).phase is Phase.READY
    assert [call.asked.kind for call in cable_of(world).up] == [RequestType.DISPATCH]
    world.pass_ms(1_000)
    world.check_books()


def test_a_target_that_is_away_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    world = ready_world()
    target_of(world).hangs = True
    send_due(world, 1, "a")
    with caplog.at_level(logging.WARNING):
        world.pass_ms(6 * LIMIT_MS)
    told = [line.getMessage() for line in caplog.records if "target_away" in line.getMessage()]
    assert len(told) == 1 and f"no sign of life for {LIMIT_MS} ms" in told[0] and f"{TARGET:016x}" in told[0]
