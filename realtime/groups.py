"""Groups: how far each group of consumers is in its subject, and which unacknowledged messages it holds.

All changes go through `Group.apply` with an entry of the pull log, live and in recovery alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from delayd.log.pull import ATTEMPT_MAX, PullEntry, PullOp
from delayd.log.retry import Decision
from delayd.wire.heads import U32_MAX

from .extensions import Extensions
from .filters import OPEN, Filter
from .held import Held, Run
from .index import Subject
from .offers import Offer, Offers
from .order import Order
from .polls import Polls
from .ranges import Ranges

if TYPE_CHECKING:
    from delayd.errors import DamagedData

    from .leads import Lead
    from .polls import Waiting
    from .subscriptions import Subscription

# Beyond this the oldest runs are forgotten: nobody knows what became of these pulls, so their handles are stale.
GIVEN_BACK_RUNS_MAX = 10_000
PAUSE_MS = 100  # Pause before a message that was given back a second time is offered again; doubled each further time.
PAUSE_MS_MAX = 10_000


class GroupCopy(NamedTuple):
    """A group as a checkpoint stores it: a copy of one moment, which never changes."""

    group: Group
    next: int
    held: list[Run]
    offers: list[Offer]
    oldest: int
    known_from: int
    given_back: Ranges
    lapsed: Ranges
    retried: Ranges
    rejected: Ranges
    leaving: list[Decision]
    held_back: bool
    ephemeral: bool
    filter: Filter
    ordered: bool
    in_flight_max: int
    begins_at_ms: int

    @property
    def subject(self) -> Subject:
        """The subject of the group's messages."""
        return self.group.subject


class Group:
    """One group of one subject."""

    __slots__ = ("before_change", "begins_at_ms", "child", "dirty", "ephemeral", "extensions", "fenced", "filter",
                 "given_back", "group_id", "held", "held_back", "in_flight_max", "known_from", "lapsed", "lead",
                 "leaving", "name", "next", "oldest_at", "on_pause", "order", "parent", "paused", "quarantined",
                 "ready", "redeliver", "rejected", "retried", "settled", "standby", "subject", "subscriptions",
                 "waiting")  # fmt: skip

    def __init__(self, group_id: int, subject: Subject, name: str, start: int, known_from: int = 0) -> None:
        self.group_id = group_id
        self.subject = subject
        self.name = name
        self.next = start
        self.held = Held()
        self.redeliver = Offers()
        self.paused = Offers()  # Given back again and again; offered when their pause is over.
        self.quarantined = Offers()  # Can't be read, and not offered until they are tried again (rule L10).
        self.known_from = known_from  # Nobody knows what became of pull sequences below this that are not held.
        self.given_back = Ranges()  # Pull sequences that are not held any more and were not acknowledged.
        self.lapsed = Ranges()  # Those of ``given_back`` that no consumer gave back: their lease ended.
        self.retried = Ranges()  # Those of ``given_back`` that come again through their delay server.
        self.rejected = Ranges()  # Those of ``given_back`` that became dead letters.
        self.leaving: dict[tuple[int, int], Decision] = {}  # Messages that their delay server has not taken yet.
        self.child: Group | None = None  # The group of its retry subject, whose messages its consumers get first.
        self.parent: Group | None = None  # Of such a child: the group whose consumers get its messages.
        self.extensions = Extensions()  # Messages that are held for longer than they were given for at first.
        self.held_back = False  # Whether an operator lets nobody pull its messages.
        self.filter = OPEN  # Which messages it wants; a child has none, for what comes again has matched before.
        self.order: Order | None = None  # Of a group that gets the messages of each ordering key one after the other.
        self.in_flight_max = 0  # How many messages its consumers may hold, as they said last (rule Q10); 0: any number.
        self.begins_at_ms = 0  # It gets nothing that was handed over before: it was made before that instant.
        self.ephemeral = False  # Whether it ends when it has no consumers any more.
        self.oldest_at = (-1, 0)  # A consume sequence, and when it was handed over: the oldest that was asked for.
        self.waiting = Polls()
        self.lead: Lead | None = None  # Of a group with exclusive consumers: the one that gets messages (rule Q9).
        self.standby: dict[Waiting, None] = {}  # PULLs of the others, in order of arrival.
        self.fenced: dict[int, None] = {}  # Incarnations that led it.
        self.subscriptions: list[Subscription] = []  # Those that take messages of this group, too.
        self.ready = True  # False until the record of a new group is durable.
        self.settled = True  # False while nobody can say which message is the first that the group gets.
        self.dirty = True
        # Called before each change: a checkpoint may have to copy the group first.
        self.before_change: Callable[[Group], None] | None = None
        # Called to begin a pause; without it there are no pauses.
        self.on_pause: Callable[[Group, Offer, int], None] | None = None

    def offers(self) -> Iterator[Offer]:
        """Messages that may be pulled now, in order: first those that were given back, then new ones."""
        if self.order is not None:
            yield from self.order.offers()
            return
        yield from self.redeliver
        if self.next < self.subject.end:
            yield Offer(self.next, self.subject.end - self.next, 1)

    @property
    def offers_any(self) -> bool:
        """Whether it offers messages itself, and not only its child."""
        if self.order is not None:
            return not self.held_back and self.order.offers_any(self.subject.end)
        return (self.next < self.subject.end or self.redeliver.messages > 0) and not self.held_back

    @property
    def source(self) -> Group:
        """The group whose messages its consumers get next: its child's come first."""
        child = self.child
        return child if child is not None and child.ready and child.offers_any else self

    @property
    def names(self) -> tuple[str, str]:
        """Its subject and its own name, for log lines."""
        return self.subject.name, self.name

    @property
    def damage(self) -> DamagedData | None:
        """Why nobody can say now whether there are messages; None when it is known."""
        return self.subject.damage

    @property
    def is_awaited(self) -> bool:
        """Whether anybody may wait for one of its messages."""
        front = self.front
        return bool(front.waiting or front.subscriptions or front.lead is not None)

    @property
    def has_messages(self) -> bool:
        """Whether a pull would get a message."""
        return (not self.in_flight_max or self.room > 0) and self.source.offers_any

    @property
    def room(self) -> int:
        """How many further messages consumers may hold; asked of the group that they name (rule Q10)."""
        if not self.in_flight_max:
            return U32_MAX
        held = self.outstanding + (0 if self.child is None else self.child.outstanding)
        return max(self.in_flight_max - held, 0)

    @property
    def front(self) -> Group:
        """The group whose consumers get these messages."""
        return self.parent or self

    @property
    def wanted(self) -> int:
        """How many messages consumers with empty hands wait for (rule Q4); 0 while there are messages to give."""
        # Messages that are there are given out in one of the next turns.
        return 0 if self.has_messages or self.held_back else min(self.waiting.wanted, U32_MAX)

    @property
    def outstanding(self) -> int:
        """Messages pulled and neither acknowledged nor given back."""
        return self.held.messages

    @property
    def oldest(self) -> int:
        """The lowest consume sequence that is not acknowledged, or not delivered yet."""
        candidates = (self.held.oldest, self.redeliver.oldest, self.paused.oldest, self.quarantined.oldest)
        leaving = [decision.oldest for decision in self.leaving.values()]
        return min([self.next, *leaving, *[oldest for oldest in candidates if oldest is not None]])

    def copy(self) -> GroupCopy:
        """Copy everything that a checkpoint stores of the group."""
        # The next start offers unreadable messages again: their file may have been restored by then.
        offers = [*self.redeliver.copy(), *self.paused, *self.quarantined]
        words = (self.given_back.copy(), self.lapsed.copy(), self.retried.copy(), self.rejected.copy())
        kind = (self.held_back, self.ephemeral, self.filter)
        terms = (self.order is not None, self.in_flight_max, self.begins_at_ms)
        leaving = list(self.leaving.values())
        return GroupCopy(
            self, self.next, self.held.copy(), offers, self.oldest, self.known_from, *words, leaving, *kind, *terms
        )

    def apply(self, entry: PullEntry) -> int:
        """Change the group as an entry of the pull log says; return how many messages that concerned."""
        self._changes()
        if entry.op == PullOp.PULL:
            self._pulled(entry)
            return entry.covered
        changed = 0
        for run in self.held.take(entry.pull_first, entry.pull_first + entry.covered, entry.incarnation):
            changed += run.end - run.start
            if self.extensions.all:
                self.extensions.forget(run.start, run.end)
            if entry.op != PullOp.ACK:
                self._give_back(run, entry)
            elif self.order is not None:
                self.order.settled(run.consume_first, run.consume_first + run.messages)
        return changed

    def leave(self, decision: Decision) -> None:
        """Let messages go that live on at their delay server. They count as unacknowledged until it has them."""
        self._changes()
        for row in decision.rows:
            word = self.rejected if row.reason else self.retried
            for run in self.held.take(row.pull_first, row.pull_first + row.covered, row.incarnation):
                self.extensions.forget(run.start, run.end)
                self.given_back.add(run.start, run.end)
                word.add(run.start, run.end)
                if self.order is not None:
                    self.order.settled(run.consume_first, run.consume_first + run.messages)
        self._bound_given_back()
        self.leaving[decision.key] = decision

    def left(self, key: tuple[int, int]) -> None:
        """The delay server has taken the messages of that decision."""
        if key in self.leaving:
            self._changes()
            del self.leaving[key]

    def move(self, to: int) -> None:
        """Go on at a consume sequence. What was pulled counts as if its lease had ended, and comes again only from
        ``to`` on; messages that live on at their delay server come in any case.
        """
        self._changes()
        for run in self.held:
            self.given_back.add(run.start, run.end)
            self.lapsed.add(run.start, run.end)
        self.held, self.redeliver, self.paused, self.quarantined = Held(), Offers(), Offers(), Offers()
        self.extensions = Extensions()
        self._bound_given_back()
        self.next, self.settled = to, True
        self._forget_order()

    def hold_back(self, held_back: bool) -> None:
        """Give nobody messages, or give them again."""
        self._changes()
        self.held_back = held_back
        if self.child is not None:
            self.child.held_back = held_back

    def make_ephemeral(self) -> None:
        """End when there are no consumers any more."""
        self._changes()
        self.ephemeral = True

    def want(self, wanted: Filter) -> None:
        """Get only these messages."""
        self._changes()
        self.filter = wanted

    def bound(self, in_flight_max: int) -> None:
        """Let its consumers hold so many messages; 0 is any number."""
        self._changes()
        self.in_flight_max = in_flight_max

    def keep_order(self) -> None:
        """Get the messages of each ordering key one after the other."""
        self._changes()
        self.order = Order()

    def begin_order(self) -> None:
        """Let the order learn what is not settled; the keys of that are loaded next."""
        assert self.order is not None, "it is asked of ordered groups"
        held = [range(run.consume_first, run.consume_first + run.messages) for run in self.held]
        paused = [range(offer.consume_first, offer.consume_first + offer.count) for offer in self.paused]
        self.order.begin(self.next, [*held, *paused], [*self.redeliver, *self.paused])

    def resume(self, offer: Offer) -> None:
        """Offer messages whose pause is over."""
        self._changes()
        end = offer.consume_first + offer.count
        self.paused.take(offer.consume_first, end)
        self._offer_again(offer)
        if self.order is not None:
            self.order.back(offer.consume_first, end, offer.attempt)

    def forget_given_back(self, runs: int) -> None:
        """Keep only the newest ``runs`` runs of what was given back; handles of older ones are stale from now on."""
        for kept in (self.given_back, self.lapsed, self.retried, self.rejected):
            if len(kept) > runs:
                self.known_from = max(self.known_from, kept.drop_first(len(kept) - runs))

    def quarantine(self, offer: Offer) -> None:
        """Pass over messages that were offered and can't be read."""
        self._changes()
        end = offer.consume_first + offer.count
        if offer.consume_first >= self.next:
            self._pass_by(offer.consume_first)
            self.next = end
        else:
            self.redeliver.take(offer.consume_first, end)
        self.quarantined.append(offer)
        self._forget_order()

    def release(self, offer: Offer) -> None:
        """Offer messages again that were passed over: it seems that they can be read now."""
        self._changes()
        self.quarantined.take(offer.consume_first, offer.consume_first + offer.count)
        self._offer_again(offer)
        self._forget_order()

    def give_up(self, offer: Offer) -> None:
        """Count messages that can't be read as acknowledged."""
        self._changes()
        self.quarantined.take(offer.consume_first, offer.consume_first + offer.count)

    def begin_at(self, first: int) -> None:
        """Begin at ``first``: messages below are not kept any more, so offers of them are withdrawn."""
        self.settled = True
        self._forget_order()
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
        # An earlier life passed over the messages in between because it could not read them (rule L5); its next start
        # offers them again. Or they wait for others before them (rule Q8).
        self._pass_by(entry.consume_first)
        if entry.consume_first < self.next:
            self.redeliver.take(entry.consume_first, min(end, self.next))
        # Both conditions may hold: a replay may begin with a lower ``next`` than the group had when the entry was
        # written (rule Q5).
        self.next = max(self.next, end)
        pull_end = entry.pull_first + entry.covered
        at = (entry.pull_first, pull_end, entry.consume_first)
        self.held.add(Run(*at, entry.attempt, entry.incarnation, entry.lease_ms))
        if self.order is not None:
            self.order.pulled(entry.consume_first, end)

    def _pass_by(self, to: int) -> None:
        """Go on at ``to``; the messages before it are offered again."""
        if to > self.next:
            self._offer_again(Offer(self.next, to - self.next, 1))

    def _offer_again(self, offer: Offer) -> None:
        if self.order is None:
            self.redeliver.append(offer)
            return
        # They are pulled in another order, one by one, and then each is found without a search.
        for sequence in range(offer.consume_first, offer.consume_first + offer.count):
            self.redeliver.append(Offer(sequence, 1, offer.attempt), apart=True)

    def _forget_order(self) -> None:
        if self.order is not None:
            self.order.forget()

    def _give_back(self, run: Run, entry: PullEntry) -> None:
        op = entry.op
        # Messages that were given to no handler had no attempt (rule Q4).
        attempt = run.attempt if op == PullOp.RETURNED else min(run.attempt + 1, ATTEMPT_MAX)
        offer = Offer(run.consume_first, run.messages, attempt)
        pause_ms = 0
        if op == PullOp.NACK and self.on_pause is not None:
            pause_ms = entry.lease_ms or pause_after(run.attempt)
        if pause_ms and self.on_pause is not None:
            self.paused.append(offer, apart=True)
            self.on_pause(self, offer, pause_ms)
            if self.order is not None:
                self.order.put_off(run.consume_first, run.consume_first + run.messages, attempt)
        else:
            self._offer_again(offer)
            if self.order is not None:
                self.order.back(run.consume_first, run.consume_first + run.messages, attempt)
        self.given_back.add(run.start, run.end)
        if op == PullOp.LAPSED:
            self.lapsed.add(run.start, run.end)
        self._bound_given_back()

    def _bound_given_back(self) -> None:
        if len(self.given_back) > GIVEN_BACK_RUNS_MAX:
            self.forget_given_back(GIVEN_BACK_RUNS_MAX)


def pause_after(attempt: int) -> int:
    """How long a message that a handler gave back waits, in ms; 0 the first time."""
    return 0 if attempt < 2 else min(PAUSE_MS << min(attempt - 2, 16), PAUSE_MS_MAX)
