"""Recurring schedules of real servers: each occurrence happens once, whatever is killed (docs/recurring.md)."""

from __future__ import annotations

import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import delayd
from delayd.machine.operating import WaitKind
from delayd.reading.books import audit_directory
from tests.end_to_end.cluster import cluster, command, logged
from tests.end_to_end.draining import open_fleet
from tests.end_to_end.older_copies import copy_of, restore
from tests.unit.cli.runner import run
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

    def check_each_once(self) -> None:
        """Each second of each schedule has come once."""
        for name in NAMES:
            instants = self.instants(name)
            assert [self.found[name, instant] for instant in instants] == [1] * len(instants), "one came twice"
            assert instants == [instants[0] + number for number in range(len(instants))], "one is missing"


def test_a_restored_delay_server_decides_no_occurrence_again(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as servers:
        address = servers.meta.address
        with delayd.Producer(address) as producer, delayd.Consumer(address, "tick", group="g") as consumer:
            took = Took(consumer)
            producer.recurring("one", "tick", b"body", every=SECOND, misfire="all")
            took.until(2, "occurrences come")
            assert servers.delay.terminate() == 0
            copied_s = time.time()
            copy_of(data, "delay", backup)
            servers.delay.start()
            # Up to three of these are decided in the copy: it was ahead of the clock.
            took.until(len(took.found) + 6, "occurrences come that the copy knows nothing of")
            restore(servers, backup, "delay")
            logged(servers.delay, "fenced by=target")
            assert "accepted" in servers.operator.follow(WaitKind.TARGET_REFUSES, 0)
            took.until(len(took.found) + 3, "occurrences come again")
            info = producer.pause_recurring("one", "it is over")
    # Two were decided already and pending in the copy, and share the fate of all messages that were.
    twice = [instant for (_, instant), count in took.found.items() if count > 1]
    assert all(instant < copied_s + 2 for instant in twice), "no occurrence was decided twice"
    assert info.skipped.keys() == {"restored"} and info.skipped["restored"] >= 3


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
    took.check_each_once()


def test_the_trace_of_an_occurrence_names_its_schedule_and_the_audit_balances(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with delayd.open(data) as home, home.producer() as producer, home.consumer("tick", "g") as consumer:
        producer.recurring("report", "tick", b"x", every=SECOND)
        (message,) = wait_until(lambda: consumer.pull(1, wait=SECOND), "an occurrence comes")
        message.ack()
        decided = producer.pause_recurring("report").decided_until
        wait_until(lambda: datetime.now(UTC) > decided + 2 * SECOND, "occurrences are skipped")
        assert producer.resume_recurring("report").skipped.keys() == {"paused"}
        assert producer.delete_recurring("report")
    told = command("trace", "tick", str(message.sequence), "--data", str(data))
    assert told.count("occurrence") == 2 and told.count("of the schedule 'report'") == 2, told
    later = range(message.sequence + 1, message.sequence + 20)
    traces = [run("trace", "tick", str(sequence), "--data", str(data)).out for sequence in later]
    assert sum("of the schedule 'report' skipped as paused" in each for each in traces) == 1
    assert audit_directory(str(data), now_ms=time.time_ns() // 1_000_000).balanced


def test_a_schedule_moves_with_its_server_s_messages_when_that_is_emptied(tmp_path: Path) -> None:
    with (
        open_fleet(tmp_path) as fleet,
        delayd.Producer(fleet.meta.address) as producer,
        delayd.Consumer(fleet.meta.address, "tick", group="g") as consumer,
    ):
        took = Took(consumer)
        for name in NAMES:
            producer.recurring(name, "tick", b"body", every=SECOND, misfire="all")
        took.until(6, "occurrences come")
        assert fleet.command("drain", fleet.old.address).code == 0
        for name in NAMES:
            took.until(len(took.instants(name)) + 3, f"{name} goes on", name)
            info = producer.pause_recurring(name)
            took.until(info.sent, f"all of {name} have come", name)
            assert info.skipped == {}
    took.check_each_once()


def test_no_two_occurrences_are_worked_on_at_once_whatever_is_killed(tmp_path: Path) -> None:
    """A consumer holds one, gives it back with a delay, and acknowledges it; servers are killed in between."""
    with cluster(tmp_path) as servers:
        address = servers.meta.address
        with delayd.Producer(address) as producer, delayd.Consumer(address, "tick", group="g") as consumer:

            def pulled() -> delayd.Message:
                (message,) = wait_until(lambda: consumer.pull(2, wait=SECOND), "an occurrence comes")
                return message

            def skips_another() -> delayd.RecurringInfo:
                before = producer.get_recurring("one")
                assert before is not None
                skipped = before.skipped.get("overlap", 0)

                def more() -> delayd.RecurringInfo | None:
                    now = producer.get_recurring("one")
                    return now if now is not None and now.skipped.get("overlap", 0) > skipped else None

                after = wait_until(more, "an occurrence is skipped")
                assert after is not None and after.sent == before.sent
                return after

            producer.recurring("one", "tick", b"body", every=SECOND, overlap="skip")
            first = pulled()
            assert skips_another().sent == 1
            first.nack(delay=4 * SECOND)
            # It waits at the delay server, which forgets with its life what it has noted.
            servers.delay.kill()
            servers.delay.start()
            assert skips_another().sent == 1
            servers.realtime.kill()
            servers.realtime.start()
            again = pulled()
            assert (again.occurrence, again.attempt) == (first.occurrence, 2)
            again.ack()
            second = pulled()
            assert second.occurrence != first.occurrence
            second.ack()
            servers.realtime.kill()
            logged(servers.delay, "overlap_not_known")
            servers.realtime.start()
            pulled().ack()
            producer.pause_recurring("one", "it is over")
        servers.delay.terminate()
        assert audit_directory(str(tmp_path), now_ms=time.time_ns() // 1_000_000).balanced
