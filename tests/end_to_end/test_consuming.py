"""Consumers against the real servers: the examples of docs/consuming.md run, and many subjects survive a crash."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from delayd import Consumer, Producer
from tests.end_to_end.up_process import up
from tests.waiting import DEADLINE_S

PAGE = Path(__file__).parents[2] / "docs" / "consuming.md"
LEASE = timedelta(seconds=5)  # What was in an answer that the crash cut off comes again after it.
SUBJECTS = [f"s.{number}" for number in range(40)]


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert examples
    with up(tmp_path, "--port", "0") as running:
        for example in examples:
            command = [sys.executable, "-W", "error", "-c", example.replace("127.0.0.1:7400", running.meta)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
            assert ended.returncode == 0 and ended.stderr == "", f"{example}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.parametrize("subject", ["s.*", SUBJECTS], ids=["pattern", "list"])
def test_every_message_of_many_subjects_comes_although_the_server_is_killed(
    tmp_path: Path, subject: str | list[str]
) -> None:
    with up(tmp_path, "--port", "0") as running:
        received: dict[tuple[str, bytes], int] = {}
        with Producer(running.meta) as producer, Consumer(running.meta, subject, "g", lease=LEASE) as consumer:
            sent = [(name, b"%d" % number) for number in range(20) for name in SUBJECTS]
            for number, (name, body) in enumerate(sent):
                producer.send_nowait(name, body, delay=timedelta(milliseconds=number))
                if number == 400:
                    running.kill("realtime")
            producer.flush()
            deadline = time.monotonic() + DEADLINE_S
            while len(received) < len(sent) and time.monotonic() < deadline:
                batch = consumer.pull(wait=timedelta(seconds=1))
                firsts = (batch.attempts == 1).tolist()
                for name, body, first in zip(batch.subjects, batch.bodies, firsts, strict=True):
                    received[name, body] = received.get((name, body), 0) + first
                batch.ack(wait=False)
            consumer.flush()
            assert set(received) == set(sent)
            assert max(received.values()) == 1, "a message was offered for the first time more than once"
