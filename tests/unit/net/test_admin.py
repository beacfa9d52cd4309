"""The port on which a server is measured: what it answers, and that nothing that a caller sends holds it up."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import threading
from collections.abc import Iterable, Iterator

import pytest

from delayd.address import Endpoint
from delayd.errors import NotReady
from delayd.net import admin
from delayd.net.admin import CONNECTIONS_MAX, HEAD_BYTES_MAX, AdminServer
from delayd.net.tokens import TokenBook
from delayd.wire.exposition import Family, Metric, MetricKind
from delayd.wire.metrics import matches
from delayd.wire.tokens import TokenPage, TokenRecord, digest_of, token_text
from tests.waiting import DEADLINE_S, wait_until

from .loopback import HOST

ROWS = Metric("sample_rows", MetricKind.GAUGE, "Rows of the sample.", ("subject",))
GOOD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Sample:
    """What is measured: ``rows`` rows, and an error behind them if there is one."""

    def __init__(self) -> None:
        self.rows = 1
        self.breaks = False
        self.why_not = ""
        self.tokens: TokenBook | None = TokenBook()

    def not_ready(self) -> str:
        return self.why_not

    def families(self) -> Iterable[Family]:
        yield Family(ROWS, (((f"s.{number}",), number) for number in range(self.rows)))
        if self.breaks:
            raise NotReady("the files are gone")

    def families_by_subject(self, pattern: str) -> Iterable[Family]:
        fits = matches(pattern)
        yield Family(ROWS, ((("a.b",), 1) for _ in range(1) if fits("a.b")))


class Port:
    """An admin server on a loop in a thread."""

    def __init__(self, sample: Sample, host: str = HOST) -> None:
        self._host = host
        self.loop = asyncio.new_event_loop()
        self.port = 0
        self._sample = sample
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._main(),))
        self._thread.start()
        assert self._begun.wait(DEADLINE_S)

    async def _main(self) -> None:
        self._end = asyncio.Event()
        self.server = AdminServer(Endpoint(self._host, 0))
        await self.server.listen("sample")
        assert self.server._listening is not None
        self.port = self.server._listening.endpoint.port
        self.server.serve(self._sample)
        self._begun.set()
        await self._end.wait()
        self.server.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(DEADLINE_S)
        self.loop.close()

    def connected(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), DEADLINE_S)

    def raw(self, request: bytes) -> bytes:
        """All that comes back for some bytes."""
        with self.connected() as line:
            line.sendall(request)
            return b"".join(iter(lambda: line.recv(65_536), b""))

    def raw_or_nothing(self, request: bytes) -> bytes:
        """The same; nothing when the connection is ended first."""
        try:
            return self.raw(request)
        except OSError:
            return b""

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        line = http.client.HTTPConnection(HOST, self.port, timeout=DEADLINE_S)
        try:
            line.request(method, path, headers=headers)
            answer = line.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
        finally:
            line.close()


@pytest.fixture
def sample() -> Sample:
    return Sample()


@pytest.fixture
def port(sample: Sample) -> Iterator[Port]:
    opened = Port(sample)
    yield opened
    opened.close()


def test_each_path_is_answered_and_others_are_told_which_there_are(port: Port, sample: Sample) -> None:
    assert port.ask("/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    assert port.ask("/readyz")[::2] == (200, "ready\n")
    page = '# HELP sample_rows Rows of the sample.\n# TYPE sample_rows gauge\nsample_rows{subject="s.0"} 0\n'
    assert port.ask("/metrics") == (200, "text/plain; version=0.0.4; charset=utf-8", page)
    assert port.ask("/metrics", "HEAD") == (200, "text/plain; version=0.0.4; charset=utf-8", "")
    assert 'subject="a.b"' in port.ask("/metrics/subjects")[2]
    assert 'subject="a.b"' in port.ask("/metrics/subjects?match=a.%2A")[2]
    assert port.ask("/metrics/subjects?match=b.c")[::2] == (200, "")
    status, _, told = port.ask("/")
    assert status == 404 and "/metrics" in told
    status, _, told = port.ask("/metrics/subjects?match=a..*")
    assert status == 400 and "word 2" in told
    sample.why_not = "it may be a copy"
    assert port.ask("/readyz")[::2] == (503, "it may be a copy\n")
    assert port.ask("/healthz")[0] == port.ask("/metrics")[0] == 200
    port.server.serve(None, "it is stopping")
    assert port.ask("/readyz")[::2] == port.ask("/metrics")[::2] == (503, "it is stopping\n")


@pytest.fixture
def reached(sample: Sample) -> Iterator[Port]:
    """A port that other machines reach."""
    opened = Port(sample, "0.0.0.0")
    yield opened
    opened.close()


def new_token() -> str:
    return token_text(os.urandom(32))


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def book_of(*records: TokenRecord) -> TokenBook:
    book = TokenBook(required=True)
    book.take(TokenPage(1, list(records), more=False))
    return book


def test_a_port_that_others_reach_asks_for_a_token_that_may_look_or_administer(reached: Port, sample: Sample) -> None:
    texts = {name: new_token() for name in ("look", "ops", "part", "send", "slow")}
    rights = {"look": "inspect:>", "ops": "administer:>", "part": "inspect:a.>", "send": "send:>", "slow": "inspect:>"}
    sample.tokens = book_of(
        *(
            TokenRecord(name, digest_of(text), rights[name], requests_per_s=int(name == "slow"))
            for name, text in texts.items()
        )
    )
    paths = ("/metrics", "/metrics/subjects", "/no/such/path")
    for headers in ({}, bearing(new_token()), bearing(""), {"Authorization": f"Basic {texts['look']}"}):
        assert [reached.ask(path, **headers)[0] for path in paths] == [401] * 3, headers
        assert reached.ask("/healthz", **headers)[::2] == (200, "ok\n")
    assert b"WWW-Authenticate: Bearer\r\n" in reached.raw(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    line = f"Authorization: Bearer {texts['look']}\r\n".encode()
    assert reached.raw(b"GET /metrics HTTP/1.1\r\nHost: x\r\n%b\r\n" % (2 * line)).startswith(b"HTTP/1.1 401 ")
    for name in ("look", "ops"):
        assert [reached.ask(path, **bearing(texts[name]))[0] for path in paths] == [200, 200, 404], name
    for name in ("part", "send"):
        status, _, why = reached.ask("/metrics", **bearing(texts[name]))
        assert status == 403 and f"the token {name} does not allow this" in why and "inspect or administer" in why
    assert {reached.ask("/metrics", **bearing(texts["slow"]))[0] for _ in range(5)} == {200, 503}
    sample.tokens.take(TokenPage(2, [], more=False))
    assert reached.ask("/metrics", **bearing(texts["look"]))[0] == 401, "it was revoked"


def test_a_probe_without_a_token_hears_whether_it_serves_and_no_reason(reached: Port, sample: Sample) -> None:
    text = new_token()
    sample.tokens = book_of(TokenRecord("ops", digest_of(text), "administer:>"))
    assert reached.ask("/readyz")[::2] == (200, "ready\n")
    sample.why_not = "/data/x is damaged"
    assert reached.ask("/readyz")[::2] == (503, "not ready\n")
    assert reached.ask("/readyz", **bearing(text))[::2] == (503, "/data/x is damaged\n")
    assert reached.ask("/readyz", **bearing(new_token()))[0] == 401


def test_a_port_of_this_machine_and_one_of_servers_that_ask_nobody_ask_for_no_token(
    port: Port, reached: Port, sample: Sample
) -> None:
    assert reached.ask("/metrics")[0] == 200
    sample.tokens = TokenBook(required=True)
    assert port.ask("/metrics")[0] == 200 and reached.ask("/metrics")[0] == 401


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:9\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: [::1]:9\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\nHost: LocalHost\r\nContent-Length: 0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost.evil.example\r\n\r\n", 421),
        (b"GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"get /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET  /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA : b\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"CONNECT /x HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics/subjects?match=a&match=b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics/subjects?match HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /" + b"a" * HEAD_BYTES_MAX, 431),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 8 * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
    ],
)  # fmt: skip
def test_what_is_no_plain_request_is_refused_and_the_next_caller_is_served(
    port: Port, request_bytes: bytes, status: int
) -> None:
    answer = port.raw(request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"HTTP/1.1 ") == 1 and b"\r\nConnection: close\r\n" in answer
    assert (b"\r\nAllow: GET, HEAD\r\n" in answer) == (status == 405)
    assert port.ask("/healthz")[0] == 200


def test_of_several_requests_on_one_connection_only_the_first_is_answered(port: Port) -> None:
    answer = port.raw(GOOD + b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    assert answer.count(b"HTTP/1.1 200 OK") == 1 and answer.endswith(b"3\r\nok\n\r\n0\r\n\r\n")


def test_a_request_may_come_byte_by_byte_but_not_for_ever(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    with port.connected() as line:
        for byte in GOOD:
            line.sendall(bytes([byte]))
        assert line.recv(12) == b"HTTP/1.1 200"
    monkeypatch.setattr(admin, "HEAD_S", 0.2)
    with port.connected() as line:
        line.sendall(GOOD[:-1])  # The rest never comes.
        assert b"".join(iter(lambda: line.recv(4_096), b"")).startswith(b"HTTP/1.1 408 ")


def test_who_takes_all_connections_holds_up_nobody_for_longer_than_a_request_may_take(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "HEAD_S", 0.5)
    idle = [port.connected() for _ in range(CONNECTIONS_MAX)]
    wait_until(lambda: len(port.server._connections) == CONNECTIONS_MAX, lambda: "all are accepted")
    assert port.raw_or_nothing(b"") == b""  # One more is ended without an answer.
    wait_until(lambda: port.raw_or_nothing(GOOD).startswith(b"HTTP/1.1 200"), lambda: "a place comes free")
    for line in idle:
        line.close()
    wait_until(lambda: not port.server._connections, lambda: "all are gone")


def test_a_long_page_holds_up_nobody_and_goes_no_faster_than_it_is_taken(port: Port, sample: Sample) -> None:
    sample.rows = 300_000
    with port.connected() as line:
        line.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        first = line.recv(100)
        for _ in range(20):  # Meanwhile nobody takes the rest.
            assert port.ask("/healthz")[0] == 200
        wait_until(lambda: any(each._paused for each in list(port.server._connections)), lambda: "it is full")
        (connection,) = [each for each in list(port.server._connections) if each._paused]
        assert connection._transport.get_write_buffer_size() < 4 * admin.WRITE_BYTES
        rest = b"".join(iter(lambda: line.recv(1 << 20), b""))
    assert first.startswith(b"HTTP/1.1 200") and rest.endswith(b"\r\n0\r\n\r\n")
    assert f'{{subject="s.{sample.rows - 1}"}}'.encode() in rest


def test_who_takes_nothing_is_ended(port: Port, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "ANSWER_S", 0.3)
    sample.rows = 10_000_000
    with port.connected() as line:
        line.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: len(port.server._connections) == 1, lambda: "it is accepted")
        wait_until(lambda: not port.server._connections, lambda: "it is ended")


def test_a_page_that_breaks_off_is_taken_for_no_whole_one(port: Port, sample: Sample) -> None:
    sample.breaks = True
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        sample.rows = 1_000
        port.ask("/metrics")
    sample.rows = 0
    assert port.ask("/metrics")[::2] == (503, "the files are gone\n")


def test_an_address_that_others_reach_may_be_asked_by_any_name() -> None:
    async def scenario() -> None:
        server = AdminServer(Endpoint("0.0.0.0", 0))
        await server.listen("sample")
        assert server._listening is not None
        reader, writer = await asyncio.open_connection(HOST, server._listening.endpoint.port)
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: delay.internal\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"it is starting" in answer
        writer.close()
        server.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
