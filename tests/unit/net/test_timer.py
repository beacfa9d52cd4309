"""The timer: never early, once for each time that it is set, and idle when it was cancelled."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple, cast

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


class Planned:
    """A loop whose time a test sets, and which calls when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1_000.003
        self.planned: list[tuple[float, Callable[[], object]]] = []

    def ticks(self, every_s: float, callback: Callable[[], object]) -> Ticks:
        return Ticks(cast("asyncio.AbstractEventLoop", self), every_s, callback)

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], object]) -> _Handle:
        self.planned.append((when, callback))
        return _Handle(self, callback)

    def call(self, late_s: float = 0.0) -> float:
        """Call what is planned next; returns for when it was planned."""
        (when, callback), *self.planned = sorted(self.planned, key=lambda each: each[0])
        self.now_s = when + late_s
        callback()
        return when


class _Handle(NamedTuple):
    loop: Planned
    callback: Callable[[], object]

    def cancel(self) -> None:
        self.loop.planned = [each for each in self.loop.planned if each[1] != self.callback]


def test_ticks_of_several_periods_are_planned_for_the_same_times() -> None:
    loop, came = Planned(), list[str]()
    short = loop.ticks(0.05, lambda: came.append("short"))
    loop.now_s += 0.031
    long = loop.ticks(0.1, lambda: came.append("long"))
    times = [round(loop.call() * 1_000) for _ in range(6)]
    assert times == [1_000_050, 1_000_100, 1_000_100, 1_000_150, 1_000_200, 1_000_200]
    assert came.count("short") == 4 and came.count("long") == 2
    for each in (short, long):
        each.close()
    assert not loop.planned, "closed ticks do not come"


@pytest.mark.parametrize(
    ("late_s", "next_ms"),
    [(-0.001, 1_000_100), (0.0, 1_000_100), (0.049, 1_000_100), (0.05, 1_000_150), (0.17, 1_000_250)],
    ids=["early", "in time", "late", "a period late", "three periods late"],
)
def test_a_tick_is_called_once_however_early_or_late_it_comes_and_none_is_made_up_for(
    late_s: float, next_ms: int
) -> None:
    loop, came = Planned(), list[float]()
    ticks = loop.ticks(0.05, lambda: came.append(ticks.due_s))
    loop.call(late_s)
    assert [round(due_s * 1_000) for due_s in came] == [next_ms]
    assert round(loop.call() * 1_000) == next_ms
