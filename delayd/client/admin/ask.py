"""Ask: asks a server that meta knows one thing, or a few, and waits for the answers; for operators, not for traffic.

Invariant: every wait has a limit, and a server that is not there is named with its address. Within `in_time` all waits
together have one limit, which is that of a caller's call.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from delayd.config import parse_address
from delayd.errors import DelaydError, RequestFailed, RequestTimedOut, ServerUnavailable, UnknownRequest
from delayd.net import trust
from delayd.net.connection import Connection, connect
from delayd.secret import Secret
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_u64
from delayd.wire.meta import ServerInfo, read_servers
from delayd.wire.requests import RequestType

CONNECT_MS = 3_000  # Enough for any network on which a person would wait.
HELD_S = 2.0  # How long to ask a server that meta has not heard of: a damaged file may hold it.
ANSWER_MS = 10_000  # A server that replays after a crash answers later than usual.

_UNTIL: ContextVar[float | None] = ContextVar("until", default=None)  # When the time of a call is over, on its loop.


class Known(NamedTuple):
    """A server that meta knows."""

    role: str
    log_id: int
    host: str
    port: int
    epoch: int
    pid: int
    alive: bool
    seen_ms_ago: int
    cordoned: bool = False

    @property
    def address(self) -> str:
        """As ``host:port``."""
        return f"{self.host}:{self.port}"


@contextmanager
def in_time(limit_s: float) -> Iterator[None]:
    """Whatever is asked in the block, of however many servers, is given up when so much time is over."""
    token = _UNTIL.set(asyncio.get_running_loop().time() + limit_s)
    try:
        yield
    finally:
        _UNTIL.reset(token)


@asynccontextmanager
async def connected(host: str, port: int, what: str = "server") -> AsyncIterator[Connection]:
    """Connect for the length of the block.

    Raises:
        ServerUnavailable: it can't be connected to.
        RequestTimedOut: the time of `in_time` is over.
    """
    try:
        async with asyncio.timeout_at(_UNTIL.get()), _connected(host, port, what) as connection:
            yield connection
    except TimeoutError:
        late = f"the {what} at {host}:{port} gave no answer in time; look at its log, and try again"
        raise RequestTimedOut(late, sent=True) from None


@asynccontextmanager
async def _connected(host: str, port: int, what: str) -> AsyncIterator[Connection]:
    try:
        connection = await connect(host, port, timeout_ms=CONNECT_MS)
    except ServerUnavailable as error:
        raise ServerUnavailable(
            f"no {what} answers at {host}:{port}; start it with `delayd up`, or give its address with --meta"
            if what == "meta server"
            else f"the {what} at {host}:{port} can't be reached; see `delayd servers`",
            retry_after_ms=error.retry_after_ms,
        ) from error
    try:
        yield connection
    finally:
        connection.close()
        await connection.closed


@asynccontextmanager
async def reached(server: Known) -> AsyncIterator[Connection]:
    """Connect to a server that meta knows. Raises ServerUnavailable when it is away, or another one has its address."""
    async with connected(server.host, server.port, f"{server.role} server") as connection:
        status = await ask(connection, RequestType.STATUS, {})
        log_id = need_u64(status, "log_id")
        # A server that can't read its files may not know its own log_id.
        if log_id != server.log_id and not (is_held(status) and log_id == 0):
            raise ServerUnavailable(
                f"{server.host}:{server.port} is another server now: its log is {log_id:016x} instead of "
                f"{server.log_id:016x}"
            )
        yield connection


async def ask(connection: Connection, request: RequestType, head: Mapping[str, HeadValue]) -> Head:
    """Ask one thing; returns the head of the answer."""
    try:
        frame = await connection.request(request, head, timeout_ms=ANSWER_MS)
    except RequestFailed as error:
        what = f"{connection.peer} gave no answer ({error.message}); look at that server's log, and try again"
        raise type(error)(what, sent=error.sent) from error
    return frame.head


async def prove(connection: Connection, secret: Secret) -> None:
    """Prove the cluster's secret. Raises NotTrusted when the other side has another secret."""
    try:
        await trust.prove(connection, secret, 0, ANSWER_MS)
    except RequestFailed as error:
        what = f"{connection.peer} gave no answer ({error.message}); look at that server's log, and try again"
        raise type(error)(what, sent=error.sent) from error


async def decide(server: Known, request: RequestType, head: Mapping[str, HeadValue], secret: Secret) -> Head:
    """Ask what only an operator may ask; returns the head of the answer."""
    async with reached(server) as connection:
        await prove(connection, secret)
        return await ask(connection, request, head)


@asynccontextmanager
async def meta(address: str) -> AsyncIterator[Connection]:
    """Connect to the meta server at ``host:port``."""
    host, port = parse_address(address)
    async with connected(host, port, "meta server") as connection:
        try:
            yield connection
        except UnknownRequest as error:
            raise UnknownRequest(f"{host}:{port} is no meta server; give the address of one with --meta") from error


async def known_servers(connection: Connection, role: str | None = None) -> list[Known]:
    """Ask meta for its servers, by role and log_id."""
    answer = await ask(connection, RequestType.SERVERS, {"role": role})
    return sorted(map(_known, read_servers(answer)))


def is_held(status: Head) -> bool:
    """Whether what answered STATUS is a server that could not start and waits for its files (delayd.net.held_start)."""
    return status.get("held") is True


def is_fenced(status: Head) -> bool:
    """Whether what answered STATUS may not serve (rule H8)."""
    return status.get("fenced") is True


async def held_status(server: Known) -> Head | None:
    """What a held or fenced server says of itself, when meta does not call it alive. None when it does not answer."""
    try:
        async with asyncio.timeout(HELD_S), reached(server) as connection:
            answer = await ask(connection, RequestType.STATUS, {})
            return answer if is_held(answer) or is_fenced(answer) else None
    except (DelaydError, TimeoutError):
        return None


def _known(info: ServerInfo) -> Known:
    server = info.server
    where = (server.role, server.log_id, server.host, server.port, server.epoch, server.pid)
    return Known(*where, info.alive, info.seen_ms_ago, info.cordoned)
