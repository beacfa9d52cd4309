"""The app: which request goes where, and what its endpoints share.

Invariant: all that a gateway may be asked stands in one table (`delayd.gateway.operations`), from which paths and the
OpenAPI document are made.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp

from delayd.client.asking import ask
from delayd.client.instants import instant_ms
from delayd.client.producer import AsyncProducer, once_of
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.errors import DelaydError
from delayd.gateway import messages, sends, traces
from delayd.gateway.admin import AdminRoutes
from delayd.gateway.callers import Callers
from delayd.gateway.clock import MovableClock
from delayd.gateway.connection import Listener
from delayd.gateway.console.audit_folder import AuditFolder
from delayd.gateway.console.console import Console
from delayd.gateway.cron_routes import CronRoutes
from delayd.gateway.forecast import Forecasts
from delayd.gateway.front import Front, Paths, by_path
from delayd.gateway.groups import Groups
from delayd.gateway.metrics import page
from delayd.gateway.once import OnceRequests
from delayd.gateway.openapi import Endpoint
from delayd.gateway.operations import operations_of
from delayd.gateway.push import Push
from delayd.gateway.push_routes import PushRoutes
from delayd.gateway.sends import EVENTS, Lines, decoded, part, queried, query_of, read_body
from delayd.gateway.values import JSON, Follow, Leases, Pull, PulledMessages
from delayd.wire.exposition import MEDIA_TYPE
from delayd.wire.requests import RequestType

UNREACHED = timedelta(seconds=5)  # So long a request waits for servers that are not there; then it is a 503.
READY_S = 2.0  # Meta answers within it, or a probe hears that this gateway is not ready.
CLOSE_S = 3.0  # So long what is held is given back at a stop; POSTs of push that are under way may take 2 s of it.
WORDS_BYTES_MAX = 4 << 20  # A request that is no message may have so many; 10,000 leases are a few hundred KB.

_PULL = msgspec.json.Decoder(Pull)
_encode = msgspec.json.Encoder().encode

W = TypeVar("W", bound=Leases)


class Gateway:
    """What the routes share; belongs to one loop. Servers in memory have a ``clock`` that callers may move."""

    def __init__(
        self,
        meta: str,
        names: Sequence[str],
        push: Push,
        callers: Callers,
        clock: MovableClock | None = None,
        audits: AuditFolder | None = None,
    ) -> None:
        self.clock = clock
        self.callers = callers
        self.answered: Counter[tuple[str, int]] = Counter()
        # Names under which this gateway is asked; an address is always one.
        self.hosts = frozenset({"localhost", *map(str.lower, names)})
        self._meta = meta
        self._groups = Groups(self._consumer)
        self._push = push
        self.push = PushRoutes(push)
        self.forecasts = Forecasts(meta)
        self.admin = AdminRoutes(meta, push.secret)
        self.cron = CronRoutes(lambda: self.producer, self._now_ms)
        self.console = Console(meta, push, clock, callers, audits)
        self._producer: AsyncProducer | None = None
        self._once: OnceRequests | None = None
        self._stops = False
        self._listeners: set[Listener] = set()  # Callers of pulls and streams.

    def stop(self) -> None:
        """Pulls that wait and streams end now, as if nobody were there any more; they are answered."""
        self._stops = True
        for listener in self._listeners:
            listener.leave()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Connect with the first request, and give back at the end what is held."""
        async with AsyncProducer(self._meta, connect_timeout=UNREACHED) as producer:
            self._producer = producer
            self._once = OnceRequests(once_of(producer, self._meta))
            self._groups.start()
            self._push.start()
            await self.admin.start()
            self.console.start(producer, self.admin.asked)
            self.callers.start()
            try:
                yield
            finally:
                parts = self._groups.close(), self._push.close(), self.admin.close(), self.callers.close()
                with suppress(TimeoutError):  # Servers that have stopped, too, take nothing back; leases end then.
                    async with asyncio.timeout(CLOSE_S):
                        await asyncio.gather(*parts)

    @property
    def producer(self) -> AsyncProducer:
        """The producer of all requests."""
        assert self._producer is not None, "requests come after the start"
        return self._producer

    def _now_ms(self) -> int:
        return round(time.time() * 1_000) if self.clock is None else instant_ms(self.clock.now, "now")

    def _consumer(self, subject: str, group: str, lease: timedelta) -> AsyncConsumer:
        return AsyncConsumer(self._meta, subject, group, lease=lease, prefetch=False, connect_timeout=UNREACHED)

    async def send(self, request: Request) -> Response:
        """Messages are sent."""
        assert self._once is not None, "requests come after the start"
        listener_of = partial(self._listener, request)
        return await sends.send(self.producer, self._once, part(request, "subject"), request, listener_of)

    async def listed(self, request: Request) -> Response:
        """One message by its key, or all that are pending."""
        return await messages.listed(self.producer, request)

    async def get(self, request: Request) -> Response:
        """What became of a message."""
        return await messages.get(self.producer, messages.Named.of(request))

    async def cancel(self, request: Request) -> Response:
        """A message is ended before it is due."""
        return await messages.cancel(self.producer, messages.Named.of(request), request)

    async def move(self, request: Request) -> Response:
        """A message gets another instant."""
        return await messages.move(self.producer, messages.Named.of(request), request)

    async def trace(self, request: Request) -> Response:
        """The life of a message so far."""
        return await traces.trace(self.producer, self._meta, messages.Named.of(request))

    async def forecast(self, request: Request) -> Response:
        """How many messages of a subject come due in each period."""
        return await self.forecasts.of_subject(self.producer, request)

    async def pull(self, request: Request) -> Response:
        """Messages are pulled."""
        queried(request)
        wish = decoded(_PULL, await read_body(request, WORDS_BYTES_MAX) or b"{}")
        with self._listener(request) as listener:
            pulled = await self._groups.pull(part(request, "subject"), part(request, "group"), wish, listener)
        return Response(_encode(PulledMessages(messages=pulled)), media_type=JSON)

    async def follow(self, request: Request) -> Response:
        """Messages are pulled as long as somebody listens, and are events of one answer."""
        wish = query_of(request, Follow)
        listener = self._listener(request)
        return Lines(self._groups.follow(part(request, "subject"), part(request, "group"), wish, listener), EVENTS)

    def _listener(self, request: Request) -> Listener:
        listener = Listener(request, self._listeners)
        if self._stops:
            listener.leave()
        return listener

    def says(self, kind: type[W], say: Callable[[Groups, W], Awaitable[list[dict[str, object]]]]) -> Endpoint:
        """An endpoint to which callers say something of what they hold."""
        decoder = msgspec.json.Decoder(kind)

        async def said(request: Request) -> Response:
            queried(request)
            wish = decoded(decoder, await read_body(request, WORDS_BYTES_MAX))
            return Response(_encode({"results": await say(self._groups, wish)}), media_type=JSON)

        return said

    async def metrics(self, request: Request) -> Response:
        """What Prometheus reads."""
        return Response(await page(self._meta, self.answered, self._groups.held), media_type=MEDIA_TYPE)

    async def health(self, request: Request) -> Response:
        """This process serves; of the servers it says nothing."""
        return Response(b"ok\n", media_type="text/plain")

    async def ready(self, request: Request) -> Response:
        """Meta answers, so requests find their servers."""
        try:
            async with asyncio.timeout(READY_S), ask.meta(self._meta) as connection:
                await ask.ask(connection, RequestType.PING, {})
        except (DelaydError, TimeoutError) as error:
            return Response(f"meta at {self._meta} does not answer ({error})\n".encode(), 503, media_type="text/plain")
        return Response(b"ready\n", media_type="text/plain")


def app_of(gateway: Gateway) -> ASGIApp:
    """The whole app."""
    paths: dict[str, dict[str, Endpoint]] = {}
    for each in operations_of(gateway):
        paths.setdefault(each.path.replace("{subject}", "{subject:path}"), {})[each.method] = each.endpoint
    lifespan = Router(lifespan=gateway.lifespan)
    return Front(
        Paths([*paths.items(), *by_path(gateway.console.routes())]),
        gateway.callers,
        gateway.console.refused,
        gateway.hosts,
        lifespan,
        gateway.answered,
    )
