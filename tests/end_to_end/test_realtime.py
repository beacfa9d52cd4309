"""The realtime server on real files and sockets, spoken to as a delay server and as a consumer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from delayd.address import Endpoint
from delayd.config import RealtimeConfig
from delayd.errors import ConnectionLost, StaleSession
from delayd.net.connection import connect
from delayd.net.server import run
from delayd.wire.heads import need_rows
from delayd.wire.requests import RequestType
from realtime.server import RealtimeServer
from tests.end_to_end.dialogue import ask, greet, pull_head
from tests.trust import connect_trusted, put_secret
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch

Story = Callable[[str, int], Awaitable[None]]

# Nobody listens there: the server must do without meta.
META_NOWHERE = "127.0.0.1:1"


def tell(tmp_path: Path, story: Story) -> None:
    """Run one life of a server on ``tmp_path`` and a story against it."""

    async def life() -> None:
        failures: list[BaseException] = []
        put_secret(tmp_path)
        server = RealtimeServer(RealtimeConfig(data=str(tmp_path), port=0, meta=META_NOWHERE), failures.append)
        host, port = await server.start()
        try:
            await story(host, port)
        finally:
            await server.stop()
        assert not failures

    run(life)


def test_a_dispatched_message_is_pulled_and_acknowledged_once(tmp_path: Path) -> None:
    async def story(host: str, port: int) -> None:
        delay, consumer = await connect_trusted(host, port), await connect(Endpoint(host, port))
        window = await greet(delay, 1)
        assert window.head["batches"] == []
        waiting = asyncio.ensure_future(ask(consumer, RequestType.PULL, pull_head(wait_ms=10_000)))
        taken = await ask(delay, RequestType.DISPATCH, {"session": 1, "epoch": 1}, dispatch_batch(1, [b"a", b"bcd"]))
        assert [row[0] for row in need_rows(taken.head, "batches", 2)] == [1]
        pulled = await waiting
        assert bodies_of(pulled.body) == [b"a", b"bcd"]
        ((pull_first, consume_first, count, attempt),) = need_rows(pulled.head, "parts", 4)
        assert (consume_first, count, attempt) == (0, 2, 1)
        handle = [pulled.head["incarnation"], pull_first, count]
        names = {"subject": "orders", "group": "billing"}
        acked = await ask(consumer, RequestType.ACK, {**names, "handles": [handle]})
        assert acked.head["stale"] == []
        again = await ask(consumer, RequestType.PULL, pull_head())
        assert again.head["parts"] == []
        delay.close()
        consumer.close()

    tell(tmp_path, story)


def test_a_restart_remembers_what_is_in_doubt_and_what_is_unacknowledged(tmp_path: Path) -> None:
    async def before(host: str, port: int) -> None:
        delay = await connect_trusted(host, port)
        await greet(delay, 1)
        await ask(delay, RequestType.DISPATCH, {"session": 1, "epoch": 1}, dispatch_batch(1, [b"one"]))
        await ask(delay, RequestType.DISPATCH, {"session": 1, "epoch": 1}, dispatch_batch(2, [b"two"], w=(1, 1)))
        pulled = await ask(delay, RequestType.PULL, {**pull_head(), "max_messages": 1})
        assert bodies_of(pulled.body) == [b"one"]
        delay.close()

    async def after(host: str, port: int) -> None:
        delay = await connect_trusted(host, port)
        window = await greet(delay, 2)
        assert [row[:2] for row in need_rows(window.head, "batches", 7)] == [[1, 2]]
        assert len(window.body) == 24
        pulled = await ask(delay, RequestType.PULL, pull_head())
        assert bodies_of(pulled.body) == [b"two"]
        delay.close()

    tell(tmp_path, before)
    tell(tmp_path, after)


def test_rule_H3_a_batch_of_an_older_session_is_refused_and_its_connection_closed(tmp_path: Path) -> None:
    async def story(host: str, port: int) -> None:
        old, new = await connect_trusted(host, port), await connect_trusted(host, port)
        await greet(old, 1)
        await greet(new, 2)
        with pytest.raises(ConnectionLost):
            await ask(old, RequestType.DISPATCH, {"session": 1, "epoch": 1}, dispatch_batch(1, [b"late"]))
        await asyncio.wait_for(old.closed, 10)
        with pytest.raises(StaleSession):
            await ask(new, RequestType.DISPATCH, {"session": 1, "epoch": 1}, dispatch_batch(1, [b"late"]))
        await asyncio.wait_for(new.closed, 10)
        third = await connect_trusted(host, port)
        with pytest.raises(StaleSession):
            await greet(third, 2)
        assert (await greet(third, 3)).head["batches"] == []
        third.close()

    tell(tmp_path, story)


def test_a_lease_that_ends_offers_the_message_again(tmp_path: Path) -> None:
    async def story(host: str, port: int) -> None:
        peer = await connect_trusted(host, port)
        await greet(peer, 1)
        await ask(peer, RequestType.DISPATCH, {"session": 1, "epoch": 1}, dispatch_batch(1, [b"x", b"y"]))
        first = await ask(peer, RequestType.PULL, pull_head(lease_ms=100))
        second = await ask(peer, RequestType.PULL, pull_head(wait_ms=10_000))
        assert bodies_of(second.body) == [b"x", b"y"]
        assert [row[3] for row in need_rows(second.head, "parts", 4)] == [2]
        handle = [first.head["incarnation"], need_rows(first.head, "parts", 4)[0][0], 2]
        late = await ask(peer, RequestType.ACK, {"subject": "orders", "group": "billing", "handles": [handle]})
        assert late.head["stale"] == [handle]
        peer.close()

    tell(tmp_path, story)
