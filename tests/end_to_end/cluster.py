"""Three servers in one directory as processes, and the commands of their operator."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import delayd
from delayd.config import Value
from tests.end_to_end.processes import ServerProcess

LEASE_MS = 1_500
META: dict[str, Value] = {"heartbeat_ms": 100, "lease_ms": LEASE_MS}
DEADLINE_S = 30.0


class Cluster(NamedTuple):
    """Three servers in one directory."""

    data: Path
    meta: ServerProcess
    delay: ServerProcess
    realtime: ServerProcess

    def send(self, *bodies: str, subject: str = "s", timeout_ms: float = 10_000) -> None:
        with delayd.Producer(self.meta.address, timeout_ms=timeout_ms) as producer:
            for body in bodies:
                producer.send(subject, body.encode(), delay=timedelta(0))

    def consumed(self, count: int, subject: str = "s", within_s: float = DEADLINE_S) -> list[str]:
        """The first ``count`` messages, or those that came within the time."""
        found: list[str] = []
        deadline = time.monotonic() + within_s
        with delayd.Consumer(self.meta.address, subject, group="g") as consumer:
            while len(found) < count and time.monotonic() < deadline:
                batch = consumer.pull(100, wait=timedelta(seconds=0.2))
                found += [bytes(body).decode() for body in batch.bodies]
                batch.ack()
        return found


@contextmanager
def cluster(data: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", data, META))
        delay = stack.enter_context(ServerProcess("delay", data, {"meta": meta.address}))
        realtime = stack.enter_context(ServerProcess("realtime", data, {"meta": meta.address}))
        yield Cluster(data, meta, delay, realtime)


def command(*words: str) -> str:
    """Run a command of an operator; what it says."""
    ran = subprocess.run([sys.executable, "-m", "delayd", *words], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, f"{words}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def logged(server: ServerProcess, words: str, within_s: float = DEADLINE_S) -> None:
    """Wait until a server has logged some words."""
    deadline = time.monotonic() + within_s
    while words not in server.log:
        assert time.monotonic() < deadline, f"never logged {words!r}:\n{server.log[-3_000:]}"
        time.sleep(0.02)


def alarm_of(production: Cluster) -> str:
    """The alarm of the one target, once there is one."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        rows = json.loads(command("target", "list", "--meta", production.meta.address, "--format", "json"))
        alarms = [str(row["alarm"]) for row in rows if row["alarm"]]
        if alarms:
            return alarms[0]
        time.sleep(0.1)
    raise AssertionError("no alarm was raised")


def decide(production: Cluster, *words: str) -> str:
    options = ("--meta", production.meta.address, "--data", str(production.data), "--yes")
    return command(*words, *options)


def log_id_of(production: Cluster, role: str) -> str:
    listed = command("servers", "--meta", production.meta.address, "--role", role, "--format", "json")
    (row,) = json.loads(listed)
    return str(row["log_id"])


def _target_with_alarm(production: Cluster) -> str:
    alarm_of(production)
    rows = json.loads(command("target", "list", "--meta", production.meta.address, "--format", "json"))
    return str(next(row["target_log_id"] for row in rows if row["alarm"]))
