"""Options: how a consumer behaves: declared, and checked before anything is connected.

`AsyncConsumer` explains each of them; `source` says to servers what concerns them.

Subjects: what a consumer consumes, one subject, a list or a pattern; and from where its messages came.

Invariant: a place stands for one subject at one server, for as long as the consumer lives. So a handle with a place
finds its server after the close of the consumer and in a forked child, too.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from delayd.batch.labels import encode_tags
from delayd.batch.names import ORDERED_WAIT_MS_MAX, SUBSCRIBED_MAX, TAGS_MAX, Pattern, is_pattern, is_reserved
from delayd.client.instants import instant_ms
from delayd.client.limits import (
    TIMEOUT_MS_MAX,
    TIMEOUT_MS_MIN,
    check_group,
    check_subject,
    need_bool,
    need_connect_timeout,
    need_meta,
    need_ms,
    need_text,
    need_timedelta,
    need_whole,
    unreached_s,
)
from delayd.client.pulling.acks import LEASE_MAX, LEASE_MIN, Backoff
from delayd.client.sending.send_options import TIMEOUT_MS
from delayd.errors import BadArgument, BadSetting, BadSubject, BadTags
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.consuming import AtInstant, End, Position

MANY = "give one subject, a list such as ['orders.cancel', 'mail.send'], or a pattern such as 'orders.*'"


class SubjectPlace(NamedTuple):
    """A subject at a realtime server."""

    subject: str
    log_id: int


class ConsumedSubjects:
    """What one consumer consumes; ``label`` says it in one text."""

    __slots__ = ("_numbers", "_places", "label", "names", "pattern")

    def __init__(self, subject: str | Sequence[str]) -> None:
        self._places: list[SubjectPlace] = []
        self._numbers: dict[SubjectPlace, int] = {}
        self.pattern: Pattern | None = None
        self.names: tuple[str, ...] = ()
        if isinstance(subject, str):
            self.label = subject
            if is_pattern(subject):
                self.pattern = Pattern(subject)
            elif subject:
                _check(subject)
            return
        self.names = _listed(subject)
        self.label = self.names[0] if len(self.names) == 1 else f"{self.names[0]} and {len(self.names) - 1} more"

    @property
    def are_many(self) -> bool:
        """Whether messages may be of several subjects."""
        return bool(self.names) or self.pattern is not None

    def meets(self, other: ConsumedSubjects) -> bool:
        """Whether a subject may be consumed by both."""
        if self.pattern is None:
            names = self.names or (self.label,)
            if other.pattern is not None:
                return any(other.pattern.matches(name) for name in names)
            return not {*names}.isdisjoint(other.names or (other.label,))
        return other.meets(self) if other.pattern is None else self.pattern.meets(other.pattern.text)

    def place(self, subject: str, log_id: int) -> int:
        """The number of a place."""
        place = SubjectPlace(subject, log_id)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self._places)
            self._places.append(place)
        return number

    def at(self, number: int) -> SubjectPlace:
        """The place with this number."""
        return self._places[number]


def _check(subject: str) -> None:
    check_subject(subject)
    if is_reserved(subject):
        raise BadSubject(f"{subject} is a name that servers keep for themselves; consume the subject that you send to")


def _listed(subjects: Iterable[str]) -> tuple[str, ...]:
    if isinstance(subjects, bytes | dict) or not isinstance(subjects, Iterable):
        raise BadArgument(f"a subject is text, not {type(subjects).__name__}; {MANY}")
    names = tuple(subjects)
    if not names:
        raise BadArgument(f"an empty list of subjects; {MANY}")
    if len(names) > SUBSCRIBED_MAX:
        raise BadArgument(
            f"a list of {len(names)} subjects; one consumer takes at most {SUBSCRIBED_MAX}: use a pattern, or several"
            " consumers"
        )
    for name in names:
        if isinstance(name, str) and is_pattern(name):  # type: ignore[redundant-expr]
            raise BadArgument(f"{name!r} is a pattern, and a list has subjects only; give the pattern alone")
        _check(name)
    if len(set(names)) < len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise BadArgument(f"the list names {twice} twice")
    return names


LEASE = timedelta(seconds=60)
EXCLUSIVE = timedelta(seconds=15)  # Three PINGs of an idle connection.
EXCLUSIVE_LEAST, EXCLUSIVE_MOST = timedelta(seconds=1), timedelta(minutes=10)
BACKOFF = Backoff()
# The most that one pull gets, unless the caller says otherwise: enough to make one round trip cheap for each message.
MESSAGES_MAX = 500

Start = Literal["earliest", "latest"] | datetime


class Consumes(ABC):
    """What both forms of a consumer take."""

    def __init__(
        self,
        address: str | None = None,
        subject: str | Sequence[str] = "",
        group: str = "",
        *,
        lease: timedelta = LEASE,
        prefetch: bool = True,
        max_messages: int | None = None,
        timeout_ms: float = TIMEOUT_MS,
        max_attempts: int | None = None,
        backoff: Backoff = BACKOFF,
        auto_extend: timedelta | None = None,
        start: Start | None = None,
        ephemeral: bool = False,
        broadcast: bool = False,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        ordered: bool = False,
        exclusive: bool | timedelta = False,
        max_in_flight: int | None = None,
        group_max_in_flight: int | None = None,
        connect_timeout: timedelta | None = None,
        token: str | None = None,
    ) -> None:
        meta = need_meta(address, token, others="subject= and group=")
        what = ConsumedSubjects(subject)
        alone = need_bool("ephemeral", ephemeral) or need_bool("broadcast", broadcast)
        tags = (wanted_tags("tags_any", tags_any), wanted_tags("tags_all", tags_all))
        window = exclusive_of(exclusive)
        beginning = (start_of(start, from_now=alone), alone, *tags, ordered, window)
        bounds = (max_in_flight, group_max_in_flight, connect_timeout)
        prefetch = need_bool("prefetch", prefetch) and window is None
        terms = (lease, prefetch, max_messages, timeout_ms, max_attempts, backoff, auto_extend)
        own = group if broadcast else ""
        self._settings = ConsumerSettings(what, group, *terms, *beginning, *bounds, own).of_this_process()
        self._begin(meta)

    @abstractmethod
    def _begin(self, meta: str) -> None:
        """Have an engine that reaches this meta; the settings were checked."""

    def _here(self) -> ConsumerSettings:
        """The settings in this process."""
        self._settings = self._settings.of_this_process()
        return self._settings


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """How a consumer behaves; a named error when a value is wrong."""

    subjects: ConsumedSubjects
    group: str
    lease: timedelta = LEASE
    prefetch: bool = True
    max_messages: int | None = None  # None: by the pace of the caller, at most MESSAGES_MAX.
    timeout_ms: float = TIMEOUT_MS
    max_attempts: int | None = None  # None: a message comes again however often it is given back.
    backoff: Backoff = BACKOFF
    auto_extend: timedelta | None = None  # None: a lease ends when it ends.
    start: Position = End.EARLIEST  # A group that this consumer makes begins there.
    ephemeral: bool = False
    tags_any: tuple[str, ...] = ()  # The group gets messages with one of these, where there are any.
    tags_all: tuple[str, ...] = ()
    ordered: bool = False  # The group gets the messages of each ordering key one after the other.
    exclusive: timedelta | None = None  # How long the lead may be silent; None: consumers share the group.
    max_in_flight: int | None = None  # None: as many as the caller asks for.
    group_max_in_flight: int | None = None  # All consumers of the group have so many; None: as they ask.
    connect_timeout: timedelta | None = None  # None: as long as `timeout_ms`.
    shared_name: str = ""  # The name of a group of its own begins so.
    pid: int = 0  # The process to which that group belongs.

    def __post_init__(self) -> None:
        for name, value in (("subject", self.subject), ("group", need_text("group", self.group))):
            if not value:
                raise BadArgument(
                    f"say which {name} is consumed, such as Consumer(subject='mail.send', group='mailer')"
                )
        check_group(self.group)
        for name in ("ephemeral", "ordered"):
            need_bool(name, getattr(self, name))
        if not LEASE_MIN <= need_timedelta("lease", self.lease, BadSetting) <= LEASE_MAX:
            raise BadSetting(f"lease is {self.lease} and must lie within 0.1 s and 12 hours")
        if self.max_messages is not None:
            need_whole("max_messages", self.max_messages, 1, BadSetting)
        if self.max_attempts is not None:
            need_whole("max_attempts", self.max_attempts, 1, BadSetting)
        if self.max_in_flight is not None:
            need_whole("max_in_flight", self.max_in_flight, 1, BadSetting)
        if self.group_max_in_flight is not None:
            need_whole("group_max_in_flight", self.group_max_in_flight, 1, BadSetting)
        if self.exclusive is not None:
            if not EXCLUSIVE_LEAST <= need_timedelta("exclusive", self.exclusive, BadSetting) <= EXCLUSIVE_MOST:
                within = f"{EXCLUSIVE_LEAST} and {EXCLUSIVE_MOST}"
                raise BadSetting(f"exclusive is {self.exclusive} and must lie within {within}")
            if self.subjects.are_many:
                raise BadSetting("an exclusive consumer takes one subject; make one for each")
        if not isinstance(self.backoff, Backoff):
            raise BadSetting(f"backoff must be a delayd.Backoff, not {type(self.backoff).__name__}")
        if self.ordered and self.backoff.most > timedelta(milliseconds=ORDERED_WAIT_MS_MAX):
            what = (
                f"the back-off waits for up to {self.backoff.most}, and messages of an ordered group wait for 24 hours"
            )
            raise BadSetting(f"{what} at most; name a shorter one, such as Backoff(most=timedelta(hours=1))")
        if self.auto_extend is not None and need_timedelta("auto_extend", self.auto_extend, BadSetting) < self.lease:
            raise BadSetting(f"auto_extend is {self.auto_extend} and must be at least the lease, {self.lease}")
        need_ms("timeout_ms", self.timeout_ms, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)
        need_connect_timeout(self.connect_timeout)

    def of_this_process(self) -> ConsumerSettings:
        """The settings of this consumer here: a group of its own is that of one process, so a fork gets another one
        (rule I2).
        """
        pid = os.getpid()
        if not self.shared_name or self.pid == pid:
            return self
        return replace(self, group=f"{self.shared_name}.{secrets.token_hex(8)}", pid=pid)

    @property
    def unreached_s(self) -> float:
        """How much of the time limit is left when a pull gives up because no connection could be made."""
        return unreached_s(self.timeout_ms, self.connect_timeout)

    @property
    def subject(self) -> str:
        """What is consumed, in one text."""
        return self.subjects.label

    @property
    def most(self) -> int:
        """How many messages one fetch ahead may bring."""
        most = MESSAGES_MAX if self.max_messages is None else self.max_messages
        return min([most, *[bound for bound in (self.max_in_flight, self.group_max_in_flight) if bound is not None]])

    def pulled(self, max_messages: int | None) -> int | None:
        """How many messages a pull may return; None when nobody has named a number."""
        return self.max_messages if max_messages is None else need_whole("max_messages", max_messages, 1)


def exclusive_of(exclusive: bool | timedelta) -> timedelta | None:
    """The window of an exclusive consumer; None for one that shares its group."""
    if isinstance(exclusive, bool):
        return EXCLUSIVE if exclusive else None
    return exclusive


def start_of(start: Start | None, *, from_now: bool) -> Position:
    """Where a new group begins; when nobody says it, at the earliest message, or ``from_now`` on.

    Raises:
        BadArgument, NaiveDatetime: there is no such start.
    """
    if isinstance(start, datetime):
        at_ms = instant_ms(start, "start")
        if not 0 <= at_ms <= INSTANT_MS_MAX:
            raise BadArgument(f"start is {start.isoformat()} and must lie within 1970 and 9999-12-31T23:59:59.999")
        return AtInstant(at_ms)
    if start is None:
        return End.LATEST if from_now else End.EARLIEST
    named: object = start  # A caller may give anything, such as an array that compares as an array.
    if isinstance(named, str) and named in (end.value for end in End):
        return End(named)
    raise BadArgument(f"start is {start!r:.100}; it may be 'earliest', 'latest' or a datetime")


def wanted_tags(name: str, tags: Sequence[str]) -> tuple[str, ...]:
    """The tags of a filter.

    Raises:
        BadTags: no message may have such tags.
    """
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        raise BadTags(f"{name} is a list of texts, not {type(tags).__name__}")
    listed = list(tags)
    for tag in listed:
        if not isinstance(tag, str):
            raise BadTags(f"{name}: a tag is {type(tag).__name__} and no text")
    found = tuple(dict.fromkeys(listed))
    if len(found) > TAGS_MAX:
        raise BadTags(f"{name} has {len(found)} tags; it may have {TAGS_MAX}")
    try:
        encode_tags(found)
    except BadTags as error:
        raise BadTags(f"{name}: {error.message}") from error
    return found
