"""Contents: what the found rows of a piece hold, gathered into one batch from the batches that have them.

     found rows, in the order of the answer     runs of one source batch     one SCHEDULE batch
     h1 s5 │ h1 s6 │ h1 s9 │ h2 s7           ─▶ [s5 s6] [s9] [s7]         ─▶ s5 s6 s9 s7

Invariant: a piece has at most CONTENT_BYTES_MAX, or one message. Rows that fit no more are left to the next piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import KIND_COLUMNS, Batch, BatchKind, ColumnId, Columns, Int64s, SchedulePart, parse
from delayd.content import NOT_STATED
from delayd.delay.filing.sources import Sources
from delayd.errors import DamagedData, Shortage
from delayd.executor import Executor
from delayd.gather import Gathered, GatheredItems, Pick, compose, gather, row_bytes
from delayd.hours import HOUR_MS
from delayd.location import ROW_BITS, ROW_MASK, SCHEDULE_BIT
from delayd.wire.finding import FOUND, Content, Window
from delayd.wire.finding import Place as WalkPlace

log = logging.getLogger(__name__)

CONTENT_BYTES_MAX = 4 << 20  # 16 walks hold as much as one answer may have, and one message always fits.
LABEL_COLUMNS_BYTES = 64  # All columns of one row of a batch without bodies.

# ``in_wheel``: the row stood in the wheel when the piece began.
_OWN = [("location", "<u8"), ("in_wheel", "?")]
LOCATED = np.dtype([*((name, FOUND[name]) for name in FOUND.names or ()), *_OWN])
LocatedRows = NDArray[np.void]  # Its dtype is LOCATED.

_SCHEDULE = KIND_COLUMNS[BatchKind.SCHEDULE]
_LABELS = (ColumnId.KEY_END, ColumnId.TAGS_END)


class Contents(NamedTuple):
    """The rows that a piece has, with their batch; ``place``: where the next piece begins when some did not fit.

    ``unread`` counts source batches that could not be read; their rows are missing.
    """

    rows: LocatedRows
    batch: Batch | None = None
    unread: int = 0
    place: WalkPlace | None = None


def runs_of_batches(rows: LocatedRows) -> Iterator[tuple[int, int]]:
    """Where the runs of neighbouring rows begin and end that lie in one source batch."""
    if not len(rows):
        return
    # Of the message log a location names the batch alone, of schedule logs together with the hour.
    logs = np.where(rows["location"] < np.uint64(SCHEDULE_BIT), 0, rows["accepted_at_ms"] // HOUR_MS)
    batches = rows["location"] >> np.uint64(ROW_BITS)
    ends = np.flatnonzero((batches[1:] != batches[:-1]) | (logs[1:] != logs[:-1])) + 1
    yield from pairwise([0, *ends.tolist(), len(rows)])


def read_contents(rows: LocatedRows, window: Window, reader: Sources, worker: Executor) -> Contents:
    """Read what rows hold, in their order; on the worker thread. It closes the reader."""
    picks: list[Pick] = []
    kept: list[LocatedRows] = []
    free, unread = CONTENT_BYTES_MAX, 0
    place: WalkPlace | None = None
    try:
        for low, high in runs_of_batches(rows):
            run = rows[low:high]
            try:
                batch = reader.batch(int(run[0]["accepted_at_ms"]) // HOUR_MS, int(run[0]["location"]))
            except (DamagedData, Shortage, FileNotFoundError) as error:
                log.warning("rows_not_found hour=%d reason=%r", int(run[0]["accepted_at_ms"]) // HOUR_MS, str(error))
                unread += 1
                continue
            numbers = (run["location"] & np.uint64(ROW_MASK)).astype(np.int64)
            ends = np.cumsum(_sizes(batch, numbers, window.content))
            fitting = int(np.searchsorted(ends, free, side="right"))
            if fitting < len(run):
                # A message may be as large as a whole piece: the first one is taken in any case.
                fitting = max(fitting, 0 if picks else 1)
                last = run[fitting - 1] if fitting else kept[-1][-1]
                place = WalkPlace(int(last["accepted_at_ms"]) // HOUR_MS, int(last["sequence"]))
            if fitting:
                picks.append(Pick(batch, numbers[:fitting]))
                kept.append(run[:fitting])
                free -= int(ends[fitting - 1])
            if place is not None:
                break
            worker.give_way()
        found = np.concatenate([rows[:0], *kept])
        return Contents(found, _composed(picks, found, window) if picks else None, unread, place)
    finally:
        reader.close()


def _sizes(batch: Batch, numbers: Int64s, content: Content) -> Int64s:
    """How many bytes each row takes in the piece."""
    if content is Content.WHOLE:
        low, high = int(numbers.min()), int(numbers.max())
        return row_bytes(batch, low, high - low + 1).take(numbers - low)
    sizes = np.full(len(numbers), LABEL_COLUMNS_BYTES, np.int64)
    for column in _LABELS:
        if column in batch:
            starts, ends = batch.region(column)
            sizes += (ends - starts + 7 & ~7).take(numbers)
    return sizes


def _composed(picks: list[Pick], rows: LocatedRows, window: Window) -> Batch:
    part = SchedulePart(0, 0, int(rows[0]["accepted_at_ms"]) // HOUR_MS)
    sequences = rows["sequence"].copy()
    others: dict[ColumnId, Columns] = {}
    left_out = _left_out(picks)
    if window.content is Content.LABELS:
        gathered = gather(picks, _LABELS, _SCHEDULE.kept)
        none = GatheredItems(np.zeros(len(rows), np.int64), [])
        gathered = Gathered(gathered.deliver_at_ms, {**gathered.regions, ColumnId.BODY_END: none}, None, gathered.kept)
        left_out = np.concatenate([batch.body_bytes().take(numbers) for batch, numbers in picks])
        # The hash of what is left out can't be made here, and a source need not state one.
        others[ColumnId.CONTENT_HASH] = np.full(len(rows), NOT_STATED, np.uint64)
    else:
        gathered = gather(picks, _SCHEDULE.regions, _SCHEDULE.kept)
    if left_out.any():
        others[ColumnId.BODY_LEFT_OUT] = left_out.astype(np.uint32)
    made = compose(BatchKind.SCHEDULE, part, gathered, sequences, [window.subject], others)
    return parse(made.joined())


def _left_out(picks: list[Pick]) -> Int64s:
    """How long the bodies are that the sources leave out."""
    column = ColumnId.BODY_LEFT_OUT
    parts = [
        batch.uint32s(column).take(rows).astype(np.int64) if column in batch else np.zeros(len(rows), np.int64)
        for batch, rows in picks
    ]
    return np.concatenate(parts)
