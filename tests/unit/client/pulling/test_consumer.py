"""AsyncConsumer: what a pull and an acknowledgement promise, whatever happens to connection, server and lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.errors import (
    AlreadyClosed,
    BadArgument,
    BadBody,
    BadHeaders,
    BadSetting,
    BadSubject,
    BatchMalformed,
    WrongLoop,
)
from delayd.wire.requests import RequestType
from tests.counts import calls
from tests.unit.client.pulling.consumers import consumer_of
from tests.unit.client.world import World, on_steady_loop
from tests.unit.net.loopback import error_of
from tests.waiting import until


def test_a_message_has_all_that_was_sent_and_when_it_came() -> None:
    async def scenario(world: World) -> None:
        due = world.realtime.now_ms() - 250
        world.realtime.add(b"42", due, {"trace": "a1", "raw": b"\x00"})
        async with consumer_of(world) as consumer:
            async for message in consumer:
                assert message.body == b"42" and message.headers == {"trace": "a1", "raw": b"\x00"}
                assert message.subject == "orders" and message.sequence == 1 and message.log_id == 99
                assert message.deliver_at_ms == due and message.attempt == 1
                assert message.deliver_at == datetime.fromtimestamp(due // 1000, UTC) + timedelta(
                    milliseconds=due % 1000
                )
                assert 250 <= message.late_ms < 10_000
                await message.ack()
                assert world.realtime.acked == [0]
                break

    on_steady_loop(scenario)


def test_lateness_is_read_from_the_servers_clock() -> None:
    async def scenario(world: World) -> None:
        world.realtime.ahead_ms = 3_600_000
        async with consumer_of(world) as consumer:
            world.realtime.add(b"x")
            batch = await consumer.pull()
            assert -50 < batch.late_ms[0] < 5_000

    on_steady_loop(scenario)


def test_columns_and_messages_of_a_batch_agree() -> None:
    async def scenario(world: World) -> None:
        for row in range(20):
            world.realtime.add(b"%d" % row * row, 1_000 + row, {"n": str(row)} if row % 3 == 0 else None)
        async with consumer_of(world) as consumer:
            batch = await consumer.pull()
            assert len(batch) == 20
            assert batch.bodies == [b"%d" % row * row for row in range(20)]
            assert batch.deliver_at_ms.tolist() == [1_000 + row for row in range(20)]
            assert batch.headers == [{"n": str(row)} if row % 3 == 0 else {} for row in range(20)]
            assert batch.sequences.tolist() == list(range(1, 21)) and set(batch.attempts.tolist()) == {1}
            assert [message.body for message in batch] == batch.bodies
            assert [message.late_ms for message in batch] == batch.late_ms.tolist()
            with pytest.raises(IndexError):
                batch[20]
            await batch.ack()
        assert world.realtime.acked == list(range(20))

    on_steady_loop(scenario)


@pytest.mark.parametrize("bad", [b"\xc1\xff", b"\x81\xa1a", b"\x93abc", b"\x81\x01\x02", b"\x81\xa1a\xa2\xff\xff"])
def test_rule_E2_headers_that_can_not_be_decoded_concern_their_own_message_only(bad: bytes) -> None:
    async def scenario(world: World) -> None:
        for row in range(6):
            world.realtime.add(b"%d" % row, None, bad if row == 2 else {"n": str(row)})
        async with consumer_of(world) as consumer:
            read: list[bytes] = []
            async for message in consumer:
                if message.body == b"2":
                    with pytest.raises(BadHeaders):
                        _ = message.headers
                    assert message.headers_bytes == bad
                    await message.nack(timedelta(0)) if message.attempt == 1 else await message.ack()
                else:
                    assert message.headers == {"n": message.body.decode()}
                    await message.ack()
                read.append(message.body)
                if len(read) == 7:
                    break
        assert sorted(read) == [b"0", b"1", b"2", b"2", b"3", b"4", b"5"]
        assert sorted(world.realtime.acked) == list(range(6))

    on_steady_loop(scenario)


def test_rule_E2_a_column_of_headers_raises_only_where_the_bad_ones_are_looked_into() -> None:
    async def scenario(world: World) -> None:
        for row in range(3):
            world.realtime.add(b"", None, b"\xc1" if row == 1 else {"n": str(row)})
        async with consumer_of(world) as consumer:
            batch = await consumer.pull()
            assert batch.headers[0] == {"n": "0"} and batch.headers[2]["n"] == "2"
            bad = batch.headers[1]
            assert "can't be decoded" in repr(bad)
            uses: list[Callable[[], object]] = [
                lambda: bad["n"],
                lambda: bad.get("n"),
                lambda: "n" in bad,
                lambda: dict(bad),
                lambda: list(bad.items()),
                lambda: len(bad),
            ]
            for use in uses:
                with pytest.raises(BadHeaders):
                    use()
            await batch.ack()

    on_steady_loop(scenario)


@pytest.mark.parametrize("lengths", [lambda row: 200, lambda row: row % 300])
def test_the_calls_of_the_columns_of_a_batch_do_not_grow_with_its_rows(lengths: Callable[[int], int]) -> None:
    async def scenario(world: World) -> None:
        for row in range(1_000):
            world.realtime.add(bytes(lengths(row)))
        async with consumer_of(world, max_messages=1_000, prefetch=False) as consumer:
            batch = await consumer.pull()
            assert len(batch) == 1_000
            assert calls(lambda: (batch.bodies, batch.deliver_at_ms, batch.sequences, batch.late_ms)) < 100

    on_steady_loop(scenario)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 200])
def test_bodies_of_one_length_are_what_was_sent_also_from_the_middle_of_a_batch(size: int) -> None:
    async def scenario(world: World) -> None:
        sent = [bytes([row]) * size for row in range(10)]
        for body in sent:
            world.realtime.add(body)
        async with consumer_of(world) as consumer:
            assert [body for most in (3, 4, 5) for body in (await consumer.pull(most)).bodies] == sent

    on_steady_loop(scenario)


def test_a_pull_waits_for_the_first_message_and_returns_nothing_after_its_wait() -> None:
    async def scenario(world: World) -> None:
        for prefetch in (True, False):
            async with consumer_of(world, prefetch=prefetch) as consumer:
                assert len(await consumer.pull(wait=timedelta(milliseconds=30))) == 0
                pulling = asyncio.create_task(consumer.pull(wait=timedelta(seconds=10)))
                await until(lambda: bool(world.realtime.waiting))
                world.realtime.add(b"x")
                batch = await pulling
                assert batch.bodies == [b"x"]
                await batch.ack()

    on_steady_loop(scenario)


def test_the_next_pull_is_under_way_while_the_caller_works() -> None:
    async def scenario(world: World) -> None:
        async with consumer_of(world, max_messages=5) as consumer:
            for row in range(12):
                world.realtime.add(b"%d" % row)
            assert len(await consumer.pull()) == 5
            assert len(await consumer.pull()) == 5
            await until(lambda: world.realtime.pulls == 3 and len(world.realtime.held) == 12)
        async with consumer_of(world, max_messages=1, prefetch=False) as consumer:
            for pulls in (1, 2):
                assert len(await consumer.pull()) == 1
                await asyncio.sleep(0.03)
                assert world.realtime.pulls == 3 + pulls

    on_steady_loop(scenario)


def test_who_asks_for_more_than_the_setting_gets_as_much_ahead() -> None:
    async def scenario(world: World) -> None:
        for row in range(30):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world, max_messages=2) as consumer:
            for _ in range(3):
                assert len(await consumer.pull(10)) == 10
            await until(lambda: world.realtime.pulls == 4)
            asked = [frame.head["max_messages"] for frame in world.realtime.seen if frame.type == RequestType.PULL]
            assert asked == [10, 10, 10, 10]

    on_steady_loop(scenario)


def test_smaller_pulls_are_cut_from_what_was_pulled_ahead() -> None:
    async def scenario(world: World) -> None:
        for row in range(10):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world) as consumer:
            first = await consumer.pull(3)
            second = await consumer.pull(3)
            assert first.bodies == [b"0", b"1", b"2"]
            await until(lambda: len(world.realtime.held) == 10)
            assert second.bodies == [b"3", b"4", b"5"]
            await second.ack()
            assert world.realtime.acked == [3, 4, 5]
            await first[1].ack()
            assert world.realtime.acked == [3, 4, 5, 1]

    on_steady_loop(scenario)


def test_a_pull_goes_on_where_iteration_stopped() -> None:
    async def scenario(world: World) -> None:
        for row in range(6):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world) as consumer:
            assert (await anext(consumer)).body == b"0"
            assert (await consumer.pull(2)).bodies == [b"1", b"2"]
            assert (await anext(consumer)).body == b"3"
            assert (await consumer.pull()).bodies + (await consumer.pull()).bodies == [b"4", b"5"]
            assert len(await consumer.pull(wait=timedelta(0))) == 0

    on_steady_loop(scenario)


def test_what_was_pulled_and_not_handed_out_is_given_back_at_the_close() -> None:
    async def scenario(world: World) -> None:
        for row in range(10):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world, max_messages=4) as consumer:
            async for message in consumer:
                await message.ack()
                if message.sequence == 2:
                    break
            await until(lambda: len(world.realtime.held) >= 6)
        assert world.realtime.acked == [0, 1]
        assert sorted(world.realtime.offered) == [(row, 1) for row in range(2, 10)]
        assert len(world.realtime.returned) >= 6 and world.realtime.held == {}

    on_steady_loop(scenario)


def test_what_is_given_back_at_the_close_does_not_come_to_the_pull_that_still_waits() -> None:
    async def scenario(world: World) -> None:
        for row in range(3):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world) as consumer:
            await (await anext(consumer)).ack()
            assert len(await consumer.pull(1)) == 1
            await until(lambda: not world.realtime.offered and bool(world.realtime.waiting))
        assert sorted(world.realtime.offered) == [(2, 1)] and set(world.realtime.held) == {2}

    on_steady_loop(scenario)


def test_a_pull_that_goes_well_takes_no_task() -> None:
    async def scenario(world: World) -> None:
        async with consumer_of(world) as consumer:
            world.realtime.add(b"1")
            await (await consumer.pull()).ack()
            tasks = asyncio.all_tasks()
            for row in range(5):
                world.realtime.add(b"%d" % row)
                assert len(await consumer.pull()) == 1
                assert asyncio.all_tasks() == tasks

    on_steady_loop(scenario)


def test_each_of_several_pulls_at_once_gets_messages_of_its_own_and_the_close_ends_those_that_wait() -> None:
    async def scenario(world: World) -> None:
        consumer = consumer_of(world, max_messages=1)
        pulling = [asyncio.create_task(consumer.pull()) for _ in range(3)]
        await until(lambda: world.realtime.pulls == 1)
        world.realtime.add(b"a")
        world.realtime.add(b"b")
        await until(lambda: sum(task.done() for task in pulling) == 2)
        done = [task.result() for task in pulling if task.done()]
        assert sorted(batch.bodies[0] for batch in done) == [b"a", b"b"]
        for batch in done:
            await batch.ack()
        (waits,) = (task for task in pulling if not task.done())
        await consumer.close()
        assert isinstance(await error_of(waits), AlreadyClosed)

    on_steady_loop(scenario)


def test_a_batch_whose_checksum_differs_is_not_handed_out() -> None:
    async def scenario(world: World) -> None:
        world.realtime.damage = True
        world.realtime.add(b"x")
        async with consumer_of(world) as consumer:
            assert isinstance(await error_of(consumer.pull()), BatchMalformed)

    on_steady_loop(scenario)


def test_faulty_settings_are_named() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(BadSubject):
            AsyncConsumer(world.address, "a b", "g")
        with pytest.raises(BadArgument, match="say which subject is consumed"):
            AsyncConsumer(world.address)
        with pytest.raises(BadArgument, match="say which group is consumed"):
            AsyncConsumer(world.address, "a")
        with pytest.raises(BadArgument):
            AsyncConsumer(world.address, "a", "ä" * 128)
        with pytest.raises(BadSetting):
            AsyncConsumer(world.address, "a", "g", lease=timedelta(0))
        with pytest.raises(BadSetting, match="lease must be a timedelta, not int"):
            AsyncConsumer(world.address, "a", "g", lease=cast(timedelta, 5))
        with pytest.raises(BadSetting):
            AsyncConsumer(world.address, "a", "g", max_messages=0)
        async with consumer_of(world) as consumer:
            with pytest.raises(BadArgument):
                await consumer.pull(0)

    on_steady_loop(scenario)


def test_a_body_is_read_as_text_or_json_and_what_is_neither_is_named() -> None:
    async def scenario(world: World) -> None:
        bodies = [b'{"order": 42}', "grün".encode(), b"\xff\x00", b"[" * 100_000]
        for body in bodies:
            world.realtime.add(body)
        async with consumer_of(world) as consumer:
            batch = await consumer.pull()
            good, text, raw, deep = batch
            assert good.json() == {"order": 42} and text.text() == "grün" and raw.body == b"\xff\x00"
            for call, named in ((text.json, "is no JSON"), (raw.text, "is no UTF-8"), (raw.json, "is no UTF-8")):
                with pytest.raises(BadBody, match=rf"body of AsyncMessage\(orders, sequence .* {named}"):
                    call()
            with pytest.raises(BadBody, match="is no JSON"):
                deep.json()
            await batch.ack()

    on_steady_loop(scenario)


def test_a_closed_consumer_pulls_no_more() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"x")
        consumer = consumer_of(world)
        await consumer.pull()
        await consumer.close()
        await consumer.close()
        assert isinstance(await error_of(consumer.pull()), AlreadyClosed)


def test_a_client_of_another_loop_is_refused_by_name() -> None:
    async def made() -> tuple[AsyncConsumer, AsyncProducer]:
        return AsyncConsumer("127.0.0.1:1", "a", "g"), AsyncProducer("127.0.0.1:1")

    async def used(consumer: AsyncConsumer, producer: AsyncProducer) -> None:
        for call in (consumer.pull(), consumer.flush(), consumer.close(), anext(consumer)):
            with pytest.raises(WrongLoop, match="an AsyncConsumer belongs to the event loop that it was made in"):
                await call
        with pytest.raises(WrongLoop, match="an AsyncProducer belongs"):
            producer.send("a", b"", delay=timedelta(0))
        for later in (producer.send_batch("a", [b""], delay=timedelta(0)), producer.flush(), producer.close()):
            with pytest.raises(WrongLoop, match="an AsyncProducer belongs"):
                await later

    asyncio.run(used(*asyncio.run(made())))
    for make in (lambda: AsyncConsumer(None, "a", "g"), lambda: AsyncProducer()):
        with pytest.raises(WrongLoop, match="is made inside a running event loop; make it in an `async def`"):
            make()
