"""How many files do servers have open while messages in all hours of two years are cancelled, and afterwards?

``python -m tests.end_to_end.bounded_files --cancels 100000`` starts ``delayd up``, sends messages that fall due in each
of the 17,500 hours, some of them with keys, cancels them all by receipt or key, and counts what the delay and the
realtime server have open all the time, beside traffic that goes on. Invariant: a server has at most 1,024 files and
connections open at any moment, and at most 256 when the outcome of each cancel is on disk, whatever their number.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import delayd
from delayd.hours import HOUR_MS
from tests.end_to_end.up_process import Up, up
from tests.waiting import wait_until

TWO_YEARS_HOURS = 17_500
DURING_MAX = 1_024
AFTER_MAX = 256
BATCH_ROWS = 1_000
KEYED_EVERY = 10  # One batch in so many is sent with keys, and cancelled by them.
SUBJECTS = 32  # Of the traffic: each has a consume log at the realtime server.
NEAR = timedelta(milliseconds=500)
TRAFFIC_EVERY_S = 0.05
LOOK_EVERY_S = 0.02
FILED_WITHIN_S = 300.0
ROLES = ("delay", "realtime")


@dataclass
class Opened:
    """The most files that each server had open, and what was done meanwhile."""

    hours: int = 0
    during: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    by_key: int = 0
    delivered: int = 0  # Messages of the traffic.
    cancels_s: float = 0.0

    @property
    def faults(self) -> list[str]:
        """What must not be; empty when all is well."""
        told = ((self.during, DURING_MAX, "at a moment"), (self.after, AFTER_MAX, "afterwards"))
        return [
            f"{role}: {most[role]} open {when}, not {limit} at most"
            for most, limit, when in told
            for role in ROLES
            if not 0 < most[role] <= limit
        ]

    @property
    def line(self) -> str:
        """One line for people."""
        opened = " ".join(f"{role}_max={self.during[role]} {role}_after={self.after[role]}" for role in ROLES)
        return (
            f"cancelled={self.cancelled} by_key={self.by_key} hours={self.hours} delivered={self.delivered} "
            f"cancels_s={self.cancels_s:.1f} {opened} faults={'; '.join(self.faults) or 'none'}"
        )


def count_open(folder: Path, cancels: int, hours: int, after_s: float, seed: int) -> Opened:
    """Send and cancel so many messages in so many hours; count until ``after_s`` after the last outcome."""
    opened, stop = Opened(hours), threading.Event()
    with up(folder, "--port", "0") as servers, ThreadPoolExecutor(2) as threads:
        meta = servers.meta
        try:
            work = [threads.submit(_send_near, meta, stop), threads.submit(_take_near, meta, stop, opened)]
            with _counted(servers, opened.during):
                _cancel_everywhere(meta, opened, cancels, Random(seed))
                wait_until(lambda: _hours_with_outcomes(servers) >= min(hours, cancels), "all is filed", FILED_WITHIN_S)
            with _counted(servers, opened.after):
                time.sleep(after_s)
        finally:
            stop.set()
        for part in work:
            part.result()
    return opened


def _cancel_everywhere(meta: str, opened: Opened, cancels: int, random: Random) -> None:
    """Send to each hour in turn, cancel in any order: the outcomes of one moment belong to many hours."""
    now_ms = time.time_ns() // 1_000_000
    rows = list(range(cancels))
    random.shuffle(rows)
    with delayd.Producer(meta) as producer:
        sent: list[tuple[delayd.BatchReceipt, list[str] | None]] = []
        for first in range(0, cancels, BATCH_ROWS):
            batch = rows[first : first + BATCH_ROWS]
            due = [now_ms + (row % opened.hours + 2) * HOUR_MS for row in batch]
            keys = [f"key-{row}" for row in batch] if first // BATCH_ROWS % KEYED_EVERY == 0 else None
            sent.append((producer.send_batch("far", [b"far"] * len(batch), due, keys=keys), keys))
        random.shuffle(sent)
        began = time.monotonic()
        for receipt, keys in sent:
            answers = producer.cancel_batch("far", receipt=None if keys else receipt, keys=keys)
            cancelled = int((answers == delayd.CancelAnswer.CANCELLED).sum())
            opened.cancelled += cancelled
            opened.by_key += cancelled if keys else 0
        opened.cancels_s = time.monotonic() - began


def _hours_with_outcomes(servers: Up) -> int:
    return sum(1 for _ in servers.data.glob("delay/dispatch/*/*.log"))


def _send_near(meta: str, stop: threading.Event) -> None:
    with delayd.Producer(meta) as producer:
        while not stop.wait(TRAFFIC_EVERY_S):
            for subject in range(SUBJECTS):
                producer.send_nowait(f"near.{subject}", b"near", delay=NEAR)
            producer.flush()


def _take_near(meta: str, stop: threading.Event, opened: Opened) -> None:
    with delayd.Consumer(meta, "near.*", group="g") as consumer:
        while not stop.is_set():
            batch = consumer.pull(1_000, wait=timedelta(seconds=0.2))
            batch.ack()
            opened.delivered += len(batch)


@contextmanager
def _counted(servers: Up, most: Counter[str]) -> Iterator[None]:
    """Count what each server has open for as long as the block lasts, and keep the most."""
    pids = {role: servers.ready(role)[-1].pid for role in ROLES}
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(LOOK_EVERY_S):
            for role, pid in pids.items():
                most[role] = max(most[role], len(os.listdir(f"/proc/{pid}/fd")))

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            yield
        finally:
            stop.set()
        looking.result()


def main() -> int:
    """Count once; 1 when a server had too much open."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.bounded_files")
    parser.add_argument("--cancels", type=int, default=100_000)
    parser.add_argument("--hours", type=int, default=TWO_YEARS_HOURS)
    parser.add_argument("--after-s", type=float, default=70.0, help="longer than a checkpoint is apart from the next")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    with TemporaryDirectory() as folder:
        opened = count_open(Path(folder), asked.cancels, asked.hours, asked.after_s, asked.seed)
    print(opened.line)
    return int(bool(opened.faults))


if __name__ == "__main__":
    sys.exit(main())
