"""Recurring schedules as programs use them, in memory, with a clock that moves (docs/recurring.md)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import delayd
from delayd.errors import BadArgument, BadSubject, NoRecurring, RecurringConflict
from delayd.testing import InMemoryBroker

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker(start=START) as running:
        yield running


@pytest.fixture
def producer(broker: InMemoryBroker) -> Iterator[delayd.Producer]:
    with broker.producer() as running:
        yield running


def instants(broker: InMemoryBroker, subject: str = "s") -> list[datetime]:
    """The occurrences that are there for consumers."""
    found: list[datetime] = []
    with broker.consumer(subject, "g") as consumer:
        while batch := consumer.pull(100, wait=timedelta(0)):
            for message in batch:
                assert message.occurrence is not None and message.deliver_at == message.occurrence
                found.append(message.occurrence)
            batch.ack()
    return found


def test_a_daily_line_of_a_zone_is_played_for_two_years(broker: InMemoryBroker, producer: delayd.Producer) -> None:
    info = producer.recurring("daily", "s", b"x", cron="30 2 * * *", timezone="Europe/Berlin")
    expected = info.preview(730)
    broker.clock.advance(730 * DAY)
    assert instants(broker) == expected
    after = producer.get_recurring("daily")
    assert after is not None and (after.sent, after.last, after.skipped) == (730, expected[-1], {})


def test_an_occurrence_is_a_message_with_all_that_was_asked_for(
    broker: InMemoryBroker, producer: delayd.Producer
) -> None:
    options: dict[str, object] = {"headers": {"a": b"b"}, "tags": ["t"], "ttl": HOUR, "ordering_key": "o"}
    producer.recurring("name", "s", b"body", every=HOUR, **options)  # type: ignore[arg-type]
    with broker.consumer("s", "g") as consumer:
        broker.clock.advance(HOUR)
        (message,) = consumer.pull(wait=timedelta(0))
        assert (message.body, message.headers, message.tags, message.key) == (b"body", {"a": b"b"}, ("t",), None)
        assert (message.schedule, message.occurrence) == ("name", START + HOUR)
        assert message.expires_at == START + 2 * HOUR
        message.nack(timedelta(minutes=1))
        broker.clock.advance(timedelta(minutes=1))
        (again,) = consumer.pull(wait=timedelta(0))
        assert (again.schedule, again.occurrence, again.attempt) == ("name", START + HOUR, 2)


def test_no_schedule_is_overwritten_unseen(producer: delayd.Producer) -> None:
    first = producer.recurring("name", "s", b"1", every=HOUR, if_version=0)
    assert producer.recurring("name", "s", b"1", every=HOUR) == first
    for version in (None, 0, 2):
        with pytest.raises(RecurringConflict) as refused:
            producer.recurring("name", "s", b"2", every=HOUR, if_version=version)
        assert refused.value.version == 1
    second = producer.recurring("name", "s", b"2", every=HOUR, if_version=1)
    assert (second.version, second.body, second.created_at) == (2, b"2", first.created_at)
    assert producer.get_recurring("name") == second
    with pytest.raises(RecurringConflict, match="no schedule 'other'"):
        producer.recurring("other", "s", b"", every=HOUR, if_version=3)


def test_a_pause_skips_and_says_so(broker: InMemoryBroker, producer: delayd.Producer) -> None:
    producer.recurring("name", "s", b"x", every=HOUR)
    broker.clock.advance(2 * HOUR)
    paused = producer.pause_recurring("name", "no more coffee")
    assert (paused.paused, paused.note, paused.next, paused.version) == (True, "no more coffee", None, 2)
    assert producer.pause_recurring("name", "no more coffee") == paused
    broker.clock.advance(800 * DAY)
    resumed = producer.resume_recurring("name")
    assert resumed.skipped == {"paused": 800 * 24} and resumed.version == 3
    broker.clock.advance(HOUR)
    assert instants(broker) == [START + HOUR, START + 2 * HOUR, START + 800 * DAY + 3 * HOUR]
    skips = [row for row in broker.sent("s") if row.state == "cancelled"]
    assert 1 <= len(skips) <= 4, "a pause of two years is a few rows"


def test_it_runs_now_once_for_each_call_and_also_while_it_is_paused(
    broker: InMemoryBroker, producer: delayd.Producer
) -> None:
    producer.recurring("name", "s", b"x", every=HOUR)
    producer.pause_recurring("name")
    broker.clock.advance(timedelta(minutes=5))
    producer.run_recurring("name")
    producer.run_recurring("name")
    broker.clock.advance(timedelta(minutes=1))
    assert instants(broker) == [START + timedelta(minutes=5)] * 2
    info = producer.get_recurring("name")
    assert info is not None and info.sent == 0


def test_it_ends_after_so_many_and_stays_until_it_is_deleted(broker: InMemoryBroker, producer: delayd.Producer) -> None:
    producer.recurring("name", "s", b"x", every=HOUR, max_occurrences=3)
    broker.clock.advance(DAY)
    assert len(instants(broker)) == 3
    (info,) = producer.list_recurring("na")
    assert (info.sent, info.next) == (3, None)
    assert producer.delete_recurring("name") and not producer.delete_recurring("never")
    assert producer.get_recurring("name") is None and producer.list_recurring() == []
    with pytest.raises(NoRecurring):
        producer.pause_recurring("name")
    assert producer.recurring("name", "s", b"new", every=HOUR).version == 1


def test_a_changed_schedule_goes_by_its_new_line_from_then_on(
    broker: InMemoryBroker, producer: delayd.Producer
) -> None:
    producer.recurring("name", "s", b"x", every=HOUR)
    broker.clock.advance(HOUR)
    producer.recurring("name", "s", b"x", cron="30 * * * *", if_version=1)
    broker.clock.advance(2 * HOUR)
    half = timedelta(minutes=30)
    assert instants(broker) == [START + HOUR, START + HOUR + half, START + 2 * HOUR + half]


def test_jitter_is_on_top_of_the_instant(broker: InMemoryBroker, producer: delayd.Producer) -> None:
    producer.recurring("name", "s", b"x", every=HOUR, jitter=timedelta(minutes=10))
    broker.clock.advance(5 * HOUR)
    with broker.consumer("s", "g") as consumer:
        batch = consumer.pull(100, wait=timedelta(0))
        late = [message.deliver_at - message.occurrence for message in batch if message.occurrence is not None]
    assert len(late) >= 4 and all(timedelta(0) <= each <= timedelta(minutes=10) for each in late)
    assert len(set(late)) > 1


def test_what_is_wrong_is_refused_before_anything_is_done(producer: delayd.Producer) -> None:
    with pytest.raises(BadArgument, match="bad day of the month"):
        producer.recurring("name", "s", b"x", cron="0 0 30 2 *")
    with pytest.raises(BadArgument, match="cron= or every="):
        producer.recurring("name", "s", b"x")
    with pytest.raises(BadArgument, match="at most 262144"):
        producer.recurring("name", "s", bytes(300_000), every=HOUR)
    with pytest.raises(BadSubject, match="servers' own"):
        producer.recurring("name", "%cron", b"x", every=HOUR)
    with pytest.raises(BadSubject, match="servers' own"):
        producer.send("%cron", b"x", delay=HOUR)
    with pytest.raises(BadArgument, match="servers' own"):
        producer.recurring("name", "s", b"x", every=HOUR, headers={"delayd.schedule": "x"})
    assert producer.list_recurring() == []


def test_callers_who_make_and_change_one_schedule_at_once_agree(broker: InMemoryBroker) -> None:
    async def put(number: int) -> int | None:
        async with broker.async_producer() as producer:
            try:
                info = await producer.recurring("name", "s", b"%d" % number, every=HOUR, if_version=0)
            except RecurringConflict:
                return None
            return int(info.body)

    async def all_at_once() -> list[int | None]:
        return await asyncio.gather(*map(put, range(8)))

    made = Counter(asyncio.run(all_at_once()))
    assert made.pop(None) == 7 and list(made.values()) == [1]


class Watched:
    """A schedule of each hour of which no two are to be worked on at once, and a group that works on them."""

    def __init__(self, broker: InMemoryBroker, producer: delayd.Producer, consumer: delayd.Consumer) -> None:
        self.broker, self.producer, self.consumer = broker, producer, consumer

    def hours(self, count: int) -> tuple[int, int]:
        """Let hours pass; how many occurrences have been sent by then, and how many skipped."""
        self.broker.clock.advance(count * HOUR)
        info = self.producer.get_recurring("name")
        assert info is not None and info.skipped.keys() <= {"overlap"}
        return info.sent, info.skipped.get("overlap", 0)

    def pull(self) -> delayd.Message:
        (message,) = self.consumer.pull(wait=timedelta(0))
        return message


@pytest.fixture
def watched(broker: InMemoryBroker, producer: delayd.Producer) -> Iterator[Watched]:
    with broker.consumer("s", "g") as consumer:
        producer.recurring("name", "s", b"x", every=HOUR, overlap="skip")
        yield Watched(broker, producer, consumer)


def test_an_occurrence_is_skipped_while_an_earlier_one_is_not_acknowledged(watched: Watched) -> None:
    assert watched.hours(1) == (1, 0)
    message = watched.pull()
    assert watched.hours(3) == (1, 3)
    assert watched.pull().occurrence == message.occurrence
    watched.broker.clock.advance(timedelta(minutes=59))
    watched.pull().ack()
    assert watched.hours(1) == (2, 3)
    assert watched.pull().occurrence == START + 5 * HOUR


def test_a_message_that_comes_again_is_not_acknowledged(watched: Watched) -> None:
    watched.hours(1)
    watched.pull().nack(delay=timedelta(minutes=150))
    assert watched.hours(2) == (1, 2)
    watched.hours(1)
    watched.pull().ack()
    assert watched.hours(1) == (2, 3)


def test_a_dead_letter_is_done_and_a_message_without_a_group_is_not(watched: Watched) -> None:
    watched.producer.recurring("name", "s", b"x", every=HOUR, overlap="skip")
    watched.hours(1)
    watched.pull().reject("it is wrong")
    assert watched.hours(1) == (2, 0)
    # What a caller runs at once counts, too.
    watched.pull().ack()
    watched.producer.run_recurring("name")
    assert watched.hours(2) == (2, 2)
    watched.producer.recurring("other", "nobody", b"x", every=HOUR, overlap="skip")
    watched.hours(3)
    other = watched.producer.get_recurring("other")
    assert other is not None and (other.sent, other.skipped) == (1, {"overlap": 2})
