"""Servers that ask for tokens, and the commands of their operator."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.certificates import Authority
from tests.end_to_end.up_process import Up
from tests.waiting import DEADLINE_S


class Cluster:
    """Servers that ask for tokens, over TLS."""

    def __init__(self, running: Up, authority: Authority) -> None:
        self.running = running
        self.authority = authority
        self.address = f"delayds://{running.meta}?ca={authority.ca}"

    def command(self, *words: str, token: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DELAYD_META": self.address, "DELAYD_TOKEN": token}
        line = [sys.executable, "-m", "delayd", *words]
        return subprocess.run(
            line, capture_output=True, text=True, timeout=DEADLINE_S * 2, env=environment, check=False
        )

    def operator(self, *words: str) -> str:
        """What a command of somebody with the secret writes."""
        done = self.command(*words, "--data", str(self.running.data))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def token(self, name: str, *rights: str) -> str:
        """A new token, which all servers know."""
        before = self.running.errors.count("tokens_taken")
        text = self.operator("token", "create", name, *(word for right in rights for word in ("--allow", right)))
        self.running.until(lambda: self.running.errors.count("tokens_taken") >= before + 2, "both servers know it")
        return text
