"""Ended rows: the rows that a delay server's decisions have ended, as the message log and the state keep them
(docs/keys.md, Records).

Invariant: each row stands once, by rising sequence.
"""

import numpy as np
from numpy.typing import NDArray

from delayd.errors import BatchMalformed
from delayd.log.dispatch import Reason

ENDED = np.dtype(
    [
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        # The sequence of the row that took its place, or that it met; else 0. Of a DRAINED row these two are the log_id
        # of the delay server that gets it, and the number of the batch in which it goes there.
        ("other", "<u8"),
        ("other_at_ms", "<i8"),
        # A row that took its place is filed in the hour of the later of these two instants (rule P5).
        ("decided_at_ms", "<i8"),
        ("hour", "<u4"),  # Filing hour.
        ("reason", "u1"),
        ("zero", "u1"),
        ("place", "<u2"),  # Of a DRAINED row: which row of that batch it is. Else 0.
    ]
)
ENDED_BYTES = 48
assert ENDED.itemsize == ENDED_BYTES, "the columns of an ended row leave no gap"

EndedRows = NDArray[np.void]  # Its dtype is ENDED.
NO_ENDED: EndedRows = np.zeros(0, ENDED)
# Rows with a key that ended for one of these reasons never took it.
TOOK_NO_KEY = (Reason.REJECTED, Reason.KEPT, Reason.IN_FLIGHT)
_REASONS = np.array(sorted(Reason), np.uint8)


def decided_about(ended: EndedRows, base_sequence: int, count: int) -> EndedRows:
    """Those of a commit's decisions that the sender of a batch is told: its rows that ended at once, and the earlier
    rows that its rows have replaced.
    """
    first, end = np.uint64(base_sequence), np.uint64(base_sequence + count)
    mine = np.where(ended["reason"] == Reason.REPLACED, ended["other"], ended["sequence"])
    told = np.isin(ended["reason"], (*TOOK_NO_KEY, Reason.REPLACED)) & (mine >= first) & (mine < end)
    return ended.compress(told)


def decode_ended(data: bytes) -> EndedRows:
    """Read the rows of a record `ended`: a view of its bytes.

    Raises:
        BatchMalformed: they are not such rows.
    """
    if len(data) % ENDED_BYTES:
        raise BatchMalformed(f"{len(data)} bytes are not made of ended rows")
    rows = np.frombuffer(data, ENDED)
    sequences = rows["sequence"]
    if not bool((sequences[1:] > sequences[:-1]).all()):
        raise BatchMalformed("ended rows do not rise in sequence")
    if not bool(np.isin(rows["reason"], _REASONS).all()) or rows["zero"].any() or _has_stray_place(rows):
        raise BatchMalformed("an ended row has an unknown reason")
    return rows


def _has_stray_place(rows: EndedRows) -> bool:
    return bool((rows["place"][rows["reason"] != Reason.DRAINED] != 0).any())
