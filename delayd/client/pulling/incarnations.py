"""Incarnations: those that an exclusive consumer had on its connections, and under which it may still hold messages.

On another connection the server knows by them which messages are this consumer's own (docs/protocol.md, A lead).

An example, with a lease of 60 s: message A came under the incarnation 1 at 0 s. The connection broke, and B came under
2 at 10 s. Until 60 s the consumer names 1 and 2, and then only 2. When it extends A for 60 s at 50 s, it names 1 until
110 s. A connection that breaks may mean that the server was started again, which gives each message a whole lease; so
at the first answer under 3, at 80 s, what is still named is named until 140 s at least.
"""

from __future__ import annotations

from collections.abc import Callable

from delayd.client.pulling.acks import Handles
from delayd.wire.frame import HeadValue

NAMED_MAX = 1_000  # As many as a request may name; the newest are.


class Incarnations:
    """Of one consumer; belongs to its loop. ``lease_s`` is the length of a lease, ``now_s`` the clock of leases."""

    def __init__(self, lease_s: float, now_s: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._now_s = now_s
        self._newest = 0
        self._ends: dict[int, float] = {}  # When the last lease of a message that came under it ends.

    def answered(self, incarnation: int, lease_ends: float | None) -> list[HeadValue]:
        """A PULL was answered under this incarnation, with messages whose lease ends then, or None; return all that are
        to be named.
        """
        now = self._now_s()
        if incarnation != self._newest:
            self._newest = incarnation
            for each in self._ends:
                self._extend(each, now + self._lease_s)
        for each in [each for each, ends in self._ends.items() if ends <= now]:
            del self._ends[each]
        if lease_ends is not None:
            self._ends.setdefault(incarnation, lease_ends)
            self._extend(incarnation, lease_ends)
        # The connection before is named in any case: the server may not have noticed its end.
        return [*[each for each in self._ends if each != incarnation][1 - NAMED_MAX :], incarnation]

    def extended(self, handles: Handles, lease_s: float) -> None:
        """These messages are to be held for so long from now on."""
        ends = self._now_s() + lease_s
        for incarnation, *_ in handles:
            self._extend(incarnation, ends)

    def _extend(self, incarnation: int, ends: float) -> None:
        if incarnation in self._ends:
            self._ends[incarnation] = max(self._ends[incarnation], ends)
