"""One consumer of many subjects: a list, or a pattern."""

from typing import Any

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, Desk
from tests.waiting import wait_until

PATTERNS = {
    "one word": ("*", ["a", "b"], ["", "a.b"]),
    "words": (">", ["a", "a.b", "a.b.c"], [""]),
    "the last word": ("*.cancel", ["eu.cancel", "us.cancel"], ["cancel", "eu.cancel.x", "eu"]),
    "between": ("eu.*.x", ["eu.a.x", "eu.b.x"], ["eu.x", "us.a.x"]),
}


def _named(subject: str, words: str) -> str:
    return f"{subject}.{words}" if words else subject


@pytest.mark.parametrize("which", PATTERNS)
def test_a_pattern_gets_what_it_stands_for(desk: Desk, which: str) -> None:
    pattern, meant, others = PATTERNS[which]
    for words in meant + others:
        desk.producer.send(_named(desk.subject, words), words.encode(), delay=AT_ONCE)
    consumer = desk.consumer(subject=f"{desk.subject}.{pattern}")
    messages = desk.take(consumer, len(meant))
    assert sorted(message.subject for message in messages) == sorted(_named(desk.subject, words) for words in meant)
    assert all(_named(desk.subject, message.text()) == message.subject for message in messages)
    for message in messages:
        message.ack()
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("count", [1, 2, 30])
def test_a_list_gets_the_messages_of_its_subjects(desk: Desk, count: int) -> None:
    subjects = [f"{desk.subject}.{number}" for number in range(count)]
    for subject in [*subjects, f"{desk.subject}.x"]:
        desk.producer.send(subject, subject.encode(), delay=AT_ONCE)
    consumer = desk.consumer(subject=subjects)
    messages = desk.take(consumer, count)
    assert sorted(message.text() for message in messages) == sorted(subjects)
    for message in messages:
        message.ack()
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("form", ["list", "pattern"])
@pytest.mark.parametrize("tags", [{}, {"tags_any": ["eu"]}])
def test_the_first_pull_without_a_wait_looks_at_each_subject(desk: Desk, form: str, tags: dict[str, Any]) -> None:
    subjects = [f"{desk.subject}.{number}" for number in range(200)]
    for subject in subjects:
        desk.producer.send_nowait(subject, b"", delay=AT_ONCE, tags=["us"])
    receipt = desk.producer.send(subjects[-1], b"1", delay=AT_ONCE, tags=["eu"])
    wait_until(lambda: desk.producer.get(subjects[-1], receipt=receipt).state is delayd.MessageState.DISPATCHED)
    found = 0
    for number in range(5):
        # Each is another group, so that it has to join first.
        consumer = desk.consumer(f"g{number}", subjects if form == "list" else f"{desk.subject}.*", **tags)
        batch = consumer.pull(wait=AT_ONCE)
        found += len(batch)
        # A server that a busy machine keeps from answering in time has not looked, and the batch says so.
        assert len(batch) or batch.outage is not None, "a message is there"
    assert found, "no server answered in time"


def test_a_subject_that_appears_later_joins_its_pattern(desk: Desk) -> None:
    consumer = desk.consumer(subject=f"{desk.subject}.>")
    desk.producer.send(f"{desk.subject}.a", b"1", delay=AT_ONCE)
    assert desk.one(consumer).body == b"1"
    desk.producer.send(f"{desk.subject}.b", b"2", delay=AT_ONCE)
    assert desk.one(consumer).body == b"2"


@pytest.mark.parametrize("form", ["list", "pattern"])
def test_a_consumer_of_many_shares_the_work_with_a_consumer_of_one(desk: Desk, form: str) -> None:
    subject = f"{desk.subject}.a"
    desk.producer.send_batch(subject, [b"%d" % row for row in range(10)], delay=AT_ONCE)
    many = desk.consumer(subject=[subject, f"{desk.subject}.b"] if form == "list" else f"{desk.subject}.*")
    messages = desk.take(many, 5) + desk.take(desk.consumer(subject=subject), 5)
    assert len({message.body for message in messages}) == 10


@pytest.mark.parametrize("form", ["list", "pattern"])
def test_what_a_consumer_of_many_gives_back_comes_again(desk: Desk, form: str) -> None:
    subjects = [f"{desk.subject}.a", f"{desk.subject}.b"]
    consumer = desk.consumer(subject=subjects if form == "list" else f"{desk.subject}.*")
    for subject in subjects:
        desk.producer.send(subject, b"1", delay=AT_ONCE)
    for message in desk.take(consumer, 2):
        message.nack(AT_ONCE)
    again = desk.take(consumer, 2)
    assert sorted(message.subject for message in again) == subjects


@pytest.mark.parametrize(
    ("settings", "bodies"),
    [
        ({"tags_any": ["red", "green"]}, [b"both", b"red"]),
        ({"tags_all": ["red", "blue"]}, [b"both"]),
        ({"tags_any": ["blue"], "tags_all": ["red"]}, [b"both"]),
        ({}, [b"blue", b"both", b"none", b"red"]),
    ],
)
def test_a_group_gets_only_messages_with_its_tags(desk: Desk, settings: dict[str, Any], bodies: list[bytes]) -> None:
    tagged = ((b"red", ["red"]), (b"blue", ["blue"]), (b"both", ["blue", "red"]), (b"none", None))
    for body, tags in tagged:
        desk.send(body, tags=tags)
    desk.take(desk.consumer("all"), 4)
    consumer = desk.consumer(**settings)
    found = desk.take(consumer, len(bodies))
    assert sorted(message.body for message in found) == bodies
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("tags", ["red", [""], ["x" * 65], [str(number) for number in range(17)], [7]])
@pytest.mark.parametrize("name", ["tags_any", "tags_all"])
def test_tags_that_no_message_may_have_are_refused(desk: Desk, name: str, tags: Any) -> None:
    with pytest.raises(delayd.errors.BadTags):
        desk.consumer(**{name: tags})


def test_who_wants_other_tags_than_the_group_is_refused(desk: Desk) -> None:
    desk.send(b"1", tags=["red"])
    desk.one(desk.consumer(tags_any=["red"])).ack()
    other = desk.consumer(tags_any=["blue"])
    with pytest.raises(delayd.errors.OtherFilter):
        other.pull(wait=AT_ONCE)
