"""How fast one client pages through pending messages over ten days: their keys, tags and sizes, and then their bodies.

Redis has no counterpart that is measured here: ZSCAN gives members, and bodies stand elsewhere.
"""

import time
from datetime import timedelta

import uvloop

from bench.figures import Figures
from bench.messages import HOUR_MS, Instants, now_ms, send_batches, spread
from bench.servers import Servers, servers
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.pending"


def pages(messages: int) -> Figures:
    """Half of the messages are filed in schedule logs, the others are in memory."""

    async def run(running: Servers) -> Figures:
        async with AsyncProducer(running.meta) as producer:
            await producer.send(SUBJECT, b"warm", delay=timedelta(hours=1))
            await send_batches(producer, SUBJECT, _over_ten_days(messages // 2))
            await running.checkpoint("delay")
            await send_batches(producer, SUBJECT, _over_ten_days(messages - messages // 2))
            labels_s = await _read(producer, messages, contents=False)
            whole_s = await _read(producer, messages, contents=True)
        return {"messages_s": round(messages / labels_s), "with_bodies_s": round(messages / whole_s)}

    with servers("delay") as running:
        return uvloop.run(run(running))


def _over_ten_days(messages: int) -> list[Instants]:
    """Instants of batches, from two hours ahead."""
    first_ms = now_ms() + 2 * HOUR_MS
    return spread(messages, first_ms, first_ms + 240 * HOUR_MS)


async def _read(producer: AsyncProducer, messages: int, *, contents: bool) -> float:
    began = time.perf_counter()
    found = 0
    async for page in producer.pending(SUBJECT, contents=contents):
        found += len(page)
    assert found == messages + 1, f"{found} messages were found"
    return time.perf_counter() - began
