"""Groups: messages are pulled for a group of consumers, and each is held under a *lease*, a name that nobody can guess,
until the caller says what became of it or its time is over.

Invariant: nothing here must last. When this process ends, what it holds comes to the group again when the time of its
lease is over, as it does when a consumer dies. A lease belongs to the gateway that gave it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec

from delayd.client.pulling.acks import ACK, NACK, Handles, StaleRows, Word, extended, rejected
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.client.pulling.message import handle_at
from delayd.errors import DelaydError, StaleHandle
from delayd.gateway.connection import Listener
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.shared_pull import Share, SharedPull
from delayd.gateway.values import (
    PULL_MAX,
    Extension,
    Follow,
    GivenBack,
    Leases,
    Pull,
    PulledMessage,
    Unwanted,
    milliseconds,
    shown,
)

CONSUMERS_MAX = 1_000  # Subjects and groups that are pulled from at one time; each has a connection.
IDLE_S = 60.0  # A consumer that nobody asks for so long is closed.
HELD_MAX = 100_000  # Messages that are held at one time.
LEASE_BYTES, LEASE_CHARS = 15, 20  # In base64, which has four characters for three bytes.
QUIET_MS = 15_000  # Proxies end a line on which nothing goes for longer.
LOOK_S = 0.05  # How often a stream whose listener holds enough looks for words about it.
SWEEP_ROWS = 5_000  # Leases that are looked at in one turn of the loop, in some 2 ms.

NOT_HELD = Refusal(410, "stale_handle", "this gateway holds no such lease: it is over, or was settled")

_encode = msgspec.json.Encoder().encode


class _Whose(NamedTuple):
    subject: str
    group: str
    lease_ms: int


class _Held(NamedTuple):
    """What settles a message; its bytes are not kept here."""

    consumer: AsyncConsumer
    handle: list[int]
    attempt: int
    ends_at: float


class Groups:
    """What this process has pulled; belongs to one loop."""

    def __init__(self, new_consumer: Callable[[str, str, timedelta], AsyncConsumer]) -> None:
        self._new_consumer = new_consumer
        self._pulls: dict[_Whose, SharedPull] = {}
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
        by_consumer: dict[AsyncConsumer, Handles] = {}
        for held in self._held.values():
            by_consumer.setdefault(held.consumer, []).append(held.handle)
        self._held.clear()
        for consumer, handles in by_consumer.items():
            # They come to another consumer at once, in place of when their leases would end.
            await _quietly(consumer.settle(handles, False, NACK))
        pulls, self._pulls = list(self._pulls.values()), {}
        await asyncio.gather(*(_quietly(shared.close()) for shared in pulls))

    async def pull(self, subject: str, group: str, wish: Pull, listener: Listener) -> list[PulledMessage]:
        """The next messages of a group; none when none came in time. When the listener leaves the pull ends, and no
        message has an attempt less for it. Raises Refusal with the reason, when it has not left by itself.
        """
        if len(self._held) + wish.max_messages > HELD_MAX:
            raise Refusal(
                429, "slow_down", f"{HELD_MAX} pulled messages are held; settle some first", {"Retry-After": "1"}
            )
        shared = self._shared(_Whose(subject, group, wish.lease_ms))
        share = await shared.take(wish.max_messages, wish.wait_ms / 1_000, listener)
        if share is None:
            if listener.why is not None:
                raise listener.why
            return []
        return self._hold(shared.consumer, share, time.monotonic() + wish.lease_ms / 1_000)

    async def follow(self, subject: str, group: str, wish: Follow, caller: Listener) -> AsyncIterator[bytes]:
        """The messages of a group as server-sent events, until the caller leaves.

        An event has the lease as its id. While the caller has said nothing of ``max_held`` of them, no more are pulled.
        A comment goes out when none came for a while, so that nobody between takes the line for dead.
        """
        mine: set[str] = set()
        with caller as listener:
            yield b": follows\n\n"
            while not listener.is_gone:
                mine &= self._held.keys()
                room = wish.max_held - len(mine)
                if not room:
                    await asyncio.wait((listener.future(),), timeout=LOOK_S)
                    continue
                pull = Pull(max_messages=room, wait_ms=QUIET_MS, lease_ms=wish.lease_ms)
                try:
                    pulled = await self.pull(subject, group, pull, listener)
                except (DelaydError, Refusal) as error:
                    yield _problem_event(error)
                    return
                mine.update([each.name for each in pulled])
                events = [b"id: %b\ndata: %b\n\n" % (each.name.encode(), _encode(each)) for each in pulled]
                yield b"".join(events) or b": nothing\n\n"
            if listener.why is not None:
                yield _problem_event(listener.why)

    def _shared(self, whose: _Whose) -> SharedPull:
        shared = self._pulls.get(whose)
        if shared is None:
            if len(self._pulls) >= CONSUMERS_MAX:
                raise Refusal(
                    429, "slow_down", f"{CONSUMERS_MAX} groups are pulled from; ask again later", {"Retry-After": "60"}
                )
            consumer = self._new_consumer(whose.subject, whose.group, milliseconds("lease_ms", whose.lease_ms))
            shared = self._pulls[whose] = SharedPull(consumer)
        return shared

    def _hold(self, consumer: AsyncConsumer, share: Share, ends_at: float) -> list[PulledMessage]:
        batch, rows = share
        # Random bytes for all leases cost one call of the system.
        drawn = secrets.token_urlsafe(LEASE_BYTES * len(rows))
        leases = [drawn[first : first + LEASE_CHARS] for first in range(0, len(drawn), LEASE_CHARS)]
        pulled = shown(PulledMessage, leases, batch, rows)
        for message, row in zip(pulled, rows, strict=True):
            self._held[message.name] = _Held(consumer, handle_at(batch, row), message.attempt, ends_at)
        return pulled

    # What is said of messages.

    async def ack(self, wish: Leases) -> list[dict[str, object]]:
        """The work on these messages is done; the answer for each comes when that is durable."""
        return await self._say(wish, lambda held: ACK)

    async def nack(self, wish: GivenBack) -> list[dict[str, object]]:
        """Give these messages back."""
        delay = None if wish.delay_ms is None else milliseconds("delay_ms", wish.delay_ms)
        return await self._say(wish, lambda held: held.consumer.word_back(held.attempt, delay, wish.error))

    async def reject(self, wish: Unwanted) -> list[dict[str, object]]:
        """Keep these messages as dead letters."""
        return await self._say(wish, lambda held: rejected(wish.reason, wish.error))

    async def extend(self, wish: Extension) -> list[dict[str, object]]:
        """Hold these messages for longer, from now on."""
        length, ends_at = milliseconds("lease_ms", wish.lease_ms), time.monotonic() + wish.lease_ms / 1_000
        told = await self._say(wish, lambda held: extended(length), settles=False)
        for lease, each in zip(wish.leases, told, strict=True):
            if "code" not in each and lease in self._held:
                self._held[lease] = self._held[lease]._replace(ends_at=ends_at)
        return told

    async def _say(
        self, wish: Leases, word_of: Callable[[_Held], Word], *, settles: bool = True
    ) -> list[dict[str, object]]:
        """Say a word of each message, and tell what became of it."""
        told: list[dict[str, object]] = []
        for first in range(0, len(wish.leases), PULL_MAX):  # Many at once would hold others up.
            told += await self._say_some(wish.leases[first : first + PULL_MAX], word_of, settles=settles)
        return told

    async def _say_some(
        self, leases: Sequence[str], word_of: Callable[[_Held], Word], *, settles: bool
    ) -> list[dict[str, object]]:
        told: dict[int, dict[str, object]] = {}  # By the place of the lease in the request.
        by_word: dict[tuple[AsyncConsumer, Word], dict[int, _Held]] = {}
        for place, lease in enumerate(leases):
            held = self._held.get(lease)
            if held is None:
                told[place] = problem(NOT_HELD)
                continue
            try:
                by_word.setdefault((held.consumer, word_of(held)), {})[place] = held
            except DelaydError as error:
                told[place] = problem(error)
                continue
            if settles:
                del self._held[lease]
        words = [(consumer, word, of_word) for (consumer, word), of_word in by_word.items()]
        alone = len(words) == 1  # Then it needs no task of its own.
        for errors, (_, _, said) in zip(
            [await _said(*words[0])] if alone else await asyncio.gather(*(_said(*each) for each in words)),
            words,
            strict=True,
        ):
            for place, why in errors.items():
                told[place] = problem(why)
                held = said[place]
                if settles and not isinstance(why, StaleHandle) and held.ends_at > time.monotonic():
                    self._held[leases[place]] = held  # Nobody knows whether it was heard; the caller may say it again.
        return [told.get(place) or {"lease": lease} for place, lease in enumerate(leases)]

    async def _sweep(self) -> None:
        """Forget leases that are over, and close consumers that nobody asks."""
        while True:
            await asyncio.sleep(1.0)
            leases = [*self._held]
            for first in range(0, len(leases), SWEEP_ROWS):
                now = time.monotonic()
                for lease in leases[first : first + SWEEP_ROWS]:
                    held = self._held.get(lease)
                    if held is not None and held.ends_at <= now:
                        del self._held[lease]
                await asyncio.sleep(0)
            # What such a consumer has pulled can be settled all the same.
            unused = asyncio.get_running_loop().time() - IDLE_S
            for whose, shared in [*self._pulls.items()]:
                if shared.rests_since(unused):
                    del self._pulls[whose]
                    await _quietly(shared.close())


def _problem_event(error: Exception) -> bytes:
    return b"event: problem\ndata: %b\n\n" % _encode(problem(error))


async def _said(consumer: AsyncConsumer, word: Word, of_word: Mapping[int, _Held]) -> dict[int, DelaydError]:
    """Say a word of messages, durably; why it does not count for some of them, by their places."""
    try:
        await consumer.settle([held.handle for held in of_word.values()], True, word)
    except StaleHandle as error:
        stale = StaleRows(error.handles)
        lost = {place: stale.of([held.handle]) for place, held in of_word.items()}
        return {place: each for place, each in lost.items() if each is not None}
    except DelaydError as error:
        return dict.fromkeys(of_word, error)
    return {}


async def _quietly(work: Awaitable[None]) -> None:
    """Wait for something whose failure changes nothing: leases end by themselves."""
    try:
        await work
    except DelaydError:
        return
