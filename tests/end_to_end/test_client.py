"""The clients against the real servers: what they promise holds through a crash, and the guide's examples run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from delayd import Consumer, Producer
from tests.end_to_end.up_process import up

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text() for name in ("admin.md", "clients.md"))
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
DEADLINE_S = 60.0


def test_the_examples_of_the_pages_run(tmp_path: Path) -> None:
    assert len(EXAMPLES) >= 11  # The pages still have their examples where this test looks for them.
    with up(tmp_path, "--port", "0") as running:
        meta = running.meta
        for example in EXAMPLES:
            program = example.replace("127.0.0.1:7400", meta)
            command = [sys.executable, "-W", "error", "-c", program]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
            assert ended.returncode == 0 and ended.stderr == "", f"{example}\n{ended.stdout}\n{ended.stderr}"
            # What there is none of is not shown as Python writes it.
            assert not re.search(r"^(\(\)|\[\]|\{\}|None)$", ended.stdout, re.MULTILINE), f"{example}\n{ended.stdout}"
        assert ended.stdout.startswith("b'a' {} 20")


@pytest.mark.parametrize("role", ["delay", "realtime", "meta"])
def test_every_message_comes_once_although_a_server_is_killed_in_the_middle(tmp_path: Path, role: str) -> None:
    with up(tmp_path, "--port", "0") as running:
        meta = running.meta
        received: dict[int, int] = {}
        with Producer(meta) as producer, Consumer(meta, "orders", "billing", lease=timedelta(seconds=2)) as consumer:
            now_ms = time.time_ns() // 1_000_000
            due_ms = now_ms + np.arange(4_000) // 2
            producer.send_batch("orders", [b"%d" % row for row in range(4_000)], due_ms)
            futures = []
            for row in range(4_000, 8_000):
                futures.append(producer.send_nowait("orders", b"%d" % row, deliver_at_ms=now_ms + (row - 4_000) // 2))
                if row == 6_000:
                    running.kill(role)
            producer.flush()
            assert len({future.result(timedelta(0)).sequence for future in futures}) == 4_000

            deadline = time.monotonic() + DEADLINE_S
            while len(received) < 8_000 and time.monotonic() < deadline:
                batch = consumer.pull(wait=timedelta(seconds=1))
                first_offers = batch.attempts == 1
                for body, first in zip(batch.bodies, first_offers.tolist(), strict=True):
                    received[int(body)] = received.get(int(body), 0) + first
                assert batch.late_ms.min(initial=0) >= 0, "a message came early"
                batch.ack(wait=False)
            consumer.flush() if role != "realtime" else None
        assert sorted(received) == list(range(8_000))
        assert max(received.values()) == 1
