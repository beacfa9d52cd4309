"""Reschedule as programs use it, blocking and awaited, on real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

import delayd
from delayd import CancelAnswer, MessageState, RescheduleAnswer
from tests.end_to_end.up_process import Up, up

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("reschedule"), "--port", "0") as servers:
        yield servers


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
