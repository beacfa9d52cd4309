"""Joins: the groups of a subscription are found or made, some in each turn of the loop, and so are those of subjects
that come later and match its pattern.

When a group can't be made, all subjects of its subscription are looked at again after some seconds; the others do not
wait for it. So nothing is remembered of subjects without a group, however many match a pattern.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from delayd.batch.names import SUBSCRIBED_MAX, Pattern
from delayd.errors import (
    BadArgument,
    BadRequest,
    DelaydError,
    ExclusiveConflict,
    NotOrdered,
    OtherFilter,
    RetryLater,
    ServerStopped,
)
from delayd.machine.operating import LogLimit
from delayd.wire.consuming import End
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    need_str,
    need_strs,
    need_u32,
)

from .alarms import Alarms
from .consumers import need_group, need_subject
from .filters import OPEN
from .group_records import GroupRecords
from .groups import Group
from .index import Index, Subject
from .peer import Peer
from .positions import Beginning, beginning_of, check_beginning
from .pulls import Pulls
from .subscriptions import Subscription

TURN_WORK = 1_024  # Work of one turn, some microseconds each: a name that is compared, a group that joins.
MAKE_WORK = 16  # A group that is made is a record of the pull log, some 50 us.
FAILURES_MAX = 64  # After so many groups that can't be made, only those that exist join until all are looked at again.
RETRY_MS = 5_000

limited = LogLimit(logging.getLogger(__name__))  # Lines that consumers can provoke.


class Joins:
    """Fills subscriptions; belongs to the loop."""

    def __init__(self, pulls: Pulls, groups: GroupRecords, index: Index, alarms: Alarms) -> None:
        self._pulls = pulls
        self._groups = groups
        self._index = index
        self._clock = alarms.clock
        self._turn, self._retry = alarms.alarm(self._work), alarms.alarm(self._look_again)
        self._busy: OrderedDict[Subscription, None] = OrderedDict()  # Those with something to do in the next turns.
        self._lacking: dict[Subscription, None] = {}  # Those of which a group could not be made.
        groups.on_deleted.append(self._deleted)

    def subscribe(self, peer: Peer, frame: Frame) -> None:
        """Answer a SUBSCRIBE; its groups join in the next turns."""
        head = frame.head
        group_name = need_group(head)
        subjects, pattern = _asked_for(head)
        beginning = beginning_of(head)
        if beginning.ordered or beginning.filter is not OPEN or self._pulls.leads.of_peer:
            for group in islice(self._existing(group_name, subjects, pattern), SUBSCRIBED_MAX):
                self._check(group, beginning)
        in_flight_max = need_u32(head, "in_flight_max") if "in_flight_max" in head else None
        subscription, new = self._pulls.subscriptions.subscribe(peer, group_name, subjects, pattern, beginning)
        if in_flight_max is not None and subscription.in_flight_max != in_flight_max:
            subscription.in_flight_max = in_flight_max
            subscription.look_again()  # Each of its groups hears of it.
            new = True
        if new:
            self._go_on_with(subscription)
        peer.answer(frame.request_id, {"subscription": subscription.number, "now_ms": self._clock.now_ms()})

    def _existing(self, group_name: str, subjects: Sequence[str], pattern: Pattern | None) -> Iterator[Group]:
        """The groups of a subscription that exist already."""
        groups = self._pulls.groups
        if pattern is None:
            for name in subjects:
                group = groups.get((name, group_name))
                if group is not None:
                    yield group
            return
        for (name, of), group in groups.items():
            if of == group_name and group.parent is None and pattern.matches(name):
                yield group

    def came(self, subject: Subject) -> None:
        """A subject has its first message: the subscriptions whose pattern it matches take it, too."""
        for subscription in self._pulls.subscriptions:
            if subscription.pattern is not None and subscription.pattern.matches(subject.name):
                subscription.pending.append((subject.name, True))
                self._go_on_with(subscription)

    def _deleted(self, group: Group) -> None:
        """A group is deleted: the subscriptions that have it make it anew, as a consumer of its subject alone does with
        its next PULL.
        """
        for subscription in group.subscriptions:
            # A pattern makes no group before a subject's first message, and `came` tells of that.
            if subscription.pattern is None or group.subject.end:
                subscription.pending.append((group.subject.name, False))
                self._go_on_with(subscription)

    def _look_again(self) -> None:
        for subscription in self._lacking:
            subscription.look_again()
            self._go_on_with(subscription)
        self._lacking.clear()
        self._work()

    def _work(self) -> None:
        """Do as much as one turn may."""
        left = TURN_WORK
        while self._busy and left > 0:
            subscription = next(iter(self._busy))
            if not subscription.peers or not (subscription.pending or subscription.scanned is not None):
                del self._busy[subscription]
            elif subscription.pending:
                left -= self._join(subscription, *subscription.pending.popleft())
            else:
                left -= self._scan(subscription, left)
        if self._busy:
            self._turn.soon()

    def _go_on_with(self, subscription: Subscription) -> None:
        self._busy[subscription] = None
        self._turn.soon()

    def _scan(self, subscription: Subscription, most: int) -> int:
        """Compare some of the subjects with a pattern."""
        pattern, after = subscription.pattern, subscription.scanned
        assert pattern is not None and after is not None, "only patterns are compared"
        names = [subject.name for subject in islice(self._index.listed(pattern.prefix, after), most)]
        subscription.pending.extend((name, False) for name in filter(pattern.matches, names))
        subscription.scanned = names[-1] if len(names) == most else None
        return len(names)

    def _join(self, subscription: Subscription, name: str, new: bool) -> int:
        """Let the group of a subject join; return the work that it took. A ``new`` subject came while there was the
        subscription.
        """
        group = self._pulls.groups.get((name, subscription.group_name))
        if group is None:
            if subscription.failures >= FAILURES_MAX:
                self._lacks(subscription)
                return 1
            self._make(subscription, name, new)
            return MAKE_WORK
        try:
            self._check(group, subscription.beginning)
        except (ExclusiveConflict, NotOrdered, OtherFilter) as error:
            self._failed(subscription, name, error.message)
            return 1
        if group not in subscription.members and not self._pulls.join(subscription, group):
            self._failed(subscription, name, "there is no room for more subjects in subscriptions")
        else:
            self._bound(subscription, group)
        return 1

    def _bound(self, subscription: Subscription, group: Group) -> None:
        if subscription.in_flight_max is None:
            return
        try:
            self._groups.bound(group, subscription.in_flight_max)
        except RetryLater as error:
            self._failed(subscription, group.subject.name, error.message)

    def _make(self, subscription: Subscription, name: str, new: bool) -> None:
        beginning = subscription.beginning
        if new and beginning.start is End.LATEST:
            # All of its messages are later than the subscription.
            beginning = beginning._replace(start=End.EARLIEST)
        try:
            group = self._groups.create(name, subscription.group_name, beginning)
        except ServerStopped:
            raise
        except DelaydError as error:
            subscription.failures += 1
            self._failed(subscription, name, error.message)
            return
        if not self._pulls.join(subscription, group):
            self._failed(subscription, name, "there is no room for more subjects in subscriptions")
        else:
            self._bound(subscription, group)

    def _check(self, group: Group, beginning: Beginning) -> None:
        """Refuse who may not share a group, as it refuses a PULL of that group alone."""
        self._pulls.leads.check_shared(group)
        check_beginning(group, beginning)

    def _failed(self, subscription: Subscription, name: str, reason: str) -> None:
        at = (name, subscription.group_name, reason)
        limited.warning("subject_not_joined", "subject_not_joined subject=%s group=%s reason=%r", *at)
        self._lacks(subscription)

    def _lacks(self, subscription: Subscription) -> None:
        if not self._lacking:
            self._retry.after(RETRY_MS)
        self._lacking[subscription] = None


def _asked_for(head: Head) -> tuple[list[str], Pattern | None]:
    """The subjects of a list in order, or a pattern."""
    if ("subjects" in head) == ("pattern" in head):
        raise BadRequest("a subscription has subjects or a pattern, one of the two", field="subjects")
    if "pattern" in head:
        return [], Pattern(need_str(head, "pattern"))
    subjects = sorted(set(need_strs(head, "subjects")))
    if not 0 < len(subjects) <= SUBSCRIBED_MAX:
        raise BadArgument(f"a subscription of {len(subjects)} subjects; it has 1 to {SUBSCRIBED_MAX}, or a pattern")
    for subject in subjects:
        need_subject(subject)
    return subjects, None
