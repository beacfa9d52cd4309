"""Ended rows: the rows that a delay server's decisions have ended, as the message log and the state keep them
(docs/keys.md, Records).

Invariant: each row stands once, by rising sequence.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.errors import BatchMalformed
from delayd.hours import HOUR_MS, INSTANT_MS_MAX
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
        # Of a row that met another: how many hours after the hour of ``other_at_ms`` that one is filed, because it was
        # due already when it was accepted: the lowest 8 bits here, 16 more in ``place``. 0 for all other rows.
        ("late", "u1"),
        ("place", "<u2"),  # Of a DRAINED row: which row of that batch it is. Else 0, but for rows that met another.
    ]
)
ENDED_BYTES = 48
assert ENDED.itemsize == ENDED_BYTES, "the columns of an ended row leave no gap"

# A row that a request by key has ended, or the first one that a move by receipt has, and the number of that try.
TRIED = np.dtype([("asker", "<u8"), ("number", "<u8"), ("low_water", "<u8"), ("sequence", "<u8")])
TRIED_BYTES = 32

TriedRows = NDArray[np.void]  # Its dtype is TRIED.
NO_TRIED: TriedRows = np.zeros(0, TRIED)

EndedRows = NDArray[np.void]  # Its dtype is ENDED.
NO_ENDED: EndedRows = np.zeros(0, ENDED)
# Rows with a key that ended for one of these reasons never took it.
TOOK_NO_KEY = (Reason.REJECTED, Reason.KEPT, Reason.IN_FLIGHT)
LATE_HOURS_MAX = (1 << 24) - 1  # 1,900 years; no instant before 2001 is accepted.
_REASONS = np.array(sorted(Reason), np.uint8)


def note_hours_of_others(rows: EndedRows, hours: NDArray[np.uint32]) -> None:
    """Write the filing hour of the row that each of some new rows met."""
    late = hours.astype(np.int64) - rows["other_at_ms"] // HOUR_MS
    late = np.clip(late, 0, LATE_HOURS_MAX)
    rows["late"], rows["place"] = late & 0xFF, late >> 8


def others_filed_at_ms(rows: EndedRows) -> Int64s:
    """An instant in the filing hour of the row that each of some new rows met: with it and its due instant, the row
    can be asked about.
    """
    late = np.where(np.isin(rows["reason"], TOOK_NO_KEY), rows["late"] + (rows["place"].astype(np.int64) << 8), 0)
    begins = (rows["other_at_ms"] // HOUR_MS + late) * HOUR_MS
    filed: Int64s = np.minimum(np.where(late > 0, begins, rows["other_at_ms"]), INSTANT_MS_MAX)
    return filed


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
    if not bool(np.isin(rows["reason"], _REASONS).all()) or _has_strays(rows):
        raise BatchMalformed("an ended row has an unknown reason, or says what a row with its reason can't say")
    return rows


def _has_strays(rows: EndedRows) -> bool:
    """Whether a row says what only rows that met others, or only drained ones, may say."""
    met = np.isin(rows["reason"], TOOK_NO_KEY)
    places = rows["place"].compress(~met & (rows["reason"] != Reason.DRAINED))
    return bool(rows["late"].compress(~met).any() or places.any())


def decode_tried(data: bytes) -> TriedRows:
    """Read the rows of a record `tried`: a view of its bytes.

    Raises:
        BatchMalformed: they are not such rows.
    """
    if len(data) % TRIED_BYTES:
        raise BatchMalformed(f"{len(data)} bytes are not made of tries")
    return np.frombuffer(data, TRIED)


def tried_rows(ended: EndedRows, tried: TriedRows) -> Iterator[tuple[int, int, int, bytes]]:
    """For each try its asker, number and low-water mark, and the row that it ended, as `ENDED` has it; ``ended`` rise
    in sequence.
    """
    at = np.searchsorted(ended["sequence"], tried["sequence"])
    for (asker, number, low_water, sequence), place in zip(tried.tolist(), at.tolist(), strict=True):
        if place < len(ended) and int(ended["sequence"][place]) == sequence:
            yield asker, number, low_water, ended[place].tobytes()
