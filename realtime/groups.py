"""Groups: what each group of consumers gets of its subject, and who waits for it. Its window knows where its messages
are (`realtime.window`). An order, a filter, a bound and a lead are terms of the group, which say what may be pulled.

Whatever changes a group asks for its window by `Group.changing`, live and in recovery alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from delayd.log.pull import PullEntry
from delayd.wire.heads import U32_MAX

from .alarms import NEVER_MS
from .filters import OPEN, Filter
from .index import Subject
from .order import Order
from .polls import Polls
from .window import GroupWindow, GroupWord, Stage

if TYPE_CHECKING:
    from delayd.errors import DamagedData

    from .leads import Lead
    from .polls import Waiting
    from .subscriptions import Subscription


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
