"""Meta, delay servers and a realtime server in the test's loop, ended however the test ends."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Thread
from typing import TypeVar
from unittest.mock import patch

import uvloop

from delayd.client import instants, routing
from delayd.client.pulling import consumer, consumer_core
from delayd.client.sending.send_options import TIMEOUT_MS
from delayd.hours import INSTANT_MS_MIN
from tests.unit.client.core_server import CoreServer
from tests.unit.client.servers import SmallDelay, SmallMeta, SmallServer
from tests.unit.net import loopback
from tests.waiting import DEADLINE_S

PAST_MS = INSTANT_MS_MIN  # Long due.
# Python 3.12 and later warn of a fork in a process with threads. Rule I2 is about such forks.
THREADS_AT_A_FORK = "ignore:This process:DeprecationWarning"

LIMIT_S = TIMEOUT_MS / 1_000  # The time limit of a client that was given none.

R = TypeVar("R")


class World:
    """What a scenario runs on."""

    def __init__(self) -> None:
        self.meta = SmallMeta()
        self.delay = SmallDelay(101)
        self.realtime = CoreServer(201)
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

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop()
            assert not server.crashes, server.crashes


def on_loop(scenario: Callable[[World], Awaitable[None]]) -> None:
    """Run a scenario against fresh servers."""
    loopback.on_loop(partial(_in_a_world, scenario))


def on_steady_loop(scenario: Callable[[World], Awaitable[None]]) -> None:
    """The same, where `loopback.skip` lets time pass, and where no time passes while the machine stands still."""

    def run(main: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=loopback.SteadyLoop) as runner, ExitStack() as patches:
            # No server is asked whether it is alive: it could not answer in a time that is skipped.
            patches.enter_context(patch.object(routing, "ALIVE_EVERY_MS", loopback.HOUR_S * 1_000))
            for module in (consumer, consumer_core, instants):
                patches.enter_context(patch.object(module, "monotonic_s", runner.get_loop().time))
            runner.run(main)

    loopback.on_loop(partial(_in_a_world, scenario), run, within_s=loopback.HOUR_S)


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
    world.realtime.add(*(b"%d" % row for row in range(count)))


def fork() -> int:
    """Fork this process, which has threads; 0 in the child."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        return os.fork()
