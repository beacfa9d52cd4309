"""Consumers of the small servers."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from delayd import AsyncConsumer, Backoff
from delayd.client.pulling.consume_options import BACKOFF
from tests.unit.client.core_server import SUBJECT
from tests.unit.client.world import World
from tests.waiting import until


def consumer_of(
    world: World,
    *,
    lease: timedelta = timedelta(seconds=60),
    prefetch: bool = True,
    max_messages: int = 500,
    timeout_ms: float = 30_000,
    max_attempts: int | None = None,
    backoff: Backoff = BACKOFF,
    auto_extend: timedelta | None = None,
) -> AsyncConsumer:
    return AsyncConsumer(
        address=world.address,
        subject=SUBJECT,
        group="g",
        lease=lease,
        prefetch=prefetch,
        max_messages=max_messages,
        timeout_ms=timeout_ms,
        max_attempts=max_attempts,
        backoff=backoff,
        auto_extend=auto_extend,
    )


async def until_answered(world: World, requests: int) -> None:
    """More than so many requests came, and their answers had time to be read."""
    await until(lambda: len(world.realtime.seen) > requests)
    await asyncio.sleep(0.03)
