"""Meta, delay servers and a realtime server in the test's loop, ended however the test ends."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import TypeVar
from unittest.mock import patch

import uvloop

from delayd.client import link
from delayd.hours import INSTANT_MS_MIN
from tests.unit.client.realtime import SmallRealtime
from tests.unit.client.servers import SmallDelay, SmallMeta, SmallServer
from tests.unit.net import loopback
from tests.waiting import DEADLINE_S

PAST_MS = INSTANT_MS_MIN  # Long due.
# Python 3.12 and later warn of a fork in a process with threads. Rule I2 is about such forks.
THREADS_AT_A_FORK = "ignore:This process:DeprecationWarning"

HOUR_S = 3_600.0

R = TypeVar("R")


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose time a test moves ahead: a time limit of some seconds is over when the test says so, and never
    because the machine stood still.
    """

    def __init__(self) -> None:
        self.skipped_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self.skipped_s


class World:
    """What a scenario runs on."""

    def __init__(self) -> None:
        self.meta = SmallMeta()
        self.delay = SmallDelay(101)
        self.realtime = SmallRealtime(201)
        self.servers: list[SmallServer] = [self.meta, self.delay, self.realtime]

    @property
    def address(self) -> str:
        return self.meta.address

    async def start(self) -> None:
        for server in self.servers:
            await server.start()
        self.meta.delay.append(self.delay)
        self.meta.realtime.append(self.realtime)

    async def second_delay(self) -> SmallDelay:
        """Another delay server, known to meta from now on."""
        other = SmallDelay(102)
        self.servers.append(other)
        await other.start()
        self.meta.delay.append(other)
        return other

    async def skip(self, seconds: float) -> None:
        """Let so much time pass at once, and what became due meanwhile begin; in `on_skipping_loop` only."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SkippingLoop)
        loop.skipped_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop()
            assert not server.crashes, server.crashes


def on_loop(scenario: Callable[[World], Awaitable[None]]) -> None:
    """Run a scenario against fresh servers."""
    loopback.on_loop(partial(_in_a_world, scenario))


def on_skipping_loop(scenario: Callable[[World], Awaitable[None]]) -> None:
    """The same, where `World.skip` lets time pass."""

    def run(main: Coroutine[object, object, None]) -> None:
        # No server is asked whether it is alive: it could not answer in a time that is skipped.
        with patch.object(link, "ALIVE_EVERY_MS", HOUR_S * 1_000), asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(main)

    loopback.on_loop(partial(_in_a_world, scenario), run, within_s=HOUR_S)


async def _in_a_world(scenario: Callable[[World], Awaitable[None]], _: loopback.Loopback) -> None:
    world = World()
    await world.start()
    try:
        await scenario(world)
    finally:
        await world.stop()


@contextmanager
def world_aside() -> Iterator[tuple[World, Callable[[Callable[[], R]], R]]]:
    """Fresh servers on a thread of their own, for the blocking clients; with what calls a function on that thread."""
    loop = uvloop.new_event_loop()
    thread = Thread(target=loop.run_forever, name="servers", daemon=True)
    thread.start()

    async def made() -> World:
        world = World()
        await world.start()
        return world

    world = asyncio.run_coroutine_threadsafe(made(), loop).result(DEADLINE_S)

    def do(function: Callable[[], R]) -> R:
        async def called() -> R:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), loop).result(DEADLINE_S)

    try:
        yield world, do
    finally:
        asyncio.run_coroutine_threadsafe(world.stop(), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


def add_messages(world: World, count: int) -> None:
    for row in range(count):
        world.realtime.add(b"%d" % row)


def fork() -> int:
    """Fork this process, which has threads; 0 in the child."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        return os.fork()
