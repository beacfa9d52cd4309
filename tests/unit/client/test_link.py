"""A client's way to one server that hangs: the connection stands, and nothing is answered."""

from __future__ import annotations

import pytest

from delayd.client import routing
from delayd.client.routing import ServerLink
from delayd.errors import ConnectionLost, ServerUnavailable
from delayd.net.connection import Connection
from delayd.wire.frame import Frame
from delayd.wire.requests import RequestType
from tests.unit.net.loopback import HOST, Echo, Loopback, answer_nothing, error_of, on_loop
from tests.waiting import until


def answer_status(connection: Connection, frame: Frame) -> None:
    if frame.type == RequestType.STATUS:
        connection.answer(frame.request_id, {"log_id": 1, "now_ms": 1})


def test_a_server_that_takes_connections_and_answers_nothing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "GREETING_MS_MAX", 100.0)

    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo(answer_nothing))
        link = ServerLink(HOST, port, 1)
        error = await error_of(link.connection())
        assert isinstance(error, ServerUnavailable)
        assert error.message == f"{HOST}:{port} takes connections and answers nothing: it hangs"
        await link.close()

    on_loop(scenario)


def test_requests_end_when_a_server_answers_nothing_any_more_and_the_next_use_connects_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "ALIVE_EVERY_MS", 20.0)
    monkeypatch.setattr(routing, "ALIVE_MS_MAX", 200.0)

    async def scenario(loopback: Loopback) -> None:
        handler = Echo(answer_status)
        _, port = await loopback.serve(handler)
        link = ServerLink(HOST, port, 1)
        connection = await link.connection()
        error = await error_of(connection.request(RequestType.SEND, {}))
        # The request has no time limit here, so the silence ended it; nobody knows whether the server did it.
        assert isinstance(error, ConnectionLost) and error.sent
        assert await link.connection() is not connection
        await until(lambda: len(handler.connections) == 2, "a second connection")
        await link.close()

    on_loop(scenario)
