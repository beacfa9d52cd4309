"""How fast one client process cancels messages by their receipts: one by one with 1,000 in flight, and columns of 500.

A cancel is answered when its decision is durable. In Redis a message that can be cancelled is a member of the sorted
set by its name, with its body in a hash: ZADD NX and HSET schedule it, and a script with ZREM and HDEL cancels it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.figures import Figures
from bench.messages import BATCH_ROWS, BODIES, DAY_MS, HOUR_MS, UNDER_WAY, Instants, latencies, now_ms, spread
from bench.redis_peer import Line, command, redis_server
from bench.schedule import SENDERS
from bench.servers import servers
from delayd import CancelAnswer
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import BatchReceipt, Receipt

Row = TypeVar("Row")

SUBJECT = "bench.cancels"
AHEAD = timedelta(hours=1)
PENDING, BODIES_OF = b"pending", b"bodies"
CANCEL = b"""
for _, name in ipairs(ARGV) do
  if redis.call('ZREM', KEYS[1], name) == 1 then
    redis.call('HDEL', KEYS[2], name)
  end
end
return 0
"""


def cancel_by_receipt(messages: int) -> Figures:
    """Cancel by receipt, 1,000 that each wait for their answer."""

    async def run(producer: AsyncProducer) -> Figures:
        receipts: list[Receipt] = []
        first_ms = now_ms() + HOUR_MS

        async def send(number: int) -> None:
            due_ms = first_ms + number * DAY_MS // messages
            receipts.append(await producer.send(SUBJECT, BODIES[number % BATCH_ROWS], deliver_at_ms=due_ms))

        await _in_flight(range(messages), send)
        return await _cancel_singles(receipts, lambda receipt: producer.cancel(SUBJECT, receipt=receipt))

    return with_producer(run)


def cancel_receipts_in_columns(messages: int) -> Figures:
    """Cancel by the receipts of batches of 500, sixteen under way."""

    async def run(producer: AsyncProducer) -> Figures:
        receipts: list[BatchReceipt] = []

        async def send(due_ms: Instants) -> None:
            receipts.append(await producer.send_batch(SUBJECT, BODIES, due_ms))

        await under_way(tomorrow(messages), send)
        return await cancel_columns(receipts, lambda receipt: producer.cancel_batch(SUBJECT, receipt=receipt))

    return with_producer(run)


def redis_cancel(messages: int, rows: int, under_way: int) -> Figures:
    """A call of the script for so many messages, so many calls under way."""
    with redis_server() as server, Line(server.port) as line:
        _redis_fill(line, messages)
        line.send(command(b"SCRIPT", b"LOAD", CANCEL), 1)
        digest = line.receive()
        assert isinstance(digest, bytes)
        began = time.perf_counter()
        calls = [
            command(b"EVALSHA", digest, b"2", PENDING, BODIES_OF, *_names(first, rows))
            for first in range(0, messages, rows)
        ]
        half = max(1, under_way // 2)
        for first in range(0, len(calls), half):
            part = calls[first : first + half]
            line.send(b"".join(part), len(part))
            line.settle(half)
        line.settle()
        return {"messages_s": rate(messages, began)}


def _redis_fill(line: Line, messages: int) -> None:
    for number, due_ms in enumerate(tomorrow(messages)):
        names = _names(number * BATCH_ROWS, BATCH_ROWS)
        scores = [word for due, name in zip(due_ms.tolist(), names, strict=True) for word in (b"%d" % due, name)]
        bodies = [word for name, body in zip(names, BODIES, strict=True) for word in (name, body)]
        line.send(command(b"ZADD", PENDING, b"NX", *scores) + command(b"HSET", BODIES_OF, *bodies), 2)
        if line.unanswered == 2 * UNDER_WAY:
            line.settle(UNDER_WAY)
    line.settle()


def with_producer(work: Callable[[AsyncProducer], Awaitable[Figures]]) -> Figures:
    """Run a producer beside a delay server."""

    async def run(meta: str) -> Figures:
        async with AsyncProducer(meta) as producer:
            await producer.send(SUBJECT, b"warm", delay=AHEAD)
            return await work(producer)

    with servers("delay") as running:
        return uvloop.run(run(running.meta))


async def _cancel_singles(rows: Sequence[Row], cancel: Callable[[Row], Awaitable[CancelAnswer]]) -> Figures:
    took: list[float] = []

    async def one(row: Row) -> None:
        began = time.perf_counter()
        assert await cancel(row) is CancelAnswer.CANCELLED
        took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await _in_flight(rows, one)
    return {"messages_s": rate(len(rows), began), **latencies(took)}


async def cancel_columns(columns: Sequence[Row], cancel: Callable[[Row], Awaitable[NDArray[np.uint8]]]) -> Figures:
    """Cancel columns of 500, sixteen under way."""
    took: list[float] = []

    async def one(column: Row) -> None:
        began = time.perf_counter()
        answers = await cancel(column)
        assert (answers == CancelAnswer.CANCELLED).all(), np.unique(answers, return_counts=True)
        took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await under_way(columns, one)
    return {"messages_s": rate(len(columns) * BATCH_ROWS, began), **latencies(took)}


async def _in_flight(rows: Sequence[Row], do: Callable[[Row], Awaitable[None]]) -> None:
    await _workers(rows, do, SENDERS)


async def under_way(rows: Sequence[Row], do: Callable[[Row], Awaitable[None]]) -> None:
    """Do something for each row, sixteen at a time."""
    await _workers(rows, do, UNDER_WAY)


async def _workers(rows: Sequence[Row], do: Callable[[Row], Awaitable[None]], count: int) -> None:
    left = iter(rows)

    async def worker() -> None:
        for row in left:
            await do(row)

    await asyncio.gather(*(worker() for _ in range(count)))


def _names(first: int, count: int) -> list[bytes]:
    return [b"order-%09d" % number for number in range(first, first + count)]


def tomorrow(messages: int) -> list[Instants]:
    """Instants within a day from the next hour, for whole batches."""
    first_ms = now_ms() + HOUR_MS
    return spread(messages, first_ms, first_ms + DAY_MS)


def rate(messages: int, began: float) -> int:
    """Messages a second since then."""
    return round(messages / (time.perf_counter() - began))
