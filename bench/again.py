"""How late messages come again: after their lease has ended, and after ``nack(delay=)``.

One consumer pulls a steady stream. The clock of a message runs from the instant at which the consumer has it (a lease),
or at which it is given back (a delay): the message should come again when the lease or the delay is over.
"""

import asyncio
import time
from datetime import timedelta

import numpy as np
import uvloop

from bench.figures import Figures
from bench.messages import now_ms
from bench.servers import servers
from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer

SUBJECT = "bench.again"
RATE = 500  # Messages a second.
LEAD_MS = 500
AFTER = timedelta(seconds=1)
LIMIT_S = 30


def after_lease(messages: int) -> Figures:
    """Nobody acknowledges the first time."""
    return _measure(messages, gives_back=False)


def after_nack(messages: int) -> Figures:
    """They are given back at once, to come after a second."""
    return _measure(messages, gives_back=True)


def _measure(messages: int, *, gives_back: bool) -> Figures:
    async def run(meta: str) -> Figures:
        lease = timedelta(seconds=60) if gives_back else AFTER
        async with (
            AsyncProducer(meta) as producer,
            AsyncConsumer(meta, SUBJECT, "bench", prefetch=False, lease=lease) as consumer,
        ):
            await consumer.pull(wait=timedelta(milliseconds=1))
            begin_ms = now_ms() + LEAD_MS
            due_ms = begin_ms + (np.arange(messages) * 1000) // RATE
            await producer.send_batch(SUBJECT, [b"%d" % number for number in range(messages)], due_ms)
            had: dict[bytes, float] = {}
            late_ms: list[float] = []
            early = 0
            until = time.monotonic() + messages / RATE + LIMIT_S
            while len(late_ms) < messages and time.monotonic() < until:
                batch = await consumer.pull(max_messages=100, wait=timedelta(seconds=1))
                now = time.monotonic()
                for message in batch:
                    if message.attempt == 1:
                        had[message.body] = now
                    else:
                        over_s = now - had[message.body] - AFTER.total_seconds()
                        late_ms.append(over_s * 1000)
                        # The lease begins when the answer leaves the server, so it is over a little sooner here.
                        early += gives_back and over_s < 0
                        await message.ack(wait=False)
                first = [message for message in batch if message.attempt == 1]
                if gives_back and first:
                    await asyncio.gather(*(message.nack(AFTER) for message in first))
            await consumer.flush()
            p50, p99, p999 = np.percentile(late_ms, (50, 99, 99.9))
            figures = {"late_ms_p50": p50, "late_ms_p99": p99, "late_ms_p99_9": p999}
            rounded: Figures = {name: round(float(value), 2) for name, value in figures.items()}
            return {**rounded, "lost": messages - len(late_ms), "early": early}

    with servers("realtime", "delay") as running:
        return uvloop.run(run(running.meta))
