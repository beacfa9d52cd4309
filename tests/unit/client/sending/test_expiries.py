"""Messages that expire: what travels, and which arguments are wrong."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pytest

import delayd
from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.client.producer import AsyncProducer
from delayd.errors import BadArgument, BadExpiry, CallerError, NaiveDatetime
from tests.unit.client.world import PAST_MS, World, on_loop, world_aside

MS = timedelta(milliseconds=1)
LATER = datetime(2030, 1, 1, tzinfo=UTC)
LATER_MS = int(LATER.timestamp() * 1000)
PAST = datetime.fromtimestamp(PAST_MS / 1000, UTC)


def _expiries(batch: Batch) -> list[int]:
    if ColumnId.EXPIRES_AT_MS not in batch:
        return [0] * batch.count
    instants: list[int] = batch.int64s(ColumnId.EXPIRES_AT_MS).tolist()
    return instants


def test_a_ttl_begins_when_the_message_is_due_and_an_instant_stays() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipts = await asyncio.gather(
                producer.send("a", b"1", deliver_at_ms=PAST_MS),
                producer.send("a", b"2", deliver_at_ms=PAST_MS, ttl=timedelta(seconds=1)),
                producer.send("b", b"3", delay=timedelta(hours=1), ttl=timedelta(microseconds=1)),
                producer.send("b", b"4", delay=timedelta(hours=1), expires_at=LATER, tags=["eu"]),
                producer.send("b", b"5", deliver_at_ms=PAST_MS, key="k", expires_at=LATER + timedelta(microseconds=1)),
            )
        every = sorted(instant for kept in world.delay.kept for instant in _expiries(kept.batch))
        relative = receipts[2].deliver_at_ms + 1
        assert every == sorted([0, PAST_MS + 1_000, relative, LATER_MS, LATER_MS + 1])

    on_loop(scenario)


COLUMNS: list[tuple[dict[str, Any], list[int]]] = [
    ({"ttl": timedelta(seconds=2)}, [PAST_MS + 2_000] * 3),
    ({"ttl": [timedelta(seconds=2), None, MS]}, [PAST_MS + 2_000, 0, PAST_MS + 1]),
    ({"ttl": np.array([1, 2_000, 1_000_001], "m8[us]")}, [PAST_MS + 1, PAST_MS + 2, PAST_MS + 1_001]),
    ({"ttl": np.array([1, 2, 3], "m8[D]")}, [PAST_MS + day * 86_400_000 for day in (1, 2, 3)]),
    ({"ttl": pd.Series([timedelta(seconds=1)] * 3)}, [PAST_MS + 1_000] * 3),
    ({"expires_at": LATER}, [LATER_MS] * 3),
    ({"expires_at": [None, LATER, None]}, [0, LATER_MS, 0]),
    ({"expires_at": np.array(["2030-01-01"] * 3, "M8[D]")}, [LATER_MS] * 3),
    ({"expires_at": pd.Series([LATER] * 3)}, [LATER_MS] * 3),
    ({"ttl": [None] * 3}, [0] * 3),
    ({}, [0] * 3),
]


@pytest.mark.parametrize(("given", "expected"), COLUMNS, ids=str)
def test_columns_of_expiries(given: dict[str, Any], expected: list[int]) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send_batch("s", [b"x", b"y", b"z"], PAST_MS, **given)
        (kept,) = world.delay.kept
        assert _expiries(kept.batch) == expected
        # What never expires costs nothing.
        assert (ColumnId.EXPIRES_AT_MS in kept.batch) == any(expected)

    on_loop(scenario)


WRONG: list[tuple[dict[str, Any], type[CallerError]]] = [
    ({"ttl": MS, "expires_at": LATER}, BadArgument),
    ({"ttl": timedelta(0)}, BadExpiry),
    ({"ttl": -MS}, BadExpiry),
    ({"ttl": timedelta(days=733)}, BadExpiry),
    ({"ttl": timedelta.max}, BadExpiry),
    ({"ttl": 5}, BadArgument),
    ({"ttl": "5s"}, BadArgument),
    ({"expires_at": LATER.replace(tzinfo=None)}, NaiveDatetime),
    ({"expires_at": datetime(1970, 1, 1, tzinfo=UTC)}, BadExpiry),
    ({"expires_at": LATER_MS}, BadArgument),
    ({"expires_at": LATER.date()}, BadArgument),
    ({"expires_at": "2030-01-01"}, BadArgument),
]
OF_ONE: list[tuple[dict[str, Any], type[CallerError]]] = [
    ({"expires_at": PAST}, BadExpiry),
    ({"expires_at": PAST - MS}, BadExpiry),
]
OF_COLUMNS: list[tuple[dict[str, Any], type[CallerError]]] = [
    ({"ttl": []}, BadArgument),
    ({"ttl": [MS]}, BadArgument),
    ({"ttl": [MS] * 3}, BadArgument),
    ({"ttl": np.array([[1, 2]], "m8[s]")}, BadArgument),
    ({"ttl": np.array([1, "NaT"], "m8[s]")}, BadArgument),
    ({"ttl": np.array([1, 2])}, BadArgument),
    ({"ttl": [MS, 0]}, BadArgument),
    ({"ttl": [MS, timedelta(0)]}, BadExpiry),
    ({"expires_at": np.array(["2030-01-01", "NaT"], "M8[D]")}, BadArgument),
    ({"expires_at": pd.Series([LATER, pd.NaT])}, BadArgument),
    ({"expires_at": pd.Series([LATER.replace(tzinfo=None)] * 2)}, NaiveDatetime),
    ({"expires_at": [LATER, "tomorrow"]}, BadArgument),
]


@pytest.mark.parametrize(("given", "kind"), WRONG + OF_ONE, ids=str)
def test_a_wrong_expiry_is_refused_before_anything_is_sent(given: dict[str, Any], kind: type[CallerError]) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            with pytest.raises(kind):
                producer.send("s", b"x", deliver_at_ms=PAST_MS, **given)
        assert not world.delay.numbers

    on_loop(scenario)


@pytest.mark.parametrize(("given", "kind"), WRONG + OF_COLUMNS, ids=str)
def test_wrong_columns_of_expiries_are_refused(given: dict[str, Any], kind: type[CallerError]) -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            with pytest.raises(kind):
                await producer.send_batch("s", [b"x", b"y"], PAST_MS, **given)
        assert not world.delay.numbers

    on_loop(scenario)


def test_blocking_producers_send_expiries_too() -> None:
    with world_aside() as (world, _), delayd.Producer(world.address) as producer:
        producer.send("s", b"1", deliver_at_ms=PAST_MS, ttl=MS)
        producer.send_nowait("s", b"2", deliver_at_ms=PAST_MS, expires_at=LATER).result()
        producer.send_batch("s", [b"3", b"4"], PAST_MS, ttl=[None, MS])
        every = sorted(instant for kept in world.delay.kept for instant in _expiries(kept.batch))
        assert every == [0, PAST_MS + 1, PAST_MS + 1, LATER_MS]
