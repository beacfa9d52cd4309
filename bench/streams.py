"""How fast consumers pull and acknowledge messages that are there already, in batches of 100, beside Redis streams.

All consumers are in one process. The clock runs from the first pull until the last acknowledgement: that of delayd is
durable at the server (fsync), that of Redis is in its log, which it syncs once a second. ``groups`` groups have
``consumers`` consumers each, and each group gets all messages.
"""

import asyncio
import time
from contextlib import AsyncExitStack, ExitStack
from datetime import timedelta
from itertools import repeat

import numpy as np
import uvloop

from bench.figures import Figures
from bench.messages import BATCH_ROWS, BODIES, now_ms, send_batches
from bench.redis_peer import Line, command, redis_server
from bench.servers import servers
from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer

SUBJECT, STREAM = "bench.streams", b"stream"
ROWS = 100  # Of one pull.
LIMIT_S = 60
RATE = 100_000  # Messages a second that reach the realtime server in time even on a slow machine.


def streams(messages: int, groups: int, consumers: int) -> Figures:
    """Consumers of delayd."""

    async def run(meta: str) -> Figures:
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(AsyncProducer(meta))
            await send_batches(producer, SUBJECT, repeat(np.full(BATCH_ROWS, now_ms()), messages // BATCH_ROWS))
            await asyncio.sleep(1 + messages / RATE)
            found = [
                await stack.enter_async_context(AsyncConsumer(meta, SUBJECT, f"g{number % groups}"))
                for number in range(groups * consumers)
            ]
            left = messages * groups

            async def take(consumer: AsyncConsumer) -> None:
                nonlocal left
                while left > 0:
                    batch = await consumer.pull(max_messages=ROWS, wait=timedelta(milliseconds=100))
                    left -= len(batch.bodies)
                    await batch.ack(wait=False)
                await consumer.flush()

            began = time.perf_counter()
            await asyncio.wait_for(asyncio.gather(*map(take, found)), LIMIT_S)
            return _figures(messages * groups - max(left, 0), began)

    with servers("realtime", "delay") as running:
        return uvloop.run(run(running.meta))


def redis_streams(messages: int, groups: int, consumers: int) -> Figures:
    """Consumers of a Redis stream: each has one XREADGROUP under way, and says XACK with the next one."""
    with redis_server() as server, ExitStack() as stack:
        lines = [stack.enter_context(Line(server.port)) for _ in range(groups * consumers)]
        names = [b"g%d" % (at % groups) for at in range(len(lines))]
        for name in names[:groups]:
            lines[0].send(command(b"XGROUP", b"CREATE", STREAM, name, b"0", b"MKSTREAM"), 1)
        for _ in range(messages // BATCH_ROWS):
            lines[0].send(b"".join([command(b"XADD", STREAM, b"*", b"body", body) for body in BODIES]), BATCH_ROWS)
            lines[0].settle(BATCH_ROWS)
        lines[0].settle()
        reads = [_read(name, at) for at, name in enumerate(names)]
        began = time.perf_counter()
        for line, read in zip(lines, reads, strict=True):
            line.send(read, 1)
        left = messages * groups
        while left > 0 and time.perf_counter() - began < LIMIT_S:
            for line, name, read in zip(lines, names, reads, strict=True):
                # The answer to the last XACK comes before that of the read behind it.
                line.settle(1)
                found = _ids(line.receive())
                left -= len(found)
                if found:
                    line.send(command(b"XACK", STREAM, name, *found), 1)
                if left > 0:
                    line.send(read, 1)
        for line in lines:
            line.settle()
        return _figures(messages * groups - left, began)


def _read(group: bytes, consumer: int) -> bytes:
    whose = (b"GROUP", group, b"c%d" % consumer)
    return command(b"XREADGROUP", *whose, b"COUNT", b"%d" % ROWS, b"STREAMS", STREAM, b">")


def _ids(answer: object) -> list[bytes]:
    """The ids of the messages in an answer to XREADGROUP."""
    if not isinstance(answer, list):
        return []
    ((_, entries),) = answer
    return [entry[0] for entry in entries]


def _figures(messages: int, began: float) -> Figures:
    return {"messages_s": round(messages / (time.perf_counter() - began)), "messages": messages}
