"""Options: what a caller may say of a send: declared, explained, checked, and encoded as columns of a batch.

An option is named here only: in the arguments and the text of `send_nowait` and of `send_batch`, and in `Label` and
`Labels`, which check it and say which column it is (docs/formats/batch.md). Whatever stands between this file and the
bytes of a batch passes it on without a name.

Invariants: nothing is queued before all arguments of a call were checked, and every fault in them is a CallerError.
No server refuses what passes here because of a key, a tag or an expiry. An expiry is an instant, or a time that begins
when the message is due; a caller gives one of the two (rule S8).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from types import FunctionType
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from delayd.batch import validate
from delayd.batch.columns import ColumnArray, ColumnId, Int64s
from delayd.batch.labels import TAG_PREFIX, bloom_of_item, encode_tags, ordering_hash, traceparent
from delayd.batch.names import MESSAGE_BYTES_MAX
from delayd.client.instants import (
    HORIZON_MS,
    Delays,
    DeliverAt,
    DeliverAtMs,
    Horizon,
    PandasColumn,
    clock_at,
    in_unit,
    instant_ms,
    wish,
    wish_column,
)
from delayd.client.limits import (
    NO_HEADERS,
    TIMEOUT_MS_MAX,
    TIMEOUT_MS_MIN,
    Headers,
    check_bodies,
    check_body,
    check_sent_subject,
    lengths_of,
    need_connect_timeout,
    need_listed,
    need_meta,
    need_ms,
    need_timedelta,
    need_whole,
    pack_headers,
    unreached_s,
)
from delayd.client.sending.receipts import BatchReceipt, Receipt
from delayd.errors import BadArgument, BadExpiry, BadKey, BadSetting, BadTags, MessageTooLarge, NaiveDatetime
from delayd.hours import INSTANT_MS_MAX, INSTANT_MS_MIN

# Longer than an acknowledgement takes on a calm machine: a second batch that leaves beside the first one costs the
# server as much as that and is answered no sooner.
LINGER_MS = 5.0
LINGER_MS_MAX = 1_000.0
QUEUE_BYTES_MAX = 64 << 20  # Single sends may hold this much memory; above it senders wait.
TIMEOUT_MS = 30_000.0  # Longer than a server takes to restart and replay.
HORIZON = timedelta(milliseconds=HORIZON_MS)
CHECKED_MAX = 4_096  # Subjects remembered as checked.
SPREAD_MAX = timedelta(days=7)

_MS = timedelta(milliseconds=1)
_BOTH = "give ttl or expires_at, not both"

OnConflict = Literal["reject", "keep", "replace"]
Key = str | bytes
Tags = Iterable[str]
Ttls = timedelta | Iterable[timedelta | None] | NDArray[np.timedelta64] | PandasColumn
ExpireAt = datetime | Iterable[datetime | None] | NDArray[np.datetime64] | PandasColumn

ON_CONFLICT: dict[str, int] = {"reject": 0, "keep": 1, "replace": 2}
REJECT: OnConflict = "reject"
NO_KEY = b""

P = ParamSpec("P")
R = TypeVar("R")
Sent = TypeVar("Sent")
"""What a producer returns for a send that it does not wait for."""


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """How a producer behaves; BadSetting when a value is out of range."""

    linger_ms: float = LINGER_MS
    queue_bytes_max: int = QUEUE_BYTES_MAX
    timeout_ms: float = TIMEOUT_MS
    horizon: timedelta = HORIZON
    connect_timeout: timedelta | None = None

    def __post_init__(self) -> None:
        need_ms("linger_ms", self.linger_ms, 0, LINGER_MS_MAX)
        need_ms("timeout_ms", self.timeout_ms, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)
        need_connect_timeout(self.connect_timeout)
        # Any number that a machine has memory for.
        need_whole("queue_bytes_max", self.queue_bytes_max, MESSAGE_BYTES_MAX, BadSetting, most=1 << 63)
        if not timedelta(0) < need_timedelta("horizon", self.horizon, BadSetting) <= HORIZON:
            raise BadSetting(f"horizon is {self.horizon} and must lie within 0 and {HORIZON.days} days")

    @property
    def unreached_s(self) -> float:
        """How much of the time limit is left when a call gives up because no connection could be made."""
        return unreached_s(self.timeout_ms, self.connect_timeout)


class Sends(ABC, Generic[Sent]):
    """What both forms of a producer take: their settings, and a send."""

    def __init__(
        self,
        address: str | None = None,
        *,
        linger_ms: float = LINGER_MS,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        timeout_ms: float = TIMEOUT_MS,
        horizon: timedelta = HORIZON,
        connect_timeout: timedelta | None = None,
        token: str | None = None,
    ) -> None:
        meta = need_meta(address, token)
        self._settings = ProducerSettings(linger_ms, queue_bytes_max, timeout_ms, horizon, connect_timeout)
        clock = clock_at(meta)
        self._horizon = Horizon(horizon // _MS, clock.delay_us, clock.wall_ms)
        # An instant within the horizon at the producer's start stays within it, so most sends need not read the clock.
        self._within_ms = self._horizon.wall_ms() + self._horizon.ms
        self._checked: set[str] = set()  # Subjects that passed.
        self._begin(meta)

    def send_nowait(
        self,
        subject: str,
        body: bytes,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        deliver_at_ms: int | None = None,
        headers: Headers | None = None,
        spread: timedelta | None = None,
        key: Key | None = None,
        on_conflict: OnConflict = REJECT,
        tags: Tags | None = None,
        ttl: timedelta | None = None,
        expires_at: datetime | None = None,
        ordering_key: Key | None = None,
    ) -> Sent:
        """Send one message, due at one of ``delay``, ``deliver_at`` or ``deliver_at_ms``, and do not wait for its
        outcome.

        A blocking producer returns a `SendFuture`; the call waits while the queue is full and, with ``spread``, until
        the server has chosen an instant. An asynchronous one returns a future of asyncio, which you can wait for at
        once, or keep; when that is cancelled, the message is sent all the same.

        Args:
            subject: the name by which consumers ask for the message: 1 to 255 characters of ``[A-Za-z0-9._%/-]``.
            body: the bytes that a consumer gets; together with the headers at most 4 MiB.
            delay: how long from now the message is due, by the delay server's clock.
            deliver_at: when the message is due, with a time zone. A message whose instant is past is due at once.
            deliver_at_ms: the same in milliseconds since the epoch.
            headers: names with texts or bytes, at most 32 KiB; the consumer gets them with the body.
            spread: how much later the message may be due: the server chooses the least loaded instant between the due
                instant and the end of this window, at most 7 days, and the receipt says which.
            key: a name for the message, text or UTF-8 of 1 to 200 bytes: no two pending messages of a subject have the
                same one.
            on_conflict: what happens when a pending message has this key: ``"reject"`` (KeyPending), ``"keep"`` (the
                receipt is that of the pending message, and ``kept`` is true) or ``"replace"`` (the new one takes its
                place).
            tags: 1 to 16 distinct texts of at most 64 bytes each, by which messages can be found.
            ttl: how long after its due instant the message expires: then it is not delivered any more.
            expires_at: in place of ttl, the instant, with a time zone, from which on it is not delivered any more.
            ordering_key: messages with the same one come one after the other to groups that ask for that
                (``ordered=True`` of a consumer, docs/consuming.md).

        Raises:
            CallerError: an argument is wrong; the call itself raises it, and nothing was queued.
            QueueFull: the queue stayed full for the timeout; nothing was sent.
            RetryLater: no server took the message within the timeout; it is not kept.
            KeyPending: a pending message has the key; nothing changed.
            InFlight: the message with this key is being handed over at this moment, so it can't be replaced; nothing
                changed. Send again a moment later.
            OutcomeUnknown: nobody knows whether the message is kept; ask `outcome` with the handle of this error.
        """
        if (
            type(deliver_at_ms) is int
            and INSTANT_MS_MIN <= deliver_at_ms <= self._within_ms
            and type(body) is bytes
            and len(body) <= MESSAGE_BYTES_MAX
            and type(subject) is str
            and subject in self._checked
            and headers is None
            and delay is None
            and deliver_at is None
            and spread is None
            and key is None
            and tags is None
            and ttl is None
            and expires_at is None
            and ordering_key is None
            and on_conflict == REJECT
            and not traceparent.get()
        ):
            return self._queue((subject, body, deliver_at_ms, False, NO_HEADERS, None))
        if type(subject) is not str or subject not in self._checked:
            self._check_subject(subject)
        packed = NO_HEADERS if headers is None and not traceparent.get() else pack_headers(headers)
        check_body(body, len(packed))
        when, relative = wish(delay, deliver_at, deliver_at_ms, self._horizon)
        label = label_of(key, on_conflict, tags, expiry_of(ttl, expires_at), ordering_key)
        if label is not None and not relative:
            check_after(label.expires_at_ms, when)
        row = subject, body, when, relative, packed, label
        return self._queue(row) if spread is None else self._queue_spread(row, spread_of(spread))

    @abstractmethod
    def _begin(self, meta: str) -> None:
        """Have an engine that reaches this meta; the settings were checked."""

    @abstractmethod
    def _queue(self, row: Single) -> Sent:
        """Queue a send that was checked."""

    @abstractmethod
    def _queue_spread(self, row: Single, window_ms: int) -> Sent:
        """The same, once a server has chosen its instant."""

    def _check_subject(self, subject: str) -> None:
        check_sent_subject(subject)
        if len(self._checked) >= CHECKED_MAX:
            self._checked.clear()
        self._checked.add(subject)


def named(method: Callable[P, R], name: str, returns: str) -> Callable[P, R]:
    """The same method, called as fast, as help() shows it under another name and with what it returns there."""
    assert isinstance(method, FunctionType), "a method is a function of its class"
    made = FunctionType(method.__code__, method.__globals__, name, method.__defaults__, method.__closure__)
    made.__kwdefaults__, made.__doc__, made.__module__ = method.__kwdefaults__, method.__doc__, method.__module__
    made.__annotations__ = method.__annotations__ | {"return": returns}
    return cast("Callable[P, R]", made)


class SendsBatches(Sends[asyncio.Future[Receipt]]):
    """What an asynchronous producer takes; the blocking one gets its `send_batch` from here, too."""

    async def send_batch(
        self,
        subject: str,
        bodies: Sequence[bytes],
        deliver_at_ms: DeliverAtMs | None = None,
        *,
        delay: Delays | None = None,
        deliver_at: DeliverAt | None = None,
        headers: Headers | Sequence[Headers | None] | None = None,
        spread: timedelta | None = None,
        keys: Sequence[Key | None] | None = None,
        on_conflict: OnConflict = REJECT,
        tags: Tags | Sequence[Tags | None] | None = None,
        ttl: Ttls | None = None,
        expires_at: ExpireAt | None = None,
        ordering_keys: Sequence[Key | None] | None = None,
    ) -> BatchReceipt:
        """Send many messages of one subject, as columns, and wait until they are kept.

        Give exactly one of ``deliver_at_ms``, ``delay`` and ``deliver_at``. Each of them, and ``headers``, is one value
        for all messages, or a column with one value for each: a list, a numpy array (datetime64 counts in UTC) or a
        pandas Series (with a time zone).

        Args:
            subject: as for `send`.
            bodies: the bytes of each message.
            deliver_at_ms: when the messages are due, in milliseconds since the epoch.
            delay: how long from now they are due, by the delay server's clock.
            deliver_at: when they are due, with a time zone.
            headers: as for `send`; None for a message without headers.
            spread: how much later each message may be due: the server chooses the least loaded instants, and the
                receipt says which.
            keys: a key for each message, or None for a message without one. What became of each is in the receipt's
                ``verdicts``; a message that is rejected raises nothing here.
            on_conflict: as for `send`, one for all messages.
            tags: one list of texts for all messages, or one for each.
            ttl: as for `send`, one for all messages or one for each; None for a message that never expires.
            expires_at: the same.
            ordering_keys: an ordering key for each message, or None for a message without one.

        Raises:
            CallerError: an argument is wrong; nothing was sent.
            BatchFailed: some messages failed; the error has the receipt of the others.
            DelaydError: all messages failed in the same way; this is that error.
        """
        name = check_sent_subject(subject)
        bodies = bodies if isinstance(bodies, list | tuple) else need_listed("bodies", bodies, "bytes")
        wishes = wish_column(delay, deliver_at, deliver_at_ms, len(bodies), self._horizon)
        expiries = expiries_of(ttl, expires_at, len(bodies))
        labels = labels_of(len(bodies), keys, on_conflict, tags, expiries, ordering_keys)
        columns = columns_of(name, bodies, headers, wishes, labels)
        return await self._send_columns(columns, None if spread is None else spread_of(spread))

    @abstractmethod
    def _send_columns(self, columns: Columns, window_ms: int | None) -> Coroutine[object, object, BatchReceipt]:
        """Send a batch that was checked, and wait for its outcome; with a window, a server chooses the instants."""


class Columns(NamedTuple):
    """One `send_batch`, checked."""

    subject: bytes
    bodies: Sequence[bytes]
    body_bytes: Int64s
    sizes: Int64s  # All that a row brings: body, headers, key and tags.
    deliver: Int64s
    relative: bool  # Whether ``deliver`` is in us on the monotonic clock, instead of ms since the epoch.
    headers: Sequence[bytes] | None
    labels: Labels | None = None

    @property
    def has_keys(self) -> bool:
        """Whether any of the rows has a key."""
        return self.labels is not None and any(self.labels.keys)

    def cut(self, run: range) -> Columns:
        """Neighbouring rows, without a copy of the arrays."""
        piece = slice(run.start, run.stop)
        headers = None if self.headers is None else self.headers[piece]
        labels = None if self.labels is None else self.labels.cut(run)
        arrays = self.body_bytes[piece], self.sizes[piece], self.deliver[piece]
        return Columns(self.subject, self.bodies[piece], *arrays, self.relative, headers, labels)

    def pick(self, rows: Int64s) -> Columns:
        """Some rows."""
        chosen = rows.tolist()
        headers = None if self.headers is None else [self.headers[row] for row in chosen]
        labels = None if self.labels is None else self.labels.pick(chosen)
        arrays = self.body_bytes[rows], self.sizes[rows], self.deliver[rows]
        return Columns(self.subject, [self.bodies[row] for row in chosen], *arrays, self.relative, headers, labels)


class Expiry(NamedTuple):
    """When one message expires: one of the two, in ms; both 0: never."""

    at_ms: int = 0
    ttl_ms: int = 0


NEVER = Expiry()


class SendItems(NamedTuple):
    """The items of one region, one a row, and their lengths."""

    items: Sequence[bytes]
    lengths: Int64s


class Label(NamedTuple):
    """Key, tags, expiry and ordering key of one message.

    These are plain values, so that a waiting row costs the garbage collector nothing.
    """

    key: bytes
    on_conflict: int
    tags: bytes
    expires_at_ms: int = 0
    ttl_ms: int = 0  # It begins when the message is due; the server hears of the instant at which it ends.
    ordering: int = 0  # The hash of its ordering key; 0 without one.


NO_LABEL = Label(NO_KEY, 0, b"")


# One send, checked: subject, body, when, whether `when` is in us on the monotonic clock instead of ms since the epoch,
# packed headers, and key, tags and expiry if it has any. A plain tuple, because one is made for every send.
Single = tuple[str, bytes, int, bool, bytes, Label | None]


class Labels(NamedTuple):
    """Keys, tags, expiries and ordering keys of many messages: columns of equal length."""

    keys: Sequence[bytes]
    on_conflict: Sequence[int]
    tags: Sequence[bytes]
    expires_at_ms: Sequence[int]
    ttl_ms: Sequence[int]
    ordering: Sequence[int]

    @classmethod
    def none(cls, count: int) -> Labels:
        """The labels of rows that have none."""
        return cls(*([value] * count for value in NO_LABEL))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, each: Sequence[Labels]) -> Labels:
        """The labels of calls that share a batch, one call after the other."""
        return cls(*(list(chain.from_iterable(column)) for column in zip(*each, strict=True)))

    def cut(self, run: range) -> Labels:
        """Neighbouring rows."""
        piece = slice(run.start, run.stop)
        return Labels(*(column[piece] for column in self))  # type: ignore[arg-type]

    def pick(self, rows: Sequence[int]) -> Labels:
        """Some rows."""
        return Labels(*([column[row] for row in rows] for column in self))  # type: ignore[arg-type]

    def add_to(self, columns: dict[ColumnId, ColumnArray], regions: dict[ColumnId, SendItems]) -> None:
        """Add the columns and regions that these labels need, to columns that say when the rows are due."""
        if any(self.keys):
            regions[ColumnId.KEY_END] = SendItems(self.keys, lengths_of(self.keys))
            if any(self.on_conflict):
                columns[ColumnId.ROW_FLAGS] = np.array(self.on_conflict, np.uint16)
        if any(self.tags):
            regions[ColumnId.TAGS_END] = SendItems(self.tags, lengths_of(self.tags))
            columns[ColumnId.TAG_BLOOM] = np.array([bloom_of_item(item) for item in self.tags], np.uint64)
        if any(self.ordering):
            columns[ColumnId.ORDERING_KEY_HASH] = np.array(self.ordering, np.uint64)
        if any(self.expires_at_ms) or any(self.ttl_ms):
            due_ms = columns[ColumnId.DELIVER_AT_MS].astype(np.int64, copy=False)
            instants, lengths = np.array(self.expires_at_ms, np.int64), np.array(self.ttl_ms, np.int64)
            columns[ColumnId.EXPIRES_AT_MS] = expiry_column(instants, lengths, due_ms)

    def keyed_rows(self) -> list[int]:
        """The rows that have a key."""
        return [row for row, key in enumerate(self.keys) if key]

    def sizes(self) -> Int64s:
        """How many bytes the labels of each row have."""
        return lengths_of(self.keys) + lengths_of(self.tags)


class Packed(NamedTuple):
    """Rows as a batch has them: the subject table, the columns without a region, and the regions."""

    subjects: Sequence[bytes]
    columns: dict[ColumnId, ColumnArray]
    regions: dict[ColumnId, SendItems]


def joined(each: Sequence[Columns], deliver_at_ms: Int64s) -> Packed:
    """The rows of calls that share a batch, one call after the other; ``deliver_at_ms`` is of all of them."""
    index: dict[bytes, int] = {}
    subject_of: list[int] = []
    counts: list[int] = []
    lengths: list[Int64s] = []
    have_headers = have_labels = False
    for columns in each:
        subject_of.append(index.setdefault(columns.subject, len(index)))
        counts.append(len(columns.bodies))
        lengths.append(columns.body_bytes)
        have_headers |= columns.headers is not None
        have_labels |= columns.labels is not None
    packed: dict[ColumnId, ColumnArray] = {ColumnId.DELIVER_AT_MS: deliver_at_ms}
    if len(index) > 1:
        packed[ColumnId.SUBJECT] = np.repeat(np.array(subject_of, np.uint32), counts)
    if len(each) == 1:
        bodies = each[0].bodies  # Nothing is copied of a call that goes alone.
    else:
        bodies = list(chain.from_iterable([columns.bodies for columns in each]))
    regions = {ColumnId.BODY_END: SendItems(bodies, lengths[0] if len(each) == 1 else np.concatenate(lengths))}
    if have_headers:
        packed_headers = [columns.headers or [NO_HEADERS] * len(columns.bodies) for columns in each]
        headers = list(chain.from_iterable(packed_headers))
        regions[ColumnId.HEADERS_END] = SendItems(headers, lengths_of(headers))
    if have_labels:
        Labels.joined([columns.labels or Labels.none(len(columns.bodies)) for columns in each]).add_to(packed, regions)
    return Packed(list(index), packed, regions)


def columns_of(
    subject: bytes,
    bodies: Sequence[bytes],
    headers: Headers | Sequence[Headers | None] | None,
    wishes: tuple[Int64s, bool],
    labels: Labels | None = None,
) -> Columns:
    """Check the bodies and headers of many sends of one subject; row numbers in errors count from 0."""
    body_bytes = sizes = check_bodies(bodies)
    packed = _pack_each(headers, len(bodies))
    if packed is not None:
        sizes = body_bytes + lengths_of(packed)
    if len(sizes) and sizes.max() > MESSAGE_BYTES_MAX:
        row = int(sizes.argmax())
        raise MessageTooLarge(f"row {row} has {sizes[row]} bytes and is over the limit of {MESSAGE_BYTES_MAX}")
    if labels is not None:
        sizes = sizes + labels.sizes()
    return Columns(subject, bodies, body_bytes, sizes, *wishes, packed, labels)


def spread_of(spread: timedelta) -> int:
    """The window of a send in ms; BadArgument when no server would take it."""
    if not timedelta(0) <= need_timedelta("spread", spread, BadArgument) <= SPREAD_MAX:
        raise BadArgument(f"spread is {spread} and must lie within 0 and {SPREAD_MAX.days} days")
    return spread // _MS


def label_of(
    key: Key | None,
    on_conflict: OnConflict,
    tags: Tags | None,
    expiry: Expiry = NEVER,
    ordering_key: Key | None = None,
) -> Label | None:
    """Check key, tags and ordering key of one message; None when it has none of them, and no expiry.

    Raises:
        BadKey, BadTags, BadArgument: what is wrong with them.
    """
    flag = _flag(on_conflict)
    if key is None:
        _need_key(flag)
    item = b"" if tags is None else _tags_item(tags)
    ordering = 0 if ordering_key is None else _hash_of(ordering_key)
    if key is None:
        return Label(NO_KEY, 0, item, *expiry, ordering) if item or ordering or expiry != NEVER else None
    return Label(check_key(key), flag, item, *expiry, ordering)


def labels_of(
    count: int,
    keys: Sequence[Key | None] | None,
    on_conflict: OnConflict,
    tags: Tags | Sequence[Tags | None] | None,
    expiries: Sequence[Expiry] | None = None,
    ordering_keys: Sequence[Key | None] | None = None,
) -> Labels | None:
    """Check keys, tags and ordering keys of ``count`` messages; None when none of them has any, nor an expiry.

    Raises:
        BadKey, BadTags, BadArgument: what is wrong with them, with the row.
    """
    flag = _flag(on_conflict)
    packed_keys: Sequence[bytes] = [NO_KEY] * count
    flags: Sequence[int] = [0] * count
    if keys is None:
        _need_key(flag)
    else:
        packed_keys = _keys_of(keys, count)
        flags = [flag if key else 0 for key in packed_keys]
    items = [b""] * count if tags is None else _items_of(tags, count)
    ordering = [0] * count if ordering_keys is None else _ordering_of(ordering_keys, count)
    if not (any(packed_keys) or any(items) or any(ordering) or expiries):
        return None
    expiries = [NEVER] * count if expiries is None else expiries
    ends = [each.at_ms for each in expiries], [each.ttl_ms for each in expiries]
    return Labels(packed_keys, flags, items, *ends, ordering)


def check_key(key: Key) -> bytes:
    """A key as bytes; BadKey when a server would not take it."""
    if isinstance(key, str):
        try:
            packed = key.encode()
        except UnicodeEncodeError as error:
            raise BadKey(f"key {key[:300]!r} can't be written as UTF-8: {error.reason}") from error
    elif isinstance(key, bytes):
        packed = key
    else:
        raise BadKey(f"a key is text or bytes, not {type(key).__name__}")
    validate.check_key(packed)
    return packed


def check_keys(keys: Sequence[Key]) -> list[bytes]:
    """The keys of a question about many messages as bytes: each row has one."""
    packed = _keys_of(keys, None)
    if NO_KEY in packed:
        raise BadKey(f"the key of row {packed.index(NO_KEY)} is None; a question by key needs one for each row")
    return packed


def _flag(on_conflict: object) -> int:
    if not isinstance(on_conflict, str) or on_conflict not in ON_CONFLICT:
        raise BadArgument(f'on_conflict is {on_conflict!r}; it is "reject", "keep" or "replace"')
    return ON_CONFLICT[on_conflict]


def _need_key(flag: int) -> None:
    if flag:
        raise BadArgument("on_conflict says what to do about a key, and none was given")


def _keys_of(keys: Sequence[Key | None], count: int | None) -> list[bytes]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise BadArgument(f"keys are a list with one key for each message, not {type(keys).__name__}")
    packed: list[bytes] = []
    for row, key in enumerate(keys):
        try:
            packed.append(NO_KEY if key is None else check_key(key))
        except BadKey as error:
            raise BadKey(f"row {row}: {error.message}") from error
    if count is not None and len(packed) != count:
        raise BadArgument(f"{len(packed)} keys were given for {count} bodies; give one for each, or None")
    return packed


def _hash_of(ordering_key: Key) -> int:
    try:
        return ordering_hash(check_key(ordering_key))
    except BadKey as error:
        raise BadKey(f"ordering_key: {error.message}") from error


def _ordering_of(keys: Sequence[Key | None], count: int) -> list[int]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise BadKey(f"ordering_keys are a list with one key for each message, not {type(keys).__name__}")
    hashes: list[int] = []
    for row, key in enumerate(keys):
        try:
            hashes.append(0 if key is None else _hash_of(key))
        except BadKey as error:
            raise BadKey(f"row {row}: {error.message}") from error
    if len(hashes) != count:
        raise BadArgument(f"{len(hashes)} ordering_keys were given for {count} bodies; give one for each, or None")
    return hashes


def _tags_item(tags: Tags) -> bytes:
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        raise BadTags(f"tags are a list of texts, not {type(tags).__name__}")
    listed = list(tags)
    if any(str(tag).startswith(TAG_PREFIX) for tag in listed):
        raise BadTags(f"tags that begin with {TAG_PREFIX} are the servers' own; choose another one")
    return encode_tags(listed)


def _items_of(tags: Tags | Sequence[Tags | None], count: int) -> list[bytes]:
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        raise BadTags(f"tags are a list of texts, or one list for each message, not {type(tags).__name__}")
    listed = list(tags)
    if all(isinstance(tag, str) for tag in listed):
        return [_tags_item([tag for tag in listed if isinstance(tag, str)])] * count
    if len(listed) != count:
        raise BadArgument(
            f"{len(listed)} lists of tags were given for {count} bodies; give one for each, or one for all"
        )
    items: list[bytes] = []
    for row, own in enumerate(listed):
        try:
            items.append(b"" if own is None else _tags_item(own))
        except BadTags as error:
            raise BadTags(f"row {row}: {error.message}") from error
    return items


def expiry_of(ttl: timedelta | None, expires_at: datetime | None) -> Expiry:
    """Check the expiry of one message.

    Raises:
        BadArgument: both were given, or values of another type.
        BadExpiry: a time that is not above 0, or an instant that no message can have.
        NaiveDatetime: a datetime without a time zone.
    """
    if ttl is None:
        return NEVER if expires_at is None else Expiry(at_ms=_instant(expires_at))
    if expires_at is not None:
        raise BadArgument(_BOTH)
    return Expiry(ttl_ms=_length(ttl))


def expiries_of(ttl: Ttls | None, expires_at: ExpireAt | None, count: int) -> list[Expiry] | None:
    """Check the expiries of ``count`` messages: one for all, or one for each, None for a message that never expires.

    Raises as `expiry_of`, with the row.
    """
    if ttl is None and expires_at is None:
        return None
    if ttl is not None and expires_at is not None:
        raise BadArgument(_BOTH)
    if isinstance(ttl, timedelta) or isinstance(expires_at, datetime):
        return [expiry_of(ttl, expires_at)] * count  # type: ignore[arg-type]
    name, values = ("ttl", ttl) if expires_at is None else ("expires_at", expires_at)
    found: list[Expiry] = []
    for row, value in enumerate(_listed(name, values)):
        try:
            if value != value:
                raise BadArgument(f"{name} is {value}; say None for a message that never expires")
            found.append(expiry_of(value, None) if expires_at is None else expiry_of(None, value))
        except (BadArgument, BadExpiry, NaiveDatetime) as error:
            raise type(error)(f"row {row}: {error.message}") from error
    if len(found) != count:
        raise BadArgument(
            f"{len(found)} values of {name} were given for {count} bodies; give one for each, or one for all"
        )
    return found


def check_after(expires_at_ms: int, due_ms: int) -> None:
    """Refuse a message that would expire before it is due, or at that instant, with BadExpiry."""
    if expires_at_ms and expires_at_ms <= due_ms:
        raise BadExpiry(f"a message that is due at {due_ms} ms can't expire at {expires_at_ms} ms; say a later instant")


def expiry_column(at_ms: Int64s, ttl_ms: Int64s, due_ms: Int64s) -> Int64s:
    """The instants at which messages expire, 0 for never."""
    return np.where(ttl_ms > 0, due_ms + ttl_ms, at_ms)


def _length(ttl: timedelta) -> int:
    if not timedelta(0) < need_timedelta("ttl", ttl, BadArgument) <= HORIZON_MS * _MS:
        raise BadExpiry(f"ttl is {ttl} and must be more than 0 and at most {HORIZON_MS // 86_400_000} days")
    return -(-ttl // _MS)


def _instant(expires_at: datetime) -> int:
    instant = instant_ms(expires_at, "expires_at")
    if instant < INSTANT_MS_MIN:
        raise BadExpiry(f"expires_at {expires_at.isoformat()} is before 2001-09-09")
    if instant > INSTANT_MS_MAX:
        raise BadExpiry(f"expires_at {expires_at.isoformat()} is later than any instant; None stands for never")
    return instant


def _listed(name: str, values: Any) -> Iterable[Any]:
    """The values one by one; those of numpy's own instants (in UTC) and lengths of time as Python's, rounded up."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        kind = "timedelta" if name == "ttl" else "datetime"
        raise BadArgument(f"{name} must be a {kind}, or a column of them, not {type(values).__name__}")
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "mM":
        return values
    if np.isnat(values).any():
        raise BadArgument(f"{name} of row {int(np.isnat(values).argmax())} is NaT; in a list, None stands for never")
    listed: list[Any] = in_unit(name, values, "us").astype(f"{values.dtype.kind}8[us]").tolist()
    # What Python has no value for comes as a number, and is refused as one.
    return listed if values.dtype.kind == "m" else [_in_utc(value) for value in listed]


def _in_utc(value: Any) -> Any:
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) else value


def _pack_each(headers: Headers | Sequence[Headers | None] | None, count: int) -> list[bytes] | None:
    if headers is None and not traceparent.get():
        return None
    if headers is None or isinstance(headers, Mapping):
        return [pack_headers(headers)] * count
    packed = [pack_headers(own) for own in need_listed("headers", headers, "mappings, one for each body")]
    if len(packed) != count:
        raise BadArgument(f"{len(packed)} headers were given for {count} bodies; give one for each, or one for all")
    return packed if any(packed) else None
