"""Tries: a change that a client asks for again goes under the numbers of the first time (rule I1, docs/keys.md)."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import parse
from delayd.batch.columns import ROWS_MAX, BatchKind, ColumnId
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import ReceiptColumns
from delayd.net.connection import Connection
from delayd.wire.asked import ANSWER, CancelAnswer, MessageState, RescheduleAnswer
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_u64
from delayd.wire.requests import RequestType
from tests.unit.client.servers import SmallDelay
from tests.unit.client.world import PAST_MS, World, on_loop

TEN_MS, NOON_MS = PAST_MS + 36_000_000, PAST_MS + 43_200_000


class Heard(NamedTuple):
    """What a server heard of a request: its numbers, and for how many rows."""

    kind: RequestType
    rows: int
    asker: int | None
    low_water: int | None
    number: int | None
    of_rows: list[int]  # The number of each row, when it has one.


class Forgetful:
    """Does what a delay server is asked, and loses as many answers as it is told to."""

    def __init__(self, delay: SmallDelay, lose: int = 0) -> None:
        self.heard: list[Heard] = []
        self.lose = lose
        self._delay = delay
        self._serve_send = delay.serve
        delay.serve = self._serve  # type: ignore[method-assign]

    def _serve(self, connection: Connection, frame: Frame) -> None:
        if frame.type == RequestType.SEND:
            self._serve_send(connection, frame)
            return
        batch = parse(memoryview(bytes(frame.body)))
        assert batch.kind is BatchKind.ASKED
        numbers = batch.uint64s(ColumnId.ORIGIN_SEQUENCE).tolist() if ColumnId.ORIGIN_SEQUENCE in batch else []
        asker, low_water, number = (
            need_u64(frame.head, name) if name in frame.head else None for name in ("asker", "low_water", "number")
        )
        self.heard.append(Heard(RequestType(frame.type), batch.count, asker, low_water, number, numbers))
        if self.lose:
            self.lose -= 1
            connection.abort()
            return
        answers = np.zeros(batch.count, ANSWER)
        moves = frame.type == RequestType.RESCHEDULE
        answers["answer"] = RescheduleAnswer.MOVED if moves else CancelAnswer.CANCELLED
        answers["state"] = MessageState.PENDING if moves else MessageState.CANCELLED
        head: Head = {"log_id": self._delay.log_id, "now_ms": self._delay.now_ms(), "retry_after_ms": 100}
        connection.answer(frame.request_id, head, [answers.tobytes()])


def columns(log_id: int, count: int) -> ReceiptColumns:
    instants = np.full(count, PAST_MS, np.int64)
    sequences = np.arange(1, count + 1, dtype=np.uint64)
    return ReceiptColumns(np.full(count, log_id, np.uint64), sequences, instants, instants)


def test_rule_I1_a_move_by_receipt_is_asked_again_under_its_number_and_the_next_one_under_another() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send("s", b"x", deliver_at_ms=PAST_MS)
            server = Forgetful(world.delay, lose=2)
            for _ in range(2):
                moved = await producer.reschedule("s", receipt=receipt, deliver_at_ms=TEN_MS)
                assert moved.answer is RescheduleAnswer.MOVED
        first, second, third, later = server.heard
        assert first == second == third and first.rows == 1 and not first.of_rows
        assert first.asker and first.number
        assert later.asker == first.asker and later.number is not None and later.number > first.number
        assert (first.low_water, later.low_water) == (first.number, later.number), "what has ended is not asked again"

    on_loop(scenario)


def test_rule_I1_a_call_that_needs_several_requests_has_one_number() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            server = Forgetful(world.delay, lose=1)
            moved = await producer.reschedule_batch(
                "s", receipt=columns(world.delay.log_id, ROWS_MAX + 10), deliver_at_ms=NOON_MS
            )
            assert set(moved.answers.tolist()) == {RescheduleAnswer.MOVED}
        assert sorted({each.rows for each in server.heard}) == [10, ROWS_MAX]
        assert len(server.heard) >= 3
        ((asker, low_water, number),) = {(each.asker, each.low_water, each.number) for each in server.heard}
        assert asker and number and low_water == number
        assert not any(each.of_rows for each in server.heard), "no row costs anything"

    on_loop(scenario)


def test_rule_I1_the_low_water_mark_passes_no_call_that_is_under_way() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send("s", b"x", deliver_at_ms=PAST_MS)
            server = Forgetful(world.delay, lose=3)
            calls = [producer.reschedule("s", receipt=receipt, deliver_at_ms=TEN_MS + number) for number in range(20)]
            await asyncio.gather(*calls, producer.reschedule("s", key="k", deliver_at_ms=TEN_MS))
        highest = 0
        for each in server.heard:
            assert each.low_water is not None
            highest = max(highest, each.low_water)
            assert min(each.of_rows, default=each.number or 0) >= highest, "it was told to forget this number"
        by_receipt = {each.number for each in server.heard} - {None}
        by_key = {number for each in server.heard for number in each.of_rows}
        assert len(by_receipt) == 20 and len(by_key) == 1 and not by_receipt & by_key
        assert len(server.heard) > 21

    on_loop(scenario)


def test_a_cancel_by_receipt_and_a_question_need_no_number() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send("s", b"x", deliver_at_ms=PAST_MS)
            server = Forgetful(world.delay, lose=1)
            assert await producer.cancel("s", receipt=receipt) is CancelAnswer.CANCELLED
            await producer.get("s", receipt=receipt)
            await producer.get("s", key="k")
            await producer.cancel("s", key="k")
        *without, by_key = server.heard
        assert {(each.asker, each.low_water, each.number, *each.of_rows) for each in without} == {(None, None, None)}
        assert by_key.asker and len(by_key.of_rows) == 1

    on_loop(scenario)
