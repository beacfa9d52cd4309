"""What the supervisor reads of its servers and tells them."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from cli.child import Child, OnChild, Ready, parse_ready
from cli.lines import LineWriter
from cli.supervisor import address_from_here
from delayd.config import parse_address


def test_a_ready_line_names_role_address_and_process() -> None:
    assert parse_ready("ready delay 127.0.0.1:7401 pid=42") == Ready("delay", "127.0.0.1", 7401, 42)
    assert parse_ready("ready meta ::1:7400 pid=7") == Ready("meta", "::1", 7400, 7)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ready",
        "ready delay",
        "ready delay 127.0.0.1 pid=1",
        "ready delay h:x pid=1",
        "ready delay h:1 pid=x",
        "a b c d",
    ],
)
def test_any_other_line_is_none(line: str) -> None:
    assert parse_ready(line) is None


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:7400"),
        ("0.0.0.0", "127.0.0.1:7400"),
        ("::", "[::1]:7400"),
        ("::1", "[::1]:7400"),
        ("meta.internal", "meta.internal:7400"),
    ],
)
def test_a_server_that_listens_everywhere_is_reached_on_this_machine(host: str, address: str) -> None:
    assert address_from_here(host, 7400) == address
    parse_address(address)


def runs(child: Child) -> bool:
    """Whether it runs now: it may be otherwise a moment later."""
    return child.runs


def test_a_child_that_has_ended_does_not_run_though_no_turn_of_the_loop_has_told_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = Child(
            "meta",
            lambda _: [sys.executable, "-c", "print('ready meta h:1 pid=1', flush=True); input()"],
            lambda _: None,
            LineWriter(errors.fileno()),
            OnChild(lambda _: None, lambda _: ready.set(), lambda _: None, lambda *_: None),
        )
        assert not runs(child)
        task = asyncio.create_task(child.keep())
        await asyncio.wait_for(ready.wait(), 30)
        assert runs(child) and child._process is not None
        os.kill(child._process.pid, signal.SIGKILL)
        # The loop gets no turn here.
        deadline = time.monotonic() + 30
        while runs(child):
            assert time.monotonic() < deadline
        assert not task.done()
        child.stop()
        assert await task == -signal.SIGKILL

    with (tmp_path / "errors").open("wb") as errors:
        ready = asyncio.Event()
        asyncio.run(scenario())
