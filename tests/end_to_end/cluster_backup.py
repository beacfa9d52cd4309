"""A cluster is cut at one moment beside traffic, and restored: what was lost, doubled or left over?

``python -m tests.end_to_end.cluster_backup --rounds 20`` starts meta, two delay and two realtime servers, each on a
directory of its own. Producers send to four subjects, with and without keys; consumers acknowledge, and give some
messages back, so that they wait at a delay server again. `delayd cut` has all directories copied meanwhile. Then all
servers are killed and restored from the copies, and started in an order that the round draws. Invariant: each message
that was safe before the cut comes, unless it was acknowledged before the cut; what was acknowledged before the cut does
not come again, and what was cancelled before it stays cancelled; none comes twice after the restore; no sequence is
given again; the audit of all directories has no finding.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import delayd
from delayd.config import Value
from tests.end_to_end.processes import ServerProcess, started
from tests.unit.cli.runner import run
from tests.waiting import DEADLINE_S, wait_until

META: dict[str, Value] = {"heartbeat_ms": 100, "lease_ms": 1_500}
NAMES = ("meta", "delay-1", "delay-2", "realtime-1", "realtime-2")
SUBJECTS = ("a", "b", "c", "d")
ROWS = 100  # Of one batch.
REJECTED_EVERY = 11  # Of the messages, so many are given back once.
LEASE = timedelta(seconds=6)  # What a consumer held when the cluster was cut comes again after it.
QUIET_S = 2.0  # When all has come and nothing more for so long, nothing comes twice.
AT_WORK_S = 0.3
BEFORE_S = 2.0
FAR = timedelta(hours=1)
CANCELLED_EVERY = 20  # Batches; then a message that is due in an hour is sent and cancelled.


@dataclass
class Traffic:
    """What a producer was told, and what consumers got and acknowledged; the numbers of messages."""

    meta: str
    rows_s: int
    sent: int = 0  # All below are safe.
    given: set[tuple[int, int]] = field(default_factory=set)  # The names that messages got.
    cancelled: list[tuple[str, delayd.Receipt]] = field(default_factory=list)
    acknowledged: dict[int, tuple[float, float]] = field(default_factory=dict)  # When this began, and was durable.
    rate: float = 0.0  # Messages a second, in the end.
    _end: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def goes_on(self) -> Iterator[None]:
        """Send and consume."""
        threads = [threading.Thread(target=self._send), threading.Thread(target=self._consume)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def send_more(self) -> set[tuple[int, int]]:
        """Send a batch to each subject; the names that its messages got."""
        names: set[tuple[int, int]] = set()
        with delayd.Producer(self.meta, timeout_ms=20_000) as producer:
            for subject in SUBJECTS:
                names |= names_of(producer.send_batch(subject, [b"0"] * ROWS, delay=FAR))
        return names

    def _send(self) -> None:
        begun = time.monotonic()
        with delayd.Producer(self.meta, timeout_ms=20_000) as producer:
            while not self._end.is_set():
                numbers = range(self.sent, self.sent + ROWS)
                bodies = [str(number).encode() for number in numbers]
                subject = SUBJECTS[self.sent // ROWS % len(SUBJECTS)]
                keys = [f"key-{number}" for number in numbers] if self.sent // ROWS % 3 == 0 else None
                self.given |= names_of(producer.send_batch(subject, bodies, delay=timedelta(seconds=1), keys=keys))
                if self.sent // ROWS % CANCELLED_EVERY == 0:
                    receipt = producer.send(subject, b"cancelled", delay=FAR)
                    self.given.add((receipt.log_id, receipt.sequence))
                    producer.cancel(subject, receipt=receipt)
                    self.cancelled.append((subject, receipt))
                self.sent += ROWS
                self._end.wait(max(0.0, begun + self.sent / self.rows_s - time.monotonic()))
        self.rate = self.sent / (time.monotonic() - begun)

    def _consume(self) -> None:
        # Delay servers hand nothing over while the cluster is cut. So that some are given back then, a handler works
        # on each of them for a while.
        at_work: list[tuple[float, delayd.Message]] = []
        with delayd.Consumer(self.meta, list(SUBJECTS), group="g", lease=LEASE) as consumer:
            while not self._end.is_set():
                batch = consumer.pull(500, wait=timedelta(milliseconds=20))
                while at_work and at_work[0][0] < time.monotonic():
                    at_work.pop(0)[1].nack(timedelta(seconds=2), wait=False)
                kept: list[int] = []
                for message in batch:
                    number = int(message.body)
                    if number % REJECTED_EVERY == 0 and message.attempt == 1:
                        at_work.append((time.monotonic() + AT_WORK_S, message))
                    else:
                        message.ack(wait=False)
                        kept.append(number)
                begun = time.monotonic()
                consumer.flush()
                self.acknowledged.update(dict.fromkeys(kept, (begun, time.monotonic())))


@dataclass
class Cluster:
    """Five servers."""

    folder: Path
    servers: dict[str, ServerProcess]

    def data(self, name: str) -> Path:
        """The directory of a server."""
        return self.folder / name

    @property
    def meta(self) -> str:
        """The address of meta."""
        return self.servers["meta"].address

    def serves(self) -> bool:
        """Whether all serve."""
        listed = run("servers", "--meta", self.meta, "--format", "json")
        return listed.code == 0 and listed.out.count('"serves"') == len(NAMES) - 1


@contextmanager
def open_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the servers, each on an empty directory."""
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder / "meta", META))
        own: dict[str, Value] = {"meta": meta.address, "secret_file": str(folder / "meta" / "cluster.secret")}
        servers = {"meta": meta}
        for name in NAMES[1:]:
            servers[name] = ServerProcess(name.partition("-")[0], folder / name, own)
        stack.enter_context(started(*(servers[name] for name in NAMES[1:])))
        cluster = Cluster(folder, servers)
        wait_until(cluster.serves, "all serve")
        yield cluster


def names_of(receipt: delayd.BatchReceipt) -> set[tuple[int, int]]:
    """The names of a batch's messages."""
    return set(zip(receipt.log_ids.tolist(), receipt.sequences.tolist(), strict=True))


def back_up(cluster: Cluster, copies: Path) -> float:
    """Copy all directories at one moment; when all servers had been cut, on the monotonic clock."""
    delayd_program = f"{shlex.quote(sys.executable)} -m delayd"
    secret = cluster.data("meta") / "cluster.secret"
    cut = cluster.folder / "cut"  # Is written when all are cut, before the first copy.
    words = [f"{shlex.quote(sys.executable)} -c 'import time; print(time.monotonic())' > {cut}"]
    words += [
        f"{delayd_program} backup {copies / name} --data {cluster.data(name)} --meta {cluster.meta} "
        f"--secret-file {secret} --cut"
        for name in NAMES
    ]
    ran = run("cut", "--meta", cluster.meta, "--secret-file", str(secret), "--", "sh", "-ec", "\n".join(words))
    assert ran.code == 0, ran.out + ran.err
    return float(cut.read_text())


def restore(cluster: Cluster, copies: Path, order: list[str]) -> None:
    """Kill all servers, put their copies in their places, and start them in an order."""
    for name in NAMES:
        cluster.servers[name].kill()
    for name in order:
        shutil.rmtree(cluster.data(name))
        ran = run("restore", str(copies / name), "--data", str(cluster.data(name)))
        assert ran.code == 0, ran.out + ran.err
    for name in order:
        cluster.servers[name].start()
    wait_until(cluster.serves, "all serve again", within_s=60)


def rest_of(cluster: Cluster, wanted: Set[int]) -> Counter[int]:
    """All messages that still come, each acknowledged: those that are wanted, and what comes beside them."""
    came: Counter[int] = Counter()
    with delayd.Consumer(cluster.meta, list(SUBJECTS), group="g") as consumer:
        last = time.monotonic()
        while time.monotonic() - last < (QUIET_S if wanted <= came.keys() else DEADLINE_S):
            batch = consumer.pull(500, wait=timedelta(seconds=0.2))
            came.update(int(body) for body in batch.bodies)
            if len(batch):
                batch.ack()
                last = time.monotonic()
    return came


def audited(cluster: Cluster) -> str:
    """What an audit of all directories says is wrong; empty when the books balance."""
    together = cluster.folder / "together"
    together.mkdir()
    for name in NAMES[1:]:
        (together / name).symlink_to(cluster.data(name) / name.partition("-")[0])
    ran = run("audit", "--data", str(together), "--grace", "0ms", "--late-limit", "10m")
    return "" if ran.code == 0 else ran.out + ran.err


def one_round(folder: Path, draw: Random, rows_s: int) -> tuple[float, list[str]]:
    """How many messages were sent a second, and what was wrong."""
    with open_cluster(folder) as cluster:
        traffic = Traffic(cluster.meta, rows_s)
        with traffic.goes_on():
            wait_until(lambda: traffic.sent > BEFORE_S * rows_s and bool(traffic.acknowledged), "messages are consumed")
            safe, cancelled, began = traffic.sent, list(traffic.cancelled), time.monotonic()
            all_cut = back_up(cluster, folder / "copies")
            acknowledged = dict(traffic.acknowledged)
            wait_until(lambda: traffic.sent > safe + ROWS, "the servers serve on")
        order = draw.sample(NAMES, len(NAMES))
        restore(cluster, folder / "copies", order)
        faults: list[str] = []
        with delayd.Producer(cluster.meta, timeout_ms=20_000) as producer:
            states = [producer.get(subject, receipt=receipt).state for subject, receipt in cancelled]
        if wrong := [state for state in states if state is not delayd.MessageState.CANCELLED]:
            faults.append(f"{len(wrong)} that were cancelled are {wrong[0].name}")
        done = {number for number, (begun, _) in acknowledged.items() if begun < all_cut}
        came = rest_of(cluster, set(range(safe)) - done)
        sure = {number for number, (_, durable) in acknowledged.items() if durable < began}
        doubled = [number for number, count in came.items() if count > 1]
        for what, numbers in (
            ("lost", set(range(safe)) - done - came.keys()),
            ("twice", set(doubled)),
            ("again though they were acknowledged", sure & came.keys()),
        ):
            faults += [f"{len(numbers)} {what}, such as {min(numbers)}"] if numbers else []
        if again := traffic.send_more() & traffic.given:
            faults.append(f"{len(again)} sequences given again")
        for name in NAMES[1:]:
            cluster.servers[name].terminate()
        wrong_books = audited(cluster)
        faults += [wrong_books] if wrong_books else []
        return traffic.rate, [f"restored in the order {' '.join(order)}: {fault}" for fault in faults]


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.cluster_backup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows-per-s", type=int, default=5_000)
    arguments = parser.parse_args()
    draw, wrong = Random(arguments.seed), 0
    for number in range(1, arguments.rounds + 1):
        with TemporaryDirectory() as folder:
            rate, faults = one_round(Path(folder), draw, arguments.rows_per_s)
        wrong += bool(faults)
        print(f"{number} at {rate:,.0f}/s:", *(faults or ["nothing lost, nothing twice, no finding"]), flush=True)
    print(f"{arguments.rounds} rounds, {wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
