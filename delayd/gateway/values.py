"""Values: what requests have in JSON and in their query, and what answers have. msgspec checks requests, and the
OpenAPI document is made from the same types (`delayd.gateway.openapi`).

Invariant: a field that is not known is refused, so that a slip of a name sends no message with another meaning. A bound
of a field stands at its type, so that the document has it, too.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import product, repeat
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from delayd.client.pulling.message import MessageColumns
from delayd.client.sending.receipts import Receipt, ReceiptPart, receipts, tokens_of
from delayd.errors import BadArgument, InFlight, KeyPending
from delayd.hours import instant_text

JSON = "application/json"
PULL_MAX = 1_000  # Messages in one answer.
WAIT_MS_MAX = 30_000  # Shorter than proxies wait for an answer.
LEASE_MS_MAX = 43_200_000
LEASES_MAX = 10_000
INTEGER_MAX = (1 << 63) - 1

FLOW, TIMEOUT = "delayd-flow", "delayd-timeout"  # Headers of a message for its push target.

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdw])")
_FAULT = re.compile(r"(.+) - at `\$\.(\w+)`")  # What msgspec says of a member.
ENUM_FAULT = "Invalid enum value "
_DURATION = re.compile(rf"(?:{_PART.pattern})+")


S = TypeVar("S")
M = TypeVar("M", "PulledMessage", "PushedMessage")

Instant = Annotated[datetime, Meta(tz=True)]
"""With its offset from UTC."""

DURATION_PATTERN = "^([0-9]+([.][0-9]+)?(ms|[smhdw]))+$"
DURATION_FAULT = "is no duration; write one such as 250ms, 30s, 30m, 1h30m, 2d or 1w"
INSTANT_FAULT = "is no instant; write one such as 2027-01-31T09:00:00Z or 2027-01-31T10:00:00+01:00"

Duration = Annotated[str, Meta(pattern=DURATION_PATTERN, max_length=100)]
"""As people write it, such as 250ms, 30s, 1h30m or 2d."""

Integer = Annotated[int, Meta(ge=-INTEGER_MAX - 1, le=INTEGER_MAX)]
LeaseMs = Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)]
LeaseNames = Annotated[list[str], Meta(min_length=1, max_length=LEASES_MAX)]


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a message is due: exactly one of the four."""

    delay: Duration | None = None
    delay_ms: Integer | None = None
    deliver_at: Instant | None = None
    deliver_at_ms: Integer | None = None

    def terms(self) -> dict[str, timedelta | datetime | int]:
        """The argument of a send; BadArgument unless there is exactly one."""
        given: list[tuple[str, timedelta | datetime | int]] = []
        if self.delay is not None:
            given.append(("delay", duration(self.delay)))
        if self.delay_ms is not None:
            given.append(("delay", milliseconds("delay_ms", self.delay_ms)))
        if self.deliver_at is not None:
            given.append(("deliver_at", self.deliver_at))
        if self.deliver_at_ms is not None:
            given.append(("deliver_at_ms", self.deliver_at_ms))
        if len(given) != 1:
            raise BadArgument(
                "say once when a message is due: one of delay (as 30s), delay_ms, deliver_at and deliver_at_ms"
            )
        return dict(given)


class SendOptions(When, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a message may have besides its body."""

    key: str | None = None
    on_conflict: Literal["reject", "keep", "replace"] = "reject"
    tags: list[str] | None = None
    ttl_ms: Integer | None = None
    expires_at: Instant | None = None
    ordering_key: str | None = None
    spread_ms: Integer | None = None
    flow: str | None = None  # For push targets, as the header of that name.
    timeout: Duration | None = None

    def all_headers(self, headers: dict[str, str] | None) -> dict[str, str] | None:
        """These headers, with those that options stand for."""
        if self.flow is None and self.timeout is None:
            return headers
        own = {FLOW: self.flow, TIMEOUT: self.timeout}
        given = {name: value for name, value in own.items() if value is not None}
        if self.timeout is not None:
            duration(self.timeout)
        return {**(headers or {}), **given}

    def column_form(self) -> ColumnForm | None:
        """Which messages it can be sent with as columns; None when it goes by itself, also to be refused."""
        relative = (self.delay is not None) + (self.delay_ms is not None)
        at, at_ms = self.deliver_at is not None, self.deliver_at_ms is not None
        if relative + at + at_ms != 1 or self.spread_ms is not None:
            return None
        when = "delay" if relative else "deliver_at" if at else "deliver_at_ms"
        expires = self.expires_at is not None
        if (expires and self.ttl_ms is not None) or (self.key is None and self.on_conflict != "reject"):
            return None
        return _FORMS[when, "" if self.key is None else self.on_conflict, expires]


class ColumnForm(NamedTuple):
    """What messages have in common that are sent as columns."""

    when: str  # How their instants are given: delay, deliver_at or deliver_at_ms.
    on_conflict: str  # Empty of messages without keys.
    expires: bool  # Whether they have `expires_at`, and not the length `ttl_ms` or nothing.


_FORMS = {
    form: ColumnForm(*form)
    for form in product(("delay", "deliver_at", "deliver_at_ms"), ("", "reject", "keep", "replace"), (False, True))
}


class NewMessage(SendOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message to be sent, with `body`, a text, or `body_base64`, any bytes."""

    body: str | None = None
    body_base64: str | None = None
    headers: dict[str, str] | None = None

    def content(self) -> bytes:
        """The bytes of the message."""
        return body_bytes(self.body, self.body_base64)


class PackedMessage(SendOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same in msgpack, where `body` is bin: any bytes."""

    body: bytes
    headers: dict[str, str] | None = None

    def content(self) -> bytes:
        """The bytes of the message."""
        return self.body


class ByKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message by the key that it was sent with."""

    key: str


class Browse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message by its key alone, or all that are pending in a window."""

    key: str | None = None
    due_from: Instant | None = None
    due_before: Instant | None = None
    tag: str | None = None
    contents: bool = False


class Pull(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pull of a group."""

    max_messages: Annotated[int, Meta(ge=1, le=PULL_MAX)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    lease_ms: LeaseMs = 60_000


class Follow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a group's messages are followed: at most `max_held` of them are without a word of the caller's."""

    lease_ms: LeaseMs = 60_000
    max_held: Annotated[int, Meta(ge=1, le=PULL_MAX)] = 100


class Leases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that were pulled, by their leases."""

    leases: LeaseNames


class GivenBack(Leases, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that are to come again; without `delay_ms` when the backoff of consumers says."""

    delay_ms: Integer | None = None
    error: str = ""


class Unwanted(Leases, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that become dead letters, for a reason of one word."""

    reason: Annotated[str, Meta(min_length=1)]
    error: str = ""


class Extension(Leases, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages that are held for so long from now."""

    lease_ms: LeaseMs


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request, or one of its messages, failed (RFC 9457); `next_free_ms` is of a quota that is full."""

    type: str
    status: int
    code: str
    detail: str
    retry_after_ms: int = 0
    next_free_ms: int = 0


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

    @classmethod
    def of_part(cls, part: ReceiptPart) -> list[Given | KeyPending | InFlight]:
        """The same as the receipts of messages that one server accepted together, or the error in the place of one."""
        log_id, base_sequence, count, at_ms, duplicate, decided = part.accepted
        if decided:
            each = receipts(part.accepted, part.deliver_at_ms.tolist())
            return [cls.of(receipt) if isinstance(receipt, Receipt) else receipt for receipt in each]
        sequences = np.arange(count, dtype=np.uint64) + np.uint64(base_sequence)
        tokens = tokens_of(
            np.full(count, log_id, np.uint64), sequences, part.deliver_at_ms, np.full(count, at_ms, np.int64)
        )
        log = f"{log_id:016x}"
        return [
            cls(
                id=token,
                log_id=log,
                sequence=sequence,
                deliver_at=instant_text(due_ms),
                deliver_at_ms=due_ms,
                accepted_at_ms=at_ms,
                was_due=due_ms <= at_ms,
                duplicate=duplicate,
            )
            for token, sequence, due_ms in zip(tokens, sequences.tolist(), part.deliver_at_ms.tolist(), strict=True)
        ]


class MessageFate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a message so far."""

    state: str
    deliver_at: str
    deliver_at_ms: int
    attempt: int
    decided_at_ms: int | None = None
    target_log_id: str | None = None
    target_appended_at_ms: int | None = None
    target_offset: int | None = None
    other: int | None = None
    other_at_ms: int | None = None


class CancelledMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was cancelled."""

    state: Literal["cancelled"]


class PendingLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a list: one pending message."""

    id: str
    log_id: str
    sequence: int
    deliver_at: str
    deliver_at_ms: int
    bytes: int
    key: str | None = None
    tags: tuple[str, ...] = ()
    body: str | None = None
    body_base64: str | None = None
    headers: dict[str, str] | None = None


class PendingTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a list: how many messages it has, how many are being handed over or unread."""

    pending: int
    in_flight: int
    unread: int


class ShownMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that is due, as JSON has it; each kind says how its name is called there."""

    name: str
    body: str | None = None
    body_base64: str | None = None
    subject: str
    attempt: int
    deliver_at: str
    deliver_at_ms: int
    late_ms: int
    log_id: str
    sequence: int
    key: str | None = None
    tags: tuple[str, ...] = ()
    headers: dict[str, str] | None = None


class PulledMessage(ShownMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message that the caller holds, under the name of its lease."""

    name: str = msgspec.field(name="lease")


class PushedMessage(ShownMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message in a POST of several, with its `webhook-id`."""

    name: str = msgspec.field(name="id")


class PulledMessages(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull found."""

    messages: list[PulledMessage]


class LeaseHeard(msgspec.Struct, frozen=True, kw_only=True):
    """A lease whose word was heard."""

    lease: str


def columns_of(form: ColumnForm, messages: Sequence[NewMessage | PackedMessage]) -> dict[str, Any]:
    """The arguments of a `send_batch` behind the bodies, of messages that have this form."""
    given: dict[str, Sequence[object]] = {
        form.when: _instants_of(form.when, messages),
        "headers": [message.all_headers(message.headers) for message in messages],
        "tags": [message.tags for message in messages],
        "ordering_keys": [message.ordering_key for message in messages],
        "expires_at": [message.expires_at for message in messages],
        "ttl": [None if each.ttl_ms is None else milliseconds("ttl_ms", each.ttl_ms) for each in messages],
    }
    columns: dict[str, Any] = {
        name: column for name, column in given.items() if any(each is not None for each in column)
    }
    if form.on_conflict:
        columns |= {"keys": [message.key for message in messages], "on_conflict": form.on_conflict}
    return columns


def _instants_of(when: str, messages: Sequence[When]) -> Sequence[timedelta | datetime | int | None]:
    if when == "deliver_at":
        return [message.deliver_at for message in messages]
    if when == "deliver_at_ms":
        return [message.deliver_at_ms for message in messages]
    return [
        milliseconds("delay_ms", message.delay_ms or 0) if message.delay is None else duration(message.delay)
        for message in messages
    ]


def queued(
    send: Callable[..., S], subject: str, message: SendOptions, body: bytes, headers: dict[str, str] | None = None
) -> S:
    """Queue a message with the `send_nowait` of a producer; raises what is wrong with it."""
    return send(
        subject,
        body,
        **message.terms(),
        headers=message.all_headers(headers),
        key=message.key,
        on_conflict=message.on_conflict,
        tags=message.tags,
        ttl=None if message.ttl_ms is None else milliseconds("ttl_ms", message.ttl_ms),
        expires_at=message.expires_at,
        ordering_key=message.ordering_key,
        spread=None if message.spread_ms is None else milliseconds("spread_ms", message.spread_ms),
    )


@lru_cache(1_024)
def duration(text: str) -> timedelta:
    """A length of time as people write it, such as ``30m`` or ``1h30m``."""
    if not _DURATION.fullmatch(text):
        raise BadArgument(f"{text[:40]!r} {DURATION_FAULT}")
    return milliseconds("delay", sum(float(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text)))


def fault_of(error: Exception, kind: object) -> str:
    """What msgspec found wrong in what was to be of a type, for people, who know neither patterns nor enums."""
    met = _FAULT.fullmatch(str(error))
    if met is None:
        return str(error)
    what, name = met.groups()
    if what == f"Expected `str` matching regex {DURATION_PATTERN!r}":
        return f"{name} {DURATION_FAULT}"
    if what == "Invalid RFC3339 encoded datetime":
        return f"{name} {INSTANT_FAULT}"
    if what.startswith(ENUM_FAULT):
        return f"{name} is {what.removeprefix(ENUM_FAULT)}, and may be one of {', '.join(_choices(kind, name))}"
    return str(error)


def _choices(kind: object, name: str) -> list[str]:
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType), "it has a member"
    (member,) = (each.type for each in described.fields if each.encode_name == name)
    kinds = member.types if isinstance(member, msgspec.inspect.UnionType) else (member,)
    return [str(value) for each in kinds if isinstance(each, msgspec.inspect.LiteralType) for value in each.values]


def milliseconds(name: str, count: float) -> timedelta:
    """So many milliseconds; BadArgument beyond what a datetime can count."""
    try:
        return timedelta(milliseconds=count)
    except OverflowError as error:
        raise BadArgument(f"{name} is too long") from error


def duration_word(length: timedelta) -> str:
    """A length of time as `duration` reads it, in the largest unit that says it exactly."""
    count_ms = length // timedelta(milliseconds=1)
    fitting = [each for each in _UNITS_MS.items() if count_ms and not count_ms % each[1]]
    name, unit_ms = fitting[-1] if fitting else ("ms", 1)
    return f"{count_ms // unit_ms}{name}"


def body_bytes(text: str | None, encoded: str | None) -> bytes:
    """What ``body`` or ``body_base64`` of a request stands for; BadArgument unless it has one of them."""
    if text is not None and encoded is None:
        return text.encode()
    if encoded is None or text is not None:
        raise BadArgument("give body, a text, or body_base64, any bytes")
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise BadArgument(f"body_base64 is not base64: {error}") from error


def body_of(content: bytes) -> dict[str, str]:
    """A body in an answer: as text where it is one, else in base64."""
    try:
        return {"body": content.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(content).decode()}


def bodies_of(contents: Sequence[bytes]) -> tuple[Iterable[str | None], Iterable[str | None]]:
    """The same for bodies of several messages: the texts, and what is in base64."""
    try:
        return [content.decode() for content in contents], repeat(None)
    except UnicodeDecodeError:
        told = [body_of(content) for content in contents]
        return [each.get("body") for each in told], [each.get("body_base64") for each in told]


def header_texts(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    """Headers in an answer."""
    return {
        name: value if isinstance(value, str) else value.decode(errors="replace") for name, value in headers.items()
    }


def shown(kind: type[M], names: Sequence[str], columns: MessageColumns, rows: range) -> list[M]:
    """These rows of pulled messages in an answer or a POST, under these names."""
    cut = slice(rows.start, rows.stop)
    headers: Iterable[dict[str, str] | None] = repeat(None)
    if any(columns.headers_bytes[cut]):
        headers = [header_texts(each) or None for each in columns.headers[cut]]
    texts, encoded = bodies_of(columns.bodies[cut])
    return [
        kind(
            name=name,
            body=text,
            body_base64=base64_text,
            subject=subject,
            attempt=attempt,
            deliver_at=instant_text(due_ms),
            deliver_at_ms=due_ms,
            late_ms=late_ms,
            log_id=f"{log_id:016x}",
            sequence=sequence,
            key=key,
            tags=tags,
            headers=of_row,
        )
        for name, text, base64_text, subject, attempt, due_ms, late_ms, log_id, sequence, key, tags, of_row in zip(
            names,
            texts,
            encoded,
            columns.subjects[cut],
            columns.attempts[cut].tolist(),
            columns.instants[cut],
            columns.late_ms[cut].tolist(),
            columns.log_ids[cut].tolist(),
            columns.sequences[cut].tolist(),
            columns.keys[cut],
            columns.tags[cut],
            headers,
            strict=False,
        )
    ]


def utc(moment: datetime | None, name: str) -> datetime | None:
    """An instant in UTC; BadArgument beyond what a datetime can count."""
    try:
        return None if moment is None else moment.astimezone(UTC)
    except OverflowError as error:
        raise BadArgument(f"{name} is beyond what a datetime can count") from error
