"""Producers and servers that refuse, hang, lose answers or say nonsense."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from socket import socket
from typing import cast

import numpy as np
import pytest

import delayd
from delayd import AsyncProducer, BatchFailed, BatchReceipt
from delayd.batch.columns import ColumnId
from delayd.batch.content import Names, slots_of_names
from delayd.client.sending.receipts import Accepted, Verdicts
from delayd.errors import (
    BadArgument,
    BatchMalformed,
    ClockInDoubt,
    ConnectionLost,
    DelaydError,
    DiskReserve,
    HourFull,
    LogId,
    NotOwner,
    NotReady,
    OutcomeUnknown,
    QueueFull,
    QuotaReached,
    Rebuilding,
    SendHandle,
    ServerFenced,
    SlowDown,
    Stopping,
)
from delayd.log.hour import ENDED, EndedRows
from delayd.net.connection import Connection
from delayd.outcome import MessageState, Reason
from delayd.wire.asked import ANSWER, CancelAnswer, read_asked_keys
from delayd.wire.frame import ANSWER as ANSWER_FLAG
from delayd.wire.frame import ERROR, Frame, Head, HeadValue, encode_frame
from delayd.wire.requests import RequestType
from tests.unit.client.servers import SmallDelay, drop_before, hold, refuse
from tests.unit.client.world import LIMIT_S, PAST_MS, World, on_loop, on_steady_loop
from tests.unit.net.loopback import error_of, skip
from tests.waiting import DEADLINE_S, until


async def until_held(delay: SmallDelay, count: int) -> None:
    await until(lambda: len(delay.held) == count)


def test_rule_T2_a_delay_counts_by_the_servers_clock_and_is_never_short() -> None:
    async def scenario(world: World) -> None:
        for ahead_ms in (-5_000, 0, 7_000):
            world.delay.ahead_ms = ahead_ms
            async with AsyncProducer(world.address) as producer:
                before = world.delay.now_ms()
                receipt = await producer.send("a", b"x", delay=timedelta(seconds=2))
                spent = world.delay.now_ms() - before
                late = receipt.deliver_at_ms - (before + 2_000)
                # The send left while this was spent, and the clock is known to within the time of an answer.
                assert 0 <= late <= 2 * spent + 20, f"{late} ms late with a clock {ahead_ms} ms ahead"

    on_loop(scenario)


def test_rule_T4_a_delay_waits_until_the_clock_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.client.routing.ALIVE_EVERY_MS", 20)

    async def scenario(world: World) -> None:
        before_ms = world.delay.now_ms()
        world.delay.ahead_ms, world.delay.in_doubt = 60 * 86_400_000, True
        async with AsyncProducer(world.address) as producer:
            sending = asyncio.ensure_future(producer.send("a", b"y", delay=timedelta(seconds=2)))
            await asyncio.sleep(0.05)
            assert not sending.done()
            world.delay.ahead_ms, world.delay.in_doubt = 0, False
            assert 0 <= (await sending).deliver_at_ms - before_ms - 2_000 <= DEADLINE_S * 1_000

    on_loop(scenario)


def test_a_queue_that_stays_full_is_a_named_retryable_error() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, queue_bytes_max=4 << 20) as producer:
            world.delay.holding = True
            body = bytes(3 << 20)
            sends = [producer.send("a", body, deliver_at_ms=PAST_MS) for _ in range(3)]
            await until_held(world.delay, 1)
            await skip(LIMIT_S)
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown, QueueFull, QueueFull]
            world.delay.holding = False
            await producer.send("a", b"again", deliver_at_ms=PAST_MS)

    on_steady_loop(scenario)


def test_a_caller_that_is_cancelled_stops_waiting_and_nobody_else_does() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.holding = True

            async def send(body: bytes) -> int:
                return (await producer.send("a", body, deliver_at_ms=PAST_MS)).sequence

            impatient = asyncio.create_task(send(b"1"))
            patient = asyncio.create_task(send(b"2"))
            await until(lambda: len(world.delay.held) == 1)
            impatient.cancel()
            await asyncio.wait([impatient])
            world.delay.release()
            assert await patient == 2
        assert len(world.delay.rows) == 2

    on_loop(scenario)


def test_an_unknown_outcome_can_be_asked_for_later() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.holding = True
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: bool(world.delay.held))
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
            assert await producer.outcome(error.handle) is None
            assert isinstance(await error_of(producer.outcome(cast(SendHandle, "x"))), BadArgument)
            world.delay.release()
            outcome = await producer.outcome(error.handle)
            assert outcome is not None and outcome.base_sequence == 1 and outcome.row_count == 1
            # Its number is not given up as long as somebody may ask, so the server keeps it.
            await producer.send("a", b"y", deliver_at_ms=PAST_MS)
            assert world.delay.kept[-1].low_water <= error.handle.producer_batch

    on_steady_loop(scenario)


def test_rule_I1_the_low_water_mark_never_passes_a_number_that_is_still_in_use() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, linger_ms=0) as producer:
            await producer.send("a", b"1", deliver_at_ms=PAST_MS)
            world.delay.script.append(hold(world.delay))
            slow = producer.send("a", b"slow", deliver_at_ms=PAST_MS)
            await until(lambda: len(world.delay.held) == 1)
            for _ in range(5):
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            assert {kept.low_water for kept in world.delay.kept[1:]} == {2}
            world.delay.release()
            await slow
            await producer.send("a", b"last", deliver_at_ms=PAST_MS)
            assert world.delay.kept[-1].low_water == world.delay.kept[-1].number

    on_loop(scenario)


def test_refused_rows_fail_alone_and_the_others_go_again_as_a_new_batch() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(refuse(world.delay, HourFull("that hour is full"), [1, 3]))
            sends = [producer.send(f"s{row}", b"%d" % row, deliver_at_ms=PAST_MS + row) for row in range(5)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert [isinstance(outcome, HourFull) for outcome in outcomes] == [False, True, False, True, False]
        assert world.delay.rows == [(b"s%d" % row, b"%d" % row, PAST_MS + row) for row in (0, 2, 4)]
        assert world.delay.numbers == [1, 2]

    on_loop(scenario)


def bodies_of(call: int, count: int) -> list[bytes]:
    return [b"%d-%d" % (call, row) for row in range(count)]


def test_calls_of_one_turn_share_a_batch_and_each_has_its_own_receipt_and_error() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"warm", deliver_at_ms=PAST_MS)
            world.delay.script.append(refuse(world.delay, HourFull("full"), [4, 5]))
            counts = [3, 2, 1, 4]
            calls = [
                producer.send_batch("ab"[call % 2], bodies_of(call, count), np.full(count, PAST_MS + call))
                for call, count in enumerate(counts)
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert world.delay.numbers == [1, 2, 3], "one batch, and once more those that were not refused"
            # Row 4 is the last one of the second call, and row 5 the only one of the third.
            assert isinstance(outcomes[2], HourFull) and isinstance(outcomes[1], BatchFailed)
            assert [failure.rows.tolist() for failure in outcomes[1].failures] == [[1]]
            rows = world.delay.rows
            for call, receipt in ((0, outcomes[0]), (1, outcomes[1].receipt), (3, outcomes[3])):
                assert isinstance(receipt, BatchReceipt)
                told = [rows[sequence - 1] for sequence in receipt.sequences.tolist()]
                kept = bodies_of(call, counts[call])[: 1 if call == 1 else None]
                assert told == [(b"ab"[call % 2 : call % 2 + 1], body, PAST_MS + call) for body in kept]

    on_loop(scenario)


def test_calls_with_keys_share_no_batch_with_others() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"warm", deliver_at_ms=PAST_MS)
            keys = [None, ["k0", "k1"], None, ["k2", None]]
            calls = [
                producer.send_batch("a", bodies_of(call, 2), deliver_at_ms=PAST_MS, keys=own)
                for call, own in enumerate(keys)
            ]
            await asyncio.gather(*calls)
        assert [kept.batch.count for kept in world.delay.kept] == [1, 4, 4]
        assert [ColumnId.KEY_END in kept.batch for kept in world.delay.kept] == [False, False, True]

    on_loop(scenario)


def test_each_call_can_ask_for_its_own_rows_of_a_shared_batch_whose_outcome_is_unknown() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"warm", deliver_at_ms=PAST_MS)
            world.delay.holding = True
            calls = [
                asyncio.ensure_future(producer.send_batch("a", bodies_of(call, 2 + call), deliver_at_ms=PAST_MS))
                for call in range(3)
            ]
            await until_held(world.delay, 1)
            await skip(LIMIT_S)
            errors = [await error_of(call) for call in calls]
            world.delay.release()
            for call, error in enumerate(errors):
                assert isinstance(error, OutcomeUnknown)
                accepted = await producer.outcome(error.handle)
                assert accepted is not None
                first = accepted.base_sequence - 1
                told = [row[1] for row in world.delay.rows[first : first + accepted.row_count]]
                assert told == bodies_of(call, 2 + call)
            assert isinstance(error, OutcomeUnknown)
            beyond = replace(error.handle, row_count=10)
            assert isinstance(await error_of(producer.outcome(beyond)), BadArgument)

    on_steady_loop(scenario)


def test_calls_that_find_no_place_in_time_are_told_that_nothing_was_sent() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"warm", deliver_at_ms=PAST_MS)
            world.delay.holding = True
            under_way: list[asyncio.Future[BatchReceipt]] = []
            for number in range(16):
                under_way.append(asyncio.ensure_future(producer.send_batch("a", [b"%d" % number], [PAST_MS])))
                await until_held(world.delay, number + 1)
            await skip(1)
            # These get the places when the first ones have no outcome in time, before those that wait since later.
            large = [asyncio.ensure_future(producer.send_batch("a", [b"x"] * 2_000, PAST_MS)) for _ in range(16)]
            await asyncio.sleep(0)
            late = [asyncio.ensure_future(producer.send_batch("a", [b"x"], PAST_MS)) for _ in range(3)]
            await skip(0)
            await skip(1)  # They stop to wait for company.
            await skip(LIMIT_S - 2)
            assert {type(await error_of(call)) for call in under_way} == {OutcomeUnknown}
            await until_held(world.delay, 32)
            assert not any(call.done() for call in late)
            await skip(3)
            assert {type(await error_of(call)) for call in late} == {QueueFull}
            world.delay.release()
            await asyncio.gather(*large)

    on_steady_loop(scenario)


def test_rows_that_are_refused_for_now_go_again_later_and_the_others_do_not_wait_for_them() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            later = DiskReserve("near messages only", retry_after_ms=50)
            world.delay.script.extend(
                [refuse(world.delay, later, [1]), lambda *_: False, refuse(world.delay, later, [])]
            )
            receipt = await producer.send_batch("a", [b"0", b"far", b"2"], deliver_at_ms=PAST_MS)
        assert [row[1] for row in world.delay.rows] == [b"0", b"2", b"far"]
        assert receipt.sequences.tolist() == [1, 3, 2] and len(world.delay.numbers) == 4

    on_loop(scenario)


def test_rows_that_are_refused_for_now_go_to_another_server_at_once() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            other = await warm(producer, world)
            later = DiskReserve("near messages only", retry_after_ms=LONG_MS)
            for server in (world.delay, other):
                server.script.append(refuse(server, later, [1]))
            taken = len(world.delay.rows) + len(other.rows)
            assert len(await producer.send_batch("a", [b"0", b"far", b"2"], deliver_at_ms=PAST_MS)) == 3
            assert len(world.delay.rows) + len(other.rows) == taken + 3

    on_loop(scenario)


def test_rule_I3_another_log_at_the_same_address_gets_nothing_of_the_old_one() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(drop_before)
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: bool(world.delay.numbers))
            await world.delay.stop()
            stranger = SmallDelay(999)
            stranger.port = world.delay.port
            world.servers.append(stranger)
            await stranger.start()
            await until(lambda: stranger.connected_count > 1)
            await skip(LIMIT_S)
            assert isinstance(await error_of(sending), OutcomeUnknown)
            assert stranger.numbers == []

    on_steady_loop(scenario)


OF_THE_SERVER = (ClockInDoubt, DiskReserve, NotReady, Rebuilding, ServerFenced, SlowDown, Stopping)


LONG_MS = 3_600_000  # No test that waits so long ends.


def answer_error(error: DelaydError) -> Callable[[Connection, Frame], bool]:
    """A script's step: the request as a whole is refused."""

    def step(connection: Connection, frame: Frame) -> bool:
        connection.answer_error(frame.request_id, error)
        return True

    return step


async def warm(producer: AsyncProducer, world: World) -> SmallDelay:
    """Have both servers connected; the other one."""
    other = await world.second_delay()
    while not (world.delay.kept and other.kept):
        await producer.send("a", b"warm", deliver_at_ms=PAST_MS)
    return other


@pytest.mark.parametrize("kind", OF_THE_SERVER)
@pytest.mark.parametrize("whole", [True, False])
def test_rule_I3_a_named_refusal_moves_a_batch_to_another_server_at_once(kind: type[DelaydError], whole: bool) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            other = await warm(producer, world)
            error = kind("not here", retry_after_ms=LONG_MS)
            step = answer_error(error) if whole else refuse(other, error, [])
            other.script.extend([step] * 1_000)
            before, tried = len(other.rows), len(other.numbers)
            receipts = [await producer.send("a", b"x", deliver_at_ms=PAST_MS) for _ in range(20)]
            assert {receipt.log_id for receipt in receipts} == {world.delay.log_id}
            assert len(other.rows) == before and len(other.numbers) - tried in range(1, 10), "it is left out, not asked"
            other.script.clear()
            while len(other.rows) == before:
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            before, own = len(other.rows), len(world.delay.rows)
            for _ in range(10):
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            assert (len(other.rows) - before, len(world.delay.rows) - own) == (5, 5), "shares are even again"

    on_loop(scenario)


@pytest.mark.parametrize("kind", [QuotaReached, HourFull])
def test_what_is_too_much_at_one_server_is_tried_at_each_other_one_and_then_refused(kind: type[DelaydError]) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, linger_ms=50) as producer:
            other = await warm(producer, world)
            full = kind("too many here")
            servers = (world.delay, other)
            for server in servers:
                server.script.extend([refuse(server, full, [])] * 10)
            assert isinstance(await error_of(producer.send("a", b"x", deliver_at_ms=PAST_MS)), kind)
            assert sorted(10 - len(server.script) for server in servers) == [1, 1], "each was asked once"
            for server in servers:
                server.script.clear()
            # One server has room for some rows of a batch only, and the other one takes the rest.
            taken = [len(server.rows) for server in servers]
            for server in servers:
                server.script.append(refuse(server, full, [1]))
            receipt = await producer.send_batch("a", [b"0", b"1", b"2"], deliver_at_ms=PAST_MS)
            assert len(receipt) == 3
            assert sum(len(server.rows) for server in servers) - sum(taken) == 3

    on_loop(scenario)


EARLIER_AT_MS = 1_900_000_000_000


def ended(*rows: tuple[Reason, int, int]) -> EndedRows:
    """Decisions about new rows: the reason, the new row's sequence, and the earlier row's."""
    made = np.zeros(len(rows), ENDED)
    for at, (reason, new, earlier) in enumerate(rows):
        replaced = reason is Reason.REPLACED
        made["sequence"][at], made["other"][at] = (earlier, new) if replaced else (new, earlier)
        made["deliver_at_ms" if replaced else "other_at_ms"][at] = EARLIER_AT_MS + earlier
        made["reason"][at] = reason
    return made[np.argsort(made["sequence"])]


@pytest.mark.parametrize(
    "rows",
    [
        [(Reason.KEPT, 9, 5)],
        [(Reason.KEPT, 12, 5)],
        [(Reason.REPLACED, 12, 5)],
        [(Reason.CANCELLED, 10, 5)],
        [(Reason.MOVED, 10, 5)],
        [(Reason.REPLACED, 10, 5), (Reason.KEPT, 10, 6)],
    ],
)
def test_decisions_that_do_not_fit_their_batch_are_no_answer(rows: list[tuple[Reason, int, int]]) -> None:
    with pytest.raises(BatchMalformed):
        Verdicts.of(Accepted(LogId(1), 10, 2, PAST_MS, False, ended(*rows).tobytes()))


def slot_of(subject: bytes, key: bytes) -> int:
    return int(slots_of_names(Names.of_lists([subject], [key]))[0])


def test_rule_I4_a_key_that_has_moved_is_sent_to_its_new_owner() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        async with AsyncProducer(world.address) as producer:
            first = await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            assert first.log_id == world.delay.log_id
            world.meta.owners = {slot_of(b"s", b"k"): other.log_id}

            world.delay.script.append(refuse(world.delay, NotOwner("it has moved", retry_after_ms=5), []))
            second = await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
            assert second.log_id == other.log_id

    on_loop(scenario)


class Pending:
    """Answers questions by key as a delay server does; it knows the keys of one subject."""

    def __init__(self, world: World, subject: bytes, keys: list[bytes]) -> None:
        self.world = world
        self.known = {(subject, key) for key in keys}
        self.requests: list[int] = []
        self.refusals: list[DelaydError] = []
        world.delay.serve = self.serve  # type: ignore[method-assign]

    def serve(self, connection: Connection, frame: Frame) -> None:
        if self.refusals:
            connection.answer_error(frame.request_id, self.refusals.pop())
            return
        batch = read_asked_keys(bytes(frame.body))
        assert batch is not None
        self.requests.append(batch.count)
        answers = np.zeros(batch.count, ANSWER)
        for row, name in enumerate(Names.of_batch(batch, np.arange(batch.count)).texts()):
            known = name in self.known
            if frame.type == RequestType.CANCEL:
                answers["answer"][row] = CancelAnswer.CANCELLED if known else CancelAnswer.UNKNOWN
            answers["state"][row] = MessageState.PENDING if known else MessageState.UNKNOWN
        head: Head = {"log_id": self.world.delay.log_id, "now_ms": self.world.delay.now_ms(), "retry_after_ms": 100}
        connection.answer(frame.request_id, head, [answers.tobytes()])


async def asked_after_the_owner_changed(world: World, change: Callable[[SmallDelay], Awaitable[None]]) -> None:
    """A producer learns that another server owns a key; then something happens to that server."""
    other = await world.second_delay()
    Pending(world, b"s", [b"k"])
    world.meta.owners = {slot_of(b"s", b"k"): other.log_id}
    async with AsyncProducer(world.address) as producer:
        await producer.send("s", b"x", deliver_at_ms=PAST_MS, key="k")
        await change(other)
        assert (await producer.get("s", key="k")).state is MessageState.PENDING
        assert await producer.cancel("s", key="k") is CancelAnswer.CANCELLED


def test_a_question_by_key_goes_to_the_new_owner_when_the_old_one_is_lost_meanwhile() -> None:
    async def break_off(world: World, other: SmallDelay) -> None:
        def serve(connection: Connection, frame: Frame) -> None:
            connection.abort()
            world.meta.owners = {}

        other.serve = serve  # type: ignore[method-assign]

    on_loop(lambda world: asked_after_the_owner_changed(world, partial(break_off, world)))


NO_REFUSAL: list[Head] = [
    {"code": "bad_request", "message": 5, "retry_after_ms": 0, "details": {}},
    {"code": "slow_down", "message": "later", "retry_after_ms": -1, "details": {}},
    {"code": None, "message": "", "retry_after_ms": None, "details": {}},
    {},
]


NO_RESULTS: list[dict[str, HeadValue]] = [
    {"now_ms": -1},
    {"now_ms": None},
    {"log_id": 7},
    {"log_id": "x"},
    {"results": []},
    {"results": [{}]},
    {"results": [{"base_sequence": 1, "count": 2, "appended_at_ms": 1, "duplicate": False}]},
    {"results": [{"error": "slow_down", "message": "", "retry_after_ms": 0, "rows": [5]}]},
]


def keep_and_say(delay: SmallDelay, said: dict[str, HeadValue]) -> Callable[[Connection, Frame], bool]:
    """A script's step: the batch is kept, and the answer has other fields than it should."""

    def step(connection: Connection, frame: Frame) -> bool:
        head: Head = delay.timed({"log_id": delay.log_id, "results": [delay.keep(frame)]})
        connection.answer(frame.request_id, {**head, **said})
        return True

    return step


def keep_and_refuse(delay: SmallDelay, head: Head) -> Callable[[Connection, Frame], bool]:
    """A script's step: the batch is kept, and the answer is an error that can't be read."""

    def step(connection: Connection, frame: Frame) -> bool:
        delay.keep(frame)
        connection._writer.write(encode_frame(frame.type, frame.request_id, head, (), ANSWER_FLAG | ERROR))
        return True

    return step


@pytest.mark.parametrize("said", NO_RESULTS, ids=str)
def test_rule_I3_a_batch_whose_answer_cannot_be_read_is_sent_again_under_its_number(said: dict[str, HeadValue]) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(keep_and_say(world.delay, said))
            receipt = await producer.send("a", b"x", deliver_at_ms=PAST_MS)
        assert receipt.duplicate and world.delay.numbers == [1, 1] and len(world.delay.rows) == 1

    on_loop(scenario)


@pytest.mark.parametrize("head", NO_REFUSAL, ids=str)
def test_rule_I3_an_error_that_cannot_be_read_is_no_refusal(head: Head) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(keep_and_refuse(world.delay, head))
            receipt = await producer.send("a", b"x", deliver_at_ms=PAST_MS)
        assert receipt.duplicate and world.delay.numbers == [1, 1] and len(world.delay.rows) == 1

    on_loop(scenario)


@pytest.mark.parametrize("said", [{"state": "perhaps"}, {"state": 1}, {"log_id": 9}, {"result": None}], ids=str)
def test_rule_I6_only_the_word_unknown_means_that_a_batch_is_not_kept(
    said: dict[str, HeadValue], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Connection.answer

    def other(connection: Connection, request_id: int, head: Head, *args: object) -> None:
        answer(connection, request_id, {**head, **said} if "state" in head else head)

    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.extend([keep_and_say(world.delay, {"results": []})] * 1_000)
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: len(world.delay.numbers) > 1)
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
            monkeypatch.setattr(Connection, "answer", other)
            assert isinstance(await error_of(producer.outcome(error.handle)), ConnectionLost)

    on_steady_loop(scenario)


DELAY = timedelta(hours=1)


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()  # asyncio tells of an exception that nobody has fetched when its future is gone.
    kept = ("sends_failed", "Future exception", "Task exception")
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(kept)]


def _is_one_warning(told: list[str], messages: int, nowhere: str) -> None:
    assert len(told) == 1, told
    assert told[0].startswith(f"sends_failed messages={messages} code=server_unavailable reason=")
    assert nowhere in told[0]


@pytest.mark.parametrize("flushes", [False, True], ids=["closed", "flushed and closed"])
def test_a_close_tells_how_many_sends_have_failed_unheard_and_why(
    nowhere: str, caplog: pytest.LogCaptureFixture, flushes: bool
) -> None:
    with delayd.Producer(nowhere, timeout_ms=100) as producer:
        futures = [producer.send_nowait("a", b"1", delay=DELAY) for _ in range(5)]
        if flushes:
            producer.flush()
    _is_one_warning(_told(caplog), 5, nowhere)
    assert all(isinstance(future.exception(), delayd.ServerUnavailable) for future in futures), (
        "the futures say it, too"
    )
