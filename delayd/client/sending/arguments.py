"""Arguments: checks what callers of a producer say, and turns it into queued values.

Invariant: nothing is queued before all arguments of a call were checked, and every fault in them is a CallerError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np

from delayd.batch import Int64s
from delayd.client.home_clock import MACHINE_CLOCK, HomeClock
from delayd.client.instants import HORIZON_MS, Horizon, wish
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
    need_ms,
    need_timedelta,
    need_whole,
    pack_headers,
    unreached_s,
)
from delayd.client.sending.due_columns import Delays, DeliverAt, DeliverAtMs, wish_column
from delayd.client.sending.expiries import ExpireAt, Ttls, check_after, expiries_of, expiry_of
from delayd.client.sending.labels import REJECT, Key, Label, Labels, OnConflict, Tags, label_of, labels_of
from delayd.client.sending.message_asker import NewInstants
from delayd.errors import BadArgument, BadSetting, MessageTooLarge
from delayd.hours import INSTANT_MS_MIN
from delayd.limits import MESSAGE_BYTES_MAX
from delayd.tracing import traceparent

# Longer than an acknowledgement takes on a calm machine: a second batch that leaves beside the first one costs the
# server as much as that and is answered no sooner.
LINGER_MS = 5.0
LINGER_MS_MAX = 1_000.0
QUEUE_BYTES_MAX = 64 << 20  # Single sends may hold this much memory; above it senders wait.
TIMEOUT_MS = 30_000.0  # Longer than a server takes to restart and replay.
HORIZON = timedelta(milliseconds=HORIZON_MS)
CHECKED_MAX = 4_096  # Subjects remembered as checked.


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


# One send, checked: subject, body, when, whether `when` is in us on the monotonic clock instead of ms since the epoch,
# packed headers, and key, tags and expiry if it has any. A plain tuple, because one is made for every send.
Single = tuple[str, bytes, int, bool, bytes, Label | None]


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


class Arguments:
    """Checks the calls of one producer; remembers the subjects that passed."""

    __slots__ = ("_checked", "_horizon", "_within_ms")

    def __init__(self, horizon: timedelta, clock: HomeClock = MACHINE_CLOCK) -> None:
        self._horizon = Horizon(horizon // timedelta(milliseconds=1), clock.delay_us, clock.wall_ms)
        # An instant within the horizon at the producer's start stays within it, so most sends need not read the clock.
        self._within_ms = self._horizon.wall_ms() + self._horizon.ms
        self._checked: set[str] = set()

    def single(
        self,
        subject: str,
        body: bytes,
        delay: timedelta | None,
        deliver_at: datetime | None,
        deliver_at_ms: int | None,
        headers: Headers | None,
        key: Key | None = None,
        on_conflict: OnConflict = REJECT,
        tags: Tags | None = None,
        ttl: timedelta | None = None,
        expires_at: datetime | None = None,
        ordering_key: Key | None = None,
    ) -> Single:
        """Check one send."""
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
            and key is None
            and tags is None
            and ttl is None
            and expires_at is None
            and ordering_key is None
            and on_conflict == REJECT
            and not traceparent.get()
        ):
            return subject, body, deliver_at_ms, False, NO_HEADERS, None
        if type(subject) is not str or subject not in self._checked:
            self._check_subject(subject)
        packed = NO_HEADERS if headers is None and not traceparent.get() else pack_headers(headers)
        check_body(body, len(packed))
        when, relative = wish(delay, deliver_at, deliver_at_ms, self._horizon)
        expiry = expiry_of(ttl, expires_at)
        if not relative:
            check_after(expiry, when)
        return subject, body, when, relative, packed, label_of(key, on_conflict, tags, expiry, ordering_key)

    def columns(
        self,
        subject: str,
        bodies: Sequence[bytes],
        deliver_at_ms: DeliverAtMs | None,
        delay: Delays | None,
        deliver_at: DeliverAt | None,
        headers: Headers | Sequence[Headers | None] | None,
        keys: Sequence[Key | None] | None = None,
        on_conflict: OnConflict = REJECT,
        tags: Tags | Sequence[Tags | None] | None = None,
        ttl: Ttls | None = None,
        expires_at: ExpireAt | None = None,
        ordering_keys: Sequence[Key | None] | None = None,
    ) -> Columns:
        """Check many sends of one subject; row numbers in errors count from 0."""
        name = check_sent_subject(subject)
        bodies = bodies if isinstance(bodies, list | tuple) else need_listed("bodies", bodies, "bytes")
        body_bytes = sizes = check_bodies(bodies)
        packed = _pack_each(headers, len(bodies))
        if packed is not None:
            sizes = body_bytes + lengths_of(packed)
        if len(sizes) and sizes.max() > MESSAGE_BYTES_MAX:
            row = int(sizes.argmax())
            raise MessageTooLarge(f"row {row} has {sizes[row]} bytes and is over the limit of {MESSAGE_BYTES_MAX}")
        deliver, relative = wish_column(delay, deliver_at, deliver_at_ms, len(bodies), self._horizon)
        expiries = expiries_of(ttl, expires_at, len(bodies))
        labels = labels_of(keys, on_conflict, tags, len(bodies), expiries, ordering_keys)
        if labels is not None:
            sizes = sizes + labels.sizes()
        return Columns(name, bodies, body_bytes, sizes, deliver, relative, packed, labels)

    def new_instant(
        self, delay: timedelta | None, deliver_at: datetime | None, deliver_at_ms: int | None
    ) -> NewInstants:
        """Check the instant to which a message is to be moved."""
        when, relative = wish(delay, deliver_at, deliver_at_ms, self._horizon)
        return NewInstants(np.array([when], np.int64), relative)

    def new_instants(
        self, delay: Delays | None, deliver_at: DeliverAt | None, deliver_at_ms: DeliverAtMs | None, count: int
    ) -> NewInstants:
        """Check the instants to which ``count`` messages are to be moved."""
        return NewInstants(*wish_column(delay, deliver_at, deliver_at_ms, count, self._horizon))

    def _check_subject(self, subject: str) -> None:
        check_sent_subject(subject)
        if len(self._checked) >= CHECKED_MAX:
            self._checked.clear()
        self._checked.add(subject)


def _pack_each(headers: Headers | Sequence[Headers | None] | None, count: int) -> list[bytes] | None:
    if headers is None and not traceparent.get():
        return None
    if headers is None or isinstance(headers, Mapping):
        return [pack_headers(headers)] * count
    packed = [pack_headers(own) for own in need_listed("headers", headers, "mappings, one for each body")]
    if len(packed) != count:
        raise BadArgument(f"{len(packed)} headers were given for {count} bodies; give one for each, or one for all")
    return packed if any(packed) else None
