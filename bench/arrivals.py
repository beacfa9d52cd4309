"""When messages arrived at the consumers of a run, and the figures about it.

Lateness is the wall clock when a taken batch is in the consumer's hands, less the instant at which it was due; all are
processes of one machine, so it is one clock.
"""

import asyncio
import gc
import time
from collections.abc import Iterable
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from bench.figures import Figures
from bench.messages import Instants
from delayd.client.pulling.consumer import AsyncConsumer

PULL_WAIT = timedelta(milliseconds=500)
CURVE = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95, 100)  # Percentiles.

Lateness = NDArray[np.float64]


class Arrivals:
    """Collects instants and lateness, a pair of arrays for each batch.

    ``ahead_ms`` is how far the servers' wall clock was set ahead of this process's; instants are kept as theirs.
    """

    def __init__(self, ahead_ms: int = 0) -> None:
        self.count = 0
        self._ahead_ms = ahead_ms
        self._due_ms: list[Instants] = []
        self._late_ms: list[Lateness] = []

    def add(self, due_ms: Instants) -> None:
        """Note a batch that the consumer has now."""
        now_ms = time.time_ns() / 1e6 + self._ahead_ms
        self._due_ms.append(due_ms)
        self._late_ms.append(now_ms - due_ms.astype(np.float64))
        self.count += len(due_ms)

    def between(self, first_ms: float, last_ms: float) -> Lateness:
        """Lateness of the messages that were due in a span."""
        due_ms = np.concatenate(self._due_ms)
        return np.concatenate(self._late_ms)[(due_ms >= first_ms) & (due_ms < last_ms)]

    def figures(self, settle_s: int = 0) -> Figures:
        """The figures, without messages that were due within ``settle_s`` of the first or the last instant."""
        due_ms = np.concatenate(self._due_ms)
        first_ms, last_ms = int(due_ms.min()) + settle_s * 1_000, int(due_ms.max()) - settle_s * 1_000
        late_ms = self.between(first_ms, last_ms + 1)
        return {
            "messages": len(late_ms),
            "early": int((np.concatenate(self._late_ms) < 0).sum()),
            **percentiles("late_ms", late_ms),
            "late_ms_curve": [round(float(value), 3) for value in np.percentile(late_ms, CURVE)],
        }


def percentiles(name: str, late_ms: Lateness) -> dict[str, float]:
    """The p50, p99, p99.9 and the worst; no figures when there are no messages."""
    if not len(late_ms):
        return {}
    p50, p99, p999 = np.percentile(late_ms, (50, 99, 99.9))
    values = {"p50": p50, "p99": p99, "p99_9": p999, "max": late_ms.max()}
    return {f"{name}_{key}": round(float(value), 2) for key, value in values.items()}


async def consume(
    meta: str, subjects: Iterable[str | list[str]], expected: int, limit_s: float, ahead_ms: int = 0
) -> Arrivals:
    """Pull and acknowledge with a consumer for each subject, list or pattern until all arrived or the time is over."""
    arrivals = Arrivals(ahead_ms)
    end = time.monotonic() + limit_s

    async def one(subject: str | list[str]) -> None:
        async with AsyncConsumer(meta, subject, "bench") as consumer:
            while arrivals.count < expected and time.monotonic() < end:
                batch = await consumer.pull(wait=PULL_WAIT)
                if len(batch):
                    arrivals.add(batch.deliver_at_ms)
                    await batch.ack(wait=False)

    freeze()
    await asyncio.gather(*map(one, subjects))
    return arrivals


def freeze() -> None:
    """Freeze the garbage collector of this process, which would stop it for milliseconds."""
    gc.collect()
    gc.freeze()
    gc.disable()
