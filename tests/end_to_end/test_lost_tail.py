"""A realtime server that comes back without something that it had acknowledged (rule H7)."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from delayd.client.sync_consumer import Consumer
from delayd.client.sync_producer import Producer

from .processes import ServerProcess
from .test_hung_server import DEADLINE_S, pull_all


def test_rule_H7_an_acknowledged_message_that_a_restart_cut_off_raises_the_alarm(tmp_path: Path) -> None:
    with (
        ServerProcess("meta", tmp_path, {"lease_ms": 60_000}) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address}) as realtime,
        ServerProcess("delay", tmp_path, {"meta": meta.address}) as delay_process,
        Producer(meta.address) as producer,
        Consumer(meta.address, "one", "g") as consumer,
    ):
        for body in (b"first", b"the last one"):
            producer.send("one", body, delay=timedelta(0))
            assert pull_all(consumer, 1) == {body: 1}
        realtime.kill()
        # The last group has no later one that proves it durable, so its damage looks like a torn tail.
        with (tmp_path / "realtime/message/00000000000000000000.log").open("r+b") as file:
            file.seek(file.read().index(b"the last one"))
            file.write(b"T")
        realtime.start()
        deadline = time.monotonic() + DEADLINE_S
        while "target_refused" not in delay_process.log:
            assert time.monotonic() < deadline, delay_process.log
            time.sleep(0.02)
        assert "has lost data" in delay_process.log
