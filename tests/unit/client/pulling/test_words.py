"""Messages that come again later, and dead letters: what consumers ask for, and what a message says of its lives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delayd.client.pulling.acks import Backoff
from delayd.client.pulling.consumer import Consumer
from delayd.errors import BadArgument, BadSetting, StaleHandle
from tests.unit.client.pulling.consumers import consumer_of
from tests.unit.client.world import World, add_messages, on_loop, world_aside
from tests.waiting import wait_until

LIFE: dict[str, str | bytes] = {
    "delayd.attempt": "3",
    "delayd.origin": "7",
    "delayd.error": "busy",
    "mine": "yes",
}


def test_a_message_comes_again_after_a_delay_or_never() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 4)
        async with consumer_of(world, prefetch=False) as consumer:
            batch = await consumer.pull()
            await batch[0].nack(timedelta(milliseconds=1.5), error="busy")
            await batch[1].reject("no such order", error="404")
            await batch[2].nack(timedelta(minutes=1), wait=False)
            await batch[3].reject("never", wait=False)
            await consumer.flush()
            assert sorted(world.realtime.retried) == [(0, 2, "busy"), (2, 60_000, "")]
            assert sorted(world.realtime.rejected) == [(1, "no such order", "404"), (3, "never", "")]

    on_loop(scenario)


def test_a_batch_comes_again_together() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        async with consumer_of(world, prefetch=False) as consumer:
            await (await consumer.pull()).nack(timedelta(seconds=1))
            assert [delay_ms for _, delay_ms, _ in world.realtime.retried] == [1_000] * 3
            await (await consumer.pull()).reject("never")
            assert len(world.realtime.rejected) == 3

    on_loop(scenario)


def test_without_a_delay_it_comes_again_at_once_and_an_error_goes_with_it() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 2)
        async with consumer_of(world, prefetch=False) as consumer:
            batch = await consumer.pull()
            await batch[0].nack(timedelta(0))
            await batch[1].nack(timedelta(0), error="no")
            assert world.realtime.counted[0] == (0, 1) and world.realtime.retried == [(1, 0, "no")]

    on_loop(scenario)


def test_a_decision_that_comes_too_late_is_told_at_once_or_at_the_next_call() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 2)
        async with consumer_of(world, prefetch=False) as consumer:
            batch = await consumer.pull(2)
            world.realtime.restart()
            with pytest.raises(StaleHandle):
                await batch[0].reject("never")
            await batch[1].reject("never", wait=False)
            with pytest.raises(StaleHandle):
                await consumer.flush()

    on_loop(scenario)


def test_a_decision_waits_out_an_outage_and_may_come_after_the_close() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 2)
        consumer = consumer_of(world, prefetch=False)
        batch = await consumer.pull(2)
        world.realtime.drop_connections()
        await batch[0].reject("never")
        await consumer.close()
        await batch[1].nack(timedelta(seconds=1))
        assert len(world.realtime.rejected) == len(world.realtime.retried) == 1

    on_loop(scenario)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("nack", [timedelta(seconds=-1)]),
        ("nack", [timedelta(days=1_000)]),
        ("nack", [5]),
        ("reject", [""]),
        ("reject", [None]),
    ],
)
def test_what_can_not_be_decided_is_refused_and_nothing_is_settled(call: str, arguments: list[Any]) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        async with consumer_of(world) as consumer:
            (message,) = await consumer.pull()
            with pytest.raises(BadArgument):
                await getattr(message, call)(*arguments)
            await message.ack()

    on_loop(scenario)


def test_the_blocking_consumer_has_the_same() -> None:
    with world_aside() as (world, do):
        do(lambda: add_messages(world, 3))
        with Consumer(world.address, "orders", "g", prefetch=False) as consumer:
            batch = consumer.pull(3)
            batch[0].nack(timedelta(seconds=1), error="busy")
            batch[1].reject("never", wait=False)
            wait_until(lambda: world.realtime.rejected)
        batch[2].reject("late")
        assert world.realtime.retried == [(0, 1_000, "busy")]
        assert world.realtime.rejected == [(1, "never", ""), (2, "late", "")]


def test_a_message_that_came_again_tells_of_its_earlier_lives_and_hides_the_headers_of_servers() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"again", headers=LIFE)
        world.realtime.add(b"back from the dead", headers={**LIFE, "delayd.reason": "attempts over"})
        world.realtime.add(b"first", headers={"mine": "delayd.attempt"})
        async with consumer_of(world) as consumer:
            batch = await consumer.pull()
            assert batch.attempts.tolist() == [4, 1, 1]
            assert [message.attempt for message in batch] == [4, 1, 1]
            assert [message.headers for message in batch] == [
                {"mine": "yes"},
                {"mine": "yes"},
                {"mine": "delayd.attempt"},
            ]
            assert [message.last_error for message in batch] == ["busy", "busy", ""]
            assert [message.origin_sequence for message in batch] == [7, 7, 3]
            assert batch.headers[0] == {"mine": "yes"}

    on_loop(scenario)


def test_headers_that_only_look_like_those_of_servers_harm_nothing() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"", headers={"delayd.attempt": "many", "delayd.error": b"x"})
        world.realtime.add(b"", headers=b"\x93delayd.attempt")
        async with consumer_of(world) as consumer:
            batch = await consumer.pull()
            assert batch.attempts.tolist() == [1, 1] and [message.last_error for message in batch] == ["", ""]

    on_loop(scenario)


def test_the_back_off_doubles_up_to_its_most_and_is_shortened_at_random() -> None:
    backoff = Backoff(first=timedelta(seconds=1), most=timedelta(seconds=10), jitter=0.25)
    for attempt, most_ms in ((1, 1_000), (2, 2_000), (4, 8_000), (5, 10_000), (60_000, 10_000)):
        drawn = [backoff.delay_ms(attempt) for _ in range(200)]
        assert most_ms * 0.75 <= min(drawn) < max(drawn) <= most_ms
    assert {Backoff(jitter=0).delay_ms(3) for _ in range(9)} == {4_000}


@pytest.mark.parametrize(
    "settings", [{"first": timedelta(0)}, {"most": timedelta(days=1_000)}, {"jitter": 2}, {"first": 5}]
)
def test_a_back_off_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadSetting):
        Backoff(**settings)


def test_given_back_without_a_delay_a_message_waits_for_the_back_off() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"", headers={**LIFE, "delayd.attempt": "2"})
        async with consumer_of(world, prefetch=False, backoff=Backoff(jitter=0)) as consumer:
            await (await consumer.pull())[0].nack()
            assert [delay_ms for _, delay_ms, _ in world.realtime.retried] == [4_000]

    on_loop(scenario)


def test_when_its_attempts_are_over_a_message_is_a_dead_letter() -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"last", headers={**LIFE, "delayd.attempt": "1"})
        world.realtime.add(b"poison", headers={**LIFE, "delayd.attempt": "2"})
        world.realtime.add(b"again", headers={**LIFE, "delayd.attempt": "0"})
        async with consumer_of(world, prefetch=False, max_attempts=2) as consumer:
            batch = await consumer.pull()
            # No handler sees the one whose consumers have ended twice.
            assert batch.bodies == [b"last", b"again"]
            await batch.nack(error="broken")
            await consumer.flush()
            assert [(consume, error) for consume, _, error in world.realtime.retried] == [(2, "broken")]
            assert sorted(world.realtime.rejected) == [
                (0, "its attempts are over: 2 of 2", "broken"),
                (1, "its attempts are over: 2 of 2", ""),
            ]

    on_loop(scenario)
