"""The timer: never early, once for each time that it is set, and idle when it was cancelled."""

from __future__ import annotations

import asyncio
import ctypes
import time

import pytest
import uvloop

from delayd.net.timer import Ticks, Timer
from tests.waiting import until


class Firings:
    """A timer that notes when it fired."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.timer = Timer(asyncio.get_running_loop(), lambda: self.times.append(time.monotonic()))

    def is_set(self) -> bool:
        return self.timer.is_set

    async def count(self, wanted: int) -> None:
        await until(lambda: len(self.times) >= wanted, f"{wanted} firings")


@pytest.fixture(params=["timerfd", "loop"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with a timerfd and without one."""
    if request.param == "loop":
        monkeypatch.setattr(ctypes, "PyDLL", lambda name, use_errno: object())


either = pytest.mark.usefixtures("_either")


@either
def test_it_fires_once_for_each_time_and_never_early() -> None:
    async def scenario() -> None:
        firings = Firings()
        for number, delay_ms in enumerate((0.2, 1.5, 7.25, 20.0, 0.7), start=1):
            due = time.monotonic() + delay_ms / 1000
            firings.timer.set_after_ms(delay_ms)
            await firings.count(number)
            assert firings.times[-1] >= due
        firings.timer.set_after_ms(30)
        await firings.count(6)
        assert len(firings.times) == 6
        firings.timer.close()

    uvloop.run(scenario())


def test_an_expiry_that_another_callback_of_the_same_turn_takes_back_does_not_fire() -> None:
    async def scenario() -> None:
        bugs: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: bugs.append(context))
        fired: list[str] = []

        def on_first() -> None:
            fired.append("first")
            second.set_after_ms(60_000)

        def on_second() -> None:
            fired.append("second")
            first.set_after_ms(60_000)

        first, second, witness = Timer(loop, on_first), Timer(loop, on_second), Firings()
        for _ in range(20):
            fired.clear()
            first.set_after_ms(0.1)
            second.set_after_ms(0.1)
            hold_the_loop_until = time.monotonic() + 0.002
            while time.monotonic() < hold_the_loop_until:
                pass
            await until(lambda: bool(fired), "one of them")
            witness.timer.set_after_ms(2)
            count = len(witness.times) + 1
            await witness.count(count)
            assert len(fired) == 1
        assert bugs == []
        for timer in (first, second, witness.timer):
            timer.close()

    uvloop.run(scenario())


def test_ticks_of_several_periods_come_in_one_turn_of_the_loop() -> None:
    async def scenario() -> None:
        loop, short, long = asyncio.get_running_loop(), list[float](), list[float]()
        # The time of a loop stands still within a turn.
        ticks = [Ticks(loop, 0.02, lambda: short.append(loop.time()))]
        await asyncio.sleep(0.003)
        ticks.append(Ticks(loop, 0.04, lambda: long.append(loop.time())))
        await until(lambda: len(long) == 4, "ticks")
        for each in ticks:
            each.close()
        assert set(long) <= set(short)
        count = len(short)
        await asyncio.sleep(0.05)
        assert len(short) == count, "closed ticks do not come"

    uvloop.run(scenario())


def test_ticks_that_passed_while_the_loop_stood_still_are_left_out() -> None:
    async def scenario() -> None:
        loop, came = asyncio.get_running_loop(), list[float]()
        ticks = Ticks(loop, 0.02, lambda: came.append(time.monotonic()))
        await until(lambda: bool(came), "a tick")
        time.sleep(0.2)  # noqa: ASYNC251 (the loop is to stand still)
        before = len(came)
        await asyncio.sleep(0.01)
        assert len(came) - before <= 2
        ticks.close()

    uvloop.run(scenario())
