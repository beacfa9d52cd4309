"""Pending: the pending messages of a subject, as pages (docs/clients.md, What is pending).

Invariant: the items of a page's columns stand in the same order. A message that is pending from the first page to the
last one, and is not moved, is on one page.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np

from delayd.batch import Batch, ColumnId, Int64s
from delayd.client.blocking import LoopThread, told
from delayd.client.sending.message_asker import AskedRows, MessageAsker
from delayd.client.sending.receipt import Receipt, ReceiptColumns
from delayd.headers import Headers, decode_headers
from delayd.hours import HOUR_MS
from delayd.tags import decode_tags
from delayd.wire.ending import MessageState
from delayd.wire.finding import ROWS_MAX, Content, Piece, Place, Window

WHOLE_ROWS_MIN = 64  # So many messages with their bodies are asked for at least.
WHOLE_ROWS_FIRST = 4_096  # And so many first: a piece full of messages of 1 KB.

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T", bound=Sized)
PageOf = Callable[[int, Piece], T]  # Makes a page of a server's log_id, and its piece of the walk.


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
    """

    receipt: Receipt
    key: str | None
    tags: tuple[str, ...]
    size: int
    headers: Headers | None
    body: bytes | None

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
        rows = zip(self.receipts(), self.keys, self.tags, self.sizes.tolist(), headers, bodies, strict=True)
        for row in rows:
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

    def _items(self, column: ColumnId) -> Iterator[memoryview]:
        batch = self._batch
        if batch is None or column not in batch:
            yield from [memoryview(b"")] * len(self)
            return
        heap = batch.heap
        starts, ends = batch.region(column)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield heap[start:end]


class Pages(Generic[T]):
    """The pages of one walk, in an event loop: ``async for``, one server after another.

    Fields:
        found: messages on the pages so far.
        in_flight: messages that were being handed over, so far.
        unread: see `PendingPage`, so far.
    """

    def __init__(
        self, messages: MessageAsker, window: Window, page_of: PageOf[T], key: AskedRows | None = None
    ) -> None:
        """``window`` says what the pages are to have; ``key`` chooses one message."""
        self.found = self.in_flight = self.unread = 0
        self._messages = messages
        self._window = window
        self._key = key
        self._page_of = page_of
        self._servers: list[int] | None = None  # Those that are left, the next one last.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            if self._servers is None:
                self._servers = await self._begin()
            if not self._servers:
                raise StopAsyncIteration
            log_id = self._servers[-1]
            piece = await self._messages.find(log_id, self._window)
            rows_max = self._rows_max_after(len(piece.rows))
            place, until = (Place(), 0) if piece.place is None else (piece.place, piece.until_sequence)
            self._window = self._window._replace(place=place, until_sequence=until, rows_max=rows_max)
            if piece.place is None:
                self._servers.pop()
            self.in_flight += piece.in_flight
            self.unread += piece.unread
            page = self._page_of(log_id, piece)
            self.found += len(page)
            if len(page):
                return page

    async def next(self) -> T | None:
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
        if self._window.content is not Content.WHOLE:
            return self._window.rows_max
        return min(max(2 * row_count, WHOLE_ROWS_MIN), ROWS_MAX)

    async def _begin(self) -> list[int]:
        """The servers to ask. A key has one owner, which says where its message is."""
        if self._key is None:
            return sorted(await self._messages.servers(), reverse=True)
        log_ids, answers = await self._messages.locate(self._key)
        (found,) = answers
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


class BlockingPages(Generic[T]):
    """The pages of one walk, for a program without an event loop; the fields are those of `Pages`."""

    def __init__(self, pages: Pages[T], thread: LoopThread) -> None:
        self._pages = pages
        self._thread = thread

    def __iter__(self) -> Iterator[T]:
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


def blocking_pages(method: Callable[Concatenate[A, P], Pages[T]]) -> Callable[Concatenate[Any, P], BlockingPages[T]]:
    """The blocking form of a method that gives pages: these are for a plain ``for``."""

    @wraps(method)
    def called(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> BlockingPages[T]:
        pages = method(self, *args, **kwargs)
        return BlockingPages(pages, self._own.standing().thread)

    return told(called, method, f"Blocking{inspect.signature(method).return_annotation}")


def page_of(log_id: int, piece: Piece, *, whole: bool) -> PendingPage:
    """The page that a server's piece of a walk is; ``whole``: with headers and bodies."""
    rows, batch = piece.rows, piece.batch
    sizes = np.zeros(len(rows), np.int64) if batch is None else batch.body_bytes()
    sequences, due_ms, accepted_ms = (rows[name].copy() for name in ("sequence", "deliver_at_ms", "accepted_at_ms"))
    log_ids = np.full(len(rows), log_id, np.uint64)
    return PendingPage(
        log_ids, sequences, due_ms, accepted_ms, sizes, piece.in_flight, piece.unread, _batch=batch, _whole=whole
    )
