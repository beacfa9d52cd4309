"""Leases that are extended, by the caller or by the consumer itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delayd.client.pulling.consumer import Consumer
from delayd.errors import BadArgument, BadSetting, StaleHandle
from tests.unit.client.pulling.consumers import consumer_of
from tests.unit.client.world import World, add_messages, on_loop, on_steady_loop, world_aside
from tests.unit.net.loopback import skip
from tests.waiting import until, wait_until

SHORT = timedelta(seconds=0.3)


async def _pass(world: World, ticks: int, extended: int) -> None:
    """Let a second pass so often; each time so many messages are extended."""
    for _ in range(ticks):
        before = len(world.realtime.extended)
        await skip(1.001)
        await until(lambda before=before: len(world.realtime.extended) == before + extended)  # type: ignore[misc]


def test_a_message_and_a_batch_are_held_for_longer() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        async with consumer_of(world, prefetch=False) as consumer:
            batch = await consumer.pull()
            await batch[1].extend(timedelta(seconds=90))
            assert world.realtime.extended == [(1, 90_000)]
            await batch.extend(timedelta(minutes=5))
            assert world.realtime.extended[1:] == [(0, 300_000), (1, 300_000), (2, 300_000)]
            await batch.ack()
            world.realtime.restart()
            with pytest.raises(StaleHandle):
                await batch.extend(timedelta(seconds=90))

    on_loop(scenario)


@pytest.mark.parametrize("lease", [timedelta(0), timedelta(seconds=-1), 5])
def test_a_lease_that_makes_no_sense_is_refused(lease: Any) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        async with consumer_of(world, prefetch=False) as consumer:
            (message,) = await consumer.pull()
            with pytest.raises(BadArgument):
                await message.extend(lease)

    on_loop(scenario)


def test_leases_are_kept_alive_until_the_handler_has_said_something() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 2)
        async with consumer_of(
            world, prefetch=False, lease=timedelta(seconds=3), auto_extend=timedelta(seconds=60)
        ) as consumer:
            batch = await consumer.pull(2)
            await batch[0].ack()
            await _pass(world, 10, extended=1)
            assert world.realtime.extended == 10 * [(1, 3_000)]
            await batch[1].ack()
            await _pass(world, 5, extended=0)
            assert len(world.realtime.extended) == 10 and world.realtime.acked == [0, 1]

    on_steady_loop(scenario)


def test_no_lease_is_kept_for_longer_than_that() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        async with consumer_of(
            world, prefetch=False, lease=timedelta(seconds=3), auto_extend=timedelta(seconds=10)
        ) as consumer:
            async for message in consumer:
                await _pass(world, 9, extended=1)
                await _pass(world, 5, extended=0)
                assert len(world.realtime.extended) == 9
                with pytest.raises(StaleHandle):
                    await message.ack()
                break

    on_steady_loop(scenario)


def test_a_handler_that_blocks_keeps_its_message() -> None:
    with world_aside() as (world, do):
        do(lambda: add_messages(world, 1))
        with Consumer(
            world.address, "orders", "g", lease=SHORT, auto_extend=timedelta(seconds=60), prefetch=False
        ) as consumer:
            for message in consumer:
                wait_until(lambda: len(world.realtime.extended) >= 5)
                message.ack()
                break
        assert world.realtime.acked == [0]


def test_less_than_a_lease_is_no_limit() -> None:
    with pytest.raises(BadSetting):
        Consumer("127.0.0.1:1", "orders", "g", lease=timedelta(seconds=10), auto_extend=timedelta(seconds=5))
