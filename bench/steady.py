"""How late messages arrive at a consumer, at a steady rate with delays of 1 to 5 s.

A producer process sends one message at a time, and a consumer in this process, whose collector is frozen, takes what is
due. Lateness is the wall clock when a taken batch is in the consumer's hands, less the instant at which it was due.
"""

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.figures import Figures
from bench.messages import BATCH_ROWS, BODIES, BODY_BYTES, now_ms
from bench.redis_peer import ID_BYTES, Line, Taker, redis_server, zadd
from bench.servers import servers
from delayd.client.consumer import AsyncConsumer
from delayd.client.producer import AsyncProducer
from delayd.client.receipt import Receipt

SUBJECT = "bench.steady"
DELAY_MS = (1_000, 5_000)
TURN_S = 0.001
DRAIN_S = 15  # A run that loses messages ends all the same.
REDIS_ROWS = 1_000
CURVE = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 100)  # Percentiles.

Lateness = NDArray[np.float64]


def steady(rate: int, seconds: int, subjects: int = 1) -> Figures:
    """Run servers, producer and consumer once; messages a second, spread over so many subjects."""
    with servers("realtime", "delay") as running, producing("delayd", running.meta, rate, seconds, subjects):
        late_ms = uvloop.run(_consume(running.meta, rate * seconds, seconds, subjects))
    return {**lateness_figures(late_ms), "lost": rate * seconds - len(late_ms)}


def redis_steady(rate: int, seconds: int) -> Figures:
    """The same through Redis; the consumer looks again at once when it found something, else after a millisecond."""
    freeze()
    taken: list[Lateness] = []
    count, end = 0, time.monotonic() + seconds + DRAIN_S
    with redis_server() as server, Line(server.port) as line, producing("redis", str(server.port), rate, seconds, 1):
        taker = Taker(line, REDIS_ROWS, depth=1)
        while count < rate * seconds and time.monotonic() < end:
            members = taker.take()
            if not members:
                time.sleep(TURN_S)
                continue
            now = time.time_ns() / 1e6
            words = np.frombuffer(b"".join(members), np.uint64).reshape(len(members), -1)
            taken.append(now - words[:, ID_BYTES // 8].astype(np.float64))
            count += len(members)
    late_ms = np.concatenate(taken)
    return {**lateness_figures(late_ms), "lost": rate * seconds - len(late_ms)}


def lateness_figures(late_ms: Lateness) -> Figures:
    """What is told of the lateness of messages."""
    p50, p99, p999 = np.percentile(late_ms, (50, 99, 99.9))
    return {
        "messages": len(late_ms),
        "early": int((late_ms < 0).sum()),
        "late_ms_p50": round(float(p50), 2),
        "late_ms_p99": round(float(p99), 2),
        "late_ms_p99_9": round(float(p999), 2),
        "late_ms_max": round(float(late_ms.max()), 2),
        "late_ms_curve": [round(float(value), 3) for value in np.percentile(late_ms, CURVE)],
    }


@contextlib.contextmanager
def producing(side: str, where: str, rate: int, seconds: int, subjects: int) -> Iterator[None]:
    """A producer process beside the block; its failure is the run's."""
    command = [sys.executable, "-m", "bench.steady", side, where, str(rate), str(seconds), str(subjects)]
    with subprocess.Popen(command) as child:
        try:
            yield
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise RuntimeError("the producer failed; its messages are above")


def freeze() -> None:
    """The harness's own collector would stop the consumer for milliseconds."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def _consume(meta: str, expected: int, seconds: int, subjects: int) -> Lateness:
    lateness: list[Lateness] = []
    count = 0
    end = time.monotonic() + seconds + DRAIN_S

    async def consume(subject: str) -> None:
        nonlocal count
        async with AsyncConsumer(meta, subject, "bench") as consumer:
            while count < expected and time.monotonic() < end:
                batch = await consumer.pull(wait=timedelta(milliseconds=500))
                now = time.time_ns() / 1e6
                if len(batch):
                    lateness.append(now - batch.deliver_at_ms.astype(np.float64))
                    count += len(batch)
                    await batch.ack(wait=False)

    freeze()
    await asyncio.gather(*(consume(f"{SUBJECT}.{number}") for number in range(subjects)))
    return np.concatenate(lateness)


async def _produce(meta: str, rate: int, seconds: int, subjects: int) -> None:
    draw = random.Random(1)
    failed: list[BaseException] = []

    def answered(future: asyncio.Future[Receipt]) -> None:
        error = future.exception()
        if error is not None:
            failed.append(error)

    async with AsyncProducer(meta) as producer:
        await producer.send(f"{SUBJECT}.warm", b"warm", delay=timedelta(days=1))
        freeze()
        began, sent = time.perf_counter(), 0
        while sent < rate * seconds:
            due = min(rate * seconds, int((time.perf_counter() - began) * rate))
            for number in range(sent, due):
                at_ms = now_ms() + draw.randint(*DELAY_MS)
                subject = f"{SUBJECT}.{draw.randrange(subjects)}"
                producer.send(subject, BODIES[number % BATCH_ROWS], deliver_at_ms=at_ms).add_done_callback(answered)
            sent = due
            await asyncio.sleep(TURN_S)
        await producer.flush()
    if failed:
        raise RuntimeError(f"{len(failed)} sends failed, the first with {failed[0]!r}")


def _produce_redis(port: int, rate: int, seconds: int) -> None:
    draw = random.Random(1)
    rest = bytes(BODY_BYTES - 8)
    freeze()
    with Line(port) as line:
        began, sent = time.perf_counter(), 0
        while sent < rate * seconds:
            due = min(rate * seconds, int((time.perf_counter() - began) * rate))
            if due > sent:
                at_ms = [now_ms() + draw.randint(*DELAY_MS) for _ in range(sent, due)]
                line.send(zadd(sent, at_ms, [at.to_bytes(8, sys.byteorder) + rest for at in at_ms]), 1)
                line.settle()
            sent = due
            time.sleep(TURN_S)


def main() -> None:
    """Be the producer process of a run."""
    side, where = sys.argv[1:3]
    rate, seconds, subjects = map(int, sys.argv[3:])
    if side == "redis":
        _produce_redis(int(where), rate, seconds)
    else:
        uvloop.run(_produce(where, rate, seconds, subjects))


if __name__ == "__main__":
    main()
