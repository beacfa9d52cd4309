"""Polls: the PULLs of one group that wait, in the order in which they are served (rule Q4).

Consumers with empty hands come first, in order of arrival, then those that fetch ahead. One that asks for no messages
at all only listens: it is answered when somebody with empty hands waits for what it has ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from .peer import Peer

if TYPE_CHECKING:
    from .groups import Group


@dataclass(slots=True, eq=False)
class Waiting:
    """A PULL that waits for messages; ``deadline_ms`` is monotonic.

    ``ahead`` counts the messages that its consumer has and has not handed to a handler; with 0 its hands are empty.
    """

    group: Group
    peer: Peer
    request_id: int
    max_messages: int
    max_bytes: int
    lease_ms: int
    deadline_ms: int
    incarnation: int
    ahead: int = 0
    answered: bool = False


class Polls:
    """Those that wait of one group; each change costs the same, however many wait."""

    __slots__ = ("_ahead", "_empty_handed", "_listening", "holders", "taking", "wanted")

    def __init__(self) -> None:
        self.taking = 0  # How many wait for messages.
        self.holders = 0  # How many have messages ahead, or listen.
        self.wanted = 0  # Messages that those with empty hands ask for.
        self._empty_handed: OrderedDict[Waiting, None] = OrderedDict()
        self._ahead: OrderedDict[Waiting, None] = OrderedDict()
        self._listening: OrderedDict[Waiting, None] = OrderedDict()

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._empty_handed, self._ahead, self._listening)

    @property
    def first(self) -> Waiting:
        """Who is served next; somebody must wait for messages."""
        return next(iter(self._empty_handed or self._ahead))

    def with_messages(self) -> Iterator[Waiting]:
        """Those that have messages ahead."""
        return chain(self._listening, self._ahead)

    def add(self, waiting: Waiting) -> None:
        """Wait behind all others of its kind."""
        if not waiting.ahead:
            self._empty_handed[waiting] = None
            self.wanted += waiting.max_messages
            self.taking += 1
            return
        self.holders += 1
        if waiting.max_messages:
            self._ahead[waiting] = None
            self.taking += 1
        else:
            self._listening[waiting] = None

    def remove(self, waiting: Waiting) -> None:
        """Wait no more."""
        if not waiting.ahead:
            del self._empty_handed[waiting]
            self.wanted -= waiting.max_messages
            self.taking -= 1
            return
        self.holders -= 1
        if waiting.max_messages:
            del self._ahead[waiting]
            self.taking -= 1
        else:
            del self._listening[waiting]
