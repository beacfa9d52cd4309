"""A realtime server that comes back without something that it had acknowledged (rule H7)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from delayd import Consumer, Producer
from tests.waiting import wait_until

from .cluster import logged
from .processes import ServerProcess
from .pulling import pull_all


def test_rule_H7_an_acknowledged_message_that_a_restart_cut_off_raises_the_alarm(tmp_path: Path) -> None:
    with (
        ServerProcess("meta", tmp_path, {"lease_ms": 60_000}) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address}) as realtime,
        ServerProcess("delay", tmp_path, {"meta": meta.address}) as delay_process,
        Producer(meta.address) as producer,
        Consumer(meta.address, "one", "g") as consumer,
    ):
        producer.send("one", b"first", delay=timedelta(0))
        assert pull_all(consumer, 1) == {b"first": 1}
        noted = _outcome_bytes(tmp_path)
        # Nobody pulls this one: what was pulled and is gone keeps the server from starting (test_log_files.py).
        producer.send("one", b"the last one", delay=timedelta(0))
        wait_until(lambda: _outcome_bytes(tmp_path) > noted, lambda: delay_process.log)
        realtime.kill()
        # The last group has no later one that proves it durable, so its damage looks like a torn tail.
        with (tmp_path / "realtime/message/00000000000000000000.log").open("r+b") as file:
            file.seek(file.read().index(b"the last one"))
            file.write(b"T")
        realtime.start()
        logged(delay_process, "target_refused")
        assert "has lost data" in delay_process.log


def _outcome_bytes(data: Path) -> int:
    return sum(path.stat().st_size for path in (data / "delay/dispatch").rglob("*.log"))
