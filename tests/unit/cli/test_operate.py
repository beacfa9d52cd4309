"""What operators' commands share: who could not be asked is named, busy servers are asked again, all pages are read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from cli import servers
from cli.operate import all_pages, of_each
from delayd.address import Endpoint
from delayd.client.asking import ask
from delayd.errors import SlowDown
from delayd.net.connection import Connection
from delayd.net.server import Server
from delayd.wire.asked import DrainProgress, Place
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_bool, need_int, need_ints
from delayd.wire.meta import SLOTS
from delayd.wire.requests import RequestType
from tests.unit.net.loopback import HOST, Echo

LOG_ID = 7
NAMES = list(range(1, 8))

T = TypeVar("T")


def asked(
    serve: Callable[[Connection, Frame], None], scenario: Callable[[ask.Known], Awaitable[T]], alive: bool = True
) -> T:
    """What a scenario finds with a delay server that serves so; it answers STATUS by itself."""

    def served(connection: Connection, frame: Frame) -> None:
        if frame.type == RequestType.STATUS:
            connection.answer(frame.request_id, {"log_id": LOG_ID})
        else:
            serve(connection, frame)

    async def within() -> T:
        server = Server(Echo(served))
        port = (await server.listen(Endpoint(HOST, 0))).port
        try:
            return await scenario(ask.Known("delay", LOG_ID, Endpoint(HOST, port), 1, 1, alive, 61_000))
        finally:
            await server.close()

    return asyncio.run(within())


def paged(connection: Connection, frame: Frame) -> None:
    """Three names a page, behind the one that was asked for."""
    behind = [name for name in NAMES if name > need_int(frame.head, "after")]
    connection.answer(frame.request_id, {"names": [*behind[:3]], "more": len(behind) > 3})


def read(head: Head) -> tuple[list[int], bool]:
    return need_ints(head, "names"), need_bool(head, "more")


async def names_of(connection: Connection) -> list[int]:
    pages = all_pages(connection, RequestType.TARGETS, read, lambda name: name, {"after": 0})
    return [name async for page in pages for name in page]


@pytest.mark.parametrize("alive", [True, False])
def test_a_server_that_cant_be_asked_is_named_and_the_others_are_told(
    alive: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(known: ask.Known) -> list[tuple[ask.Known, list[int]]]:
        # Another server has its address now.
        other = known._replace(log_id=8)
        return await of_each([other, known], "names", names_of)

    ((server, names),) = asked(paged, scenario, alive)
    assert server.log_id == LOG_ID and names == NAMES
    told = capsys.readouterr().err
    assert told.startswith(f"delayd: names of the delay server at {server.address} are missing: ")
    assert ("is another server now" if alive else "meta has not heard of it for 1 min 01 s") in told


def test_a_request_that_a_server_is_too_busy_for_is_repeated() -> None:
    heard = 0

    def serve(connection: Connection, frame: Frame) -> None:
        nonlocal heard
        heard += 1
        if heard < 3:
            raise SlowDown("one word at a time", retry_after_ms=1)
        connection.answer(frame.request_id, {"message": "done"})

    async def scenario(known: ask.Known) -> Head:
        async with ask.reached(known) as connection:
            return await ask.patiently(connection, RequestType.SETTLE_SLOTS, {})

    assert asked(serve, scenario)["message"] == "done" and heard == 3


def test_a_drain_tells_from_its_first_piece_on_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # 100 messages are pending in two pieces, of which two are due at once and delivered; then nothing is left.
    pieces = [(60, Place(9, 60)), (38, None), (0, None)]

    class NoSlots:
        def of(self, log_id: int) -> NDArray[np.bool_]:
            return np.zeros(SLOTS, np.bool_)

    async def answer(server: str, kind: RequestType, head: Head) -> Head:
        drained, place = pieces.pop(0)
        return DrainProgress(0, drained, 0, 0, 0, 0, 0, place).to_head()

    async def owners(meta: str) -> NoSlots:
        return NoSlots()

    monkeypatch.setattr(ask, "patiently", answer)
    monkeypatch.setattr(servers, "slot_owners", owners)
    told: list[tuple[int, int]] = []
    # The other parts of a command are not asked for anything here.
    drain = servers._Drain("meta", "server", LOG_ID, [LOG_ID + 1], told.append, 100)  # type: ignore[arg-type]
    assert asyncio.run(drain.run()) == 98
    assert told == [(60, 40), (98, 2), (98, 0)]
