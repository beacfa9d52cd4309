"""Which of several delay servers gets a batch: a named refusal moves it on at once, and never more than that (rules I3,
I4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from delayd.client import routing
from delayd.client.producer import AsyncProducer
from delayd.errors import (
    BadHeaders,
    ClockInDoubt,
    DelaydError,
    DiskReserve,
    HourFull,
    NotReady,
    QuotaReached,
    Rebuilding,
    ServerFenced,
    SlowDown,
    Stopping,
)
from delayd.net.connection import Connection
from delayd.wire.frame import Frame
from tests.unit.client.servers import SmallDelay, refuse
from tests.unit.client.world import PAST_MS, World, on_loop
from tests.unit.net.loopback import error_of

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


def test_a_server_that_meta_called_dead_is_used_within_two_seconds_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "REFRESH_MS", LONG_MS)

    async def scenario(world: World) -> None:
        other = await world.second_delay()
        world.meta.dead.add(other.log_id)
        async with AsyncProducer(world.address) as producer:
            loop = asyncio.get_running_loop()
            for _ in range(20):
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
                await asyncio.sleep(0.02)
            assert not other.rows, "meta has called it dead whenever it was asked"
            world.meta.dead.clear()
            until = loop.time() + 2.0
            while not other.rows and loop.time() < until:
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
                await asyncio.sleep(0.02)
            assert other.rows, "it gets its share again"

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


def test_a_refusal_that_is_the_messages_own_fault_is_told_at_once() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            other = await warm(producer, world)
            tried = len(world.delay.numbers) + len(other.numbers)
            for server in (world.delay, other):
                server.script.append(refuse(server, BadHeaders("no map"), []))
            assert isinstance(await error_of(producer.send("a", b"x", deliver_at_ms=PAST_MS)), BadHeaders)
            assert len(world.delay.numbers) + len(other.numbers) == tried + 1

    on_loop(scenario)


def test_rule_I3_a_batch_that_all_servers_refuse_waits_for_the_first_that_takes_it() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            other = await warm(producer, world)
            for server in (world.delay, other):
                server.script.extend([answer_error(NotReady("starting", retry_after_ms=5))] * 3)
            receipt = await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            assert not receipt.duplicate
            assert len(world.delay.script) == 0 or len(other.script) == 0

    on_loop(scenario)


def test_a_server_that_takes_connections_and_says_nothing_holds_up_no_first_send() -> None:
    async def scenario(world: World) -> None:
        writers: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
        hung = SmallDelay(102)
        hung.port = silent.sockets[0].getsockname()[1]
        world.meta.delay.insert(0, hung)
        async with AsyncProducer(world.address, timeout_ms=4_000) as producer:
            receipts = [await producer.send("a", b"x", deliver_at_ms=PAST_MS) for _ in range(10)]
        assert {receipt.log_id for receipt in receipts} == {world.delay.log_id}
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        silent.close()
        await silent.wait_closed()

    on_loop(scenario)
