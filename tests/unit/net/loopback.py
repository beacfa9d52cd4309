"""A server and its peers on loopback, for the tests of connections."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine

import uvloop

from delayd.address import OPEN, Access, Endpoint
from delayd.errors import DelaydError
from delayd.net.budget import Bounds
from delayd.net.connection import Connection, Handler
from delayd.net.entry import connect
from delayd.net.server import Server
from delayd.wire.frame import Frame
from delayd.wire.requests import RequestLimits
from tests.waiting import DEADLINE_S, LOOK_ON_LOOP_S

HOST = "127.0.0.1"

STEP_S_MAX = 0.008  # More than this between two looks at the time means that the machine stood still.
HOUR_S = 3_600.0

Run = Callable[[Coroutine[object, object, None]], None]


class SteadyLoop(asyncio.SelectorEventLoop):
    """A loop whose time a test moves ahead, and which does not notice when the machine stands still: a time limit is
    over when the test says so, or after so much time in which the loop ran.
    """

    def __init__(self) -> None:
        self._time_s = self._looked_s = time.monotonic()
        super().__init__(_ShortWaits())

    def time(self) -> float:
        now = time.monotonic()
        self._time_s += min(now - self._looked_s, STEP_S_MAX)
        self._looked_s = now
        return self._time_s

    def skip(self, seconds: float) -> None:
        """Move the time ahead."""
        self._time_s += seconds


class StillLoop(SteadyLoop):
    """A loop on which no time passes but what a test lets pass: no time limit ends by itself."""

    def time(self) -> float:
        return self._time_s


class _ShortWaits(selectors.DefaultSelector):
    """Wakes the loop so often that a step of its time is never cut when the machine runs."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(STEP_S_MAX / 2 if timeout is None else min(timeout, STEP_S_MAX / 2))


def run_steady(main: Coroutine[object, object, None]) -> None:
    """Run on a loop whose time a test moves ahead, by `skip`."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        runner.run(main)


async def skip(seconds: float) -> None:
    """Let so much time pass at once on a steady loop, and what became due meanwhile begin."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteadyLoop)
    loop.skip(seconds)
    for _ in range(3):
        await asyncio.sleep(0)


class Echo:
    """Answers each request with its own head and body, except where a test says what to do with it."""

    def __init__(self, on_request: Callable[[Connection, Frame], None] | None = None) -> None:
        self.connections: list[Connection] = []
        self.received_frames: list[Frame] = []
        self.ends: list[DelaydError | None] = []
        self.crashes: list[Exception] = []
        self.on_request = on_request or answer_the_same

    def connected(self, connection: Connection) -> None:
        self.connections.append(connection)

    def received(self, connection: Connection, frame: Frame) -> None:
        self.received_frames.append(frame)
        self.on_request(connection, frame)

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        self.ends.append(error)

    def crashed(self, error: Exception) -> None:
        self.crashes.append(error)


def answer_the_same(connection: Connection, frame: Frame) -> None:
    connection.answer(frame.request_id, frame.head, [frame.body])


def answer_nothing(connection: Connection, frame: Frame) -> None:
    """The request stays unanswered."""


class Loopback:
    """What a scenario runs on: it closes every server and connection that it made, however the scenario ends."""

    def __init__(self) -> None:
        self._servers: list[Server] = []
        self._connections: list[Connection] = []

    async def serve(
        self, handler: Handler, types: RequestLimits | None = None, access: Access = OPEN, **bounds: int
    ) -> tuple[Server, int]:
        """A server on a free port."""
        server = Server(handler, limits=types, bounds=Bounds(**bounds))
        self._servers.append(server)
        return server, (await server.listen(Endpoint(HOST, 0, access))).port

    async def connect(self, port: int, handler: Handler | None = None, access: Access = OPEN) -> Connection:
        """A connection to that port."""
        connection = await connect(Endpoint(HOST, port, access), handler)
        self._connections.append(connection)
        return connection

    async def pair(self, handler: Handler, types: RequestLimits | None = None, **bounds: int) -> Connection:
        """A client of a server of its own."""
        return await self.connect((await self.serve(handler, types, OPEN, **bounds))[1])

    async def close(self) -> None:
        """End all of it."""
        for connection in self._connections:
            connection.abort()
            await connection.closed
        for server in self._servers:
            await server.close()


def on_loop(
    scenario: Callable[[Loopback], Coroutine[object, object, None]],
    run: Run = uvloop.run,
    within_s: float = DEADLINE_S * 2,
) -> None:
    """Run a scenario on a loop of its own, where a bug in any callback fails the test."""

    async def guarded() -> None:
        bugs: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: bugs.append(context))
        loopback = Loopback()
        try:
            async with asyncio.timeout(within_s):
                await scenario(loopback)
        finally:
            await loopback.close()
        assert bugs == []

    run(guarded())


async def settled(value: Callable[[], int], quiet_turns: int = 50) -> int:
    """The value once it has not changed for a while: how far something goes before it is held back."""
    last, turns = value(), 0
    while turns < quiet_turns:
        await asyncio.sleep(LOOK_ON_LOOP_S)
        turns = turns + 1 if value() == last else 0
        last = value()
    return last


async def error_of(answer: Awaitable[object]) -> DelaydError:
    """The error that an awaited answer raises."""
    try:
        await answer
    except DelaydError as error:
        return error
    raise AssertionError("no error was raised")
