"""Programs that serve HTTP, as processes of their own, and programs that speak HTTP to them."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

Json = dict[str, object]
JSON = {"content-type": "application/json"}
LINES = {"content-type": "application/x-ndjson"}
LIMIT_S = 30.0


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        found: Json = json.loads(self.body)
        return found

    @property
    def lines(self) -> list[Json]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def code(self) -> str:
        assert self.headers["content-type"] == "application/problem+json"
        assert self.json["status"] == self.status
        return str(self.json["code"])


class Gateway:
    """A process that serves HTTP; ``words`` are those behind ``delayd``."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._err = folder / f"gateway-{time.monotonic_ns()}.err"
        with self._err.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "delayd", *words, "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline().split()
        assert ready[:2] == ["ready", words[0]], self._err.read_text()
        self.port = int(ready[2].rpartition(":")[2])

    @property
    def log(self) -> str:
        return self._err.read_text()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | Json | list[Json] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            if body is not None and not isinstance(body, bytes):
                body, headers = json.dumps(body).encode(), {**JSON, **(headers or {})}
            line.request(method, path, body, dict(headers or {}))
            answer = line.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            line.close()

    def pull(self, subject: str, group: str = "g", **wish: int) -> list[Json]:
        answer = self.ask("POST", f"/v1/subjects/{subject}/groups/{group}/pull", {"wait_ms": 10_000, **wish})
        assert answer.status == 200, answer
        found = answer.json["messages"]
        assert isinstance(found, list)
        return found

    def say(self, word: str, *leases: object, **more: object) -> list[Json]:
        answer = self.ask("POST", f"/v1/leases/{word}", {"leases": list(leases), **more})
        assert answer.status == 200, answer
        found = answer.json["results"]
        assert isinstance(found, list)
        return found

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(LIMIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def gateway_of(meta: str, folder: Path, *options: str) -> Iterator[Gateway]:
    with serving(folder, "gateway", "--meta", meta, *options) as gateway:
        yield gateway


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[Gateway]:
    gateway = Gateway(folder, *words)
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.stop(signal.SIGKILL)
