"""What one group should be: a fate for each message, and one for each handle that was ever given out.

A message is offered, held under a lease, in its pause, or acknowledged; then it is in here no more. All times are
monotonic. The model knows nothing of logs, checkpoints, runs or ranges: each message and each handle is one entry.
A message that comes again through its delay server is a new message. Its sequence counts from ``AGAIN`` on.

A group that keeps an order has ordering keys; then a message may come only when all before it with its key are settled
(rule Q8). What could not be read at some time holds up nobody, and may be held up: both are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import NamedTuple

from delayd.wire.consuming import Why

PAUSES_MS = (0, 0, 100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000)  # After a NACK of that attempt, then the last one.

AGAIN = 1 << 40  # Added to the consume sequences of what comes again, which are those of another subject.

Handle = tuple[int, int]
"""Incarnation and pull sequence."""


class Wrong(AssertionError):
    """The real group did what it should not."""


class State(Enum):
    """What may become of a message next."""

    OFFERED = "offered"
    PAUSED = "in its pause"
    HELD = "held"


class Fate(Enum):
    """What became of a handle."""

    HELD = "held"
    ACKED = "acknowledged"
    GIVEN_BACK = "given back"
    LAPSED = "its lease ended"
    RETRIED = "comes again through its delay server"
    REJECTED = "is a dead letter"


class Word(Enum):
    """What a consumer says of messages."""

    ACK = "ack"
    NACK = "nack"
    UNCOUNTED = "uncounted"
    RETRY = "retry"
    REJECT = "reject"


FATES = {
    Word.ACK: Fate.ACKED,
    Word.NACK: Fate.GIVEN_BACK,
    Word.UNCOUNTED: Fate.GIVEN_BACK,
    Word.RETRY: Fate.RETRIED,
    Word.REJECT: Fate.REJECTED,
}
WHYS = {
    Fate.LAPSED: Why.LEASE_ENDED,
    Fate.ACKED: Why.ACKNOWLEDGED,
    Fate.GIVEN_BACK: Why.GIVEN_BACK,
    Fate.RETRIED: Why.GIVEN_BACK,
    Fate.REJECTED: Why.GIVEN_BACK,
}


class Message(NamedTuple):
    """One message that is not acknowledged; ``until_ms`` ends a lease or a pause."""

    state: State
    attempt: int
    until_ms: int = 0
    lease_ms: int = 0
    handle: Handle = (0, 0)


class GroupModel:
    """One group."""

    def __init__(self, first: int, keys: Mapping[int, int], late: Set[int]) -> None:
        self._keys = keys  # Of a group that keeps an order: by consume sequence; empty: it keeps none.
        self._late = late  # Consume sequences that could not be read at some time.
        self.messages: dict[int, Message] = {}  # By consume sequence.
        self.fates: dict[Handle, tuple[Fate, int]] = {}  # With the consume sequence.
        self.end = first
        self.end_again = AGAIN

    def copy(self) -> GroupModel:
        """The same group as it is now."""
        made = GroupModel(self.end, self._keys, self._late)
        made.messages, made.fates, made.end_again = self.messages.copy(), self.fates.copy(), self.end_again
        return made

    def came(self, end: int) -> None:
        """Messages up to ``end`` were dispatched."""
        for sequence in range(self.end, end):
            self.messages[sequence] = Message(State.OFFERED, 1)
        self.end = max(self.end, end)

    def came_again(self, end: int) -> None:
        """Messages of its retry subject up to ``end`` were dispatched."""
        for sequence in range(self.end_again, AGAIN + end):
            self.messages[sequence] = Message(State.OFFERED, 1)
        self.end_again = max(self.end_again, AGAIN + end)

    def left(self) -> list[int]:
        """The messages that live on elsewhere."""
        return [sequence for fate, sequence in self.fates.values() if fate in (Fate.RETRIED, Fate.REJECTED)]

    def gave(self, handle: Handle, sequence: int, attempt: int, now_ms: int, lease_ms: int) -> None:
        """A consumer was given a message."""
        found = self.messages.get(sequence)
        if found is None:
            raise Wrong(f"message {sequence} came again: it was acknowledged")
        if found.state is not State.OFFERED:
            raise Wrong(f"message {sequence} came though it is {found.state.value}")
        if found.attempt != attempt:
            raise Wrong(f"message {sequence} came as attempt {attempt}, and this is attempt {found.attempt}")
        if (before := self._before(sequence)) - self._late and sequence not in self._late:
            raise Wrong(f"message {sequence} came, and {sorted(before)} before it with its key are not settled")
        if handle in self.fates:
            raise Wrong(f"handle {handle} was given out twice")
        self.messages[sequence] = Message(State.HELD, attempt, now_ms + lease_ms, lease_ms, handle)
        self.fates[handle] = (Fate.HELD, sequence)

    def settle(self, word: Word, handle: Handle, now_ms: int, delay_ms: int = 0) -> bool:
        """A consumer acknowledges a message or gives it back; whether its handle is stale. With ``delay_ms`` it is put
        off for so long.
        """
        fate, sequence = self.fates.get(handle, (None, 0))
        if fate is Fate.HELD:
            message = self.messages[sequence]
            self.fates[handle] = (FATES[word], sequence)
            if FATES[word] is Fate.GIVEN_BACK:
                self._give_back(sequence, message, word, now_ms, delay_ms)
            else:
                del self.messages[sequence]
            return False
        # A word that is repeated is done, and no other word counts any more.
        return fate is not FATES[word]

    def why(self, handles: Sequence[Handle]) -> Why:
        """What a server says of a stale range."""
        whys = {
            WHYS.get(self.fates[handle][0], Why.UNKNOWN) if handle in self.fates else Why.UNKNOWN for handle in handles
        }
        if len(whys) > 1:
            raise Wrong(f"one range is stale for {whys}")
        return whys.pop()

    def move(self, to: int) -> None:
        """An operator moves it: what came again through the delay server stays as it is."""
        for sequence, message in list(self.messages.items()):
            if sequence < AGAIN:
                if message.state is State.HELD:
                    self.fates[message.handle] = (Fate.LAPSED, sequence)
                del self.messages[sequence]
        for sequence in range(to, self.end):
            self.messages[sequence] = Message(State.OFFERED, 1)

    def time_came(self, now_ms: int) -> None:
        """Leases and pauses end."""
        for sequence, message in self.messages.items():
            if message.state is State.HELD and message.until_ms <= now_ms:
                self.fates[message.handle] = (Fate.LAPSED, sequence)
                self.messages[sequence] = Message(State.OFFERED, message.attempt + 1)
            elif message.state is State.PAUSED and message.until_ms <= now_ms:
                self.messages[sequence] = Message(State.OFFERED, message.attempt)

    def began_anew(self, now_ms: int) -> None:
        """The server was started: leases begin anew, pauses end."""
        for sequence, message in self.messages.items():
            if message.state is State.HELD:
                self.messages[sequence] = message._replace(until_ms=now_ms + message.lease_ms)
            elif message.state is State.PAUSED:
                self.messages[sequence] = Message(State.OFFERED, message.attempt)

    def give_up(self, sequence: int) -> None:
        """An operator counts a message as acknowledged."""
        del self.messages[sequence]

    def offered(self) -> list[int]:
        """The messages that a pull may get now."""
        return [sequence for sequence, message in self.messages.items() if message.state is State.OFFERED]

    def may_come(self) -> list[int]:
        """Those of them that no other message holds up."""
        return [sequence for sequence in self.offered() if not self._before(sequence)]

    def held(self) -> list[Handle]:
        """The handles that hold something."""
        return [message.handle for message in self.messages.values() if message.state is State.HELD]

    def _before(self, sequence: int) -> set[int]:
        """The messages before one with its key that are not settled."""
        key = self._keys.get(sequence, 0)
        return {each for each in self.messages if key and each < sequence and self._keys.get(each) == key}

    def _give_back(self, sequence: int, message: Message, word: Word, now_ms: int, delay_ms: int) -> None:
        if word is Word.UNCOUNTED:
            self.messages[sequence] = Message(State.OFFERED, message.attempt)
            return
        pause_ms = delay_ms or PAUSES_MS[min(message.attempt, len(PAUSES_MS) - 1)]
        state = State.PAUSED if pause_ms else State.OFFERED
        self.messages[sequence] = Message(state, message.attempt + 1, now_ms + pause_ms)
