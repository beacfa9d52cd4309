"""Arguments: checks what callers of a producer say, and turns it into queued values.

Invariant: nothing is queued before all arguments of a call were checked, and every fault in them is a CallerError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from delayd.batch import Int64s
from delayd.client.instants import HORIZON_MS, wall_ms, wish
from delayd.client.limits import (
    NO_HEADERS,
    TIMEOUT_MS_MAX,
    TIMEOUT_MS_MIN,
    Headers,
    check_bodies,
    check_body,
    check_subject,
    lengths_of,
    need_ms,
    need_timedelta,
    need_whole,
    pack_headers,
)
from delayd.client.sending.due_columns import Delays, DeliverAt, DeliverAtMs, wish_column
from delayd.errors import BadArgument, BadSetting, MessageTooLarge
from delayd.hours import INSTANT_MS_MIN
from delayd.limits import MESSAGE_BYTES_MAX

# Enough to gather several messages at 5,000 sends a second, and little beside the fsync that every batch waits for.
LINGER_MS = 2.0
LINGER_MS_MAX = 1_000.0
QUEUE_BYTES_MAX = 64 << 20  # Single sends may hold this much memory; above it senders wait.
TIMEOUT_MS = 30_000.0  # Longer than a server takes to restart and replay.
CHECKED_MAX = 4_096  # Subjects remembered as checked.


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """How a producer behaves; BadSetting when a value is out of range."""

    linger_ms: float = LINGER_MS
    queue_bytes_max: int = QUEUE_BYTES_MAX
    timeout_ms: float = TIMEOUT_MS
    horizon: timedelta = timedelta(milliseconds=HORIZON_MS)

    def __post_init__(self) -> None:
        need_ms("linger_ms", self.linger_ms, 0, LINGER_MS_MAX)
        need_ms("timeout_ms", self.timeout_ms, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)
        if need_whole("queue_bytes_max", self.queue_bytes_max, 0, BadSetting) < MESSAGE_BYTES_MAX:
            raise BadSetting(f"queue_bytes_max is {self.queue_bytes_max}; one message may need {MESSAGE_BYTES_MAX}")
        if not timedelta(0) < need_timedelta("horizon", self.horizon, BadSetting) <= timedelta(milliseconds=HORIZON_MS):
            raise BadSetting(f"horizon is {self.horizon} and must lie within 0 and {HORIZON_MS // 86_400_000} days")


# One send, checked: subject, body, when, whether `when` is in us on the monotonic clock instead of ms since the epoch,
# and packed headers. A plain tuple, because one is made for every send.
Single = tuple[str, bytes, int, bool, bytes]


class Columns(NamedTuple):
    """One `send_batch`, checked."""

    subject: bytes
    bodies: Sequence[bytes]
    body_bytes: Int64s
    sizes: Int64s  # Headers and body together.
    deliver: Int64s
    relative: bool
    headers: Sequence[bytes] | None


class Arguments:
    """Checks the calls of one producer; remembers the subjects that passed."""

    __slots__ = ("_checked", "_horizon_ms", "_within_ms")

    def __init__(self, horizon: timedelta) -> None:
        self._horizon_ms = horizon // timedelta(milliseconds=1)
        # An instant within the horizon at the producer's start stays within it, so most sends need not read the clock.
        self._within_ms = wall_ms() + self._horizon_ms
        self._checked: set[str] = set()

    def single(
        self,
        subject: str,
        body: bytes,
        delay: timedelta | None,
        deliver_at: datetime | None,
        deliver_at_ms: int | None,
        headers: Headers | None,
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
        ):
            return subject, body, deliver_at_ms, False, NO_HEADERS
        if type(subject) is not str or subject not in self._checked:
            self._check_subject(subject)
        packed = NO_HEADERS if headers is None else pack_headers(headers)
        check_body(body, len(packed))
        when, relative = wish(delay, deliver_at, deliver_at_ms, self._horizon_ms)
        return subject, body, when, relative, packed

    def columns(
        self,
        subject: str,
        bodies: Sequence[bytes],
        deliver_at_ms: DeliverAtMs | None,
        delay: Delays | None,
        deliver_at: DeliverAt | None,
        headers: Headers | Sequence[Headers | None] | None,
    ) -> Columns:
        """Check many sends of one subject; row numbers in errors count from 0."""
        name = check_subject(subject)
        if isinstance(bodies, bytes | bytearray | memoryview | str):
            raise BadArgument(f"bodies are a list of bytes, not {type(bodies).__name__}; one message is sent by `send`")
        bodies = bodies if isinstance(bodies, list | tuple) else list(bodies)
        body_bytes = sizes = check_bodies(bodies)
        packed = _pack_each(headers, len(bodies))
        if packed is not None:
            sizes = body_bytes + lengths_of(packed)
        if len(sizes) and sizes.max() > MESSAGE_BYTES_MAX:
            row = int(sizes.argmax())
            raise MessageTooLarge(f"row {row} has {sizes[row]} bytes and is over the limit of {MESSAGE_BYTES_MAX}")
        deliver, relative = wish_column(delay, deliver_at, deliver_at_ms, len(bodies), self._horizon_ms)
        return Columns(name, bodies, body_bytes, sizes, deliver, relative, packed)

    def _check_subject(self, subject: str) -> None:
        check_subject(subject)
        if len(self._checked) >= CHECKED_MAX:
            self._checked.clear()
        self._checked.add(subject)


def _pack_each(headers: Headers | Sequence[Headers | None] | None, count: int) -> list[bytes] | None:
    if headers is None:
        return None
    if isinstance(headers, Mapping):
        return [pack_headers(headers)] * count
    packed = [pack_headers(own) for own in headers]
    if len(packed) != count:
        raise BadArgument(f"{len(packed)} headers were given for {count} bodies; give one for each, or one for all")
    return packed if any(packed) else None
