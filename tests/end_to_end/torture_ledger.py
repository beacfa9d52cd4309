"""The ledger of a torture: what producers were promised and what each group of consumers got, message by message.

Invariant: it knows nothing of how the servers work. A violation is a broken promise, as a user would see it.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from delayd import CancelAnswer, MessageState

LEASE_SLACK_S = 0.25  # A client knows the server's clock only as well as the way to it is even.
# A clock that was set makes a client's sample of it worthless. The next one may be that of a pull that waited for a
# second, and is wrong by up to half of that, until an answer comes on a shorter way.
STEP_SLACK_S = 1.0
STEP_FELT_S = 10.0
VIOLATIONS_MAX = 200  # One broken promise can break for thousands of messages.

Group = tuple[str, str]  # Subject and name.
Name = tuple[int, int]  # Log and sequence.


class Fate(Enum):
    """What a producer knows of a message."""

    ASKED = "asked"
    KEPT = "kept"
    UNKNOWN = "unknown"  # It may be kept: delivered once, or never.
    REFUSED = "refused"  # The producer was told that nothing is kept.


@dataclass(slots=True)
class Sent:
    """One message as it was sent."""

    subject: str
    deliver_at_ms: int
    size: int
    fate: Fate = Fate.ASKED
    name: Name | None = None
    cancel_asked: bool = False  # From then on nobody may rely on its delivery, until an answer says that it left.
    cancelled: bool = False
    dispatched: bool = False  # Somebody was told so.
    instants: tuple[int, ...] = ()  # When it may be due: more than one while nobody knows whether it was moved.

    def __post_init__(self) -> None:
        if not self.instants:
            self.instants = (self.deliver_at_ms,)


@dataclass(slots=True)
class Copy:
    """What one group has of one message."""

    deliveries: int = 0
    lease_ends: float = 0.0  # When the lease of the last delivery ends, on time.monotonic().
    slack_s: float = LEASE_SLACK_S  # It may end so much earlier.
    given_back: bool = False
    tried: bool = False  # An acknowledgement of the last delivery was sent, so it may never come again.
    acknowledged: bool = False


@dataclass(slots=True)
class Delivered:
    """One message as a consumer, or a log, has it."""

    body: bytes
    subject: str
    name: Name
    deliver_at_ms: int


@dataclass
class Ledger:
    """All messages of one torture; a message's number is its index in ``sent``, and the first word of its body."""

    groups: Sequence[Group]
    sent: list[Sent] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    deliveries: int = 0
    repeated: int = 0
    faults: dict[str, int] = field(default_factory=dict)  # Named errors that clients met, which break no promise.

    def __post_init__(self) -> None:
        self.copies: dict[Group, dict[int, Copy]] = {group: {} for group in self.groups}
        self._ahead_ms, self._ahead_before, self._ahead_until_ms = 0, 0, 0
        self._of_earlier_lives = 0  # Messages that were sent before the delay server was started last.
        self._stepped_at = -STEP_FELT_S
        self.awaited: dict[Group, set[int]] = {group: set() for group in self.groups}

    def clock_steps(self, now: float) -> None:
        """The servers' clock is set, ahead or back; ``now`` is on time.monotonic()."""
        self._stepped_at = now

    def clock_is_ahead(self, ahead_ms: int) -> None:
        """The servers' clock was set ahead: what leaves is early by the servers' clock only, or not at all."""
        self._ahead_ms, self._ahead_before = ahead_ms, sys.maxsize

    def clock_is_right(self, now_ms: int) -> None:
        """It was set back; what is sent from here on is never early by anybody's clock."""
        self._ahead_before = len(self.sent)
        self._ahead_until_ms = now_ms + self._ahead_ms

    def delay_server_started(self) -> None:
        """The delay server has begun a life."""
        self._of_earlier_lives = len(self.sent)

    def may_stay_in_flight(self, number: int) -> bool:
        """Whether a message may have left by a clock that was ahead: a delay server that was started since can't tell
        before it is due by the right one. It knows the latest time that earlier lives have read, but not when they did,
        so it can't tell either of what they were sent after the clock was right again.
        """
        doubtful = number < max(self._ahead_before, self._of_earlier_lives)
        return doubtful and min(self.sent[number].instants) <= self._ahead_until_ms

    def clock_of(self, number: int, now_ms: int) -> int:
        """The latest time that a server's clock may have shown to a message until now."""
        # The delay server's clock decides, and the books of both sides have the time that it showed.
        return now_ms + self._ahead_ms if number < self._ahead_before else now_ms

    def broken(self, what: str) -> None:
        """Note a broken promise."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(what)

    def fault(self, error: BaseException) -> None:
        """Note an error that a client may meet while servers die."""
        name = type(error).__name__
        self.faults[name] = self.faults.get(name, 0) + 1

    def send(self, subject: str, deliver_at_ms: int, size: int) -> tuple[int, bytes]:
        """A new message: its number and its body."""
        return self.add(Sent(subject, deliver_at_ms, size))

    def add(self, sent: Sent) -> tuple[int, bytes]:
        """A new message, as it is sent: its number and its body."""
        number = len(self.sent)
        self.sent.append(sent)
        for group in self.groups:
            if group[0] == sent.subject:
                self.awaited[group].add(number)
        return number, body_of(number, sent.deliver_at_ms, sent.size)

    def kept(self, number: int, name: Name | None) -> None:
        """A receipt came, or the word that the batch is accepted; without a name if that says none."""
        self.sent[number].fate = Fate.KEPT
        if name is not None:
            self._named(number, name, "its receipt")

    def unknown(self, number: int) -> None:
        """The producer gave up, and the message may be kept."""
        self.sent[number].fate = Fate.UNKNOWN

    def refused(self, number: int) -> None:
        """The producer was told that nothing is kept."""
        self.sent[number].fate = Fate.REFUSED
        for group, copies in self.copies.items():
            self.awaited[group].discard(number)
            if number in copies:
                self.broken(f"refused but delivered: {self.tell(number)} to {group}")

    def check(self, delivered: Delivered, where: str) -> int | None:
        """The number of a message that came, after a look at whether it is what was sent."""
        number = number_of(delivered.body)
        if number is None or number >= len(self.sent):
            self.broken(f"never sent: {delivered.body[:40]!r} {where}")
            return None
        sent = self.sent[number]
        same = delivered.subject == sent.subject and delivered.deliver_at_ms in sent.instants
        if not same or delivered.body != body_of(number, sent.deliver_at_ms, sent.size):
            self.broken(f"changed on the way: {self.tell(number)} {where}")
        if sent.fate == Fate.REFUSED:
            self.broken(f"refused but there: {self.tell(number)} {where}")
        if sent.cancelled:
            self.broken(f"cancelled but there: {self.tell(number)} {where}")
        self._named(number, delivered.name, where)
        return number

    def deliver(self, group: Group, delivered: Delivered, *, now_ms: int, now: float, lease_ends: float) -> int | None:
        """A consumer was handed a message; its number."""
        number = self.check(delivered, f"at {group}")
        if number is None:
            return None
        self.deliveries += 1
        now_ms = self.clock_of(number, now_ms)
        if now_ms < delivered.deliver_at_ms:
            self.broken(f"early by {delivered.deliver_at_ms - now_ms} ms: {self.tell(number)} at {group}")
        copy = self.copies[group].setdefault(number, Copy())
        if copy.acknowledged:
            self.broken(f"delivered after it was acknowledged: {self.tell(number)} at {group}")
        elif copy.deliveries:
            self.repeated += 1
            if not copy.given_back and now < copy.lease_ends - copy.slack_s:
                left_s = copy.lease_ends - now
                self.broken(f"delivered again {left_s:.3f} s before its lease ends: {self.tell(number)} at {group}")
        copy.deliveries += 1
        copy.lease_ends = lease_ends
        copy.slack_s = STEP_SLACK_S if now < self._stepped_at + STEP_FELT_S else LEASE_SLACK_S
        copy.given_back = copy.tried = False
        return number

    def was_delivered(self, number: int) -> bool:
        """Whether a consumer had it."""
        return any(number in copies for copies in self.copies.values())

    def acknowledging(self, group: Group, numbers: Iterable[int]) -> None:
        """A consumer is about to acknowledge; what follows may tell that it is durable, or nothing for certain."""
        for number in numbers:
            self.copies[group][number].tried = True

    def acknowledged(self, group: Group, numbers: Iterable[int]) -> None:
        """A consumer was told that its acknowledgement is durable."""
        for number in numbers:
            self.copies[group][number].acknowledged = True
            self.awaited[group].discard(number)

    def given_back(self, group: Group, numbers: Iterable[int]) -> None:
        """A consumer is about to give messages back."""
        for number in numbers:
            self.copies[group][number].given_back = True

    def cancelling(self, numbers: Iterable[int]) -> None:
        """Somebody is about to cancel messages."""
        for number in numbers:
            self.sent[number].cancel_asked = True

    def cancel_answered(self, number: int, answer: CancelAnswer) -> None:
        """A cancel of a message that is kept was answered."""
        sent = self.sent[number]
        if answer is CancelAnswer.CANCELLED:
            self.is_cancelled(number)
        elif answer is CancelAnswer.IN_FLIGHT:
            pass  # Nothing has changed, and another request may have cancelled it.
        elif sent.cancelled:
            self.broken(f"cancelled, and a cancel says {answer.name}: {self.tell(number)}")
        elif answer is CancelAnswer.ALREADY_DISPATCHED:
            sent.dispatched = True
        elif answer is CancelAnswer.UNKNOWN:
            self.broken(f"kept, and a cancel says UNKNOWN: {self.tell(number)}")

    def is_cancelled(self, number: int) -> None:
        """Somebody was told that it has ended and is never delivered."""
        sent = self.sent[number]
        sent.cancelled = True
        if sent.dispatched:
            self.broken(f"cancelled after it was dispatched: {self.tell(number)}")
        for group, copies in self.copies.items():
            self.awaited[group].discard(number)
            if number in copies:
                self.broken(f"cancelled after it was delivered: {self.tell(number)} to {group}")

    def state_answered(self, number: int, state: MessageState, *, cancelled_before: bool) -> None:
        """Somebody asked what became of a message that is kept; ``cancelled_before``: it was so before the question."""
        sent = self.sent[number]
        told = f"asked what became of it, heard {state.name}: {self.tell(number)}"
        match state:
            case MessageState.CANCELLED:
                if not sent.cancel_asked or sent.dispatched or any(number in copies for copies in self.copies.values()):
                    self.broken(told)
            case MessageState.DISPATCHED:
                sent.dispatched = True
                if sent.cancelled:
                    self.broken(told)
            case MessageState.PENDING:
                if cancelled_before:
                    self.broken(told)
            case MessageState.IN_FLIGHT:
                pass  # For example while its hour is being loaded.
            case _:
                self.broken(told)

    def missing(self, due_until_ms: int) -> list[tuple[Group, int]]:
        """Promised messages, due by then, that never came to a group, or were given back and never came again."""
        return [
            (group, number)
            for group, numbers in self.awaited.items()
            for number in numbers
            if (self.sent[number].dispatched or max(self.sent[number].instants) <= due_until_ms)
            and self.sent[number].fate == Fate.KEPT
            and (self.sent[number].dispatched or not self.sent[number].cancel_asked)
            and not ((copy := self.copies[group].get(number)) and copy.tried)
        ]

    @property
    def cancelled(self) -> int:
        """How many messages are cancelled."""
        return sum(sent.cancelled for sent in self.sent)

    def count(self, fate: Fate) -> int:
        """How many messages have this fate."""
        return sum(sent.fate == fate for sent in self.sent)

    def tell(self, number: int) -> str:
        """A message in words."""
        sent = self.sent[number]
        name = "no sequence known" if sent.name is None else f"log {sent.name[0]:016x} sequence {sent.name[1]}"
        return f"message {number} ({name}, {sent.fate.value}, {sent.subject}, due at {sent.instants})"

    def _named(self, number: int, name: Name, where: str) -> None:
        known = self.sent[number].name
        if known is None:
            self.sent[number].name = name
        elif known != name:
            self.broken(f"kept twice: {self.tell(number)} has sequence {name[1]} {where}")


def body_of(number: int, deliver_at_ms: int, size: int) -> bytes:
    """The body of a message: what it says follows from its number, so that a mixed-up body shows."""
    return b"%d %d " % (number, deliver_at_ms) + bytes([number % 251]) * size


def number_of(body: bytes) -> int | None:
    """The number that a body begins with."""
    word = body.partition(b" ")[0]
    return int(word) if word.isdigit() else None
