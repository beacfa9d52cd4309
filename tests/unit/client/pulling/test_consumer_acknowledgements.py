"""AsyncConsumer: what an acknowledgement promises, whatever happens to server, lease and consumer."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from delayd.errors import (
    StaleHandle,
)
from tests.unit.client.pulling.consumers import consumer_of, until_answered
from tests.unit.client.world import World, on_steady_loop
from tests.unit.net.loopback import error_of
from tests.waiting import until


def test_single_acknowledgements_are_gathered_into_ranges() -> None:
    async def scenario(world: World) -> None:
        for row in range(500):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world) as consumer:
            batch = await consumer.pull()
            for message in batch:
                await message.ack(wait=False)
            await consumer.flush()
            assert sorted(world.realtime.acked) == list(range(500))
            assert world.realtime.ack_requests <= 3
            handles = [frame.head["handles"] for frame in world.realtime.seen if frame.type == 41]
            assert sum(len(rows) for rows in handles if isinstance(rows, list)) <= 3

    on_steady_loop(scenario)


def test_acknowledgements_that_nobody_waits_for_leave_together_soon_or_with_one_that_is_waited_for() -> None:
    async def scenario(world: World) -> None:
        for row in range(4):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world) as consumer:
            batch = await consumer.pull()
            for row in (0, 1):
                await batch[row].ack(wait=False)
                await asyncio.sleep(0)
            assert world.realtime.ack_requests == 0
            await until(lambda: world.realtime.acked == [0, 1])
            assert world.realtime.ack_requests == 1
            await batch[2].ack(wait=False)
            await batch[3].ack()
            assert world.realtime.acked == [0, 1, 2, 3] and world.realtime.ack_requests == 2

    on_steady_loop(scenario)


def test_a_nack_is_offered_again_at_once_as_the_next_attempt() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"x")
        async with consumer_of(world, prefetch=False) as consumer:
            await (await consumer.pull())[0].nack(timedelta(0))
            again = await consumer.pull()
            assert again.bodies == [b"x"] and again.attempts.tolist() == [2]
            await again.nack(timedelta(0), wait=False)
            await consumer.flush()
            assert (await consumer.pull()).attempts.tolist() == [3]

    on_steady_loop(scenario)


def test_a_stale_acknowledgement_says_why() -> None:
    async def scenario(world: World) -> None:
        for row in range(3):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world, prefetch=False) as consumer:
            batch = await consumer.pull()
            world.realtime.restart()
            world.realtime.why = [1, 2, 1]
            error = await error_of(batch.ack())
            assert isinstance(error, StaleHandle) and (error.count, error.reason) == (3, "lease_ended")
            assert "3 messages were no longer held" in str(error)
            assert "2 past the lease, 1 given back before" in str(error)

    on_steady_loop(scenario)


def test_rule_Q1_an_acknowledgement_of_an_earlier_life_of_the_server_is_stale() -> None:
    async def scenario(world: World) -> None:
        for row in range(3):
            world.realtime.add(b"%d" % row)
        async with consumer_of(world, prefetch=False) as consumer:
            batch = await consumer.pull()
            world.realtime.restart()
            error = await error_of(batch.ack())
            assert isinstance(error, StaleHandle) and (error.count, error.reason) == (3, "unknown")
            again = await consumer.pull()
            assert again.attempts.tolist() == [2, 2, 2]
            await again.ack()

    on_steady_loop(scenario)


def test_rule_Q1_what_failed_while_nobody_waited_is_logged_at_once_and_raised_once_by_flush_or_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World) -> None:
        for row in range(2):
            world.realtime.add(b"%d" % row)
        for late_call in ("flush", "close"):
            consumer = consumer_of(world, prefetch=False)
            batch = await consumer.pull()
            world.realtime.restart()
            seen = len(world.realtime.seen)
            await batch.ack(wait=False)
            await until_answered(world, seen)
            assert "not_acknowledged subject=orders group=g" in caplog.text and "stale_handle" in caplog.text
            assert isinstance(await error_of(getattr(consumer, late_call)()), StaleHandle)
            await consumer.flush() if late_call != "close" else None
            await consumer.close()
            world.realtime.restart()

    on_steady_loop(scenario)


def test_what_failed_while_nobody_waited_is_no_answer_to_another_word_nor_to_a_pull() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"0")
        async with consumer_of(world, prefetch=False) as consumer:
            late = await consumer.pull()
            world.realtime.restart()
            seen = len(world.realtime.seen)
            await late.ack(wait=False)
            await until_answered(world, seen)
            world.realtime.add(b"1")
            batch = await consumer.pull()
            await batch.ack()
            assert isinstance(await error_of(late.ack()), StaleHandle)
            assert len(await consumer.pull(wait=timedelta(0))) == 0
            assert isinstance(await error_of(consumer.flush()), StaleHandle)

    on_steady_loop(scenario)


def test_a_block_that_ends_by_an_exception_raises_that_one() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"0")
        with pytest.raises(ZeroDivisionError) as raised:
            async with consumer_of(world, prefetch=False) as consumer:
                batch = await consumer.pull()
                world.realtime.restart()
                await batch.ack(wait=False)
                raise ZeroDivisionError
        assert any("no longer held" in note for note in raised.value.__notes__)

    on_steady_loop(scenario)


@pytest.mark.parametrize("step_ms", [-86_400_000, -1_000, 1_000, 86_400_000])
def test_rule_T3_a_lease_lasts_whatever_is_done_to_the_servers_clock(step_ms: int) -> None:
    async def scenario(world: World) -> None:
        async with consumer_of(world) as consumer:
            world.realtime.add(b"before")
            assert (await consumer.pull()).bodies == [b"before"]
            world.realtime.ahead_ms += step_ms
            world.realtime.add(b"after")
            batch = await consumer.pull()
            assert batch.bodies == [b"after"] and batch[0].attempt == 1
            assert batch[0].late_ms < 10_000
            await batch.ack()

    on_steady_loop(scenario)


def test_an_acknowledgement_of_what_was_given_back_says_so() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"x")
        async with consumer_of(world, prefetch=False) as consumer:
            batch = await consumer.pull()
            await batch.nack(timedelta(0))
            error = await error_of(batch.ack())
            assert isinstance(error, StaleHandle)
            assert error.message.startswith("1 message was no longer held for this consumer: ")

    on_steady_loop(scenario)


def test_what_was_handed_out_before_the_close_is_settled_after_it() -> None:
    async def scenario(world: World) -> None:
        for body in (b"a", b"b", b"c", b"d"):
            world.realtime.add(body)
        consumer = consumer_of(world)
        first = await consumer.pull(3)
        last = await consumer.pull(1)
        await consumer.close()
        await first[0].ack()
        await first[1].ack(wait=False)
        await first[2].nack(timedelta(0))
        assert world.realtime.acked == [0, 1] and world.realtime.counted == [(2, 1)]
        world.realtime.restart()
        assert isinstance(await error_of(last.ack()), StaleHandle)

    on_steady_loop(scenario)

    on_steady_loop(scenario)
