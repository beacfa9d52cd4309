"""A client that was closed says so; what was sent before is kept."""

from collections.abc import Callable

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, LATER, Desk

CALLS: dict[str, Callable[[delayd.Producer, str], object]] = {
    "send": lambda producer, subject: producer.send(subject, b"1", delay=AT_ONCE),
    "send_nowait": lambda producer, subject: producer.send_nowait(subject, b"1", delay=AT_ONCE),
    "send_batch": lambda producer, subject: producer.send_batch(subject, [b"1"], delay=AT_ONCE),
    "cancel": lambda producer, subject: producer.cancel(subject, key="k"),
    "get": lambda producer, subject: producer.get(subject, key="k"),
    "reschedule": lambda producer, subject: producer.reschedule(subject, key="k", delay=LATER),
    "flush": lambda producer, subject: producer.flush(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_a_producer_that_was_closed_says_so(desk: Desk, call: str, used: bool) -> None:
    producer = delayd.Producer(desk.address)
    if used:
        producer.send(desk.subject, b"0", delay=LATER)
    producer.close()
    with pytest.raises(delayd.errors.AlreadyClosed):
        CALLS[call](producer, desk.subject)
    producer.close()


def test_a_consumer_that_was_closed_says_so(desk: Desk) -> None:
    consumer = desk.consumer()
    consumer.close()
    with pytest.raises(delayd.errors.AlreadyClosed):
        consumer.pull()
    with pytest.raises(delayd.errors.AlreadyClosed):
        consumer.flush()
    consumer.close()


def test_a_message_is_acknowledged_after_the_close_of_its_consumer(desk: Desk) -> None:
    desk.send(b"1")
    consumer = desk.consumer()
    message = desk.one(consumer)
    consumer.close()
    message.ack()
    assert desk.is_empty(desk.consumer())


def test_acknowledgements_that_nobody_waits_for_are_durable_after_a_flush(desk: Desk) -> None:
    desk.send(b"1")
    consumer = desk.consumer()
    desk.one(consumer).ack(wait=False)
    consumer.flush()
    consumer.close()
    assert desk.is_empty(desk.consumer())
