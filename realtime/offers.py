"""Offers: messages that were given back and wait to be pulled again, in the order in which they came back.

Invariant: offers are disjoint. A pull takes messages from the front, so taking needs no search.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

CLEAN_MIN = 1_000  # With fewer dead entries than this a cleaning pass is not worth it.


@dataclass(frozen=True, slots=True)
class Offer:
    """Neighbouring messages that wait to be pulled, and as which attempt."""

    consume_first: int
    count: int
    attempt: int


class Offers:
    """The messages that one group was given back."""

    __slots__ = ("_at", "_firsts", "_next", "_order", "messages")

    def __init__(self) -> None:
        self.messages = 0
        # By a number of its own, so that the rest of an offer keeps the place of the whole.
        self._order: OrderedDict[int, Offer] = OrderedDict()
        self._at: dict[int, int] = {}  # By the first consume sequence: that number.
        self._next = 0
        self._firsts: list[int] = []  # A heap of the offers' first sequences; offers that were taken are still in it.

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._order.values())

    @property
    def oldest(self) -> int | None:
        """The lowest consume sequence; None when there is no offer."""
        while self._firsts and self._firsts[0] not in self._at:
            heapq.heappop(self._firsts)
        return self._firsts[0] if self._firsts else None

    def copy(self) -> list[Offer]:
        """All offers in order, as a list of their own."""
        return list(self._order.values())

    def holds(self, offer: Offer) -> bool:
        """Whether this very offer is among them, and not another one of the same messages."""
        number = self._at.get(offer.consume_first)
        return number is not None and self._order[number] is offer

    def append(self, offer: Offer, *, apart: bool = False) -> None:
        """Offer messages behind all others; they join the last offer if they continue it, unless ``apart``."""
        self.messages += offer.count
        if self._order and not apart:
            number = next(reversed(self._order))
            last = self._order[number]
            if (last.consume_first + last.count, last.attempt) == (offer.consume_first, offer.attempt):
                self._order[number] = replace(last, count=last.count + offer.count)
                return
        self._put(self._next, offer)
        self._next += 1

    def take(self, first: int, end: int) -> None:
        """Stop offering the messages [first, end)."""
        while first < end and self._order:
            number = self._at.get(first)
            if number is None:
                self._take_out_of_order(first, end)
                return
            stop = first + self._order[number].count
            self._cut(number, first, end)
            first = stop

    def _take_out_of_order(self, first: int, end: int) -> None:
        # Only replay comes here: an earlier life passed over messages before these, and logged nothing about that.
        for number, offer in list(self._order.items()):
            if offer.consume_first < end and first < offer.consume_first + offer.count:
                self._cut(number, first, end)

    def _cut(self, number: int, first: int, end: int) -> None:
        offer = self._order[number]
        start, stop = offer.consume_first, offer.consume_first + offer.count
        left = [Offer(at, until - at, offer.attempt) for at, until in ((start, first), (end, stop)) if at < until]
        del self._at[start]
        self.messages -= offer.count - sum([part.count for part in left])
        if left:
            self._put(number, left[0])
        else:
            del self._order[number]
        for part in left[1:]:
            self._put(self._next, part)
            self._next += 1

    def _put(self, number: int, offer: Offer) -> None:
        self._order[number] = offer
        self._at[offer.consume_first] = number
        heapq.heappush(self._firsts, offer.consume_first)
        if len(self._firsts) > CLEAN_MIN + 2 * len(self._at):
            self._firsts = sorted(self._at)
