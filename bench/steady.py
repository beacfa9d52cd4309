"""How late messages arrive at a consumer, at a steady rate with delays of 1 to 5 s.

A producer process sends one message at a time, and consumers in this process take what is due. Of many subjects only
some have a consumer, drawn at random: thousands of consumers in one Python process would measure that process.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import uvloop

from bench.arrivals import Arrivals, consume, freeze
from bench.cpu_side import cpu_ms
from bench.figures import Figures
from bench.messages import BATCH_ROWS, BODIES, BODY_BYTES, now_ms
from bench.redis_peer import ID_BYTES, Line, Taker, redis_server, zadd
from bench.servers import Servers, servers
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import Receipt

SUBJECT = "bench.steady"
DELAY_MS = (1_000, 5_000)
TURN_S = 0.001
DRAIN_S = 15  # A run that loses messages ends after this time.
REDIS_ROWS = 1_000


def steady(rate: int, seconds: int, settle_s: int) -> Figures:
    """Run servers, producer and consumer once, so many messages a second for ``seconds`` and ``settle_s`` before.

    As many fall due as are sent only when the longest delay has passed, and no more when the last one was sent: what is
    due in so long at both ends is not counted.
    """
    seconds += settle_s
    expected = rate * seconds
    with servers("realtime", "delay") as running:
        before = _spent_ms(running)
        with producing("delayd", running.meta, rate, seconds) as producer:
            arrivals = uvloop.run(consume(running.meta, [subject_name(0)], expected, seconds + DRAIN_S))
        after = _spent_ms(running)
    figures = arrivals.figures(settle_s) | _each_us(before, after, producer, expected)
    return {**figures, "lost": expected - arrivals.count}


def subjects(rate: int, seconds: int, settle_s: int, count: int, consumed: int) -> Figures:
    """The same over so many subjects, of which some have a consumer."""
    seconds += settle_s
    numbers = random.Random(2).sample(range(count), consumed)
    names = [subject_name(number) for number in numbers]
    # The producer draws the same subjects again, so what is expected is known.
    draw = np.bincount(_subjects(rate * seconds, count), minlength=count)
    expected = int(draw[numbers].sum())
    with servers("realtime", "delay") as running, producing("delayd", running.meta, rate, seconds, count):
        arrivals = uvloop.run(consume(running.meta, names, expected, seconds + DRAIN_S))
    return {**arrivals.figures(settle_s), "lost": expected - arrivals.count, "subjects": count, "consumed": consumed}


def together(rate: int, seconds: int, settle_s: int, count: int, listed: bool) -> Figures:
    """The same over so many subjects, all of them taken by one consumer: it lists them, or has a pattern of them."""
    seconds += settle_s
    what = [subject_name(number) for number in range(count)] if listed else f"{SUBJECT}.*"
    expected = rate * seconds
    with servers("realtime", "delay") as running:
        before = _spent_ms(running)
        with producing("delayd", running.meta, rate, seconds, count) as producer:
            arrivals = uvloop.run(consume(running.meta, [what], expected, seconds + DRAIN_S))
        after = _spent_ms(running)
    figures = arrivals.figures(settle_s) | _each_us(before, after, producer, expected)
    return {**figures, "lost": expected - arrivals.count, "subjects": count}


def redis_steady(rate: int, seconds: int, settle_s: int) -> Figures:
    """`steady` with Redis. The consumer looks again at once when it found messages, else after a millisecond."""
    seconds += settle_s
    arrivals = Arrivals()
    freeze()
    end = time.monotonic() + seconds + DRAIN_S
    with redis_server() as server, Line(server.port) as line, producing("redis", str(server.port), rate, seconds):
        taker = Taker(line, REDIS_ROWS, depth=1)
        while arrivals.count < rate * seconds and time.monotonic() < end:
            members = taker.take()
            if members:
                words = np.frombuffer(b"".join(members), np.int64).reshape(len(members), -1)
                arrivals.add(words[:, ID_BYTES // 8])
            else:
                time.sleep(TURN_S)
    return {**arrivals.figures(settle_s), "lost": rate * seconds - arrivals.count}


def subject_name(number: int) -> str:
    """The subject of a number."""
    return f"{SUBJECT}.{number}"


@contextlib.contextmanager
def producing(side: str, where: str, rate: int, seconds: int, subjects: int = 1) -> Iterator[dict[str, float]]:
    """A producer process beside the block; its failure is the run's. What it yields is filled behind the block: the
    processor time that the producer has used, in ms.
    """
    command = [sys.executable, "-m", "bench.steady", side, where, str(rate), str(seconds), str(subjects)]
    spent_ms: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield spent_ms
        except BaseException:
            child.kill()
            raise
        said, _ = child.communicate()
    if child.returncode:
        raise RuntimeError("the producer failed; its messages are above")
    spent_ms["producer"] = float(said)


def _subjects(messages: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.default_rng(3).integers(0, count, messages)


def _spent_ms(running: Servers) -> dict[str, float]:
    """Processor time that each server and this process, the consumer, have used up to now."""
    servers_ms = {role: cpu_ms(running.pid(role)) for role in ("delay", "realtime")}
    return {**servers_ms, "consumer": time.process_time() * 1_000}


def _each_us(
    before: dict[str, float], after: dict[str, float], producer: dict[str, float], messages: int
) -> dict[str, float]:
    """Processor time of each process for one message, and of all of them together."""
    spent_ms = {name: after[name] - before[name] for name in after} | producer
    return {
        f"{name}_cpu_us": round(ms * 1_000 / messages, 1)
        for name, ms in (spent_ms | {"all": sum(spent_ms.values())}).items()
    }


async def _produce(meta: str, rate: int, seconds: int, subjects: int) -> None:
    draw = random.Random(1)
    names = [subject_name(number) for number in _subjects(rate * seconds, subjects).tolist()]
    failed: list[BaseException] = []

    def answered(future: asyncio.Future[Receipt]) -> None:
        error = future.exception()
        if error is not None:
            failed.append(error)

    async with AsyncProducer(meta) as producer:
        # Each subject gets its route before the clock starts: that happens once in its life.
        await asyncio.gather(
            *(producer.send(subject_name(number), b"warm", delay=timedelta(days=1)) for number in range(subjects))
        )
        freeze()
        began, sent = time.perf_counter(), 0
        while sent < rate * seconds:
            due = min(rate * seconds, int((time.perf_counter() - began) * rate))
            for number in range(sent, due):
                at_ms = now_ms() + draw.randint(*DELAY_MS)
                future = producer.send(names[number], BODIES[number % BATCH_ROWS], deliver_at_ms=at_ms)
                future.add_done_callback(answered)
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
    began = time.process_time()
    if side == "redis":
        _produce_redis(int(where), rate, seconds)
    else:
        uvloop.run(_produce(where, rate, seconds, subjects))
    print((time.process_time() - began) * 1_000)


if __name__ == "__main__":
    main()
