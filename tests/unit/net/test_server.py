"""Listening: ports that can't be had are a setting's fault, and the loop is set up once for every server."""

from __future__ import annotations

import pytest

from delayd.address import Endpoint
from delayd.errors import BadSetting, DelaydError, ServerUnavailable
from delayd.net.connection import Connection, connect

from .loopback import HOST, Echo, Loopback, error_of, on_loop


def test_accepting_stops_while_connections_go_on() -> None:
    async def scenario(loopback: Loopback) -> None:
        server, port = await loopback.serve(Echo())
        client = await loopback.connect(port)
        await client.request(1, {})
        server.stop_accepting()
        assert isinstance(await error_of(connect(Endpoint(HOST, port), timeout_ms=1_000)), ServerUnavailable)
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
