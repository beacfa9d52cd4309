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

GIVEN_BACK_RUNS_MAX = 10_000  # Beyond it the oldest late acknowledgements count as repeated ones.


class GroupCopy(NamedTuple):
    """What a checkpoint says of a group: all of it as it was at one moment; nothing in it changes any more."""

    group: "Group"
    next: int
    held: list[Run]
    offers: list[Offer]
    oldest: int

    @property
    def subject(self) -> Subject:
        """Whose messages they are."""
        return self.group.subject


class Group:
    """One group of one subject."""

    __slots__ = ("before_change", "dirty", "given_back", "group_id", "held", "name", "next", "quarantined", "ready",
                 "redeliver", "settled", "subject", "waiting")  # fmt: skip

    def __init__(self, group_id: int, subject: Subject, name: str, start: int) -> None:
        self.group_id = group_id
        self.subject = subject
        self.name = name
        self.next = start
        self.held = Held()
        self.redeliver = Offers()
        self.quarantined = Offers()  # Can't be read, and not offered until they are tried again (rule L10).
        self.given_back = Ranges()
        self.waiting = Polls()
        self.ready = True  # False until the record of a new group is durable.
        self.settled = True  # False while nobody could say which message is the first that it gets.
        self.dirty = True
        self.before_change: Callable[[Group], None] | None = None  # A checkpoint may have to take a copy first.

    def offers(self) -> Iterator[Offer]:
        """What may be pulled now, in order: what was given back first, then what is new."""
        yield from self.redeliver
        if self.next < self.subject.end:
            yield Offer(self.next, self.subject.end - self.next, 1)

    @property
    def has_messages(self) -> bool:
        """Whether a pull would get something."""
        return self.next < self.subject.end or len(self.redeliver) > 0

    @property
    def outstanding(self) -> int:
        """Messages pulled and neither acknowledged nor given back."""
        return self.held.messages

    @property
    def oldest(self) -> int:
        """The lowest consume sequence that is not acknowledged, or not delivered yet."""
        candidates = (self.held.oldest, self.redeliver.oldest, self.quarantined.oldest)
        return min([self.next, *[oldest for oldest in candidates if oldest is not None]])

    def copy(self) -> GroupCopy:
        """All that a checkpoint says of it."""
        # What can't be read is offered again by the next start: its file may have been restored by then.
        offers = [*self.redeliver.copy(), *self.quarantined]
        return GroupCopy(self, self.next, self.held.copy(), offers, self.oldest)

    def apply(self, entry: PullEntry) -> int:
        """Change as an entry of the pull log says; returns how many messages that concerned."""
        self._changes()
        if entry.op == PullOp.PULL:
            self._pulled(entry)
            return entry.covered
        changed = 0
        for run in self.held.take(entry.pull_first, entry.pull_first + entry.covered, entry.incarnation):
            changed += run.messages
            if entry.op != PullOp.ACK:
                # What no handler was given was no attempt (rule Q4).
                self._give_back(run, run.attempt if entry.op == PullOp.RETURNED else run.attempt + 1)
        return changed

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
        self.held.add(Run(*at, entry.attempt, entry.incarnation))

    def _give_back(self, run: Run, attempt: int) -> None:
        self.redeliver.append(Offer(run.consume_first, run.messages, min(attempt, ATTEMPT_MAX)))
        self.given_back.add(run.start, run.end)
        if len(self.given_back) > GIVEN_BACK_RUNS_MAX:
            self.given_back.drop_first(1)
