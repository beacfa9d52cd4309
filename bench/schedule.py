"""How fast one client process schedules: batches of 500, and singles by 1,000 concurrent senders.

Every send is acknowledged after an fsync. Messages are due within a day, an hour from now, so nothing is dispatched.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.servers import servers
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.schedule"
BODY_BYTES = 200
BATCH_ROWS = 500
BATCHES = 2_000
UNDER_WAY = 16
SENDERS = 1_000
SINGLES = 100_000
DAY_MS = 86_400_000
AHEAD = timedelta(hours=1)


def batches() -> dict[str, float]:
    """Batches of 500, sixteen under way."""
    return uvloop.run(_with_servers(_batches))


def singles() -> dict[str, float]:
    """One message a send, 1,000 senders that each wait for their receipt."""
    return uvloop.run(_with_servers(_singles))


async def _with_servers(case: Callable[[AsyncProducer], Awaitable[dict[str, float]]]) -> dict[str, float]:
    with servers("delay") as running:
        async with AsyncProducer(running.meta) as producer:
            await producer.send(SUBJECT, b"warm", delay=AHEAD)
            return await case(producer)


async def _batches(producer: AsyncProducer) -> dict[str, float]:
    draw = np.random.default_rng(1)
    bodies = [bytes(BODY_BYTES)] * BATCH_ROWS
    first_ms = int(time.time() * 1000) + 3_600_000
    due = [first_ms + draw.integers(0, DAY_MS, BATCH_ROWS) for _ in range(BATCHES)]
    under_way = asyncio.Semaphore(UNDER_WAY)
    took: list[float] = []

    async def send(deliver_at_ms: NDArray[np.int64]) -> None:
        async with under_way:
            began = time.perf_counter()
            await producer.send_batch(SUBJECT, bodies, deliver_at_ms)
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(send, due))
    seconds = time.perf_counter() - began
    return {"messages_s": round(BATCHES * BATCH_ROWS / seconds), **latencies(took)}


async def _singles(producer: AsyncProducer) -> dict[str, float]:
    body = bytes(BODY_BYTES)
    draw = random.Random(1)
    first_ms = int(time.time() * 1000) + 3_600_000
    took: list[float] = []

    async def sender() -> None:
        for _ in range(SINGLES // SENDERS):
            began = time.perf_counter()
            await producer.send(SUBJECT, body, deliver_at_ms=first_ms + draw.randrange(DAY_MS))
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(SENDERS)))
    seconds = time.perf_counter() - began
    return {"messages_s": round(SINGLES / seconds), **latencies(took)}


def latencies(took_s: list[float]) -> dict[str, float]:
    """The p50 and p99 of times, in ms."""
    p50, p99 = np.percentile(took_s, (50, 99)) * 1e3
    return {"ack_ms_p50": round(float(p50), 2), "ack_ms_p99": round(float(p99), 2)}
