"""The whole of delayd in a minute: schedule 20,000 messages, kill the delay server in the middle, show the books.

``make demo``, or ``python -m examples.demo``. Real processes, files and sockets in a temporary directory; the exit code
is 0 only if every message that was due came once, none came early, and the audit of the logs agrees.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
from rich.console import Console

from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.machine.histogram import LOWER_BOUNDS
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.report.page import audit_page

SUBJECT = "demo.orders"
SOON, AT_ONCE, PAST_DUE, NEXT_YEAR = 14_000, 2_000, 1_000, 3_000  # 20,000 in all.
SOON_MS = (1_000, 20_000)
AT_ONCE_MS = 8_000
KILL_AFTER_S = 6.0
WAIT_S = 60.0  # For the last message; a minute is far more than the restart takes.
BAR_WIDTH = 40
STEPS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)

console = Console(highlight=False)


@dataclass(slots=True)
class Seen:
    """What the consumer saw: how often each body came, and how many came before they were due."""

    bodies: dict[bytes, int] = field(default_factory=dict)
    early: int = 0

    @property
    def repeated(self) -> int:
        return sum(count - 1 for count in self.bodies.values())


class Service:
    """A running ``delayd up``; knows each server's process id from the lines that it prints."""

    def __init__(self, folder: str) -> None:
        self.pids: dict[str, int] = {}
        self.addresses: dict[str, str] = {}
        self.ready = asyncio.Event()
        self._folder = folder
        self._child: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "delayd", "up", "--data", self._folder, "--port", "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._reader = asyncio.create_task(self._read())
        await asyncio.wait_for(self.ready.wait(), WAIT_S)

    async def stop(self) -> None:
        assert self._child is not None and self._reader is not None
        self._child.terminate()
        await self._child.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        async for line in self._child.stdout:
            match line.decode().split():
                case ["ready", role, address, pid]:
                    self.pids[role] = int(pid.removeprefix("pid="))
                    self.addresses[role] = address
                    console.print(f"  {role:<8} serves at {address}, {pid}")
                case ["ready"]:
                    self.ready.set()


async def main() -> int:
    """Start everything, deliver, audit the running servers' files; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="delayd-demo-") as folder:
        service = Service(folder)
        console.print("[bold]Servers[/]")
        await service.start()
        try:
            seen = await deliver(service)
            report = audit_directory(folder, now_ms=int(time.time() * 1000), findings_limit=10)
        finally:
            await service.stop()
    return show(seen, report)


async def deliver(service: Service) -> Seen:
    """Schedule everything, consume what is due, and kill the delay server in between."""
    seen, meta = Seen(), service.addresses["meta"]
    expected = SOON + AT_ONCE + PAST_DUE
    consumer = asyncio.create_task(consume(meta, expected, seen))
    console.print("[bold]Schedule[/]")
    began = time.monotonic()
    await schedule(meta)
    console.print(
        f"  20,000 messages acknowledged in {time.monotonic() - began:.2f} s, each on disk before its receipt"
    )
    console.print("[bold]Deliver[/]")
    killed = False
    while not consumer.done():
        await asyncio.wait({consumer}, timeout=2)
        console.print(f"  {time.monotonic() - began:5.1f} s: {len(seen.bodies):,} of {expected:,} delivered")
        if not killed and time.monotonic() - began > KILL_AFTER_S:
            killed = True
            os.kill(service.pids["delay"], signal.SIGKILL)
            console.print(
                f"  [red]kill -9 {service.pids['delay']}[/]: the delay server is gone; its supervisor restarts it"
            )
    await consumer
    return seen


async def schedule(meta: str) -> None:
    """Send 20,000 messages, a thousand of them one by one."""
    draw = random.Random(7)
    now_ms = int(time.time() * 1000)
    instants = [now_ms + draw.randint(*SOON_MS) for _ in range(SOON)]
    instants += [now_ms + AT_ONCE_MS] * AT_ONCE
    instants += [now_ms - draw.randint(1, 100_000) for _ in range(PAST_DUE)]
    instants += [now_ms + int(timedelta(days=365).total_seconds() * 1000)] * NEXT_YEAR
    draw.shuffle(instants)
    async with AsyncProducer(meta) as producer:
        singles = [
            producer.send(SUBJECT, b"single %d" % number, deliver_at_ms=instant)
            for number, instant in enumerate(instants[:1_000])
        ]
        bodies = [b"batch %d" % number for number in range(len(instants) - 1_000)]
        await producer.send_batch(SUBJECT, bodies, np.array(instants[1_000:]))
        await asyncio.gather(*singles)


async def consume(meta: str, expected: int, seen: Seen) -> None:
    """Take messages until all that are due have come."""
    end = time.monotonic() + WAIT_S
    async with AsyncConsumer(meta, SUBJECT, "demo") as consumer:
        while len(seen.bodies) < expected and time.monotonic() < end:
            batch = await consumer.pull(wait=timedelta(seconds=1))
            now_ms = time.time() * 1000
            for body in batch.bodies:
                seen.bodies[body] = seen.bodies.get(body, 0) + 1
            seen.early += int((batch.deliver_at_ms > now_ms).sum())
            if len(batch):
                await batch.ack()


def show(seen: Seen, report: AuditReport) -> int:
    """Print the books and the histogram: 0 when nothing is lost, early or twice."""
    expected, total = SOON + AT_ONCE + PAST_DUE, report.total
    missing = expected - len(seen.bodies)
    console.print("[bold]Consumer[/]")
    console.print(f"  delivered {len(seen.bodies):,}, missing {missing}, early {seen.early}, twice {seen.repeated}")
    console.print("[bold]Audit of the logs[/] (schedule, dispatch and realtime, compared message by message)")
    console.print(f"  {total.equation}")
    console.print(f"  lost {total.lost}, early {total.early}, duplicate {total.duplicate}, orphan {total.orphan}")
    for found in report.findings:
        console.print(f"  {found.kind.name} message {found.sequence} of {found.subject}: {found.detail}")
    if report.findings_count > len(report.findings):
        console.print(f"  and {report.findings_count - len(report.findings):,} more")
    histogram(total.lateness)
    console.print(f"  p50 {total.late_ms(0.5)} ms, p99 {total.late_ms(0.99)} ms, max {total.late_ms_max} ms (the kill)")
    # The servers' files are gone when this ends; the page stays.
    page = Path(tempfile.mkdtemp(prefix="delayd-audit-"), "audit.html")
    page.write_text(audit_page(report), encoding="utf-8")
    console.print(f"  the same as a page for your browser: {page.as_uri()}", soft_wrap=True)
    books = total.scheduled == 20_000 and total.dispatched == expected and report.balanced
    good = books and not (missing or seen.early or seen.repeated)
    console.print("[bold green]lost 0, early 0, duplicate 0[/]" if good else "[bold red]the books do not balance[/]")
    return 0 if good else 1


def histogram(counts: "np.typing.NDArray[np.int64]") -> None:
    """Print how late messages were handed over, of those not past due when they were sent."""
    console.print("[bold]Lateness[/] (handed over, after due)")
    low = 0
    for high in (*STEPS_MS, 1 << 41):
        count = int(counts[(low <= LOWER_BOUNDS) & (high > LOWER_BOUNDS)].sum())
        if count:
            bar = "█" * max(1, round(BAR_WIDTH * count / max(1, int(counts.sum()))))
            upper = f"< {high:,} ms" if high <= STEPS_MS[-1] else f">= {low:,} ms"
            console.print(f"  {upper:>12} {count:>7,} {bar}")
        low = high


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
