"""Real servers that run the compiled pieces say so, and keep every promise; their clients here run the twins."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from tests.compiled import build_kernel
from tests.unit.cli.runner import run
from tests.waiting import wait_until

from .torture import Plan, torture
from .up_process import Up, up

MESSAGES = 120
COMPILED = "compiled 3"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start from now on find the compiled pieces."""
    folder = tmp_path / "kernel"
    folder.mkdir()
    build_kernel(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("DELAYD_KERNEL", raising=False)


@pytest.fixture
def servers(tmp_path: Path, compiled: None) -> Iterator[Up]:
    with up(tmp_path, "--port", "0") as running:
        yield running.until_ready()


def told(servers: Up) -> set[str]:
    """What the servers say that they run."""
    found = json.loads(run("status", "--meta", servers.meta, "--format", "json").out)
    return {each["kernel"] for each in found["servers"] if not each["fault"]}


def test_servers_with_the_compiled_pieces_say_so_and_lose_nothing_when_killed(servers: Up) -> None:
    wait_until(lambda: len(json.loads(run("status", "--meta", servers.meta, "--format", "json").out)["servers"]) == 3)
    assert told(servers) == {COMPILED}
    assert f"kernel {COMPILED}" in run("status", "--meta", servers.meta).out
    bodies = [bytes([number]) * (number % 40) for number in range(MESSAGES)]
    with delayd.Producer(servers.meta) as producer:
        for number, body in enumerate(bodies[: MESSAGES // 2]):
            headers, key = ({"n": b"1"} if number & 1 else None), (f"k{number}" if number & 2 else None)
            tags = ["some"] if number & 4 else None
            producer.send("s", body, delay=timedelta(seconds=1), headers=headers, key=key, tags=tags)
        producer.send_batch("s", bodies[MESSAGES // 2 :], delay=timedelta(seconds=1))
        servers.kill("delay")
    came: list[bytes] = []
    with delayd.Consumer(servers.meta, "s", group="g") as consumer:
        while len(came) < MESSAGES:
            pulled = consumer.pull(wait=timedelta(seconds=20))
            came += pulled.bodies
            pulled.ack()
        consumer.flush()
    assert sorted(came) == sorted(bodies)
    assert run("audit", "--data", str(servers.data)).code == 0


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_torture_of_servers_with_the_compiled_pieces_breaks_no_promise(tmp_path: Path, compiled: None) -> None:
    lines: list[str] = []
    kinds = ("one", "two", "all", "terminated", "cut")
    result = torture(tmp_path / "data", Plan(rounds=4, seed=29, kinds=kinds), lines.append)
    assert not result.ledger.violations, "\n".join([*lines, *result.ledger.violations])
