"""Options: how a consumer behaves: declared, and checked before anything is connected.

`AsyncConsumer` explains each of them; `source` says to servers what concerns them.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

from delayd.client.instants import instant_ms
from delayd.client.limits import (
    TIMEOUT_MS_MAX,
    TIMEOUT_MS_MIN,
    check_group,
    need_bool,
    need_connect_timeout,
    need_meta,
    need_ms,
    need_text,
    need_timedelta,
    need_whole,
    unreached_s,
)
from delayd.client.pulling.subjects import Subjects
from delayd.client.pulling.words import LEASE_MAX, LEASE_MIN, Backoff
from delayd.client.sending.options import TIMEOUT_MS
from delayd.errors import BadArgument, BadSetting, BadTags
from delayd.hours import INSTANT_MS_MAX
from delayd.limits import ORDERED_WAIT_MS_MAX, TAGS_MAX
from delayd.tags import encode_tags
from delayd.wire.positions import AtInstant, End, Position

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
    ) -> None:
        meta = need_meta(address, others="subject= and group=")
        what = Subjects(subject)
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

    subjects: Subjects
    group: str
    lease: timedelta = LEASE
    prefetch: bool = True
    max_messages: int | None = None  # None: by the pace of the caller, at most MESSAGES_MAX.
    timeout_ms: float = TIMEOUT_MS
    max_attempts: int | None = None  # None: a message comes again however often it is given back.
    backoff: Backoff = BACKOFF
    auto_extend: timedelta | None = None  # None: a lease ends when it ends.
    start: Position = End.EARLIEST  # Of a group that this consumer makes.
    ephemeral: bool = False
    tags_any: tuple[str, ...] = ()  # The group gets messages with one of these, where there are any.
    tags_all: tuple[str, ...] = ()
    ordered: bool = False  # The group gets the messages of each ordering key one after the other.
    exclusive: timedelta | None = None  # How long the lead may be silent; None: consumers share the group.
    max_in_flight: int | None = None  # None: as many as the caller asks for.
    group_max_in_flight: int | None = None  # Of all consumers of the group; None: as many as they ask for.
    connect_timeout: timedelta | None = None  # None: as long as `timeout_ms`.
    shared_name: str = ""  # Of a consumer with a group of its own: how its name begins.
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
            raise BadArgument(f"start is {start.isoformat()} and must lie within the years 1970 to 9999")
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
