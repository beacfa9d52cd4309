"""How long two years take in memory, for messages that are due at random instants of them.

The clock of an `InMemoryBroker` is moved over all of them at once, and a consumer pulls and acknowledges them; one in a
hundred it gives back for a day. Or a worker is there, for which the clock stops wherever a message is due.
"""

import asyncio
import time
from contextlib import suppress
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

import delayd
from bench.figures import Figures
from delayd.testing import InMemoryBroker

SUBJECT = "bench.years"
YEARS = timedelta(days=730)
BATCHES = 50
ROWS = 10_000  # Of one pull.
RETRIED = 100  # One of so many comes again.
AFTER = timedelta(days=1)


def years(messages: int) -> Figures:
    """So many messages; the sends are not counted."""
    random = np.random.default_rng(7)
    with InMemoryBroker() as broker, broker.producer() as producer, broker.consumer(SUBJECT, "bench") as consumer:
        rows = messages // BATCHES
        for _ in range(BATCHES):
            due_ms = _due_ms(broker, random, rows)
            producer.send_batch(SUBJECT, [b"%0200d" % number for number in range(rows)], deliver_at_ms=due_ms)
        began = time.perf_counter()
        broker.clock.advance(YEARS)
        moved = time.perf_counter()
        first = _take_all(consumer, RETRIED)
        broker.clock.advance(AFTER)
        second = _take_all(consumer)
        ended = time.perf_counter()
    return {
        "messages": rows * BATCHES,
        "lost": rows * BATCHES - first,
        "came_again": second,
        "move_s": round(moved - began, 2),
        "seconds": round(ended - began, 2),
    }


def worked(messages: int) -> Figures:
    """The same for a worker, which tries one in a hundred again after a day; the sends are not counted."""
    with InMemoryBroker() as broker:
        return asyncio.run(_worked(broker, messages))


async def _worked(broker: InMemoryBroker, messages: int) -> Figures:
    worker, handled = broker.worker(), 0

    @worker.on(SUBJECT, group="bench")
    async def handle(body: bytes, message: delayd.Message) -> None:
        nonlocal handled
        handled += 1
        if message.attempt == 1 and handled % RETRIED == 0:
            raise delayd.Retry(after=AFTER)

    async with broker.async_producer() as producer:
        due_ms = _due_ms(broker, np.random.default_rng(7), messages)
        await producer.send_batch(SUBJECT, [b"%0200d" % number for number in range(messages)], deliver_at_ms=due_ms)
        serving = asyncio.get_running_loop().create_task(worker.serve())
        began = time.perf_counter()
        await broker.clock.advance_async(YEARS + AFTER)
        ended = time.perf_counter()
        worker.stop()
        await serving
    return {"messages": messages, "handled": handled, "seconds": round(ended - began, 2)}


def _due_ms(broker: InMemoryBroker, random: np.random.Generator, count: int) -> NDArray[np.int64]:
    begin_ms, span_ms = int(broker.clock.now.timestamp() * 1000), int(YEARS.total_seconds() * 1000)
    return begin_ms + random.integers(1_000, span_ms, count)


def _take_all(consumer: delayd.Consumer, again: int = 0) -> int:
    """Work off what is there, and give one message of ``again`` back; returns how many messages came."""
    taken = 0
    while len(batch := consumer.pull(ROWS, wait=timedelta(0))):
        taken += len(batch)
        for row in range(0, len(batch) if again else 0, again or 1):
            batch[row].nack(AFTER, wait=False)
        consumer.flush()
        # The acknowledgement names those that were given back, too, and changes nothing of them.
        with suppress(delayd.StaleHandle):
            batch.ack()
    return taken
