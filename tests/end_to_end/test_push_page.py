"""What docs/push.md has to try out, as it stands: a receiver that checks signatures, and commands on one machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.end_to_end.up_process import up
from tests.receivers import receiver
from tests.waiting import DEADLINE_S, wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "push.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
HOOK_PORT, META_PORTS = "9000", 3


def test_the_receiver_of_the_page_gets_what_its_commands_send(tmp_path: Path) -> None:
    (block,) = [block for _, block in BLOCKS if "hook.py" in block]
    (program,) = [block for language, block in BLOCKS if language == "python"]
    port, hook_port = _free_ports(META_PORTS), _free_ports(1)
    (tmp_path / "hook.py").write_text(program.replace(HOOK_PORT, str(hook_port)))
    for command, words in (("delayd", "-m delayd "), ("python", "")):
        (tmp_path / command).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (tmp_path / command).chmod(0o755)
    # Nothing but the ports, which others may have taken, is not as the page has it.
    typed = block.replace("--no-gateway", f"--no-gateway --port {port}").replace(HOOK_PORT, str(hook_port))
    typed = typed.replace("--allow-private &", "--allow-private --port 0 &")
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DELAYD_META": f"127.0.0.1:{port}"}
    with (tmp_path / "said").open("wb") as said:
        shell = subprocess.Popen(
            ["bash", "-c", f"trap : TERM\n{typed}\nwait\nwait"],  # The signal ends the first one alone.
            cwd=tmp_path,
            env=os.environ | place,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    heard = tmp_path / "said"
    try:
        wait_until(lambda: "b'{\"order\": 42}'" in heard.read_text(), lambda: f"the message came: {heard.read_text()}")
        assert "msg_test_" in heard.read_text()
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(DEADLINE_S)


def test_the_gateway_of_up_serves_a_target_that_is_made_as_soon_as_up_is_ready(tmp_path: Path) -> None:
    with ExitStack() as stack:
        web = stack.enter_context(receiver())
        running = stack.enter_context(up(tmp_path, "--port", "0", "--gateway", "--gateway-allow-private")).until_ready()
        for words in (
            ("push", "create", "first", web.url, "--data", str(running.data)),
            ("send", "first", "x", "--in", "1s"),
        ):
            command = [sys.executable, "-m", "delayd", *words, "--meta", running.meta]
            subprocess.run(command, check=True, capture_output=True)
        assert [post.body for post in web.wait(1)] == [b"x"]


def _free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free."""
    while True:
        with ExitStack() as held:
            first: int = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for further in range(1, count):
                    held.enter_context(socket.create_server(("127.0.0.1", first + further)))
            except OSError:
                continue
            return first
