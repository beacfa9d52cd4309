"""How long after ``kill -9`` of a delay server with a full hour its next message leaves.

The messages are due evenly over the coming 50 minutes, so some fall due at every moment; the clock runs from the kill
until a consumer holds the first message that fell due after it.
"""

import asyncio
import time
from datetime import timedelta

import numpy as np
import uvloop

from bench.servers import Servers, servers
from delayd.client.consumer import AsyncConsumer
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.restart"
BODY_BYTES = 200
ROWS = 500
BATCHES_A_TURN = 100
AHEAD_MS = (500, 3_000_000)
LIMIT_S = 60  # A server that does not come back ends the run.


def restart(messages: int) -> dict[str, float]:
    """Schedule, kill the delay server, start it again; seconds from the kill."""
    with servers("realtime", "delay") as running:
        return uvloop.run(_kill_and_wait(running, messages))


async def _kill_and_wait(running: Servers, messages: int) -> dict[str, float]:
    draw = np.random.default_rng(1)
    bodies = [bytes(BODY_BYTES)] * ROWS
    async with AsyncProducer(running.meta) as producer, AsyncConsumer(running.meta, SUBJECT, "bench") as consumer:
        now_ms = time.time_ns() // 1_000_000
        due = now_ms + draw.integers(*AHEAD_MS, (messages // ROWS, ROWS))
        for turn in range(0, len(due), BATCHES_A_TURN):
            rows = due[turn : turn + BATCHES_A_TURN]
            await asyncio.gather(*(producer.send_batch(SUBJECT, bodies, row) for row in rows))
        await _first_due_after(consumer, time.time_ns() // 1_000_000)
        running.kill("delay")
        killed, killed_ms = time.monotonic(), time.time_ns() // 1_000_000
        starting = asyncio.get_running_loop().run_in_executor(None, running.start, "delay")
        await _first_due_after(consumer, killed_ms)
        first_s = time.monotonic() - killed
        await starting
    return {"pending": messages, "first_dispatch_s": round(first_s, 2)}


async def _first_due_after(consumer: AsyncConsumer, instant_ms: int) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        batch = await consumer.pull(wait=timedelta(seconds=1))
        if len(batch):
            await batch.ack(wait=False)
            if int(batch.deliver_at_ms.max()) >= instant_ms:
                return
    raise RuntimeError(f"nothing arrived within {LIMIT_S} s")
