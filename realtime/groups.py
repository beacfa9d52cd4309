"""Groups: how far each group of consumers is in its subject, and what it holds unacknowledged.

All changes go through `Group.apply` with an entry of the pull log, live and in recovery alike.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from delayd.log.pull import ATTEMPT_MAX, PullEntry, PullOp

from .held import Held, Run
from .index import Subject
from .offers import Offer, Offers
from .polls import Polls
from .ranges import Ranges

GIVEN_BACK_RUNS_MAX = 10_000  # Beyond it nobody knows any more what became of the oldest pulls, and they are stale.
PAUSE_MS = 100  # Before a message that was given back a second time is offered again; doubled with each further time.
PAUSE_MS_MAX = 10_000


class GroupCopy(NamedTuple):
    """What a checkpoint says of a group: all of it as it was at one moment; nothing in it changes any more."""

    group: "Group"
    next: int
    held: list[Run]
    offers: list[Offer]
    oldest: int
    known_from: int
    given_back: Ranges
    lapsed: Ranges

    @property
    def subject(self) -> Subject:
        """Whose messages they are."""
        return self.group.subject


class Group:
    """One group of one subject."""

    __slots__ = ("before_change", "dirty", "given_back", "group_id", "held", "known_from", "lapsed", "name",
                 "next", "on_pause", "paused", "quarantined", "ready", "redeliver", "settled", "subject",
                 "waiting")  # fmt: skip

    def __init__(self, group_id: int, subject: Subject, name: str, start: int, known_from: int = 0) -> None:
        self.group_id = group_id
        self.subject = subject
        self.name = name
        self.next = start
        self.held = Held()
        self.redeliver = Offers()
        self.paused = Offers()  # Given back again and again: offered when their pause is over.
        self.quarantined = Offers()  # Can't be read, and not offered until they are tried again (rule L10).
        self.known_from = known_from  # Nobody knows what became of pull sequences below it that are not held.
        self.given_back = Ranges()  # Pull sequences that were neither acknowledged nor are held.
        self.lapsed = Ranges()  # Those of them that were given back by nobody's word: their lease ended.
        self.waiting = Polls()
        self.ready = True  # False until the record of a new group is durable.
        self.settled = True  # False while nobody could say which message is the first that it gets.
        self.dirty = True
        self.before_change: Callable[[Group], None] | None = None  # A checkpoint may have to take a copy first.
        self.on_pause: Callable[[Group, Offer, int], None] | None = None  # Ends a pause; without it there is none.

    def offers(self) -> Iterator[Offer]:
        """What may be pulled now, in order: what was given back first, then what is new."""
        yield from self.redeliver
        if self.next < self.subject.end:
            yield Offer(self.next, self.subject.end - self.next, 1)

    @property
    def has_messages(self) -> bool:
        """Whether a pull would get something."""
        return self.next < self.subject.end or self.redeliver.messages > 0

    @property
    def outstanding(self) -> int:
        """Messages pulled and neither acknowledged nor given back."""
        return self.held.messages

    @property
    def oldest(self) -> int:
        """The lowest consume sequence that is not acknowledged, or not delivered yet."""
        candidates = (self.held.oldest, self.redeliver.oldest, self.paused.oldest, self.quarantined.oldest)
        return min([self.next, *[oldest for oldest in candidates if oldest is not None]])

    def copy(self) -> GroupCopy:
        """All that a checkpoint says of it."""
        # What can't be read is offered again by the next start: its file may have been restored by then.
        offers = [*self.redeliver.copy(), *self.paused, *self.quarantined]
        known = (self.known_from, self.given_back.copy(), self.lapsed.copy())
        return GroupCopy(self, self.next, self.held.copy(), offers, self.oldest, *known)

    def apply(self, entry: PullEntry) -> int:
        """Change as an entry of the pull log says; returns how many messages that concerned."""
        self._changes()
        if entry.op == PullOp.PULL:
            self._pulled(entry)
            return entry.covered
        changed = 0
        for run in self.held.take(entry.pull_first, entry.pull_first + entry.covered, entry.incarnation):
            changed += run.end - run.start
            if entry.op != PullOp.ACK:
                self._give_back(run, entry.op)
        return changed

    def resume(self, offer: Offer) -> None:
        """Offer messages whose pause is over."""
        self._changes()
        self.paused.take(offer.consume_first, offer.consume_first + offer.count)
        self.redeliver.append(offer)

    def forget_given_back(self, runs: int) -> None:
        """Keep only so many runs of what was given back; what is older is stale from now on."""
        for kept in (self.given_back, self.lapsed):
            if len(kept) > runs:
                self.known_from = max(self.known_from, kept.drop_first(len(kept) - runs))

    def quarantine(self, offer: Offer) -> None:
        """Pass over messages that were offered and can't be read."""
        self._changes()
        end = offer.consume_first + offer.count
        if offer.consume_first >= self.next:
            self.next = end
        else:
            self.redeliver.take(offer.consume_first, end)
        self.quarantined.append(offer)

    def release(self, offer: Offer) -> None:
        """Offer messages again that were passed over: they can be read now, as far as was seen."""
        self._changes()
        self.quarantined.take(offer.consume_first, offer.consume_first + offer.count)
        self.redeliver.append(offer)

    def give_up(self, offer: Offer) -> None:
        """Messages that can't be read count as acknowledged."""
        self._changes()
        self.quarantined.take(offer.consume_first, offer.consume_first + offer.count)

    def begin_at(self, first: int) -> None:
        """Messages below are not kept any more: what was offered of them without knowing that is not."""
        self.settled = True
        for offer in self.paused.copy():
            self.resume(offer)
        if self.next < first:
            self._changes()
            self.next = first
        offered = self.redeliver.oldest
        if offered is not None and offered < first:
            self._changes()
            self.redeliver.take(offered, first)

    def _changes(self) -> None:
        if self.before_change is not None:
            self.before_change(self)
        self.dirty = True

    def _pulled(self, entry: PullEntry) -> None:
        end = entry.consume_first + entry.covered
        if entry.consume_first > self.next:
            # A life before this one passed over what lies between; its next start offers it again (rule L5).
            self.redeliver.append(Offer(self.next, entry.consume_first - self.next, 1))
        if entry.consume_first < self.next:
            self.redeliver.take(entry.consume_first, min(end, self.next))
        # A replay may begin with a lower ``next`` than the entry was written for, and then both happen (rule Q5).
        self.next = max(self.next, end)
        pull_end = entry.pull_first + entry.covered
        at = (entry.pull_first, pull_end, entry.consume_first)
        self.held.add(Run(*at, entry.attempt, entry.incarnation, entry.lease_ms))

    def _give_back(self, run: Run, op: PullOp) -> None:
        # What no handler was given was no attempt (rule Q4).
        attempt = run.attempt if op == PullOp.RETURNED else min(run.attempt + 1, ATTEMPT_MAX)
        offer = Offer(run.consume_first, run.messages, attempt)
        pause_ms = pause_after(run.attempt) if op == PullOp.NACK and self.on_pause is not None else 0
        if pause_ms and self.on_pause is not None:
            self.paused.append(offer, apart=True)
            self.on_pause(self, offer, pause_ms)
        else:
            self.redeliver.append(offer)
        self.given_back.add(run.start, run.end)
        if op == PullOp.LAPSED:
            self.lapsed.add(run.start, run.end)
        if len(self.given_back) > GIVEN_BACK_RUNS_MAX:
            self.forget_given_back(GIVEN_BACK_RUNS_MAX)


def pause_after(attempt: int) -> int:
    """How long a message waits that a handler gave back, in ms: the first time not at all."""
    return 0 if attempt < 2 else min(PAUSE_MS << min(attempt - 2, 16), PAUSE_MS_MAX)
