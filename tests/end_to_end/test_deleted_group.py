"""A group is deleted while its consumers run: nobody ends, and they get messages again (docs/consuming.md, Groups)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

import delayd
from tests.end_to_end.up_process import Up, up
from tests.waiting import DEADLINE_S, wait_until

NOW = timedelta(0)
LONG = timedelta(seconds=DEADLINE_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("up"), "--port", "0") as found:
        yield found


def _delete(running: Up, subject: str, group: str) -> None:
    words = ["groups", "delete", subject, group, "--yes", "--data", str(running.data), "--meta", running.meta]
    subprocess.run([sys.executable, "-m", "delayd", *words], check=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("what", ["one.a", ["list.a", "list.b"], "pattern.*"])
def test_a_consumer_goes_on(running: Up, what: str | list[str]) -> None:
    subject = f"{(what if isinstance(what, str) else what[0]).split('.')[0]}.a"
    with delayd.Producer(running.meta) as producer, delayd.Consumer(running.meta, what, "g") as consumer:
        producer.send(subject, b"before", delay=NOW)
        consumer.pull(1, wait=LONG).ack()
        _delete(running, subject, "g")
        producer.send(subject, b"after", delay=NOW)
        bodies: list[bytes] = []

        def came() -> bool:
            batch = consumer.pull(wait=LONG)
            batch.ack()
            bodies.extend(batch.bodies)
            return b"after" in bodies

        wait_until(came)


def test_a_worker_goes_on_with_all_its_handlers(running: Up) -> None:
    worker = delayd.Worker(running.meta)
    seen: list[tuple[str, bytes]] = []
    for subject in ("of.one", "of.other"):
        worker.on(subject, group="g")(lambda body, subject=subject: seen.append((subject, body)))
    serving = threading.Thread(target=worker.run)
    serving.start()
    try:
        with delayd.Producer(running.meta) as producer:
            producer.send("of.one", b"before", delay=NOW)
            wait_until(lambda: ("of.one", b"before") in seen)
            _delete(running, "of.one", "g")
            for subject in ("of.one", "of.other"):
                producer.send(subject, b"after", delay=NOW)
            wait_until(lambda: {("of.one", b"after"), ("of.other", b"after")} <= set(seen))
            assert serving.is_alive()
    finally:
        worker.stop()
        serving.join()
