"""Answers that can't be read, of a server that lies or is broken: they refuse nothing, and clients go on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.errors import BadRequest, ConnectionLost, OutcomeUnknown, StaleHandle
from delayd.net.connection import Connection
from delayd.wire.frame import ANSWER, ERROR, Frame, Head, HeadValue, encode_frame
from tests.unit.net.loopback import error_of, skip
from tests.waiting import until

from .servers import SmallDelay
from .world import LIMIT_S, PAST_MS, World, on_loop, on_steady_loop

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
        connection._writer.write(encode_frame(frame.type, frame.request_id, head, (), ANSWER | ERROR))
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


def test_rule_I3_a_server_that_never_answers_well_leaves_the_outcome_unknown() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.extend([keep_and_say(world.delay, {"results": []})] * 1_000)
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: len(world.delay.numbers) > 1)
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
            assert await producer.outcome(error.handle) is not None
        assert len(world.delay.rows) == 1

    on_steady_loop(scenario)


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


@pytest.mark.parametrize("wanted", [-1, None, "many", 1 << 63, 0.5], ids=str)
def test_an_answer_that_wants_nonsense_is_a_named_error_and_the_consumer_goes_on(
    wanted: HeadValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Connection.answer
    lies = 0

    def lie(connection: Connection, request_id: int, head: Head, *args: object) -> None:
        nonlocal lies
        lying = "wanted" in head and lies > 0
        lies -= lying
        answer(connection, request_id, {**head, "wanted": wanted} if lying else head, *args)  # type: ignore[arg-type]

    async def scenario(world: World) -> None:
        nonlocal lies
        monkeypatch.setattr(Connection, "answer", lie)
        async with AsyncConsumer(world.address, "a", group="g", prefetch=False) as consumer:
            world.realtime.add(b"1")
            lies = 1
            assert isinstance(await error_of(consumer.pull(1, wait=timedelta(seconds=1))), BadRequest)
            world.realtime.restart()  # It gives back what nobody has acknowledged.
            batch = await consumer.pull(1, wait=timedelta(seconds=1))
            assert [bytes(message.body) for message in batch] == [b"1"]
            lies = 1
            # It was durable, and the second time the server of this test calls it stale.
            assert isinstance(await error_of(batch.ack()), StaleHandle)
        assert world.realtime.acked == [0] and world.realtime.ack_requests == 2 and not lies

    on_loop(scenario)
