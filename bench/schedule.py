"""How fast one client process schedules: batches of 500, and singles by 1,000 concurrent senders.

Every send to delayd is acknowledged after an fsync. Messages are due within a day, an hour from now, so nothing is
dispatched meanwhile.
"""

import asyncio
import random
import time
from datetime import timedelta

import uvloop

from bench.figures import Figures
from bench.messages import (
    BATCH_ROWS,
    BODIES,
    DAY_MS,
    HOUR_MS,
    UNDER_WAY,
    Instants,
    latencies,
    now_ms,
    send_batches,
    spread,
)
from bench.redis_load import fill
from bench.redis_peer import HOST, ID_BYTES, PENDING, Line, redis_server, zadds
from bench.servers import servers
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.schedule"
SENDERS = 1_000
AHEAD = timedelta(hours=1)


def batches(messages: int) -> Figures:
    """Batches of 500, sixteen under way."""

    async def send(meta: str) -> Figures:
        async with AsyncProducer(meta) as producer:
            await producer.send(SUBJECT, b"warm", delay=AHEAD)
            due = _tomorrow(messages)
            began = time.perf_counter()
            took = await send_batches(producer, SUBJECT, due)
            return {"messages_s": _rate(messages, began), **latencies(took)}

    with servers("delay") as running:
        return uvloop.run(send(running.meta))


def singles(messages: int) -> Figures:
    """One message a send, 1,000 senders that each wait for their receipt."""

    async def send(meta: str) -> Figures:
        draw = random.Random(1)
        first_ms = now_ms() + HOUR_MS
        took: list[float] = []

        async def sender() -> None:
            for number in range(messages // SENDERS):
                began = time.perf_counter()
                due_ms = first_ms + draw.randrange(DAY_MS)
                await producer.send(SUBJECT, BODIES[number % BATCH_ROWS], deliver_at_ms=due_ms)
                took.append(time.perf_counter() - began)

        async with AsyncProducer(meta) as producer:
            await producer.send(SUBJECT, b"warm", delay=AHEAD)
            began = time.perf_counter()
            await asyncio.gather(*(sender() for _ in range(SENDERS)))
            return {"messages_s": _rate(messages, began), **latencies(took)}

    with servers("delay") as running:
        return uvloop.run(send(running.meta))


def redis_batches(messages: int) -> Figures:
    """One command for 500 messages, sixteen commands under way."""
    with redis_server() as server, Line(server.port) as line:
        due = _tomorrow(messages)
        began = time.perf_counter()
        fill(line, due)
        return {"messages_s": _rate(messages, began)}


def redis_singles(messages: int) -> Figures:
    """One command for each message, 1,000 in one buffer. The next buffer leaves before the last one is answered."""
    draw = random.Random(1)
    first_ms = now_ms() + HOUR_MS
    bodies = (BODIES * (SENDERS // BATCH_ROWS + 1))[:SENDERS]
    with redis_server() as server, Line(server.port) as line:
        began = time.perf_counter()
        for first in range(0, messages, SENDERS):
            line.send(zadds(first, [first_ms + draw.randrange(DAY_MS) for _ in range(SENDERS)], bodies), SENDERS)
            line.settle(SENDERS)
        line.settle()
        return {"messages_s": _rate(messages, began)}


def redis_py_batches(messages: int) -> Figures:
    """The same by redis-py: a pipeline of sixteen commands for 500 each."""
    import redis

    with redis_server() as server, redis.Redis(HOST, server.port) as client:
        due = _tomorrow(messages)
        began = time.perf_counter()
        for first in range(0, len(due), UNDER_WAY):
            with client.pipeline(transaction=False) as pipeline:
                for number in range(first, min(first + UNDER_WAY, len(due))):
                    rows = zip(_members(number * BATCH_ROWS, BODIES), due[number].tolist(), strict=True)
                    pipeline.zadd(PENDING, dict(rows))
                pipeline.execute()
        return {"messages_s": _rate(messages, began)}


def redis_py_singles(messages: int) -> Figures:
    """The same by redis-py: pipelines of 1,000 commands."""
    import redis

    draw = random.Random(1)
    first_ms = now_ms() + HOUR_MS
    bodies = (BODIES * (SENDERS // BATCH_ROWS + 1))[:SENDERS]
    with redis_server() as server, redis.Redis(HOST, server.port) as client:
        began = time.perf_counter()
        for first in range(0, messages, SENDERS):
            with client.pipeline(transaction=False) as pipeline:
                for member in _members(first, bodies):
                    pipeline.zadd(PENDING, {member: first_ms + draw.randrange(DAY_MS)})
                pipeline.execute()
        return {"messages_s": _rate(messages, began)}


def _members(first_id: int, bodies: list[bytes]) -> list[bytes]:
    return [number.to_bytes(ID_BYTES, "big") + body for number, body in enumerate(bodies, first_id)]


def _tomorrow(messages: int) -> list[Instants]:
    first_ms = now_ms() + HOUR_MS
    return spread(messages, first_ms, first_ms + DAY_MS)


def _rate(messages: int, began: float) -> int:
    return round(messages / (time.perf_counter() - began))
