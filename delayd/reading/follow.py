"""Follow: checks that the groups of a server's message log follow each other, and stand where its checkpoint says (rule
S5).

Invariant: nothing here stops an audit: each fault is a sentence. The checkpoint is read before the log, so everything
that it counts is there.
"""

from collections.abc import Sequence
from typing import NamedTuple

from delayd.log.group import GroupKind
from delayd.log.schedule import RESTORED_STEP
from delayd.log.segment_index import IndexedGroup
from delayd.reading.groups import Group


class Followed(NamedTuple):
    """The fields of a group's header that are compared, and where the group ends."""

    offset: int
    end: int
    epoch: int
    base_sequence: int
    row_count: int
    appended_at_ms: int
    previous_crc32c: int
    header_crc32c: int
    kind: int


def followed(group: Group | IndexedGroup) -> Followed:
    """What is compared of a group."""
    header = group.header
    return Followed(
        header.offset,
        group.end,
        header.epoch,
        header.base_sequence,
        header.row_count,
        header.appended_at_ms,
        header.previous_crc32c,
        header.header_crc32c,
        header.kind,
    )


class Checked(NamedTuple):
    """What a checkpoint says of a message log at an offset; None: it says nothing of this."""

    offset: int
    next_sequence: int | None
    epoch: int | None
    appended_at_ms: int | None = None  # Of the last group below the offset, and the checksum of its header.
    crc32c: int | None = None


class Follow:
    """The groups of one log, in their order."""

    def __init__(self, checked: Checked | None) -> None:
        """``checked`` is None while no checkpoint was published."""
        self.faults: list[str] = []
        self.first = 0
        self.last_appended_at_ms = 0
        self._checked = checked  # Until the log has reached it.
        self._next: int | None = None  # The sequence that the next row must have.
        self._appended_at_ms = 0
        self._crc32c: int | None = None
        self._epoch = 0
        self._end: int | None = None  # Where the group before ends.

    def take(
        self, group: Followed, rows: int | None = None, *, may_fall: bool = True, unused: Sequence[int] = ()
    ) -> None:
        """Look at the next group.

        Args:
            group: its header.
            rows: how many rows its batches have; None: nobody has counted them.
            may_fall: whether it may be appended before the group before it, as after an operator's word.
            unused: how many sequences each of its records leaves unused.
        """
        at = f"the group at offset {group.offset}"
        if self._checked is not None and group.offset >= self._checked.offset:
            self._reach(self._checked, group.previous_crc32c, group.offset)
        for count in unused:
            if count != RESTORED_STEP:
                self.faults.append(f"{at} leaves {count} sequences unused, an accepted server leaves {RESTORED_STEP}")
            elif self._next is not None:
                self._next += RESTORED_STEP
        if group.appended_at_ms < self._appended_at_ms and not may_fall:
            self.faults.append(f"{at} was appended at {group.appended_at_ms}, before the one before it")
        if group.epoch < self._epoch:
            self.faults.append(f"{at} is of epoch {group.epoch}, the one before it of {self._epoch}")
        if group.kind == GroupKind.DATA:
            if self._next is not None and group.base_sequence != self._next:
                self.faults.append(f"{at} begins at message {group.base_sequence}, and {self._next} is the next one")
            count = group.row_count if rows is None else rows
            if count != group.row_count:
                self.faults.append(f"{at} counts {group.row_count} rows, and has {count}")
            self.first = self.first or group.base_sequence
            self._next = group.base_sequence + count
        self._appended_at_ms, self._crc32c = group.appended_at_ms, group.header_crc32c
        self._epoch, self._end = max(self._epoch, group.epoch), group.end
        self.last_appended_at_ms = max(self.last_appended_at_ms, group.appended_at_ms)

    def end(self) -> list[str]:
        """Return the faults; the log ends here for now."""
        if self._checked is not None and self._end is not None:
            self._reach(self._checked, None, self._end)
        return self.faults

    def _reach(self, checked: Checked, previous_crc32c: int | None, offset: int) -> None:
        """Compare the log with what the checkpoint says at an offset, which the group at this one is the first to
        reach.
        """
        self._checked = None
        at = checked.offset
        if self._end is not None and at not in (offset, self._end):
            self.faults.append(f"no group of the message log begins at offset {at}, which the checkpoint names")
        if None not in (self._next, checked.next_sequence) and self._next != checked.next_sequence:
            what = f"the message log goes on with message {self._next} at offset {at}"
            self.faults.append(f"{what}, the checkpoint with {checked.next_sequence}")
        if self._crc32c is not None and checked.appended_at_ms not in (None, self._appended_at_ms):
            what = f"the last group below offset {at} was appended at {self._appended_at_ms}"
            self.faults.append(f"{what}, the checkpoint says {checked.appended_at_ms}")
        if checked.epoch is not None and self._epoch > checked.epoch:
            what = f"the message log has a group of epoch {self._epoch}"
            self.faults.append(f"{what}, the checkpoint is of {checked.epoch}")
        before = self._crc32c if self._crc32c is not None else previous_crc32c
        if None not in (before, checked.crc32c) and before != checked.crc32c:
            self.faults.append(f"the checkpoint names another group below offset {at} than the message log has")
        self._next = self._next if checked.next_sequence is None else checked.next_sequence
