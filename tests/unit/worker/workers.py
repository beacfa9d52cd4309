"""Workers on the small servers of the clients' tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import delayd
from tests.unit.client.world import World
from tests.waiting import DEADLINE_S, until

SUBJECT, GROUP = "orders", "g"


def worker_of(world: World, *, middleware: tuple[object, ...] = (), drain_s: float = 30.0) -> delayd.Worker:
    return delayd.Worker(world.address, middleware=middleware, drain=timedelta(seconds=drain_s))


@asynccontextmanager
async def serving(worker: delayd.Worker) -> AsyncIterator[asyncio.Task[None]]:
    """A worker at work; at the end it stops, and has drained."""
    serve = asyncio.get_running_loop().create_task(worker.serve())
    try:
        yield serve
        worker.stop()
        await asyncio.wait_for(serve, DEADLINE_S)
    finally:
        serve.cancel()


async def settled(world: World, acked: int, counted: int = 0) -> None:
    """So many messages are acknowledged, and so many given back as an attempt."""
    realtime = world.realtime
    await until(
        lambda: len(realtime.acked) >= acked and len(realtime.counted) >= counted,
        lambda: f"acked {realtime.acked}, counted {realtime.counted}, returned {realtime.returned}",
    )
