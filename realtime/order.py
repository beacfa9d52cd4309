"""Order: which messages of an ordered group may be pulled now (rule Q8, docs/consuming.md, In order).

Invariant: of the messages with one ordering key, only the first one that is not settled may be pulled. The keys stand
in the stored batches; here they are known of the messages that are not settled and lie below ``scanned``.

An example: a group is at 10, and the messages 10 to 14 have the keys a, a, b, none, a.

1. It has scanned them: 10, 12 and 13 may be pulled. A pull gets these three, and the group goes on at 14. The pull log
   has the entries 10, 12 and 13, and with them that 11 is to be offered again (docs/formats/pull.md, Gaps).
2. 10 is acknowledged: 11 may be pulled. 14 waits for 11.
3. 12 is given back: it may be pulled again, before any other message with key b.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from .offers import Offer

KNOWN_MAX = 16_384  # Messages of a group that are not settled; some 250 bytes each, 4 MiB.
LOOKED_AT = 4_096  # Messages that one pull scans at most, a microsecond each.


class Order:
    """The keys of one group. It forgets everything when the group changes in a rare way, and is then loaded again."""

    __slots__ = ("_attempts", "_keys", "_out", "_queues", "_ready", "is_loaded", "scanned")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing; it is loaded before the next pull."""
        self.is_loaded = False
        self.scanned = 0  # Of all unsettled messages below this the keys are known.
        self._keys: dict[int, int] = {}  # By consume sequence; 0: no key.
        self._queues: dict[int, deque[int]] = {}  # By key: the messages that are not settled, rising.
        self._out: set[int] = set()  # Those that are held, or on pause.
        self._ready: list[int] = []  # Those that may be pulled, rising.
        self._attempts: dict[int, int] = {}  # Of messages that were given back: the next attempt, above 1.

    def begin(self, scanned: int, out: Iterable[range], offers: Iterable[Offer]) -> None:
        """Load a group that is at ``scanned``; `add` brings the keys of its unsettled messages then, and `loaded` ends
        it.
        """
        self.forget()
        self.scanned = scanned
        for run in out:
            self._out.update(run)
        for offer in offers:
            if offer.attempt > 1:
                self._attempts.update(
                    dict.fromkeys(range(offer.consume_first, offer.consume_first + offer.count), offer.attempt)
                )

    def loaded(self) -> None:
        """All unsettled messages were added."""
        self.is_loaded = True

    def offers_any(self, end: int) -> bool:
        """Whether a message may be pulled, of those before ``end``; also while that is not known."""
        return not self.is_loaded or bool(self._ready) or self.wants_more(end)

    def wants_more(self, end: int) -> bool:
        """Whether messages before ``end`` are to be scanned."""
        return self.scanned < end and len(self._keys) < KNOWN_MAX

    @property
    def ready(self) -> int:
        """How many messages may be pulled."""
        return len(self._ready)

    @property
    def waiting(self) -> int:
        """How many messages wait for one before them."""
        return len(self._keys) - len(self._ready) - len(self._out)

    def add(self, first: int, keys: Sequence[int]) -> None:
        """Neighbouring messages that are not settled, behind all that are known."""
        for sequence, key in enumerate(keys, first):
            self._keys[sequence] = key
            if key:
                queue = self._queues.get(key)
                if queue is None:
                    queue = self._queues[key] = deque()
                queue.append(sequence)
                if queue[0] != sequence:
                    continue
            if sequence not in self._out:
                self._ready.append(sequence)
        self.scanned = max(self.scanned, first + len(keys))

    def offers(self) -> Iterator[Offer]:
        """The messages that may be pulled, rising; neighbours of one attempt together."""
        first, count, attempt = -1, 0, 1
        for sequence in self._ready:
            own = self._attempts.get(sequence, 1)
            if count and sequence == first + count and own == attempt:
                count += 1
                continue
            if count:
                yield Offer(first, count, attempt)
            first, count, attempt = sequence, 1, own
        if count:
            yield Offer(first, count, attempt)

    def pulled(self, first: int, end: int) -> None:
        """A consumer has these messages now."""
        if not self.is_loaded:
            return
        self._out.update(range(first, end))
        at = bisect.bisect_left(self._ready, first)
        del self._ready[at : bisect.bisect_left(self._ready, end, at)]

    def back(self, first: int, end: int, attempt: int) -> None:
        """These were given back."""
        if not self.is_loaded:
            return
        for sequence in range(first, end):
            self._out.discard(sequence)
            self.attempt(sequence, attempt)
            self._offer(sequence)

    def put_off(self, first: int, end: int, attempt: int) -> None:
        """These were given back, and are not offered yet."""
        if self.is_loaded:
            for sequence in range(first, end):
                self.attempt(sequence, attempt)

    def attempt(self, sequence: int, attempt: int) -> None:
        """Which attempt the next one at a message is."""
        if attempt > 1:
            self._attempts[sequence] = attempt

    def settled(self, first: int, end: int) -> None:
        """Nobody gets these any more: the next messages with their keys may be pulled."""
        if not self.is_loaded:
            return
        for sequence in range(first, end):
            self._out.discard(sequence)
            self._attempts.pop(sequence, None)
            queue = self._queues.get(self._keys.pop(sequence, 0))
            if queue is None:
                continue
            if queue[0] == sequence:
                queue.popleft()
            else:
                queue.remove(sequence)
            if queue:
                self._offer(queue[0])

    def _offer(self, sequence: int) -> None:
        """A message may be pulled, if nothing stands before it and nobody has it."""
        key = self._keys.get(sequence)
        if key is None or sequence in self._out or (key and self._queues[key][0] != sequence):
            return
        at = bisect.bisect_left(self._ready, sequence)
        if at == len(self._ready) or self._ready[at] != sequence:
            self._ready.insert(at, sequence)
