"""Reschedule as programs use it, blocking and awaited, on real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

import delayd
from delayd import CancelAnswer, MessageState, RescheduleAnswer
from tests.end_to_end.up_process import Up, up
from tests.waiting import wait_until

HOUR = timedelta(hours=1)
YEAR = timedelta(days=366)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("reschedule"), "--port", "0") as servers:
        yield servers


def next_of(consumer: delayd.Consumer) -> tuple[bytes, bytes | str | int | None]:
    message = next(consumer)
    message.ack()
    return message.body, message.headers.get("trace")


def test_a_message_comes_when_it_was_moved_to_with_all_that_it_had(running: Up) -> None:
    with delayd.Producer(running.meta) as producer, delayd.Consumer(running.meta, "moves", "all") as consumer:
        receipt = producer.send("moves", b"body", delay=HOUR, headers={"trace": "a1"})
        later = producer.reschedule("moves", receipt=receipt, delay=3 * HOUR)
        assert later.answer is RescheduleAnswer.MOVED and later.receipt is not None
        assert abs(later.receipt.deliver_at_ms - receipt.deliver_at_ms - 7_200_000) < 10_000
        assert later.receipt.sequence != receipt.sequence and "moved, due at" in str(later)
        next_year = producer.reschedule("moves", receipt=receipt, delay=YEAR)
        assert next_year.answer is RescheduleAnswer.MOVED and next_year.receipt is not None
        again = producer.reschedule("moves", receipt=later.receipt, deliver_at_ms=next_year.receipt.deliver_at_ms)
        assert (again.answer, again.receipt) == (RescheduleAnswer.MOVED, next_year.receipt)
        found = producer.get("moves", receipt=receipt)
        assert (found.state, found.deliver_at_ms) == (MessageState.PENDING, next_year.receipt.deliver_at_ms)
        soon = producer.reschedule("moves", receipt=receipt, delay=timedelta(seconds=1))
        assert soon.answer is RescheduleAnswer.MOVED and soon.receipt is not None
        assert next_of(consumer) == (b"body", "a1")
        assert time.time() * 1000 > soon.receipt.deliver_at_ms - 50

        def answers() -> set[RescheduleAnswer]:
            return {
                producer.reschedule("moves", receipt=old, delay=HOUR).answer
                for old in (receipt, later.receipt, soon.receipt)
                if old is not None
            }

        wait_until(lambda: answers() == {RescheduleAnswer.ALREADY_DISPATCHED}, answers)
        assert producer.get("moves", receipt=receipt).state is MessageState.DISPATCHED


def test_a_message_that_is_moved_to_the_past_comes_at_once_and_a_cancelled_one_not(running: Up) -> None:
    with delayd.Producer(running.meta) as producer, delayd.Consumer(running.meta, "past", "all") as consumer:
        receipt = producer.send("past", b"past", delay=HOUR)
        gone = producer.send("past", b"gone", delay=HOUR)
        assert producer.cancel("past", receipt=gone) is CancelAnswer.CANCELLED
        assert producer.reschedule("past", receipt=gone, delay=HOUR).answer is RescheduleAnswer.CANCELLED
        moved = producer.reschedule("past", receipt=receipt, deliver_at=datetime(2020, 1, 1, tzinfo=UTC))
        assert moved.answer is RescheduleAnswer.MOVED and moved.receipt is not None and moved.receipt.was_due
        assert next_of(consumer) == (b"past", None)
        forged = receipt._replace(sequence=receipt.sequence + 1_000_000)
        unknown = producer.reschedule("past", receipt=forged, delay=HOUR)
        assert (unknown.answer, unknown.receipt) == (RescheduleAnswer.UNKNOWN, None)


def test_old_receipts_stand_for_the_message_after_a_restart_and_a_kill(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send("restarts", b"one", delay=HOUR)
        for hours in (30, 2, 50):
            assert producer.reschedule("restarts", receipt=receipt, delay=hours * HOUR).answer is RescheduleAnswer.MOVED
            running.kill("delay")
            due_ms = producer.get("restarts", receipt=receipt).deliver_at_ms
            assert abs(due_ms - time.time() * 1000 - hours * 3_600_000) < 120_000
        assert producer.cancel("restarts", receipt=receipt) is CancelAnswer.CANCELLED
        assert producer.reschedule("restarts", receipt=receipt, delay=HOUR).answer is RescheduleAnswer.CANCELLED


def test_many_messages_awaited(running: Up) -> None:
    async def story() -> None:
        async with delayd.AsyncProducer(running.meta) as producer:
            receipt = await producer.send_batch("many", [b"%d" % row for row in range(30_000)], delay=HOUR)
            instants = receipt.deliver_at_ms + 1_000 * (np.arange(30_000) % 7)
            moved = await producer.reschedule_batch("many", receipt=receipt, deliver_at_ms=instants)
            assert len(moved) == 30_000 and (moved.answers == RescheduleAnswer.MOVED).all()
            assert (moved.deliver_at_ms == instants).all()
            back = await producer.reschedule_batch("many", receipt=moved, deliver_at_ms=receipt.deliver_at_ms)
            assert (back.answers == RescheduleAnswer.MOVED).all()
            states = await producer.get_batch("many", receipt=receipt)
            assert (states["state"] == MessageState.PENDING).all()
            assert (states["sequence"] == back.sequences).all()
            assert ((await producer.cancel_batch("many", receipt=back)) == CancelAnswer.CANCELLED).all()
            one = await producer.send("many", b"one", delay=HOUR)
            assert (await producer.reschedule("many", receipt=one, delay=2 * HOUR)).answer is RescheduleAnswer.MOVED

    asyncio.run(story())


def test_no_message_of_a_window_is_moved_twice_by_one_call(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        # More than one piece: when the walk reaches the next hour, messages that it has moved stand there.
        moved = producer.send_batch("where", [b"x"] * 70_000, delay=5 * HOUR)
        untouched = producer.send("where", b"x", delay=40 * HOUR)
        cancelled = producer.send("where", b"x", delay=5 * HOUR)
        producer.cancel("where", receipt=cancelled)
        before = datetime.now(UTC) + 20 * HOUR
        assert producer.reschedule_where("where", shift=HOUR, due_before=before) == delayd.Walked(found=70_000)
        assert (producer.get_batch("where", receipt=moved)["deliver_at_ms"] == moved.deliver_at_ms).all()
        seen: list[delayd.Walked] = []
        walked = producer.reschedule_where("where", shift=HOUR, due_before=before, dry_run=False, progress=seen.append)
        assert walked == delayd.Walked(found=70_000, done=70_000)
        assert seen[-1]._replace(resume="") == walked
        now = producer.get_batch("where", receipt=moved)
        assert (now["state"] == MessageState.PENDING).all()
        assert (now["deliver_at_ms"] == moved.deliver_at_ms + 3_600_000).all()
        assert producer.get("where", receipt=untouched).deliver_at_ms == untouched.deliver_at_ms
        assert producer.get("where", receipt=cancelled).state is MessageState.CANCELLED
        assert producer.cancel_where("where", dry_run=False).done == 70_001


def test_a_walk_goes_on_where_it_was_when_the_server_is_killed(running: Up) -> None:
    seen: list[delayd.Walked] = []

    def told(walked: delayd.Walked) -> None:
        seen.append(walked)
        if len(seen) == 1:
            running.kill("delay")

    with delayd.Producer(running.meta) as producer:
        receipt = producer.send_batch("killed", [b"x"] * 70_000, delay=5 * HOUR)
        walked = producer.reschedule_where("killed", shift=HOUR, dry_run=False, progress=told)
        assert len(seen) > 1 and walked == delayd.Walked(found=70_000, done=70_000)
        now = producer.get_batch("killed", receipt=receipt)
        assert (now["deliver_at_ms"] == receipt.deliver_at_ms + 3_600_000).all()
        seen.clear()
        walked = producer.cancel_where("killed", dry_run=False, progress=told)
        assert len(seen) > 1 and walked == delayd.Walked(found=70_000, done=70_000)
        assert producer.cancel_where("killed") == delayd.Walked()


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_walk_that_was_interrupted_goes_on_and_moves_nothing_twice(running: Up, pieces: int) -> None:
    seen: list[delayd.Walked] = []

    def told(walked: delayd.Walked) -> None:
        seen.append(walked)
        if len(seen) == pieces:
            raise ZeroDivisionError

    subject = f"interrupted-{pieces}"
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send_batch(subject, [b"x"] * 70_000, delay=5 * HOUR)
        with pytest.raises(ZeroDivisionError):
            producer.reschedule_where(subject, shift=HOUR, dry_run=False, progress=told)
        left = producer.reschedule_where(subject, shift=HOUR, resume=seen[-1].resume)
        walked = producer.reschedule_where(subject, shift=HOUR, dry_run=False, resume=seen[-1].resume)
        assert walked == delayd.Walked(found=left.found, done=left.found) and seen[-1].done + walked.done <= 70_000
        now = producer.get_batch(subject, receipt=receipt)
        assert (now["deliver_at_ms"] == receipt.deliver_at_ms + 3_600_000).all()
        with pytest.raises(delayd.BadArgument, match="resume"):
            producer.reschedule_where(subject, shift=HOUR, resume="1,2")


def test_messages_of_a_window_that_are_moved_to_the_past_come_at_once(running: Up) -> None:
    async def story() -> delayd.Walked:
        async with delayd.AsyncProducer(running.meta) as producer:
            await producer.send("pull_in", b"one", delay=2 * HOUR)
            await producer.send("pull_in", b"two", delay=30 * HOUR)
            # Further back than instants go.
            return await producer.reschedule_where("pull_in", shift=timedelta(days=-30_000), dry_run=False)

    assert asyncio.run(story()) == delayd.Walked(found=2, done=2)
    with delayd.Consumer(running.meta, "pull_in", "all") as consumer:
        assert {next_of(consumer)[0] for _ in range(2)} == {b"one", b"two"}


def test_bad_shifts_of_a_window_move_nothing(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send("shifts", b"x", delay=HOUR)
        for shift in (timedelta(0), timedelta(microseconds=999), 3_600):
            with pytest.raises(delayd.BadArgument, match="shift"):
                producer.reschedule_where("shifts", shift=shift, dry_run=False)  # type: ignore[arg-type]
        with pytest.raises(delayd.PastHorizon):
            producer.reschedule_where("shifts", shift=timedelta(days=800), dry_run=False)
        assert producer.get("shifts", receipt=receipt).deliver_at_ms == receipt.deliver_at_ms


def test_bad_arguments(running: Up) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send("bad", b"", delay=HOUR)
        with pytest.raises(delayd.BadArgument, match="say once when"):
            producer.reschedule("bad", receipt=receipt)
        with pytest.raises(delayd.BadArgument, match="say once which"):
            producer.reschedule("bad", delay=HOUR)
        with pytest.raises(delayd.PastHorizon):
            producer.reschedule("bad", receipt=receipt, delay=10 * YEAR)
        with pytest.raises(delayd.BadInstant):
            producer.reschedule("bad", receipt=receipt, deliver_at_ms=1_700_000_000)
        many = producer.send_batch("bad", [b"", b""], delay=HOUR)
        with pytest.raises(delayd.BadArgument):
            producer.reschedule_batch("bad", receipt=many, deliver_at_ms=[1_900_000_000_000] * 3)
        assert (
            len(producer.reschedule_batch("bad", receipt=producer.send_batch("bad", [], delay=HOUR), delay=HOUR)) == 0
        )
