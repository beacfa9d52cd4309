"""Polls: the waiting PULLs of one group or subscription, in the order in which they are served (rule Q4).

Consumers with *empty hands*, which hold no message that they could work on, come first, in order of arrival; then come
those that fetch ahead.

A PULL that *stands* is answered with messages again and again, until it has got as many as it asked for, or its time
is over. Only a consumer that fetches ahead may have one. It goes behind the others of its kind after each answer.

Invariant: a PULL is ended once, with messages, without any, or with an error, or its connection has ended; then it is
in no queue.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from delayd.batch.columns import Buffer
from delayd.errors import DelaydError, Rebuilding, SlowDown
from delayd.machine.alarms import DueHeap
from delayd.machine.clock import Clock
from delayd.machine.operating import LogLimit
from delayd.wire.frame import Head

from .handoff import Peer

if TYPE_CHECKING:
    from .groups import Group
    from .subscriptions import Subscription

WAITING_MAX = 16_384  # Long polls of all connections: 0.7 KB each, 12 MiB.
RETRY_MS = 1_000  # The hint to a client that was refused because a bound was reached.
RECALL_MS = 10  # While others wait with empty hands, a PULL of a consumer that fetches ahead waits this long.
RECALLS_MAX = 256  # This many consumers are told at once that another one waits with empty hands.

limited = LogLimit(logging.getLogger(__name__))  # Lines that consumers can provoke.


class Claim(NamedTuple):
    """Who asks to lead: a connection, and the incarnations that its consumer has had, this one included."""

    peer: Peer
    incarnation: int
    window_ms: int
    own: frozenset[int]


@dataclass(slots=True, eq=False)
class Waiting:
    """A PULL that waits for messages; ``deadline_ms`` is monotonic.

    ``ahead`` counts the messages that its consumer has and has not handed to a handler; with 0 its hands are empty.
    ``max_messages`` and ``max_bytes`` are of all its answers: each one that it gets leaves less.
    """

    group: Group | Subscription
    peer: Peer
    request_id: int
    max_messages: int
    max_bytes: int
    lease_ms: int
    deadline_ms: int
    incarnation: int
    ahead: int = 0
    stands: bool = False  # Whether it may be answered several times.
    answered: bool = False  # It has ended.
    window_ms: int = 0  # Of a consumer that wants to lead its group; 0: of one that shares it.
    was: frozenset[int] = frozenset()  # The incarnations that such a consumer had on connections before.

    @property
    def claim(self) -> Claim:
        """Who wants to lead."""
        return Claim(self.peer, self.incarnation, self.window_ms, self.was | {self.incarnation})


class Polls:
    """The waiting PULLs of one group or subscription; each change costs the same, however many wait."""

    __slots__ = ("_empty_handed", "ahead", "wanted")

    def __init__(self) -> None:
        self.wanted = 0  # How many messages the consumers with empty hands ask for.
        self._empty_handed: OrderedDict[Waiting, None] = OrderedDict()
        self.ahead: OrderedDict[Waiting, None] = OrderedDict()  # Of consumers that fetch ahead.

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._empty_handed or self.ahead)

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._empty_handed, self.ahead)

    @property
    def first(self) -> Waiting | None:
        """The PULL that is served next; None when none waits."""
        return next(iter(self._empty_handed or self.ahead), None)

    def to_recall(self, wanted: int) -> Iterator[tuple[Waiting, int]]:
        """The PULLs to answer so that their consumers give back ``wanted`` messages, each with how many messages are
        still wanted when its turn comes. The caller may remove them while it goes through them.

        A consumer that hears of it gives back half of the messages that it has ahead, rounded up, and no more than it
        is told (docs/protocol.md, "Fair fetching"). So the consumers that have waited longest are told, and no more
        of them than are needed.

        An example: 5 messages are wanted, and three consumers have 7, 4 and 9 ahead. The first is told 5, and gives
        back 4. The second is told 1, and gives back 1. The third is told nothing.
        """
        for waiting in list(islice(self.ahead, RECALLS_MAX)):
            if wanted <= 0:
                return
            yield waiting, wanted
            half = (waiting.ahead + 1) // 2
            wanted -= half

    def add(self, waiting: Waiting) -> None:
        """Let a PULL wait behind all others of its kind."""
        if waiting.ahead:
            self.ahead[waiting] = None
        else:
            self._empty_handed[waiting] = None
            self.wanted += waiting.max_messages

    def served(self, waiting: Waiting, messages: int, size_bytes: int) -> None:
        """A PULL that stands was answered, and waits on behind the others."""
        waiting.max_messages -= messages
        waiting.max_bytes -= size_bytes
        waiting.ahead = messages  # The consumer has no time to say more exactly what it has left.
        self.ahead.move_to_end(waiting)

    def remove(self, waiting: Waiting) -> None:
        """Remove a PULL."""
        if waiting.ahead:
            del self.ahead[waiting]
        else:
            del self._empty_handed[waiting]
            self.wanted -= waiting.max_messages


class WaitingPulls:
    """The PULLs of all connections that wait; belongs to the loop."""

    def __init__(self, log_id: int, clock: Clock) -> None:
        self.count = 0
        self.deadlines = DueHeap(_waits)
        self._log_id = log_id
        self._clock = clock
        self._of_peer: dict[Peer, set[Waiting]] = {}

    @property
    def peers(self) -> list[Peer]:
        """The connections of these PULLs."""
        return list(self._of_peer)

    def check_room(self) -> None:
        """Refuse a PULL when too many wait, with SlowDown."""
        if self.count >= WAITING_MAX:
            raise SlowDown(f"{WAITING_MAX} PULLs wait already; ask again later", retry_after_ms=RETRY_MS)

    def add(self, waiting: Waiting) -> None:
        """Let a PULL wait, which its group has queued, or lets stand by."""
        self.count += 1
        self._of_peer.setdefault(waiting.peer, set()).add(waiting)

    def of(self, peer: Peer, group: Group | Subscription) -> list[Waiting]:
        """The PULLs of a connection for messages of a group or subscription."""
        return [waiting for waiting in self._of_peer.get(peer, ()) if waiting.group is group]

    def set_deadline(self, waiting: Waiting, *, has_turn: bool) -> None:
        """Let a PULL that got no message wait until its deadline; answer it if that has passed. A group that still
        ``has_turn`` may have messages for it.
        """
        now_ms = self._clock.monotonic_ms()
        if waiting.ahead and waiting.group.wanted:
            # Consumers with empty hands wait already, and this one must hear of it. It is not answered at once: a
            # consumer that gives nothing back would ask again and again.
            waiting.deadline_ms = min(waiting.deadline_ms, now_ms + RECALL_MS)
        if waiting.deadline_ms <= now_ms and not has_turn:
            self.answer_empty(waiting)
        else:
            self.deadlines.add(waiting.deadline_ms, waiting)

    def recall(self, group: Group | Subscription) -> None:
        """A consumer with empty hands has begun to wait: recall messages that others have fetched ahead (rule Q4).

        The PULLs of these others wait too. They are answered now, without messages, so that their consumers read in the
        answer how many messages are wanted, and give some back. `Polls.to_recall` says who is told.
        """
        for waiting, wanted in group.waiting.to_recall(group.wanted):
            self.answer_empty(waiting, wanted)

    def answer_empty(self, waiting: Waiting, wanted: int | None = None, *, unfinished: bool = False) -> None:
        """Answer a PULL without messages; ``unfinished``, and while groups join: not all of them were looked at."""
        damage = waiting.group.damage
        if damage is not None:
            # "No messages" would be wrong: there may be messages that nobody can find now.
            error = Rebuilding(f"the consume log of {waiting.group.names[0]} is being rebuilt: {damage.message}")
            self.end(waiting).answer_error(waiting.request_id, error)
            return
        head = self.head(waiting, [], self._clock.now_ms(), wanted)
        if unfinished or waiting.group.is_joining:
            head["unfinished"] = True
        self.end(waiting).answer(waiting.request_id, head)

    def goes_on(self, waiting: Waiting, messages: int, batches: Sequence[Buffer]) -> bool:
        """Whether a PULL that stands waits on when it gets these messages; then it is queued for the rest."""
        size_bytes = sum([len(batch) for batch in batches])
        if messages >= waiting.max_messages or size_bytes >= waiting.max_bytes:
            return False
        if waiting.deadline_ms <= self._clock.monotonic_ms():
            return False
        waiting.group.waiting.served(waiting, messages, size_bytes)
        return True

    def head(self, waiting: Waiting, parts: list[list[int]], now_ms: int, wanted: int | None = None) -> Head:
        """The head of a PULL's answer; without ``wanted`` this consumer is told all that the group's others want."""
        return {
            "log_id": self._log_id,
            "incarnation": waiting.incarnation,
            "parts": parts,
            "now_ms": now_ms,
            "wanted": waiting.group.wanted if wanted is None else wanted,
        }

    def refuse(self, waiting: Waiting, error: DelaydError) -> None:
        """Answer a PULL with an error."""
        limited.warning("pull_failed", "pull_failed subject=%s group=%s reason=%r", *waiting.group.names, error.message)
        self.end(waiting).answer_error(waiting.request_id, error)

    def refuse_all(self, error: DelaydError) -> None:
        """Answer every PULL with an error, because the server stops."""
        for waiting in [waiting for of_peer in self._of_peer.values() for waiting in of_peer]:
            self.end(waiting).answer_error(waiting.request_id, error)

    def end(self, waiting: Waiting) -> Peer:
        """Let a PULL wait no longer; return the connection, which the caller answers."""
        waiting.answered = True
        self.count -= 1
        waiting.group.unqueue(waiting)
        of_peer = self._of_peer.get(waiting.peer)
        if of_peer is not None:
            of_peer.discard(waiting)
            if not of_peer:
                del self._of_peer[waiting.peer]
        return waiting.peer

    def disconnected(self, peer: Peer) -> None:
        """Drop the PULLs of a connection that has ended."""
        for waiting in self._of_peer.pop(peer, ()):
            waiting.answered = True
            self.count -= 1
            waiting.group.unqueue(waiting)


def _waits(deadline_ms: int, waiting: Waiting) -> bool:
    return not waiting.answered
