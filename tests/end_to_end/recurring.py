"""A job that arms its next run under its own key, in three homes: no run may be missing, and none may come twice.

    python -m tests.end_to_end.recurring --seconds 60

It prints one line for each home and each way in which a send may meet its key, and ends with 1 when a run is missing or
doubled. The handler of run n sends run n + 1 before it returns, as recurring jobs do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Literal

import delayd
from tests.conformance.public.homes import HOMES

Conflict = Literal["reject", "keep", "replace"]
CONFLICTS: tuple[Conflict, ...] = ("reject", "keep", "replace")


async def recur(address: str, conflict: Conflict, seconds: float, every: timedelta) -> Counter[int]:
    """Let a job run for a while; how often each of its runs came."""
    runs: Counter[int] = Counter()
    subject, worker = f"recurring.{conflict}", delayd.Worker(address)
    first_ms = 0

    async with delayd.AsyncProducer(address) as producer:

        @worker.on(subject, group="g", max_attempts=5, decode="json")
        async def run(number: int, message: delayd.AsyncMessage) -> None:
            runs[number] += 1
            due_ms = first_ms + number * (every // timedelta(milliseconds=1))
            body = str(number + 1).encode()
            await producer.send(subject, body, deliver_at_ms=due_ms, key="job", on_conflict=conflict)

        receipt = await producer.send(subject, b"1", delay=every, key="job")
        first_ms = receipt.deliver_at_ms
        serving = asyncio.create_task(worker.serve())
        await asyncio.sleep(seconds)
        worker.stop()
        await serving
    return runs


def faults(runs: Counter[int], seconds: float, every: timedelta) -> int:
    """How many runs are missing or doubled; the last two may not have come before the end."""
    expected = int(seconds / every.total_seconds()) - 2
    missing = sum(number not in runs for number in range(1, expected + 1))
    return missing + sum(runs.values()) - len(runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every-ms", type=int, default=1_000)
    chosen = parser.parse_args()
    every, found = timedelta(milliseconds=chosen.every_ms), 0
    for name, home in HOMES.items():
        with tempfile.TemporaryDirectory() as folder, home(Path(folder)) as address:

            async def all_ways(address: str = address) -> list[Counter[int]]:
                ways = (recur(address, conflict, chosen.seconds, every) for conflict in CONFLICTS)
                return await asyncio.gather(*ways)

            for conflict, runs in zip(CONFLICTS, asyncio.run(all_ways()), strict=True):
                wrong = faults(runs, chosen.seconds, every)
                found += wrong
                print(f"{name} {conflict}: {len(runs)} runs, {wrong} missing or doubled", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
