"""Values: what requests have in JSON, and what answers have; checked by msgspec, as the OpenAPI page describes them.

Invariant: a field that is not known is refused, so that a slip of a name sends no message with another meaning.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

import msgspec

from delayd.client.pulling.message import MessageView
from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument
from delayd.hours import instant_text

JSON = "application/json"
PULL_MAX = 1_000  # Messages in one answer.
WAIT_MS_MAX = 30_000  # Shorter than proxies wait for an answer.
LEASE_MS_MAX = 43_200_000
REASON_MAX = 4_096
LEASES_MAX = 10_000

FLOW, TIMEOUT = "delayd-flow", "delayd-timeout"  # Headers of a message for its push target.

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdw])")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")


Instant = Annotated[datetime, msgspec.Meta(tz=True)]
"""With its offset from UTC."""


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a message is due: exactly one of the four."""

    delay: str | None = None
    delay_ms: int | None = None
    deliver_at: Instant | None = None
    deliver_at_ms: int | None = None

    def terms(self) -> dict[str, timedelta | datetime | int]:
        """The arguments of a send."""
        given: dict[str, timedelta | datetime | int] = {}
        if self.delay is not None:
            given["delay"] = duration(self.delay)
        if self.delay_ms is not None:
            if given:
                raise BadArgument("give delay or delay_ms, not both")
            given["delay"] = milliseconds("delay_ms", self.delay_ms)
        if self.deliver_at is not None:
            given["deliver_at"] = self.deliver_at
        if self.deliver_at_ms is not None:
            given["deliver_at_ms"] = self.deliver_at_ms
        return given


class NewMessage(When, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message to be sent."""

    body: str | None = None
    body_base64: str | None = None
    headers: dict[str, str] | None = None
    key: str | None = None
    on_conflict: Literal["reject", "keep", "replace"] = "reject"
    tags: list[str] | None = None
    ttl_ms: int | None = None
    expires_at: Instant | None = None
    ordering_key: str | None = None
    spread_ms: int | None = None
    flow: str | None = None  # For push targets, as the header of that name.
    timeout: str | None = None

    def all_headers(self) -> dict[str, str] | None:
        """The headers, with those that these options stand for."""
        own = {FLOW: self.flow, TIMEOUT: self.timeout}
        given = {name: value for name, value in own.items() if value is not None}
        if self.timeout is not None:
            duration(self.timeout)
        return {**(self.headers or {}), **given} if given else self.headers

    def content(self) -> bytes:
        """The bytes of the message."""
        if (self.body is None) == (self.body_base64 is None):
            raise BadArgument("give body, a text, or body_base64, any bytes")
        if self.body is not None:
            return self.body.encode()
        assert self.body_base64 is not None
        try:
            return base64.b64decode(self.body_base64, validate=True)
        except ValueError as error:
            raise BadArgument(f"body_base64 is not base64: {error}") from error


class Pull(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pull of a group."""

    max_messages: int = 1
    wait_ms: int = 0
    lease_ms: int = 60_000


class Leases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that were pulled, by their leases, and what is said of them."""

    leases: list[str]
    delay_ms: int | None = None  # A nack has it; without it the consumer's backoff counts.
    lease_ms: int | None = None  # An extension needs it.
    reason: str = ""  # A rejection needs it.
    error: str = ""


class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a send is told: the message is kept."""

    id: str
    log_id: str
    sequence: int
    deliver_at: str
    deliver_at_ms: int
    accepted_at_ms: int
    was_due: bool = False
    duplicate: bool = False
    kept: bool = False
    replaced: int | None = None

    @classmethod
    def of(cls, receipt: Receipt) -> Given:
        """The same as a receipt."""
        return cls(
            id=receipt.token,
            log_id=f"{receipt.log_id:016x}",
            sequence=receipt.sequence,
            deliver_at=instant_text(receipt.deliver_at_ms),
            deliver_at_ms=receipt.deliver_at_ms,
            accepted_at_ms=receipt.accepted_at_ms,
            was_due=receipt.was_due,
            duplicate=receipt.duplicate,
            kept=receipt.kept,
            replaced=receipt.replaced,
        )


def duration(text: str) -> timedelta:
    """A length of time as people write it, such as ``30m`` or ``1h30m``."""
    if not _DURATION.fullmatch(text):
        raise BadArgument(f"{text[:40]!r} is no duration; write one such as 250ms, 30s, 30m, 1h30m, 2d or 1w")
    return milliseconds("delay", sum(float(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text)))


def milliseconds(name: str, count: float) -> timedelta:
    """So many milliseconds; BadArgument beyond what a datetime can count."""
    try:
        return timedelta(milliseconds=count)
    except OverflowError as error:
        raise BadArgument(f"{name} is too long") from error


def body_of(content: bytes) -> dict[str, str]:
    """A body in an answer: as text where it is one, else in base64."""
    try:
        return {"body": content.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(content).decode()}


def shown(message: MessageView) -> dict[str, object]:
    """A pulled message in an answer, or in a POST of several."""
    told: dict[str, object] = {**body_of(message.body), "subject": message.subject}
    told |= {"attempt": message.attempt, "deliver_at": instant_text(message.deliver_at_ms)}
    told |= {"deliver_at_ms": message.deliver_at_ms, "late_ms": message.late_ms}
    told |= {"log_id": f"{message.log_id:016x}", "sequence": message.sequence}
    if message.headers:
        told["headers"] = {
            name: value if isinstance(value, str) else value.decode(errors="replace")
            for name, value in message.headers.items()
        }
    if message.key is not None:
        told["key"] = message.key
    if message.tags:
        told["tags"] = message.tags
    return told


def utc(text: str, name: str) -> datetime:
    """An instant in a query, with its offset from UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadArgument(f"{name}: {text[:40]!r} is no instant; write one such as 2027-01-31T09:00:00Z") from error
    if moment.tzinfo is None:
        raise BadArgument(f"{name}: {text[:40]!r} does not say its offset from UTC; end it with Z or +02:00")
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise BadArgument(f"{name}: {text[:40]!r} is beyond what a datetime can count") from error
