"""How late messages arrive at a consumer, at a steady rate with delays of 1 to 5 s.

Three servers, a producer process that sends one message at a time, and a consumer in this process whose collector is
frozen. Lateness is the wall clock when a pulled batch is in the consumer's hands, less deliver_at.
"""

import asyncio
import gc
import random
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.servers import servers
from delayd.client.consumer import AsyncConsumer
from delayd.client.producer import AsyncProducer

SUBJECT = "bench.steady"
BODY_BYTES = 200
SECONDS = 8
DELAY_MS = (1_000, 5_000)
TURN_S = 0.001
DRAIN_S = 20  # A run that loses messages ends all the same.


def steady(rate: int, subjects: int = 1) -> dict[str, float]:
    """Run servers, producer and consumer once; messages a second, spread over so many subjects."""
    with servers("realtime", "delay") as running:
        command = [sys.executable, "-m", "bench.steady", running.meta, str(rate), str(SECONDS), str(subjects)]
        with subprocess.Popen(command) as child:
            late_ms = uvloop.run(_consume(running.meta, rate * SECONDS, subjects))
        if child.returncode:
            raise RuntimeError("the producer failed; its messages are above")
    p50, p99, p999 = np.percentile(late_ms, (50, 99, 99.9))
    return {
        "messages": len(late_ms),
        "lost": rate * SECONDS - len(late_ms),
        "early": int((late_ms < 0).sum()),
        "late_ms_p50": round(float(p50), 2),
        "late_ms_p99": round(float(p99), 2),
        "late_ms_p99_9": round(float(p999), 2),
        "late_ms_max": round(float(late_ms.max()), 2),
    }


async def _consume(meta: str, expected: int, subjects: int) -> NDArray[np.float64]:
    lateness: list[NDArray[np.float64]] = []
    count = 0
    end = time.monotonic() + SECONDS + DRAIN_S

    async def consumer(subject: str) -> None:
        nonlocal count
        async with AsyncConsumer(meta, subject, "bench") as consumer:
            while count < expected and time.monotonic() < end:
                batch = await consumer.pull(wait=timedelta(milliseconds=500))
                now_ms = time.time_ns() / 1e6
                if len(batch):
                    lateness.append(np.float64(now_ms) - batch.deliver_at_ms.astype(np.float64))
                    count += len(batch)
                    await batch.ack(wait=False)

    gc.collect()
    gc.freeze()
    gc.disable()
    await asyncio.gather(*(consumer(f"{SUBJECT}.{number}") for number in range(subjects)))
    gc.enable()
    return np.concatenate(lateness)


async def _produce(meta: str, rate: int, seconds: int, subjects: int) -> None:
    draw = random.Random(1)
    body = bytes(BODY_BYTES)
    async with AsyncProducer(meta) as producer:
        await producer.send(f"{SUBJECT}.warm", body, delay=timedelta(days=1))
        began = time.perf_counter()
        sent, failed = 0, []
        while sent < rate * seconds:
            due = min(rate * seconds, int((time.perf_counter() - began) * rate))
            for _ in range(due - sent):
                at_ms = time.time_ns() // 1_000_000 + draw.randint(*DELAY_MS)
                answered = producer.send(f"{SUBJECT}.{draw.randrange(subjects)}", body, deliver_at_ms=at_ms)
                answered.add_done_callback(lambda done: failed.append(done) if done.exception() else None)
            sent = due
            await asyncio.sleep(TURN_S)
        await producer.flush()
    if failed:
        raise RuntimeError(f"{len(failed)} sends failed, the first with {failed[0].exception()!r}")


if __name__ == "__main__":
    uvloop.run(_produce(sys.argv[1], *map(int, sys.argv[2:])))
