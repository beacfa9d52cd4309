"""Connections within one process: between loops of several threads, with the same promises as on a socket."""

import asyncio
import itertools
from collections.abc import Coroutine

import pytest

from delayd.address import PORT_MAX, Endpoint
from delayd.client.engine import LoopThread
from delayd.errors import ConnectionLost, DelaydError, ServerUnavailable, Stopping
from delayd.net import inside
from delayd.net.connection import Connection
from delayd.net.entry import connect
from delayd.net.server import Server
from delayd.wire.frame import Frame
from tests.waiting import DEADLINE_S

REPLY_BYTES = 3 << 20


class _Echo:
    """Answers with what came, or with many bytes."""

    def __init__(self) -> None:
        self.ended: list[DelaydError | None] = []

    def connected(self, connection: Connection) -> None:
        """Nothing to do."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Send the body back, or as many bytes as the head says."""
        more = frame.head.get("bytes")
        body = bytes(more) if isinstance(more, int) else bytes(frame.body)
        connection.answer(frame.request_id, {}, [body])

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Note why."""
        self.ended.append(error)

    def crashed(self, error: Exception) -> None:
        """Fail the test."""
        raise error


class _Aside:
    """A server on a thread of its own."""

    def __init__(self) -> None:
        self.handler = _Echo()
        self.host = inside.new_host()
        self._thread = LoopThread("echo")
        self.server, self.port = self._thread.call(self._begin())

    async def _begin(self) -> tuple[Server, int]:
        server = Server(self.handler)
        return server, (await server.listen(Endpoint(self.host, 0))).port

    def fail(self) -> None:
        self._thread.run(lambda: inside.abort(self.host))

    def close(self) -> None:
        self._thread.call(self.server.close())
        self._thread.close()


def _run(main: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await main

    asyncio.run(bounded())


def test_a_peer_that_takes_nothing_holds_up_its_own_answers_only() -> None:
    aside = _Aside()

    async def main() -> None:
        slow, quick = await connect(Endpoint(aside.host, aside.port)), await connect(Endpoint(aside.host, aside.port))
        slow._stop_reading()
        waiting = [slow.request(20, {"bytes": REPLY_BYTES}) for _ in range(40)]
        for _ in range(20):
            assert (await quick.request(20, {}, [b"x" * 8])).body == b"x" * 8
        (standing,) = [each for each in aside.server.connections if not each.writable]
        # The server stopped to answer: what waits is far less than what was asked for.
        assert standing.buffered_bytes <= 3 * REPLY_BYTES
        slow._start_reading()
        assert [len((await each).body) for each in waiting] == [REPLY_BYTES] * 40
        for connection in (slow, quick):
            connection.close()
            await connection.closed

    _run(main())
    aside.close()


def test_the_host_of_another_process_is_refused_by_name() -> None:
    async def main() -> None:
        with pytest.raises(ServerUnavailable, match="in this process"):
            await connect(Endpoint("p1-1.inside.invalid", 1))

    _run(main())


def test_a_server_has_a_port_that_an_address_can_name_however_many_connections_its_process_has_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inside, "_numbers", itertools.count(PORT_MAX + 1))

    async def main() -> None:
        host = inside.new_host()
        one, other = Server(_Echo()), Server(_Echo())
        places = [await server.listen(Endpoint(host, 0)) for server in (one, other)]
        assert places == [Endpoint(host, 1), Endpoint(host, 2)]
        await one.close()
        # Its next life is found where it was.
        again = Server(_Echo())
        assert await again.listen(places[0]) == places[0]
        connection = await connect(places[0])
        assert (await connection.request(20, {}, [b"x" * 8])).body == b"x" * 8
        for server in (again, other):
            await server.close()

    _run(main())


def test_the_last_word_of_a_server_that_stops_reaches_a_client_that_writes_before_it_reads() -> None:
    async def main() -> None:
        server = Server(_Echo())
        client = await connect(await server.listen(Endpoint(inside.new_host(), 0)))
        await client.request(20, {})
        closing = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        answers: list[Frame | DelaydError] = []
        for _ in range(2):
            client.call(20, {}, [], answers.append, now=True)
        await client.closed
        await closing
        assert len(answers) == 2 and all(isinstance(answer, Stopping) for answer in answers), answers

    _run(main())


def test_an_end_that_does_not_read_hears_from_its_next_write_that_the_other_one_is_gone() -> None:
    aside = _Aside()

    async def main() -> None:
        client = await connect(Endpoint(aside.host, aside.port))
        client._stop_reading()
        aside.close()
        answer = client.request(20, {})
        with pytest.raises(ConnectionLost):
            await answer
        await client.closed

    _run(main())
