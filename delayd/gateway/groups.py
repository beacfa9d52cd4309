"""Groups: messages are pulled for a group of consumers, and each is held under a *lease*, a name that nobody can guess,
until the caller says what became of it or its time is over.

Invariant: nothing here must last. When this process ends, what it holds comes to the group again when the time of its
lease is over, as it does when a consumer dies. A lease belongs to the gateway that gave it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import msgspec

from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessage, AsyncMessageBatch
from delayd.errors import DelaydError
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.values import PULL_MAX, Extension, Follow, GivenBack, Leases, Pull, Unwanted, milliseconds, shown

CONSUMERS_MAX = 1_000  # Subjects and groups that are pulled from at one time; each has a connection.
IDLE_S = 60.0  # A consumer that nobody asks for so long is closed.
HELD_MAX = 100_000  # Messages that are held at one time.
LEASE_BYTES, LEASE_CHARS = 15, 20  # In base64, which has four characters for three bytes.
QUIET_MS = 15_000  # Proxies end a line on which nothing goes for longer.
LOOK_S = 0.05  # How often a stream whose listener holds enough looks for words about it.

_encode = msgspec.json.Encoder().encode


class _Whose(NamedTuple):
    subject: str
    group: str
    lease_ms: int


@dataclass(slots=True)
class _Puller:
    consumer: AsyncConsumer
    used_at: float = 0.0
    pulls: int = 0  # Under way.


class _Held(NamedTuple):
    message: AsyncMessage
    ends_at: float


class Groups:
    """What this process has pulled; belongs to one loop."""

    def __init__(self, new_consumer: Callable[[str, str, timedelta], AsyncConsumer]) -> None:
        self._new_consumer = new_consumer
        self._pullers: dict[_Whose, _Puller] = {}
        self._held: dict[str, _Held] = {}
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """How many messages are held."""
        return len(self._held)

    def start(self) -> None:
        """Begin to forget what is over."""
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        """Give back what is held, and disconnect."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        held, self._held = list(self._held.values()), {}
        for each in held:
            # It comes to another consumer at once, in place of when its lease would end.
            await _quietly(each.message.nack(timedelta(0), wait=False))
        pullers, self._pullers = list(self._pullers.values()), {}
        await asyncio.gather(*(_quietly(puller.consumer.close()) for puller in pullers))

    async def pull(
        self, subject: str, group: str, wish: Pull, gone: Callable[[], Coroutine[None, None, None]]
    ) -> list[dict[str, object]]:
        """The next messages of a group; none when none came in time. ``gone`` returns when nobody waits for the answer
        any more; then the pull ends, and no message has an attempt less for it.
        """
        if len(self._held) + wish.max_messages > HELD_MAX:
            raise Refusal(
                429, "slow_down", f"{HELD_MAX} pulled messages are held; settle some first", {"Retry-After": "1"}
            )
        puller = self._puller(_Whose(subject, group, wish.lease_ms))
        puller.pulls += 1
        try:
            batch = await self._pulled(puller.consumer, wish, gone)
        finally:
            puller.pulls -= 1
            puller.used_at = time.monotonic()
        if batch is None:
            return []
        if batch.outage is not None:
            raise batch.outage
        ends_at = time.monotonic() + wish.lease_ms / 1_000
        # Random bytes for all leases cost one call of the system.
        drawn = secrets.token_urlsafe(LEASE_BYTES * len(batch))
        leases = [drawn[first : first + LEASE_CHARS] for first in range(0, len(drawn), LEASE_CHARS)]
        return [self._hold(*each, ends_at) for each in zip(leases, batch, strict=True)]

    async def follow(
        self, subject: str, group: str, wish: Follow, gone: Callable[[], Coroutine[None, None, None]]
    ) -> AsyncIterator[bytes]:
        """The messages of a group as server-sent events, until ``gone`` returns.

        An event has the lease as its id. While the caller has said nothing of ``max_held`` of them, no more are pulled.
        A comment goes out when none came for a while, so that nobody between takes the line for dead.
        """
        leaving = asyncio.get_running_loop().create_task(gone())
        mine: set[str] = set()
        try:
            yield b": follows\n\n"
            while not leaving.done():
                mine &= self._held.keys()
                room = wish.max_held - len(mine)
                if not room:
                    await asyncio.wait((leaving,), timeout=LOOK_S)
                    continue
                pull = Pull(max_messages=room, wait_ms=QUIET_MS, lease_ms=wish.lease_ms)
                try:
                    pulled = await self.pull(subject, group, pull, partial(_until, leaving))
                except (DelaydError, Refusal) as error:
                    yield b"event: problem\ndata: %b\n\n" % _encode(problem(error))
                    return
                mine.update(str(each["lease"]) for each in pulled)
                events = [b"id: %b\ndata: %b\n\n" % (str(each["lease"]).encode(), _encode(each)) for each in pulled]
                yield b"".join(events) or b": nothing\n\n"
        finally:
            leaving.cancel()

    async def _pulled(
        self, consumer: AsyncConsumer, wish: Pull, gone: Callable[[], Coroutine[None, None, None]]
    ) -> AsyncMessageBatch | None:
        """What a pull found; None when it was left before that."""
        loop = asyncio.get_running_loop()
        pulling = loop.create_task(consumer.pull(wish.max_messages, wait=milliseconds("wait_ms", wish.wait_ms)))
        leaving = loop.create_task(gone())
        try:
            await asyncio.wait((pulling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not pulling.done():
                return None
            if leaving.done():
                consumer.give_back(pulling.result())
                return None
            return pulling.result()
        finally:
            # A pull that is cancelled leaves its messages to the next one, or to the server.
            pulling.cancel()
            leaving.cancel()

    def _puller(self, whose: _Whose) -> _Puller:
        puller = self._pullers.get(whose)
        if puller is None:
            if len(self._pullers) >= CONSUMERS_MAX:
                raise Refusal(
                    429, "slow_down", f"{CONSUMERS_MAX} groups are pulled from; ask again later", {"Retry-After": "60"}
                )
            consumer = self._new_consumer(whose.subject, whose.group, milliseconds("lease_ms", whose.lease_ms))
            puller = self._pullers[whose] = _Puller(consumer)
        return puller

    def _hold(self, lease: str, message: AsyncMessage, ends_at: float) -> dict[str, object]:
        self._held[lease] = _Held(message, ends_at)
        return {"lease": lease, **shown(message)}

    # What is said of messages.

    async def ack(self, wish: Leases) -> list[dict[str, object]]:
        """The work on these messages is done; the answer for each comes when that is durable."""
        return await self._say(wish, lambda message: message.ack(), settles=True)

    async def nack(self, wish: GivenBack) -> list[dict[str, object]]:
        """Give these messages back."""
        delay = None if wish.delay_ms is None else milliseconds("delay_ms", wish.delay_ms)
        return await self._say(wish, lambda message: message.nack(delay, error=wish.error), settles=True)

    async def reject(self, wish: Unwanted) -> list[dict[str, object]]:
        """Keep these messages as dead letters."""
        return await self._say(wish, lambda message: message.reject(wish.reason, error=wish.error), settles=True)

    async def extend(self, wish: Extension) -> list[dict[str, object]]:
        """Hold these messages for longer, from now on."""
        length, ends_at = milliseconds("lease_ms", wish.lease_ms), time.monotonic() + wish.lease_ms / 1_000
        told = await self._say(wish, lambda message: message.extend(length), settles=False)
        for lease, each in zip(wish.leases, told, strict=True):
            if "code" not in each and lease in self._held:
                self._held[lease] = self._held[lease]._replace(ends_at=ends_at)
        return told

    async def _say(
        self, wish: Leases, say: Callable[[AsyncMessage], Awaitable[None]], *, settles: bool
    ) -> list[dict[str, object]]:
        async def one(lease: str) -> dict[str, object]:
            held = self._held.pop(lease, None) if settles else self._held.get(lease)
            if held is None:
                return problem(
                    Refusal(410, "stale_handle", "this gateway holds no such lease: it is over, or was settled")
                )
            try:
                await say(held.message)
            except DelaydError as error:
                if settles and held.ends_at > time.monotonic():
                    self._held[lease] = held  # Nobody knows whether it was heard; the caller may say it again.
                return problem(error)
            return {"lease": lease}

        told: list[dict[str, object]] = []
        for first in range(0, len(wish.leases), PULL_MAX):  # Many at once would hold others up.
            told += await asyncio.gather(*map(one, wish.leases[first : first + PULL_MAX]))
        return told

    async def _sweep(self) -> None:
        """Forget leases that are over, and close consumers that nobody asks."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for lease in [lease for lease, held in self._held.items() if held.ends_at <= now]:
                del self._held[lease]
            # What such a consumer has pulled can be settled all the same.
            for whose, puller in list(self._pullers.items()):
                if not puller.pulls and puller.used_at + IDLE_S <= now:
                    del self._pullers[whose]
                    await _quietly(puller.consumer.close())


async def _until(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))


async def _quietly(work: Awaitable[None]) -> None:
    """Wait for something whose failure changes nothing: leases end by themselves."""
    try:
        await work
    except DelaydError:
        return
