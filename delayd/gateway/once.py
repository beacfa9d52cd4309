"""Once: requests with the header `Idempotency-Key`, which are done once however often they come (docs/once.md).

     one message              its record is in one batch with it
     … with a key             a record of the request first, then one in one batch with the message
     a list, a stream         a record of the request first, then one in one batch with each message

Invariant: whether a message was sent under a name is decided by the delay server that has its record; this gateway
keeps nothing but the names of the requests that are under way here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
from starlette.requests import Request

from delayd.client.asking.once import OnceSends, once_key
from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.streams import StreamForm
from delayd.gateway.values import SendOptions, queued

HEADER = "idempotency-key"
TOKEN = "delayd.token"  # Where a request has the name of the token that it has shown.
NAME_CHARS_MAX = 255
RETRY_S = 1  # A request that is under way has an answer soon after.

_encode = msgspec.json.Encoder().encode


class Queue(Protocol):
    """Queues a message, as `queued` does; raises what is wrong with it."""

    def __call__(
        self, message: SendOptions, body: bytes, headers: dict[str, str] | None = None
    ) -> asyncio.Future[Receipt]:
        """With the headers that it has in JSON."""


class OnceRequests:
    """The requests with a name that are under way at this gateway; belongs to one loop."""

    def __init__(self, sends: OnceSends) -> None:
        self._sends = sends
        self._under_way: set[bytes] = set()

    def of(self, request: Request, subject: str) -> OnceRequest | None:
        """A request with a name; None when it has none. BadArgument for a header that is no name."""
        if HEADER not in request.headers:
            return None
        given = [value for name, value in request.scope["headers"] if name == HEADER.encode()]
        if len(given) > 1 or not 0 < len(given[0]) <= NAME_CHARS_MAX:
            raise BadArgument(f"a request has one Idempotency-Key of 1 to {NAME_CHARS_MAX} characters, or none")
        token: str = request.scope.get(TOKEN, "")
        return OnceRequest(self._sends, self._under_way, (b"http", token.encode(), given[0]), subject)


class OnceRequest:
    """One request with a name."""

    def __init__(self, sends: OnceSends, under_way: set[bytes], name: tuple[bytes, ...], subject: str) -> None:
        self._sends = sends
        self._all = under_way
        self._name = name
        self._subject = subject
        self._key = once_key(*name)
        self._number = 0  # That of the last message of a list or a stream.
        self._is_many = False

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Answer it. Refusal when another request with its name is under way here."""
        if self._key in self._all:
            raise Refusal(
                409,
                "under_way",
                "a request with this Idempotency-Key is under way; send it again for its answer",
                {"Retry-After": str(RETRY_S)},
            )
        self._all.add(self._key)
        try:
            yield
        finally:
            self._all.discard(self._key)

    async def is_list(self, messages: object) -> None:
        """It has a list of messages. Refusal when its name was used for another request."""
        self._is_many = True
        await self._claim(_digest(b"list", self._subject.encode(), _encode(messages)))

    async def is_stream(self) -> None:
        """It has a stream of messages, of which nobody knows the end. Refusal as `is_list` and `under_way`."""
        self._is_many = True
        with self.under_way():
            await self._claim(_digest(b"stream", self._subject.encode()))

    async def held(self, told: AsyncIterator[bytes], form: StreamForm) -> AsyncIterator[bytes]:
        """The answer to a stream, under way up to its end."""
        try:
            with self.under_way():
                async for some in told:
                    yield some
        except Refusal as refusal:
            yield form.encode([problem(refusal)])

    async def _claim(self, digest: bytes) -> None:
        if (await self._sends.claim(self._key, digest)).digest != digest:
            raise _other()

    def queue(
        self, message: SendOptions, body: bytes, headers: dict[str, str] | None = None
    ) -> asyncio.Future[Receipt]:
        """See `Queue`; the future may raise Refusal, too."""
        self._number += 1
        key = once_key(*self._name, b"%d" % self._number) if self._is_many else self._key
        row, window_ms = queued(self._sends.checked.send_nowait, self._subject, message, body, headers)
        digest = _digest(b"one", self._subject.encode(), _encode(message), body)

        async def sent() -> Receipt:
            if message.key is not None and not self._is_many:
                await self._claim(digest)
            told = await self._sends.send(key, digest, row, window_ms)
            if told.receipt is None:
                raise _other()
            return told.receipt

        return asyncio.get_running_loop().create_task(sent())


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join([b"%d:%b" % (len(part), part) for part in parts])).digest()


def _other() -> Refusal:
    return Refusal(
        422,
        "other_request",
        "this Idempotency-Key was used for another request within 24 h; nothing was done: repeat a request as it was,"
        " and give each new one a key of its own",
    )
