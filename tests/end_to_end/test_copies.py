"""Copies and backups of directories, with real processes: production goes on, and nobody acts twice (rules H7, H8)."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest

import delayd
from delayd.batch import ProducerPart
from delayd.config import Value, parse_address
from delayd.errors import DelaydError
from delayd.net.connection import connect
from delayd.wire.requests import RequestType, need_maps
from tests.delay_outside import encode_wanted
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
        """So many messages, or those that came within the time."""
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


def copy_of(data: Path, role: str, target: Path) -> None:
    """What `cp -a` of one server's folder leaves."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(data / role, target / role, dirs_exist_ok=True)


@pytest.mark.parametrize("role", ["delay", "realtime"])
def test_rule_H8_a_copy_that_starts_beside_production_harms_nobody_and_serves_nobody(tmp_path: Path, role: str) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "copy"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        before = json.loads(command("servers", "--meta", production.meta.address, "--format", "json"))
        copy_of(data, role, elsewhere)
        with ServerProcess(role, elsewhere, {"meta": production.meta.address}) as copy:
            logged(copy, "code=fenced_instance")
            assert f"{role} server" in copy.log and "nothing_is_served_until=" in copy.log
            if role == "delay":
                with pytest.raises(DelaydError, match="may not serve"):
                    _send_to(copy.address)
            production.send("2", "3")
            assert production.consumed(2) == ["2", "3"]
            # Also when production is away for longer than a lease, the copy does not take its place.
            server = getattr(production, role)
            server.kill()
            time.sleep(LEASE_MS / 1000 + 0.5)
            server.start()
            production.send("4")
            assert production.consumed(1) == ["4"]
            after = json.loads(command("servers", "--meta", production.meta.address, "--format", "json"))
        assert [row["address"] for row in before] == [row["address"] for row in after]
        for server in (production.delay, production.realtime):
            assert "fenced" not in server.log and "target_refused" not in server.log


def test_a_directory_that_was_moved_serves_when_meta_has_taken_it(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "moved"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        assert production.delay.terminate() == 0
        copy_of(data, "delay", elsewhere)
        shutil.rmtree(data / "delay")
        with ServerProcess("delay", elsewhere, {"meta": production.meta.address}) as moved:
            production.send("2")
            assert production.consumed(1) == ["2"]
            logged(moved, "unfenced by=meta serves=yes")


def test_rule_H8_a_restarted_server_goes_on_while_meta_is_away(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        production.meta.kill()
        production.delay.kill()
        production.delay.start()
        _send_to(production.delay.address, "2")
        production.meta.start()
        assert production.consumed(1) == ["2"]


def _send_to(address: str, body: str = "x") -> None:
    """Give a delay server a message without asking meta for it."""

    async def send() -> None:
        connection = await connect(*parse_address(address))
        try:
            data = encode_wanted([(time.time_ns() // 1_000_000, b"s", body.encode())], ProducerPart(77, 1, 1))
            answer = await connection.request(RequestType.SEND, {}, [data], 10_000)
            (result,) = need_maps(answer.head, "results")
            if "error" in result:
                raise DelaydError(str(result["message"]))
        finally:
            connection.close()
            await connection.closed

    asyncio.run(send())
