"""Walking: goes through the pending messages of a subject and a window, and through the lives of one.

Pages hands them to the caller (docs/clients.md, What is pending); `Walker` ends or moves them, on all delay servers, a
piece at a time; `Follower` says where a message is now that a group gave back (docs/clients.md, Follow a message that
comes again):

     the receipt of a send ─▶ GET: handed over to realtime server T     its group at T has the retry subject s
                                                                         │
     the delay server of the receipt ─▶ FIND s, origin=sequence  ◀───────┘  ─▶ the message as it waits there

Invariants: a message that is pending from the first page to the last one, and is not moved, is on one page. One counts
as cancelled or moved only when its server has said so. What is told about a life is told about the message of that
receipt, in that group, and about no other one.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.labels import DEAD_TAG, Headers, decode_headers, decode_tags, encode_tags
from delayd.client.asking.ask import find_group
from delayd.client.asking.messages import (
    CANCEL,
    GET,
    RESCHEDULE,
    AskedOne,
    AskedRows,
    Asker,
    MessageInfo,
    NewInstants,
    asked_of,
    info_of,
    window_behind,
)
from delayd.client.engine import LoopThread, told
from delayd.client.instants import instant_ms
from delayd.client.limits import check_subject, need_bool, need_callable, need_text, need_timedelta, need_whole
from delayd.client.sending.receipts import Receipt, ReceiptColumns
from delayd.errors import BadArgument, DelaydError, LogId
from delayd.hours import HOUR_MS, INSTANT_MS_MAX, INSTANT_MS_MIN
from delayd.outcome import MessageState
from delayd.wire.asked import ROWS_MAX, AskedWindow, CancelAnswer, Content, Piece, Place, RescheduleAnswer

WHOLE_ROWS_MIN = 64  # So many messages with their bodies are asked for at least.
WHOLE_ROWS_FIRST = 4_096  # And so many first: a piece full of messages of 1 KB.
TAGGED_ROWS = 8_192  # A server looks at so many for a short page at least when few of them may have the tag.

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
Page = TypeVar("Page", bound=Sized)
PageOf = Callable[[int, Piece], Page]  # Makes a page of a server's log_id, and its piece of the walk.


class PendingMessage(NamedTuple):
    """One message that is pending.

    Fields:
        receipt: `cancel`, `reschedule` and `get` take it. Its ``accepted_at_ms`` is an instant of the hour in which the
            message is filed, and not exact.
        key: None when it was sent without one.
        tags: in the order in which they were given.
        size: bytes of its body.
        headers: None unless the contents were asked for.
        body: None unless the contents were asked for.
        expires_at_ms: from then on it is not delivered, in ms since the epoch; None: never.
        ordered: it was sent with an ordering key, of which servers keep a digest only.
    """

    receipt: Receipt
    key: str | None
    tags: tuple[str, ...]
    size: int
    headers: Headers | None
    body: bytes | None
    expires_at_ms: int | None = None
    ordered: bool = False

    @property
    def deliver_at(self) -> datetime:
        """When it is due, in UTC."""
        return self.receipt.deliver_at


@dataclass(frozen=True, eq=False)
class PendingPage(ReceiptColumns):
    """Pending messages of one delay server, as columns. Iterate to get `PendingMessage` objects.

    `cancel_batch`, `reschedule_batch` and `get_batch` take a page as they take the receipt of a `send_batch`.

    Fields, beside those of `ReceiptColumns`:
        sizes: int64[n], the bytes of each body.
        in_flight: messages that are being handed over at this moment; they are not on the page.
        unread: files or batches of the server that can't be read, so that messages may be missing. `delayd status`
            says what is damaged.
    """

    sizes: Int64s
    in_flight: int
    unread: int
    _batch: Batch | None
    _whole: bool

    def __iter__(self) -> Iterator[PendingMessage]:
        nothing = [None] * len(self)
        bodies, headers = (self.bodies, self.headers) if self._whole else (nothing, nothing)
        expiries = [value or None for value in self._numbers(ColumnId.EXPIRES_AT_MS)]
        ordered = [value != 0 for value in self._numbers(ColumnId.ORDERING_KEY_HASH)]
        labels = self.receipts(), self.keys, self.tags, self.sizes.tolist()
        for row in zip(*labels, headers, bodies, expiries, ordered, strict=True):
            yield PendingMessage(*row)

    @cached_property
    def keys(self) -> list[str | None]:
        """The key of each message; None where it has none."""
        return [bytes(item).decode() or None for item in self._items(ColumnId.KEY_END)]

    @cached_property
    def tags(self) -> list[tuple[str, ...]]:
        """The tags of each message."""
        return [decode_tags(bytes(item)) for item in self._items(ColumnId.TAGS_END)]

    @cached_property
    def bodies(self) -> list[bytes]:
        """The body of each message; no bytes unless the contents were asked for."""
        return [bytes(item) for item in self._items(ColumnId.BODY_END)]

    @cached_property
    def headers(self) -> list[Headers]:
        """The headers of each message; empty unless the contents were asked for."""
        return [decode_headers(bytes(item)) for item in self._items(ColumnId.HEADERS_END)]

    def _numbers(self, column: ColumnId) -> list[int]:
        if self._batch is None or column not in self._batch:
            return [0] * len(self)
        found: list[int] = self._batch.column(column)[: len(self)].tolist()
        return found

    def _items(self, column: ColumnId) -> Iterator[memoryview]:
        batch, count = self._batch, len(self)  # A page that was cut has fewer messages than its batch.
        if batch is None or column not in batch:
            yield from [memoryview(b"")] * count
            return
        heap = batch.heap
        starts, ends = batch.region(column)
        for start, end in zip(starts[:count].tolist(), ends[:count].tolist(), strict=True):
            yield heap[start:end]


class Pages(Generic[Page]):
    """The pages of one walk, in an event loop: ``async for``, one server after another.

    Fields:
        found: messages on the pages so far.
        in_flight: messages that were being handed over, so far.
        unread: see `PendingPage`, so far.
        resume: where the walk goes on behind the pages so far, in one word; empty behind the last page.
    """

    def __init__(
        self,
        messages: Asker,
        window: AskedWindow,
        page_of: PageOf[Page],
        one: AskedRows | None = None,
        page_size: int | None = None,
        resume: str | None = None,
    ) -> None:
        """``window`` says what the pages are to have; ``one`` chooses one message."""
        self.found = self.in_flight = self.unread = 0
        self._messages = messages
        self._from, self._window = _place_of(resume, window)
        self._one = one
        self._page_of = page_of
        self._page_size = page_size
        self._servers: list[int] | None = None  # Those that are left, the next one last.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Page:
        while True:
            if self._servers is None:
                self._servers = await self._begin()
            if not self._servers:
                raise StopAsyncIteration
            log_id = self._servers[-1]
            piece = _cut(await self._messages.find(log_id, self._window), self._page_size)
            left = window_behind(self._window, piece)
            if left is None:
                self._servers.pop()
                left = self._window._replace(place=Place(), until_sequence=0)
            self._window = left._replace(rows_max=self._rows_max_after(len(piece.rows)))
            self.in_flight += piece.in_flight
            self.unread += piece.unread
            page = self._page_of(log_id, piece)
            self.found += len(page)
            if len(page):
                return page

    async def next(self) -> Page | None:
        """The next page; None when there is none left."""
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            return None

    def _rows_max_after(self, row_count: int) -> int:
        """How many messages to ask for next.

        A server looks at as many rows as it is asked for and answers those that fit a piece, so the wish follows what
        fitted: of 4,096 messages of 4 KB 1,000 fit, and 2,000 are asked for next.
        """
        if self._window.content is not Content.WHOLE or self._page_size is not None:
            return self._window.rows_max
        return min(max(2 * row_count, WHOLE_ROWS_MIN), ROWS_MAX)

    @property
    def resume(self) -> str:
        """Where the walk goes on; empty behind the last page."""
        if self._servers is None or not self._servers:
            return ""
        place = self._window.place
        return f"{self._servers[-1]:016x}-{place.hour}-{place.sequence}-{self._window.until_sequence}"

    async def _begin(self) -> list[int]:
        """The servers to ask. One message is at one server, which says where it is filed."""
        if self._one is None:
            servers = sorted(await self._messages.servers(), reverse=True)
            if self._from not in servers:  # It was retired meanwhile; the next one is begun with.
                self._window = self._window._replace(place=Place(), until_sequence=0)
            return [log_id for log_id in servers if log_id >= self._from]
        log_ids, (found,) = await self._messages.ask(GET, self._one)
        if found["state"] == MessageState.IN_FLIGHT:
            self.in_flight += 1
        due_ms, sequence = int(found["deliver_at_ms"]), int(found["sequence"])
        if found["state"] != MessageState.PENDING or not self._window.from_ms <= due_ms < self._window.to_ms:
            return []
        hour = max(due_ms, int(found["accepted_at_ms"])) // HOUR_MS
        # The walk begins right before the message and ends right behind it.
        place = Place(hour, sequence - 1)
        self._window = self._window._replace(
            from_ms=due_ms, to_ms=due_ms + 1, place=place, until_sequence=sequence + 1, rows_max=1
        )
        return [int(log_ids[0])]


def _cut(piece: Piece, page_size: int | None) -> Piece:
    """The first messages of a piece, and a place behind the last of them; what is counted is counted at its end."""
    if page_size is None or len(piece.rows) <= page_size:
        return piece
    rows = piece.rows[:page_size]
    place = Place(int(rows[-1]["accepted_at_ms"]) // HOUR_MS, int(rows[-1]["sequence"]))
    return piece._replace(rows=rows, place=place, in_flight=0, unread=0)


def _place_of(token: str | None, window: AskedWindow) -> tuple[int, AskedWindow]:
    """The server where a walk goes on, and its window there; BadArgument when the word is none that pages gave."""
    if token is None or not need_text("resume", token):
        return 0, window
    found = re.fullmatch(_PLACE, token)
    if found is None:
        raise BadArgument(f"resume is what the pages of an earlier walk told, not {token[:80]!r}")
    log_id, *numbers = found.groups()
    hour, sequence, until_sequence = map(int, numbers)
    return int(log_id, 16), window._replace(place=Place(hour, sequence), until_sequence=until_sequence)


class BlockingPages(Generic[Page]):
    """The pages of one walk, for a program without an event loop; the fields are those of `Pages`."""

    def __init__(self, pages: Pages[Page], thread: LoopThread) -> None:
        self._pages = pages
        self._thread = thread

    def __iter__(self) -> Iterator[Page]:
        while (page := self._thread.call(self._pages.next(), ends_with_caller=True)) is not None:
            yield page

    @property
    def found(self) -> int:
        """Messages on the pages so far."""
        return self._pages.found

    @property
    def in_flight(self) -> int:
        """Messages that were being handed over, so far."""
        return self._pages.in_flight

    @property
    def unread(self) -> int:
        """Files or batches that can't be read, so far."""
        return self._pages.unread

    @property
    def resume(self) -> str:
        """Where the walk goes on behind the pages so far, in one word; empty behind the last page."""
        return self._pages.resume


def blocking_pages(
    method: Callable[Concatenate[A, P], Pages[Page]],
) -> Callable[Concatenate[Any, P], BlockingPages[Page]]:
    """The blocking form of a method that gives pages: these are for a plain ``for``."""

    @wraps(method)
    def called(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> BlockingPages[Page]:
        pages = method(self, *args, **kwargs)
        return BlockingPages(pages, self._own.standing().thread)

    return told(called, method, f"Blocking{inspect.signature(method).return_annotation}")


def page_of(log_id: int, piece: Piece, *, whole: bool) -> PendingPage:
    """The page that a server's piece of a walk is; ``whole``: with headers and bodies."""
    rows, batch = piece.rows, piece.batch
    sizes = np.zeros(len(rows), np.int64) if batch is None else batch.body_bytes()[: len(rows)]
    sequences, due_ms, accepted_ms = (rows[name].copy() for name in ("sequence", "deliver_at_ms", "accepted_at_ms"))
    log_ids = np.full(len(rows), log_id, np.uint64)
    return PendingPage(
        log_ids, sequences, due_ms, accepted_ms, sizes, piece.in_flight, piece.unread, _batch=batch, _whole=whole
    )


_MS = timedelta(milliseconds=1)
_PAIR = "[0-9a-f]{16}-[0-9]{1,19}"
_TOKEN = f"{_PAIR}(?:,{_PAIR})*"
_PLACE = "([0-9a-f]{16})-([0-9]{1,9})-([0-9]{1,19})-([0-9]{1,19})"


class Walked(NamedTuple):
    """What a walk through pending messages has come to so far.

    Fields:
        found: pending messages of the subject and the window.
        done: how many of them were cancelled or moved; 0 in a dry run.
        in_flight: messages that were being handed over: nothing was done about them.
        ended: messages that were handed over or ended between being found and being asked about.
        unread: hours of which a server could not read something: messages of them may be missing. `delayd status` says
            what is damaged.
        resume: of a walk that moves messages and is not at its end: another call goes on with it.
    """

    found: int = 0
    done: int = 0
    in_flight: int = 0
    ended: int = 0
    unread: int = 0
    resume: str = ""


Bounds = Mapping[int, int]  # By log_id: the sequence below which a walk finds messages there.
Progress = Callable[[Walked], object]
"""Called with the counts so far, after each piece."""


def window_of(subject: str, due_from: datetime | None, due_before: datetime | None, tag: str | None) -> AskedWindow:
    """Check the arguments of a walk.

    Raises:
        BadSubject, BadTags, BadArgument, NaiveDatetime: they name no subject, no tag or no window.
    """
    check_subject(subject)
    if tag is not None:
        encode_tags([tag])
    from_ms = 0 if due_from is None else instant_ms(due_from, "due_from")
    to_ms = INSTANT_MS_MAX if due_before is None else instant_ms(due_before, "due_before")
    if from_ms >= to_ms:
        raise BadArgument("due_before is not later than due_from, so no message is due in between")
    return AskedWindow(subject.encode(), max(0, from_ms), min(to_ms, INSTANT_MS_MAX), tag=tag or "")


def shift_ms_of(shift: timedelta) -> int:
    """Check by how much messages are to be moved; in milliseconds, and negative when they are to be due earlier.

    Raises:
        BadArgument: it is no time at all.
    """
    shift_ms = need_timedelta("shift", shift) // _MS
    if not shift_ms:
        raise BadArgument("shift is less than a millisecond, so no message would move")
    return shift_ms


def check_walk(dry_run: bool, progress: Progress | None) -> None:
    """BadSetting or BadArgument for a walk of which nobody can tell whether it is meant, or that tells nobody."""
    need_bool("dry_run", dry_run)
    if progress is not None:
        need_callable("progress", progress)


Act = Callable[[AskedRows, Piece], Awaitable[NDArray[np.uint8]]]
"""Does what is wished about the messages of a piece, and returns the answer about each."""

NO_ANSWERS = np.empty(0, np.uint8)

# In the answers to both wishes: CANCELLED or MOVED, and IN_FLIGHT.
_DONE, _IN_FLIGHT = 1, 3
assert [*map(int, (CancelAnswer.CANCELLED, RescheduleAnswer.MOVED))] == [_DONE] * 2, "a walk counts both"
assert [*map(int, (CancelAnswer.IN_FLIGHT, RescheduleAnswer.IN_FLIGHT))] == [_IN_FLIGHT] * 2, "a walk counts both"


class Walker:
    """Walks for one producer, on one loop."""

    def __init__(self, messages: Asker) -> None:
        self._messages = messages

    def pending(
        self,
        window: AskedWindow,
        one: AskedOne | None,
        page_size: int | None = None,
        resume: str | None = None,
        *,
        whole: bool,
    ) -> Pages[PendingPage]:
        """The pending messages of a window, or one of them; ``whole``: with headers and bodies."""
        content = Content.WHOLE if whole else Content.LABELS
        asked = None if one is None else one.rows()
        return self.pages(window, content, partial(page_of, whole=whole), page_size, resume, asked)

    def pages(
        self,
        window: AskedWindow,
        content: Content,
        page_of: PageOf[Page],
        page_size: int | None = None,
        resume: str | None = None,
        one: AskedRows | None = None,
    ) -> Pages[Page]:
        """Pages of what a window has, each with at most ``page_size`` messages; BadArgument for a size that is none."""
        rows_max = WHOLE_ROWS_FIRST if content is Content.WHOLE else window.rows_max
        if page_size is not None:
            need_whole("page_size", page_size, 1, most=ROWS_MAX)
            some = max(page_size, TAGGED_ROWS) if window.tag and content is not Content.WHOLE else page_size
            rows_max = min(rows_max, some)
        window = window._replace(content=content, rows_max=rows_max)
        return Pages(self._messages, window, page_of, one, page_size, resume)

    async def cancel(self, window: AskedWindow, *, dry_run: bool, progress: Progress | None) -> Walked:
        """Cancel what is pending in a window, or only count it."""

        async def act(rows: AskedRows, _: Piece) -> NDArray[np.uint8]:
            return (await self._messages.ask(CANCEL, rows))[1]["answer"]

        return await _WalkState(self._messages, window, None if dry_run else act, progress).run()

    async def reschedule(
        self, window: AskedWindow, shift_ms: int, bounds: Bounds, *, dry_run: bool, progress: Progress | None
    ) -> Walked:
        """Move what is pending in a window, or only count it; ``bounds``: of the walk that this one resumes."""

        async def act(rows: AskedRows, piece: Piece) -> NDArray[np.uint8]:
            instants = np.clip(piece.rows["deliver_at_ms"] + shift_ms, INSTANT_MS_MIN, INSTANT_MS_MAX)
            return (await self._messages.ask(RESCHEDULE, rows, NewInstants(instants, False)))[1]["answer"]

        return await _WalkState(self._messages, window, None if dry_run else act, progress, dict(bounds)).run()


class _WalkState:
    """One walk, at all servers at the same time."""

    def __init__(
        self,
        messages: Asker,
        window: AskedWindow,
        act: Act | None,
        progress: Progress | None,
        bounds: dict[int, int] | None = None,
    ) -> None:
        """``bounds`` is kept up to date, and told, when it is given."""
        self._messages = messages
        self._window = window
        self._act = act
        self._progress = progress
        self._bounds = bounds
        self._walked = Walked()
        self._failed: dict[int, DelaydError] = {}  # By log_id: the servers where the walk did not come to its end.

    async def run(self) -> Walked:
        """Go through all servers.

        A server that fails keeps nobody from the others: its error is raised when all are through, with the account in
        its details. When ``progress`` raises, the walk stops everywhere.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for log_id in await self._messages.servers():
                    tasks.create_task(self._at(log_id))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for error in self._failed.values():
            names = " ".join(str(LogId(log_id)) for log_id in sorted(self._failed))
            walked = self._walked
            error.details |= {"servers": names, "found": walked.found, "done": walked.done, "resume": walked.resume}
            raise error
        return self._walked._replace(resume="")

    async def _at(self, log_id: int) -> None:
        left: AskedWindow | None = self._window._replace(until_sequence=(self._bounds or {}).get(log_id, 0))
        while left is not None:
            piece = await self._try(log_id, self._messages.find(log_id, left))
            if piece is None:
                return
            until = piece.until_sequence
            if self._bounds is not None and self._act is not None and self._bounds.get(log_id) != until:
                # It is told before anything is moved: a caller that is interrupted then can go on, too.
                self._bounds[log_id] = until
                self._tell()
            answers: NDArray[np.uint8] | None = NO_ANSWERS
            if len(piece.rows) and self._act is not None:
                log_ids = np.full(len(piece.rows), log_id, np.uint64)
                rows = AskedRows(log_ids, piece.asked(), self._window.subject)
                answers = await self._try(log_id, self._act(rows, piece))
            if answers is None:
                return
            self._add(piece, Counter(answers.tolist()))
            left = window_behind(left, piece)

    async def _try(self, log_id: int, asked: Awaitable[T]) -> T | None:
        """None when the server fails: the walk has ended there."""
        try:
            return await asked
        except DelaydError as error:
            self._failed[log_id] = error
            return None

    def _add(self, piece: Piece, answers: Counter[int]) -> None:
        walked, done, in_flight = self._walked, answers[_DONE], answers[_IN_FLIGHT]
        self._walked = Walked(
            walked.found + len(piece.rows),
            walked.done + done,
            walked.in_flight + piece.in_flight + in_flight,
            walked.ended + answers.total() - done - in_flight,
            walked.unread + piece.unread,
        )
        self._tell()

    def _tell(self) -> None:
        if self._bounds:
            self._walked = self._walked._replace(resume=_token_of(self._bounds))
        if self._progress is not None:
            self._progress(self._walked)


def bounds_of(token: str | None) -> Bounds:
    """The bounds in the ``resume`` of an earlier walk; BadArgument when it is none."""
    if token is None or not need_text("resume", token):
        return {}
    found = re.fullmatch(_TOKEN, token)
    if found is None:
        raise BadArgument(f"resume is what an earlier walk told as `Walked.resume`, not {token[:80]!r}")
    pairs = [pair.split("-") for pair in token.split(",")]
    return {int(log_id, 16): int(until) for log_id, until in pairs}


def _token_of(bounds: Bounds) -> str:
    return ",".join(f"{log_id:016x}-{until}" for log_id, until in sorted(bounds.items()))


_CANCEL_OF = {
    MessageState.CANCELLED: CancelAnswer.CANCELLED,
    MessageState.IN_FLIGHT: CancelAnswer.IN_FLIGHT,
    MessageState.UNKNOWN: CancelAnswer.UNKNOWN,
}
_GONE = CancelAnswer.ALREADY_DISPATCHED


class _Followed(NamedTuple):
    """A message that was sent to a group, as far as it is known."""

    log_id: int
    answer: np.void  # Its delay server says it about the first life; its dtype is ANSWER.
    waiting: AskedOne | None  # What waits for the group now.
    is_dead: bool = False  # And is a dead letter.
    in_flight: bool = False  # It is being handed over to the group again at this moment.

    @property
    def first(self) -> MessageInfo:
        """What became of the first life."""
        return info_of(self.answer)

    @property
    def told(self) -> CancelAnswer:
        """The answer to a wish about it when nothing waits for the group."""
        return CancelAnswer.IN_FLIGHT if self.in_flight else _CANCEL_OF.get(self.first.state, _GONE)


class Follower:
    """Asks about single messages for one producer, on one loop; without a group, about their first lives."""

    def __init__(self, address: str, messages: Asker) -> None:
        self._address = address
        self._messages = messages

    async def get(self, subject: str, group: str | None, one: AskedOne) -> MessageInfo:
        """What became of a message for a group: of its first life, or of the one that waits for the group."""
        if group is None:
            return await self._messages.get_one(one)
        followed = await self._follow(subject, group, one)
        if followed.waiting is None:
            return followed.first._replace(state=MessageState.IN_FLIGHT) if followed.in_flight else followed.first
        waiting = await self._messages.get_one(followed.waiting)
        is_dead = followed.is_dead and waiting.state is MessageState.PENDING
        return waiting._replace(state=MessageState.DEAD) if is_dead else waiting

    async def cancel(self, subject: str, group: str | None, one: AskedOne) -> CancelAnswer:
        """End a message that waits to come to a group again, or is a dead letter of it."""
        if group is not None:
            followed = await self._follow_handed_over(subject, group, one)
            if followed.waiting is None:
                return followed.told
            one = followed.waiting
        return await self._messages.cancel_one(one)

    async def reschedule(
        self, subject: str, group: str | None, one: AskedOne, instants: NewInstants
    ) -> tuple[int, np.void]:
        """Move a message that waits to come to a group again; a dead letter comes at that instant.

        Returns the delay server and its answer, which is about the first life when nothing waits for the group.
        """
        if group is not None:
            followed = await self._follow_handed_over(subject, group, one)
            if followed.waiting is None:
                answer = followed.answer.copy()
                answer["answer"] = RescheduleAnswer[followed.told.name]
                return followed.log_id, answer
            one = followed.waiting
        log_ids, answers = await self._messages.ask(RESCHEDULE, one.rows(), instants)
        return int(log_ids[0]), answers[0]

    async def _follow_handed_over(self, subject: str, group: str, one: AskedOne) -> _Followed:
        """As `_follow`; BadArgument while the message is pending for all groups."""
        followed = await self._follow(subject, group, one)
        if followed.first.state is MessageState.PENDING:
            what = f"the message was not handed over to {group} yet, and is pending for all groups of its subject"
            raise BadArgument(f"{what}; leave out group= to end or move it for all of them")
        return followed

    async def _follow(self, subject: str, group: str, one: AskedOne) -> _Followed:
        log_ids, answers = await self._messages.ask(GET, one.rows())
        log_id, answer = int(log_ids[0]), answers[0]
        if answer["state"] != MessageState.DISPATCHED:
            return _Followed(log_id, answer, None)
        target = int(answer["target_log_id"])
        places = await find_group(self._address, subject, group)
        kept_as = next((place.kept_as for place in places if place.server.log_id == target), None)
        if kept_as is None:
            raise BadArgument(f"the realtime server {target:016x} of this message has no group {group}")
        window = AskedWindow(
            kept_as.encode(), 0, INSTANT_MS_MAX, content=Content.LABELS, origin=int(answer["sequence"])
        )
        lives: list[PendingMessage] = []
        in_flight = 0
        async for piece in self._messages.pieces(log_id, window):
            lives += page_of(log_id, piece, whole=False)
            in_flight += piece.in_flight
        if not lives:
            return _Followed(log_id, answer, None, in_flight=in_flight > 0)
        # A newer life takes the place of an older one.
        life = max(lives, key=lambda message: message.receipt.sequence)
        return _Followed(log_id, answer, asked_of(kept_as, life.receipt), DEAD_TAG in life.tags, in_flight > 0)
