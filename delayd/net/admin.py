"""Admin: the HTTP port on which a server is measured: ``/metrics``, ``/metrics/subjects``, ``/healthz``, ``/readyz``
(docs/metrics.md).

It reads one request of a connection, answers it and ends the connection:

     connected ── head within HEAD_S, HEAD_BYTES_MAX ──▶ answering ── all written within ANSWER_S ──▶ closed
         │                                                  │
         └── too slow, too large, no HTTP: 4xx ─────────────┘

On an address that other machines reach it speaks TLS with the certificate of its server, and asks for a token where its
server does (docs/security.md); its terms are those of the server's own port, so `insecure` opens both.

Invariants: nothing that a caller sends changes anything or is kept: there are no bodies, no second requests, no state.
A page that is long is written in pieces, with a turn of the loop between two of them, and no faster than it is taken;
so a scrape delays the server's own work by one piece at most.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from itertools import chain
from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl

from delayd.address import Endpoint, is_loopback
from delayd.errors import BadToken, CallerError, DelaydError
from delayd.net.endpoint import Listening, listen
from delayd.net.timer import Ticks
from delayd.net.tokens import TokenBook
from delayd.wire.exposition import MEDIA_TYPE, Family, exposition
from delayd.wire.tokens import Right

HEAD_BYTES_MAX = 8 << 10  # Names of paths and headers; Prometheus sends some 300 bytes.
HEAD_S = 5.0  # A request has arrived by then; it is one packet.
ANSWER_S = 30.0  # A page is taken by then; a scrape has 10 s by default.
CONNECTIONS_MAX = 16  # Some scrapers and a probe; others are ended at once.
WRITE_BYTES = 64 << 10  # With more bytes untaken no further piece is made.
LINGER_S = 1.0  # What a caller still sends is dropped for so long, or the system would take the answer back.
LOOK_S = 1.0  # How often a new certificate is looked for.
EVERY_SUBJECT = ">"
MAY_MEASURE = (Right.INSPECT, Right.ADMINISTER)
TEXT = "text/plain; charset=utf-8"
METHODS = ("GET", "HEAD")
_END = b"\r\n\r\n"
_REQUEST = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")

log = logging.getLogger(__name__)


class Measured(Protocol):
    """A server that can be measured."""

    @property
    def tokens(self) -> TokenBook | None:
        """The tokens that it knows; None before it has read its directory."""

    def not_ready(self) -> str:
        """Why it serves nobody now; empty: it serves."""

    def families(self) -> Iterable[Family]:
        """Its metrics: totals, and what stands out."""

    def families_by_subject(self, pattern: str) -> Iterable[Family]:
        """What there is for each subject that fits a pattern (docs/consuming.md); BadSubject when it is none."""


class Page(NamedTuple):
    """An answer: its body comes in pieces."""

    status: HTTPStatus
    body: Iterator[bytes]
    media_type: str = TEXT


class NotHttp(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class AdminRequest(NamedTuple):
    """What is asked for; ``match`` is the pattern of a query, "" when it has none."""

    method: str
    path: str
    match: str
    host: str
    token: str  # "" when it has none.
    chunks: bool  # Whether the caller knows chunks, by which it notices an answer that was cut short.


class AdminServer:
    """Answers for what the process is: `starting` until it is given a server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._wanted = endpoint
        self._listening: Listening | None = None
        self._connections: set[_AdminConnection] = set()
        self._served: Measured | None = None
        self._looks: Ticks | None = None
        self.why_not = "it is starting"  # Why nobody is served, while there is no server.

    async def listen(self, role: str) -> None:
        """Begin to accept; BadSetting when the address can't be used."""
        self._listening = await listen(self._wanted, self._accept)
        self._looks = Ticks(asyncio.get_running_loop(), LOOK_S, self._listening.look)
        bound = self._listening.endpoint
        log.info("admin_listening role=%s host=%s port=%d", role, bound.host, bound.port)

    def serve(self, served: Measured | None, why_not: str = "") -> None:
        """Answer for this server from now on; None: for none, which is why nobody is served."""
        self._served, self.why_not = served, why_not

    def close(self) -> None:
        """Take no further connection, and end those that are open."""
        if self._looks is not None:
            self._looks.close()
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._connections):
            connection.abort()

    def _accept(self) -> _AdminConnection:
        return _AdminConnection(self._connections, self._page)

    def _page(self, request: AdminRequest, peer: str) -> Page:
        served = self._served
        if self._wanted.is_here and not is_loopback(request.host.lower()):
            # A page in a browser may have its own name lead here, and would read what its user may read.
            raise NotHttp(HTTPStatus.MISDIRECTED_REQUEST, "this port is asked as localhost or by a loopback address")
        if request.path == "/healthz":
            return Page(HTTPStatus.OK, iter((b"ok\n",)))
        why_not = self.why_not if served is None else served.not_ready()
        book = self._book
        if request.path == "/readyz" and not why_not:
            return Page(HTTPStatus.OK, iter((b"ready\n",)))
        if book is not None and (request.token or request.path != "/readyz"):
            self._check(book, request.token, peer)
        if request.path == "/readyz":
            # A probe without a token needs no reason.
            told = why_not if book is None or request.token else "not ready"
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, iter((f"{told}\n".encode(),)))
        if request.path not in ("/metrics", "/metrics/subjects"):
            known = "there are /metrics, /metrics/subjects?match=PATTERN, /healthz and /readyz\n"
            return Page(HTTPStatus.NOT_FOUND, iter((known.encode(),)))
        if served is None:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, iter((f"{why_not}\n".encode(),)))
        if request.path == "/metrics":
            return Page(HTTPStatus.OK, exposition(served.families()), MEDIA_TYPE)
        return Page(HTTPStatus.OK, exposition(served.families_by_subject(request.match or EVERY_SUBJECT)), MEDIA_TYPE)

    @property
    def _book(self) -> TokenBook | None:
        """The tokens of which a caller has to show one; None: none."""
        book = None if self._served is None or self._wanted.is_here else self._served.tokens
        return book if book is not None and book.is_closed else None

    def _check(self, book: TokenBook, token: str, peer: str) -> None:
        """Raise NotHttp for a caller who may not read this, and SlowDown for one whose token has used its second."""
        if not token:
            why = "this port asks for a token: send it as `Authorization: Bearer dlyd_…`"
            raise NotHttp(HTTPStatus.UNAUTHORIZED, why)
        try:
            entry = book.pass_at(peer, token)
        except BadToken as error:
            raise NotHttp(HTTPStatus.UNAUTHORIZED, error.message) from error
        entry.meter.take(0)
        if not any(entry.allows(right, EVERY_SUBJECT) for right in MAY_MEASURE):
            rights = " or ".join(right.value for right in MAY_MEASURE)
            why = f"the token {entry.name} does not allow this: it needs the right to {rights} everything"
            raise NotHttp(HTTPStatus.FORBIDDEN, why)


class _AdminConnection(asyncio.BufferedProtocol):
    """One connection, from its request to its end."""

    def __init__(self, all_open: set[_AdminConnection], page: Callable[[AdminRequest, str], Page]) -> None:
        self._all = all_open
        self._page = page
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._head = bytearray(HEAD_BYTES_MAX)
        self._filled = 0
        self._body: Iterator[bytes] | None = None  # What is still to be written; None before the request.
        self._chunks = False
        self._ended = self._paused = self._woken = False
        self._deadline: asyncio.TimerHandle | None = None

    def abort(self) -> None:
        """End it at once."""
        self._transport.abort()

    def refuse(self, error: DelaydError) -> None:
        """Tell a caller without TLS that this port is not for it."""
        self._refuse(NotHttp(HTTPStatus.BAD_REQUEST, "this port speaks HTTPS only"))

    # The transport's calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if len(self._all) >= CONNECTIONS_MAX:
            transport.abort()
            return
        self._all.add(self)
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        self._end_within(HEAD_S)

    def get_buffer(self, sizehint: int) -> memoryview:
        # Behind the request nothing counts, so the same bytes are written again.
        return memoryview(self._head)[0 if self._body is not None else self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            return
        self._filled += nbytes
        end = self._head.find(_END, max(0, self._filled - nbytes - len(_END)), self._filled)
        if end >= 0:
            self._answer(bytes(self._head[:end]))
        elif self._filled == HEAD_BYTES_MAX:
            why = f"a request has at most {HEAD_BYTES_MAX} bytes"
            self._refuse(NotHttp(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, why))

    def eof_received(self) -> bool:
        if self._body is None or self._ended:
            self._transport.close()
        return not self._ended  # Who has asked may close its side, and is answered.

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._go_on_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        self._ended, self._body = True, iter(())
        if self._deadline is not None:
            self._deadline.cancel()

    # The answer.

    def _answer(self, head: bytes) -> None:
        try:
            request = read_request(head)
            page = self._page(request, self._peer())
            first = b"" if request.method == "HEAD" else next(page.body, b"")
        except NotHttp as error:
            self._refuse(error)
        except CallerError as error:
            self._refuse(NotHttp(HTTPStatus.BAD_REQUEST, error.message))
        except DelaydError as error:
            self._refuse(NotHttp(HTTPStatus.SERVICE_UNAVAILABLE, error.message))
        else:
            self._begin(page, () if request.method == "HEAD" else chain((first,), page.body), request.chunks)

    def _refuse(self, error: NotHttp) -> None:
        self._begin(Page(error.status, iter(()), TEXT), (f"{error.why}\n".encode(),), False)

    def _begin(self, page: Page, body: Iterable[bytes], chunks: bool) -> None:
        lines = [
            f"HTTP/1.1 {page.status.value} {page.status.phrase}",
            f"Content-Type: {page.media_type}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
            *(("Transfer-Encoding: chunked",) if chunks else ()),
            *(("WWW-Authenticate: Bearer",) if page.status is HTTPStatus.UNAUTHORIZED else ()),
            *((f"Allow: {', '.join(METHODS)}",) if page.status is HTTPStatus.METHOD_NOT_ALLOWED else ()),
        ]
        self._transport.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        self._body, self._chunks = iter(body), chunks
        self._end_within(ANSWER_S)
        self._go_on_soon()

    def _go_on_soon(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Write the next piece; the one behind it has another turn of the loop."""
        self._woken = False
        if self._paused or self._ended or self._body is None or self._transport.is_closing():
            return
        try:
            piece = next(self._body, None)
        except DelaydError as error:
            log.warning("scrape_cut_short reason=%r", str(error))
            self._transport.abort()  # Without its last chunk the answer is no whole one.
            return
        if piece is None:
            self._finish()
            return
        if piece:  # An empty chunk would be the last one.
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunks else piece)
        self._go_on_soon()

    def _finish(self) -> None:
        if self._chunks:
            self._transport.write(b"0\r\n\r\n")
        self._ended = True
        self._transport.write_eof()
        self._end_within(LINGER_S)

    def _peer(self) -> str:
        address = self._transport.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a peer"

    def _end_within(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self._body is None:
            self._refuse(NotHttp(HTTPStatus.REQUEST_TIMEOUT, f"a request arrives within {HEAD_S:g} s"))
        else:
            self._transport.abort()


def read_request(head: bytes) -> AdminRequest:
    """The request of a head without its last empty line.

    Raises:
        NotHttp: it is none that this port answers.
    """
    first, *rest = head.decode("latin-1").split("\r\n")
    line = _REQUEST.fullmatch(first)
    if line is None:
        raise NotHttp(HTTPStatus.BAD_REQUEST, "a request begins as in `GET /metrics HTTP/1.1`")
    method, target, minor = line.groups()
    fields: dict[str, list[str]] = {}
    for each in rest:
        field = _FIELD.fullmatch(each)
        if field is None:
            raise NotHttp(HTTPStatus.BAD_REQUEST, "a header is no `Name: value`")
        fields.setdefault(field[1].lower(), []).append(field[2])
    if method not in METHODS:
        raise NotHttp(HTTPStatus.METHOD_NOT_ALLOWED, f"this port answers {' and '.join(METHODS)} only")
    if "transfer-encoding" in fields or fields.get("content-length", ["0"]) != ["0"]:
        raise NotHttp(HTTPStatus.BAD_REQUEST, "a request here has no body")
    hosts = fields.get("host", [] if minor == "1" else ["localhost"])
    if len(hosts) != 1:
        raise NotHttp(HTTPStatus.BAD_REQUEST, "a request names one host")
    path, _, query = target.partition("?")
    try:
        asked = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=1)
    except ValueError as error:
        raise NotHttp(HTTPStatus.BAD_REQUEST, "the query is no `match=PATTERN`") from error
    if asked and (asked[0][0] != "match" or path != "/metrics/subjects"):
        raise NotHttp(HTTPStatus.BAD_REQUEST, "only /metrics/subjects has a query, `match=PATTERN`")
    match = asked[0][1] if asked else ""
    token = _token(fields.get("authorization", []))
    return AdminRequest(method, path, match, _name(hosts[0]), token, minor == "1")


def _token(entries: list[str]) -> str:
    """The token of the one header that has it; "" for none, and for what only others ask for."""
    scheme, _, token = entries[0].partition(" ") if len(entries) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else ""


def _name(host: str) -> str:
    """A host without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host
