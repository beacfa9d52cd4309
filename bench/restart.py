"""How long after ``kill -9`` of a server with a full hour its next message leaves.

The messages are due evenly over the coming 50 minutes, so the next one is always near; the clock runs from the kill
until a consumer holds the first message that fell due after it.
"""

import asyncio
import time
from datetime import timedelta

import uvloop

from bench.figures import Figures
from bench.messages import Instants, now_ms, send_batches, spread
from bench.process import memory_bytes
from bench.redis_load import fill
from bench.redis_peer import Line, Taker, redis_server
from bench.servers import Servers, servers
from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer

SUBJECT = "bench.restart"
FIRST_MS, LAST_MS = 500, 3_000_000
RATE_MIN = 300  # Messages due a second: fewer are due over less than 50 minutes, so that the next one is always near.
LIMIT_S = 60  # The run ends when the server has not come back by then.
SYNCED_S = 1.5  # After this time Redis has synced all that it accepted.
REDIS_ROWS = 1_000


def restart(messages: int) -> Figures:
    """Schedule, kill the delay server, start it again; seconds from the kill."""
    with servers("realtime", "delay") as running:
        return uvloop.run(_kill_and_wait(running, messages))


def redis_restart(messages: int) -> Figures:
    """The same with Redis, which loads its append-only file; the consumer connects as soon as it answers."""
    with redis_server() as server:
        with Line(server.port) as line:
            fill(line, _due(messages))
        time.sleep(SYNCED_S)
        server.kill()
        killed = time.monotonic()
        server.start()
        with Line(server.port) as line:
            taker = Taker(line, REDIS_ROWS)
            while not taker.take():
                pass
        return {"pending": messages, "first_dispatch_s": round(time.monotonic() - killed, 2)}


def _due(messages: int) -> list[Instants]:
    first_ms = now_ms() + FIRST_MS
    return spread(messages, first_ms, first_ms + min(LAST_MS, messages * 1000 // RATE_MIN))


async def _kill_and_wait(running: Servers, messages: int) -> Figures:
    async with AsyncProducer(running.meta) as producer, AsyncConsumer(running.meta, SUBJECT, "bench") as consumer:
        await send_batches(producer, SUBJECT, _due(messages))
        await _first_due_after(consumer, now_ms())
        running.kill("delay")
        killed, killed_ms = time.monotonic(), now_ms()
        starting = asyncio.get_running_loop().run_in_executor(None, running.start, "delay")
        await _first_due_after(consumer, killed_ms)
        first_s = time.monotonic() - killed
        await starting
    return {
        "pending": messages,
        "first_dispatch_s": round(first_s, 2),
        "memory_mb": round(memory_bytes(running.pid("delay")) / 1e6),
    }


async def _first_due_after(consumer: AsyncConsumer, instant_ms: int) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        batch = await consumer.pull(wait=timedelta(seconds=1))
        if len(batch):
            await batch.ack(wait=False)
            if int(batch.deliver_at_ms.max()) >= instant_ms:
                return
    raise RuntimeError(f"nothing arrived within {LIMIT_S} s")
