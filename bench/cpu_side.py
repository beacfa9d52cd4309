"""One side of `bench.cpu`: servers and a client of the code that Python finds first, and a turn for each line it reads.

Invariant: only what both states of the code have is used here, for this file runs with the packages of either.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import numpy as np
import uvloop

from bench.arrivals import freeze
from bench.messages import BATCH_ROWS, BODIES, DAY_MS, HOUR_MS, now_ms, send_batches
from bench.servers import Servers, servers
from delayd import AsyncConsumer, AsyncProducer  # Modules of the client have moved between states of the code.

ROUNDS = 40
ROUND_MESSAGES = 5
ROUND_SUBJECTS = 20
MANY_SUBJECTS = [f"cpu.many.{number}" for number in range(1_000)]
SENDERS = 1_000
SENDER_MESSAGES = 20
HERD_BATCHES = 20
HERD_LEAD_MS = 400  # Twenty batches are sent well before their instant, also on a busy machine.
LOOK_MS = 10  # So long before the instant the clock starts.
IDLE_S = 3.0  # A whole number of seconds, so that each turn has as much of what servers do once a second.
PULL_ROWS = 8_000
RESTART_BATCHES = 200
WAIT = timedelta(seconds=1)
LIMIT_S = 30
SCHEDULED_CLOCK = 2  # CPUCLOCK_SCHED: all threads of a process, those that have ended too, in nanoseconds.

_draw = random.Random(4)
UNEQUAL = [os.urandom(_draw.randint(1, 399)) for _ in range(BATCH_ROWS)]

Spent = dict[str, float]  # Milliseconds for one round, by process.
Turn = Callable[["Side"], Awaitable[Spent]]


class Side:
    """The servers and the client of one state of the code; the code is that which Python finds first."""

    def __init__(self, running: Servers, producer: AsyncProducer) -> None:
        self.running = running
        self.producer = producer
        self.is_filled = False  # Whether what a restart finds pending was sent.
        self.has_many = False  # Whether the many subjects have their routes.
        self._consumers: dict[str, AsyncConsumer] = {}

    async def consumer(self, subject: str) -> AsyncConsumer:
        """The consumer of a subject, which stays for all turns."""
        if subject not in self._consumers:
            self._consumers[subject] = AsyncConsumer(self.running.meta, subject, "bench")
            await self._consumers[subject].pull(wait=timedelta(milliseconds=1))
        return self._consumers[subject]

    async def close(self) -> None:
        """End the consumers."""
        for consumer in self._consumers.values():
            await consumer.close()

    def clock(self) -> Spent:
        """Processor time of each process until now."""
        pids = {role: self.running.pid(role) for role in ("delay", "realtime")} | {"client": os.getpid()}
        return {name: cpu_ms(pid) for name, pid in pids.items()}


def cpu_ms(pid: int) -> float:
    """Processor time that a process has used since it began."""
    return time.clock_gettime_ns(~pid << 3 | SCHEDULED_CLOCK) / 1e6


async def steady(side: Side) -> Spent:
    """Rounds of five sends that are due at once, a pull of them, and a durable acknowledgement."""
    consumer = await side.consumer("cpu.steady")
    began = side.clock()
    for _ in range(ROUNDS):
        due_ms = now_ms()
        await asyncio.gather(
            *(side.producer.send("cpu.steady", body, deliver_at_ms=due_ms) for body in BODIES[:ROUND_MESSAGES])
        )
        await _take(consumer, ROUND_MESSAGES)
    return _since(side, began, ROUNDS)


async def many(side: Side) -> Spent:
    """Rounds of twenty sends to as many of 1,000 subjects, due at once: frames of single rows, one of them pulled."""
    return await _many(side, consumed=1)


async def many_consumed(side: Side) -> Spent:
    """The same, each subject with a consumer of its own, in rounds of the same twenty subjects."""
    return await _many(side, consumed=ROUND_SUBJECTS)


async def _many(side: Side, consumed: int) -> Spent:
    ours, others = MANY_SUBJECTS[:consumed], MANY_SUBJECTS[ROUND_SUBJECTS:]
    consumers = [await side.consumer(subject) for subject in ours]
    draw = random.Random(5)
    if not side.has_many:
        side.has_many = True
        # Each subject asks for its route once in its life.
        await asyncio.gather(*(side.producer.send(name, b"", delay=timedelta(days=1)) for name in MANY_SUBJECTS))
    began = side.clock()
    for _ in range(ROUNDS):
        names = [*draw.sample(others, ROUND_SUBJECTS - consumed), *ours]
        due_ms = now_ms()
        await asyncio.gather(
            *(
                side.producer.send(name, body, deliver_at_ms=due_ms)
                for name, body in zip(names, BODIES[:ROUND_SUBJECTS], strict=True)
            )
        )
        await asyncio.gather(*(_take(consumer, 1) for consumer in consumers))
    return _since(side, began, ROUNDS)


async def batches(side: Side) -> Spent:
    """Sends of 500 messages each, due within a day, sixteen under way."""
    first_ms = now_ms() + DAY_MS
    draw = np.random.default_rng(1)
    due = [draw.integers(first_ms, first_ms + DAY_MS, BATCH_ROWS) for _ in range(ROUNDS)]
    began = side.clock()
    await send_batches(side.producer, "cpu.batches", due)
    return _since(side, began, ROUNDS)


async def singles(side: Side) -> Spent:
    """A thousand senders that each wait for the receipt of one message before they send the next one."""
    due_ms = now_ms() + DAY_MS

    async def sender(body: bytes) -> None:
        for _ in range(SENDER_MESSAGES):
            await side.producer.send("cpu.singles", body, deliver_at_ms=due_ms)

    began = side.clock()
    await asyncio.gather(*(sender(BODIES[number % BATCH_ROWS]) for number in range(SENDERS)))
    return _since(side, began, SENDER_MESSAGES)


async def unequal(side: Side) -> Spent:
    """The same with bodies of unequal length, one after the other."""
    first_ms = now_ms() + DAY_MS
    due = np.random.default_rng(1).integers(first_ms, first_ms + DAY_MS, BATCH_ROWS)
    began = side.clock()
    for _ in range(ROUNDS):
        await side.producer.send_batch("cpu.unequal", UNEQUAL, due)
    return _since(side, began, ROUNDS)


async def herd(side: Side) -> Spent:
    """Stored batches of 500 that are due at one instant: handed over, pulled and acknowledged."""
    return await _herd(side, "cpu.herd", BODIES)


async def unequal_herd(side: Side) -> Spent:
    """The same with bodies of unequal length."""
    return await _herd(side, "cpu.unequal.herd", UNEQUAL)


async def _herd(side: Side, subject: str, bodies: list[bytes]) -> Spent:
    consumer = await side.consumer(subject)
    due_ms = now_ms() + HERD_LEAD_MS
    due = np.full(BATCH_ROWS, due_ms)
    await asyncio.gather(*(side.producer.send_batch(subject, bodies, due) for _ in range(HERD_BATCHES)))
    if now_ms() > due_ms - 20:
        raise RuntimeError("the machine was too slow: not all was scheduled before its instant")
    # What servers spend while they wait is a case of its own.
    await asyncio.sleep(max(0, due_ms - now_ms() - LOOK_MS) / 1000)
    began = side.clock()
    await _take(consumer, HERD_BATCHES * BATCH_ROWS)
    return _since(side, began, HERD_BATCHES)


async def idle(side: Side) -> Spent:
    """Nothing, for a while; a round is a second."""
    began = side.clock()
    await asyncio.sleep(IDLE_S)
    return _since(side, began, IDLE_S)


async def restart(side: Side) -> Spent:
    """A kill of the delay server that has 100,000 messages pending, until the next one is handed over."""
    consumer = await side.consumer("cpu.restart")
    if not side.is_filled:
        side.is_filled = True
        first_ms = now_ms() + HOUR_MS // 2
        due = np.random.default_rng(1).integers(first_ms, first_ms + HOUR_MS // 4, BATCH_ROWS)
        for _ in range(RESTART_BATCHES):
            await side.producer.send_batch("cpu.restart.pending", BODIES, due)
    side.running.kill("delay")
    await asyncio.get_running_loop().run_in_executor(None, side.running.start, "delay")
    await side.producer.send("cpu.restart", BODIES[0], deliver_at_ms=now_ms())
    await _take(consumer, 1)
    return {"delay": cpu_ms(side.running.pid("delay"))}


async def _take(consumer: AsyncConsumer, messages: int) -> None:
    """Pull so many messages and acknowledge them, until that is durable."""
    end = time.monotonic() + LIMIT_S
    while messages > 0:
        batch = await consumer.pull(max_messages=PULL_ROWS, wait=WAIT)
        messages -= len(batch.bodies)
        await batch.ack(wait=False)
        if time.monotonic() > end:
            raise RuntimeError(f"{messages} messages did not arrive within {LIMIT_S} s")
    await consumer.flush()


def _since(side: Side, began: Spent, rounds: float) -> Spent:
    return {name: (now - began[name]) / rounds for name, now in side.clock().items()}


CASES: dict[str, Turn] = {
    "steady": steady,
    "many": many,
    "many_consumed": many_consumed,
    "batches": batches,
    "singles": singles,
    "unequal": unequal,
    "herd": herd,
    "unequal_herd": unequal_herd,
    "idle": idle,
    "restart": restart,
}


async def _turns(running: Servers) -> None:
    loop = asyncio.get_running_loop()
    async with AsyncProducer(running.meta) as producer:
        side = Side(running, producer)
        freeze()
        while name := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            print(json.dumps(await CASES[name](side)), flush=True)
        await side.close()


if __name__ == "__main__":
    with servers("realtime", "delay") as running:
        uvloop.run(_turns(running))
