"""An answer gets lost after its request was done, and somebody else changes the message before the client asks again:
what that one was told stays true (rule I1, docs/keys.md, Tries).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

import delayd
from delayd import CancelAnswer, MessageState, RescheduleAnswer
from delayd.client.asking.messages import About, Asker
from delayd.errors import ConnectionLost
from delayd.wire.requests import RequestType
from tests.conformance.public.desk import LATER, Desk

ROWS = 20


class Sent(NamedTuple):
    """Messages of which somebody else changes the first one, and when they are to be due."""

    desk: Desk
    batch: delayd.BatchReceipt
    receipt: delayd.Receipt
    due: datetime


@contextmanager
def one_lost_answer(patch: pytest.MonkeyPatch, kind: RequestType, meanwhile: Callable[[], object]) -> Iterator[None]:
    """Have the first answer of a kind get lost, and do something before the client asks again."""
    lost: list[RequestType] = []
    asked: Callable[..., Any] = Asker.once

    async def ask(self: Asker, question: About, *more: Any) -> Any:
        answers = await asked(self, question, *more)
        if question.request is kind and not lost:
            lost.append(question.request)
            await asyncio.to_thread(meanwhile)
            raise ConnectionLost("the answer is lost", sent=True)
        return answers

    with patch.context() as patched:
        patched.setattr(Asker, "once", ask)
        yield
    assert lost == [kind]


def by_receipt(sent: Sent) -> delayd.Receipt | None:
    moved = sent.desk.producer.reschedule(sent.desk.subject, receipt=sent.receipt, deliver_at=sent.due)
    assert moved.answer is RescheduleAnswer.MOVED
    return moved.receipt


def if_unmoved(sent: Sent) -> delayd.Receipt | None:
    moved = sent.desk.producer.reschedule(sent.desk.subject, receipt=sent.receipt, deliver_at=sent.due, if_unmoved=True)
    assert moved.answer is RescheduleAnswer.MOVED, "its own try has moved it"
    return moved.receipt


def by_key(sent: Sent) -> delayd.Receipt | None:
    moved = sent.desk.producer.reschedule(sent.desk.subject, key="k0", deliver_at=sent.due)
    assert moved.answer is RescheduleAnswer.MOVED
    return moved.receipt


def by_receipts(sent: Sent) -> delayd.Receipt | None:
    moved = sent.desk.producer.reschedule_batch(sent.desk.subject, receipt=sent.batch, deliver_at=sent.due)
    assert set(moved.answers.tolist()) == {RescheduleAnswer.MOVED}
    return next(iter(moved.receipts()))


def awaited(sent: Sent) -> delayd.Receipt | None:
    async def move() -> delayd.Rescheduled:
        async with delayd.AsyncProducer(sent.desk.address) as producer:
            return await producer.reschedule(sent.desk.subject, receipt=sent.receipt, deliver_at=sent.due)

    moved = asyncio.run(move())
    assert moved.answer is RescheduleAnswer.MOVED
    return moved.receipt


def by_a_walk(sent: Sent) -> None:
    walked = sent.desk.producer.reschedule_where(sent.desk.subject, shift=LATER, dry_run=False)
    assert walked.done == ROWS


@pytest.mark.parametrize("move", [by_receipt, if_unmoved, by_key, by_receipts, awaited, by_a_walk])
def test_rule_I1_a_move_whose_answer_was_lost_undoes_no_later_change(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, move: Callable[[Sent], delayd.Receipt | None]
) -> None:
    keys = [f"k{row}" for row in range(ROWS)]
    batch = desk.producer.send_batch(desk.subject, [b"1"] * ROWS, delay=LATER, keys=keys)
    first, second, *_ = batch.receipts()
    assert first is not None and second is not None
    due, others = (datetime.now(UTC).replace(microsecond=0) + hours * LATER for hours in (5, 7))
    told: list[delayd.RescheduleAnswer | CancelAnswer] = []

    def meanwhile() -> None:
        with delayd.Producer(desk.address) as other:
            told.append(other.reschedule(desk.subject, receipt=first, deliver_at=others).answer)
            told.append(other.cancel(desk.subject, receipt=second))

    with one_lost_answer(monkeypatch, RequestType.RESCHEDULE, meanwhile):
        moved = move(Sent(desk, batch, first, due))
    assert told == [RescheduleAnswer.MOVED, CancelAnswer.CANCELLED]
    assert moved is None or moved.deliver_at == due, "it is answered as the first time"
    info = desk.producer.get(desk.subject, receipt=moved or first)
    assert (info.state, info.deliver_at_ms) == (MessageState.PENDING, int(others.timestamp() * 1000))
    assert desk.producer.get(desk.subject, receipt=second).state is MessageState.CANCELLED


@pytest.mark.parametrize("name", ["receipt", "key"])
def test_rule_I1_a_cancel_whose_answer_was_lost_ends_no_later_message(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (receipt,) = desk.send(b"1", delay=LATER, key="k")
    later: list[delayd.Receipt] = []

    def meanwhile() -> None:
        with delayd.Producer(desk.address) as other:
            later.append(other.send(desk.subject, b"2", delay=LATER, key="k"))

    named: dict[str, Any] = {"receipt": receipt} if name == "receipt" else {"key": "k"}
    with one_lost_answer(monkeypatch, RequestType.CANCEL, meanwhile):
        assert desk.producer.cancel(desk.subject, **named) is CancelAnswer.CANCELLED
    assert desk.producer.get(desk.subject, receipt=later[0]).state is MessageState.PENDING
