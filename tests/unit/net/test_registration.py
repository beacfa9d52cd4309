"""A server's line to meta, against a meta that behaves as the test says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

import pytest

from delayd.address import Endpoint
from delayd.errors import BadSubject, DelaydError, StaleEpoch
from delayd.net.connection import Connection
from delayd.net.registration import Registration, RegistrationState
from delayd.net.server import Server
from delayd.net.trust import Guard
from delayd.wire.frame import Frame
from delayd.wire.heads import need_strs
from delayd.wire.meta import Registered, Routes, read_registered
from delayd.wire.requests import RequestType
from tests.trust import SECRET, membership
from tests.waiting import until

from .loopback import HOST, Loopback, on_loop

DELAY = Registered("delay", (1 << 64) - 1, Endpoint(HOST, 7401), 3, 42)
REALTIME = Registered("realtime", 9, Endpoint(HOST, 7402), 1, 43)
CLUSTER = 0xC1
META_NOW_MS = 1_800_000_000_000


class ScriptedMeta:
    """Takes every registration and routes every subject to one server, unless the test changes that."""

    def __init__(self) -> None:
        self.heard: list[Registered] = []
        self.asked: list[list[str]] = []
        self.connections: list[Connection] = []
        self.refuse: DelaydError | None = None
        self.silent = False
        self._server = Server(self)
        self._port = 0
        self._guard = Guard(SECRET, "meta", 1, lambda: CLUSTER)

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    async def start(self) -> None:
        """Listen; again at the same address after a stop."""
        self._port = (await self._server.listen(Endpoint(HOST, self._port))).port

    async def stop(self) -> None:
        await self._server.close()
        self._server = Server(self)

    def connected(self, connection: Connection) -> None:
        self.connections.append(connection)

    def received(self, connection: Connection, frame: Frame) -> None:
        if not self.silent and self._guard.serves(connection, frame):
            return
        if frame.type == RequestType.REGISTER:
            self.heard.append(read_registered(frame.head))
        if self.silent:
            return
        if self.refuse is not None:
            raise self.refuse
        if frame.type == RequestType.REGISTER:
            head = {"lease_ms": 100, "heartbeat_ms": 20, "now_ms": META_NOW_MS, "cluster_id": CLUSTER}
            connection.answer(frame.request_id, head)
        else:
            self.asked.append(need_strs(frame.head, "subjects"))
            self._route(connection, frame, self.asked[-1])

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        pass

    def crashed(self, error: Exception) -> None:
        raise error

    def _route(self, connection: Connection, frame: Frame, subjects: list[str]) -> None:
        routed = {name: REALTIME.log_id for name in subjects if not name.startswith("nobody.")}
        server = {**REALTIME.to_head(), "alive": True, "seen_ms_ago": 5, "heard": True}
        unrouted = [name for name in subjects if name not in routed]
        connection.answer(frame.request_id, {"routes": routed, "servers": [server], "unrouted": unrouted})


class Stage:
    """A meta and the lines to it, all closed however a scenario ends: uvloop can't close a loop that still serves."""

    def __init__(self) -> None:
        self.meta = ScriptedMeta()
        self._lines: list[Registration] = []

    def line(
        self,
        describe: Callable[[], Registered] = lambda: DELAY,
        on_now_ms: Callable[[int, str], None] | None = None,
        on_refused: Callable[[DelaydError], None] | None = None,
    ) -> Registration:
        """A server that has begun to look for meta."""
        registration = Registration(
            self.meta.address, describe, membership(), on_now_ms=on_now_ms, on_refused=on_refused
        )
        self._lines.append(registration)
        registration.start()
        return registration

    async def close(self) -> None:
        for registration in self._lines:
            await registration.close()
        await self.meta.stop()


def play(scenario: Callable[[Stage], Coroutine[object, object, None]]) -> None:
    """Run a scenario on a loop, with meta serving."""

    async def play_and_close(loopback: Loopback) -> None:
        stage = Stage()
        try:
            await stage.meta.start()
            await scenario(stage)
        finally:
            await stage.close()

    on_loop(play_and_close)


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The first word of each line that was logged."""
    return [record.getMessage().split(" ")[0] for record in caplog.records if "registration" in record.name]


def test_a_refusal_is_told_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refusals: list[DelaydError] = []

    async def scenario(stage: Stage) -> None:
        meta = stage.meta
        meta.refuse = StaleEpoch("epoch 3 is over")
        registration = stage.line(on_refused=refusals.append)
        await until(lambda: len(meta.heard) >= 3, "three tries")
        assert registration.state is RegistrationState.REFUSED
        # The connection is good, so questions are answered all the same.
        assert len(meta.connections) == 1
        meta.refuse = None
        await registration.registered()

    play(scenario)
    assert [type(error) for error in refusals] == [StaleEpoch]
    assert changes(caplog) == ["refused", "registered"]


def test_routes_are_asked_in_parts_and_put_together() -> None:
    async def scenario(stage: Stage) -> None:
        meta = stage.meta
        registration = stage.line()
        await registration.registered()
        subjects = [f"s.{number}" for number in range(4_500)] + ["nobody.knows"]
        answer = await registration.routes(subjects)
        assert answer.routes == dict.fromkeys(subjects[:-1], REALTIME.log_id)
        assert answer.unrouted == ["nobody.knows"]
        assert [info.server for info in answer.servers] == [REALTIME]
        assert [len(part) for part in meta.asked] == [2_000, 2_000, 501]

    play(scenario)


def test_a_core_without_coroutines_hears_the_answer_or_the_error() -> None:
    async def scenario(stage: Stage) -> None:
        meta = stage.meta
        registration = stage.line()
        await registration.registered()
        answers: list[Routes | DelaydError] = []
        registration.ask_routes(["a"], answers.append)
        await until(lambda: len(answers) == 1, "an answer")
        meta.refuse = BadSubject("no")
        registration.ask_routes([""], answers.append)
        await until(lambda: len(answers) == 2, "an error")
        first, second = answers
        assert isinstance(first, Routes)
        assert first.routes == {"a": 9}
        assert isinstance(second, BadSubject)
        meta.silent = True
        registration.ask_routes(["b"], answers.append)
        await asyncio.sleep(0)
        await registration.close()
        assert len(answers) == 2

    play(scenario)
