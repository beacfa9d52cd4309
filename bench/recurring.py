"""Measures recurring schedules on one delay server: what making them costs, and what deciding them costs.

Run ``python -m bench.recurring [--schedules 10000] [--every 60] [--seconds 120]``. Prints one JSON line: schedules made
in a second, memory of the delay server for each, processor time of the delay server for one decided occurrence, how
late occurrences were handed to a consumer, and how many are missing or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from datetime import timedelta

import numpy as np

import delayd
from bench.cpu_side import cpu_ms
from bench.process import memory_bytes
from bench.servers import servers

AT_ONCE = 200  # Schedules that are made at the same time.


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.recurring", description="Measure recurring schedules.")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=60, metavar="SECONDS", help="between two occurrences of each")
    parser.add_argument("--seconds", type=int, default=120, help="how long occurrences are counted")
    arguments = parser.parse_args()
    every = timedelta(seconds=arguments.every)
    with servers("realtime", "delay") as running:
        pid = running.pid("delay")
        before = memory_bytes(pid)
        made_per_s = asyncio.run(make(running.meta, arguments.schedules, every))
        figures = {"made_per_s": round(made_per_s), "bytes_each": (memory_bytes(pid) - before) // arguments.schedules}
        with delayd.Consumer(running.meta, "tick", group="g") as consumer:
            figures |= count(consumer, pid, arguments.seconds, every)
    print(json.dumps({"bench": "recurring", "schedules": arguments.schedules, "every_s": arguments.every, **figures}))


async def make(meta: str, schedules: int, every: timedelta) -> float:
    """Make schedules; returns how many in a second."""
    async with delayd.AsyncProducer(meta) as producer:
        began = time.perf_counter()
        for first in range(0, schedules, AT_ONCE):
            names = [f"schedule-{number}" for number in range(first, min(first + AT_ONCE, schedules))]
            await asyncio.gather(*(producer.recurring(name, "tick", bytes(100), every=every) for name in names))
        return schedules / (time.perf_counter() - began)


def count(consumer: delayd.Consumer, pid: int, seconds: int, every: timedelta) -> dict[str, float]:
    """Pull occurrences for some time, which is to hold whole rounds of all schedules; those that waited before it began
    are counted, but their lateness is not that of the servers.
    """
    found: Counter[tuple[str | None, float]] = Counter()
    late_ms: list[int] = []
    spent_ms, began, began_s, until = cpu_ms(pid), time.monotonic(), time.time(), time.monotonic() + seconds
    while time.monotonic() < until:
        batch = consumer.pull(1_000, wait=timedelta(seconds=0.5))
        late_ms += batch.late_ms.compress(batch.deliver_at_ms > began_s * 1_000).tolist()
        for message in batch:
            assert message.occurrence is not None, "all of them recur"
            found[message.schedule, message.occurrence.timestamp()] += 1
        batch.ack(wait=False)
    spent_ms = cpu_ms(pid) - spent_ms
    spans: dict[str | None, list[float]] = {}
    for name, instant in found:
        spans.setdefault(name, []).append(instant)
    expected = sum(round((max(each) - min(each)) / every.total_seconds()) + 1 for each in spans.values())
    return {
        "occurrences": len(found),
        "missing": expected - len(found),
        "doubled": sum(found.values()) - len(found),
        "delay_cpu_us_each": round(1_000 * spent_ms / len(found), 1),
        "delay_cpu_share": round(spent_ms / 1_000 / (time.monotonic() - began), 3),
        "late_ms_p50": float(np.percentile(late_ms, 50)),
        "late_ms_p99": float(np.percentile(late_ms, 99)),
    }


if __name__ == "__main__":
    main()
