"""Acks: acknowledgements on their way, gathered into ranges; one request is under way for each of ack, nack and giving
back.

Acknowledgements that nobody waits for are gathered for LINGER_MS first, because each request costs the server a write
and an fsync, however few messages it names.

Invariant: a waiting caller is told that its messages are acknowledged only when that is durable. A failure for which
nobody waits is kept until the next call (rule Q1).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from delayd.client.link import unreadable
from delayd.client.retry import Backoff, spread_ms
from delayd.errors import BadRequest, DelaydError, RequestFailed, RetryLater, StaleHandle
from delayd.net.connection import Connection
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType
from delayd.wire.stale import SAID, Why, read_stale

# At most 100 requests a second; acknowledgements that a killed consumer has not sent are lost, and the messages come
# again.
LINGER_MS = 10.0
HANDLES_MAX = 8_192  # One request has at most this many: at most 27 bytes each, far below the limit of a head.

ROWS_MAX = 200  # The same where each has texts: of at most 2,000 bytes each, two of them.

Handles = list[list[Any]]
"""Each is [incarnation, pull_first, count]. Behind these three stands the number of its place where subjects are many,
or what else the row of a RETRY or REJECT has.
"""


class Naming(Protocol):
    """How requests name what they acknowledge."""

    handles_max: int  # Of one request.

    def merged(self, handles: Handles) -> Handles:
        """The same messages in the fewest handles."""

    def head(self, handles: Handles) -> Head:
        """The head of a request with handles that were merged."""


class OneSubject:
    """Handles of one group of one subject; ``names`` are the fields that each request has."""

    handles_max = HANDLES_MAX

    def __init__(self, names: Mapping[str, HeadValue]) -> None:
        self._names = names

    def merged(self, handles: Handles) -> Handles:
        """See Naming."""
        return merge(handles)

    def head(self, handles: Handles) -> Head:
        """See Naming."""
        return {**self._names, "handles": handles}


class OneLater:
    """Rows of RETRY or REJECT, in the field of that name; each has its own delay or reason."""

    handles_max = ROWS_MAX

    def __init__(self, names: Mapping[str, HeadValue], field: str) -> None:
        self._names = names
        self._field = field

    def merged(self, handles: Handles) -> Handles:
        """See Naming. What was said first of a message counts, for a request names none twice."""
        rows = sorted(handles, key=lambda row: row[:2])
        if all(row[0] != after[0] or row[1] + row[2] <= after[1] for row, after in pairwise(rows)):
            return handles
        said: set[tuple[int, int]] = set()
        kept: Handles = []
        for incarnation, first, count, *words in handles:
            for sequence in range(first, first + count):
                if (incarnation, sequence) not in said:
                    said.add((incarnation, sequence))
                    last = kept[-1] if kept else None
                    if (
                        last is not None
                        and last[0] == incarnation
                        and last[1] + last[2] == sequence
                        and last[3:] == words
                    ):
                        last[2] += 1
                    else:
                        kept.append([incarnation, sequence, 1, *words])
        return kept

    def head(self, handles: Handles) -> Head:
        """See Naming."""
        return {**self._names, self._field: [*handles]}


class AckLane:
    """ACK, NACK, RETRY or REJECT of one group name; belongs to a loop."""

    def __init__(
        self,
        request: RequestType,
        naming: Naming,
        connection: Callable[[], Awaitable[Connection]],
        timeout_ms: float,
        failures: deque[DelaydError],
        on_answer: Callable[[Head], None],
    ) -> None:
        self._request = request
        self._naming = naming
        self._connection = connection
        self._on_answer = on_answer
        self._timeout_s = timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._gathered: Handles = []
        self._waiting: list[_Waiting] = []
        self._lingering: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._failures = failures

    @property
    def is_idle(self) -> bool:
        """Whether nothing is gathered or under way."""
        return self._sending is None and not self._gathered and not self._waiting

    def give(self, handles: Handles) -> None:
        """Acknowledge soon; a failure is added to the failures."""
        self._gathered.extend(handles)
        self._linger()

    def give_and_wait(self, handles: Handles) -> asyncio.Future[None]:
        """Acknowledge now: done when it is durable.

        Raises:
            StaleHandle: the server does not hold some of them any more; the others are acknowledged.
            DelaydError: the server could not be reached in time, or refused.
        """
        durable: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(_Waiting(handles, durable))
        self._start()
        return durable

    async def flush(self) -> None:
        """Wait until everything that was given is durable or failed."""
        while self._gathered or self._sending is not None:
            await asyncio.wait([self._start()])

    def _linger(self) -> None:
        if self._sending is None and self._lingering is None:
            self._lingering = self._loop.call_later(LINGER_MS / 1000, self._start)

    def _start(self) -> asyncio.Task[None]:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._sending is None:
            self._sending = self._loop.create_task(self._send_all())
        return self._sending

    async def _send_all(self) -> None:
        """Send what was given, again and again while somebody waits."""
        try:
            await self._send_gathered()
            while self._waiting:
                await self._send_gathered()
        finally:
            self._sending = None
            if self._gathered:
                self._linger()

    async def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        waiting, self._waiting = self._waiting, []
        handles = self._naming.merged([*gathered, *(handle for one in waiting for handle in one.handles)])
        error: DelaydError | None = None
        stale: Handles = []
        try:
            for start in range(0, len(handles), self._naming.handles_max):
                stale += await self._send(handles[start : start + self._naming.handles_max])
        except DelaydError as failure:
            error = failure
        self._tell(gathered, waiting, stale, error)

    async def _send(self, handles: Handles) -> Handles:
        deadline = self._loop.time() + self._timeout_s
        backoff = Backoff()
        while True:
            try:
                connection = await self._connection()
                head = self._naming.head(handles)
                left_ms = max((deadline - self._loop.time()) * 1000, 1)
                answer = await connection.request(self._request, head, timeout_ms=left_ms)
                try:
                    stale = read_stale(answer.head)
                    self._on_answer(answer.head)
                except BadRequest as error:
                    raise unreadable(connection, error) from error
                return stale
            except (RequestFailed, RetryLater) as error:
                # To acknowledge twice is to acknowledge once, so after an unknown outcome the request is simply sent
                # again.
                later = isinstance(error, RetryLater)
                wait_s = (spread_ms(error.retry_after_ms) if later else backoff.next_ms()) / 1000
                if self._loop.time() + wait_s >= deadline:
                    raise
            await asyncio.sleep(wait_s)

    def _tell(self, gathered: Handles, waiting: Sequence[_Waiting], stale: Handles, error: DelaydError | None) -> None:
        for one in waiting:
            lost = error or _stale(one.handles, stale)
            if one.durable.done():
                continue
            if lost is None:
                one.durable.set_result(None)
            else:
                one.durable.set_exception(lost)
        failure = error or _stale(gathered, stale)
        if gathered and failure is not None:
            self._failures.append(failure)


class _Waiting(NamedTuple):
    handles: Handles
    durable: asyncio.Future[None]


def raise_first(failures: deque[DelaydError]) -> None:
    """Raise what failed while nobody waited, once; from any thread, because single operations on a deque need no
    lock.
    """
    first = failures.popleft()
    more = 0
    while failures:
        failures.popleft()
        more += 1
    if more:
        first.add_note(f"{more} further requests to acknowledge failed since the last call")
    raise first


def merge(handles: Handles) -> Handles:
    """The same messages in the fewest ranges, rising."""
    merged: Handles = []
    for incarnation, first, count in sorted(handles):
        last = merged[-1] if merged else None
        if last is not None and last[0] == incarnation and first <= last[1] + last[2]:
            last[2] = max(last[2], first + count - last[1])
        else:
            merged.append([incarnation, first, count])
    return merged


def _stale(handles: Handles, stale: Handles) -> StaleHandle | None:
    lost: Counter[int] = Counter()
    for incarnation, first, count, *_ in handles:
        for stale_incarnation, stale_first, stale_count, why in stale:
            common = min(first + count, stale_first + stale_count) - max(first, stale_first)
            if incarnation == stale_incarnation and common > 0:
                lost[why] += common
    if not lost:
        return None
    (most, _), *_ = lost.most_common(1)
    total = lost.total()
    were = "1 message was" if total == 1 else f"{total} messages were"
    parts = [f"{count} {SAID[Why(why)].text}" for why, count in lost.most_common()]
    return StaleHandle(
        f"{were} no longer held for this consumer: {', '.join(parts)}; what was not acknowledged is offered again",
        count=total,
        reason=SAID[Why(most)].word,
    )
