"""A consumer whose server must not miss it comes back by itself, and says who it is."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from delayd.client.pulling.consumer import AsyncConsumer
from delayd.client.pulling.source import NAMED_MAX, Incarnations
from delayd.errors import NotReady
from delayd.net.connection import Connection
from delayd.wire.frame import Frame
from delayd.wire.requests import RequestType
from tests.unit.client.world import World, on_loop
from tests.waiting import until

WAIT = timedelta(seconds=5)


def _frames(world: World, kind: RequestType) -> list[Frame]:
    return [frame for frame in world.realtime.seen if frame.type == kind]


def _has_said(world: World, times: int) -> bool:
    return len(_frames(world, RequestType.PULL_END)) == times


@pytest.mark.parametrize("kind", [{"ephemeral": True}, {"exclusive": True}])
def test_a_consumer_comes_back_by_itself_while_its_handler_works(kind: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        async with AsyncConsumer(world.address, "a", "g", prefetch=False, **kind) as consumer:
            world.realtime.add(b"1")
            batch = await consumer.pull(1, wait=WAIT)
            for connections in (2, 3):
                world.realtime.incarnation += 1
                world.realtime.drop_connections()
                # Nothing is pulled: the consumer says whose the new connection is.
                await until(partial(_has_said, world, connections - 1))
                assert world.realtime.connected_count == connections
            said = _frames(world, RequestType.PULL_END)[-1].head
            assert (said["subject"], said["group"]) == ("a", "g")
            if "exclusive" in kind:
                assert said["exclusive_ms"] == 15_000 and said["was"] == [1]
            world.realtime.incarnation = 1
            await batch.ack()
        connections = world.realtime.connected_count
        assert connections == 3

    on_loop(scenario)


def test_a_consumer_that_shares_its_group_comes_back_when_it_pulls() -> None:
    async def scenario(world: World) -> None:
        async with AsyncConsumer(world.address, "a", "g", prefetch=False) as consumer:
            world.realtime.add(b"1")
            batch = await consumer.pull(1, wait=WAIT)
            world.realtime.drop_connections()
            await batch.ack()
            assert world.realtime.connected_count == 2
        assert not _frames(world, RequestType.PULL_END)

    on_loop(scenario)


def test_a_group_of_ones_own_that_has_ended_goes_on_where_its_consumer_was_heard_last() -> None:
    async def scenario(world: World) -> None:
        async with AsyncConsumer(world.address, "a", "g", prefetch=False, ephemeral=True) as consumer:
            world.realtime.add(b"1")
            before_ms = world.realtime.now_ms()
            await (await consumer.pull(1, wait=WAIT)).ack()
            world.realtime.drop_connections()
            await until(lambda: len(_frames(world, RequestType.PULL_END)) == 1)
            for body in (b"2", b"3"):
                world.realtime.add(body)
                await (await consumer.pull(1, wait=WAIT)).ack()
            first, again, later = [frame.head["start"] for frame in _frames(world, RequestType.PULL)]
            assert first == later == "latest"
            # Less five seconds, by which the clocks of servers may differ.
            assert isinstance(again, dict) and before_ms - 5_500 <= again["instant_ms"] <= before_ms - 4_500

    on_loop(scenario)


@pytest.mark.parametrize("kind", [{"ephemeral": True}, {"exclusive": True}])
def test_a_consumer_whose_server_refuses_to_hear_that_it_is_back_says_it_again(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[Frame] = []

    async def scenario(world: World) -> None:
        serve = world.realtime.serve

        def starting(connection: Connection, frame: Frame) -> None:
            if frame.type == RequestType.PULL_END and len(refused) < 2:
                refused.append(frame)
                connection.answer_error(frame.request_id, NotReady("it starts", retry_after_ms=5))
            else:
                serve(connection, frame)

        async with AsyncConsumer(world.address, "a", "g", prefetch=False, **kind) as consumer:
            world.realtime.add(b"1")
            await (await consumer.pull(1, wait=WAIT)).ack()
            monkeypatch.setattr(world.realtime, "serve", starting)
            world.realtime.drop_connections()
            # Nothing is pulled: a caller may be at work for hours.
            await until(lambda: _has_said(world, 3))
            assert world.realtime.connected_count == 2
            heads = [frame.head for frame in _frames(world, RequestType.PULL_END)]
            assert heads[0] == heads[1] == heads[2]

    on_loop(scenario)


def test_an_exclusive_consumer_that_steps_down_stays_away_until_it_pulls() -> None:
    async def scenario(world: World) -> None:
        async with AsyncConsumer(world.address, "a", "g", exclusive=True) as consumer:
            world.realtime.add(b"1")
            await consumer.pull(1, wait=WAIT)
            await consumer.step_down()
            server = world.realtime.server
            assert server is not None
            await until(lambda: not server.connections)
            # A connection that ends without a word is replaced after 25 ms.
            await asyncio.sleep(0.1)
            assert world.realtime.connected_count == 1
            world.realtime.add(b"2")
            assert (await consumer.pull(1, wait=WAIT)).bodies == [b"2"]
            assert world.realtime.connected_count == 2

    on_loop(scenario)


def test_incarnations_are_named_while_messages_that_came_under_them_may_be_held() -> None:
    now = 0.0
    named = Incarnations(60.0, lambda: now)
    assert named.answered(1, 60.0) == [1]
    now = 10.0
    assert named.answered(2, 70.0) == [1, 2]
    now = 50.0
    named.extended([[1, 7, 1]], 60.0)
    now = 75.0
    assert named.answered(2, None) == [1, 2]
    now = 80.0
    # Another connection: the server may have been started again, and given each message a whole lease.
    assert named.answered(3, None) == [1, 3]
    now = 139.0
    assert named.answered(3, None) == [1, 3]
    now = 141.0
    assert named.answered(3, None) == [3]


def test_no_request_names_more_incarnations_than_it_may() -> None:
    named = Incarnations(60.0, lambda: 0.0)
    for incarnation in range(1, NAMED_MAX + 50):
        found = named.answered(incarnation, 60.0)
    assert len(found) == NAMED_MAX and found[-1] == NAMED_MAX + 49
