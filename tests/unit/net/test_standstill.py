"""Nobody's silence counts while the loop of a server stands still (rule T5)."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

import delayd.net.connection as connection_module
from delayd.address import Endpoint
from delayd.net.connection import Connection
from delayd.net.server import Server
from delayd.wire.frame import Frame, encode_frame
from delayd.wire.requests import RequestType
from tests.unit.net.loopback import HOST, Echo, Loopback, answer_the_same, on_loop
from tests.waiting import holds_once, until

PING = b"".join(map(bytes, encode_frame(RequestType.PING, 1, {}, ())))


def test_rule_T5_who_judges_by_silence_hears_of_a_stall_before_what_came_meanwhile() -> None:
    async def scenario(loopback: Loopback) -> None:
        unheard: list[int] = []
        when_asked: list[int] = []

        def asked(connection: Connection, frame: Frame) -> None:
            server.look()
            when_asked.append(sum(unheard))
            answer_the_same(connection, frame)

        handler = Echo(asked)
        server = Server(handler, unheard=unheard.append)
        port = (await server.listen(Endpoint(HOST, 0))).port
        try:
            with socket.create_connection((HOST, port)) as peer:
                await until(lambda: len(handler.connections) == 1, "the connection")
                peer.sendall(PING)
                time.sleep(0.5)  # noqa: ASYNC251 (the loop is to stand still)
                await until(lambda: len(when_asked) == 1, "the request")
            assert 350 <= when_asked[0] <= sum(unheard) <= 1_500
        finally:
            await server.close()

    holds_once(lambda: on_loop(scenario))


def test_rule_T5_a_frame_that_is_not_read_meanwhile_is_not_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FRAME_S", 0.3)

    async def scenario(loopback: Loopback) -> None:
        handler = Echo()
        server, port = await loopback.serve(handler)
        whole = b"".join(map(bytes, encode_frame(RequestType.SEND, 2, {}, [bytes(1 << 20)])))
        with socket.create_connection((HOST, port)) as peer:
            peer.sendall(PING + whole[:4_000])
            await until(lambda: len(handler.received_frames) == 1, "the first request")
            time.sleep(0.6)  # noqa: ASYNC251 (the loop is to stand still)
            server._look()
            peer.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(peer, whole[4_000:])
            await until(lambda: bool(handler.ends) or len(handler.received_frames) == 2, "the rest, or an end")
            assert not handler.ends

    holds_once(lambda: on_loop(scenario))
