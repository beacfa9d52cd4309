"""What the cases send: bodies, instants, and batches kept under way."""

import asyncio
import os
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from delayd.client.producer import AsyncProducer

BODY_BYTES = 200
BATCH_ROWS = 500
UNDER_WAY = 16  # Batches that wait for an answer, in runs of delayd and of Redis.
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
TWO_YEARS_MS = 730 * DAY_MS

# Bodies differ; else every copy would come from the processor's cache.
BODIES = [os.urandom(BODY_BYTES) for _ in range(BATCH_ROWS)]

Instants = NDArray[np.int64]


def now_ms() -> int:
    """The wall clock."""
    return time.time_ns() // 1_000_000


def spread(messages: int, first_ms: int, last_ms: int) -> list[Instants]:
    """Instants, drawn evenly from a span, for whole batches."""
    draw = np.random.default_rng(1)
    return [draw.integers(first_ms, last_ms, BATCH_ROWS) for _ in range(messages // BATCH_ROWS)]


async def send_batches(producer: AsyncProducer, subject: str, batches: Iterable[Instants]) -> list[float]:
    """Send a batch for each; returns when all are durable, with the seconds that each took."""
    took: list[float] = []
    left = iter(batches)

    async def worker() -> None:
        for due_ms in left:
            began = time.perf_counter()
            await producer.send_batch(subject, BODIES, due_ms)
            took.append(time.perf_counter() - began)

    await asyncio.gather(*(worker() for _ in range(UNDER_WAY)))
    return took


def latencies(took_s: list[float]) -> dict[str, float]:
    """The p50 and p99 of times, in ms."""
    p50, p99 = np.percentile(took_s, (50, 99)) * 1e3
    return {"ack_ms_p50": round(float(p50), 2), "ack_ms_p99": round(float(p99), 2)}
