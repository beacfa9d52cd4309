"""Listening: ports that can't be had are a setting's fault, and the loop is set up once for every server."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from delayd.errors import BadSetting, DelaydError, ServerUnavailable
from delayd.net.connection import Connection, connect
from delayd.net.server import Server, run

from .loopback import HOST, Echo, Loopback, error_of, on_loop


def test_a_port_that_is_taken_is_named() -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo())
        error = await error_of(Server(Echo()).listen(HOST, port))
        assert isinstance(error, BadSetting)
        assert f"{HOST}:{port}" in error.message

    on_loop(scenario)


def test_a_server_that_is_not_there_is_named_and_nothing_was_sent() -> None:
    async def scenario(loopback: Loopback) -> None:
        server, port = await loopback.serve(Echo())
        await server.close()
        error = await error_of(connect(HOST, port))
        assert isinstance(error, ServerUnavailable)
        assert f"{HOST}:{port}" in error.message

    on_loop(scenario)


def test_accepting_stops_while_connections_go_on() -> None:
    async def scenario(loopback: Loopback) -> None:
        server, port = await loopback.serve(Echo())
        client = await loopback.connect(port)
        await client.request(1, {})
        server.stop_accepting()
        assert isinstance(await error_of(connect(HOST, port, timeout_ms=1_000)), ServerUnavailable)
        assert (await client.request(1, {"a": 1})).head == {"a": 1}

    on_loop(scenario)


def test_a_handler_may_refuse_a_connection_when_it_comes() -> None:
    class Closed(Echo):
        def connected(self, connection: Connection) -> None:
            connection.refuse(BadSetting("not today"))

    async def scenario(loopback: Loopback) -> None:
        handler = Closed()
        client = await loopback.pair(handler)
        await client.closed
        assert [type(end) for end in handler.ends] == [BadSetting]
        with pytest.raises(DelaydError, match="not today"):
            await client.request(1, {})

    on_loop(scenario)


def test_a_server_runs_on_uvloop_with_short_turns_for_other_threads() -> None:
    before = sys.getswitchinterval()

    async def main() -> tuple[bool, float]:
        return isinstance(asyncio.get_running_loop(), uvloop.Loop), sys.getswitchinterval()

    try:
        assert run(main) == (True, 0.0005)
    finally:
        sys.setswitchinterval(before)
