"""Keys and tags as programs use them, blocking and awaited, on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta

import pytest

import delayd
from delayd import CancelAnswer, MessageState, SendVerdict
from delayd.errors import BadKey, KeyPending
from tests.end_to_end.up_process import Up, up
from tests.waiting import wait_until

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("keys"), "--port", "0") as servers:
        yield servers


def test_one_pending_message_has_a_key(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        first = producer.send("one", b"1", delay=HOUR, key="order-42")
        assert (first.kept, first.replaced) == (False, None)
        with pytest.raises(KeyPending) as pending:
            producer.send("one", b"2", delay=2 * HOUR, key=b"order-42")
        error = pending.value
        assert (error.log_id, error.sequence) == (first.log_id, first.sequence)
        assert error.deliver_at_ms == first.deliver_at_ms
        kept = producer.send("one", b"3", delay=2 * HOUR, key="order-42", on_conflict="keep")
        assert kept.kept
        assert (kept.log_id, kept.sequence, kept.deliver_at_ms) == (first.log_id, first.sequence, first.deliver_at_ms)
        assert producer.get("one", receipt=kept).state is MessageState.PENDING
        third = producer.send("one", b"4", delay=3 * HOUR, key="order-42", on_conflict="replace")
        assert (third.kept, third.replaced) == (False, first.sequence)
        assert producer.get("one", receipt=first).state is MessageState.REPLACED
        other = producer.send("another", b"1", delay=HOUR, key="order-42")
        assert (other.kept, other.replaced) == (False, None)


def test_messages_are_cancelled_and_asked_for_by_their_keys(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send("by-key", b"x", delay=HOUR, key="größe")
        assert producer.get("by-key", key="größe").state is MessageState.PENDING
        assert producer.cancel("by-key", key="größe") is CancelAnswer.CANCELLED
        assert producer.cancel("by-key", receipt=receipt) is CancelAnswer.CANCELLED
        assert producer.get("by-key", key="größe").state is MessageState.CANCELLED
        assert producer.cancel("by-key", key="never sent") is CancelAnswer.UNKNOWN
        again = producer.send("by-key", b"y", delay=HOUR, key="größe")
        assert again.sequence > receipt.sequence
        keys = ["a", "größe", "b"]
        batch = producer.send_batch("by-key", [b"1", b"2", b"3"], delay=HOUR, keys=keys)
        assert batch.verdicts.tolist() == [SendVerdict.ACCEPTED, SendVerdict.REJECTED, SendVerdict.ACCEPTED]
        assert batch.others.tolist() == [0, again.sequence, 0]
        assert batch.others_at_ms.tolist() == [0, again.deliver_at_ms, 0]
        assert (producer.get_batch("by-key", keys=keys)["state"] == MessageState.PENDING).all()
        assert producer.cancel_batch("by-key", keys=[*keys, "c"]).tolist() == [1, 1, 1, CancelAnswer.UNKNOWN]
        with pytest.raises(BadKey):
            producer.send("by-key", b"x", delay=HOUR, key="k" * 201)


def test_the_rows_of_a_batch_meet_each_other_in_their_order(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        batch = producer.send_batch(
            "order", [b"1", b"2", b"3"], delay=HOUR, keys=["k", "k", "k"], on_conflict="replace"
        )
        assert batch.verdicts.tolist() == [SendVerdict.ACCEPTED, SendVerdict.REPLACED, SendVerdict.REPLACED]
        assert batch.others.tolist() == [0, *batch.sequences[:2].tolist()]
        states = producer.get_batch("order", receipt=batch)["state"].tolist()
        assert states == [MessageState.REPLACED, MessageState.REPLACED, MessageState.PENDING]


def test_many_keys_awaited(running: Up) -> None:
    async def story() -> None:
        async with delayd.AsyncProducer(running.meta) as producer:
            keys = [f"order-{row}" for row in range(20_000)]
            batch = await producer.send_batch("many", [b"x"] * 20_000, delay=HOUR, keys=keys)
            assert not batch.verdicts.any()
            again = await producer.send_batch("many", [b"y"] * 20_000, delay=HOUR, keys=keys, on_conflict="keep")
            assert (again.verdicts == SendVerdict.KEPT).all()
            assert (again.others == batch.sequences).all()
            assert (await producer.cancel_batch("many", keys=keys) == CancelAnswer.CANCELLED).all()
            sends = [producer.send("many", b"z", delay=HOUR, key=key) for key in keys[:500]]
            outcomes = await asyncio.gather(*sends, *[producer.send("many", b"z", delay=HOUR)], return_exceptions=True)
            assert all(isinstance(outcome, delayd.Receipt) for outcome in outcomes)

    asyncio.run(story())


def test_a_key_is_free_again_once_its_message_has_left(running: Up) -> None:
    with delayd.Producer(running.meta) as producer, delayd.Consumer(running.meta, "left", "g") as consumer:
        first = producer.send("left", b"now", delay=timedelta(0), key="k", tags=["eu", "urgent"], headers={"h": "v"})
        message = next(consumer)
        assert (message.body, message.headers) == (b"now", {"h": "v"})
        message.ack()
        wait_until(
            lambda: producer.get("left", receipt=first).state is MessageState.DISPATCHED,
            lambda: "it was not handed over",
        )
        second = producer.send("left", b"later", delay=HOUR, key="k")
        assert second.sequence > first.sequence
        assert producer.get("left", key="k").state is MessageState.PENDING
