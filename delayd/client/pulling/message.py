"""Messages as a consumer gets them: columns, and views of their rows.

Invariant: bytes are verified against the batch's checksums before they are decoded, and nothing is decoded before it is
asked for.

Lives: what the servers' headers of a message say of its earlier lives, and whose attempts are over (rule Q2).
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from delayd.batch import labels
from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s, padded
from delayd.batch.gather import item_of
from delayd.batch.labels import Headers, decode_headers, decode_tags, number_in
from delayd.batch.names import ORDERED_WAIT_MS_MAX, RETRY_PREFIX
from delayd.client.instants import utc
from delayd.client.pulling.acks import ACK, Handles, Word, later, rejected
from delayd.client.pulling.consume_options import ConsumedSubjects, ConsumerSettings
from delayd.errors import BadArgument, BadBody, BadHeaders, DelaydError, LogId
from delayd.kernel import choose

ATTEMPT_MAX = 65_535
_RETRY = RETRY_PREFIX.encode()
FEW_ITEMS = 8  # Up to so many cost less one by one than the arrays cost at all: one takes 2 instead of 13 us.
Item = TypeVar("Item", bound=np.generic)


class PulledPart(NamedTuple):
    """Rows of one verified batch, which were pulled together."""

    batch: Batch
    rows: range
    pull_first: int  # Pull sequence of the first of these rows; the others count up from it.
    attempt: int
    place: int = 0  # Where it came from, see `Pulled.subjects`.
    received_at_ms: int = 0  # By the server's clock, as far as it is known.


class PastLives(NamedTuple):
    """What a message was before it came again (`delayd.batch.labels`)."""

    attempts: int = 0  # Those of its earlier lives.
    origin_sequence: int = 0  # The sequence of its first life; 0: this is its first one.
    first_due_ms: int = 0
    error: str = ""
    key: str | None = None


FIRST_LIFE = PastLives()


def comes_again(batch: Batch) -> bool:
    """Whether a batch has messages that came again."""
    return batch.subject_table.find(_RETRY) >= 0


def life_of(batch: Batch, row: int) -> PastLives:
    """The earlier lives of a message that came again."""
    length, item = item_of(batch, ColumnId.HEADERS_END, row) if ColumnId.HEADERS_END in batch else (0, b"")
    try:
        headers = decode_headers(bytes(item[:length]))
    except BadHeaders:
        return FIRST_LIFE
    # A dead letter that somebody has sent back to its group begins anew.
    attempts = 0 if labels.REASON in headers else number_in(headers, labels.ATTEMPT)
    error = headers.get(labels.ERROR, "")
    origin, first_due_ms = number_in(headers, labels.ORIGIN), number_in(headers, labels.FIRST_DUE_MS)
    key = headers.get(labels.KEY)
    known_key = key if isinstance(key, str) else None
    return PastLives(attempts, origin, first_due_ms, error if isinstance(error, str) else "", known_key)


class Pulled(NamedTuple):
    """Messages of one answer of a realtime server, or of several of one connection, on their way to the caller."""

    subject: str
    incarnation: int
    parts: tuple[PulledPart, ...]
    lease_ends: float  # Of the first that ends, on `monotonic_s`; after it the server offers the messages to others.
    subjects: ConsumedSubjects | None = (
        None  # What the places of its parts are; None when all parts are of ``subject``.
    )
    outage: DelaydError | None = None  # See `MessageColumns.outage`.

    @classmethod
    def nothing(cls, subject: str, outage: DelaydError | None) -> Pulled:
        """No messages."""
        return cls(subject, 0, (), 0.0, outage=outage)

    @property
    def message_count(self) -> int:
        """How many messages."""
        return sum(len(part.rows) for part in self.parts)

    @property
    def handles(self) -> list[list[int]]:
        """The handles that acknowledge all of them: (incarnation, pull_first, count) of each part (rule Q1)."""
        if self.subjects is not None:
            return [[self.incarnation, part.pull_first, len(part.rows), part.place] for part in self.parts]
        return [[self.incarnation, part.pull_first, len(part.rows)] for part in self.parts]

    def joined(self, later: Pulled) -> Pulled:
        """These messages and those of a later answer of the same connection."""
        return self._replace(parts=self.parts + later.parts, lease_ends=min(self.lease_ends, later.lease_ends))

    def cut(self, count: int) -> tuple[Pulled, Pulled]:
        """The first ``count`` messages, and the others; one of them may be empty."""
        first: list[PulledPart] = []
        rest: list[PulledPart] = []
        for part in self.parts:
            take = min(count, len(part.rows))
            count -= take
            if take:
                first.append(part._replace(rows=part.rows[:take]))
            if take < len(part.rows):
                rest.append(part._replace(rows=part.rows[take:], pull_first=part.pull_first + take))
        return self._replace(parts=tuple(first)), self._replace(parts=tuple(rest))

    def pick(self, rows: range) -> Pulled:
        """Some of the messages, in their order; ``rows`` counts forward or back, as a slice does."""
        if len(rows) and rows.step == 1:
            return self.cut(rows.stop)[0].cut(rows.start)[1]
        return self._replace(parts=tuple(part for row in rows for part in self.cut(row)[1].cut(1)[0].parts))


def place_in(count: int, row: int) -> int:
    """The place of a message in a batch of ``count``; counted from the end when it is negative."""
    try:
        return range(count)[row]
    except IndexError:
        raise IndexError(f"a batch of {count} messages has no row {row}") from None
    except TypeError:
        raise BadArgument(f"row is a whole number or a slice such as [:10], not {type(row).__name__}") from None


class UnreadableHeaders(Mapping[str, str | bytes]):
    """Stands for headers that can't be decoded: any access raises `error`, a BadHeaders."""

    def __init__(self, error: BadHeaders) -> None:
        self.error = error

    def __getitem__(self, name: str) -> str | bytes:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        raise self.error

    def __len__(self) -> int:
        raise self.error

    def __contains__(self, name: object) -> bool:
        raise self.error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.error.message!r})"


class MessageColumns:
    """Columns of pulled messages, one item a message, in the order of the subject."""

    def __init__(self, pulled: Pulled) -> None:
        self.pulled = pulled
        self._count = pulled.message_count

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        outage = "" if self.outage is None else f", outage: {self.outage.message}"
        return f"{type(self).__name__}({len(self)} messages of {self.subject}{outage})"

    @property
    def outage(self) -> DelaydError | None:
        """Of an empty batch: why no server could be asked for messages, or answered. None: they were asked, and had
        none.
        """
        return self.pulled.outage

    @property
    def subject(self) -> str:
        """The subject to which the messages were sent; of a consumer of many subjects, what it consumes."""
        return self.pulled.subject

    @cached_property
    def subjects(self) -> list[str]:
        """The subject to which each message was sent."""
        known = self.pulled.subjects
        if known is None:
            return [self.pulled.subject] * len(self)
        return [name for part in self.pulled.parts for name in [known.at(part.place).subject] * len(part.rows)]

    @cached_property
    def bodies(self) -> list[bytes]:
        """Copies of the bodies."""
        bodies: list[bytes] = []
        for part in self.pulled.parts:
            bodies.extend(items_of(part, ColumnId.BODY_END))
        return bodies

    @cached_property
    def headers_bytes(self) -> list[bytes]:
        """Copies of the headers as they were sent, one msgpack map each; empty where a message has none."""
        headers: list[bytes] = []
        for part in self.pulled.parts:
            if ColumnId.HEADERS_END in part.batch:
                headers.extend(items_of(part, ColumnId.HEADERS_END))
            else:
                headers.extend(b"" for _ in part.rows)
        return headers

    @cached_property
    def lives(self) -> list[PastLives]:
        """What each message was before it came again."""
        lives: list[PastLives] = []
        for part in self.pulled.parts:
            again = comes_again(part.batch)
            lives += [life_of(part.batch, row) if again else FIRST_LIFE for row in part.rows]
        return lives

    @cached_property
    def headers(self) -> list[Mapping[str, str | bytes]]:
        """Decoded headers; an empty dict where a message has none. Those that servers have added are left out.

        Headers that can't be decoded concern their own message only: they are replaced by an `UnreadableHeaders`.
        """
        return [_readable(packed) for packed in self.headers_bytes]

    @cached_property
    def tags(self) -> list[tuple[str, ...]]:
        """The tags with which each message was sent."""
        tags: list[tuple[str, ...]] = []
        for part in self.pulled.parts:
            if ColumnId.TAGS_END in part.batch:
                tags += [_own_tags(item) for item in items_of(part, ColumnId.TAGS_END)]
            else:
                tags += [()] * len(part.rows)
        return tags

    @cached_property
    def keys(self) -> list[str | None]:
        """The key with which each message was sent, also where it came again; None without one."""
        keys: list[str | None] = []
        for part in self.pulled.parts:
            if ColumnId.KEY_END in part.batch:
                keys += [item.decode("utf-8", "replace") or None for item in items_of(part, ColumnId.KEY_END)]
            elif comes_again(part.batch):
                keys += [life_of(part.batch, row).key for row in part.rows]
            else:
                keys += [None] * len(part.rows)
        return keys

    @cached_property
    def deliver_at_ms(self) -> Int64s:
        """int64[n]: when each message was due, in milliseconds since the epoch."""
        columns = [_rows(part, part.batch.int64s(ColumnId.DELIVER_AT_MS)) for part in self.pulled.parts]
        return np.concatenate(columns) if columns else np.empty(0, np.int64)

    @cached_property
    def sequences(self) -> NDArray[np.uint64]:
        """uint64[n]: each message's number in its delay server's log; unique together with `log_ids`."""
        columns = [_rows(part, part.batch.uint64s(ColumnId.SEQUENCE)) for part in self.pulled.parts]
        return np.concatenate(columns) if columns else np.empty(0, np.uint64)

    @cached_property
    def log_ids(self) -> NDArray[np.uint64]:
        """uint64[n]: the log_id of the delay server that held each message."""
        ids = [part.batch.dispatch.origin_log_id for part in self.pulled.parts]
        return np.repeat(np.array(ids, np.uint64), [len(part.rows) for part in self.pulled.parts])

    @cached_property
    def attempts(self) -> NDArray[np.uint16]:
        """uint16[n]: how often each message was delivered to this group, in all its lives; 1 is the first time."""
        attempts = [part.attempt for part in self.pulled.parts]
        here = np.repeat(np.array(attempts, np.uint16), [len(part.rows) for part in self.pulled.parts])
        if not any(comes_again(part.batch) for part in self.pulled.parts):
            return here
        before = np.array([each.attempts for each in self.lives], np.int64)
        every: NDArray[np.uint16] = np.minimum(here + before, ATTEMPT_MAX).astype(np.uint16)
        return every

    @cached_property
    def late_ms(self) -> Int64s:
        """int64[n]: how long after it was due each message was received here, in milliseconds of the server's clock."""
        return np.array(self._receipts_ms, np.int64) - self.deliver_at_ms

    @cached_property
    def expiries(self) -> Int64s:
        """int64[n]: when each message expires, in milliseconds since the epoch; 0 for never."""
        columns = [
            _rows(part, part.batch.int64s(ColumnId.EXPIRES_AT_MS))
            if ColumnId.EXPIRES_AT_MS in part.batch
            else np.zeros(len(part.rows), np.int64)
            for part in self.pulled.parts
        ]
        return np.concatenate(columns) if columns else np.empty(0, np.int64)

    # Views of single messages read Python's own integers, which costs a tenth of reading an array.

    @cached_property
    def instants(self) -> list[int]:
        """When each was due, as a list."""
        instants: list[int] = self.deliver_at_ms.tolist()
        return instants

    @cached_property
    def _receipts_ms(self) -> list[int]:
        """When each was received here, by the server's clock."""
        return [at_ms for part in self.pulled.parts for at_ms in [part.received_at_ms] * len(part.rows)]

    @cached_property
    def pull_sequences(self) -> list[int]:
        """The pull sequence that acknowledges each, together with the incarnation."""
        return [part.pull_first + row for part in self.pulled.parts for row in range(len(part.rows))]

    @cached_property
    def places(self) -> list[int]:
        """The place from which each came."""
        return [place for part in self.pulled.parts for place in [part.place] * len(part.rows)]


View = TypeVar("View", bound="MessageView")


class Settling(Protocol):
    """Whoever says the words of a message: a consumer, or a worker for its functions."""

    def settle(self, handles: Handles, wait: bool, word: Word = ACK) -> Coroutine[object, object, None]:
        """See AsyncConsumer."""

    def word_back(self, attempt: int, delay: timedelta | None, error: str) -> Word:
        """See AsyncConsumer."""


class SettlesBatches(Settling, Protocol):
    """Whoever says the words of batches: a consumer."""

    def words_back(self, columns: MessageColumns, delay: timedelta | None, error: str) -> list[tuple[Handles, Word]]:
        """See AsyncConsumer."""


class Messages(MessageColumns, ABC, Generic[View]):
    """The messages of one pull, as one form of a consumer gives them out."""

    def __init__(self, pulled: Pulled, consumer: SettlesBatches) -> None:
        super().__init__(pulled)
        self.consumer = consumer

    @overload
    def __getitem__(self, row: int) -> View: ...

    @overload
    def __getitem__(self, row: slice) -> Self: ...

    def __getitem__(self, row: int | slice) -> View | Self:
        if isinstance(row, slice):
            return type(self)(self.pulled.pick(range(len(self))[row]), self.consumer)
        return self._one(place_in(len(self), row))

    def __iter__(self) -> Iterator[View]:
        return map(self._one, range(len(self)))

    @abstractmethod
    def _one(self, row: int) -> View:
        """A message."""


class MessageView:
    """One message of a batch."""

    __slots__ = ("columns", "is_settled", "row")

    def __init__(self, columns: MessageColumns, row: int) -> None:
        self.columns = columns
        self.row = row  # Its place in the batch.
        self.is_settled = False  # This object was asked to acknowledge the message, give it back or reject it.

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.subject}, sequence {self.sequence}, {len(self.body)} bytes)"

    @property
    def body(self) -> bytes:
        """The bytes that the producer sent."""
        return self.columns.bodies[self.row]

    def text(self) -> str:
        """The body as text. Raises BadBody when it is no UTF-8."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise BadBody(f"the body of {self!r} is no UTF-8 ({error.reason} at byte {error.start})") from error

    def json(self) -> Any:
        """The body, decoded as JSON. Raises BadBody when it is no JSON in UTF-8.

        >>> message.json()["order"]
        42
        """
        try:
            return json.loads(self.text())
        except (ValueError, RecursionError) as error:
            raise BadBody(f"the body of {self!r} is no JSON: {error}") from error

    @property
    def headers(self) -> Headers:
        """The headers. Raises BadHeaders when they can't be decoded; `headers_bytes` has their bytes then."""
        return own_headers(decode_headers(self.headers_bytes))

    @property
    def headers_bytes(self) -> bytes:
        """The headers as they were sent: one msgpack map, or no bytes."""
        return self.columns.headers_bytes[self.row]

    @property
    def subject(self) -> str:
        """The subject to which the message was sent."""
        columns = self.columns
        return columns.subject if columns.pulled.subjects is None else columns.subjects[self.row]

    @property
    def key(self) -> str | None:
        """The key with which the message was sent, also when it comes again; None without one.

        The key is free by now: the next message with it may be pending already (docs/keys.md).
        """
        return self.columns.keys[self.row]

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags with which the message was sent."""
        return self.columns.tags[self.row]

    @property
    def schedule(self) -> str | None:
        """The name of the recurring schedule that sent the message; None when it was sent by a producer."""
        found = decode_headers(self.headers_bytes).get(labels.SCHEDULE)
        return found if isinstance(found, str) else None

    @property
    def occurrence(self) -> datetime | None:
        """The instant for which a recurring schedule sent the message, without jitter; None as for `schedule`."""
        instant_ms = number_in(decode_headers(self.headers_bytes), labels.OCCURRENCE_MS)
        return utc(instant_ms) if instant_ms else None

    @property
    def deliver_at_ms(self) -> int:
        """When the message was due, in milliseconds since the epoch."""
        return self.columns.instants[self.row]

    @property
    def deliver_at(self) -> datetime:
        """When the message was due, in UTC."""
        return utc(self.deliver_at_ms)

    @property
    def late_ms(self) -> int:
        """How long after it was due the message was received here, in milliseconds of the server's clock."""
        return self.columns._receipts_ms[self.row] - self.deliver_at_ms

    @property
    def attempt(self) -> int:
        """How often the message was delivered to this group, in all its lives; 1 is the first time."""
        return int(self.columns.attempts[self.row])

    @property
    def last_error(self) -> str:
        """What its last handler said when it gave the message back (`nack`); empty when nobody has said anything."""
        return self.columns.lives[self.row].error

    @property
    def origin_sequence(self) -> int:
        """The sequence under which the message was sent: that of its first life, where it came again."""
        return self.columns.lives[self.row].origin_sequence or self.sequence

    @property
    def first_deliver_at_ms(self) -> int:
        """When the message was due the first time, in milliseconds since the epoch."""
        return self.columns.lives[self.row].first_due_ms or self.deliver_at_ms

    @property
    def first_deliver_at(self) -> datetime:
        """When the message was due the first time, in UTC."""
        return utc(self.first_deliver_at_ms)

    @property
    def expires_at_ms(self) -> int | None:
        """When the message expires, in milliseconds since the epoch; None for never."""
        return int(self.columns.expiries[self.row]) or None

    @property
    def expires_at(self) -> datetime | None:
        """When the message expires, in UTC; None for never. It may be in the past: see docs/consuming.md."""
        expires_at_ms = self.expires_at_ms
        return None if expires_at_ms is None else utc(expires_at_ms)

    @property
    def sequence(self) -> int:
        """The message's number in its delay server's log."""
        return int(self.columns.sequences[self.row])

    @property
    def log_id(self) -> LogId:
        """The log_id of the delay server that held the message; as text it is what `delayd servers` shows."""
        return LogId(self.columns.log_ids[self.row])

    @property
    def handle(self) -> list[int]:
        """The handle that an acknowledgement of the message names (rule Q1)."""
        return handle_at(self.columns, self.row)


def handle_at(columns: MessageColumns, row: int) -> list[int]:
    """The handle that an acknowledgement of one message of a batch names (rule Q1)."""
    handle = [columns.pulled.incarnation, columns.pull_sequences[row], 1]
    if columns.pulled.subjects is not None:
        handle.append(columns.places[row])
    return handle


def _rows(part: PulledPart, column: NDArray[Item]) -> NDArray[Item]:
    return column[part.rows.start : part.rows.stop]


def items_of(part: PulledPart, column: ColumnId) -> list[bytes]:
    """The bytes of one item a row: of the bodies or of the headers of a part."""
    return _cut_items(part.batch, column, part.rows.start, part.rows.stop)


def cut_items(batch: Batch, column: ColumnId, first: int, stop: int) -> list[bytes]:
    """The items of the rows from ``first`` to ``stop`` of a verified batch; the twin of a compiled piece."""
    if stop - first <= FEW_ITEMS:
        found = (item_of(batch, column, row) for row in range(first, stop))
        return [bytes(item[:length]) for length, item in found]
    starts, ends = batch.region(column)
    starts, ends = starts[first:stop], ends[first:stop]
    begin, end = int(starts[0]), int(ends[-1])
    lengths = ends - starts
    size = int(lengths[0])
    if size and (lengths == size).all():
        # Items of one length are cut by one call, in a third of the time; each takes whole words of 8 bytes in the
        # heap.
        items = batch.heap[begin : padded(end)]
        return [item for (item,) in struct.iter_unpack(f"{size}s{padded(size) - size}x", items)]
    # The whole run is copied once, because slices of bytes are bytes again and cost a third of copies out of a view.
    run = bytes(batch.heap[begin:end])
    begins, ends_in_run = (starts - begin).tolist(), (ends - begin).tolist()
    return [run[start:until] for start, until in zip(begins, ends_in_run, strict=True)]


_cut_items = choose("cut_items", cut_items)


def _own_tags(item: bytes) -> tuple[str, ...]:
    return tuple(tag for tag in decode_tags(item) if not tag.startswith(labels.TAG_PREFIX))


def _readable(packed: bytes) -> Mapping[str, str | bytes]:
    try:
        return own_headers(decode_headers(packed))
    except BadHeaders as error:
        return UnreadableHeaders(error)


def own_headers(headers: Headers) -> Headers:
    """The headers that a message was sent with, without those of servers."""
    if not any(name.startswith(labels.LIFE_PREFIX) for name in headers):
        return headers
    return {name: value for name, value in headers.items() if not name.startswith(labels.LIFE_PREFIX)}


def over(attempt: int, most: int) -> str:
    """The reason of a dead letter whose attempts are over."""
    return f"its attempts are over: {attempt} of {most}"


def word_back(settings: ConsumerSettings, attempt: int, delay: timedelta | None, error: str) -> Word:
    """What a message that is given back after that attempt is to become."""
    word = later(delay, error, settings.backoff, attempt)
    most = settings.max_attempts
    if most is not None and attempt >= most:
        return rejected(over(attempt, most), error)
    if settings.ordered and word.delay_ms > ORDERED_WAIT_MS_MAX:
        # Here, because a server refuses all words of a request, those of other messages too.
        raise BadArgument(f"delay is {delay}; a message of an ordered group comes again after 24 hours at most")
    return word


def words_back(
    settings: ConsumerSettings, columns: MessageColumns, delay: timedelta | None, error: str
) -> list[tuple[Handles, Word]]:
    """The same for a batch, as few words as there are attempts: handles, and what their messages are to become."""
    by_attempt: dict[int, Handles] = {}
    attempts = columns.attempts.tolist()
    at = 0
    for part, handle in zip(columns.pulled.parts, columns.pulled.handles, strict=True):
        of_part = attempts[at : at + len(part.rows)]
        at += len(part.rows)
        if len(set(of_part)) == 1:
            by_attempt.setdefault(of_part[0], []).append(handle)
            continue
        incarnation, first, _, *place = handle
        for row, attempt in enumerate(of_part):
            by_attempt.setdefault(attempt, []).append([incarnation, first + row, 1, *place])
    return [(handles, word_back(settings, attempt, delay, error)) for attempt, handles in by_attempt.items()]


class Divided(NamedTuple):
    """An answer without the messages whose attempts are over, and these."""

    pulled: Pulled | None
    dead: list[tuple[Handles, Word]]


def divide(pulled: Pulled, most: int) -> Divided:
    """Take out of an answer the messages whose consumers have ended ``most`` times without a word."""
    kept: list[PulledPart] = []
    dead: list[tuple[Handles, Word]] = []
    for part in pulled.parts:
        for piece, attempt in _by_attempt(part):
            if attempt <= most:
                kept.append(piece)
            else:
                dead.append((pulled._replace(parts=(piece,)).handles, rejected(over(attempt - 1, most), "")))
    if not dead:
        return Divided(pulled, [])
    return Divided(pulled._replace(parts=tuple(kept)) if kept else None, dead)


def _by_attempt(part: PulledPart) -> list[tuple[PulledPart, int]]:
    """A part cut where the attempt changes, over all lives of its messages."""
    pieces: list[tuple[PulledPart, int]] = []
    if not comes_again(part.batch):
        return [(part, part.attempt)]
    for at, row in enumerate(part.rows):
        attempt = part.attempt + life_of(part.batch, row).attempts
        last = pieces[-1] if pieces else None
        if last is not None and last[1] == attempt:
            pieces[-1] = (last[0]._replace(rows=range(last[0].rows.start, row + 1)), attempt)
        else:
            pieces.append((part._replace(rows=range(row, row + 1), pull_first=part.pull_first + at), attempt))
    return pieces
