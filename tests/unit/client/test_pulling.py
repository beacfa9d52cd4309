"""Consumers and servers that go away, move or say nonsense, and callers that stall or are interrupted."""

from __future__ import annotations

import asyncio
import linecache
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import delayd.client
from delayd import AsyncConsumer, AsyncMessageBatch, Consumer, Message, MessageBatch, MessageState, Producer
from delayd.client.pulling import consumer_core, many_source, source
from delayd.errors import (
    AlreadyClosed,
    BadHeaders,
    BadRequest,
    BatchMalformed,
    NotReady,
    ServerUnavailable,
    StaleHandle,
)
from delayd.net.connection import Connection
from delayd.testing import InMemoryBroker
from delayd.wire.frame import Frame, HeadValue
from delayd.wire.requests import RequestType
from tests.unit.client.consumers import consumer_of, until_answered
from tests.unit.client.core_server import SUBJECT, CoreServer
from tests.unit.client.servers import SmallMeta
from tests.unit.client.world import World, add_messages, fork, on_loop, on_steady_loop, world_aside
from tests.unit.net.loopback import error_of, skip
from tests.waiting import DEADLINE_S, until, wait_until


@pytest.mark.parametrize("bad", [b"\xc1\xff", b"\x81\xa1a", b"\x93abc", b"\x81\x01\x02", b"\x81\xa1a\xa2\xff\xff"])
def test_rule_E2_headers_that_can_not_be_decoded_concern_their_own_message_only(bad: bytes) -> None:
    async def scenario(world: World) -> None:
        headers = [bad if row == 2 else bytes([0x81, 0xA1, ord("n"), 0xA1, 48 + row]) for row in range(6)]
        world.realtime.put(SUBJECT, *(b"%d" % row for row in range(6)), headers=headers)
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


def test_a_batch_whose_checksum_differs_is_not_handed_out() -> None:
    async def scenario(world: World) -> None:
        world.realtime.damage = True
        world.realtime.add(b"x")
        async with consumer_of(world) as consumer:
            assert isinstance(await error_of(consumer.pull()), BatchMalformed)

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
            world.realtime.end_leases()
            seen = len(world.realtime.seen)
            await batch.ack(wait=False)
            await until_answered(world, seen)
            assert "not_acknowledged subject=orders group=g" in caplog.text and "stale_handle" in caplog.text
            assert isinstance(await error_of(getattr(consumer, late_call)()), StaleHandle)
            await consumer.flush() if late_call != "close" else None
            await consumer.close()
            world.realtime.end_leases()

    on_steady_loop(scenario)


@pytest.mark.parametrize("step_ms", [-86_400_000, -1_000, 1_000, 86_400_000])
def test_rule_T3_a_lease_lasts_whatever_is_done_to_the_servers_clock(step_ms: int) -> None:
    async def scenario(world: World) -> None:
        async with consumer_of(world) as consumer:
            world.realtime.add(b"before")
            assert (await consumer.pull()).bodies == [b"before"]
            world.realtime.life.clock.step_wall(step_ms)
            world.realtime.add(b"after")
            batch = await consumer.pull()
            assert batch.bodies == [b"after"] and batch[0].attempt == 1
            await batch.ack()

    on_steady_loop(scenario)


LEASE = timedelta(seconds=1)  # What nobody comes for goes back after a quarter of it.


CLIENT = str(Path(delayd.client.__file__).parent)


def default_consumer(world: World, lease: timedelta = LEASE) -> AsyncConsumer:
    """With default settings, but for the lease."""
    return AsyncConsumer(world.address, SUBJECT, "g", lease=lease)


@pytest.mark.parametrize("each_s", [0.005, 0.0])
def test_rule_Q4_half_of_what_others_wait_for_goes_to_them_unless_it_is_done_at_once(each_s: float) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 40)
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            for _ in range(20):
                message = await anext(consumer)
                await asyncio.sleep(each_s)
                await message.ack(wait=False)
            message = await anext(consumer)
            await until(lambda: len(world.realtime.held) > 8)
            await consumer.flush()
            ahead = sum(consume > 20 for consume, _ in world.realtime.held.values())
            # The server tells of it in any answer.
            world.realtime.lies.append(500)
            await message.ack()
            await asyncio.sleep(0.05)
            returned = len(world.realtime.returned)
            assert returned >= -(-ahead // 2) if each_s else not returned
            assert world.realtime.counted == []

    on_steady_loop(scenario)


def test_what_is_fetched_ahead_needs_no_pull_for_each_answer() -> None:
    async def scenario(world: World) -> None:
        async with default_consumer(world) as consumer:
            add_messages(world, 100)
            got = [await anext(consumer) for _ in range(100)]
            await until(lambda: world.realtime.waiting() == 1)
            before = world.realtime.pulls()
            for number in range(100, 300):
                world.realtime.add(b"%d" % number)
                got.append(await anext(consumer))
            assert world.realtime.pulls() - before < 20
            for message in got:
                await message.ack(wait=False)
        assert (world.realtime.acked, world.realtime.returned) == (list(range(300)), [])

    on_steady_loop(scenario)


def test_rule_Q4_a_caller_that_has_become_slow_gets_no_more() -> None:
    async def scenario(world: World) -> None:
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            add_messages(world, 100)
            for _ in range(100):
                await (await anext(consumer)).ack(wait=False)
            await consumer.flush()
            await until(lambda: world.realtime.waiting() == 1)
            world.realtime.add(b"a")
            await until(lambda: len(world.realtime.held) == 1)
            await asyncio.sleep(0.3)
            world.realtime.add(b"b")
            await until(lambda: not world.realtime.waiting())
            world.realtime.add(b"c")
            await asyncio.sleep(0.05)
            assert len(world.realtime.held) == 2

    on_steady_loop(scenario)


def test_rule_Q4_a_cancelled_pull_loses_nothing() -> None:
    async def scenario(world: World) -> None:
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            for row in range(9):
                waits: Coroutine[object, object, object] = consumer.pull(1 + row) if row % 3 else consumer.__anext__()
                pulling = asyncio.create_task(asyncio.wait_for(waits, DEADLINE_S))
                await until(lambda: world.realtime.waiting() == 1)
                await asyncio.sleep(0.002)
                pulling.cancel()
                if row % 2:
                    # The server is asked for its answer, and then nothing is on the way.
                    await until(lambda: not world.realtime.waiting())
                world.realtime.add(b"%d" % row)
                batch = await consumer.pull(wait=timedelta(seconds=5))
                assert (batch.bodies, batch.attempts.tolist()) == ([b"%d" % row], [1])
                await batch.ack()
        assert world.realtime.acked == list(range(9)) and world.realtime.counted == []

    on_steady_loop(scenario)


def test_a_pull_that_waits_in_vain_asks_once() -> None:
    calls = 30

    async def scenario(world: World) -> None:
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            for _ in range(calls):
                assert not len(await consumer.pull(wait=timedelta(milliseconds=1)))
        pulls = [frame for frame in world.realtime.seen if frame.type == RequestType.PULL]
        # A server's timer may end within its last millisecond; then it is asked again.
        assert calls <= len(pulls) < 2 * calls

    on_steady_loop(scenario)


def test_an_answer_that_comes_in_the_moment_in_which_the_wait_for_it_ends_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = timedelta(0)
    subjects = [f"many.{number}" for number in range(100)]
    with InMemoryBroker(tick=True) as broker, Producer(broker.address) as producer:
        receipt = producer.send(subjects[-1], b"1", delay=at_once)
        wait_until(lambda: producer.get(subjects[-1], receipt=receipt).state is MessageState.DISPATCHED)
        for number in range(40):
            # As long as the server takes to make the groups, more or less.
            monkeypatch.setattr(consumer_core, "SLACK_S", 0.001 * (1 + number // 2))
            with Consumer(broker.address, subjects, f"g{number}", prefetch=False) as consumer:
                batch = consumer.pull(wait=at_once)
                assert len(batch) or batch.outage is not None, "a message is there"


def test_what_is_on_its_way_at_the_close_goes_back_uncounted() -> None:
    async def close_in_a_pull(world: World) -> None:
        consumer = default_consumer(world, timedelta(seconds=60))
        add_messages(world, 10)
        requests = world.realtime.pulls()
        pulling = asyncio.create_task(consumer.pull(3))
        await until(lambda: world.realtime.pulls() > requests)
        await consumer.close()
        (ended,) = await asyncio.gather(pulling, return_exceptions=True)
        assert isinstance(ended, AlreadyClosed | AsyncMessageBatch)
        handed_out = len(ended) if isinstance(ended, AsyncMessageBatch) else 0
        assert len(world.realtime.held) == handed_out and world.realtime.counted == []
        world.realtime.end_leases()

    async def scenario(world: World) -> None:
        for _ in range(20):
            await close_in_a_pull(world)

    on_steady_loop(scenario)


def test_an_outage_ends_no_iteration_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        consumer = AsyncConsumer(world.address, SUBJECT, "g", timeout_ms=100)
        seen: list[bytes] = []

        async def iterate() -> None:
            async for message in consumer:
                seen.append(message.body)
                await message.ack(wait=False)

        def has_acknowledged(count: int) -> bool:
            return len(world.realtime.acked) == count

        world.meta.realtime.clear()
        iterating = asyncio.create_task(iterate())
        for row in range(3):
            await asyncio.sleep(0.5)
            world.meta.realtime[:] = [world.realtime]
            world.realtime.add(b"%d" % row)
            # An acknowledgement that the outage takes would be raised by the next one, which is as it should be.
            await until(partial(has_acknowledged, row + 1))
            await world.realtime.stop()
            await asyncio.sleep(0.4)
            assert not iterating.done()
            await world.realtime.start()
        await consumer.close()
        await iterating
        assert seen == [b"0", b"1", b"2"]

    with caplog.at_level(logging.INFO, "delayd.client.pulling.consumer_core"):
        on_steady_loop(scenario)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("consumer_core")]
    words = [line.split()[0] for line in told]
    assert words == ["consumer_waits", "consumer_goes_on"] * (len(words) // 2) + ["consumer_waits"] * (len(words) % 2)
    assert 2 <= len(words) <= 7


def test_a_signal_handler_may_close_the_consumer_that_it_interrupts() -> None:
    def close_by_signal(world: World, do: Callable[[Callable[[], None]], None], flows: bool) -> None:
        do(partial(add_messages, world, 200 if flows else 1))
        consumer = Consumer(world.address, SUBJECT, "g")
        signal.signal(signal.SIGUSR1, lambda number, frame: consumer.close())
        waits = threading.main_thread().ident or 0
        late = threading.Timer(0.1, lambda: signal.pthread_kill(waits, signal.SIGUSR1))
        late.start()
        handled = 0
        for message in consumer:
            # The one in hand at the close is acknowledged, too.
            message.ack(wait=False)
            handled += 1
            do(partial(add_messages, world, int(flows)))
        late.join()
        assert len(world.realtime.acked) == handled and world.realtime.counted == []
        world.realtime.acked.clear()
        do(world.realtime.end_leases)

    before = signal.getsignal(signal.SIGUSR1)
    with world_aside() as (world, do):
        try:
            for row in range(8):
                close_by_signal(world, do, bool(row % 2))
        finally:
            signal.signal(signal.SIGUSR1, before)


class Interrupts:
    """Raises KeyboardInterrupt once, at the n-th line of the clients that this thread comes to."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupts | None:
        code = frame.f_code
        if not code.co_filename.startswith(CLIENT):
            # Functions that the clients call are not followed.
            return None
        # A signal never comes between a `with` and the call of its end, as a trace function would.
        if event == "line" and "with self._lock" not in linecache.getline(code.co_filename, frame.f_lineno):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pulls", [False, True])
def test_a_ctrl_c_at_any_line_loses_nothing_and_repeats_nothing(pulls: bool) -> None:
    with world_aside() as (world, do), Consumer(world.address, SUBJECT, "g", lease=timedelta(seconds=60)) as consumer:
        do(partial(add_messages, world, 3))
        seen = [next(consumer).sequence for _ in range(3)]

        def one() -> Message | MessageBatch:
            return consumer.pull(1) if pulls else next(consumer)

        def number_of(got: Message | MessageBatch) -> int:
            return got.sequence if isinstance(got, Message) else got[0].sequence

        at = interrupted = 0
        while at == interrupted:
            at += 1
            do(partial(add_messages, world, 1))
            got = None
            sys.settrace(Interrupts(at))
            try:
                got = one()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            began = time.monotonic()
            seen.append(number_of(one() if got is None else got))
            # What is held for nobody would come again after a quarter of its lease, 15 s.
            assert time.monotonic() - began < 14
        assert interrupted > 20 and seen == list(range(1, at + 4))
        assert world.realtime.counted == []


def test_a_child_hands_out_nothing_of_its_parent() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 60))
        with Consumer(world.address, SUBJECT, "g", lease=timedelta(seconds=60)) as consumer:
            parents = [next(consumer).sequence for _ in range(10)]
            wait_until(lambda: len(world.realtime.held) > 15)
            child = fork()
            if child == 0:
                status = 1
                try:
                    message = next(consumer)
                    message.ack()
                    status = 0 if message.sequence > 15 and message.attempt == 1 else 1
                    consumer.close()
                finally:
                    os._exit(status)
            parents += [next(consumer).sequence for _ in range(5)]
            _, waited = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(waited) == 0 and parents == list(range(1, 16))


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


async def move_to_another_server(world: World) -> CoreServer:
    """The subject has another realtime server from now on."""
    other = CoreServer(202)
    world.servers.append(other)
    await other.start()
    world.meta.realtime[:] = [other]
    return other


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


async def _pass(world: World, ticks: int, extended: int) -> None:
    """Let a second pass so often; each time so many messages are extended."""
    for _ in range(ticks):
        before = len(world.realtime.extended)
        await skip(1.001)
        await until(lambda before=before: len(world.realtime.extended) == before + extended)  # type: ignore[misc]


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


GROUP = "g"


LONG_WAIT = timedelta(seconds=30)


NOT_LONG = timedelta(milliseconds=50)


class Servers:
    """A meta, and realtime servers of which the first has every subject that no other is given."""

    def __init__(self, world: World, *realtime: CoreServer) -> None:
        self.world = world
        self.realtime = realtime

    def consumer(
        self, subject: str | Sequence[str], *, prefetch: bool = True, timeout_ms: float = 30_000
    ) -> AsyncConsumer:
        return AsyncConsumer(self.world.address, subject, GROUP, prefetch=prefetch, timeout_ms=timeout_ms)

    def requests(self, kind: RequestType) -> int:
        return sum(frame.type == kind for server in self.realtime for frame in server.seen)


def with_servers(scenario: Callable[[Servers], Awaitable[None]], count: int = 1) -> None:
    """Run a scenario against a meta and so many realtime servers."""

    async def main(world: World) -> None:
        servers = [CoreServer(301 + number) for number in range(count)]
        world.meta.realtime[:] = servers
        for server in servers:
            world.servers.append(server)
            await server.start()
        await scenario(Servers(world, *servers))

    on_steady_loop(main)


async def taken(consumer: AsyncConsumer, count: int) -> list[tuple[str, bytes]]:
    """The next messages, as (subject, body); all are acknowledged."""
    found: list[tuple[str, bytes]] = []
    async for message in consumer:
        found.append((message.subject, message.body))
        await message.ack()
        if len(found) == count:
            break
    return found


async def pulled(consumer: AsyncConsumer, count: int) -> list[AsyncMessageBatch]:
    """Batches with so many messages."""
    found: list[AsyncMessageBatch] = []
    while sum(map(len, found)) < count:
        found.append(await consumer.pull(100, wait=LONG_WAIT))
    return found


def test_while_one_server_is_away_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(servers: Servers) -> None:
        first, second = servers.realtime
        await first.stop()
        async with servers.consumer("s.*", timeout_ms=200) as consumer:
            for number in range(20):
                second.put("s.2", b"%d" % number)
                ((subject, _),) = await taken(consumer, 1)
                assert subject == "s.2"
            assert not len(await consumer.pull(wait=timedelta(milliseconds=500)))
            taking = asyncio.create_task(taken(consumer, 1))
            asked = servers.requests(RequestType.PULL)
            await until(lambda: servers.requests(RequestType.PULL) > asked)
            await asyncio.sleep(0.5)  # Beyond the time for which one PULL is tried.
            await first.start()
            first.put("s.1", b"back")
            assert await taking == [("s.1", b"back")]

    with caplog.at_level(logging.INFO, "delayd"):
        with_servers(scenario, 2)
    told = [record.getMessage().split()[0] for record in caplog.records]
    assert told.count("consumer_server_away") == 1 and told.count("consumer_server_back") == 1


def test_a_server_that_joins_and_a_route_that_moves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_source, "LOOK_S", 0.05)
    monkeypatch.setattr(many_source, "SETTLED_LOOK_S", 0.0)

    async def scenario(servers: Servers) -> None:
        first, second, third = servers.realtime
        servers.world.meta.realtime.remove(third)
        servers.world.meta.routed["t.3"] = second
        async with servers.consumer("s.*") as pattern, servers.consumer(["t.1", "t.2", "t.3"]) as listed:
            taking = [asyncio.create_task(taken(each, 1)) for each in (pattern, listed)]
            await until(lambda: servers.requests(RequestType.PULL) == 4)
            servers.world.meta.realtime.append(third)
            servers.world.meta.routed["t.2"] = second
            third.put("s.2", b"s")
            second.put("t.2", b"t")
            assert [await each for each in taking] == [[("s.2", b"s")], [("t.2", b"t")]]
            first.put("t.1", b"t")
            assert await taken(listed, 1) == [("t.1", b"t")]

    with_servers(scenario, 3)


@pytest.mark.parametrize("ephemeral", [True, False])
def test_what_was_sent_to_a_server_that_is_met_later_is_not_missed(
    ephemeral: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_source, "LOOK_S", 0.2)
    monkeypatch.setattr(many_source, "SETTLED_LOOK_S", 0.0)

    def begun(server: CoreServer) -> HeadValue:
        """How the newest subscription at a server begins."""
        *_, last = [frame.head for frame in server.seen if frame.type == RequestType.SUBSCRIBE]
        return last.get("start")

    def looks_at(meta: SmallMeta) -> int:
        return sum(frame.type == RequestType.SERVERS for frame in meta.seen)

    def subscribed_twice(server: CoreServer) -> bool:
        return [frame.type for frame in server.seen].count(RequestType.SUBSCRIBE) == 2

    def has_looked(meta: SmallMeta, before: int) -> bool:
        return looks_at(meta) > before

    async def scenario(servers: Servers) -> None:
        first, second, third = servers.realtime
        meta = servers.world.meta
        meta.routed["t.2"] = second
        meta.realtime.remove(third)
        names: tuple[str | list[str], ...] = (["t.1", "t.2", "t.3"], "t.*")
        settings: dict[str, Any] = {"prefetch": False, "start": "latest", "ephemeral": ephemeral}
        for group, subjects in zip("gh", names, strict=True):
            async with AsyncConsumer(servers.world.address, subjects, group, **settings) as consumer:
                assert not len(await consumer.pull(wait=NOT_LONG))
                assert begun(first) == begun(second) == "latest"
                moved_ms, looks = meta.now_ms(), looks_at(meta)
                # Nobody pulls when subjects move, to a server that is known and to one that is new.
                meta.realtime.append(third)
                meta.routed |= {"t.1": second, "t.3": third}
                await until(partial(has_looked, meta, looks))
                if ephemeral and isinstance(subjects, list):
                    # The groups of its own live as long as its connection, so another one is made at once.
                    await until(partial(subscribed_twice, second))
                assert not len(await consumer.pull(wait=NOT_LONG))
                for server in (third,) if isinstance(subjects, str) else (second, third):
                    start = begun(server)
                    if ephemeral:
                        assert isinstance(start, dict) and moved_ms - 10_000 < start["instant_ms"] <= moved_ms - 5_000
                    else:
                        assert start is None, "from the first message that is kept"
            meta.realtime.remove(third)
            del meta.routed["t.1"], meta.routed["t.3"]

    with_servers(scenario, 3)


def test_no_pull_leaves_on_a_connection_before_its_subscription_stands() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        server.put("s.1", b"1")
        async with servers.consumer("s.*") as consumer:
            (batch,) = await pulled(consumer, 1)
            server.keeps = RequestType.SUBSCRIBE
            await server.restart()
            acking = asyncio.create_task(batch.ack())
            await until(lambda: servers.requests(RequestType.SUBSCRIBE) == 2)
            server.put("s.1", b"2")
            asked = servers.requests(RequestType.PULL)
            pulling = asyncio.create_task(consumer.pull(wait=LONG_WAIT))
            await asyncio.sleep(0.02)
            assert servers.requests(RequestType.PULL) == asked
            server.release()
            await acking
            assert (await pulling).bodies == [b"2"]

    with_servers(scenario)


@pytest.mark.parametrize("wanted", [-1, None, "many", 1 << 63, 0.5], ids=str)
def test_an_answer_that_wants_nonsense_is_a_named_error_and_the_consumer_goes_on(wanted: HeadValue) -> None:
    async def scenario(world: World) -> None:
        async with AsyncConsumer(world.address, SUBJECT, group="g", prefetch=False) as consumer:
            world.realtime.add(b"1")
            world.realtime.lies.append(wanted)
            assert isinstance(await error_of(consumer.pull(1, wait=timedelta(seconds=1))), BadRequest)
            world.realtime.end_leases()
            batch = await consumer.pull(1, wait=timedelta(seconds=5))
            assert batch.bodies == [b"1"]
            world.realtime.lies.append(wanted)
            await batch.ack()  # It was durable, and to say it twice is to say it once.
        assert world.realtime.acked == [0, 0] or world.realtime.acked == [0]

    on_loop(scenario)


WAIT = timedelta(seconds=5)


def _frames(world: World, kind: RequestType) -> list[Frame]:
    return [frame for frame in world.realtime.seen if frame.type == kind]


def _has_said(world: World, times: int) -> bool:
    return len(_frames(world, RequestType.PULL_END)) == times


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

        async with AsyncConsumer(world.address, SUBJECT, "g", prefetch=False, **kind) as consumer:
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
