"""Once: requests with the header `Idempotency-Key`, which are done once however often they come (docs/once.md).

     one message              its record is in one batch with it
     … with a key             a record of the request first, then one in one batch with the message
     a list                   a record of the request first, then one in one batch with each message
     a stream                 the same; and a message with a key has a record of its own first, as one message has

Invariant: whether a message was sent under a name is decided by the delay server that has its record; this gateway
keeps nothing but the names of the requests that are under way here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Protocol

import msgspec
from msgspec import structs
from starlette.requests import Request

from delayd.client.asking.once import OnceSends, once_key
from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument, BadExpiry
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.streams import StreamForm
from delayd.gateway.values import SendOptions, queued

HEADER = "idempotency-key"
TOKEN = "delayd.token"  # Where a request has the name of the token that it has shown.
NAME_CHARS_MAX = 255
RETRY_S = 1  # A request that is under way has an answer soon after.

_encode = msgspec.json.Encoder(order="deterministic").encode


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
        name = _name_of(request)
        return None if name is None else OnceRequest(self._sends, self._under_way, name, subject)


def number_of(request: Request, schedule: str) -> int:
    """The number under which a schedule runs once, for a request with a name; 0 for one without. Raises as `of`."""
    name = _name_of(request)
    if name is None:
        return 0
    return int.from_bytes(hashlib.sha256(once_key(*name, b"run", schedule.encode())).digest()[:8], "little") or 1


def _name_of(request: Request) -> tuple[bytes, ...] | None:
    if HEADER not in request.headers:
        return None
    given = [value for name, value in request.scope["headers"] if name == HEADER.encode()]
    if len(given) > 1 or not 0 < len(given[0]) <= NAME_CHARS_MAX:
        raise BadArgument(f"a request has one Idempotency-Key of 1 to {NAME_CHARS_MAX} characters, or none")
    token: str = request.scope.get(TOKEN, "")
    return b"http", token.encode(), given[0]


class OnceRequest:
    """One request with a name."""

    def __init__(self, sends: OnceSends, under_way: set[bytes], name: tuple[bytes, ...], subject: str) -> None:
        self._sends = sends
        self._all = under_way
        self._name = name
        self._subject = subject
        self._key = once_key(*name)
        self._latest: dict[str, asyncio.Task[Receipt]] = {}  # By the key of messages, the last one under way with it.

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
        await self._claim(self._key, _digest(b"list", self._subject.encode(), _encode(messages)))

    async def is_stream(self) -> None:
        """It has a stream of messages, of which nobody knows the end. Refusal as `is_list` and `under_way`."""
        with self.under_way():
            await self._claim(self._key, _digest(b"stream", self._subject.encode()))

    async def held(self, told: AsyncIterator[bytes], form: StreamForm) -> AsyncIterator[bytes]:
        """The answer to a stream, under way up to its end."""
        try:
            with self.under_way():
                async for some in told:
                    yield some
        except Refusal as refusal:
            yield form.encode([problem(refusal)])

    def one(self) -> Queue:
        """Queues its only message; the future may raise Refusal, too."""
        return partial(self._queue, self._key, True)

    def each(self, *, of_stream: bool) -> Iterator[Queue]:
        """The same for one message after the other, of a list or a stream; those that can't be read count, too."""
        for number in count(1):
            yield partial(self._queue, once_key(*self._name, b"%d" % number), of_stream)

    async def _claim(self, key: bytes, digest: bytes) -> None:
        if (await self._sends.claim(key, digest)).digest != digest:
            raise _other()

    def _queue(
        self, key: bytes, claims: bool, message: SendOptions, body: bytes, headers: dict[str, str] | None = None
    ) -> asyncio.Future[Receipt]:
        """Queue a message under the key of its record. ``claims``: nothing else keeps that name from another message,
        when this one has a key and therefore a record elsewhere.
        """
        check, late = self._sends.checked.send_nowait, None
        try:
            row, window_ms = queued(check, self._subject, message, body, headers)
        except BadExpiry as error:
            # A delay counts from now, so it was no error when the request came first.
            row, window_ms = queued(check, self._subject, structs.replace(message, expires_at=None), body, headers)
            late = error
        digest = _digest(b"one", self._subject.encode(), _encode(message), body)
        before = None if message.key is None else self._latest.get(message.key)

        async def sent() -> Receipt:
            if claims and message.key is not None:
                await self._claim(key, digest)
            if before is not None:
                # A message is decided about after those with its key that stand before it.
                await asyncio.wait([before])
            told = await self._sends.send(key, digest, row, window_ms, late)
            if told.receipt is None:
                raise _other()
            return told.receipt

        task = asyncio.get_running_loop().create_task(sent())
        if message.key is not None:
            self._latest[message.key] = task
            task.add_done_callback(partial(self._ended, message.key))
        return task

    def _ended(self, key: str, task: asyncio.Task[Receipt]) -> None:
        if self._latest.get(key) is task:
            del self._latest[key]


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join([b"%d:%b" % (len(part), part) for part in parts])).digest()


def _other() -> Refusal:
    return Refusal(
        422,
        "other_request",
        "this Idempotency-Key was used for another request within 24 h; nothing was done: repeat a request as it was,"
        " and give each new one a key of its own",
    )
