"""What a handler says of a message, and what becomes of the message."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

import pytest

import delayd
from delayd import Message
from tests.conformance.public.desk import AT_ONCE, LONG, NEXT, Desk

SHORT = timedelta(milliseconds=300)
QUICK = delayd.Backoff(first=timedelta(milliseconds=20), most=timedelta(milliseconds=60), jitter=0)

SETTLED: dict[str, Callable[[Message], None]] = {
    "ack": lambda message: message.ack(),
    "reject": lambda message: message.reject("no such order"),
}
AGAIN: dict[str, Callable[[Message], None]] = {
    "back-off": lambda message: message.nack(),
    "delay": lambda message: message.nack(NEXT),
    "delay and error": lambda message: message.nack(NEXT, error="it failed"),
    "at once": lambda message: message.nack(AT_ONCE),
}


@pytest.mark.parametrize("word", SETTLED)
def test_a_message_that_is_settled_does_not_come_again(desk: Desk, word: str) -> None:
    desk.send(b"1")
    consumer = desk.consumer()
    SETTLED[word](desk.one(consumer))
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("word", SETTLED)
def test_what_one_group_settles_another_one_gets(desk: Desk, word: str) -> None:
    desk.send(b"1")
    SETTLED[word](desk.one(desk.consumer("a")))
    assert desk.one(desk.consumer("b")).body == b"1"


@pytest.mark.parametrize("word", AGAIN)
def test_a_message_that_is_given_back_comes_again_whole(desk: Desk, word: str) -> None:
    (receipt,) = desk.send(b"1", headers={"a": "b"})
    consumer = desk.consumer(backoff=QUICK)
    AGAIN[word](desk.one(consumer))
    message = desk.one(consumer)
    assert (message.body, dict(message.headers), message.subject) == (b"1", {"a": "b"}, desk.subject)
    assert message.origin_sequence == receipt.sequence
    assert message.first_deliver_at_ms == receipt.deliver_at_ms
    assert message.last_error == ("it failed" if word == "delay and error" else "")
    message.ack()
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_said_twice_of_one_message_stops_no_other_word(desk: Desk, ordered: bool) -> None:
    desk.send(b"1", b"2", b"3", b"4")
    consumer = desk.consumer(ordered=ordered)
    messages = desk.take(consumer, 4)
    for message in (messages[0], messages[0], messages[1]):
        message.nack(NEXT, wait=False)
    for message in (messages[2], messages[2], messages[3]):
        message.reject("no such order", wait=False)
    consumer.flush()
    assert {message.body for message in desk.take(consumer, 2)} == {b"1", b"2"}


@pytest.mark.parametrize("attempts", [2, 5])
def test_attempts_are_counted(desk: Desk, attempts: int) -> None:
    desk.send(b"1")
    consumer = desk.consumer(backoff=QUICK)
    for attempt in range(1, attempts + 1):
        message = desk.one(consumer)
        assert message.attempt == attempt
        assert message.last_error == ("" if attempt == 1 else f"error {attempt - 1}")
        message.nack(error=f"error {attempt}")


@pytest.mark.parametrize("delay", [timedelta(milliseconds=1), timedelta(milliseconds=250)], ids=["short", "longer"])
def test_a_message_that_is_given_back_for_a_time_comes_after_it(desk: Desk, delay: timedelta) -> None:
    desk.send(b"1")
    consumer = desk.consumer()
    message = desk.one(consumer)
    message.nack(delay)
    again = desk.one(consumer)
    assert again.deliver_at - message.deliver_at >= delay
    again.ack()


def test_each_back_off_is_longer_up_to_the_most(desk: Desk) -> None:
    desk.send(b"1")
    consumer = desk.consumer(backoff=QUICK)
    due = []
    for _ in range(4):
        message = desk.one(consumer)
        due.append(message.deliver_at)
        message.nack()
    waits = [late - early for early, late in pairwise(due)]
    assert all(wait >= timedelta(milliseconds=ms) for wait, ms in zip(waits, (20, 40, 60), strict=True))


def test_a_message_whose_consumers_died_is_not_handed_out_beyond_its_attempts(desk: Desk) -> None:
    desk.send(b"1")
    with desk.consumer(max_attempts=1) as consumer:
        desk.one(consumer).extend(SHORT)
        desk.send(b"2", delay=2 * SHORT)
        assert desk.one(consumer).body == b"2"


def test_a_message_that_is_held_is_not_given_to_another_consumer(desk: Desk) -> None:
    desk.send(b"1")
    message = desk.one(desk.consumer())
    assert desk.is_empty(desk.consumer())
    message.ack()


def test_a_lease_ends_when_its_extension_says_so(desk: Desk) -> None:
    desk.send(b"1")
    consumer = desk.consumer(lease=10 * LONG)
    desk.one(consumer).extend(SHORT)
    assert desk.one(consumer).attempt == 2


LATE: dict[str, Callable[[Message], None]] = {**SETTLED, **AGAIN, "extend": lambda message: message.extend(LONG)}


@pytest.mark.parametrize("word", LATE)
def test_a_word_after_the_lease_is_refused_by_name(desk: Desk, word: str) -> None:
    desk.send(b"1")
    consumer = desk.consumer(lease=SHORT)
    late = desk.one(consumer)
    again = desk.one(consumer)
    assert again.attempt > late.attempt
    with pytest.raises(delayd.errors.StaleHandle) as caught:
        LATE[word](late)
    assert (caught.value.reason, caught.value.count) == ("lease_ended", 1)


@pytest.mark.parametrize("word", ["ack", "extend"])
def test_a_word_after_the_message_was_given_back_is_refused_by_name(desk: Desk, word: str) -> None:
    desk.send(b"1")
    message = desk.one(desk.consumer())
    message.nack(AT_ONCE)
    with pytest.raises(delayd.errors.StaleHandle) as caught:
        LATE[word](message)
    assert caught.value.reason == "given_back"


FIRST = {"acknowledged": ["ack"], "given_back": ["nack later", "nack now", "reject"]}
WORDS: dict[str, Callable[[Message], None]] = {
    "ack": lambda message: message.ack(),
    "nack later": lambda message: message.nack(10 * LONG),
    "nack now": lambda message: message.nack(AT_ONCE),
    "reject": lambda message: message.reject("no such order"),
}


@pytest.mark.parametrize(("first", "reason"), [(word, reason) for reason in FIRST for word in FIRST[reason]])
def test_a_second_other_word_about_a_message_is_refused_by_name(desk: Desk, first: str, reason: str) -> None:
    desk.send(b"1")
    message = desk.one(desk.consumer())
    WORDS[first](message)
    for word in [*WORDS, "extend"]:
        if word == first:
            WORDS[word](message)
            continue
        with pytest.raises(delayd.errors.StaleHandle) as caught:
            {**WORDS, "extend": LATE["extend"]}[word](message)
        assert caught.value.reason == reason, word


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("first", ["nack later", "reject", "ack"])
def test_words_about_one_message_keep_their_order(desk: Desk, first: str, ordered: bool) -> None:
    desk.producer.send_batch(desk.subject, [b"1", b"2", b"3"], delay=AT_ONCE)
    consumer = desk.consumer(ordered=ordered)
    batch = consumer.pull(3, wait=LONG)
    said: dict[str, Callable[[], None]] = {
        "nack later": lambda: batch[0].nack(NEXT, error="later", wait=False),
        "reject": lambda: batch[0].reject("no", wait=False),
        "ack": lambda: batch[0].ack(wait=False),
    }
    said[first]()
    with pytest.raises(delayd.errors.StaleHandle) as caught:
        batch.nack(AT_ONCE) if first == "ack" else batch.ack()
    assert (caught.value.count, caught.value.reason) == (1, "acknowledged" if first == "ack" else "given_back")
    consumer.flush()
    if first == "nack later":
        assert desk.one(consumer).body == b"1"


def test_a_word_that_is_refused_has_no_other_one_refused(desk: Desk) -> None:
    desk.consumer(ordered=True).pull(wait=AT_ONCE)
    desk.send(b"1", b"2", b"3")
    # This consumer takes the order that the group has, and so it does not know that no message waits for two days.
    consumer = desk.consumer()
    messages = desk.take(consumer, 3)
    with ThreadPoolExecutor(3) as threads:
        waits = [timedelta(days=2) if message.body == b"2" else NEXT for message in messages]
        told = [threads.submit(message.nack, wait) for message, wait in zip(messages, waits, strict=True)]
        errors = {message.body: each.exception() for message, each in zip(messages, told, strict=True)}
    assert {body: type(error) for body, error in errors.items() if error} == {b"2": delayd.errors.BadArgument}
    assert {message.body for message in desk.take(consumer, 2)} == {b"1", b"3"}


def test_to_acknowledge_twice_is_to_acknowledge_once(desk: Desk) -> None:
    desk.send(b"1")
    consumer = desk.consumer()
    message = desk.one(consumer)
    message.ack()
    message.ack()
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "not waiting"])
@pytest.mark.parametrize("word", ["ack", "nack", "reject"])
def test_a_batch_is_settled_as_one(desk: Desk, word: str, wait: bool) -> None:
    desk.producer.send_batch(desk.subject, [b"1", b"2", b"3"], delay=AT_ONCE)
    consumer = desk.consumer()
    seen = 0
    while seen < 3:
        batch = consumer.pull(wait=LONG)
        seen += len(batch)
        if word == "ack":
            batch.ack(wait=wait)
        elif word == "nack":
            batch.nack(NEXT, wait=wait)
        else:
            batch.reject("no", wait=wait)
    consumer.flush()
    if word == "nack":
        assert sorted(message.body for message in desk.take(consumer, 3)) == [b"1", b"2", b"3"]
    else:
        assert desk.is_empty(consumer)


def test_messages_that_no_handler_saw_come_to_another_consumer_after_a_close(desk: Desk) -> None:
    desk.send(b"1", b"2")
    with delayd.Consumer(desk.address, desk.subject, "g") as consumer:
        next(consumer).ack()
    message = desk.one(desk.consumer())
    assert message.attempt == 1


def test_each_message_of_a_batch_that_is_given_back_has_a_wait_of_its_own(desk: Desk) -> None:
    desk.producer.send_batch(desk.subject, [b"x"] * 40, delay=AT_ONCE)
    backoff = delayd.Backoff(first=timedelta(milliseconds=400), most=timedelta(milliseconds=400), jitter=1)
    consumer = desk.consumer(backoff=backoff)
    seen = 0
    while seen < 40:
        batch = consumer.pull(40, wait=LONG)
        seen += len(batch)
        batch.nack(error="all of them failed together")
    assert len({message.deliver_at_ms for message in desk.take(consumer, 40)}) > 10
