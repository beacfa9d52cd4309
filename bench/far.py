"""How long far messages take, due evenly over two years, until all are in the schedule logs of their hours.

For Redis the clock stops when all are in the sorted set; it has nothing to file.
"""

import time
from datetime import timedelta

import uvloop

from bench.figures import Figures
from bench.messages import HOUR_MS, TWO_YEARS_MS, Instants, now_ms, send_batches, spread
from bench.redis_load import fill
from bench.redis_peer import Line, redis_server
from bench.servers import Servers, servers
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.far"


def far(messages: int) -> Figures:
    """Send batches, then ask for a checkpoint that covers them."""

    async def run(running: Servers) -> Figures:
        due = over_two_years(messages)
        async with AsyncProducer(running.meta) as producer:
            await producer.send(SUBJECT, b"warm", delay=timedelta(hours=1))
            began = time.perf_counter()
            await send_batches(producer, SUBJECT, due)
            sent_s = time.perf_counter() - began
            await running.checkpoint("delay")
        filed_s = time.perf_counter() - began
        return {"messages_s": round(messages / filed_s), "sent_s": round(sent_s, 2), "filed_s": round(filed_s, 2)}

    with servers("delay") as running:
        return uvloop.run(run(running))


def redis_far(messages: int) -> Figures:
    """Put all into the sorted set."""
    with redis_server() as server, Line(server.port) as line:
        due = over_two_years(messages)
        began = time.perf_counter()
        fill(line, due)
        filed_s = time.perf_counter() - began
        return {"messages_s": round(messages / filed_s), "filed_s": round(filed_s, 2)}


def over_two_years(messages: int) -> list[Instants]:
    """Instants of batches, from two hours ahead."""
    first_ms = now_ms() + 2 * HOUR_MS
    return spread(messages, first_ms, first_ms + TWO_YEARS_MS - 3 * HOUR_MS)
