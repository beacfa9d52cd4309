"""Subscriptions: what consumers of one group take together, a list of subjects or all that match a pattern.

A subscription has a queue of the groups that have messages, and PULLs that wait. So a PULL costs as much as there are
subjects with messages, and nothing for the others. Groups take turns: an answer begins where the one before ended.

Consumers that name the same group and the same subjects share one subscription. It ends with the last connection that
has it. Invariant: all that subscriptions hold is bounded over all connections (rule B1).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice

from delayd.batch.names import Pattern
from delayd.errors import BadArgument, DelaydError, OtherFilter, Rebuilding, ServerStopped, SlowDown
from delayd.wire.heads import U32_MAX

from .answers import PARTS_MAX, Part
from .groups import Group
from .handoff import Peer
from .polls import RETRY_MS, Polls, Waiting
from .terms import FROM_EARLIEST, OPEN, Beginning

OF_PEER_MAX = 16  # Subscriptions of one connection.
SUBSCRIPTIONS_MAX = 1_024  # Subscriptions: each new subject is compared with every pattern, some 0.5 us each.
NAMES_MAX = 131_072  # Subjects in the lists of all subscriptions: 0.3 KB each, 40 MiB.
MEMBERS_MAX = 200_000  # Groups in all subscriptions, each counted once for each: up to 0.3 KB each, 60 MiB.
SHARES = 8  # An answer is shared by so many groups when they have messages; by more, when these have few.
FAILURES_MAX = 16  # Groups that one answer tries in vain; the others have the next answer.

PartsOf = Callable[[Group, int, int, int], list[Part]]
"""The parts of a group for an answer: of at most so many messages, about so many bytes, and so many parts."""


class Subscription:
    """The groups of one name over many subjects; ``key`` tells it from all others."""

    __slots__ = ("_made", "_queue", "beginning", "failures", "group_name", "in_flight_max", "key", "members", "names",
                 "number", "pattern", "peers", "pending", "scanned", "waiting")  # fmt: skip

    ready = True  # A PULL may wait at once, before any of the groups is there.
    damage = None  # Subjects that can't be read keep nothing from the others.

    def __init__(
        self, number: int, group_name: str, subjects: Sequence[str], pattern: Pattern | None, beginning: Beginning
    ) -> None:
        self.number = number
        self.beginning = beginning  # Of the groups that it makes.
        self.group_name = group_name
        self.in_flight_max: int | None = None  # Of each of its groups; None: its consumers say nothing of it.
        self.key = key_of(group_name, subjects, pattern)
        self.names = (pattern.text if pattern is not None else f"{len(subjects)} subjects", group_name)
        self.pattern = pattern
        self.waiting = Polls()
        self.members: dict[Group, None] = {}
        self.peers: dict[Peer, None] = {}
        self._queue: OrderedDict[Group, None] = OrderedDict()
        self._made: list[Group] = []  # Groups that joined before they were ready.
        self.look_again()

    def look_again(self) -> None:
        """Have all its subjects looked at in the next turns: their groups join."""
        # Subjects whose groups join in one of the next turns, and whether they came after the subscription.
        self.pending = deque((name, False) for name in self.key[1])
        # Subjects up to this name were compared with the pattern; None: all were.
        self.scanned = "" if self.pattern is not None else None
        self.failures = 0  # Groups that could not be made.

    @property
    def is_joining(self) -> bool:
        """Whether some of its groups are still to join, or to become ready: nobody knows yet what they have."""
        self._made = [group for group in self._made if not group.ready and group in self.members]
        return bool(self.pending or self._made) or self.scanned is not None

    def join(self, group: Group) -> None:
        """A group belongs to it from now on."""
        self.members[group] = None
        if not group.ready:
            self._made.append(group)

    def agree(self, beginning: Beginning) -> None:
        """Another consumer has it: who names tags or an order says it for those who name none.

        Raises:
            OtherFilter: its consumers want other tags.
        """
        own, wanted = self.beginning, beginning.filter
        if OPEN not in (own.filter, wanted) and own.filter != wanted:
            names = f"group {self.group_name} of {self.names[0]}"
            what = f"the consumers of {names} want the tags {own.filter}, and not {wanted}"
            raise OtherFilter(f"{what}; name the same ones, or another group")
        found = own.filter if wanted is OPEN else wanted
        self.beginning = own._replace(filter=found, ordered=own.ordered or beginning.ordered)

    def unqueue(self, waiting: Waiting) -> None:
        """Let a PULL wait no longer."""
        self.waiting.remove(waiting)

    @property
    def has_messages(self) -> bool:
        """Whether a pull would get a message."""
        while self._queue:
            if _gives(next(iter(self._queue))):
                return True
            self._queue.popitem(last=False)
        return False

    @property
    def wanted(self) -> int:
        """How many messages consumers with empty hands wait for (rule Q4); 0 while there are messages to give."""
        return 0 if self.has_messages else min(self.waiting.wanted, U32_MAX)

    def offer(self, group: Group) -> None:
        """A group may have messages: it takes its turn behind the others."""
        if _gives(group):
            self._queue.setdefault(group)

    def served(self, groups: Iterable[Group]) -> None:
        """An answer with messages of these groups has left: those that have no more leave the queue."""
        for group in groups:
            if not _gives(group):
                self._queue.pop(group, None)

    def leave(self, group: Group) -> None:
        """A group is gone."""
        self.members.pop(group, None)
        self._queue.pop(group, None)

    def pick(self, waiting: Waiting, parts_of: PartsOf) -> list[tuple[Group, list[Part]]]:
        """The messages of an answer, by the group that gives them; none when no group can give one now.

        Raises the error of a group when none of the groups that were tried gives anything.
        """
        messages, size_bytes, parts_left = waiting.max_messages, waiting.max_bytes, PARTS_MAX
        share = max(1, messages // min(SHARES, len(self._queue)))
        picked: list[tuple[Group, list[Part]]] = []
        failures: list[DelaydError] = []
        for group in list(islice(self._queue, PARTS_MAX)):
            # Less than a share is left: it would only cut stored batches into small pieces.
            if messages < share or size_bytes <= 0 or not parts_left or len(failures) == FAILURES_MAX:
                break
            self._queue.move_to_end(group)
            try:
                source = group.source
                parts = parts_of(source, share, size_bytes, parts_left) if _gives(group) else []
            except ServerStopped:
                raise
            except Rebuilding:
                parts = []  # It is offered again when its consume log is whole.
            except DelaydError as error:
                failures.append(error)
                continue
            if parts:
                picked.append((source, parts))
                messages -= sum([part.rows for part in parts if not part.passed])
                size_bytes -= sum([len(part.batch) for part in parts])
                parts_left -= len(parts)
        if failures and not picked:
            raise failures[0]
        return picked


class Subscriptions:
    """The subscriptions of all connections."""

    def __init__(self) -> None:
        self._by_key: dict[object, Subscription] = {}
        self._of_peer: dict[Peer, dict[int, Subscription]] = {}
        self._numbers = count(1)
        self._names = 0
        self._members = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._by_key.values())

    def of(self, peer: Peer, number: int) -> Subscription:
        """The subscription that a connection calls by this number."""
        found = self._of_peer.get(peer, {}).get(number)
        if found is None:
            raise BadArgument(f"this connection has no subscription {number}; send SUBSCRIBE on it first")
        return found

    def subscribe(
        self,
        peer: Peer,
        group_name: str,
        subjects: Sequence[str],
        pattern: Pattern | None,
        beginning: Beginning = FROM_EARLIEST,
    ) -> tuple[Subscription, bool]:
        """Give a connection a subscription; return whether it is new.

        Raises:
            SlowDown: there is no room for one more.
            OtherFilter: its other consumers want other tags.
        """
        key = key_of(group_name, subjects, pattern)
        of_peer = self._of_peer.get(peer, {})
        found = self._by_key.get(key)
        new = found is None
        if found is None or found.number not in of_peer:
            self._check_room(len(of_peer), len(subjects), new)
        if found is None:
            found = self._by_key[key] = Subscription(next(self._numbers), group_name, subjects, pattern, beginning)
            self._names += len(subjects)
        else:
            found.agree(beginning)
        found.peers[peer] = None
        self._of_peer.setdefault(peer, {})[found.number] = found
        return found, new

    def join(self, subscription: Subscription, group: Group) -> bool:
        """Let a group be in a subscription; False when there is no room for it."""
        if group not in subscription.members:
            if self._members >= MEMBERS_MAX:
                return False
            self._members += 1
            subscription.join(group)
            group.subscriptions.append(subscription)
        return True

    def strike(self, group: Group) -> None:
        """Forget a group that is gone."""
        for subscription in group.subscriptions:
            subscription.leave(group)
            self._members -= 1
        group.subscriptions.clear()

    def disconnected(self, peer: Peer) -> None:
        """Forget the subscriptions that nobody has any more now that a connection has ended."""
        for subscription in self._of_peer.pop(peer, {}).values():
            del subscription.peers[peer]
            if not subscription.peers:
                self._forget(subscription)

    def _forget(self, subscription: Subscription) -> None:
        del self._by_key[subscription.key]
        if subscription.pattern is None:
            self._names -= len(subscription.key[1])
        self._members -= len(subscription.members)
        for group in subscription.members:
            group.subscriptions.remove(subscription)
        subscription.members.clear()

    def _check_room(self, of_peer: int, names: int, new: bool) -> None:
        if of_peer >= OF_PEER_MAX:
            raise SlowDown(f"one connection has at most {OF_PEER_MAX} subscriptions", retry_after_ms=RETRY_MS)
        if new and (len(self) >= SUBSCRIPTIONS_MAX or self._names + names > NAMES_MAX):
            what = f"{len(self)} subscriptions with {self._names} subjects in their lists"
            raise SlowDown(f"this server has {what}, and no room for one more", retry_after_ms=RETRY_MS)


def key_of(group_name: str, subjects: Sequence[str], pattern: Pattern | None) -> tuple[str, Sequence[str], str]:
    """What tells a subscription from others; the subjects are sorted."""
    return group_name, tuple(subjects), pattern.text if pattern is not None else ""


def _gives(group: Group) -> bool:
    return group.ready and group.has_messages and group.source.subject.damage is None
