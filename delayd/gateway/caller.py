"""Caller: one POST to a server that somebody has named, who may be anybody (docs/push.md, docs/security.md).

Invariant: no socket is made to an address that is not public, unless that is allowed: each address is checked where the
socket for it is made, so neither a name that resolves to another address meanwhile, nor a redirect, nor any way to
write an address comes around it. Whatever the other side does, a call ends at its deadline and keeps 4 KiB of its
answer.

    the URL ──look-up──▶ addresses ──each is checked, then connected to──▶ TLS for the name of the URL ──▶ POST
                                       └── private: refused
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import socket
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver

import delayd

POSTS_MAX = 2_000  # POSTs at one time, to all targets together.
ANSWER_BYTES_MAX = 4_096  # So much of an answer is kept; behind that the connection is closed.
DRAIN_S = 1.0  # A server that has said 2xx may take so long for the rest, or its connection is not used again.
KEEPALIVE_S = 30.0
RETRY_AFTER_S_MAX = 24 * 3_600.0
AGENT = f"delayd/{delayd.__version__} (+webhook)"

# Addresses of IPv6 that stand for one of IPv4, and where in them it is.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
# And those that a router of the local network takes elsewhere, whatever stands behind them.
_LOCAL_V6 = (
    *(ipaddress.IPv6Network(each) for each in ("64:ff9b:1::/48", "2001::/32", "fec0::/10", "fc00::/7", "fe80::/10")),
)
_LOCAL_V4 = (
    *(ipaddress.IPv4Network(each) for each in ("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24")),
)


class PrivateAddress(OSError):
    """An address that nobody may be sent to."""


class Outcome(NamedTuple):
    """How a POST ended."""

    status: int  # 0: there was no answer.
    what: str  # In one sentence, without the answer's body.
    answer: bytes = b""  # Its first bytes.
    retry_after_s: float | None = None  # When the server wants to be asked again.
    is_refused: bool = False  # Nothing was sent: the address is private, or nobody trusts its certificate.

    @property
    def is_done(self) -> bool:
        """Whether the server has taken it."""
        return 200 <= self.status < 300


class Caller:
    """POSTs from one loop; connections are kept for the next POST to the same server."""

    def __init__(self, *, allow_private: bool, resolver: AbstractResolver | None = None) -> None:
        self._allow_private = allow_private
        self._under_way = 0
        connector = aiohttp.TCPConnector(
            limit=0, use_dns_cache=False, resolver=resolver, keepalive_timeout=KEEPALIVE_S, socket_factory=self._socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers={"user-agent": AGENT},
            skip_auto_headers=("Accept-Encoding",),
            auto_decompress=False,
            read_bufsize=ANSWER_BYTES_MAX,
            trust_env=False,
        )

    @property
    def room(self) -> int:
        """How many further POSTs may be under way at one time; this many wait in memory with their bodies."""
        return max(0, POSTS_MAX - self._under_way)

    async def close(self) -> None:
        """Disconnect."""
        await self._session.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, deadline_s: float) -> Outcome:
        """POST once; never raises for what the other side does, or does not."""
        until = asyncio.get_running_loop().time() + deadline_s
        self._under_way += 1
        try:
            async with asyncio.timeout_at(until):
                try:
                    return await self._post(url, headers, body, until)
                except aiohttp.ServerDisconnectedError:
                    # It closed a connection that was kept, just when it was used again.
                    return await self._post(url, headers, body, until)
        except TimeoutError:
            return Outcome(0, f"no answer in {deadline_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Outcome(0, _sentence(error), is_refused=_is_refused(error))
        finally:
            self._under_way -= 1

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes, until: float) -> Outcome:
        answer = await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        try:
            if 200 <= answer.status < 300:
                try:
                    async with asyncio.timeout_at(min(until, asyncio.get_running_loop().time() + DRAIN_S)):
                        await _begin_of(answer)
                except (TimeoutError, aiohttp.ClientError, OSError):
                    pass  # It has said that it is done, and nobody needs the rest.
                return Outcome(answer.status, f"answered {answer.status}")
            begin = await _begin_of(answer)
            said = f"answered {answer.status}"
            if 300 <= answer.status < 400:
                said += ", and redirects are not followed: give the URL where it leads"
            return Outcome(answer.status, said, begin, _retry_after_s(answer.headers.get("retry-after")))
        finally:
            answer.close()  # Does nothing when all was read: then the connection is kept already.

    def _socket(self, info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        why = None if self._allow_private else private_because(address[0])
        if why is not None:
            raise PrivateAddress(
                f"{address[0]} is {why}; without --allow-private gateways POST to public addresses only"
            )
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made


def private_because(address: str) -> str | None:
    """Why nobody may be sent to an address; None when it is public."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        embedded = _embedded(found)
        if embedded is not None:
            why = private_because(str(embedded))
            return None if why is None else f"another form of {embedded}, {why}"
        local = any(found in each for each in _LOCAL_V6)
    else:
        local = any(found in each for each in _LOCAL_V4)
    if found.is_loopback:
        return "of the gateway's own machine"
    if found.is_link_local:
        return "of the local link"
    if found.is_multicast:
        return "of a group of machines"
    if local or found.is_private or found.is_reserved or found.is_unspecified or not found.is_global:
        return "of a private network, or reserved"
    return None


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _SIX_TO_FOUR:
        return address.sixtofour
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


async def _begin_of(answer: aiohttp.ClientResponse) -> bytes:
    begin = bytearray()
    while len(begin) < ANSWER_BYTES_MAX:
        part = await answer.content.read(ANSWER_BYTES_MAX - len(begin))
        if not part:
            break
        begin += part
    return bytes(begin)


def _retry_after_s(text: str | None) -> float | None:
    """What `Retry-After` says: seconds, or an instant."""
    if text is None:
        return None
    text = text.strip()
    try:
        wait_s = float(int(text)) if text.isascii() and text.isdecimal() else _until(text)
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, wait_s), RETRY_AFTER_S_MAX) if math.isfinite(wait_s) else None


def _until(text: str) -> float:
    return parsedate_to_datetime(text).timestamp() - time.time()


def _is_refused(error: BaseException) -> bool:
    cause = getattr(error, "os_error", None)
    return isinstance(error, aiohttp.ClientConnectorCertificateError) or isinstance(cause, PrivateAddress)


def _sentence(error: BaseException) -> str:
    """Why there was no answer; an address that was refused says so itself."""
    cause = getattr(error, "os_error", None)
    if isinstance(cause, OSError) and not isinstance(error, aiohttp.ClientSSLError):
        return os.strerror(cause.errno) if cause.errno is not None and cause.errno > 0 else str(cause)
    return str(error) or type(error).__name__
