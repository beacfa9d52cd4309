"""Changes: which groups a checkpoint has to copy, and copies of groups that change while it copies the others.

Invariant: each copy made after `begin` shows its group as it was at that moment, however many turns of the loop the
copying takes: a group that is about to change is copied first.
"""

from collections.abc import Iterable

from .groups import Group, GroupCopy


class Changes:
    """Belongs to the loop."""

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
