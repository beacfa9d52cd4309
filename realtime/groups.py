"""Groups: what each group of consumers gets of its subject, and who waits for it. Its window
(`realtime.group_window`) knows where its messages are. An order, a filter, a bound and a lead are terms of the group,
which say what may be pulled.

Whatever changes a group asks for its window by `Group.changing`, live and in recovery alike. The roster finds groups by
name and by subject, bounds how many there are (rule B1), and names those whose progress does not check (rule L9).
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from delayd.batch.names import is_reserved, parse_retry_subject, retry_subject
from delayd.errors import BadArgument, SlowDown
from delayd.log.pull import PullEntry
from delayd.machine.alarms import NEVER_MS
from delayd.wire.heads import U32_MAX

from .group_window import GroupWindow, GroupWord, Stage
from .order import Order
from .polls import RETRY_MS, Polls
from .subject_index import Subject
from .terms import OPEN, Filter

if TYPE_CHECKING:
    from delayd.errors import DamagedData

    from .leads import Lead
    from .polls import Waiting
    from .subscriptions import Subscription

GROUPS_MAX = 10_000  # Groups: each is some kilobytes of memory, and a row of every checkpoint before which it changed.
GROUPS_OF_SUBJECT_MAX = 1_000  # Groups of one subject, which leave room for those of others.
LOOKED_AT_MAX = 1_000  # At most this many groups are looked at to find one that can be forgotten.

log = logging.getLogger(__name__)


class GroupCopy(NamedTuple):
    """A group as a checkpoint stores it: a copy of one moment, which never changes."""

    group: Group
    window: GroupWindow
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

    @property
    def oldest(self) -> int:
        """The lowest consume sequence that was not acknowledged, or not delivered yet."""
        return self.window.oldest


class Group:
    """One group of one subject."""

    __slots__ = ("armed_ms", "before_change", "begins_at_ms", "child", "dirty", "ephemeral", "fenced", "filter",
                 "group_id", "held_back", "in_flight_max", "lead", "name", "oldest_at", "parent", "ready", "settled",
                 "standby", "subject", "subscriptions", "waiting", "window")  # fmt: skip

    is_joining = False  # As of a subscription: a PULL of this group alone waits until the group is ready.

    def __init__(self, group_id: int, subject: Subject, name: str, start: int, known_from: int = 0) -> None:
        self.group_id = group_id
        self.subject = subject
        self.name = name
        self.window = GroupWindow(start, known_from)
        self.armed_ms = NEVER_MS  # When an alarm for the ends of its leases and pauses comes.
        self.child: Group | None = None  # The group of its retry subject, whose messages its consumers get first.
        self.parent: Group | None = None  # Of such a child: the group whose consumers get its messages.
        self.held_back = False  # Whether an operator lets nobody pull its messages.
        self.filter = OPEN  # Which messages it wants; a child has none, for what comes again has matched before.
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

    @property
    def next(self) -> int:
        """The first message that it has not come to."""
        return self.window.next

    @property
    def order(self) -> Order | None:
        """Of a group that gets the messages of each ordering key one after the other."""
        return self.window.order

    @property
    def offers_any(self) -> bool:
        """Whether it offers messages itself, and not only its child."""
        window = self.window
        if window.order is not None:
            return not self.held_back and window.order.offers_any(self.subject.end)
        return (window.next < self.subject.end or window.others.messages[Stage.OFFERED] > 0) and not self.held_back

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
        return self.window.outstanding

    @property
    def oldest(self) -> int:
        """The lowest consume sequence that is not acknowledged, or not delivered yet."""
        return self.window.oldest

    def unqueue(self, waiting: Waiting) -> None:
        """Let a PULL wait no longer, or stand by no longer."""
        if waiting in self.standby:
            del self.standby[waiting]
        else:
            self.waiting.remove(waiting)

    def copy(self) -> GroupCopy:
        """Copy everything that a checkpoint stores of the group."""
        kind = (self.held_back, self.ephemeral, self.filter, self.order is not None)
        return GroupCopy(self, self.window.copy(), *kind, self.in_flight_max, self.begins_at_ms)

    def changing(self) -> GroupWindow:
        """Its window, which the caller is about to change."""
        if self.before_change is not None:
            self.before_change(self)
        self.dirty = True
        return self.window

    def apply(self, entry: PullEntry, now_ms: int | None = None) -> int:
        """Change the group as an entry of the pull log says; return how many messages that concerned. A replay has no
        time.
        """
        return self.changing().apply(entry, now_ms)

    def move(self, to: int) -> None:
        """Go on at a consume sequence."""
        self.changing().move(to)
        self.settled = True

    def hold_back(self, held_back: bool) -> None:
        """Give nobody messages, or give them again."""
        self.changing()
        self.held_back = held_back
        if self.child is not None:
            self.child.held_back = held_back

    def make_ephemeral(self) -> None:
        """End when there are no consumers any more."""
        self.changing()
        self.ephemeral = True

    def want(self, wanted: Filter) -> None:
        """Get only these messages."""
        self.changing()
        self.filter = wanted

    def bound(self, in_flight_max: int) -> None:
        """Let its consumers hold so many messages; 0 is any number."""
        self.changing()
        self.in_flight_max = in_flight_max

    def keep_order(self) -> None:
        """Get the messages of each ordering key one after the other."""
        self.changing().order = Order()

    def begin_at(self, first: int) -> None:
        """Begin at ``first``: messages below are not kept any more, so offers of them are withdrawn."""
        self.settled = True
        window = self.changing()
        window.forget_order()
        window.tell(GroupWord.RESUMED, 0, window.next)
        if window.next < first:
            window.tell(GroupWord.GONE, window.next, first)
        window.tell(GroupWord.GONE, 0, min(first, window.next))


@dataclass(frozen=True, slots=True)
class LostGroup:
    """A group whose progress does not check, or is gone; ``names`` are its subject and name, if they are known."""

    group_id: int
    names: tuple[str, str] | None
    damage: DamagedData

    @property
    def id(self) -> str:
        """The name by which an operator refers to it."""
        return f"group/{self.group_id:08x}"


class Changes:
    """Which groups a checkpoint has to copy, and copies of groups that change while it copies the others; belongs to
    the loop.

    Invariant: each copy made after `begin` shows its group as it was at that moment, however many turns of the loop the
    copying takes: a group that is about to change is copied first.
    """

    __slots__ = ("_dirty", "_pending", "copies", "created")

    def __init__(self, groups: Iterable[Group]) -> None:
        self.copies: list[GroupCopy] = []
        self.created: list[Group] = []  # Since the last `begin`.
        self._dirty: dict[Group, None] = {}
        self._pending: dict[Group, None] = {}
        for group in groups:
            group.before_change = self.before_change
            if group.dirty:
                self._dirty[group] = None

    def watch(self, group: Group) -> None:
        """Note that a new group is to be copied too."""
        group.before_change = self.before_change
        self._dirty[group] = None
        self.created.append(group)

    def forget(self, group: Group) -> None:
        """Note that a group was deleted."""
        group.before_change = None
        self._dirty.pop(group, None)
        self._pending.pop(group, None)

    def before_change(self, group: Group) -> None:
        """Copy a group that is about to change, if it still waits to be copied."""
        if group in self._pending:
            del self._pending[group]
            self.copies.append(group.copy())
        self._dirty[group] = None

    def begin(self, everything: Iterable[Group] = ()) -> None:
        """Begin to copy the groups that have changed since the last time, and ``everything``."""
        self._dirty.update(dict.fromkeys(everything))
        self._pending, self._dirty = self._dirty, {}
        self.copies, self.created = [], []

    def copy_some(self, most: int) -> int:
        """Copy at most ``most`` groups; return how many were copied."""
        count = 0
        while self._pending and count < most:
            group, _ = self._pending.popitem()
            self.copies.append(group.copy())
            count += 1
        return count

    def again(self, copies: Iterable[GroupCopy]) -> None:
        """Copy these groups again: the copies did not become durable. Groups that were deleted since are left out."""
        self._dirty.update((copied.group, None) for copied in copies if copied.group.before_change is not None)


class Roster:
    """The groups that exist; ``groups`` has them by subject and name."""

    def __init__(self, log_id: int) -> None:
        self._log_id = log_id
        self.known = False  # Whether the pull log was read; before that no group is known.
        self.groups: dict[tuple[str, str], Group] = {}
        self._by_id: dict[int, Group] = {}
        self.lost: dict[tuple[str, str], LostGroup] = {}
        self.next_id = 1  # Above the id of every group that there is or was: retry subjects have it in their names.
        self._unnamed: list[LostGroup] = []
        self._lost_of_subject: dict[str, list[LostGroup]] = {}
        self._of_subject: dict[str, list[Group]] = {}
        self._idle: dict[Group, None] = {}  # Groups that were created when their subject had no message yet, in order.
        self._names: list[tuple[str, str]] = []  # Sorted, for listings, each of which goes on behind a name.

    def begin(self, groups: Iterable[Group], next_id: int) -> None:
        """Take over the groups that the pull log names; no group has had ``next_id`` or a higher id."""
        self.known = True
        self.next_id = next_id
        for group in groups:
            self._add(group)
        for group in self.groups.values():
            self._link(group)
        self._names = sorted(self.groups)

    @property
    def all_lost(self) -> list[LostGroup]:
        """Groups whose progress does not check."""
        return [*self.lost.values(), *self._unnamed]

    def of(self, subject_name: str) -> Sequence[Group]:
        """The groups of a subject."""
        return self._of_subject.get(subject_name, ())

    def lost_of(self, subject_name: str) -> Sequence[LostGroup]:
        """The groups of a subject whose progress does not check."""
        return self._lost_of_subject.get(subject_name, ())

    def has(self, subject_name: str) -> bool:
        """Whether messages of a subject are kept for any group, as far as is known."""
        return subject_name in self._of_subject or not self.known

    def listed(self, subject: str | None, after: tuple[str, str]) -> Iterator[Group]:
        """Groups of a subject, or of all, behind a name, in order of subject and name."""
        names = self._names
        first = after if subject is None else max(after, (subject, ""))
        for at in range(bisect_right(names, first), len(names)):
            if subject is not None and names[at][0] != subject:
                return
            group = self.groups[names[at]]
            if group.parent is None and not is_reserved(group.subject.name):
                yield group

    def children(self, group_id: int) -> Sequence[Group]:
        """The group of what comes to a group again, if there is one; the group itself may be lost."""
        return self.of(retry_subject(self._log_id, group_id))

    def to_forget(self, subject_name: str) -> Group | None:
        """The oldest group that can be forgotten when there is no room for one more of a subject; None when there is
        room, or no such group.

        Its subject has never had a message and no PULL waits for one, so a consumer that asks for it again gets the
        same group.
        """
        of_subject = self.of(subject_name)
        if len(of_subject) >= GROUPS_OF_SUBJECT_MAX:
            return next((group for group in of_subject if _is_idle(group)), None)
        if len(self.groups) < GROUPS_MAX:
            return None
        for group in list(islice(self._idle, LOOKED_AT_MAX)):
            if _is_idle(group):
                return group
            del self._idle[group]
            if not group.subject.end:
                self._idle[group] = None  # It is put behind the groups that were not looked at.
        return None

    def check_new(self, subject_name: str, name: str) -> None:
        """Refuse a group that there is no room for (SlowDown), or no id (BadArgument), or whose progress is lost (its
        damage).
        """
        if self.next_id > U32_MAX:
            what = "this realtime server has no id left for a new group"
            raise BadArgument(f"{what}; an operator moves the subject to another: `delayd route move {subject_name}`")
        if len(self.groups) >= GROUPS_MAX:
            raise SlowDown(f"there are {GROUPS_MAX} groups, no more can be made", retry_after_ms=RETRY_MS)
        if len(self.of(subject_name)) >= GROUPS_OF_SUBJECT_MAX:
            what = f"subject {subject_name} has {GROUPS_OF_SUBJECT_MAX} groups, no more can be made"
            raise SlowDown(what, retry_after_ms=RETRY_MS)
        lost = self.lost.get((subject_name, name))
        if lost is not None:
            raise lost.damage

    def add(self, group: Group) -> None:
        """Add a group."""
        self._add(group)
        self._link(group)
        insort(self._names, (group.subject.name, group.name))

    def strike(self, group: Group) -> None:
        """Remove a group."""
        key = (group.subject.name, group.name)
        del self.groups[key]
        del self._by_id[group.group_id]
        if group.parent is not None:
            group.parent.child = None
        self._idle.pop(group, None)
        del self._names[bisect_left(self._names, key)]
        of_subject = self._of_subject[group.subject.name]
        of_subject.remove(group)
        if not of_subject:
            del self._of_subject[group.subject.name]

    def keep_lost(self, lost: Iterable[LostGroup]) -> None:
        """Refuse to serve groups whose progress does not check, until an operator decides (rule L9)."""
        for each in lost:
            log.critical(
                "group_progress_damaged id=%s names=%s reason=%r fix=delayd_mend_release_or_give_up",
                *(each.id, each.names, each.damage.message),
            )
            if each.names is None:
                self._unnamed.append(each)
            else:
                self.lost[each.names] = each
                self._lost_of_subject.setdefault(each.names[0], []).append(each)

    def strike_lost(self, lost: LostGroup) -> None:
        """Remove a lost group: an operator has decided about it."""
        if lost.names is None:
            self._unnamed.remove(lost)
        else:
            del self.lost[lost.names]
            self._lost_of_subject[lost.names[0]].remove(lost)

    def _link(self, group: Group) -> None:
        """Have a group of a retry subject served to the consumers of the group that it belongs to (rule Q2)."""
        whose = parse_retry_subject(group.subject.name)
        if whose is None:
            parent: Group | None = group
            child = self.groups.get((retry_subject(self._log_id, group.group_id), group.name))
        else:
            parent, child = self._by_id.get(whose[1]) if whose[0] == self._log_id else None, group
        if parent is not None and child is not None and parent is not child:
            child.parent, parent.child = parent, child
            child.held_back = parent.held_back

    def _add(self, group: Group) -> None:
        self.next_id = max(self.next_id, group.group_id + 1)
        self.groups[group.subject.name, group.name] = self._by_id[group.group_id] = group
        self._of_subject.setdefault(group.subject.name, []).append(group)
        if not group.subject.end:
            self._idle[group] = None


def _is_idle(group: Group) -> bool:
    is_spare = group.ready and not group.subject.end and not group.is_awaited
    return is_spare and not is_reserved(group.subject.name)
