"""Groups that keep an order: of each ordering key one message at a time."""

from __future__ import annotations

import threading
from collections import defaultdict
from datetime import timedelta
from random import Random
from typing import Any

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, LONG, NEXT, SOON, Desk

KEYS, STEPS = 20, 8
HANDS = 4
SHORT = timedelta(milliseconds=300)  # A lease that ends.


def test_the_next_of_a_key_comes_after_the_one_before(desk: Desk) -> None:
    for body, key in ((b"a1", "a"), (b"a2", "a"), (b"b1", b"b"), (b"free", None)):
        desk.send(body, ordering_key=key)
    consumer = desk.consumer(ordered=True)
    first = {message.body: message for message in desk.take(consumer, 3)}
    assert sorted(first) == [b"a1", b"b1", b"free"]
    assert desk.is_empty(consumer)
    first[b"a1"].ack()
    assert desk.one(consumer).body == b"a2"


def test_a_batch_has_an_ordering_key_for_each_message(desk: Desk) -> None:
    desk.producer.send_batch(desk.subject, [b"1", b"2", b"3"], delay=AT_ONCE, ordering_keys=["a", "a", None])
    found = desk.take(desk.consumer(ordered=True), 2)
    assert sorted(message.body for message in found) == [b"1", b"3"]


def test_a_message_that_is_given_back_keeps_its_place(desk: Desk) -> None:
    desk.send(b"1", b"2", ordering_key="a")
    consumer = desk.consumer(ordered=True)
    desk.one(consumer).nack(NEXT)
    again = desk.one(consumer)
    assert (again.body, again.attempt) == (b"1", 2)
    again.ack()
    assert desk.one(consumer).body == b"2"


def test_a_dead_letter_lets_the_next_one_pass(desk: Desk) -> None:
    desk.send(b"1", b"2", ordering_key="a")
    consumer = desk.consumer(ordered=True)
    desk.one(consumer).reject("broken")
    assert desk.one(consumer).body == b"2"


def test_a_lease_that_ends_keeps_its_place(desk: Desk) -> None:
    desk.send(b"1", b"2", ordering_key="a")
    left = desk.one(desk.consumer(ordered=True, lease=SHORT))
    again = desk.one(desk.consumer(ordered=True))
    assert again.body == b"1" and again.attempt > left.attempt


def test_a_moved_message_keeps_its_ordering_key(desk: Desk) -> None:
    desk.send(b"1", ordering_key="a")
    (later,) = desk.send(b"2", delay=timedelta(hours=1), ordering_key="a")
    consumer = desk.consumer(ordered=True)
    message = desk.one(consumer)
    desk.producer.reschedule(desk.subject, receipt=later, delay=SOON)
    assert desk.is_empty(consumer)
    message.ack()
    assert desk.one(consumer).body == b"2"


def test_a_group_without_an_order_gets_everything_and_refuses_one(desk: Desk) -> None:
    desk.send(b"1", b"2", ordering_key="a")
    assert len(desk.take(desk.consumer(), 2)) == 2
    with pytest.raises(delayd.errors.NotOrdered):
        desk.consumer(ordered=True).pull(wait=AT_ONCE)


@pytest.mark.parametrize("key", ["", "x" * 201, 7, "\ud800"])
def test_an_ordering_key_that_is_none_is_refused(desk: Desk, key: Any) -> None:
    with pytest.raises(delayd.errors.BadKey, match="ordering_key"):
        desk.send(b"1", ordering_key=key)
    with pytest.raises(delayd.errors.BadKey, match="row 1"):
        desk.producer.send_batch(desk.subject, [b"1", b"2"], delay=AT_ONCE, ordering_keys=["a", key])


def test_several_hands_that_fail_and_die_keep_the_order_of_each_key(desk: Desk) -> None:
    keys = [f"key-{number}" for number in range(KEYS)]
    for step in range(STEPS):
        bodies = [f"{key} {step}".encode() for key in keys]
        desk.producer.send_batch(desk.subject, bodies, delay=AT_ONCE, ordering_keys=keys)
    seen: dict[str, list[int]] = defaultdict(list)
    left = threading.Semaphore(0)

    def work(number: int) -> None:
        random = Random(number)
        while True:
            with delayd.Consumer(desk.address, desk.subject, "g", ordered=True, prefetch=False) as consumer:
                for message in consumer.pull(random.choice([1, 5, 50]), wait=LONG):
                    key, step = message.body.decode().split()
                    if key == "end":
                        message.nack(AT_ONCE)
                        return
                    seen[key].append(int(step))
                    # One of eight is forgotten until its lease ends, as if its hand had died. No other lease ends here.
                    chance = random.randrange(8)
                    if not chance:
                        message.extend(SHORT)
                    elif chance == 1:
                        message.nack(AT_ONCE)
                    else:
                        message.ack()
                        left.release()

    hands = [threading.Thread(target=work, args=(number,)) for number in range(HANDS)]
    for hand in hands:
        hand.start()
    for _ in range(KEYS * STEPS):
        assert left.acquire(timeout=LONG.total_seconds())
    desk.send(b"end 0")
    for hand in hands:
        hand.join(LONG.total_seconds())
    for key in keys:
        assert seen[key] == sorted(seen[key]) and set(seen[key]) == set(range(STEPS)), (key, seen[key])
