"""What somebody who tries the clients by hand comes to: slices, tokens, futures, another event loop."""

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, LATER, Desk
from tests.waiting import DEADLINE_S

SLICES = [slice(10), slice(3, 7), slice(-2, None), slice(None, None, -1), slice(1, None, 2), slice(5, 5), slice(40, 50)]


@pytest.mark.parametrize("cut", SLICES, ids=str)
def test_a_slice_of_a_batch_is_a_batch_of_these_messages(desk: Desk, cut: slice) -> None:
    desk.send(*(b"%d" % number for number in range(4)))
    desk.producer.send_batch(desk.subject, [b"%d" % number for number in range(4, 12)], delay=AT_ONCE)
    consumer, messages = desk.consumer(), 12
    found = desk.take(consumer, messages)
    batch = consumer.pull(1, wait=AT_ONCE)
    assert len(batch) == 0 and len(batch[:10]) == 0
    for message in found:
        message.nack(AT_ONCE)
    batch = consumer.pull(messages, wait=timedelta(seconds=DEADLINE_S))
    bodies = [message.body for message in batch]
    assert bodies == batch.bodies and len(batch) == len(bodies)
    assert batch[cut].bodies == bodies[cut]
    batch[cut].ack()
    left = [body for body in bodies if body not in bodies[cut]]
    for body in left:
        batch[bodies.index(body)].nack(AT_ONCE)
    again = desk.take(consumer, messages - len(bodies) + len(left)) if left else []
    assert {message.body for message in again} >= set(left)


def test_each_message_of_a_batch_has_a_token_and_a_receipt(desk: Desk) -> None:
    desk.send(b"0", delay=LATER, key="taken")
    sent = desk.producer.send_batch(desk.subject, [b"1", b"2", b"3"], delay=LATER, keys=["a", "taken", None])
    tokens = sent.tokens
    assert [token is None for token in tokens] == [False, True, False]
    assert [receipt and receipt.token for receipt in sent.receipts()] == tokens
    for row, token in enumerate(tokens):
        if token is not None:
            receipt = delayd.Receipt.of_token(token)
            assert (receipt.sequence, receipt.log_id) == (sent.sequences[row], sent.log_ids[row])
            assert desk.producer.cancel(desk.subject, receipt=receipt) is delayd.CancelAnswer.CANCELLED


def test_the_future_of_a_send_is_one_of_the_standard_library(desk: Desk) -> None:
    def send() -> delayd.SendFuture:
        return desk.producer.send_nowait(desk.subject, b"1", delay=LATER)

    futures = [send() for _ in range(20)]
    done, waiting = concurrent.futures.wait(futures, timeout=DEADLINE_S)
    assert done == {*futures} and not waiting
    assert {future.result(0) for future in concurrent.futures.as_completed([send(), *futures], DEADLINE_S)}
    assert len({future.result(timeout=DEADLINE_S).sequence for future in futures}) == 20
    assert futures[0].exception(timedelta(seconds=1)) is None
    assert not futures[0].cancel() and not futures[0].cancelled() and not futures[0].running()

    async def wrapped() -> delayd.Receipt:
        return await asyncio.wait_for(asyncio.wrap_future(send()), DEADLINE_S)

    assert asyncio.run(wrapped()).deliver_at_ms


def _uses(client: Any, name: str, desk: Desk) -> Callable[[], Any]:
    if name == "__anext__":
        return lambda: anext(client)
    method = getattr(client, name)
    right = {
        "subject": desk.subject,
        "name": "each hour",
        "body": b"1",
        "bodies": [b"1"],
        "delay": LATER,
        "shift": LATER,
        "messages": (),
        "handle": delayd.SendHandle(delayd.LogId(1), 1, 1),
    }
    names = list(inspect.signature(method).parameters)
    asked = {"keys": ["k"]} if "keys" in names else {"key": "k"}
    return lambda: method(
        **{each: right[each] for each in names if each in right}, **(asked if "receipt" in names else {})
    )


@pytest.mark.parametrize("kind", ["async_producer", "async_consumer"])
def test_a_client_that_is_used_in_another_loop_refuses_and_does_nothing(desk: Desk, kind: str) -> None:
    inner = {"settle", "word_back", "words_back"}  # Messages call them, and may be settled after the close.

    async def scenario() -> None:
        async with delayd.AsyncProducer(desk.address) as producer:
            await producer.send(desk.subject, b"0", delay=AT_ONCE)
            async with delayd.AsyncConsumer(desk.address, desk.subject, "g", max_messages=1) as consumer:
                client = producer if kind == "async_producer" else consumer
                names = [name for name in dir(client) if not name.startswith("_") and name not in inner]
                names += ["__anext__", "__aiter__"] if client is consumer else []
                await consumer.pull(wait=timedelta(0))  # What it has in stock is not handed out either.
                for name in names:
                    use = _uses(client, name, desk)

                    async def elsewhere(use: Callable[[], Any] = use) -> None:
                        result = use()
                        if inspect.isawaitable(result):
                            await result

                    with pytest.raises(delayd.WrongLoop):
                        await asyncio.to_thread(asyncio.run, elsewhere())
                    if name in ("send", "send_nowait"):
                        # Where no loop runs at all, too.
                        with pytest.raises(delayd.WrongLoop):
                            await asyncio.to_thread(use)
                await producer.send(desk.subject, b"1", delay=LATER, tags=["right"])
                assert (await producer.cancel_where(desk.subject)).found == 1

    asyncio.run(scenario())


def test_a_message_has_the_tags_with_which_it_was_sent_in_each_of_its_lives(desk: Desk) -> None:
    desk.producer.send(desk.subject, b"1", delay=AT_ONCE, tags=["eu", "large"])
    desk.producer.send(desk.subject, b"2", delay=AT_ONCE)
    consumer = desk.consumer()
    first, second = sorted(desk.take(consumer, 2), key=lambda message: message.body)
    assert (first.tags, second.tags) == (("eu", "large"), ())
    first.nack(timedelta(milliseconds=20), error="not yet")
    second.ack()
    again = consumer.pull(1, wait=timedelta(seconds=DEADLINE_S))
    assert again.tags == [("eu", "large")] and again[0].attempt == 2
    again.ack()


def test_a_message_has_the_key_with_which_it_was_sent_in_each_of_its_lives(desk: Desk) -> None:
    desk.producer.send(desk.subject, b"1", delay=AT_ONCE, key="order-7", headers={"trace": "a1"})
    desk.producer.send(desk.subject, b"2", delay=AT_ONCE)
    desk.producer.send_batch(desk.subject, [b"3", b"4"], delay=AT_ONCE, keys=["order-8", "order-ä"])
    consumer = desk.consumer()
    taken = {message.body: message for message in desk.take(consumer, 4)}
    assert {body: message.key for body, message in taken.items()} == {
        b"1": "order-7",
        b"2": None,
        b"3": "order-8",
        b"4": "order-ä",
    }
    for body in (b"2", b"3", b"4"):
        taken[body].ack()
    # The key is free: a message that comes again only carries it.
    taken[b"1"].nack(timedelta(milliseconds=20))
    later = desk.producer.send(desk.subject, b"5", delay=LATER, key="order-7", on_conflict="reject")
    again = consumer.pull(1, wait=timedelta(seconds=DEADLINE_S))
    assert (again.keys, again[0].attempt, again[0].headers) == (["order-7"], 2, {"trace": "a1"})
    again[0].nack(timedelta(milliseconds=20), error="not yet")
    third = consumer.pull(1, wait=timedelta(seconds=DEADLINE_S))
    assert (third[0].key, third[0].attempt) == ("order-7", 3)
    third[0].ack()
    found = desk.producer.get(desk.subject, key="order-7")
    assert (found.state, found.deliver_at_ms) == (delayd.MessageState.PENDING, later.deliver_at_ms)


def test_an_error_about_a_key_names_key_and_subject(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", delay=LATER, key="order-42")
    with pytest.raises(delayd.KeyPending) as raised:
        desk.send(b"2", delay=LATER, key="order-42")
    for named in ("order-42", desk.subject, str(receipt.sequence)):
        assert named in raised.value.message
    assert (raised.value.sequence, raised.value.deliver_at_ms) == (receipt.sequence, receipt.deliver_at_ms)
