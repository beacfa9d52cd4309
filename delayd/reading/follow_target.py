"""Follow target: checks that the groups of a realtime server's message log follow each other, and stand where its
checkpoint says (S5).

Invariant: nothing here stops an audit: each fault is a sentence. The checkpoint is read before the log, so everything
that it counts is there.
"""

from delayd.log.checkpoint import Payload
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.segment_index import IndexedGroup
from delayd.reading.skim import Skimmed


class TargetFollow:
    """The groups of one realtime server's log, in their order."""

    def __init__(self, published: Payload) -> None:
        """``published`` is the server's checkpoint; empty if there is none yet."""
        self.faults: list[str] = []
        self._published = published
        self._indexed_offset = _number(published, "indexed_offset")
        self._at_index = not published
        self._next: int | None = None  # The server's own sequence of the next message.
        self._epoch = 0
        self._end: int | None = None  # Where the group before ends.
        keep_from = _number(published, "keep_from")
        if keep_from > self._indexed_offset:
            self.faults.append(f"it is kept from {keep_from} on, and indexed up to {self._indexed_offset}")

    def take(self, group: CommitGroup | IndexedGroup | Skimmed) -> None:
        """Look at the next group."""
        header, at = group.header, f"the group at offset {group.header.offset}"
        if header.offset >= self._indexed_offset:
            self._reach(header.offset)
        if header.epoch < self._epoch:
            self.faults.append(f"{at} is of epoch {header.epoch}, the one before it of {self._epoch}")
        if header.kind == GroupKind.DATA:
            if self._next is not None and header.base_sequence != self._next:
                self.faults.append(f"{at} begins at message {header.base_sequence}, {self._next} is the next one")
            self._next = header.base_sequence + header.row_count
        self._epoch, self._end = max(self._epoch, header.epoch), group.end

    def end(self) -> list[str]:
        """Return the faults; the log ends here for now."""
        if self._end is not None and self._end >= self._indexed_offset:
            self._reach(self._end)
        return self.faults

    def _reach(self, offset: int) -> None:
        """Compare the log with the checkpoint at the offset up to which the checkpoint counts."""
        if self._at_index:
            return
        self._at_index = True
        if offset != self._indexed_offset and self._end is not None:
            self.faults.append(f"no group ends at offset {self._indexed_offset}, up to which the checkpoint counts it")
        said, epoch = self._published.get("next_sequence"), self._published.get("epoch")
        if isinstance(said, int) and self._next not in (None, said):
            what = f"it goes on with message {self._next} at offset {self._indexed_offset}"
            self.faults.append(f"{what}, the checkpoint with {said}")
        if isinstance(epoch, int) and self._epoch > epoch:
            self.faults.append(f"it has a group of epoch {self._epoch}, the checkpoint is of {epoch}")


def _number(published: Payload, name: str) -> int:
    value = published.get(name, 0)
    return value if isinstance(value, int) else 0
