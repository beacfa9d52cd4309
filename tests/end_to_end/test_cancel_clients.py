"""Cancel and get as programs use them, blocking and awaited, on real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest

import delayd
from delayd import CancelAnswer, MessageState
from tests.end_to_end.up_process import Up, up
from tests.waiting import wait_until

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("cancel"), "--port", "0") as servers:
        yield servers


def test_one_message(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        kept = producer.send("mail", b"kept", delay=HOUR)
        gone = producer.send("mail", b"gone", delay=HOUR)
        assert producer.get("mail", receipt=gone).state is MessageState.PENDING
        assert producer.cancel("mail", receipt=gone) is CancelAnswer.CANCELLED
        assert producer.cancel("mail", receipt=gone) is CancelAnswer.CANCELLED
        found = producer.get("mail", receipt=gone)
        assert (found.state, found.deliver_at_ms) == (MessageState.CANCELLED, gone.deliver_at_ms)
        # When it was decided stands in the dispatch log, which is written a moment later.
        wait_until(lambda: producer.get("mail", receipt=gone).decided_at_ms is not None, lambda: "no instant")
        decided_at_ms = producer.get("mail", receipt=gone).decided_at_ms
        assert decided_at_ms is not None
        assert abs(decided_at_ms - time.time() * 1000) < 60_000
        assert producer.get("mail", receipt=kept).state is MessageState.PENDING
        forged = kept._replace(sequence=kept.sequence + 1_000_000)
        assert producer.cancel("mail", receipt=forged) is CancelAnswer.UNKNOWN
        assert producer.get("mail", receipt=forged).state is MessageState.UNKNOWN
        assert producer.get("mail", receipt=forged).other is None


def test_a_message_that_has_left(running: Up) -> None:
    with delayd.Producer(running.meta) as producer, delayd.Consumer(running.meta, "left", "all") as consumer:
        receipt = producer.send("left", b"now", delay=timedelta(0))
        assert next(consumer).body == b"now"
        answers: list[CancelAnswer] = []

        def told() -> bool:
            answers.append(producer.cancel("left", receipt=receipt))
            return answers[-1] is not CancelAnswer.IN_FLIGHT

        wait_until(told, lambda: answers)
        assert answers[-1] is CancelAnswer.ALREADY_DISPATCHED
        found = producer.get("left", receipt=receipt)
        assert (found.state, found.attempt) == (MessageState.DISPATCHED, 1)
        assert found.target_log_id is not None
        assert (found.target_appended_at_ms or 0) >= receipt.deliver_at_ms
        assert "dispatched" in str(found)


def test_many_messages_awaited(running: Up) -> None:
    async def story() -> None:
        async with delayd.AsyncProducer(running.meta) as producer:
            receipt = await producer.send_batch("many", [b"%d" % row for row in range(100_000)], delay=HOUR)
            answers = await producer.cancel_batch("many", receipt=receipt)
            assert answers.dtype == np.uint8
            assert (answers == CancelAnswer.CANCELLED).all()
            states = await producer.get_batch("many", receipt=receipt)
            assert (states["state"] == MessageState.CANCELLED).all()
            assert (states["deliver_at_ms"] == receipt.deliver_at_ms).all()
            one = await producer.send("many", b"one", delay=HOUR)
            assert await producer.cancel("many", receipt=one) is CancelAnswer.CANCELLED
            assert (await producer.get("many", receipt=one)).state is MessageState.CANCELLED

    asyncio.run(story())


def test_no_messages(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send_batch("none", [], delay=HOUR)
        assert len(producer.cancel_batch("none", receipt=receipt)) == 0
        assert len(producer.get_batch("none", receipt=receipt)) == 0


def test_a_restart_in_between_is_waited_for(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send_batch("restart", [b"a", b"b"], delay=HOUR)
        running.kill("delay")
        assert producer.cancel_batch("restart", receipt=receipt).tolist() == [CancelAnswer.CANCELLED] * 2


def test_bad_arguments(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send("bad", b"", delay=HOUR)
        with pytest.raises(delayd.BadArgument, match="receipt is what a send returned"):
            producer.cancel("bad", receipt=7)  # type: ignore[arg-type]
        with pytest.raises(delayd.BadSubject):
            producer.cancel("", receipt=receipt)
        with pytest.raises(delayd.UnknownServer):
            producer.get("bad", receipt=receipt._replace(log_id=delayd.LogId(5)))
