"""Groups: how far each group of consumers is in its subject, and what it holds unacknowledged.

All changes go through `Group.apply` with an entry of the pull log, live and in recovery alike.
"""

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from delayd.log.pull import ATTEMPT_MAX, PullEntry, PullOp

from .index import Subject
from .peer import Peer
from .ranges import Ranges

GIVEN_BACK_RUNS_MAX = 10_000  # Beyond it the oldest late acknowledgements count as repeated ones.


@dataclass(slots=True)
class Offer:
    """Neighbouring messages that wait to be pulled, and as which attempt."""

    consume_first: int
    count: int
    attempt: int


@dataclass(slots=True)
class Pull:
    """Messages that one consumer was given; ``pending`` are the pull sequences not yet acknowledged or given back."""

    pull_first: int
    consume_first: int
    count: int
    attempt: int
    incarnation: int
    pending: Ranges
    lease_ends_ms: int = 0  # Monotonic.


@dataclass(slots=True, eq=False)
class Waiting:
    """A PULL that waits for messages; ``deadline_ms`` is monotonic."""

    group: "Group"
    peer: Peer
    request_id: int
    max_messages: int
    max_bytes: int
    lease_ms: int
    deadline_ms: int
    answered: bool = False


class Group:
    """One group of one subject."""

    __slots__ = ("_firsts", "dirty", "given_back", "group_id", "held", "name", "next", "quarantined", "ready",
                 "redeliver", "subject", "waiting")  # fmt: skip

    def __init__(self, group_id: int, subject: Subject, name: str, start: int) -> None:
        self.group_id = group_id
        self.subject = subject
        self.name = name
        self.next = start
        self.held: dict[int, Pull] = {}
        self.redeliver: list[Offer] = []
        self.quarantined: list[Offer] = []  # Can't be read, and not offered in this life (rule L5).
        self.given_back = Ranges()
        self.waiting: deque[Waiting] = deque()
        self.ready = True  # False until the record of a new group is durable.
        self.dirty = True
        self._firsts: list[int] = []

    def offers(self) -> Iterator[Offer]:
        """What may be pulled now, in order: what was given back first, then what is new."""
        yield from self.redeliver
        if self.next < self.subject.end:
            yield Offer(self.next, self.subject.end - self.next, 1)

    @property
    def has_messages(self) -> bool:
        """Whether a pull would get something."""
        return bool(self.redeliver) or self.next < self.subject.end

    @property
    def outstanding(self) -> int:
        """Messages pulled and neither acknowledged nor given back."""
        return sum(pull.pending.total for pull in self.held.values())

    @property
    def oldest(self) -> int:
        """The lowest consume sequence that is not acknowledged, or not delivered yet."""
        candidates = [self.next, *(offer.consume_first for offer in (*self.redeliver, *self.quarantined))]
        candidates.extend(pull.pending.first - pull.pull_first + pull.consume_first for pull in self.held.values())
        return min(candidates)

    def held_within(self, pull_first: int, count: int) -> list[Pull]:
        """The pulls that hold something of a range of pull sequences."""
        end = pull_first + count
        at = max(0, bisect.bisect_right(self._firsts, pull_first) - 1)
        found: list[Pull] = []
        while at < len(self._firsts) and self._firsts[at] < end:
            pull = self.held[self._firsts[at]]
            if pull.pending.overlaps(pull_first, end):
                found.append(pull)
            at += 1
        return found

    def apply(self, entry: PullEntry) -> int:
        """Change as an entry of the pull log says; returns how many messages that concerned."""
        self.dirty = True
        if entry.op == PullOp.PULL:
            self._pulled(entry)
            return entry.covered
        changed = 0
        end = entry.pull_first + entry.covered
        for pull in self.held_within(entry.pull_first, entry.covered):
            if pull.incarnation != entry.incarnation:
                continue
            for start, stop in pull.pending.remove(entry.pull_first, end):
                changed += stop - start
                if entry.op != PullOp.ACK:
                    self._give_back(pull, start, stop)
            if not pull.pending:
                del self.held[pull.pull_first]
                del self._firsts[bisect.bisect_left(self._firsts, pull.pull_first)]
        return changed

    def quarantine(self, offer: Offer) -> None:
        """Pass over messages that were offered and can't be read."""
        end = offer.consume_first + offer.count
        if offer.consume_first >= self.next:
            self.next = end
        else:
            self._take_offered(offer.consume_first, end)
        last = self.quarantined[-1] if self.quarantined else None
        if last is not None and (last.consume_first + last.count, last.attempt) == (offer.consume_first, offer.attempt):
            last.count += offer.count
        else:
            self.quarantined.append(offer)
        self.dirty = True

    def hold(self, pull: Pull) -> None:
        """Add a pull whose messages are already taken out of what is offered."""
        self.held[pull.pull_first] = pull
        if self._firsts and pull.pull_first < self._firsts[-1]:
            bisect.insort(self._firsts, pull.pull_first)
        else:
            self._firsts.append(pull.pull_first)

    def _pulled(self, entry: PullEntry) -> None:
        end = entry.consume_first + entry.covered
        if entry.consume_first > self.next:
            # A life before this one passed over what lies between; its next start offers it again (rule L5).
            self.redeliver.append(Offer(self.next, entry.consume_first - self.next, 1))
        if entry.consume_first >= self.next:
            self.next = end
        else:
            self._take_offered(entry.consume_first, end)
        pending = Ranges.of(entry.pull_first, entry.pull_first + entry.covered)
        self.hold(Pull(entry.pull_first, entry.consume_first, entry.covered, entry.attempt, entry.incarnation, pending))

    def _take_offered(self, first: int, end: int) -> None:
        kept: list[Offer] = []
        for offer in self.redeliver:
            start, stop = offer.consume_first, offer.consume_first + offer.count
            if stop <= first or end <= start:
                kept.append(offer)
                continue
            if start < first:
                kept.append(Offer(start, first - start, offer.attempt))
            if end < stop:
                kept.append(Offer(end, stop - end, offer.attempt))
        self.redeliver = kept

    def _give_back(self, pull: Pull, start: int, stop: int) -> None:
        shift = pull.consume_first - pull.pull_first
        self.redeliver.append(Offer(start + shift, stop - start, min(pull.attempt + 1, ATTEMPT_MAX)))
        self.given_back.add(start, stop)
        if len(self.given_back) > GIVEN_BACK_RUNS_MAX:
            self.given_back.drop_first(1)
