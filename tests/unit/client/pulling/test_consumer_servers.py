"""AsyncConsumer: servers that go away, come back elsewhere, or give their subject to another one."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from functools import partial

import pytest

from delayd.client.pulling import source
from delayd.errors import (
    NoRealtimeServer,
    ServerUnavailable,
)
from tests.unit.client.pulling.consumers import consumer_of
from tests.unit.client.realtime import SmallRealtime
from tests.unit.client.world import LIMIT_S, World, on_steady_loop
from tests.unit.net.loopback import error_of, skip
from tests.waiting import until


def test_a_consumer_goes_on_after_its_connection_broke() -> None:
    async def scenario(world: World) -> None:
        async with consumer_of(world) as consumer:
            world.realtime.add(b"1")
            first = await consumer.pull()
            world.realtime.drop_connections()
            await first.ack()
            world.realtime.drop_connections()
            world.realtime.add(b"2")
            second = await consumer.pull()
            assert second.bodies == [b"2"]
            await second.ack()
        assert world.realtime.acked == [0, 1]

    on_steady_loop(scenario)


def test_a_consumer_finds_a_server_that_comes_back_elsewhere_and_goes_on_without_meta() -> None:
    async def scenario(world: World) -> None:
        async with consumer_of(world) as consumer:
            world.realtime.add(b"1")
            await (await consumer.pull()).ack()
            await world.realtime.stop()
            world.realtime.port = 0
            await world.realtime.start()
            world.realtime.add(b"2")
            await (await consumer.pull()).ack()
            await world.meta.stop()
            world.realtime.drop_connections()
            world.realtime.add(b"3")
            await (await consumer.pull()).ack()
        assert world.realtime.acked == [0, 1, 2]

    on_steady_loop(scenario)


def test_without_a_realtime_server_a_pull_waits_and_then_says_so() -> None:
    async def scenario(world: World) -> None:
        world.meta.realtime.clear()
        async with consumer_of(world) as consumer:
            pulling = asyncio.create_task(consumer.pull())
            await until(lambda: len(world.meta.seen) > 1)
            await skip(LIMIT_S)
            assert isinstance(await error_of(pulling), NoRealtimeServer)
            pulling = asyncio.create_task(consumer.pull())
            await asyncio.sleep(0.02)
            world.meta.realtime.append(world.realtime)
            world.realtime.add(b"x")
            await (await pulling).ack()

    on_steady_loop(scenario)


def has_asked(world: World, times: int) -> bool:
    return len(world.meta.seen) >= times


def test_a_server_that_stays_away_is_a_named_error_and_close_does_not_hang(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        consumer = consumer_of(world)
        world.realtime.add(b"x")
        batch = await consumer.pull()
        await world.realtime.stop()
        for call in (batch.ack, consumer.pull):
            calling = asyncio.ensure_future(call())
            # After each try that fails, meta is asked where the server is.
            asked = len(world.meta.seen)
            await until(partial(has_asked, world, asked + 2))
            await skip(LIMIT_S)
            assert isinstance(await error_of(calling), ServerUnavailable)
        await consumer.close()

    with caplog.at_level(logging.ERROR):
        on_steady_loop(scenario)
    assert caplog.records == []


async def move_to_another_server(world: World) -> SmallRealtime:
    """The subject has another realtime server from now on."""
    other = SmallRealtime(202)
    world.servers.append(other)
    await other.start()
    world.meta.realtime[:] = [other]
    return other


def test_who_waits_for_the_first_message_looks_at_the_route_again_and_goes_where_it_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "ROUTE_LOOK_S", 0.5)

    async def scenario(world: World) -> None:
        async with consumer_of(world) as consumer:
            for _ in range(5):
                assert not len(await consumer.pull(wait=timedelta(milliseconds=10)))
            assert len(world.meta.seen) == 1, "not with each poll"
            other = await move_to_another_server(world)
            other.add(b"first")
            while not (batch := await consumer.pull(wait=timedelta(milliseconds=10))):
                pass
            (message,) = batch
            assert message.body == b"first" and len(world.meta.seen) >= 2
            await message.ack()
            assert other.acked == [0]

    on_steady_loop(scenario)


def test_a_moved_subject_is_followed_and_each_word_goes_to_the_server_that_gave_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "ROUTE_LOOK_S", 0.05)

    async def scenario(world: World) -> None:
        async with consumer_of(world, lease=timedelta(minutes=5)) as consumer:
            for body in (b"a", b"b", b"c"):
                world.realtime.add(body)
            old = list(await consumer.pull(3))
            waiting = asyncio.create_task(consumer.pull(wait=timedelta(seconds=300)))
            await until(lambda: world.realtime.pulls == 2)
            other = await move_to_another_server(world)
            other.add(b"d")
            (new,) = await waiting
            assert new.body == b"d"
            await new.ack()
            await old[0].ack()
            await old[1].nack()
            await old[2].extend(timedelta(minutes=6))
            assert (world.realtime.acked, other.acked) == ([0], [0])
            assert [consume for consume, _ in world.realtime.counted] == [1]
            assert [consume for consume, _ in world.realtime.extended] == [2]
        # After the close there is no connection any more, and meta says where the server is.
        world.meta.realtime.append(world.realtime)
        await old[2].ack()
        assert (world.realtime.acked, other.acked) == ([0, 2], [0])

    on_steady_loop(scenario)


def test_a_word_for_a_server_that_is_away_is_not_said_to_the_one_that_has_the_subject_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "ROUTE_LOOK_S", 0.05)

    async def scenario(world: World) -> None:
        async with consumer_of(world, lease=timedelta(hours=1), timeout_ms=1_000) as consumer:
            world.realtime.add(b"a")
            (old,) = await consumer.pull()
            other = await move_to_another_server(world)
            await world.realtime.stop()
            other.add(b"b")
            (new,) = await consumer.pull(wait=timedelta(seconds=300))
            assert new.body == b"b"
            assert isinstance(await error_of(old.ack()), ServerUnavailable)
            assert other.acked == []

    on_steady_loop(scenario)
