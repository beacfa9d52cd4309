"""How many messages the handlers of a consumer have at once (``max_in_flight``)."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from delayd.client.instants import monotonic_s
from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessage, Consumer
from delayd.client.pulling.stock import InFlight
from delayd.errors import AlreadyClosed, BadSetting
from tests.unit.client.world import World, add_messages, on_loop, world_aside
from tests.waiting import until, wait_until

NOW = timedelta(0)


def limited_to(world: World, most: int, *, prefetch: bool = False, lease: float = 60.0) -> AsyncConsumer:
    held_for = timedelta(seconds=lease)
    return AsyncConsumer(world.address, "orders", "g", max_in_flight=most, prefetch=prefetch, lease=held_for)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_pull_returns_no_more_than_may_be_in_flight(prefetch: bool) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 10)
        async with limited_to(world, 3, prefetch=prefetch) as consumer:
            first = await consumer.pull(2)
            second = await consumer.pull(100)
            assert (len(first), len(second)) == (2, 1)
            assert len(await consumer.pull(100, wait=NOW)) == 0
            await first[0].ack()
            await second.nack(NOW)
            assert len(await consumer.pull(100)) == 2

    on_loop(scenario)


def test_without_prefetch_nothing_comes_that_may_not_be_handed_out() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 10)
        async with limited_to(world, 3) as consumer:
            assert len(await consumer.pull(100)) == 3
            assert len(world.realtime.held) == 3

    on_loop(scenario)


def test_a_pull_that_waits_for_room_gets_its_message_when_one_is_settled() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        async with limited_to(world, 1) as consumer:
            (message,) = await consumer.pull()
            waits = asyncio.ensure_future(consumer.pull())
            await asyncio.sleep(0)
            await message.ack()
            (other,) = await waits
            assert other.sequence != message.sequence

    on_loop(scenario)


def test_a_loop_goes_on_when_a_handler_has_said_something() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 6)
        async with limited_to(world, 2) as consumer:
            handlers: list[asyncio.Task[None]] = []
            in_hand: list[int] = []

            async def handle(message: AsyncMessage) -> None:
                await asyncio.sleep(0.01)
                in_hand.remove(message.sequence)
                await message.ack()

            async for message in consumer:
                in_hand.append(message.sequence)
                assert len(in_hand) <= 2
                handlers.append(asyncio.ensure_future(handle(message)))
                if len(handlers) == 6:
                    break
            await asyncio.gather(*handlers)
            assert sorted(world.realtime.acked) == list(range(6))

    on_loop(scenario)


def test_a_message_whose_lease_has_ended_makes_room() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        async with limited_to(world, 1, lease=0.3) as consumer:
            first = await consumer.pull()
            second = await consumer.pull(wait=timedelta(seconds=30))
            assert len(second) == 1 and monotonic_s() >= first.pulled.lease_ends

    on_loop(scenario)


def test_a_message_that_is_extended_keeps_its_place() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        async with limited_to(world, 1, lease=0.5) as consumer:
            batch = await consumer.pull()
            await batch.extend(timedelta(seconds=60))
            await asyncio.sleep(batch.pulled.lease_ends - monotonic_s() + 0.01)
            assert len(await consumer.pull(wait=NOW)) == 0

    on_loop(scenario)


def test_a_message_that_the_consumer_keeps_alive_keeps_its_place() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        lease = timedelta(seconds=0.3)
        async with AsyncConsumer(
            world.address, "orders", "g", max_in_flight=1, lease=lease, auto_extend=timedelta(minutes=1)
        ) as consumer:
            batch = await consumer.pull()
            await until(lambda: len(world.realtime.extended) >= 5)
            assert monotonic_s() >= batch.pulled.lease_ends
            assert len(await consumer.pull(wait=NOW)) == 0

    on_loop(scenario)


def test_the_close_ends_a_wait_for_room() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        consumer = limited_to(world, 1)
        await consumer.pull()
        waits = asyncio.ensure_future(consumer.pull(wait=timedelta(seconds=30)))
        await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(AlreadyClosed):
            await waits

    on_loop(scenario)


def test_threads_that_share_a_consumer_have_no_more_together() -> None:
    with world_aside() as (world, do):
        do(lambda: add_messages(world, 60))
        at_work: list[int] = []
        most: list[int] = []

        with Consumer(world.address, "orders", "g", max_in_flight=2) as consumer:

            def work() -> None:
                for message in consumer:
                    at_work.append(message.sequence)
                    most.append(len(at_work))
                    at_work.remove(message.sequence)
                    message.ack()

            threads = [threading.Thread(target=work) for _ in range(6)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(world.realtime.acked) == 60)
        for thread in threads:
            thread.join()
        assert max(most) <= 2


def test_of_two_that_saw_the_same_place_one_gets_it() -> None:
    async def scenario() -> None:
        in_flight = InFlight(3, monotonic_s)
        ends = monotonic_s() + 60
        assert in_flight.hand_out([[1, 10, 2]], ends)
        assert in_flight.room == 1  # Two threads read this now.
        assert in_flight.hand_out([[1, 12, 1]], ends)
        assert not in_flight.hand_out([[1, 13, 1]], ends)
        in_flight.let_go([[1, 12, 1]])
        assert in_flight.room == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("most", [0, -1, 1.5])
def test_a_number_that_makes_no_sense_is_refused(most: int) -> None:
    with pytest.raises(BadSetting):
        Consumer("127.0.0.1:1", "orders", "g", max_in_flight=most)
