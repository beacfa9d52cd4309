"""Tokens at a server, over real sockets: who has none is refused everything, and who has one may do what it says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from delayd.address import Access
from delayd.errors import (
    BadToken,
    ConnectionLost,
    DamagedData,
    DelaydError,
    NotAllowed,
    NotTrusted,
    SlowDown,
    TooManyConnections,
)
from delayd.net.connection import Connection
from delayd.net.server import Server
from delayd.net.tokens import STATE_KEY, TokenBook, keep_tokens, read_kept
from delayd.net.trust import Guard, prove
from delayd.testing.state import MemoryState
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from delayd.wire.tokens import Right, TokenPage, TokenRecord, digest_of, token_text
from tests.trust import SECRET
from tests.waiting import until

from .guarded import CLUSTER, LIMIT_MS
from .loopback import Loopback, error_of, on_loop

ONE, OTHER, STRANGE = (token_text(bytes([number]) * 32) for number in range(3))


class Clock:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_900_000_000_000

    def __call__(self) -> int:
        return self.ms


class Guarded:
    """Serves what its guard lets pass, by an empty answer."""

    def __init__(self, book: TokenBook) -> None:
        self.served: list[int] = []
        self.book = book
        self._guard = Guard(SECRET, "realtime", 7, lambda: CLUSTER, book)

    def connected(self, connection: Connection) -> None:
        pass

    def received(self, connection: Connection, frame: Frame) -> None:
        if not self._guard.serves(connection, frame):
            self.served.append(frame.type)
            connection.answer(frame.request_id, {})

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        pass

    def crashed(self, error: Exception) -> None:
        raise error


RIGHTS = "send:orders.> consume:orders.eu"


def record(name: str = "one", text: str = ONE, rights: str = RIGHTS, **own: int) -> TokenRecord:
    return TokenRecord(name, digest_of(text), rights)._replace(**own)  # type: ignore[arg-type]


def book_of(*records: TokenRecord, clock: Callable[[], int] | None = None) -> TokenBook:
    book = TokenBook() if clock is None else TokenBook(wall_ms=clock)
    book.take(TokenPage(1, list(records), more=False))
    return book


async def served(loopback: Loopback, book: TokenBook) -> tuple[Server, int, Guarded]:
    guarded = Guarded(book)
    server, port = await loopback.serve(guarded)
    server.book = book
    return server, port, guarded


def test_without_tokens_everybody_is_served_and_a_token_makes_no_difference() -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port, guarded = await served(loopback, TokenBook())
        for access in (Access(), Access(token=ONE)):
            client = await loopback.connect(port, access=access)
            await client.request(RequestType.SEND, {})
        assert guarded.served == [RequestType.SEND] * 2

    on_loop(scenario)


@pytest.mark.parametrize("book", [book_of(record()), TokenBook(required=True)], ids=["a token exists", "required"])
def test_whoever_has_no_token_is_refused_each_request(book: TokenBook) -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port, guarded = await served(loopback, book)
        client = await loopback.connect(port)
        for kind in RequestType:
            if Right.ENTER not in kind.terms.needs:
                refused = await error_of(client.request(kind, {}))
                expected = NotTrusted if kind.terms.trusted else NotAllowed
                assert isinstance(refused, expected), kind.name
        assert not guarded.served
        assert isinstance(await error_of(loopback.connect(port, access=Access(token=STRANGE))), BadToken)
        # The cluster's secret lets in, too.
        await prove(client, SECRET, CLUSTER, LIMIT_MS)
        await client.request(RequestType.SEND, {})
        assert guarded.served == [RequestType.SEND]

    on_loop(scenario)


def test_a_token_allows_what_it_says_and_nothing_else() -> None:
    heads: list[tuple[RequestType, Head, bool]] = [
        (RequestType.PING, {}, True),
        (RequestType.STATUS, {}, True),
        (RequestType.PLACES, {"subject": "orders.us"}, True),
        (RequestType.PLACES, {"subject": "mail"}, False),
        (RequestType.PLACES, {"subject": ""}, False),
        (RequestType.PLACES, {"subject": ["orders.us"]}, False),
        (RequestType.PULL, {"subject": "orders.eu", "group": "g"}, True),
        (RequestType.PULL, {"subject": "orders.us", "group": "g"}, False),
        (RequestType.PULL, {"subscription": 1}, True),
        (RequestType.SUBSCRIBE, {"group": "g", "subjects": ["orders.eu"]}, True),
        (RequestType.SUBSCRIBE, {"group": "g", "subjects": ["orders.eu", "orders.us"]}, False),
        (RequestType.SUBSCRIBE, {"group": "g", "pattern": "orders.>"}, False),
        (RequestType.SUBSCRIBE, {"group": "g"}, False),
        (RequestType.ACK, {"subscription": 1, "subjects": [["orders.eu", 2]]}, True),
        (RequestType.ACK, {"subscription": 1, "subjects": [["orders.eu", 2], ["orders.us", 1]]}, False),
        (RequestType.GROUPS, {"subject": None}, False),
        (RequestType.FIND, {"subject": "orders.eu"}, False),
        (RequestType.ROUTES, {"subjects": ["orders.eu", "orders.us"]}, True),
        (RequestType.ROUTES, {"subjects": ["orders.eu", "mail"]}, False),
        (RequestType.CANCEL, {"subject": "orders.eu"}, False),
        (RequestType.DELETE_GROUP, {"subject": "orders.eu", "group": "g"}, False),
        (RequestType.DISPATCH, {}, False),
    ]

    async def scenario(loopback: Loopback) -> None:
        _, port, guarded = await served(loopback, book_of(record()))
        client = await loopback.connect(port, access=Access(token=ONE))
        for _ in range(2):  # The second time from what is remembered.
            for kind, head, allowed in heads:
                before = len(guarded.served)
                try:
                    await client.request(kind, head)
                    assert allowed, (kind.name, head)
                except NotAllowed as error:
                    assert not allowed and "token one" in error.message, (kind.name, head)
                assert len(guarded.served) == before + allowed

    on_loop(scenario)


def test_who_may_administer_may_do_so_for_its_subjects_and_each_act_is_logged_with_the_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(loopback: Loopback) -> None:
        book = book_of(record("ops", ONE, "administer:orders.>"), record("root", OTHER, "administer:>"))
        _, port, guarded = await served(loopback, book)
        ops = await loopback.connect(port, access=Access(token=ONE))
        await ops.request(RequestType.DELETE_GROUP, {"subject": "orders.eu", "group": "g"})
        for kind in (RequestType.SET_TOKEN, RequestType.TOKENS, RequestType.REVOKE_TOKEN, RequestType.TRUST_CLOCK):
            assert isinstance(await error_of(ops.request(kind, {"name": "x"})), NotAllowed)
        root = await loopback.connect(port, access=Access(token=OTHER))
        await root.request(RequestType.TRUST_CLOCK, {})
        for kind in (RequestType.REGISTER, RequestType.HELLO, RequestType.DISPATCH, RequestType.SEND_AGAIN):
            assert isinstance(await error_of(root.request(kind, {})), NotAllowed)  # These are for servers.
        assert guarded.served == [RequestType.DELETE_GROUP, RequestType.TRUST_CLOCK]

    with caplog.at_level(logging.INFO, "delayd.net.trust"):
        on_loop(scenario)
    told = [line for line in caplog.messages if line.startswith("administered")]
    assert len(told) == 2
    assert "DELETE_GROUP by='ops'" in told[0] and "orders.eu" in told[0] and "TRUST_CLOCK by='root'" in told[1]


@pytest.mark.parametrize("how", ["revoked", "changed", "expired", "rotated away"])
def test_a_token_that_ends_ends_its_connections_within_seconds(how: str) -> None:
    clock = Clock()

    async def scenario(loopback: Loopback) -> None:
        known = record(expires_ms=clock.ms + 60_000)
        book = book_of(known, record("other", OTHER), clock=clock)
        _, port, _ = await served(loopback, book)
        client = await loopback.connect(port, access=Access(token=ONE))
        other = await loopback.connect(port, access=Access(token=OTHER))
        await client.request(RequestType.PING, {})
        began = time.monotonic()
        rest = [record("other", OTHER)]
        if how == "revoked":
            book.take(TokenPage(2, rest, more=False))
        elif how == "changed":
            book.take(TokenPage(2, [known._replace(rights="send:mail"), *rest], more=False))
        elif how == "rotated away":
            rotated = known._replace(digest=digest_of(STRANGE), old_digest=known.digest, old_until_ms=clock.ms + 1_000)
            book.take(TokenPage(2, [rotated, *rest], more=False))
            await client.closed  # Its terms have changed, so it is asked to enter again.
            client = await loopback.connect(port, access=Access(token=ONE))
            await loopback.connect(port, access=Access(token=STRANGE))
            clock.ms += 1_000
        else:
            clock.ms += 60_000
        await client.closed
        assert time.monotonic() - began < 20
        lost = await error_of(client.request(RequestType.PING, {}))
        assert isinstance(lost, ConnectionLost) and isinstance(lost.__cause__, BadToken)
        if how != "changed":
            assert isinstance(await error_of(loopback.connect(port, access=Access(token=ONE))), BadToken)
        await other.request(RequestType.PING, {})

    on_loop(scenario)


def test_a_token_has_so_many_connections_requests_and_bytes_at_a_server() -> None:
    async def scenario(loopback: Loopback) -> None:
        book = book_of(record(connections=2), record("fast", OTHER, requests_per_s=5))
        _, port, guarded = await served(loopback, book)
        access = Access(token=ONE)
        first, _ = [await loopback.connect(port, access=access) for _ in range(2)]
        assert isinstance(await error_of(loopback.connect(port, access=access)), TooManyConnections)
        first.close()
        await first.closed

        async def again() -> bool:
            try:
                await loopback.connect(port, access=access)
            except TooManyConnections:
                return False
            return True

        await until(lambda: guarded.book._meters["one"].connections == 1)
        assert await again()
        fast = await loopback.connect(port, access=Access(token=OTHER))
        head: Head = {"subject": "orders.eu"}
        refused: list[DelaydError] = []
        while not refused:
            try:
                await fast.request(RequestType.PLACES, head)
            except SlowDown as error:
                refused.append(error)
        assert 0 < refused[0].retry_after_ms <= 1_000
        await fast.request(RequestType.PING, {})  # By these a connection is known to live.

    on_loop(scenario)


def test_the_bytes_of_a_second_are_taken_and_no_more() -> None:
    book = book_of(record(bytes_per_s=1_000))
    meter = book._meters["one"]
    meter.take(5_000)  # A request may be larger than a second's worth.
    with pytest.raises(SlowDown) as refused:
        meter.take(8)
    assert 3_000 < refused.value.retry_after_ms <= 4_100


def test_a_server_remembers_the_tokens_and_refuses_to_begin_with_damaged_ones() -> None:
    state, page = MemoryState(), TokenPage(9, [record(), record("other", OTHER)], more=False)
    keep_tokens(state, page)
    book = TokenBook()
    read_kept(state, "state", book)
    assert book.is_closed and book.revision == 9
    state.commit([(STATE_KEY, b"\x81\xa1a\x01")])
    with pytest.raises(DamagedData):
        read_kept(state, "state", TokenBook())


def test_no_token_is_read_out_of_what_servers_have_or_say(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loopback: Loopback) -> None:
        _, port, _ = await served(loopback, book_of(record()))
        access = Access(token=ONE)
        client = await loopback.connect(port, access=access)
        refused = await error_of(client.request(RequestType.CANCEL, {"subject": "x"}))
        strange = await error_of(loopback.connect(port, access=Access(token=STRANGE)))
        assert ONE not in f"{refused} {access!r} {client.access!r}" and STRANGE not in str(strange)

    on_loop(scenario)
    assert ONE not in caplog.text and STRANGE not in caplog.text
