"""The collector: nothing starts by itself, and cycles go away even if it is never quiet."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import uvloop

from delayd.net import program
from delayd.net.program import QuietCollector
from tests.waiting import until


class Cycle:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def make_cycles(count: int) -> weakref.ref[Cycle]:
    cycles = [Cycle() for _ in range(count)]
    return weakref.ref(cycles[0])


def run_collector(quiet: Callable[[], bool], cycles: int) -> bool:
    """Whether a cycle was freed after some ticks."""

    async def scenario() -> bool:
        keeper = QuietCollector(asyncio.get_running_loop(), quiet)
        try:
            assert not gc.isenabled()
            cycle = make_cycles(cycles)
            if cycles < program.YOUNG_OBJECTS_MAX and not quiet():
                await asyncio.sleep(5 * program.TICK_S)
                return cycle() is None
            await until(lambda: cycle() is None, "the cycle's end")
            return True
        finally:
            keeper.close()

    return uvloop.run(scenario())


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(program, "TICK_S", 0.005)
    yield
    gc.unfreeze()
    gc.enable()


def test_cycles_are_freed_at_a_quiet_moment() -> None:
    assert run_collector(lambda: True, cycles=program.YOUNG_OBJECTS_MIN * 2)
    assert not gc.isenabled(), "the process ends, and no walk through all objects holds that up"


def test_too_many_of_them_are_freed_even_if_it_is_never_quiet() -> None:
    assert run_collector(lambda: False, cycles=program.YOUNG_OBJECTS_MAX + 1)


@pytest.mark.parametrize(("quiet", "ticks"), [(True, "OLD_TICKS_MIN"), (False, "OLD_TICKS_MAX")])
def test_free_memory_goes_back_with_the_walk_through_everything(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, ticks: str
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(program, "give_back", lambda: given.append(True))
    monkeypatch.setattr(program, ticks, 3)

    async def scenario() -> None:
        keeper = QuietCollector(asyncio.get_running_loop(), lambda: quiet)
        try:
            assert not given
            await until(lambda: len(given) > 1, "a second walk")
        finally:
            keeper.close()

    uvloop.run(scenario())
