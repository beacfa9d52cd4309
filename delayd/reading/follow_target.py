"""Follow target: checks that the groups of a realtime server's message log follow each other, and stand where its
checkpoint says (S5).

Invariant: nothing here stops an audit: each fault is a sentence. The checkpoint is read before the log, so everything
that it counts is there.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from delayd.log.checkpoint import Payload
from delayd.log.group import GroupKind

GROUP = np.dtype(
    [
        ("offset", "<u8"),
        ("end", "<u8"),
        ("epoch", "<u8"),
        ("base_sequence", "<u8"),
        ("row_count", "<u8"),
        ("appended_at_ms", "<i8"),
        ("previous_crc32c", "<u4"),
        ("header_crc32c", "<u4"),
        ("kind", "u1"),
    ]
)


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

    def take(self, groups: NDArray[np.void]) -> None:
        """Look at the next groups: GROUP[n], at least one."""
        data = np.flatnonzero(groups["kind"] == GroupKind.DATA)
        bases = groups["base_sequence"][data]
        nexts = bases + groups["row_count"][data]
        # The highest epoch before each group, and the message that is next before each group of messages.
        epochs = np.maximum.accumulate(np.append(np.uint64(self._epoch), groups["epoch"]))
        expected = np.append(bases[:1] if self._next is None else np.uint64(self._next), nexts[:-1])[: len(data)]
        found: list[tuple[int, int, str]] = []  # By group; of one group its epoch comes first.
        for row in np.flatnonzero(groups["epoch"] < epochs[:-1]).tolist():
            what = f"is of epoch {groups['epoch'][row]}, the one before it of {epochs[row]}"
            found.append((row, 1, f"the group at offset {groups['offset'][row]} {what}"))
        for at in np.flatnonzero(bases != expected).tolist():
            what = f"begins at message {bases[at]}, {expected[at]} is the next one"
            found.append((int(data[at]), 2, f"the group at offset {groups['offset'][data[at]]} {what}"))
        before = self._next, self._end
        reached = int(np.searchsorted(groups["offset"], self._indexed_offset))
        if reached < len(groups):
            # What was known before that group.
            known = int(np.searchsorted(data, reached))
            self._next = int(nexts[known - 1]) if known else before[0]
            self._end = int(groups["end"][reached - 1]) if reached else before[1]
            self._epoch = int(epochs[reached])
            found += [(reached, 0, what) for what in self._reach(int(groups["offset"][reached]))]
        self.faults += [what for _, _, what in sorted(found, key=lambda each: each[:2])]
        self._next = int(nexts[-1]) if len(data) else before[0]
        self._epoch, self._end = int(epochs[-1]), int(groups["end"][-1])

    def end(self) -> list[str]:
        """Return the faults; the log ends here for now."""
        if self._end is not None and self._end >= self._indexed_offset:
            self.faults += self._reach(self._end)
        return self.faults

    def _reach(self, offset: int) -> Iterator[str]:
        """Compare the log with the checkpoint at the offset up to which the checkpoint counts."""
        if self._at_index:
            return
        self._at_index = True
        if offset != self._indexed_offset and self._end is not None:
            yield f"no group ends at offset {self._indexed_offset}, up to which the checkpoint counts it"
        said, epoch = self._published.get("next_sequence"), self._published.get("epoch")
        if isinstance(said, int) and self._next not in (None, said):
            what = f"it goes on with message {self._next} at offset {self._indexed_offset}"
            yield f"{what}, the checkpoint with {said}"
        if isinstance(epoch, int) and self._epoch > epoch:
            yield f"it has a group of epoch {self._epoch}, the checkpoint is of {epoch}"


def _number(published: Payload, name: str) -> int:
    value = published.get(name, 0)
    return value if isinstance(value, int) else 0
