"""Three servers in one directory as processes, and the commands of their operator."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import delayd
from cli.exits import NOT_BALANCED, OK
from delayd.config import Value
from delayd.waits import Wait, WaitKind
from tests.end_to_end.processes import ServerProcess
from tests.named_commands import commands_in
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
def cluster(data: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", data, META))
        delay = stack.enter_context(ServerProcess("delay", data, {"meta": meta.address}))
        realtime = stack.enter_context(ServerProcess("realtime", data, {"meta": meta.address}))
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


def do_as_status_says(production: Cluster, kind: WaitKind, words: str) -> str:
    """Run the command that begins with ``words`` of a state, as `delayd status` prints it; what it says.

    The state is gone afterwards.
    """
    wait = until_told(production.meta.address, kind)
    commands = [each for each in commands_in(wait.command) if " ".join(each).startswith(words)]
    assert commands, f"`delayd {words}` is not in {wait.command}"
    said = decide(production, *commands[0])
    until_gone(production.meta.address, kind)
    return said


def until_told(meta: str, kind: WaitKind) -> Wait:
    """Wait until `delayd status` tells of a state."""
    waits = wait_until(lambda: _told(meta, kind), f"status tells of {kind.name}", every_s=COMMAND_EVERY_S)
    assert waits is not None
    return waits[0]


def until_gone(meta: str, kind: WaitKind) -> None:
    """Wait until `delayd status` tells of a state no more."""
    wait_until(lambda: not _told(meta, kind), lambda: f"{_told(meta, kind)} is over", every_s=COMMAND_EVERY_S)


def _told(meta: str, kind: WaitKind) -> list[Wait]:
    """The lines of a state."""
    ran = run("status", "--meta", meta, "--format", "json")
    assert ran.code in (OK, NOT_BALANCED), ran.err
    waits = [Wait(each["what"], each["why"], each["command"]) for each in json.loads(ran.out)["waits"]]
    return [wait for wait in waits if all(map(_is_of, kind.value, (wait.what, wait.command)))]


def _is_of(template: str, text: str) -> bool:
    pattern = re.sub(r"\\\{\w+\\\}", ".*", re.escape(template))
    return re.fullmatch(pattern, text, re.DOTALL) is not None


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
