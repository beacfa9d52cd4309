"""A consumer of many subjects against cores of realtime servers: lists, patterns, servers that go and come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from delayd.batch.names import SUBSCRIBED_MAX
from delayd.client.pulling import consumer_core, many_source
from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessageBatch
from delayd.errors import BadArgument, BadSubject, NoRealtimeServer, RequestFailed, RetryLater, StaleHandle
from delayd.wire.frame import HeadValue
from delayd.wire.requests import RequestType
from tests.unit.client.core_server import CoreServer
from tests.unit.client.servers import SmallMeta
from tests.unit.client.world import World, on_steady_loop
from tests.waiting import until

GROUP = "g"
WAIT = timedelta(seconds=30)
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
        found.append(await consumer.pull(100, wait=WAIT))
    return found


def test_a_list_is_consumed_over_one_connection_and_each_message_knows_its_subject() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        names = [f"s.{number}" for number in range(50)]
        async with servers.consumer(names) as consumer:
            for number, name in enumerate(names):
                server.put(name, b"%d" % number)
            server.put("other", b"no")
            batches = await pulled(consumer, 50)
            rows = [row for batch in batches for row in zip(batch.subjects, batch.bodies, strict=True)]
            assert sorted(rows) == sorted((name, b"%d" % number) for number, name in enumerate(names))
            assert {message.subject for batch in batches for message in batch} == set(names)
            for batch in batches:
                await batch.ack()
            assert not len(await consumer.pull(wait=NOT_LONG))
            assert server.connected_count == 1
            assert all(not group.outstanding for group in server.life.core._pulls.groups.values())
            assert servers.requests(RequestType.SUBSCRIBE) == 1 and servers.requests(RequestType.ACK) == len(batches)

    with_servers(scenario)


def test_iteration_goes_round_and_acknowledges_single_messages() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        server.put("a", b"1", b"2")
        server.put("b", b"3")
        async with servers.consumer(["a", "b"]) as consumer:
            assert sorted(await taken(consumer, 3)) == [("a", b"1"), ("a", b"2"), ("b", b"3")]

    with_servers(scenario)


def test_subjects_that_match_a_pattern_join_while_the_consumer_waits() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        async with servers.consumer("orders.>") as consumer:
            taking = asyncio.create_task(taken(consumer, 2))
            await until(lambda: servers.requests(RequestType.PULL) > 0)
            server.put("mail", b"no")
            server.put("orders.eu", b"eu")
            server.put("orders.us.cancel", b"us")
            assert sorted(await taking) == [("orders.eu", b"eu"), ("orders.us.cancel", b"us")]

    with_servers(scenario)


def test_a_list_is_asked_of_the_servers_that_have_its_subjects_and_a_pattern_of_all() -> None:
    async def scenario(servers: Servers) -> None:
        first, second, third = servers.realtime
        servers.world.meta.routed["s.2"] = second
        first.put("s.1", b"1")
        second.put("s.2", b"2")
        async with servers.consumer(["s.1", "s.2"]) as consumer:
            assert sorted(await taken(consumer, 2)) == [("s.1", b"1"), ("s.2", b"2")]
            assert third.connected_count == 0
        third.put("s.3", b"3")
        second.put("s.2", b"2")
        async with servers.consumer("s.*") as consumer:
            assert sorted(await taken(consumer, 2)) == [("s.2", b"2"), ("s.3", b"3")]

    with_servers(scenario, 3)


def test_acknowledgements_go_to_the_server_of_each_message() -> None:
    async def scenario(servers: Servers) -> None:
        first, second = servers.realtime
        first.put("s.1", b"1")
        second.put("s.2", b"2")
        async with servers.consumer("s.*") as consumer:
            batches = await pulled(consumer, 2)
            handles = [handle for batch in batches for handle in batch.pulled.handles]
            await consumer.settle(handles, wait=True)
            assert [server.life.core._pulls.counters["acked"] for server in servers.realtime] == [1, 1]
            await consumer.settle(handles, wait=False)
            await consumer.flush()

    with_servers(scenario, 2)


def test_a_server_that_restarts_is_subscribed_to_again() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        async with servers.consumer("s.*") as consumer:
            taking = asyncio.create_task(taken(consumer, 1))
            await until(lambda: servers.requests(RequestType.PULL) > 0)
            await server.restart()
            server.put("s.1", b"1")
            assert await taking == [("s.1", b"1")]
            assert servers.requests(RequestType.SUBSCRIBE) == 2

    with_servers(scenario)


def test_a_handle_of_before_a_restart_is_good() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        server.put("s.1", b"1")
        async with servers.consumer(["s.1", "s.2"]) as consumer:
            (batch,) = await pulled(consumer, 1)
            await server.restart()
            await batch.ack()
            await batch.ack()

    with_servers(scenario)


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


def test_when_all_servers_are_away_a_pull_says_so() -> None:
    async def scenario(servers: Servers) -> None:
        for server in servers.realtime:
            await server.stop()
        async with servers.consumer("s.*", timeout_ms=200) as consumer:
            with pytest.raises((RetryLater, RequestFailed)):
                await consumer.pull(wait=WAIT)

    with_servers(scenario, 2)


def test_without_a_realtime_server_a_pull_says_so_and_iteration_waits() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        servers.world.meta.realtime.clear()
        async with servers.consumer("s.*", timeout_ms=200) as consumer:
            with pytest.raises(NoRealtimeServer):
                await consumer.pull(wait=WAIT)
            taking = asyncio.create_task(taken(consumer, 1))
            server.put("s.1", b"1")
            servers.world.meta.realtime.append(server)
            assert await taking == [("s.1", b"1")]

    with_servers(scenario)


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


def test_a_pull_that_does_not_wait_hears_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_core, "ANSWER_S", 30.0)

    async def scenario(servers: Servers) -> None:
        second = servers.realtime[1]
        second.put("s.2", b"2")
        second.keeps = RequestType.PULL
        async with servers.consumer("s.*") as consumer:
            pulling = asyncio.create_task(consumer.pull(wait=timedelta(0)))
            await until(lambda: all(any(f.type == RequestType.PULL for f in s.seen) for s in servers.realtime))
            await asyncio.sleep(0.02)
            assert not pulling.done()
            second.release()
            assert (await pulling).bodies == [b"2"]

    with_servers(scenario, 2)


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
            pulling = asyncio.create_task(consumer.pull(wait=WAIT))
            await asyncio.sleep(0.02)
            assert servers.requests(RequestType.PULL) == asked
            server.release()
            await acking
            assert (await pulling).bodies == [b"2"]

    with_servers(scenario)


def test_without_prefetch_no_server_keeps_messages_for_a_busy_caller() -> None:
    async def scenario(servers: Servers) -> None:
        first, second = servers.realtime
        async with servers.consumer("s.*", prefetch=False) as consumer:
            pulling = asyncio.create_task(consumer.pull(1, wait=WAIT))
            await until(lambda: all(any(f.type == RequestType.PULL for f in s.seen) for s in servers.realtime))
            first.put("s.1", b"1")
            assert (await pulling).bodies == [b"1"]
            await until(lambda: any(frame.type == RequestType.PULL_END for frame in second.seen))
            await until(lambda: not second.life.core._pulls._waiting)
            second.put("s.2", b"2")
            async with servers.consumer("s.*", prefetch=False) as other:
                assert (await other.pull(1, wait=WAIT)).bodies == [b"2"]

    with_servers(scenario, 2)


def test_a_close_gives_back_what_was_not_handed_out() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        for name in ("s.1", "s.2", "s.3"):
            server.put(name, b"x")
        consumer = servers.consumer("s.*")
        (batch,) = [await consumer.pull(3, wait=WAIT)]
        await consumer.close()
        held = sum(group.outstanding for group in server.life.core._pulls.groups.values())
        assert held == len(batch)
        await batch.ack()
        assert sum(group.outstanding for group in server.life.core._pulls.groups.values()) == 0

    with_servers(scenario)


def test_stale_handles_of_several_subjects_are_counted() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        server.put("s.1", b"1")
        server.put("s.2", b"2")
        async with servers.consumer("s.*") as consumer:
            batches = await pulled(consumer, 2)
            handles = [handle for batch in batches for handle in batch.pulled.handles]
            server.life.pass_time(120_000)
            with pytest.raises(StaleHandle) as caught:
                await consumer.settle(handles, wait=True)
            assert caught.value.details["count"] == 2

    with_servers(scenario)


def test_what_is_given_back_comes_again_as_its_own_subjects() -> None:
    async def scenario(servers: Servers) -> None:
        (server,) = servers.realtime
        server.put("s.1", b"1")
        server.put("s.2", b"2")
        async with servers.consumer(["s.1", "s.2"]) as consumer:
            for batch in await pulled(consumer, 2):
                await batch.nack(timedelta(0))
            again = await pulled(consumer, 2)
            rows = sorted(
                zip((n for b in again for n in b.subjects), (a for b in again for a in b.attempts), strict=True)
            )
            assert rows == [("s.1", 2), ("s.2", 2)]

    with_servers(scenario)


def test_rule_Q2_decisions_about_several_subjects_go_to_the_group_of_each() -> None:
    async def scenario(servers: Servers) -> None:
        first, second = servers.realtime
        first.put("s.1", b"1")
        first.put("s.3", b"3")
        second.put("s.2", b"2")
        async with servers.consumer("s.*") as consumer:
            for batch in await pulled(consumer, 3):
                await batch.nack(timedelta(hours=1), error="no")
            assert not len(await consumer.pull(wait=NOT_LONG))
        for server, names in ((first, ["s.1", "s.3"]), (second, ["s.2"])):
            groups = server.life.core._pulls.groups
            assert [name for name in ("s.1", "s.2", "s.3") if (name, GROUP) in groups] == names
            assert all(len(groups[name, GROUP].window.leaving) == 1 for name in names)

    with_servers(scenario, 2)


@pytest.mark.parametrize(
    ("subject", "error"),
    [
        ([], BadArgument),
        ((), BadArgument),
        (["a", "b", "a"], BadArgument),
        (["a", "b.*"], BadArgument),
        (["a", "a b"], BadSubject),
        (["a", 1], BadSubject),
        ([""], BadSubject),
        (b"abc", BadArgument),
        (7, BadArgument),
        ({"a": 1}, BadArgument),
        ("a.>.b", BadSubject),
        ("ord*", BadSubject),
        (["a", "%retry/0/1"], BadSubject),
        ([f"s{number}" for number in range(100_000)], BadArgument),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_can_not_be_consumed_is_refused_before_anything_is_connected(
    subject: Sequence[str], error: type[Exception]
) -> None:
    async def main() -> None:
        with pytest.raises(error):
            AsyncConsumer("127.0.0.1:1", subject, GROUP)

    asyncio.run(main())


def test_the_bound_of_a_list_is_named() -> None:
    async def main() -> None:
        with pytest.raises(BadArgument, match=f"at most {SUBSCRIBED_MAX}"):
            AsyncConsumer("127.0.0.1:1", [f"s{number}" for number in range(SUBSCRIBED_MAX + 1)], GROUP)

    asyncio.run(main())
