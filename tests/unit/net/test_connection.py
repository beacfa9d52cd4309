"""Requests and answers over real sockets: matched, bounded, and each ended exactly once, whatever the peer does."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from concurrent.futures import Future

import pytest

from delayd.address import Endpoint
from delayd.errors import (
    BadVersion,
    ConnectionLost,
    DelaydError,
    RequestTimedOut,
    Stopping,
)
from delayd.net.connection import DEAD_PEER_MS, PROBE_AFTER_S, PROBE_EVERY_S, Connection
from delayd.net.endpoint import listen
from delayd.wire.frame import ANSWER, ERROR, Frame, Head, encode_frame
from delayd.wire.requests import RequestType
from tests.waiting import DEADLINE_S, until

from .loopback import (
    HOST,
    Echo,
    Loopback,
    answer_nothing,
    answer_the_same,
    error_of,
    on_loop,
    run_steady,
    settled,
    skip,
)


def test_many_requests_at_once_are_each_answered_by_their_own_answer() -> None:
    async def scenario(loopback: Loopback) -> None:
        client = await loopback.pair(Echo())
        answers = [client.request(20, {"n": n}, [b"%8d" % n]) for n in range(3_000)]
        for n, frame in enumerate(await asyncio.gather(*answers)):
            assert (frame.type, frame.head, bytes(frame.body)) == (20, {"n": n}, b"%8d" % n)

    on_loop(scenario)


def test_rule_E1_an_answer_of_several_frames_to_any_other_request_is_one_error() -> None:
    async def scenario(loopback: Loopback) -> None:
        def in_parts(connection: Connection, frame: Frame) -> None:
            for _ in range(3):
                connection.answer(frame.request_id, {}, more=True)
            connection.answer(frame.request_id, {})

        client = await loopback.pair(Echo(in_parts))
        for kind in RequestType:
            if kind.terms.in_frames:
                continue
            heard: list[Frame | DelaydError] = []
            client.call(kind, {}, (), heard.append)
            assert isinstance(await error_of(client.request(kind, {})), ConnectionLost)
            (answer,) = heard
            assert isinstance(answer, ConnectionLost) and answer.sent

    on_loop(scenario)


def test_a_request_that_may_be_answered_again_keeps_no_answer_back() -> None:
    async def scenario(loopback: Loopback) -> None:
        kept_back: list[int] = []

        def serve(connection: Connection, frame: Frame) -> None:
            connection.answer(frame.request_id, {}, more=frame.type == RequestType.PULL)
            kept_back.append(connection.buffered_bytes)

        client = await loopback.pair(Echo(serve))
        heard: list[Frame | DelaydError] = []
        client.call(RequestType.PULL, {}, (), heard.append)
        await until(lambda: bool(heard))
        await client.request(RequestType.PING, {})
        assert kept_back == [0, 0]

    on_loop(scenario)


def test_losing_the_connection_fails_every_request_and_says_whether_it_had_left() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo(answer_nothing)
        client = await loopback.pair(handler)
        left = [client.request(20, {}) for _ in range(5)]
        await until(lambda: len(handler.received_frames) == 5, "the requests")
        never_left = client.request(20, {})
        client.abort()
        after = client.request(20, {})
        for answer in left:
            error = await error_of(answer)
            assert isinstance(error, ConnectionLost)
            assert error.sent
        for answer in (never_left, after):
            error = await error_of(answer)
            assert isinstance(error, ConnectionLost)
            assert not error.sent
        await until(lambda: len(handler.ends) == 1, "the server's side of the end")
        assert len(handler.received_frames) == 5
        assert isinstance(handler.ends[0], ConnectionLost)

    on_loop(scenario)


def test_a_request_that_takes_too_long_fails_alone_and_its_late_answer_is_dropped() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo(answer_nothing)
        client = await loopback.pair(handler)
        asking = client.request(20, {}, timeout_ms=20_000)
        await until(lambda: bool(handler.received_frames))
        await skip(20)
        error = await error_of(asking)
        assert isinstance(error, RequestTimedOut)
        assert error.sent
        (late,) = handler.received_frames
        handler.connections[0].answer(late.request_id, {})
        handler.on_request = answer_the_same
        assert (await client.request(20, {"a": 1})).head == {"a": 1}

    on_loop(scenario, run_steady)


def test_a_peer_that_does_not_read_holds_frames_back_where_a_time_limit_still_reaches_them() -> None:
    async def scenario(loopback: Loopback) -> None:
        with socket.create_server((HOST, 0)) as listener:
            client = await loopback.connect(listener.getsockname()[1])
            peer, _ = listener.accept()
            with peer:
                filling = client.request(20, {}, [bytes(32 << 20)])
                await until(lambda: not client.writable, "a full transport")
                woken: list[bool] = []
                client.on_writable(lambda: woken.append(client.writable))
                late = client.request(20, {}, [bytes(8)], timeout_ms=20)
                error = await error_of(late)
                assert isinstance(error, RequestTimedOut)
                assert not error.sent
                assert client.buffered_bytes > 1 << 20
                assert woken == []
                peer.setblocking(False)
                received = 0
                total = sum(map(len, encode_frame(20, 1, {}, [bytes(32 << 20)])))
                while received < total:
                    received += len(await asyncio.get_running_loop().sock_recv(peer, 1 << 20))
                await until(lambda: woken == [True], "the callback")
                # The request that ran out of time was taken back: nothing follows the first one.
                assert client.buffered_bytes == 0
                client.abort()
                assert isinstance(await error_of(filling), ConnectionLost)

    on_loop(scenario)


def test_a_client_that_outruns_the_server_is_not_read_from_until_answers_leave() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo(answer_nothing)
        client = await loopback.pair(handler, requests_max=16)
        answers = [client.request(20, {"n": n}, [bytes(1024)]) for n in range(5_000)]
        assert await settled(lambda: len(handler.received_frames)) == 16
        connection = handler.connections[0]
        connection.answer(handler.received_frames[0].request_id, {})
        assert await settled(lambda: len(handler.received_frames)) == 17
        handler.on_request = answer_the_same
        for frame in handler.received_frames[1:17]:
            answer_the_same(connection, frame)
        await asyncio.gather(*answers)
        assert [frame.head["n"] for frame in handler.received_frames] == list(range(5_000))

    on_loop(scenario)


def test_a_peer_that_asks_and_never_reads_its_answers_is_served_no_further() -> None:
    async def scenario(loopback: Loopback) -> None:
        def large(connection: Connection, frame: Frame) -> None:
            connection.answer(frame.request_id, {}, [bytes(1 << 20)])

        handler = Echo(large)
        _, port = await loopback.serve(handler)
        with socket.create_connection((HOST, port)) as greedy:
            greedy.setblocking(False)
            for number in range(1, 500):
                greedy.sendall(b"".join(encode_frame(40, number, {})))
            served = await settled(lambda: len(handler.received_frames))
            assert served < 100
            assert handler.connections[0].buffered_bytes < 16 << 20
            greedy.setblocking(True)
            received = 0
            while received < 30 << 20:
                received += len(await asyncio.to_thread(greedy.recv, 1 << 20))
            # It is served again as far as it reads, and no further.
            assert served < await settled(lambda: len(handler.received_frames)) < served + 50
            assert handler.connections[0].buffered_bytes < 16 << 20

    on_loop(scenario)


def test_close_lets_what_was_answered_leave_first() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo()

        def answer_and_close(connection: Connection, frame: Frame) -> None:
            connection.answer(frame.request_id, {}, [bytes(8 << 20)])
            connection.close()

        handler.on_request = answer_and_close
        client = await loopback.pair(handler)
        assert len((await client.request(20, {})).body) == 8 << 20
        await client.closed
        assert handler.ends == [None]

    on_loop(scenario)


def test_close_does_not_wait_for_ever_for_a_peer_that_reads_nothing() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo(lambda connection, frame: connection.answer(frame.request_id, {}, [bytes(32 << 20)]))
        server, port = await loopback.serve(handler)
        with socket.create_connection((HOST, port)) as deaf:
            deaf.sendall(b"".join(encode_frame(20, 1, {})))
            await until(lambda: len(handler.received_frames) == 1, "the request")
            await server.close()
            assert len(handler.ends) == 1

    on_loop(scenario)


def test_both_ends_have_the_kernel_look_for_a_peer_that_is_gone_without_a_word() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo()
        client = await loopback.pair(handler)
        await client.request(1, {})
        for end in (client, handler.connections[0]):
            transport = end._transport
            assert transport is not None
            line = transport.get_extra_info("socket")
            assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == DEAD_PEER_MS
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == PROBE_AFTER_S
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == PROBE_EVERY_S

    on_loop(scenario)


def test_the_last_word_of_a_server_that_stops_reaches_a_client_that_writes_before_it_reads() -> None:
    handler = Echo()
    listening: Future[int] = Future()
    left = threading.Event()
    stop = threading.Event()
    paused = threading.Event()

    async def serve(loopback: Loopback) -> None:
        server, port = await loopback.serve(handler)
        listening.set_result(port)
        await asyncio.get_running_loop().run_in_executor(None, stop.wait)
        ended = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        left.set()
        await ended

    async def ask(loopback: Loopback) -> None:
        client = await loopback.connect(listening.result())
        assert (await client.request(20, {"n": 1})).head == {"n": 1}
        stop.set()
        # This loop stands still while the server ends the connection, and writes more than once before it reads.
        assert left.wait(DEADLINE_S)
        answers: list[Frame | DelaydError] = []
        for _ in range(3):
            client.call(20, {}, (), answers.append, now=True)
            paused.wait(0.05)  # Nobody sets it.
        await client.closed
        assert len(answers) == 3 and all(isinstance(answer, Stopping) for answer in answers)
        # The connection is at its end: what is asked now has not left.
        late = await error_of(client.request(20, {}))
        assert isinstance(late, ConnectionLost) and not late.sent

    server = threading.Thread(target=on_loop, args=(serve,))
    server.start()
    try:
        on_loop(ask, asyncio.run)
    finally:
        stop.set()
        server.join()


def test_a_server_that_stops_says_nothing_of_a_request_that_it_has_begun() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo(answer_nothing)
        server, port = await loopback.serve(handler)
        client = await loopback.connect(port)
        asking = client.request(20, {})
        await until(lambda: bool(handler.received_frames))
        await server.close()
        error = await error_of(asking)
        assert isinstance(error, ConnectionLost) and error.sent

    on_loop(scenario)


def test_what_the_peer_says_of_the_whole_connection_is_raised_to_all_under_way() -> None:
    async def scenario(loopback: Loopback, answered_before: bool) -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            first_id = int.from_bytes((await reader.read(1 << 16))[8:12], "little")
            if answered_before:
                writer.write(b"".join(encode_frame(20, first_id, {}, (), ANSWER)))
            head: Head = {"code": "bad_version", "message": "speak 2", "retry_after_ms": 0, "details": {}}
            writer.write(b"".join(encode_frame(0, 0, head, (), ANSWER | ERROR)))
            writer.close()

        listener = await asyncio.start_server(refuse, HOST, 0)
        client = await loopback.connect(listener.sockets[0].getsockname()[1])
        answers = [client.request(20, {}) for _ in range(3)]
        errors = [await error_of(answer) for answer in answers[1:]]
        if answered_before:
            # Something was served on this connection, so what became of the others is not known.
            assert (await answers[0]).head == {}
            for error in errors:
                assert isinstance(error, ConnectionLost)
                assert error.sent
                assert isinstance(error.__cause__, BadVersion)
        else:
            errors.append(await error_of(answers[0]))
            assert [type(error) for error in errors] == [BadVersion] * 3
        listener.close()

    on_loop(lambda loopback: scenario(loopback, answered_before=False))
    on_loop(lambda loopback: scenario(loopback, answered_before=True))


def test_a_server_that_runs_out_of_descriptors_while_it_begins_to_listen_leaves_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(loopback: Loopback) -> None:
        def has_none(descriptor: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with socket.create_server((HOST, 0)) as free:
            place = Endpoint(HOST, free.getsockname()[1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", has_none)
            with pytest.raises(OSError, match="Too many open files"):
                await listen(place, Connection)
        (await listen(place, Connection)).close()

    # A uvloop that still listens does not end.
    on_loop(scenario, asyncio.run)
