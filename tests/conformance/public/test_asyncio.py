"""The clients of asyncio promise what the blocking ones do, and have the same arguments."""

import asyncio
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, LATER, LONG, NEXT

PAIRS = [(delayd.Producer, delayd.AsyncProducer), (delayd.Consumer, delayd.AsyncConsumer)]
PUBLIC = [
    (blocking, waiting, name)
    for blocking, waiting in PAIRS
    for name, found in vars(blocking).items()
    if callable(found) and (name == "__init__" or not name.startswith("_")) and hasattr(waiting, name)
]
OWN = {"send_nowait", "settle", "word_back", "words_back"}  # Of one kind only, or not for callers.


@pytest.mark.parametrize(("blocking", "waiting", "name"), [each for each in PUBLIC if each[2] not in OWN])
def test_both_kinds_of_clients_have_the_same_arguments(blocking: type, waiting: type, name: str) -> None:
    def arguments(of: Callable[..., Any]) -> list[tuple[str, object, object]]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(of).parameters.values()]

    assert arguments(getattr(blocking, name)) == arguments(getattr(waiting, name))


@pytest.mark.parametrize("count", [1, 100])
def test_messages_are_sent_and_acknowledged(address: str, subject: str, count: int) -> None:
    async def run() -> list[bytes]:
        async with delayd.AsyncProducer(address) as producer:
            await asyncio.gather(*(producer.send(subject, b"%d" % row, delay=AT_ONCE) for row in range(count)))
        found: list[bytes] = []
        async with delayd.AsyncConsumer(address, subject, "g") as consumer:
            while len(found) < count:
                batch = await consumer.pull(wait=LONG)
                found += batch.bodies
                await batch.ack()
        return found

    assert sorted(map(int, asyncio.run(run()))) == [*range(count)]


@pytest.mark.parametrize("delay", [AT_ONCE, NEXT], ids=["at once", "later"])
def test_a_message_that_is_given_back_comes_again(address: str, subject: str, delay: timedelta) -> None:
    async def run() -> tuple[int, str]:
        async with (
            delayd.AsyncProducer(address) as producer,
            delayd.AsyncConsumer(address, subject, "g") as consumer,
        ):
            await producer.send(subject, b"1", delay=AT_ONCE)
            async for message in consumer:
                if message.attempt > 1:
                    await message.ack()
                    break
                await message.nack(delay, error="it failed" if delay else "")
            return message.attempt, message.last_error

    assert asyncio.run(run()) == (2, "it failed" if delay else "")


def test_a_message_has_its_key_in_each_of_its_lives(address: str, subject: str) -> None:
    async def run() -> list[tuple[bytes, int, str | None]]:
        found: list[tuple[bytes, int, str | None]] = []
        async with (
            delayd.AsyncProducer(address) as producer,
            delayd.AsyncConsumer(address, subject, "g") as consumer,
        ):
            await producer.send(subject, b"1", delay=AT_ONCE, key="order-1")
            await producer.send_batch(subject, [b"2", b"3"], delay=AT_ONCE, keys=["order-ä", None])
            while len(found) < 6:
                batch = await consumer.pull(wait=LONG)
                assert batch.keys == [message.key for message in batch]
                for message in batch:
                    found.append((message.body, message.attempt, message.key))
                    await (message.nack(NEXT) if message.attempt == 1 else message.ack())
        return sorted(found)

    keys = ((b"1", "order-1"), (b"2", "order-ä"), (b"3", None))
    assert asyncio.run(run()) == [(body, attempt, key) for body, key in keys for attempt in (1, 2)]


def test_a_message_is_cancelled_by_its_key(address: str, subject: str) -> None:
    async def run() -> delayd.CancelAnswer:
        async with delayd.AsyncProducer(address) as producer:
            await producer.send(subject, b"1", delay=LATER, key="k")
            return await producer.cancel(subject, key="k")

    assert asyncio.run(run()) is delayd.CancelAnswer.CANCELLED


def test_a_client_belongs_to_its_loop(address: str) -> None:
    with pytest.raises(delayd.errors.WrongLoop):
        delayd.AsyncProducer(address)
    with pytest.raises(delayd.errors.WrongLoop):
        delayd.AsyncConsumer(address, "s", "g")


def test_a_client_is_refused_in_another_loop_of_its_thread(address: str, subject: str) -> None:
    async def first() -> tuple[delayd.AsyncProducer, delayd.AsyncConsumer]:
        producer = delayd.AsyncProducer(address)
        await producer.send(subject, b"1", delay=AT_ONCE)
        consumer = delayd.AsyncConsumer(address, subject, "g")
        await (await anext(consumer)).ack()
        return producer, consumer

    async def second(producer: delayd.AsyncProducer, consumer: delayd.AsyncConsumer) -> None:
        with pytest.raises(delayd.errors.WrongLoop):
            producer.send(subject, b"1", delay=AT_ONCE)
        with pytest.raises(delayd.errors.WrongLoop):
            await anext(consumer)

    async def end(producer: delayd.AsyncProducer, consumer: delayd.AsyncConsumer) -> None:
        await producer.close()
        await consumer.close()

    # The loops take turns on this thread, so that the clients can be closed in their own.
    with asyncio.Runner() as own, asyncio.Runner() as other:
        clients = own.run(first())
        other.run(second(*clients))
        own.run(end(*clients))
