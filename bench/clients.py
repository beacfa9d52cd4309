"""What the clients themselves cost: against a server in another process that checks each batch and acknowledges it.

    python -m bench.clients [--rows N]

One JSON line a result. Nothing is stored, so these are costs of client, wire and loopback, and not of a disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe

import numpy as np
import uvloop

from delayd.address import Endpoint
from delayd.batch.batch import encode, encode_subject_table, lay_out, parse
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, DispatchPart
from delayd.client.producer import AsyncProducer, Producer
from delayd.client.pulling.consumer import Consumer
from delayd.errors import DelaydError
from delayd.hours import INSTANT_MS_MIN
from delayd.net.connection import Connection
from delayd.net.server import Server, run
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType

HOST = "127.0.0.1"
LOG_ID = 7
BODY = b"x" * 200
PULL_ROWS = 2_000
ROUNDS = 5


def dispatched() -> bytes:
    """A batch as a delay server makes it."""
    table = encode_subject_table([b"bench"])
    ends, bodies = lay_out([BODY] * PULL_ROWS, len(table))
    columns: list[tuple[ColumnId, ColumnArray]] = [
        (ColumnId.DELIVER_AT_MS, np.zeros(PULL_ROWS, np.int64)),
        (ColumnId.SEQUENCE, np.arange(PULL_ROWS, dtype=np.uint64)),
        (ColumnId.BODY_END, ends),
    ]
    part = DispatchPart(LOG_ID, 1, 1, 0, 0, 0, 0)
    return encode(BatchKind.DISPATCH, part, PULL_ROWS, columns, [table, bodies], 1)


DISPATCHED = dispatched()


class Acknowledger:
    """Stands for all servers: verifies every batch and keeps none, and answers every pull with the same batch."""

    def __init__(self) -> None:
        self.port = 0
        self.batches = 0
        self.rows = 0
        self.pulled = 0

    def connected(self, connection: Connection) -> None:
        """It keeps nothing of a connection."""

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """It kept nothing of the connection."""

    def crashed(self, error: Exception) -> None:
        raise error

    def received(self, connection: Connection, frame: Frame) -> None:
        now_ms = time.time_ns() // 1_000_000
        head: Head = {"log_id": LOG_ID, "now_ms": now_ms}
        if frame.type == RequestType.SEND:
            batch = parse(frame.body)
            batch.verify()
            result: Head = {"base_sequence": 1 + self.rows, "count": batch.count, "duplicate": False}
            head["results"] = [{**result, "appended_at_ms": now_ms}]
            self.batches += 1
            self.rows += batch.count
        elif frame.type in (RequestType.SERVERS, RequestType.ROUTES):
            place: Head = {"role": "delay", "log_id": LOG_ID, "host": HOST, "port": self.port, "alive": True}
            head["servers"] = [{**place, "epoch": 1, "pid": 1, "seen_ms_ago": 0, "heard": True}]
            head |= {"routes": {"bench": LOG_ID}, "unrouted": []}
        elif frame.type == RequestType.PULL:
            head["incarnation"] = 1
            head["parts"] = [[1 + self.pulled, 1 + self.pulled, PULL_ROWS, 1]]
            self.pulled += PULL_ROWS
            connection.answer(frame.request_id, head, [DISPATCHED])
            return
        elif frame.type in (RequestType.ACK, RequestType.NACK):
            head["stale"] = []
        connection.answer(frame.request_id, head)


def serve(pipe: Pipe) -> None:
    """Run the acknowledger until the pipe says that it is over."""

    async def main() -> None:
        acknowledger = Acknowledger()
        server = Server(acknowledger)
        acknowledger.port = (await server.listen(Endpoint(HOST, 0))).port
        pipe.send(acknowledger.port)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send((acknowledger.batches, acknowledger.rows))
        await server.close()

    run(main)


class Measure:
    """Times rounds and prints their medians."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def _served(self) -> tuple[int, int]:
        self._pipe.send(True)
        batches, rows = self._pipe.recv()
        return batches, rows

    def report(self, name: str, count: int, wall: list[float], cpu: list[float], before: tuple[int, int]) -> None:
        """Print one result: us a message by the clock and of this process's CPU, and how full the batches were."""
        batches, rows = self._served()
        line = {
            "case": name,
            "messages": count,
            "us": round(statistics.median(wall) / count * 1e6, 2),
            "us_min": round(min(wall) / count * 1e6, 2),
            "us_max": round(max(wall) / count * 1e6, 2),
            "cpu_us": round(statistics.median(cpu) / count * 1e6, 2),
            "rows_per_batch": round((rows - before[1]) / max(1, batches - before[0]), 1),
        }
        print(json.dumps(line), flush=True)

    def blocking(self, name: str, count: int, work: Callable[[], None]) -> None:
        """Rounds of a function."""
        before = self._served()
        wall: list[float] = []
        cpu: list[float] = []
        for _ in range(ROUNDS):
            started, used = time.perf_counter(), time.process_time()
            work()
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        self.report(name, count, wall, cpu, before)

    async def running(self, name: str, count: int, work: Callable[[], Awaitable[object]]) -> None:
        """Rounds of a coroutine."""
        before = self._served()
        wall: list[float] = []
        cpu: list[float] = []
        for _ in range(ROUNDS):
            started, used = time.perf_counter(), time.process_time()
            await work()
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        self.report(name, count, wall, cpu, before)


def blocking_cases(measure: Measure, address: str, rows: int) -> None:
    """What the blocking producer costs."""
    bodies = [BODY] * rows
    few = bodies[:500]
    with Producer(address) as producer:

        def lone() -> None:
            for _ in range(500):
                producer.send("bench", BODY, deliver_at_ms=INSTANT_MS_MIN)

        def gathered() -> None:
            for body in bodies:
                producer.send_nowait("bench", body, deliver_at_ms=INSTANT_MS_MIN)
            producer.flush()

        def one_batch() -> None:
            producer.send_batch("bench", bodies, INSTANT_MS_MIN)

        def small_batches() -> None:
            for _ in range(100):
                producer.send_batch("bench", few, INSTANT_MS_MIN)

        measure.blocking("blocking send, one after the other", 500, lone)
        measure.blocking("blocking send_nowait", rows, gathered)
        measure.blocking("blocking send_batch, all rows", rows, one_batch)
        measure.blocking("blocking send_batch of 500, one after the other", 50_000, small_batches)


async def async_cases(measure: Measure, address: str, rows: int) -> None:
    """What the asynchronous producer costs."""
    bodies = [BODY] * rows
    few = bodies[:500]
    async with AsyncProducer(address) as producer:

        async def sender() -> None:
            for _ in range(rows // 1000):
                await producer.send("bench", BODY, deliver_at_ms=INSTANT_MS_MIN)

        async def batches() -> None:
            for _ in range(rows // 8_000):
                await producer.send_batch("bench", few, INSTANT_MS_MIN)

        await measure.running("send, 1,000 tasks", rows, lambda: asyncio.gather(*(sender() for _ in range(1000))))
        await measure.running(
            "send_batch of 500, 16 tasks",
            rows // 8_000 * 8_000,
            lambda: asyncio.gather(*(batches() for _ in range(16))),
        )
        await measure.running(
            "send_batch, all rows", rows, lambda: producer.send_batch("bench", bodies, INSTANT_MS_MIN)
        )


def consumer_cases(measure: Measure, address: str, rows: int) -> None:
    """What the blocking consumer costs."""
    with Consumer(address, "bench", "bench", max_messages=PULL_ROWS) as consumer:

        def columns() -> None:
            for _ in range(rows // PULL_ROWS):
                batch = consumer.pull()
                assert len(batch.bodies) == PULL_ROWS
                batch.ack(wait=False)
            consumer.flush()

        def messages() -> None:
            for _, message in zip(range(rows // PULL_ROWS * PULL_ROWS), consumer, strict=False):
                assert len(message.body) == 200
                message.ack(wait=False)
            consumer.flush()

        measure.blocking("blocking pull of 2,000, bodies, ack of the batch", rows // PULL_ROWS * PULL_ROWS, columns)
        measure.blocking("blocking iteration, ack of each", rows // PULL_ROWS * PULL_ROWS, messages)


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description="What the clients cost, one JSON line a result.")
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    pipe, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(other,))
    server.start()
    address = f"{HOST}:{pipe.recv()}"
    measure = Measure(pipe)
    try:
        blocking_cases(measure, address, rows)
        consumer_cases(measure, address, rows)
        uvloop.run(async_cases(measure, address, rows))
    finally:
        pipe.send(False)
        server.join()


if __name__ == "__main__":
    main()
