"""Three servers in one directory as processes, and the commands of their operator."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import lmdb

import delayd
from delayd.config import Value
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.trials import Operator
from tests.unit.cli.runner import run
from tests.waiting import DEADLINE_S, wait_until

LEASE_MS = 1_500
META: dict[str, Value] = {"heartbeat_ms": 100, "lease_ms": LEASE_MS}
COMMAND_EVERY_S = 0.1  # Between two looks by a command, which asks all servers.


class Cluster(NamedTuple):
    """Three servers in one directory."""

    data: Path
    meta: ServerProcess
    delay: ServerProcess
    realtime: ServerProcess

    @property
    def operator(self) -> Operator:
        return Operator(self.meta.address, self.data)

    def send(self, *bodies: str, subject: str = "s") -> None:
        with delayd.Producer(self.meta.address) as producer:
            for body in bodies:
                producer.send(subject, body.encode(), delay=timedelta(0))

    def consumed(self, count: int, subject: str = "s", within_s: float = DEADLINE_S) -> list[str]:
        """The first ``count`` messages, or those that came within the time, sorted: no order of theirs is promised."""
        found: list[str] = []
        deadline = time.monotonic() + within_s
        with delayd.Consumer(self.meta.address, subject, group="g") as consumer:
            while len(found) < count and time.monotonic() < deadline:
                batch = consumer.pull(100, wait=timedelta(seconds=0.2))
                found += [bytes(body).decode() for body in batch.bodies]
                batch.ack()
        return sorted(found)


@contextmanager
def cluster(data: Path, lease_ms: int = LEASE_MS, **settings: Value) -> Iterator[Cluster]:
    """Start the servers; the settings are those of the delay and the realtime server."""
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", data, {**META, "lease_ms": lease_ms}))
        own = {"meta": meta.address, **settings}
        # One behind the other: when the second one is ready, meta has heard of the first one.
        delay = stack.enter_context(ServerProcess("delay", data, own))
        realtime = stack.enter_context(ServerProcess("realtime", data, own))
        yield Cluster(data, meta, delay, realtime)


def command(*words: str) -> str:
    """Run a command of an operator; what it says."""
    # In this process, for a new Python takes longer than most commands.
    ran = run(*words)
    assert ran.code == 0, f"{words}\n{ran.out}\n{ran.err}"
    return ran.out


def logged(server: ServerProcess, words: str, within_s: float = DEADLINE_S) -> None:
    """Wait until a server has logged some words."""
    wait_until(lambda: words in server.log, lambda: f"{words!r} is logged:\n{server.log[-3_000:]}", within_s)


def alarm_of(production: Cluster) -> str:
    """The alarm of the one target, once there is one."""
    return str(target_with_alarm(production)["alarm"])


def decide(production: Cluster, *words: str) -> str:
    options = ("--meta", production.meta.address, "--data", str(production.data), "--yes")
    return command(*words, *options)


def log_id_of(production: Cluster, role: str) -> str:
    listed = command("servers", "--meta", production.meta.address, "--role", role, "--format", "json")
    (row,) = json.loads(listed)
    return str(row["log_id"])


def until_away(production: Cluster, log_id: str) -> None:
    """Wait until a server that has ended is away for meta: its lease is over."""

    def is_away() -> bool:
        rows = json.loads(command("servers", "--meta", production.meta.address, "--format", "json"))
        return not next(row["alive"] for row in rows if row["log_id"] == log_id)

    wait_until(is_away, "its lease ends", every_s=COMMAND_EVERY_S)


def target_with_alarm(production: Cluster) -> Mapping[str, object]:
    """The row of the one target that has an alarm, once there is one."""

    def found() -> Mapping[str, object] | None:
        rows = json.loads(command("target", "list", "--meta", production.meta.address, "--format", "json"))
        return next((row for row in rows if row["alarm"]), None)

    row = wait_until(found, "a target has an alarm", every_s=COMMAND_EVERY_S)
    assert row is not None
    return row


def flip_value(folder: Path, prefix: bytes) -> None:
    """Turn bits of a stored value over: the only one whose key begins so."""
    with lmdb.open(str(folder / "state.lmdb")) as environment, environment.begin(write=True) as transaction:
        with transaction.cursor() as cursor:
            (pair,) = [(bytes(key), bytearray(value)) for key, value in cursor if key.startswith(prefix)]
        key, value = pair
        value[len(value) // 2] ^= 0xFF
        transaction.put(key, bytes(value))


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """A server that is stopped meanwhile, and started again."""
    assert server.terminate() == 0
    yield
    server.start()


def put_back(path: Path, whole: bytes) -> None:
    """Copy a file beside the damaged one, and rename it."""
    path.with_suffix(".copy").write_bytes(whole)
    path.with_suffix(".copy").rename(path)


def flip(path: Path, position: int) -> bytes:
    """Turn bits of a byte of a file over; the whole file of before."""
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[position] ^= 0xFF
    path.write_bytes(changed)
    return whole
