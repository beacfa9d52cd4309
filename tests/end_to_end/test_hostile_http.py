"""Whoever sends a gateway what is no request, or slowly, or too much, gets an answer and costs nobody else anything."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.processes import ServerProcess
from tests.waiting import DEADLINE_S, wait_until

PLACES = 24
# Limits that a test can wait for.
PROGRAM = """
import sys
from delayd.gateway import connection, program
connection.HEAD_S = connection.IDLE_S = connection.SILENT_S = 2.0
connection.LOOK_S = 0.1
program.connections_max = lambda: int(sys.argv[2])
program.run(sys.argv[1], "127.0.0.1", 0, (), insecure=False)
"""
HEAD = b"POST /v1/subjects/bad/messages?delay=1h HTTP/1.1\r\nhost: 127.0.0.1\r\n"


class Process(NamedTuple):
    process: subprocess.Popen[str]
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)

    def said(self, *parts: bytes) -> bytes:
        """What is answered until the connection ends."""
        with self.connect() as line:
            for part in parts:
                try:
                    line.sendall(part)
                except OSError:
                    break  # It has ended; the answer may be there.
            return rest(line)

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4_096

    def pending(self) -> int:
        answer = self.said(b"GET /v1/subjects/bad/messages HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        (line,) = [each for each in answer.splitlines() if each.startswith(b'{"pending"')]
        return int(json.loads(line)["pending"])


def rest(line: socket.socket) -> bytes:
    heard = b""
    try:
        while got := line.recv(1 << 16):
            heard += got
    except ConnectionResetError:
        pass
    return heard


def problem(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head, answer
    return int(head.split()[1]), json.loads(body)["code"]


@contextmanager
def gateway_process(meta: str, places: int) -> Iterator[Process]:
    command = [sys.executable, "-c", PROGRAM, meta, str(places)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield Process(process, int(process.stdout.readline().split()[2].rpartition(":")[2]))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess("meta", folder))
        for role in ("realtime", "delay"):
            stack.enter_context(ServerProcess(role, folder, {"meta": server.address}))
        yield server.address


@pytest.fixture(scope="module")
def gateway(meta: str) -> Iterator[Process]:
    with gateway_process(meta, PLACES) as found:
        yield found


def test_a_head_that_comes_slowly_ends(gateway: Process) -> None:
    with gateway.connect() as line:
        line.settimeout(0.1)
        line.sendall(b"GET /")
        heard = b""
        deadline = time.monotonic() + DEADLINE_S
        while not heard and time.monotonic() < deadline:
            line.sendall(b"x")
            try:
                heard = line.recv(1 << 16)
            except TimeoutError:
                continue
        assert problem(heard) == (408, "frame_overdue")


def test_a_body_of_which_nothing_more_comes_ends(gateway: Process) -> None:
    assert problem(gateway.said(HEAD + b"content-length: 9\r\n\r\nabc")) == (408, "frame_overdue")
    assert gateway.pending() == 0


@pytest.mark.parametrize(
    "begin",
    [b"GET /", b"GET / HTTP/1.1\r\nx: ", HEAD + b"transfer-encoding: chunked\r\n\r\n1;"],
    ids=["a path", "a header", "a chunk's extension"],
)
def test_a_head_without_end_is_refused_and_takes_no_memory(gateway: Process, begin: bytes) -> None:
    before = gateway.resident_bytes
    assert problem(gateway.said(begin, *[b"a" * 65_536] * 200)) in ((431, "head_too_large"), (400, "bad_request"))
    assert gateway.resident_bytes < before + (8 << 20)


@pytest.mark.parametrize("count", [1, 64])
def test_a_head_is_taken_up_to_its_limit_and_refused_beyond_however_its_bytes_come(
    gateway: Process, count: int
) -> None:
    for size, status in ((65_000, b"HTTP/1.1 200"), (66_000, b"HTTP/1.1 431"), (128_000, b"HTTP/1.1 431")):
        head = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + b"a" * size + b"\r\n\r\n"
        piece = -(-len(head) // count)
        assert gateway.said(*(head[at : at + piece] for at in range(0, len(head), piece))).startswith(status), size


def test_a_body_without_end_is_refused_and_takes_no_memory(gateway: Process) -> None:
    before = gateway.resident_bytes
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    answer = gateway.said(HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 64)
    assert problem(answer) == (413, "message_too_large")
    assert gateway.resident_bytes < before + (32 << 20)


SMUGGLED = b"POST /v1/subjects/bad/messages?delay=1h HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\nx"


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"content-length: 0\r\ncontent-length: %d\r\n\r\n" % len(SMUGGLED),
        b"transfer-encoding: chunked, identity\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\n",
        b"transfer-encoding : chunked\r\n\r\n",
        b"transfer-encoding:\x0bchunked\r\n\r\n",
        b"content-length: +0\r\n\r\n",
        b"content-length: 0x0\r\n\r\n",
        b"x: y\rcontent-length: 0\r\n\r\n",
    ],
)
def test_a_request_whose_end_can_be_read_in_two_ways_is_refused(gateway: Process, head: bytes) -> None:
    answer = gateway.said(HEAD + head + SMUGGLED)
    assert problem(answer)[0] == 400 and answer.count(b"HTTP/1.1 ") == 1
    assert gateway.pending() == 0


def test_idle_connections_leave_for_those_who_ask(meta: str) -> None:
    with gateway_process(meta, PLACES) as gateway, ExitStack() as stack:
        idle = [stack.enter_context(gateway.connect()) for _ in range(4 * PLACES)]
        for line in idle[::2]:
            line.sendall(b"GET /")
        assert gateway.pending() == 0
        assert all(rest(line) == b"" for line in idle[:PLACES]), "those that came first have left"


def test_a_gateway_whose_places_are_all_at_work_says_so_and_goes_on_with_those(meta: str) -> None:
    body = b'{"wait_ms": 30000}'
    head = b"POST /v1/subjects/busy/groups/g/pull HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    with gateway_process(meta, 3) as gateway, ExitStack() as stack:
        busy = [stack.enter_context(gateway.connect()) for _ in range(3)]
        for line in busy:
            line.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: problem_of(gateway) == (503, "too_many_connections"), "it is full")
        busy.pop().close()
        wait_until(lambda: gateway.said(b"GET /healthz HTTP/1.0\r\n\r\n").endswith(b"ok\n"), "a place is free")
        sent = gateway.said(
            b"POST /v1/subjects/busy/messages?delay_ms=0 HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"connection: close\r\ncontent-length: 1\r\n\r\nx"
        )
        assert sent.startswith(b"HTTP/1.1 201 ")
        first = rest(busy[0]) if busy[0] in _ready(busy) else rest(busy[1])
        assert b'"body":"x"' in first, "those at work were not hurt"


def problem_of(gateway: Process) -> tuple[int, str] | None:
    answer = gateway.said(b"GET /healthz HTTP/1.0\r\n\r\n")
    return problem(answer) if b"problem" in answer else None


def _ready(lines: list[socket.socket]) -> list[socket.socket]:
    return select.select(lines, [], [], DEADLINE_S)[0]


def test_of_a_name_that_comes_twice_in_json_the_last_counts(gateway: Process) -> None:
    body = b'{"body":"first","delay":"1h","body":"last","key":"twice"}'
    head = b"POST /v1/subjects/twice/messages HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert gateway.said(head + body).startswith(b"HTTP/1.1 201 ")
    listed = b"GET /v1/subjects/twice/messages?contents=true HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    assert b'"body":"last"' in gateway.said(listed)
