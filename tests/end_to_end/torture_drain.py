"""A delay server is drained beside traffic, and both delay servers are killed meanwhile: what was lost, doubled, late?

``python -m tests.end_to_end.torture_drain --messages 100000`` sends messages with mixed due instants to two delay
servers, drains one of them, kills it and then the other one with kill -9 in the middle, and ends the drain. Invariant:
every message that a producer was told is safe comes once, at its time or later, or is pending at the other server.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np

import delayd
from delayd.client.asking.looking import ask_all
from tests.end_to_end.draining import Fleet, open_fleet
from tests.unit.cli.runner import Ran, run
from tests.waiting import DEADLINE_S, wait_until

BATCH_ROWS = 100
FAR = timedelta(hours=1)
FAR_EVERY = 4  # One batch in so many is due in an hour: it is still pending when the drain has ended.
LATE_MS_MAX = 30_000  # A killed server starts again within seconds; what is later was forgotten until something else.


@dataclass
class Found:
    """What came of all messages."""

    near: dict[bytes, int] = field(default_factory=dict)  # When each was due; its body is its name.
    far: set[bytes] = field(default_factory=set)
    came: Counter[bytes] = field(default_factory=Counter)
    pending: Counter[bytes] = field(default_factory=Counter)
    early: int = 0
    late_ms_max: int = 0
    drained_s: float = 0.0
    audits: list[str] = field(default_factory=list)  # What audits that did not balance said.

    @property
    def faults(self) -> list[str]:
        """What must not be; empty when all is well."""
        lost = len(self.near.keys() - self.came.keys()) + len(self.far - self.pending.keys())
        doubled = sum(count > 1 for counter in (self.came, self.pending) for count in counter.values())
        elsewhere = len(self.came.keys() & self.pending.keys())
        told = {"lost": lost, "doubled": doubled, "delivered and pending": elsewhere, "early": self.early}
        faults = [f"{count} {name}" for name, count in told.items() if count]
        faults += [f"{self.late_ms_max} ms late"] * (self.late_ms_max > LATE_MS_MAX)
        return faults + self.audits

    @property
    def line(self) -> str:
        """One line for people."""
        return (
            f"messages={len(self.near) + len(self.far)} came={self.came.total()} pending={self.pending.total()} "
            f"late_max_ms={self.late_ms_max} drained_s={self.drained_s:.1f} faults={'; '.join(self.faults) or 'none'}"
        )


def torture(folder: Path, messages: int, due_within_s: int, seed: int) -> Found:
    """Send, drain, kill, and look what came; the messages that are due soon fall due within ``due_within_s``."""
    found, random, stop = Found(), Random(seed), threading.Event()
    with open_fleet(folder) as fleet, delayd.Producer(fleet.meta.address) as producer:
        with ThreadPoolExecutor(2) as threads:
            reader = threads.submit(_read, fleet, found, stop)
            try:
                _send(producer, found, random, messages // 2, due_within_s)
                sender = threads.submit(_send, producer, found, random, messages // 2, due_within_s)
                began = time.monotonic()
                _drain(fleet)
                found.drained_s = time.monotonic() - began
                sender.result()
                within_s = due_within_s + DEADLINE_S
                wait_until(lambda: found.near.keys() <= found.came.keys(), lambda: found.line, within_s)
            finally:
                stop.set()
            reader.result()
        for page in producer.pending("s", contents=True):
            found.pending.update(bytes(row.body or b"") for row in page)
        _audit(fleet, found)
    return found


def _send(producer: delayd.Producer, found: Found, random: Random, messages: int, due_within_s: int) -> None:
    for number in range(messages // BATCH_ROWS):
        names = [b"%016x" % random.getrandbits(64) for _ in range(BATCH_ROWS)]
        if number % FAR_EVERY == 0:
            producer.send_batch("s", names, delay=FAR)
            found.far.update(names)
            continue
        now = datetime.now(UTC)
        due = [now + timedelta(milliseconds=random.randrange(due_within_s * 1_000)) for _ in names]
        receipt = producer.send_batch("s", names, deliver_at=due)
        # What was due when it was accepted is late from then on.
        since = np.maximum(receipt.deliver_at_ms, receipt.accepted_at_ms).tolist()
        found.near |= dict(zip(names, since, strict=True))


def _read(fleet: Fleet, found: Found, stop: threading.Event) -> None:
    """Take everything that comes, with when it came: the consumer's server is killed by nobody."""
    with delayd.Consumer(fleet.meta.address, "s", group="g") as consumer:
        while not stop.is_set():
            batch = consumer.pull(1_000, wait=timedelta(seconds=0.2))
            now_ms = time.time_ns() // 1_000_000
            names = [bytes(body) for body in batch.bodies]
            batch.ack()
            for name, due_ms in zip(names, batch.deliver_at_ms.tolist(), strict=True):
                if name != b"first":
                    found.came[name] += 1
                    found.early += now_ms < due_ms
                    found.late_ms_max = max(found.late_ms_max, now_ms - found.near.get(name, due_ms))


def _drain(fleet: Fleet) -> None:
    """Drain the old server; each server is killed once while messages leave, or when the command has ended before."""
    for victim in (fleet.old, fleet.new):
        with ThreadPoolExecutor(1) as thread:
            command = thread.submit(fleet.command, "drain", fleet.old.address)
            wait_until(partial(_leave_or_ended, fleet, command), "messages leave")
            victim.kill()
            victim.start()
    wait_until(lambda: fleet.command("drain", fleet.old.address).code == 0, "the drain ends")


def _leave_or_ended(fleet: Fleet, command: Future[Ran]) -> bool:
    if command.done():
        return True
    # Without the command line: that of the drain writes to the standard output of this process meanwhile.
    return any(seen.counter("leaving_rows") for seen in asyncio.run(ask_all(fleet.meta.address)))


def _audit(fleet: Fleet, found: Found) -> None:
    for data in (fleet.old_data, fleet.new_data):
        audited = run("audit", "--data", str(data / "delay"))
        if audited.code:
            found.audits.append(audited.out)


def main() -> int:
    """Torture once; 1 when something was lost, doubled, early or forgotten."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.torture_drain")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--due-within-s", type=int, default=40)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    with TemporaryDirectory() as folder:
        found = torture(Path(folder), asked.messages, asked.due_within_s, asked.seed)
    print(found.line)
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
