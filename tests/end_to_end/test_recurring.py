"""Recurring schedules of real servers: each occurrence happens once, whatever is killed (docs/recurring.md)."""

from __future__ import annotations

import random
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import delayd
from delayd.reading.books import audit_directory
from tests.end_to_end.cluster import cluster
from tests.waiting import wait_until

NAMES = ("one", "two", "three")
SECOND = timedelta(seconds=1)
KILLS = 5


class Took:
    """What a consumer got: how often each occurrence of each schedule."""

    def __init__(self, consumer: delayd.Consumer) -> None:
        self._consumer = consumer
        self.found: Counter[tuple[str, float]] = Counter()

    def until(self, count: int, what: str, name: str = "") -> None:
        """Pull until so many occurrences came, or so many of one schedule."""

        def came() -> bool:
            for message in self._consumer.pull(100, wait=timedelta(seconds=0.2)):
                assert message.schedule is not None and message.occurrence is not None
                self.found[message.schedule, message.occurrence.timestamp()] += 1
                message.ack()
            return len([each for each, _ in self.found if each == name or not name]) >= count

        wait_until(came, what)

    def instants(self, name: str) -> list[float]:
        return sorted(instant for each, instant in self.found if each == name)


def test_each_occurrence_comes_once_though_the_delay_server_is_killed_again_and_again(tmp_path: Path) -> None:
    chance = random.Random(7)
    with cluster(tmp_path) as servers:
        address = servers.meta.address
        with delayd.Producer(address) as producer, delayd.Consumer(address, "tick", group="g") as consumer:
            took = Took(consumer)
            for name in NAMES:
                producer.recurring(name, "tick", b"body", every=SECOND, misfire="all")
            for _ in range(KILLS):
                took.until(len(took.found) + 3 * chance.randrange(1, 4), "occurrences come")
                servers.delay.kill()
                servers.delay.start()
            took.until(len(took.found) + 6, "occurrences come after the last kill")
            for name in NAMES:
                info = producer.pause_recurring(name, "it is over")
                assert info.skipped == {}
                took.until(info.sent, f"all of {name} have come", name)
        servers.delay.terminate()
        report = audit_directory(str(tmp_path), now_ms=time.time_ns() // 1_000_000)
        assert report.balanced
    for name in NAMES:
        instants = took.instants(name)
        assert [took.found[name, instant] for instant in instants] == [1] * len(instants), "no occurrence came twice"
        assert instants == [instants[0] + number for number in range(len(instants))], "no occurrence is missing"
