"""Acks: words about messages on their way, gathered into requests; one request is under way for each kind of word.

Words that nobody waits for are gathered for LINGER_MS first, because each request costs the server a write and an
fsync, however few messages it names.

Invariants: a waiting caller is told that its word counts only when that is durable, and hears of no other word. A
failure for which nobody waits is logged, and kept until the next flush or close (rule Q1).
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from delayd.batch.labels import ERROR_BYTES_MAX, REASON_BYTES_MAX, cut_text
from delayd.batch.names import LEASE_MS_MAX
from delayd.client.limits import is_number, need_text, need_timedelta, need_whole
from delayd.client.routing import RetryWaits, spread_ms, unreadable
from delayd.errors import (
    BadArgument,
    BadRequest,
    BadSetting,
    CallerError,
    DataError,
    DelaydError,
    RequestFailed,
    RequestTimedOut,
    RetryLater,
    StaleHandle,
)
from delayd.machine.operating import LogLimit
from delayd.net.connection import Connection
from delayd.wire.consuming import SAID, StaleRow, Why, read_stale
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType

# At most 100 requests a second; acknowledgements that a killed consumer has not sent are lost, and the messages come
# again.
LINGER_MS = 10.0
HANDLES_MAX = 8_192  # One request has at most this many: at most 27 bytes each, far below the limit of a head.

FAILURES_MAX = 1_000  # So many are kept; further ones are counted.
ROWS_MAX = 150  # The same where each has an error and a reason: at most 6,150 bytes.

limited = LogLimit(logging.getLogger(__name__))

Handles = list[list[Any]]
"""Each is [incarnation, pull_first, count]. Behind these three stands the number of its place where subjects are many,
or what else the row of a RETRY or REJECT has.
"""


class Naming(Protocol):
    """How requests name what they acknowledge."""

    handles_max: int  # One request has no more.

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


class Failures:
    """Why words failed that nobody waited for. Each is logged at once, and the first is raised by a later call."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names
        self._kept: deque[DelaydError] = deque()
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def add(self, error: DelaydError) -> None:
        """Keep a failure; on the loop."""
        limited.warning(
            f"not_acknowledged {self._names}",
            "not_acknowledged subject=%s group=%s code=%s reason=%r",
            *self._names,
            error.code,
            error.message,
        )
        if len(self._kept) < FAILURES_MAX:
            self._kept.append(error)
        else:
            self._more += 1

    def raise_first(self) -> None:
        """Raise the first failure, once, if there is one. From any thread: single steps of a deque need no lock."""
        try:
            first = self._kept.popleft()
        except IndexError:
            return
        more, self._more = self._more, 0
        while self._kept:
            self._kept.popleft()
            more += 1
        if more:
            first.add_note(f"{more} further requests to acknowledge failed since the last call")
        raise first


class HandleSet:
    """Messages by their handles, as ranges of pull sequences; each step costs the logarithm of the ranges."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[list[int], list[int]]] = {}  # By incarnation: where ranges start, and where they end.

    def add(self, handles: Handles) -> None:
        """Put messages in."""
        for incarnation, first, count, *_ in handles:
            starts, ends = self._of.setdefault(incarnation, ([], []))
            start, end = first, first + count
            low, high = bisect.bisect_left(ends, start), bisect.bisect_right(starts, end)
            if low < high:
                start, end = min(start, starts[low]), max(end, ends[high - 1])
            starts[low:high] = [start]
            ends[low:high] = [end]

    def meets(self, handles: Handles) -> bool:
        """Whether any of these messages is in."""
        for incarnation, first, count, *_ in handles:
            starts, ends = self._of.get(incarnation, ((), ()))
            at = bisect.bisect_right(ends, first)
            if at < len(starts) and starts[at] < first + count:
                return True
        return False


class Way(NamedTuple):
    """How words get to their server."""

    standing: Callable[[], Connection | None]
    """The connection, if there is one on which words may be said now."""
    connection: Callable[[], Awaitable[Connection]]
    """The same, made if need be."""


class _Said(NamedTuple):
    """One word of a caller; ``durable`` is there when the caller waits."""

    handles: Handles
    durable: asyncio.Future[None] | None


class _AckRound:
    """Words that travel together."""

    def __init__(self) -> None:
        self.said: list[_Said] = []
        self.until_s = 0.0  # The time of the word that was said last is over then.
        self._known = HandleSet()
        self._known_count = 0

    def meets(self, handles: Handles) -> bool:
        """Whether one of its words names one of these messages."""
        # Most words are never asked about, so they are put into the set only now.
        for said in self.said[self._known_count :]:
            self._known.add(said.handles)
        self._known_count = len(self.said)
        return self._known.meets(handles)


class AckLane:
    """ACK, NACK, RETRY, REJECT or EXTEND of one group name; belongs to a loop."""

    def __init__(
        self,
        request: RequestType,
        naming: Naming,
        way: Way,
        timeout_ms: float,
        failures: Failures,
        on_answer: Callable[[Head], None],
    ) -> None:
        self._request = request
        self._naming = naming
        self._way = way
        self._on_answer = on_answer
        self._timeout_s = timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._next = _AckRound()
        self._under_way: _AckRound | None = None
        self._trouble: DelaydError | None = None  # Why the newest try of the words under way failed.
        self._waits = False  # Whether a caller waits for a word of the next round.
        self._lingering: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._failures = failures

    @property
    def is_idle(self) -> bool:
        """Whether nothing is gathered or under way."""
        return self._sending is None and not self._next.said

    @property
    def keeps_order(self) -> bool:
        """Whether later words about the same messages wait for those of this lane."""
        return self._request is not RequestType.EXTEND

    async def next_round(self) -> None:
        """Wait until the words that are under way have their answers, or those that are gathered."""
        await asyncio.wait([self._start()])

    def meets(self, handles: Handles) -> bool:
        """Whether a word about one of these messages is gathered or under way."""
        under_way = self._under_way
        return self._next.meets(handles) or (under_way is not None and under_way.meets(handles))

    def give(self, handles: Handles) -> None:
        """Say this soon; a failure is added to the failures."""
        self._next.said.append(_Said(handles, None))
        self._next.until_s = self._loop.time() + self._timeout_s
        if self._sending is None and self._lingering is None:
            self._lingering = self._loop.call_later(LINGER_MS / 1000, self._start)

    def give_and_wait(self, handles: Handles) -> asyncio.Future[None]:
        """Say this now: done when it is durable.

        Raises:
            StaleHandle: the server does not hold some of them any more; the others are acknowledged.
            DelaydError: the server could not be reached in time, or refused.
        """
        durable: asyncio.Future[None] = self._loop.create_future()
        self.pass_on(handles, durable, self._loop.time() + self._timeout_s)
        return durable

    def pass_on(self, handles: Handles, durable: asyncio.Future[None] | None, until_s: float) -> None:
        """As `give` or `give_and_wait`, for a word whose time is over at ``until_s``."""
        if durable is None:
            self.give(handles)
            return
        # A word waits for the round before it, and its time counts from when it was said.
        over = self._loop.call_at(until_s, self._give_up, durable)
        durable.add_done_callback(lambda _: over.cancel())
        self._next.said.append(_Said(handles, durable))
        self._next.until_s = self._loop.time() + self._timeout_s
        self._waits = True
        self._start()

    async def flush(self) -> None:
        """Wait until everything that was given is durable or failed."""
        while not self.is_idle:
            await asyncio.wait([self._start()])

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
            await self._send_round()
            while self._waits:
                await self._send_round()
        finally:
            self._sending = None
            if self._next.said:
                self._lingering = self._loop.call_later(LINGER_MS / 1000, self._start)

    async def _send_round(self) -> None:
        round_, self._next, self._waits = self._next, _AckRound(), False
        self._under_way = round_
        self._trouble = None
        try:
            await self._deliver(round_.said, round_.until_s)
        finally:
            self._under_way = None

    async def _deliver(self, said: Sequence[_Said], until_s: float) -> None:
        """Send words, and tell the callers of each what became of it."""
        handles = self._naming.merged([handle for each in said for handle in each.handles])
        error: DelaydError | None = None
        stale: list[StaleRow] = []
        try:
            for start in range(0, len(handles), self._naming.handles_max):
                stale += await self._send(handles[start : start + self._naming.handles_max], until_s)
        except DelaydError as failure:
            error = failure
        if len(said) > 1 and isinstance(error, CallerError | DataError):
            # A server refuses a whole request for one of its words. What was done already is answered as done again.
            half = len(said) // 2
            await self._deliver(said[:half], until_s)
            await self._deliver(said[half:], until_s)
            return
        self._tell(said, StaleRows(stale), error)

    async def _send(self, handles: Handles, until_s: float) -> list[StaleRow]:
        backoff = RetryWaits()
        while True:
            try:
                connection = await self._connect(until_s)
                head = self._naming.head(handles)
                left_ms = max((until_s - self._loop.time()) * 1000, 1)
                answer = await connection.request(self._request, head, timeout_ms=left_ms)
                try:
                    stale = read_stale(answer.head)
                    self._on_answer(answer.head)
                except BadRequest as error:
                    raise unreadable(connection, error) from error
                return stale
            except (RequestFailed, RetryLater) as error:
                self._trouble = error
                # To acknowledge twice is to acknowledge once, so after an unknown outcome the request is simply sent
                # again.
                later = isinstance(error, RetryLater)
                wait_s = (spread_ms(error.retry_after_ms) if later else backoff.next_ms()) / 1000
                if self._loop.time() + wait_s >= until_s:
                    raise
            await asyncio.sleep(wait_s)

    def _give_up(self, durable: asyncio.Future[None]) -> None:
        if not durable.done():
            late = RequestTimedOut(f"the realtime server did not answer {self._request.name} in time", sent=True)
            durable.set_exception(self._trouble or late)

    async def _connect(self, until_s: float) -> Connection:
        standing = self._way.standing()
        if standing is not None:
            return standing
        try:
            async with asyncio.timeout_at(until_s):
                return await self._way.connection()
        except TimeoutError:
            raise RequestTimedOut("no connection to the realtime server was made in time", sent=False) from None

    def _tell(self, said: Sequence[_Said], stale: StaleRows, error: DelaydError | None) -> None:
        unwatched: Handles = []
        for one in said:
            if one.durable is None:
                unwatched += one.handles
            elif not one.durable.done():
                lost = error or stale.of(one.handles)
                if lost is None:
                    one.durable.set_result(None)
                else:
                    one.durable.set_exception(lost)
        failure = (error or stale.of(unwatched)) if unwatched else None
        if failure is not None:
            self._failures.add(failure)


class StaleRows:
    """What answers said of stale handles; each question costs the logarithm of the rows, and the rows that it meets."""

    def __init__(self, rows: Iterable[StaleRow]) -> None:
        self._of: dict[int, list[StaleRow]] = {}
        for row in sorted(rows):
            self._of.setdefault(row[0], []).append(row)

    def of(self, handles: Handles) -> StaleHandle | None:
        """The error for a word about these messages; None when it counted for all of them."""
        return stale_error(row for handle in handles for row in self._within(handle)) if self._of else None

    def _within(self, handle: Sequence[int]) -> Iterator[StaleRow]:
        incarnation, first, count, *_ = handle
        rows = self._of.get(incarnation, [])
        # The row before may reach into the handle.
        at = max(bisect.bisect_left(rows, [incarnation, first]) - 1, 0)
        while at < len(rows) and rows[at][1] < first + count:
            _, begin, covered, why = rows[at]
            start, end = max(first, begin), min(first + count, begin + covered)
            if start < end:
                yield [incarnation, start, end - start, why]
            at += 1


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


def stale_error(rows: Iterable[StaleRow]) -> StaleHandle | None:
    """The error that says what was stale; None when nothing was."""
    lost: Counter[int] = Counter()
    handles = list(rows)
    for *_, count, why in handles:
        lost[why] += count
    if not lost:
        return None
    (most, _), *_ = lost.most_common(1)
    total = lost.total()
    were = "1 message was" if total == 1 else f"{total} messages were"
    parts = [f"{count} {SAID[Why(why)].text}" for why, count in lost.most_common()]
    then = "what was not acknowledged is offered again"
    if lost.keys() <= {Why.GIVEN_BACK, Why.ACKNOWLEDGED}:
        then = "a message gets one word, and another one after it changes nothing"
    error = StaleHandle(
        f"{were} no longer held for this consumer: {', '.join(parts)}; {then}", count=total, reason=SAID[Why(most)].word
    )
    error.handles = handles
    return error


DELAY_MAX = timedelta(days=732)
LEASE_MIN, LEASE_MAX = timedelta(seconds=0.1), timedelta(milliseconds=LEASE_MS_MAX)
_MS = timedelta(milliseconds=1)


class WordKind(Enum):
    """What is to become of messages."""

    ACK = "ack"
    NACK = "nack"  # They come again at once.
    RETRY = "retry"  # They come again later, through their delay server.
    REJECT = "reject"  # They are kept as dead letters.
    EXTEND = "extend"  # They are held for longer.


class Word(NamedTuple):
    """What is to become of messages, and why."""

    kind: WordKind
    delay_ms: int = 0  # With EXTEND it is the lease.
    reason: str = ""
    error: str = ""
    jitter: float = 0.0  # RETRY shortens the delay of each message by up to this share, at random.

    @property
    def is_of_one(self) -> bool:
        """Whether its requests name one subject each."""
        return self.kind not in (WordKind.ACK, WordKind.NACK)

    def rows(self, handles: Handles) -> Handles:
        """The rows of a request for these handles."""
        if self.kind is WordKind.RETRY and self.jitter:
            return [
                [incarnation, sequence, 1, *place, shortened(self.delay_ms, self.jitter), self.error]
                for incarnation, first, count, *place in handles
                for sequence in range(first, first + count)
            ]
        if self.kind is WordKind.RETRY:
            return [[*handle, self.delay_ms, self.error] for handle in handles]
        if self.kind is WordKind.REJECT:
            return [[*handle, self.reason, self.error] for handle in handles]
        return handles


ACK, NACK = Word(WordKind.ACK), Word(WordKind.NACK)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long messages that are given back wait before they come again: ``first`` after the first attempt, twice as
    long after each further one, and at most ``most``. Each wait is shortened at random by up to the share ``jitter``,
    so that messages which failed together do not come again together.

    >>> Consumer(..., backoff=delayd.Backoff(first=timedelta(seconds=5), most=timedelta(minutes=10)))
    """

    first: timedelta = timedelta(seconds=1)
    most: timedelta = timedelta(hours=1)
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for name in ("first", "most"):
            if not _MS <= need_timedelta(name, getattr(self, name), BadSetting) <= DELAY_MAX:
                raise BadSetting(f"{name} of a back-off is 1 ms to {DELAY_MAX.days} days")
        if not is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise BadSetting(f"jitter of a back-off is a share of 0 to 1, not {self.jitter!r:.100}")

    def longest_ms(self, attempt: int) -> int:
        """The longest wait after that attempt, which counts from 1."""
        need_whole("attempt", attempt, 1)
        return int(min(self.most / _MS, self.first / _MS * 2.0 ** min(attempt - 1, 60)))

    def delay_ms(self, attempt: int) -> int:
        """A wait after that attempt, shortened at random."""
        return shortened(self.longest_ms(attempt), self.jitter)


def shortened(wait_ms: int, jitter: float) -> int:
    """A wait that is shortened at random by up to the share ``jitter``."""
    return max(1, int(wait_ms * (1 - jitter * random.random())))


def later(delay: timedelta | None, error: str, backoff: Backoff, attempt: int) -> Word:
    """The word for messages that come again after ``delay``; None: after the back-off."""
    text = _text("error", error, ERROR_BYTES_MAX)
    if delay is None:
        return Word(WordKind.RETRY, max(1, backoff.longest_ms(attempt)), error=text, jitter=backoff.jitter)
    if not timedelta(0) <= need_timedelta("delay", delay) <= DELAY_MAX:
        raise BadArgument(f"delay is {delay}; a message comes again after 0 s to {DELAY_MAX.days} days")
    if not delay and not text:
        return NACK
    return Word(WordKind.RETRY, -(-delay // _MS), error=text)


def extended(lease: timedelta) -> Word:
    """The word for messages that are held for ``lease`` from now on."""
    if not LEASE_MIN <= need_timedelta("lease", lease) <= LEASE_MAX:
        raise BadArgument(f"lease is {lease}; a message is held for 0.1 s to 12 hours from now on")
    return Word(WordKind.EXTEND, lease // _MS)


def rejected(reason: str, error: str) -> Word:
    """The word for messages that become dead letters."""
    text = _text("reason", reason, REASON_BYTES_MAX)
    if not text:
        raise BadArgument("reason is empty; say why the message is rejected: message.reject('no such order')")
    return Word(WordKind.REJECT, reason=text, error=_text("error", error, ERROR_BYTES_MAX))


def _text(name: str, value: str, bytes_max: int) -> str:
    return cut_text(need_text(name, value), bytes_max)
