"""The neighbour of the fuzzer, a process of its own: ``python -m tests.fuzz.honest META DELAY REALTIME`` (ports).

It sends and consumes, asks each server for a sign of life each 10 ms, and measures how long everything takes. It prints
`ready` when its first message came, ends when its stdin closes, and prints what it saw as one line of JSON. It speaks
only to the servers that it was told of: those that the fuzzer registers at meta are not there.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections import Counter

from delayd.address import Endpoint
from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.net.entry import connect
from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_maps,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from tests.batches import bodies_of, messages

SUBJECT = "honest"
EVERY_S = 0.01
SEND_EVERY_S = 0.02
ROWS = 5
LAST_S = 60.0  # For what was sent to arrive, at the end.
ANSWER_MS = 30_000.0
HOST = "127.0.0.1"


class Honest:
    """One producer, one consumer and three probes."""

    def __init__(self) -> None:
        self.took_ms: dict[str, list[float]] = {"meta": [], "delay": [], "realtime": [], "send": []}
        self.sent = 0
        self.came: Counter[int] = Counter()
        self.errors: list[str] = []
        self.stopping = asyncio.Event()
        self.first = asyncio.Event()
        self.produced = False  # The last batch was accepted, so that `sent` is final.

    async def probe(self, role: str, connection: Connection) -> None:
        """Ask for a sign of life again and again."""
        while not self.stopping.is_set():
            begun = time.perf_counter()
            await connection.request(RequestType.PING, {}, (), ANSWER_MS)
            self.took_ms[role].append(1000 * (time.perf_counter() - begun))
            await asyncio.sleep(EVERY_S)

    async def produce(self, connection: Connection) -> None:
        """Send batches that are due at once, each until it is accepted."""
        producer_id, number = secrets.randbits(64) | 1, 0
        while not self.stopping.is_set():
            number += 1
            bodies = [(self.sent + row).to_bytes(8, "little") for row in range(ROWS)]
            due = [int(time.time() * 1000) + 20] * ROWS
            part = ProducerPart(producer_id, number, number)
            batch = messages(bodies, due=due, subjects=[SUBJECT.encode()], part=part)
            begun = time.perf_counter()
            while True:
                answer = await connection.request(RequestType.SEND, {}, [batch], ANSWER_MS)
                (result,) = need_maps(answer.head, "results")
                if "error" not in result:
                    break
                await asyncio.sleep(0.02)
            self.took_ms["send"].append(1000 * (time.perf_counter() - begun))
            self.sent += ROWS
            await asyncio.sleep(SEND_EVERY_S)
        self.produced = True

    async def consume(self, connection: Connection) -> None:
        """Pull and acknowledge until all that was sent has come."""
        names: Head = {"subject": SUBJECT, "group": SUBJECT}
        limits: Head = {"max_messages": 1_000, "max_bytes": 1 << 20, "wait_ms": 500, "lease_ms": 60_000, "consumer": ""}
        while not (self.produced and len(self.came) == self.sent):
            answer = await connection.request(RequestType.PULL, names | limits, (), ANSWER_MS)
            position = 0
            handles: list[list[int]] = []
            for pull_first, _, count, _ in need_rows(answer.head, "parts", 4):
                batch = parse(answer.body, position)
                position += batch.total_bytes
                self.came.update(int.from_bytes(body, "little") for body in bodies_of(batch))
                handles.append([need_u64(answer.head, "incarnation"), pull_first, count])
                self.first.set()
            if handles:
                await connection.request(RequestType.ACK, {**names, "handles": handles}, (), ANSWER_MS)

    async def run(self, ports: dict[str, int]) -> None:
        """Work until stdin closes, then until all has come."""
        lines = {role: await connect(Endpoint(HOST, port)) for role, port in ports.items()}
        consumer, producer = (
            await connect(Endpoint(HOST, ports["realtime"])),
            await connect(Endpoint(HOST, ports["delay"])),
        )
        tasks = [asyncio.create_task(self.probe(role, line)) for role, line in lines.items()]
        tasks.append(asyncio.create_task(self.produce(producer)))
        tasks.append(asyncio.create_task(self.consume(consumer)))
        try:
            async with asyncio.timeout(LAST_S):
                await self.first.wait()
            for times in self.took_ms.values():
                times.clear()
            print("ready", flush=True)
            closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            await asyncio.wait({closed, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self.errors.append("no message came")
        self.stopping.set()
        _, late = await asyncio.wait(tasks, timeout=LAST_S)
        self.errors += ["what was sent did not come in time"] if late else []
        for task in late:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, DelaydError):
                self.errors.append(f"{type(result).__name__}: {result}")
        for line in (*lines.values(), consumer, producer):
            line.abort()

    def seen(self) -> dict[str, object]:
        """What is told at the end."""
        return {
            "sent": self.sent,
            "lost": self.sent - len(self.came),
            "doubled": sum(count - 1 for count in self.came.values()),
            "errors": self.errors,
            "ms": {name: spread(times) for name, times in self.took_ms.items()},
        }


def spread(times: list[float]) -> dict[str, float]:
    """Median, 99th percentile and longest."""
    ordered = sorted(times) or [0.0]
    return {
        "count": len(times),
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[int(len(ordered) * 0.99)], 2),
        "max": round(ordered[-1], 2),
    }


def main() -> None:
    """Run with the ports of the three servers."""
    honest = Honest()
    asyncio.run(honest.run(dict(zip(("meta", "delay", "realtime"), map(int, sys.argv[1:4]), strict=True))))
    print(json.dumps(honest.seen()), flush=True)


if __name__ == "__main__":
    main()
