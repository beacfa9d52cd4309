"""Operators' questions: only the server that is meant is asked, and nobody is taken for one who has said yes."""

from __future__ import annotations

import asyncio

import pytest

from delayd.address import Endpoint
from delayd.client.asking import ask
from delayd.errors import ServerUnavailable
from delayd.net.connection import Connection
from delayd.net.server import Server
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from tests.unit.net.loopback import HOST, Echo


def answered_by(status: Head, meant: int) -> str:
    """The role that STATUS names, asked of the server with the log_id that is meant."""

    def serve(connection: Connection, frame: Frame) -> None:
        connection.answer(frame.request_id, {"role": "realtime", **status})

    async def scenario() -> str:
        server = Server(Echo(serve))
        port = (await server.listen(Endpoint(HOST, 0))).port
        try:
            async with ask.reached(ask.Known("realtime", meant, Endpoint(HOST, port), 1, 1, True, 0)) as connection:
                return str((await ask.ask(connection, RequestType.STATUS, {}))["role"])
        finally:
            await server.close()

    return asyncio.run(scenario())


def test_a_server_that_has_the_address_of_another_one_is_not_asked_for_it() -> None:
    assert answered_by({"log_id": 7}, 7) == "realtime"
    with pytest.raises(ServerUnavailable, match="another server now: its log is 0000000000000008"):
        answered_by({"log_id": 8}, 7)
    with pytest.raises(ServerUnavailable):
        answered_by({"log_id": 8, "held": True}, 7)
