"""How fast a herd is drained: many messages that are due at one instant, taken in batches by one consumer process.

The clock starts at that instant. For delayd it stops when every message was pulled, its body is in the caller's hands
and its acknowledgement is durable; for Redis when the last message was popped.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import repeat

import numpy as np
import uvloop

from bench.arrivals import freeze
from bench.figures import Figures
from bench.messages import BATCH_ROWS, now_ms, send_batches
from bench.redis_load import fill
from bench.redis_peer import HOST, MOVE, PENDING, READY, Line, Taker, redis_server
from bench.servers import servers
from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer

SUBJECT = "bench.herd"
PULL_ROWS = 8_000  # The delay server puts at most this many into one frame, so stored batches are answered whole.
REDIS_ROWS = 1_000  # This was the fastest of 500 to 7,000.
REDIS_DEPTH = 4
LEAD_S = 1  # The consumer waits for this long before the instant comes.
DELAYD_RATE, REDIS_RATE = 100_000, 60_000  # Messages a second that are scheduled in time even on a slow machine.
LIMIT_S = 60


def herd(messages: int) -> Figures:
    """Schedule them, wait, pull and acknowledge."""

    async def run(meta: str) -> Figures:
        due_ms = now_ms() + 1000 * (LEAD_S + messages // DELAYD_RATE)
        async with AsyncProducer(meta) as producer, AsyncConsumer(meta, SUBJECT, "bench") as consumer:
            await consumer.pull(wait=timedelta(milliseconds=1))
            await send_batches(producer, SUBJECT, repeat(np.full(BATCH_ROWS, due_ms), messages // BATCH_ROWS))
            _scheduled_before(due_ms)
            await asyncio.sleep(max(0, due_ms - now_ms() - 200) / 1000)
            freeze()
            taken, early, first_ms = 0, 0, 0.0
            while taken < messages and now_ms() < due_ms + 1000 * LIMIT_S:
                batch = await consumer.pull(max_messages=PULL_ROWS, wait=timedelta(seconds=1))
                early += len(batch) if now_ms() < due_ms else 0
                taken += len(batch.bodies)
                first_ms = first_ms or _since(due_ms)
                await batch.ack(wait=False)
            pulled_ms = _since(due_ms)
            await consumer.flush()
            return {**_figures(messages, taken, early, first_ms, _since(due_ms)), "pulled_s": round(pulled_ms / 1e3, 3)}

    with servers("realtime", "delay") as running:
        return uvloop.run(run(running.meta))


def redis_herd(messages: int) -> Figures:
    """Schedule them, wait, pop."""
    with redis_server() as server, Line(server.port) as line:
        return _pop(messages, line, Taker(line, REDIS_ROWS, REDIS_DEPTH).take)


def redis_py_herd(messages: int) -> Figures:
    """The same by redis-py: a pipeline of both commands, one after the other."""
    import redis

    with redis_server() as server, Line(server.port) as line, redis.Redis(HOST, server.port) as client:
        move = client.script_load(MOVE.decode())

        def take() -> list[bytes]:
            with client.pipeline(transaction=False) as pipeline:
                pipeline.evalsha(move, 2, PENDING, READY, now_ms(), REDIS_ROWS)
                pipeline.lpop("ready", REDIS_ROWS)
                popped = pipeline.execute()[1]
            return popped if isinstance(popped, list) else []

        return _pop(messages, line, take)


def _pop(messages: int, line: Line, take: Callable[[], list[bytes]]) -> Figures:
    due_ms = now_ms() + 1000 * (LEAD_S + messages // REDIS_RATE)
    fill(line, repeat(np.full(BATCH_ROWS, due_ms), messages // BATCH_ROWS))
    _scheduled_before(due_ms)
    time.sleep(max(0, due_ms - now_ms() - 200) / 1000)
    freeze()
    taken, early, first_ms = 0, 0, 0.0
    while taken < messages and now_ms() < due_ms + 1000 * LIMIT_S:
        if now_ms() < due_ms:
            time.sleep(0.0005)
        bodies = take()
        early += len(bodies) if now_ms() < due_ms else 0
        taken += len(bodies)
        if bodies:
            first_ms = first_ms or _since(due_ms)
    return _figures(messages, taken, early, first_ms, _since(due_ms))


def _figures(messages: int, taken: int, early: int, first_ms: float, drained_ms: float) -> Figures:
    return {
        "messages_s": round(taken / drained_ms * 1e3),
        "lost": messages - taken,
        "early": early,
        "first_ms": round(first_ms, 1),
        "drained_s": round(drained_ms / 1e3, 3),
    }


def _since(due_ms: int) -> float:
    return time.time_ns() / 1e6 - due_ms


def _scheduled_before(due_ms: int) -> None:
    if now_ms() > due_ms - 500:
        raise RuntimeError("the machine was too slow: not all was scheduled before its instant")
