"""Roster: the groups of a server by name and by subject, and those whose progress does not check (rules B1, L9)."""

import logging
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from delayd.batch.names import is_reserved, parse_retry_subject, retry_subject
from delayd.errors import SlowDown

from .groups import Group
from .kept import LostGroup

GROUPS_MAX = 10_000  # Each group is some kilobytes of memory, and a row of every checkpoint before which it changed.
GROUPS_OF_SUBJECT_MAX = 1_000  # One subject's groups leave room for the groups of others.
LOOKED_AT_MAX = 1_000  # At most this many groups are looked at to find one that can be forgotten.
RETRY_MS = 1_000  # The hint to a client that was refused because a bound was reached.

log = logging.getLogger(__name__)


class Roster:
    """The groups that exist; ``groups`` has them by subject and name."""

    def __init__(self, log_id: int) -> None:
        self._log_id = log_id
        self.known = False  # Whether the pull log was read; before that no group is known.
        self.groups: dict[tuple[str, str], Group] = {}
        self._by_id: dict[int, Group] = {}
        self.lost: dict[tuple[str, str], LostGroup] = {}
        self.next_id = 1
        self._unnamed: list[LostGroup] = []
        self._of_subject: dict[str, list[Group]] = {}
        self._idle: dict[Group, None] = {}  # Groups that were created when their subject had no message yet, in order.
        self._names: list[tuple[str, str]] = []  # Sorted, for listings, each of which goes on behind a name.

    def begin(self, groups: Iterable[Group]) -> None:
        """Take over the groups that the pull log names."""
        self.known = True
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
        """Refuse a group that there is no room for (SlowDown), or whose progress is lost (its damage)."""
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
            self.next_id = max(self.next_id, each.group_id + 1)
            log.critical(
                "group_progress_damaged id=%s names=%s reason=%r fix=delayd_mend_release_or_give_up",
                *(each.id, each.names, each.damage.message),
            )
            if each.names is None:
                self._unnamed.append(each)
            else:
                self.lost[each.names] = each

    def strike_lost(self, lost: LostGroup) -> None:
        """Remove a lost group: an operator has decided about it."""
        if lost.names is None:
            self._unnamed.remove(lost)
        else:
            del self.lost[lost.names]

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
