"""Polls: the waiting PULLs of one group or subscription, in the order in which they are served (rule Q4).

Consumers with *empty hands*, which hold no message that they could work on, come first, in order of arrival; then come
those that fetch ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from realtime.handoff import Peer

if TYPE_CHECKING:
    from realtime.groups import Group
    from realtime.subscriptions import Subscription

RECALLS_MAX = 256  # This many consumers are told at once that another one waits with empty hands.


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
    answered: bool = False
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

    def remove(self, waiting: Waiting) -> None:
        """Remove a PULL."""
        if waiting.ahead:
            del self.ahead[waiting]
        else:
            del self._empty_handed[waiting]
            self.wanted -= waiting.max_messages
