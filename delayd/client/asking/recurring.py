"""Recurring: what a producer asks about recurring schedules (docs/recurring.md).

A change goes to the owner of the schedule's name, as a request by key does; what is stored is read as every pending
message is. Invariant: a request that may have been served is asked again until the time limit, because a schedule that
is as it should be is not changed once more.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TypedDict

from delayd.batch.names import RECURRING_SUBJECT
from delayd.client.asking.messages import Asker, Question, asked_of, need_log, unmoved_of
from delayd.client.asking.walking import Walker, window_of
from delayd.client.instants import instant_ms, utc
from delayd.client.limits import Headers as GivenHeaders
from delayd.client.limits import check_body, check_sent_subject, need_text, pack_headers
from delayd.client.sending.receipts import Receipt
from delayd.client.sending.send_options import Key, Tags, check_key, expiry_of, label_of
from delayd.errors import BadArgument, BadKey, RecurringConflict, SlowDown
from delayd.outcome import MessageState
from delayd.recurrence.deciding import Misfire, Overlap, RunPolicy
from delayd.recurrence.recurrence import Fold, Gap, Recurrence
from delayd.wire.asked import CancelAnswer
from delayd.wire.heads import INT_MAX
from delayd.wire.recurring import (
    NOTE_BYTES_MAX,
    RecurringRecord,
    RecurringRequest,
    RecurringSpec,
    RecurringWish,
    body_of,
    check_content,
    read_body,
)
from delayd.wire.requests import RequestType

LOOKS_MAX = 20  # A schedule that is read may be moved at the same moment, which takes a commit.


class RecurringOptions(TypedDict, total=False):
    """When a schedule recurs, and what becomes of its occurrences; see `Producer.recurring`."""

    cron: str | None
    every: timedelta | None
    anchor: datetime | None
    timezone: str
    fold: Fold | None
    gap: Gap | None
    skip_dates: Sequence[date]
    only_dates: Sequence[date]
    jitter: timedelta
    starts_at: datetime | None
    until: datetime | None
    max_occurrences: int | None
    misfire: Misfire
    catchup: timedelta | None
    catchup_max: int
    overlap: Overlap
    headers: GivenHeaders | None
    tags: Tags | None
    ttl: timedelta | None
    ordering_key: Key | None


_POLICY = ("misfire", "catchup", "catchup_max", "overlap")
_LABELS = ("headers", "tags", "ttl", "ordering_key")


@dataclass(frozen=True)
class RecurringInfo:
    """A recurring schedule, as it is stored.

    Fields:
        name: of the schedule.
        subject: to which its messages are sent.
        body: of each.
        headers: of each.
        tags: of each.
        ttl: how long after its instant each expires; None: never.
        ordered: whether they have an ordering key, of which only a hash is stored: an edit has to give it again.
        recurrence: when it recurs.
        policy: what becomes of occurrences that were missed, or that meet an earlier one.
        version: 1, and one more with each change; give it as ``if_version``.
        created_at: when it was made.
        changed_at: when its version began.
        decided_until: up to where its occurrences are decided.
        sent: how many occurrences were sent.
        last: the instant of the last one; None before the first.
        skipped: how many were skipped, by reason (docs/recurring.md).
        paused: whether it is paused.
        note: why it is.
    """

    name: str
    subject: str
    body: bytes
    headers: Mapping[str, str | bytes]
    tags: tuple[str, ...]
    ttl: timedelta | None
    ordered: bool
    recurrence: Recurrence
    policy: RunPolicy
    version: int
    created_at: datetime
    changed_at: datetime
    decided_until: datetime
    sent: int
    last: datetime | None
    skipped: Mapping[str, int]
    paused: bool
    note: str

    @property
    def next(self) -> datetime | None:
        """The next occurrence that is not decided yet; None while it is paused, and when it has ended."""
        coming = [] if self.paused else self.preview(1)
        return coming[0] if coming else None

    def preview(self, count: int, after: datetime | None = None) -> list[datetime]:
        """The next occurrences, ``count`` at most, in UTC and without jitter: behind ``after``, or behind what is
        decided. A pause is not looked at.
        """
        after_ms = _ms(self.decided_until if after is None else after)
        return [utc(instant_ms) for instant_ms in self.recurrence.preview(count, after_ms, self.sent)]


def info_of_record(name: str, record: RecurringRecord) -> RecurringInfo:
    """A record as a caller reads it."""
    spec = record.spec
    return RecurringInfo(
        name,
        spec.subject,
        spec.body,
        spec.headers,
        spec.tags,
        timedelta(milliseconds=spec.ttl_ms) if spec.ttl_ms else None,
        spec.ordering_hash != 0,
        spec.recurrence,
        spec.policy,
        record.version,
        utc(record.created_ms),
        utc(record.changed_ms),
        utc(record.decided_ms),
        record.sent,
        utc(record.last_ms) if record.last_ms else None,
        record.skipped,
        record.paused,
        record.note,
    )


RECUR = Question[RecurringRequest, RecurringRecord](
    RequestType.RECUR,
    lambda request, link: (
        request.to_head(need_log(link)),
        [] if request.spec is None else body_of(request.spec.encode()),
    ),
    lambda _, answer: RecurringRecord.decode(read_body(answer.body)),
)


def spec_of(subject: str, body: bytes, options: RecurringOptions) -> RecurringSpec:
    """Check what a caller wants to recur. Raises as `Producer.recurring`."""
    policy = {name: value for name, value in options.items() if name in _POLICY}
    when = {name: value for name, value in options.items() if name not in (*_LABELS, *_POLICY)}
    check_sent_subject(subject)
    headers = options.get("headers")
    check_body(body, len(pack_headers(headers)))
    ttl = options.get("ttl")
    label = label_of(None, "reject", options.get("tags"), expiry_of(ttl, None), options.get("ordering_key"))
    spec = RecurringSpec(
        Recurrence(**when),  # type: ignore[arg-type]
        RunPolicy(**policy),  # type: ignore[arg-type]
        subject,
        body,
        dict(headers or {}),
        tuple(options.get("tags") or ()),
        0 if ttl is None else ttl // timedelta(milliseconds=1),
        0 if label is None else label.ordering,
    )
    check_content(spec)
    return spec


class Schedules:
    """All recurring schedules, for one producer, on one loop."""

    def __init__(self, messages: Asker, walker: Walker) -> None:
        self._messages = messages
        self._walker = walker

    async def put(self, name: Key, spec: RecurringSpec, if_version: int | None) -> RecurringInfo:
        """Make a schedule, or change it."""
        return await self._ask(RecurringRequest(RecurringWish.PUT, _name(name), _version(if_version), spec))

    async def pause(self, name: Key, note: str, if_version: int | None) -> RecurringInfo:
        """Let nothing be sent until it is resumed."""
        _check_note(note)
        return await self._ask(RecurringRequest(RecurringWish.PAUSE, _name(name), _version(if_version), note=note))

    async def resume(self, name: Key, if_version: int | None) -> RecurringInfo:
        """Let occurrences be sent again."""
        return await self._ask(RecurringRequest(RecurringWish.RESUME, _name(name), _version(if_version)))

    async def run(self, name: Key, number: int = 0) -> RecurringInfo:
        """Send one message now. A schedule knows the numbers of its last 16 runs, and does none of them again; without
        one it is drawn.
        """
        number = number or secrets.randbits(64) or 1
        return await self._ask(RecurringRequest(RecurringWish.RUN, _name(name), number=number))

    async def delete(self, name: Key, if_version: int | None) -> bool:
        """End a schedule; whether it was there, or was ended so before.

        Each change and each occurrence puts another carrier in the place of the one before. So one version is ended by
        the receipt of its carrier, as long as that stands; when an occurrence was decided meanwhile, it is looked at
        again.
        """
        if _version(if_version) is None:
            return await self._delete_any(name)
        for _ in range(LOOKS_MAX):
            for receipt, info in await self._carriers(name):
                if info.version != if_version:
                    raise RecurringConflict(
                        f"the schedule {info.name!r} is in version {info.version}, not {if_version}; look at it, and"
                        " give that version",
                        version=info.version,
                    )
                one = unmoved_of(RECURRING_SUBJECT, receipt, None, None)
                if await self._messages.cancel_one(one) is CancelAnswer.CANCELLED:
                    return True
            state = (await self._messages.get_one(asked_of(RECURRING_SUBJECT, None, _name(name)))).state
            if state not in (MessageState.PENDING, MessageState.IN_FLIGHT):
                return state is MessageState.CANCELLED
        raise SlowDown("the schedule is being changed at this moment; nothing was done, so ask again")

    async def _delete_any(self, name: Key) -> bool:
        answer = await self._messages.cancel_one(asked_of(RECURRING_SUBJECT, None, _name(name)))
        if answer is CancelAnswer.IN_FLIGHT:
            raise SlowDown("the schedule is being changed at this moment; nothing was done, so ask again")
        return answer is CancelAnswer.CANCELLED

    async def get(self, name: Key) -> RecurringInfo | None:
        """Read one; None when there is none."""
        for _ in range(LOOKS_MAX):
            found = await self._carriers(name)
            if found:
                return found[0][1]
            state = (await self._messages.get_one(asked_of(RECURRING_SUBJECT, None, _name(name)))).state
            if state not in (MessageState.PENDING, MessageState.IN_FLIGHT):
                return None
        raise SlowDown("the schedule is being changed at this moment; ask again")

    async def all(self, prefix: str) -> list[RecurringInfo]:
        """Read all, by name."""
        found = [info for _, info in await self._carriers(None)]
        return sorted((info for info in found if info.name.startswith(prefix)), key=lambda info: info.name)

    async def _carriers(self, name: Key | None) -> list[tuple[Receipt, RecurringInfo]]:
        window = window_of(RECURRING_SUBJECT, None, None, None)
        one = None if name is None else asked_of(RECURRING_SUBJECT, None, _name(name))
        # One that is decided about while pages are read may be on two of them: the later one is newer.
        found: dict[str, tuple[Receipt, RecurringInfo]] = {}
        async for page in self._walker.pending(window, one, whole=True):
            for message in page:
                read = info_of_record(message.key or "", RecurringRecord.decode(message.body or b""))
                if read.name not in found or found[read.name][0].sequence < message.receipt.sequence:
                    found[read.name] = message.receipt, read
        return list(found.values())

    async def _ask(self, request: RecurringRequest) -> RecurringInfo:
        record = await self._messages.ask_owner(RECUR, RECURRING_SUBJECT.encode(), request.name, request)
        return info_of_record(request.name.decode(), record)


def _name(name: Key) -> bytes:
    try:
        return check_key(name)
    except BadKey as error:
        raise BadKey(f"the name of a schedule is a key: {error.message}") from error


def _check_note(note: str) -> None:
    try:
        size = len(need_text("note", note).encode())
    except UnicodeEncodeError as error:
        raise BadArgument(f"note {note[:40]!r} can't be written as UTF-8: {error.reason}") from error
    if size > NOTE_BYTES_MAX:
        raise BadArgument(f"note of {size} bytes; it has at most {NOTE_BYTES_MAX}")


def _version(if_version: int | None) -> int | None:
    if if_version is not None and (type(if_version) is not int or not 0 <= if_version <= INT_MAX):
        raise BadArgument(f"if_version is the version of a schedule, or 0 for none, not {if_version!r:.40}")
    return if_version


def _ms(instant: datetime) -> int:
    return instant_ms(instant, "after")
