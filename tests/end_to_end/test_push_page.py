"""What docs/push.md has to try out, as it stands: a receiver that checks signatures, and commands on one machine."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.gateways import serving
from tests.end_to_end.up_process import up
from tests.waiting import DEADLINE_S, wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "push.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
PORT = "9000"


def test_the_receiver_of_the_page_gets_what_its_commands_send(tmp_path: Path) -> None:
    ((first, gateway, *commands),) = [block.splitlines() for _, block in BLOCKS if "hook.py" in block]
    assert first == "delayd up --data ./data --no-gateway &"
    port = _free_port()
    (receiver,) = [block for language, block in BLOCKS if language == "python"]
    (tmp_path / "hook.py").write_text(receiver.replace(PORT, port))
    got = tmp_path / "got"
    with up(tmp_path, "--port", "0") as running:
        words = shlex.split(gateway.removesuffix("&"))[1:]
        with serving(tmp_path, *_here(words, tmp_path), "--meta", running.meta), got.open("w") as out:
            key, hook = "", None
            try:
                for command in commands:
                    words = shlex.split(command.removesuffix("&").replace(PORT, port).replace("whsec_…", key))
                    if words[0] == "python":
                        hook = subprocess.Popen([sys.executable, *words[1:]], cwd=tmp_path, stdout=out)
                        wait_until(lambda: _listens(port), "the receiver listens")
                        continue
                    done = subprocess.run(
                        [sys.executable, "-m", "delayd", *_here(words[1:], tmp_path), "--meta", running.meta],
                        capture_output=True,
                        text=True,
                        timeout=DEADLINE_S,
                        check=False,
                    )
                    assert done.returncode == 0, done.stdout + done.stderr
                    key = key or re.findall(r"whsec_\S+", done.stdout)[0]
                wait_until(
                    lambda: "b'{\"order\": 42}'" in got.read_text(), lambda: f"the message came: {got.read_text()}"
                )
                assert got.read_text().startswith("msg_test_")
            finally:
                if hook is not None:
                    hook.kill()
                    hook.wait()


def _here(words: list[str], folder: Path) -> list[str]:
    return [str(folder / "data") if word == "./data" else word for word in words]


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def _listens(port: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(port)), 1.0).close()
    except OSError:
        return False
    return True
