"""An exclusive worker whose handlers all hang lets another one lead."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import pytest

import delayd
from delayd.testing import InMemoryBroker
from tests.waiting import DEADLINE_S, wait_until

WINDOW = timedelta(seconds=1)


def test_a_worker_without_a_slot_gives_its_lead_up_after_the_window(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, bytes]] = []
    hang = threading.Event()

    def worker_of(number: int, address: str) -> delayd.Worker:
        worker = delayd.Worker(address, drain=timedelta(0))

        @worker.on("s", group="g", concurrency=2, exclusive=WINDOW, time_limit=timedelta(seconds=0.1))
        def handle(body: bytes) -> None:
            seen.append((number, body))
            if number == 1:
                hang.wait(DEADLINE_S)

        return worker

    with InMemoryBroker(tick=True) as broker, broker.producer() as producer, caplog.at_level(logging.ERROR):
        workers = [worker_of(number, broker.address) for number in (1, 2)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        try:
            threads[0].start()
            producer.send("s", b"1", delay=timedelta(0))
            wait_until(lambda: seen == [(1, b"1")])
            threads[1].start()
            producer.send("s", b"2", delay=timedelta(0))
            # One of two slots is lost: the lead stays where it is.
            wait_until(lambda: (1, b"2") in seen)
            producer.send("s", b"3", delay=timedelta(0))
            wait_until(lambda: (2, b"3") in seen)
        finally:
            hang.set()
            for worker, thread in zip(workers, threads, strict=True):
                worker.stop()
                if thread.ident is not None:
                    thread.join()
    assert (1, b"3") not in seen
    assert [record.message for record in caplog.records if record.message.startswith("lead_given_up")] == [
        "lead_given_up subject=s group=g lost=2"
    ]
