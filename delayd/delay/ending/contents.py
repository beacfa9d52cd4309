"""Contents: what the found rows of a piece hold, gathered into one batch from the batches that have them.

     found rows, in the order of the answer     by source batch          one SCHEDULE batch
     h1 s5 │ h1 s6 │ h1 s9 │ h2 s7           ─▶ [s5 s7] [s6 s9]       ─▶ s5 s6 s9 s7

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
from delayd.gather import Gathered, GatheredItems, Pick, compose, gather, reorder, row_bytes
from delayd.hours import HOUR_MS
from delayd.location import ROW_BITS, ROW_MASK, SCHEDULE_BIT
from delayd.wire.finding import FOUND, Content, Window
from delayd.wire.finding import Place as WalkPlace

log = logging.getLogger(__name__)

CONTENT_BYTES_MAX = 4 << 20  # 16 walks hold as much as one answer may have, and one message always fits.
CACHE_BYTES = 64 << 20  # Batches of 65,536 rows that were sent in batches of 500; one piece is read at a time.
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
    logs = _logs(rows)
    batches = rows["location"] >> np.uint64(ROW_BITS)
    ends = np.flatnonzero((batches[1:] != batches[:-1]) | (logs[1:] != logs[:-1])) + 1
    yield from pairwise([0, *ends.tolist(), len(rows)])


def read_contents(rows: LocatedRows, window: Window, reader: Sources, worker: Executor) -> Contents:
    """Read what rows hold, in their order; on the worker thread. It closes the reader.

    Neighbours of the answer may lie anywhere: of messages over two years that came in batches of 500, no two of one
    batch stand side by side. So each batch is read once for all rows that it has, first for their sizes, and then for
    those rows that fit; the reader keeps what it read in between.
    """
    try:
        sizes, unread = _sizes_of(rows, window.content, reader, worker)
        ends = np.cumsum(sizes)
        fitting = int(np.searchsorted(ends, CONTENT_BYTES_MAX, side="right"))
        # A message may be as large as a whole piece: the first one is taken in any case.
        fitting = max(fitting, int(np.searchsorted(ends, 0, side="right")) + 1)
        place = None
        if fitting < len(rows):
            place = WalkPlace(int(rows[fitting - 1]["accepted_at_ms"]) // HOUR_MS, int(rows[fitting - 1]["sequence"]))
        chosen = rows[:fitting].compress(sizes[:fitting] > 0)
        if not len(chosen):
            return Contents(chosen, None, unread, place)
        order = _by_location(chosen)
        picks: list[Pick] = []
        picked: list[NDArray[np.intp]] = []
        for low, high in runs_of_batches(chosen.take(order)):
            own = order[low:high]
            batch = _batch_of(chosen.take(own), reader)
            if batch is None:
                # It was there a moment ago, when its sizes were read.
                unread += 1
                continue
            picks.append(Pick(batch, _numbers(chosen.take(own))))
            picked.append(own)
            worker.give_way()
        if not picks:
            return Contents(chosen[:0], None, unread, place)
        kept = np.sort(np.concatenate(picked))
        chosen = chosen.take(kept)
        return Contents(
            chosen, _composed(picks, chosen, np.searchsorted(kept, np.concatenate(picked)), window), unread, place
        )
    finally:
        reader.close()


def _sizes_of(rows: LocatedRows, content: Content, reader: Sources, worker: Executor) -> tuple[Int64s, int]:
    """How many bytes each row takes, 0 where its batch can't be read; and how many batches can't."""
    order = _by_location(rows)
    sizes, unread = np.zeros(len(rows), np.int64), 0
    for low, high in runs_of_batches(rows.take(order)):
        own = rows.take(order[low:high])
        batch = _batch_of(own, reader)
        if batch is None:
            unread += 1
        else:
            sizes[order[low:high]] = _sizes(batch, _numbers(own), content)
        worker.give_way()
    return sizes, unread


def _by_location(rows: LocatedRows) -> NDArray[np.intp]:
    return np.lexsort((rows["location"], _logs(rows)))


def _logs(rows: LocatedRows) -> NDArray[np.int64]:
    """Of the message log a location names the batch alone, of schedule logs together with the hour."""
    return np.where(rows["location"] < np.uint64(SCHEDULE_BIT), 0, rows["accepted_at_ms"] // HOUR_MS)


def _numbers(rows: LocatedRows) -> Int64s:
    """The numbers of rows in their batch."""
    return (rows["location"] & np.uint64(ROW_MASK)).astype(np.int64)


def _batch_of(rows: LocatedRows, reader: Sources) -> Batch | None:
    """The batch of rows that share one; None when it can't be read."""
    hour = int(rows[0]["accepted_at_ms"]) // HOUR_MS
    try:
        return reader.batch(hour, int(rows[0]["location"]))
    except (DamagedData, Shortage, FileNotFoundError) as error:
        log.warning("rows_not_found hour=%d reason=%r", hour, str(error))
        return None


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


def _composed(picks: list[Pick], rows: LocatedRows, order: NDArray[np.intp], window: Window) -> Batch:
    """One batch of ``rows``; pick by pick the rows are ``rows[order]``."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    left_out = _left_out(picks)
    others: dict[ColumnId, Columns] = {}
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
        others[ColumnId.BODY_LEFT_OUT] = left_out.take(place).astype(np.uint32)
    part = SchedulePart(0, 0, int(rows[0]["accepted_at_ms"]) // HOUR_MS)
    made = compose(
        BatchKind.SCHEDULE, part, reorder(gathered, place), rows["sequence"].copy(), [window.subject], others
    )
    return parse(made.joined())


def _left_out(picks: list[Pick]) -> Int64s:
    """How long the bodies are that the sources leave out."""
    column = ColumnId.BODY_LEFT_OUT
    parts = [
        batch.uint32s(column).take(rows).astype(np.int64) if column in batch else np.zeros(len(rows), np.int64)
        for batch, rows in picks
    ]
    return np.concatenate(parts)
