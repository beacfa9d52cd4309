"""Due messages are POSTed to URLs, signed, and acknowledged by a 2xx (docs/push.md)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from standardwebhooks import Webhook

import delayd
from delayd.secret import SECRET_FILE
from tests.end_to_end.gateways import Gateway, Json, gateway_of
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.receivers import Receiver, receiver
from tests.waiting import wait_until

NOW = timedelta(0)
CLI_LIMIT_S = 60.0


class Cluster(NamedTuple):
    meta: str
    gateway: Gateway
    folder: Path

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command of `delayd push`; what it prints."""
        asked = ["push", *words, "--meta", self.meta, "--data", str(self.folder)]
        done = subprocess.run(
            [sys.executable, "-m", "delayd", *asked], capture_output=True, text=True, timeout=CLI_LIMIT_S
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def create(self, subject: str, url: str, **terms: object) -> str:
        """Create a target of the subject's name; its key."""
        made = self.gateway.ask("POST", "/v1/push", {"name": subject, "subject": subject, "url": url, **terms})
        assert made.status == 201, made
        return str(made.json["key"])

    def send(self, subject: str, *bodies: bytes, headers: dict[str, str] | None = None) -> list[delayd.Receipt]:
        with delayd.Producer(self.meta) as producer:
            return [producer.send(subject, body, delay=NOW, headers=headers) for body in bodies]

    def view(self, name: str) -> Json:
        found = self.gateway.ask("GET", f"/v1/push/{name}")
        assert found.status == 200, found
        return found.json

    def dead(self, subject: str) -> list[tuple[str, str]]:
        """Reason and error of the dead letters of the target of a subject."""
        with delayd.Admin(self.meta) as admin:
            pages = admin.dead_letters(subject, f"push/{subject}")
            return [(letter.reason, letter.error) for page in pages for letter in page]

    def waiting(self, subject: str) -> int:
        """Messages of the subject that the group of its target has not acknowledged."""
        with delayd.Admin(self.meta) as admin:
            (group,) = [each for each in admin.groups(subject) if each.group == f"push/{subject}"]
        return group.waiting + group.info.outstanding + group.info.redelivering + group.info.leaving


def secret_of(folder: Path) -> tuple[str, str]:
    return "--secret-file", str(folder / SECRET_FILE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("push")
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": meta.address}))
        gateway = stack.enter_context(gateway_of(meta.address, folder, "--allow-private", *secret_of(folder)))
        yield Cluster(meta.address, gateway, folder)
        assert gateway.stop() == 0
        assert " ERROR " not in gateway.log, gateway.log


@pytest.fixture
def web() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


def test_a_due_message_is_posted_signed_and_acknowledged(cluster: Cluster, web: Receiver) -> None:
    told = cluster.run("create", "first.paid", f"{web.url}/hook?a=1")
    key = told.split()[-1]
    assert key.startswith("whsec_")
    with delayd.Producer(cluster.meta) as producer:
        receipt = producer.send(
            "first.paid",
            b'{"order": 42}',
            delay=timedelta(milliseconds=300),
            key="order 42",
            headers={"content-type": "application/vnd.order+json", "x-team": "billing", "traceparent": "00-1-2-01"},
        )
    (post,) = web.wait(1)
    assert post.at * 1_000 >= receipt.deliver_at_ms
    assert (post.path, post.body) == ("/hook?a=1", b'{"order": 42}')
    assert Webhook(key).verify(post.body, dict(post.headers)) == {"order": 42}
    assert post.id == f"msg_{receipt.log_id:016x}_{receipt.sequence}"
    for name, value in {
        "content-type": "application/vnd.order+json",
        "delayd-subject": "first.paid",
        "delayd-attempt": "1",
        "delayd-key": "order%2042",
        "delayd-header-x-team": "billing",
        "traceparent": "00-1-2-01",
    }.items():
        assert post.headers[name] == value
    wait_until(lambda: cluster.waiting("first.paid") == 0, "the message is acknowledged")
    assert len(web.posts) == 1
