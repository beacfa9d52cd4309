"""Words: what a consumer says of messages that it has got."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

from delayd.client.limits import is_number, need_text, need_timedelta, need_whole
from delayd.client.pulling.acks import Handles
from delayd.errors import BadArgument, BadSetting
from delayd.life import cut_text
from delayd.limits import LEASE_MS_MAX

DELAY_MAX = timedelta(days=732)
LEASE_MIN, LEASE_MAX = timedelta(seconds=0.1), timedelta(milliseconds=LEASE_MS_MAX)
_MS = timedelta(milliseconds=1)


class Kind(Enum):
    """What is to become of messages."""

    ACK = "ack"
    NACK = "nack"  # They come again at once.
    RETRY = "retry"  # They come again later, through their delay server.
    REJECT = "reject"  # They are kept as dead letters.
    EXTEND = "extend"  # They are held for longer.


class Word(NamedTuple):
    """What is to become of messages, and why."""

    kind: Kind
    delay_ms: int = 0  # Of EXTEND: the lease.
    reason: str = ""
    error: str = ""
    jitter: float = 0.0  # Of RETRY: by up to this share the delay of each message is shortened, at random.

    @property
    def is_of_one(self) -> bool:
        """Whether its requests name one subject each."""
        return self.kind not in (Kind.ACK, Kind.NACK)

    def rows(self, handles: Handles) -> Handles:
        """The rows of a request for these handles."""
        if self.kind is Kind.RETRY and self.jitter:
            return [
                [incarnation, sequence, 1, *place, shortened(self.delay_ms, self.jitter), self.error]
                for incarnation, first, count, *place in handles
                for sequence in range(first, first + count)
            ]
        if self.kind is Kind.RETRY:
            return [[*handle, self.delay_ms, self.error] for handle in handles]
        if self.kind is Kind.REJECT:
            return [[*handle, self.reason, self.error] for handle in handles]
        return handles


ACK, NACK = Word(Kind.ACK), Word(Kind.NACK)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long messages that are given back wait before they come again: ``first`` after the first attempt, twice as
    long after each further one, and at most ``most``. Each wait is shortened at random by up to the share ``jitter``,
    so that messages which failed together do not come again together.

    >>> Consumer(..., backoff=delayd.Backoff(first=timedelta(seconds=5), most=timedelta(minutes=10)))
    """

    first: timedelta = timedelta(seconds=1)
    most: timedelta = timedelta(hours=1)
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for name in ("first", "most"):
            if not _MS <= need_timedelta(name, getattr(self, name), BadSetting) <= DELAY_MAX:
                raise BadSetting(f"{name} of a back-off is 1 ms to {DELAY_MAX.days} days")
        if not is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise BadSetting(f"jitter of a back-off is a share of 0 to 1, not {self.jitter!r:.100}")

    def longest_ms(self, attempt: int) -> int:
        """The longest wait after that attempt, which counts from 1."""
        need_whole("attempt", attempt, 1)
        return int(min(self.most / _MS, self.first / _MS * 2.0 ** min(attempt - 1, 60)))

    def delay_ms(self, attempt: int) -> int:
        """A wait after that attempt, shortened at random."""
        return shortened(self.longest_ms(attempt), self.jitter)


def shortened(wait_ms: int, jitter: float) -> int:
    """A wait that is shortened at random by up to the share ``jitter``."""
    return max(1, int(wait_ms * (1 - jitter * random.random())))


def later(delay: timedelta | None, error: str, backoff: Backoff, attempt: int) -> Word:
    """The word for messages that come again after ``delay``; None: after the back-off."""
    text = _text("error", error)
    if delay is None:
        return Word(Kind.RETRY, max(1, backoff.longest_ms(attempt)), error=text, jitter=backoff.jitter)
    if not timedelta(0) <= need_timedelta("delay", delay) <= DELAY_MAX:
        raise BadArgument(f"delay is {delay}; a message comes again after 0 s to {DELAY_MAX.days} days")
    if not delay and not text:
        return NACK
    return Word(Kind.RETRY, -(-delay // _MS), error=text)


def extended(lease: timedelta) -> Word:
    """The word for messages that are held for ``lease`` from now on."""
    if not LEASE_MIN <= need_timedelta("lease", lease) <= LEASE_MAX:
        raise BadArgument(f"lease is {lease}; a message is held for 0.1 s to 12 hours from now on")
    return Word(Kind.EXTEND, lease // _MS)


def rejected(reason: str, error: str) -> Word:
    """The word for messages that become dead letters."""
    text = _text("reason", reason)
    if not text:
        raise BadArgument("reason is empty; say why the message is rejected: message.reject('no such order')")
    return Word(Kind.REJECT, reason=text, error=_text("error", error))


def _text(name: str, value: str) -> str:
    return cut_text(need_text(name, value))
