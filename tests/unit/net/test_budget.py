"""Budgets of connections (rules B1, B2): what all of them hold together is bounded, and so is a share of a turn."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Mapping

import pytest

from delayd.errors import FrameOverdue, FrameTooLarge, SlowDown, TooManyConnections
from delayd.net import connection as connection_module
from delayd.net.budget import (
    FRESH_UNITS,
    QUEUED_UNITS,
    SHARE_UNITS,
)
from delayd.net.connection import Connection
from delayd.wire.frame import CHUNK_BYTES, Frame, FrameReader, HeadValue, encode_frame
from delayd.wire.requests import (
    DELAY_LIMITS,
    META_LIMITS,
    REALTIME_LIMITS,
    STRAY_BODY_BYTES_MAX,
    RequestLimits,
    RequestType,
)
from tests.waiting import holds_once, until

from .loopback import HOST, Echo, Loopback, answer_nothing, error_of, on_loop

PING, STATUS, SEND, SEND_AGAIN, SEND_DRAINED, DISPATCH, PULL = 1, 2, 20, 37, 63, 31, 40
WITH_ROWS = (RequestType.CANCEL, RequestType.GET, RequestType.RESCHEDULE, RequestType.PLACES, RequestType.RECUR)


def frames(kind: int, count: int, head: Mapping[str, HeadValue] | None = None, body: bytes = b"") -> bytes:
    return b"".join(b"".join(map(bytes, encode_frame(kind, n, head or {}, [body]))) for n in range(1, count + 1))


def begun(body_bytes: int, kind: int = SEND, sent: int | None = None) -> bytes:
    """A frame without its last byte, or without all but the first `sent`."""
    whole = frames(kind, 1, {}, bytes(body_bytes))
    return whole[:-1] if sent is None else whole[:sent]


class Counting(Echo):
    """Counts what is begun in each turn of the loop, of each connection."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[dict[Connection, int]] = []
        self._open = False

    def received(self, connection: Connection, frame: Frame) -> None:
        if not self._open:
            self._open = True
            self.turns.append({})
            asyncio.get_running_loop().call_soon(self._close)
        self.turns[-1][connection] = self.turns[-1].get(connection, 0) + 1
        connection.answer(frame.request_id, {})

    def _close(self) -> None:
        self._open = False


def test_rule_B2_one_connection_gets_its_share_of_a_turn_and_all_together_get_no_more_than_a_turn() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Counting()
        _, port = await loopback.serve(handler)
        greedy = [await asyncio.open_connection(HOST, port) for _ in range(40)]
        for _, writer in greedy:
            writer.write(frames(PING, 2_000))
        polite = await loopback.connect(port)
        for _ in range(20):
            await polite.request(PING, {})
        await until(lambda: sum(sum(turn.values()) for turn in handler.turns) == 80_020, "all requests")
        # The last few connections that still ask share what is left of a turn, so they may get more.
        served: Counter[Connection] = Counter()
        crowded = []
        for turn in handler.turns:
            served.update(turn)
            if sum(count >= 2_000 for count in served.values()) > 40 - QUEUED_UNITS // SHARE_UNITS:
                break
            crowded.append(turn)
        assert len(crowded) > 500
        # Two turns of the loop may fall together between the callbacks that count.
        assert max(max(turn.values()) for turn in crowded) <= 2 * SHARE_UNITS
        assert max(sum(turn.values()) for turn in handler.turns) <= 2 * (QUEUED_UNITS + FRESH_UNITS)
        for _, writer in greedy:
            writer.close()

    on_loop(scenario)


def test_rule_B2_who_may_cost_much_or_has_cost_much_waits_behind_who_asks_little() -> None:
    order: list[tuple[int, Connection]] = []

    def slowly(connection: Connection, frame: Frame) -> None:
        order.append((frame.type, connection))
        if frame.type == PULL:
            ends = time.perf_counter() + 0.004
            while time.perf_counter() < ends:
                pass
        connection.answer(frame.request_id, {})

    async def scenario(loopback: Loopback) -> None:
        _, port = await loopback.serve(Echo(slowly))
        many = [await asyncio.open_connection(HOST, port) for _ in range(50)]
        one = await loopback.connect(port)
        await one.request(PING, {})
        for _, writer in many:
            writer.write(frames(PULL, 5))
        await until(lambda: len(order) > 60, "a part of the flood")
        before = len(order)
        await one.request(PING, {})
        # Of the 190 requests before the PING, the server may begin those of that turn and the next one.
        assert len(order) - before <= 12
        await until(lambda: len(order) == 252, "all of them, for those that wait behind get their turns as well")
        for _, writer in many:
            writer.close()

    on_loop(scenario)


def test_rule_B1_unfinished_frames_are_bounded_over_all_connections_and_honest_ones_go_on() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo()
        server, port = await loopback.serve(handler, unfinished_bytes_max=8 << 20)
        honest = await loopback.connect(port)
        part = begun(2 << 20)
        hostile = [await asyncio.open_connection(HOST, port) for _ in range(12)]
        highest = 0
        for _, writer in hostile:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
            highest = max(highest, server.budget.unfinished_bytes)
            assert len((await honest.request(SEND, {}, [bytes(1 << 20)])).body) == 1 << 20
        assert (8 << 20) - len(part) < highest <= (8 << 20) + CHUNK_BYTES
        await until(lambda: len(handler.ends) >= 8, "those that hold the room")
        assert {type(end) for end in handler.ends} == {SlowDown}
        for _, writer in hostile:
            writer.close()
        await until(lambda: server.budget.unfinished_bytes == 0, "all room given back")

    on_loop(scenario)


def test_rule_B1_trusted_peers_are_not_ended_for_the_room_that_strangers_take() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo()
        _, port = await loopback.serve(handler, unfinished_bytes_max=4 << 20)
        part = begun(3 << 20)
        _, friend = await asyncio.open_connection(HOST, port)
        await until(lambda: len(handler.connections) == 1, "the first")
        handler.connections[0].trusted = True
        friend.write(part)
        await until(lambda: handler.connections[0].unfinished_since()[0] > 2 << 20, "its part")
        _, stranger = await asyncio.open_connection(HOST, port)
        stranger.write(part)
        await until(lambda: len(handler.ends) == 1, "the end of one")
        assert handler.connections[0].is_open and not handler.connections[1].is_open
        for writer in (friend, stranger):
            writer.close()

    on_loop(scenario)


def test_rule_B1_answers_that_are_not_taken_are_bounded_over_all_connections() -> None:
    async def scenario(loopback: Loopback) -> None:
        def large(connection: Connection, frame: Frame) -> None:
            waiting.append((connection, frame.request_id))

        waiting: list[tuple[Connection, int]] = []
        handler = Echo(large)
        server, port = await loopback.serve(handler, untaken_bytes_max=40 << 20)
        with socket.create_connection((HOST, port)) as deaf, socket.create_connection((HOST, port)) as deafer:
            deaf.sendall(frames(PULL, 3))
            deafer.sendall(frames(PULL, 9))
            await until(lambda: len(waiting) == 12, "the requests")
            # All were begun before the first answer, so only the bound over all of them is left.
            for connection, request_id in waiting:
                connection.answer(request_id, {}, [bytes(8 << 20)])
                await asyncio.sleep(0.005)
                assert server.budget.untaken_bytes <= 48 << 20
            await until(lambda: bool(handler.ends), "the end of one that takes nothing")
            assert isinstance(handler.ends[0], SlowDown)
            neighbour = await loopback.connect(port)
            handler.on_request = lambda connection, frame: connection.answer(frame.request_id, {})
            await neighbour.request(PING, {})
        await until(lambda: server.budget.untaken_bytes == 0, "all given back")

    on_loop(scenario)


def test_rule_B1_an_unfinished_frame_and_a_silent_connection_have_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FRAME_S", 0.3)
    monkeypatch.setattr(connection_module, "FIRST_FRAME_S", 0.3)

    async def scenario(loopback: Loopback) -> None:
        handler = Echo()
        server, port = await loopback.serve(handler)
        honest = await loopback.connect(port)
        await honest.request(PING, {})
        silent = await asyncio.open_connection(HOST, port)
        stuck = await asyncio.open_connection(HOST, port)
        stuck[1].write(frames(PING, 1) + begun(1 << 20, sent=4_000))
        steady = await asyncio.open_connection(HOST, port)
        whole = frames(SEND, 1, {}, bytes(600 << 10))
        steady[1].write(frames(PING, 1))
        for position in range(0, len(whole), 40 << 10):
            steady[1].write(whole[position : position + (40 << 10)])
            await asyncio.sleep(0.05)
            server._look()
        await until(lambda: len(handler.ends) >= 2, "the two that kept this server waiting")
        assert [type(end) for end in handler.ends] == [FrameOverdue, FrameOverdue]
        assert (SEND, 600 << 10) in [(frame.type, len(frame.body)) for frame in handler.received_frames]
        assert honest.is_open
        for _, writer in (silent, stuck, steady):
            writer.close()

    # The steady one is late, too, when the machine stands still between two pieces.
    holds_once(lambda: on_loop(scenario))


@pytest.mark.parametrize("limits", [META_LIMITS, DELAY_LIMITS, REALTIME_LIMITS])
@pytest.mark.parametrize("kind", [*RequestType, 99])
def test_rule_B1_a_type_without_a_body_is_refused_at_its_header(kind: int, limits: RequestLimits) -> None:
    for trusted in (False, True):
        reader = FrameReader(room=limits.plain)
        reader.room_by_type = limits.by_type_trusted if trusted else limits.by_type
        header = frames(kind, 1, {}, bytes(STRAY_BODY_BYTES_MAX + 8))[:24]
        reader.get_buffer()[:24] = header
        reader.received(24)
        of_delay = kind in (SEND, *WITH_ROWS) and limits is DELAY_LIMITS
        to_delay, to_realtime = (SEND_AGAIN, SEND_DRAINED), (DISPATCH,)
        of_servers = kind in to_delay and limits is DELAY_LIMITS
        of_servers |= kind in to_realtime and limits is REALTIME_LIMITS
        takes = of_delay or (of_servers and trusted)
        assert (reader.fault is None) == takes
        assert takes or isinstance(reader.fault, FrameTooLarge)


def test_rule_B1_places_are_kept_for_peers_that_prove_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "PROOF_S", 0.2)

    async def scenario(loopback: Loopback) -> None:
        def serve(connection: Connection, frame: Frame) -> None:
            connection.trusted = connection.trusted or frame.type == RequestType.PROVE
            connection.answer(frame.request_id, {})

        server, port = await loopback.serve(Echo(serve), connections_max=8)
        strangers = [await loopback.connect(port) for _ in range(6)]
        await asyncio.gather(*(stranger.request(PING, {}) for stranger in strangers))
        late = await loopback.connect(port)
        assert isinstance(await error_of(late.request(PING, {})), TooManyConnections)
        waits = await loopback.connect(port)
        await until(lambda: not waits.is_open, "the end of one that proves nothing")
        friends = [await loopback.connect(port) for _ in range(2)]
        for friend in friends:
            await friend.request(RequestType.PROVE, {})
            await friend.request(PING, {})
        above = await loopback.connect(port)
        error = await error_of(above.request(PING, {}))
        assert isinstance(error if isinstance(error, TooManyConnections) else error.__cause__, TooManyConnections)
        assert all(each.is_open for each in (*strangers, *friends))
        assert server.status()["connections_max"] == 8

    on_loop(scenario)


def test_a_request_that_waits_for_its_turn_is_dropped_with_its_connection() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo(answer_nothing)
        server, port = await loopback.serve(handler)
        with socket.create_connection((HOST, port)) as leaving:
            leaving.sendall(frames(PING, 1_000))
            await until(lambda: len(handler.received_frames) > 0, "the first ones")
        await until(lambda: len(handler.ends) == 1, "the end")
        assert server.budget.unfinished_bytes == 0

    on_loop(scenario)
