"""Pending rows: what the delay server keeps in memory of each message, 32 bytes and never its body.

Invariant: a row fires at its due instant, before its filing hour ends, so ``due_ms < HOUR_MS``.

``due_ms`` counts from the start of the filing hour. A log that was stamped by a clock far ahead files messages in hours
long after they are due: below -COARSE_FROM_MS, 12 days before the hour, the column counts whole seconds, for 34 years.

    due_ms               fires at the start of the hour plus
    5                    5 ms
    -(1 << 30)           -(1 << 30) ms
    -(1 << 30) - 7       -(1 << 30) ms - 7 s

A location (delayd/batch/sequences.py) says where the row rests; bit 62 alone: in the file beside a damaged schedule
log.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from delayd.batch.columns import FEW_ROWS
from delayd.batch.sequences import OFFSET_BITS, Sequences, SequenceSet
from delayd.hours import HOUR_MS

ROW = np.dtype(
    [
        ("due_ms", "<i4"),  # After the start of the filing hour; negative when due before it.
        ("length", "<u4"),  # The row needs this many bytes in a frame.
        ("subject", "<u4"),  # The server's number of the subject.
        ("hour", "<u4"),  # Filing hour, hours since the epoch.
        ("sequence", "<u8"),
        ("location", "<u8"),
    ]
)
ROW_BYTES = 32  # Two rows a cache line; 40 M rows of one hour take 1.3 GB.
assert ROW.itemsize == ROW_BYTES, "the columns of a row leave no gap"
ONE_ROW = struct.Struct("<iIIIQQ")  # The same, to pack a row in plain integers.
assert ONE_ROW.size == ROW_BYTES, "a packed row is a row"

# Added to offsets in the file beside a damaged schedule log (quarantine.py), so such a file holds at most 70 TB.
BESIDE = 1 << (OFFSET_BITS - 1)
COARSE_FROM_MS = 1 << 30  # A row that is due this long before its hour, or longer, fires to the second.
COARSE_MS = 1_000
# 34 years in seconds: a row that was due even longer before its hour fires as if due then, so never early.
COARSE_MAX = (1 << 30) - 1

# Numpy copies opaque items as bytes, but structured ones column by column, which takes 5 to 40 times as long.
OPAQUE_ROW = np.dtype((np.void, ROW_BYTES))

Rows = npt.NDArray[np.void]  # Its dtype is ROW.
NO_ROWS: Final[Rows] = np.zeros(0, ROW)


def new_rows(count: int) -> Rows:
    """Rows of zeros, for a caller to fill column by column."""
    return np.zeros(count, ROW)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Copy rows one after the other into a new array; at least one part."""
    return np.concatenate([rows.view(OPAQUE_ROW) for rows in parts]).view(ROW)


def copy_rows(target: Rows, position: int, rows: Rows) -> None:
    """Copy rows over those of ``target`` from ``position`` on, which must have room for them."""
    target.view(OPAQUE_ROW)[position : position + len(rows)] = rows.view(OPAQUE_ROW)


def due_at_ms(rows: Rows) -> npt.NDArray[np.int64]:
    """Instant at which each row fires: int64[n], a new array."""
    instants = rows["hour"].astype(np.int64)
    instants *= HOUR_MS
    due_ms = rows["due_ms"]
    instants += due_ms
    if len(rows) and due_ms.min() < -COARSE_FROM_MS:
        coarse = np.flatnonzero(due_ms < -COARSE_FROM_MS)
        instants[coarse] += (due_ms.take(coarse).astype(np.int64) + COARSE_FROM_MS) * (COARSE_MS - 1)
    return instants


def hour_span(rows: Rows) -> tuple[int, int]:
    """The lowest and the highest filing hour of rows, one at least."""
    if len(rows) > FEW_ROWS:
        return int(rows["hour"].min()), int(rows["hour"].max())
    hours = rows["hour"].tolist()
    return min(hours), max(hours)


def latest_due_ms(rows: Rows) -> int:
    """The latest instant at which one of the rows fires; there must be at least one row."""
    if len(rows) > FEW_ROWS:
        return int(due_at_ms(rows).max())
    # For so few rows plain integers take a third of the time of arrays, and nearly always all rows are of one hour.
    hours: list[int] = rows["hour"].tolist()
    due_ms: list[int] = rows["due_ms"].tolist()
    if hours.count(hours[0]) == len(hours):
        return hours[0] * HOUR_MS + decode_due(max(due_ms))
    return max(hour * HOUR_MS + decode_due(after_ms) for hour, after_ms in zip(hours, due_ms, strict=True))


def encode_due(after_ms: int) -> int:
    """Column ``due_ms`` of a row that is due ``after_ms`` after the start of its filing hour; the row never fires
    early.
    """
    if after_ms >= -COARSE_FROM_MS:
        return after_ms
    return -COARSE_FROM_MS - min((-COARSE_FROM_MS - after_ms) // COARSE_MS, COARSE_MAX)


def decode_due(due_ms: int) -> int:
    """How long after the start of its filing hour a row fires, in ms."""
    return due_ms if due_ms >= -COARSE_FROM_MS else (due_ms + COARSE_FROM_MS) * COARSE_MS - COARSE_FROM_MS


def due_by(after_ms: int) -> int:
    """The highest ``due_ms`` of rows that are due when ``after_ms`` have passed since the start of their filing
    hour.
    """
    return after_ms if after_ms >= -COARSE_FROM_MS else (after_ms + COARSE_FROM_MS) // COARSE_MS - COARSE_FROM_MS


def filing_hours(
    deliver_at_ms: npt.NDArray[np.int64], appended_at_ms: int | npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Hour in which rows are filed (rule P5): that of the later of the two instants; ``appended_at_ms`` may be one for
    all.
    """
    return (np.maximum(deliver_at_ms, appended_at_ms) // np.int64(HOUR_MS)).astype(np.uint32)


def due_within(deliver_at_ms: npt.NDArray[np.int64], hours: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """Column ``due_ms`` of rows filed in ``hours``; negative for rows that are due before their hour began (rule
    P5).
    """
    due = deliver_at_ms - hours.astype(np.int64) * HOUR_MS
    if len(due) and due.min() < -COARSE_FROM_MS:
        coarse = np.flatnonzero(due < -COARSE_FROM_MS)
        due[coarse] = -COARSE_FROM_MS - np.minimum((-COARSE_FROM_MS - due[coarse]) // COARSE_MS, COARSE_MAX)
    assert not len(due) or int(due.max()) < HOUR_MS, "a row is filed no earlier than the hour in which it is due"
    return due.astype(np.int32)


def without(rows: Rows, decided: Sequences) -> Rows:
    """The rows whose sequences are not among ``decided``, which is sorted."""
    return rows if not len(rows) else SequenceSet(decided, len(rows)).without(rows)
