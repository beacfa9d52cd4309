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

from .group_window import Offer, Stage

KNOWN_MAX = 16_384  # Messages of a group that are not settled; some 250 bytes each, 4 MiB.
LOOKED_AT = 4_096  # Messages of which one pull reads the keys at most, a microsecond each.
LOOKED_AT_A_BATCH = 64  # A stored batch counts as so many at least: to read it takes some 30 us.


class Order:
    """The keys of one group. It forgets everything when the group changes in a rare way, and is then loaded again, some
    messages with each pull.
    """

    __slots__ = ("_attempts", "_keys", "_out", "_queues", "_ready", "_settled", "_to_load", "is_begun", "scanned")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self.is_begun = False
        self.scanned = 0  # Of all unsettled messages below this the keys are known, or to be loaded.
        # Messages that are not settled, and whose keys are not known yet; rising.
        self._to_load: deque[range] = deque()
        self._settled: set[int] = set()  # Those of them that were settled meanwhile.
        self._keys: dict[int, int] = {}  # By consume sequence; 0: no key.
        self._queues: dict[int, deque[int]] = {}  # By key: the messages that are not settled, rising.
        self._out: set[int] = set()  # Those that are held, or on pause.
        self._ready: list[int] = []  # Those that may be pulled, rising.
        self._attempts: dict[int, int] = {}  # Of messages that were given back: the next attempt, above 1.

    def begin(self, scanned: int, out: Sequence[range], offers: Iterable[Offer]) -> None:
        """Begin to load a group that is at ``scanned``: messages are ``out``, and others are offered again."""
        self.forget()
        self.is_begun, self.scanned = True, scanned
        to_load = set(out)
        for run in out:
            self._out.update(run)
        for offer in offers:
            run = range(offer.consume_first, offer.consume_first + offer.messages)
            to_load.add(run)
            if offer.attempt > 1:
                self._attempts.update(dict.fromkeys(run, offer.attempt))
        self._to_load.extend(sorted(to_load, key=lambda run: run.start))

    @property
    def to_load(self) -> range:
        """Neighbouring messages whose keys are to be loaded next; empty: the group is loaded."""
        return self._to_load[0] if self._to_load else range(0)

    @property
    def is_loaded(self) -> bool:
        """Whether the keys of all that is not settled are known."""
        return self.is_begun and not self._to_load

    def load(self, keys: Sequence[int]) -> None:
        """The keys of the first messages of ``to_load``."""
        run = self._to_load.popleft()
        if len(run) > len(keys):
            self._to_load.appendleft(run[len(keys) :])
        for sequence, key in zip(run, keys, strict=False):
            if sequence in self._settled:
                self._settled.remove(sequence)
            else:
                self._add(sequence, key)

    def offers_any(self, end: int) -> bool:
        """Whether a message may be pulled, of those before ``end``; also while that is not known."""
        return bool(self._ready) or not self.is_loaded or self.wants_more(end)

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

    def add(self, keys: Sequence[int]) -> None:
        """The keys of the next messages behind ``scanned``."""
        for sequence, key in enumerate(keys, self.scanned):
            self._add(sequence, key)
        self.scanned += len(keys)

    def _add(self, sequence: int, key: int) -> None:
        self._keys[sequence] = key
        if key:
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = deque()
            queue.append(sequence)
            if queue[0] != sequence:
                return
        if sequence not in self._out:
            self._ready.append(sequence)

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

    def moved(self, first: int, end: int, state: Stage, attempt: int) -> None:
        """Messages are in another state now; ``attempt`` is that of their next pull."""
        if not self.is_begun:
            return
        if state is Stage.HELD:
            self._out.update(range(first, end))
            at = bisect.bisect_left(self._ready, first)
            del self._ready[at : bisect.bisect_left(self._ready, end, at)]
        elif state in (Stage.SETTLED, Stage.LEAVING):
            self._settle(first, end)
        elif state in (Stage.OFFERED, Stage.PAUSED):
            if attempt > 1:
                self._attempts.update(dict.fromkeys(range(first, end), attempt))
            # What pauses keeps its place before the others of its key, as if somebody held it.
            for sequence in range(first, end) if state is Stage.OFFERED else ():
                self._out.discard(sequence)
                self._offer(sequence)

    def _settle(self, first: int, end: int) -> None:
        """Nobody gets these any more: the next messages with their keys may be pulled."""
        for sequence in range(first, end):
            self._out.discard(sequence)
            self._attempts.pop(sequence, None)
            key = self._keys.pop(sequence, None)
            if key is None and self._to_load:
                self._settled.add(sequence)
            if not key:
                continue
            queue = self._queues[key]
            if queue[0] == sequence:
                queue.popleft()
            else:
                queue.remove(sequence)
            if queue:
                self._offer(queue[0])
            else:
                del self._queues[key]

    def _offer(self, sequence: int) -> None:
        """A message may be pulled, if nothing stands before it and nobody has it."""
        key = self._keys.get(sequence)
        if key is None or sequence in self._out or (key and self._queues[key][0] != sequence):
            return
        at = bisect.bisect_left(self._ready, sequence)
        if at == len(self._ready) or self._ready[at] != sequence:
            self._ready.insert(at, sequence)
