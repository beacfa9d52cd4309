"""The commands of docs/security.md, run as they stand: an authority, servers with TLS, a token."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.end_to_end.up_process import watched

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)
# What a reader has to fill in: the token that was printed is the next command's.
UNTIL = "export DELAYD_TOKEN"
LIMIT_S = 60


@pytest.mark.skipif(shutil.which("openssl") is None, reason="this machine has no openssl")
@pytest.mark.parametrize(
    ("start", "answer"),
    [
        ("delayd up --data /var/lib/delayd --tls-cert", "all is well"),
        ("delayd up --data /var/lib/delayd --host 10.0.0.5 --require-token", "dlyd_"),
    ],
    ids=["TLS", "tokens"],
)
def test_the_commands_of_the_page_make_servers_with_certificates_of_their_own(
    tmp_path: Path, start: str, answer: str
) -> None:
    _shell(tmp_path, *(line for block in BLOCKS if "openssl req" in block for line in block.splitlines()))
    ((first, *others),) = [_here(block, tmp_path).splitlines() for block in BLOCKS if block.startswith(start)]
    words = shlex.split(first.removesuffix("&"))[1:]
    command = [sys.executable, "-m", "delayd", *words, "--port", "0", "--no-gateway"]
    (tmp_path / "data").mkdir()
    with watched(command, tmp_path, cwd=tmp_path) as running:
        running.until(lambda: running.errors.count(" registered ") == 2, "both servers are known to meta")
        typed = [line.replace("127.0.0.1:7400", running.meta) for line in others]
        typed = typed[: next((at for at, line in enumerate(typed) if line.startswith(UNTIL)), len(typed))]
        assert answer in _shell(tmp_path, *typed)


def _here(block: str, folder: Path) -> str:
    return block.replace("/var/lib/delayd", str(folder / "data")).replace("10.0.0.5", "127.0.0.1")


def _shell(folder: Path, *lines: str) -> str:
    """What these lines write, typed where ``delayd`` is on the path."""
    delayd: Sequence[str] = (sys.executable, "-m", "delayd")
    script = "\n".join(["set -e", f'delayd() {{ {shlex.join(delayd)} "$@"; }}', *lines, ""])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DELAYD_")}
    done = subprocess.run(
        ["sh"], input=script, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
