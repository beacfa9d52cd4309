"""Frames: due rows, with their bodies, as DISPATCH batches of one subject and one filing hour each (rule H1)."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from delayd.batch import BatchKind, DispatchPart, Int64s
from delayd.delay.rows import BATCH_ROW_BITS, Rows
from delayd.delay.sources import Sources
from delayd.gather import Gathered, Pick, compose, gather, gather_singles, reorder

PICKS_MAX = 32  # More runs than this are gathered by source and put in order after, at two copies a row.
SINGLES_MAX = 64  # So many rows are gathered one by one, unless neighbours come in runs.
ROW_MASK = (1 << BATCH_ROW_BITS) - 1
RUN_ROWS = 4  # Gathering a run costs as much as gathering so many rows one by one.


def split_by_subject_and_hour(rows: Rows) -> Iterator[Rows]:
    """Yield rows of one subject and one filing hour at a time, each in the order they had."""
    subjects, hours = rows["subject"], rows["hour"]
    if bool((subjects == subjects[0]).all()) and bool((hours == hours[0]).all()):
        yield rows
        return
    order = np.lexsort((hours, subjects))
    rows = rows.take(order)
    subjects, hours = rows["subject"], rows["hour"]
    changes = np.flatnonzero((subjects[1:] != subjects[:-1]) | (hours[1:] != hours[:-1])) + 1
    bounds = [0, *changes.tolist(), len(rows)]
    for low, high in pairwise(bounds):
        yield rows[low:high]


def split_by_source(rows: Rows) -> list[Rows]:
    """The rows of each stored batch, in the order they had."""
    batches = rows["location"] >> np.uint64(BATCH_ROW_BITS)
    order = np.argsort(batches, kind="stable")
    batches = batches.take(order)
    return np.split(rows.take(order), np.flatnonzero(batches[1:] != batches[:-1]) + 1)


def collect(rows: Rows, sources: Sources) -> Gathered:
    """Copy headers and bodies of rows of one hour, in their order.

    Raises:
        DamagedData: a batch that holds one of them does not check.
    """
    hour = int(rows["hour"][0])
    locations = rows["location"]
    # Neighbours in a batch have neighbouring locations; batch offsets are multiples of 8, so no carry looks like one.
    breaks = np.flatnonzero(locations[1:] != locations[:-1] + np.uint64(1)) + 1
    runs = len(breaks) + 1
    if len(rows) <= SINGLES_MAX and len(rows) < RUN_ROWS * runs:
        places = locations.tolist()
        return gather_singles([sources.batch(hour, place) for place in places], [place & ROW_MASK for place in places])
    if runs <= PICKS_MAX:
        bounds = [0, *breaks.tolist(), len(rows)]
        firsts = locations.take(bounds[:-1]).tolist()
        picks = []
        for location, low, high in zip(firsts, bounds[:-1], bounds[1:], strict=True):
            row = location & ROW_MASK
            picks.append(Pick(sources.batch(hour, location), range(row, row + high - low)))
        return gather(picks)
    return _collect_by_source(hour, rows, sources)


def _collect_by_source(hour: int, rows: Rows, sources: Sources) -> Gathered:
    order = np.argsort(rows["location"])
    locations = rows["location"].take(order)
    batches = locations >> np.uint64(BATCH_ROW_BITS)
    numbers = (locations & np.uint64(ROW_MASK)).astype(np.int64)
    bounds = [0, *(np.flatnonzero(batches[1:] != batches[:-1]) + 1).tolist(), len(rows)]
    picks: list[Pick] = []
    for low, high in pairwise(bounds):
        picks.append(Pick(sources.batch(hour, int(locations[low])), _rows(numbers[low:high])))
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return reorder(gather(picks), inverse)


def _rows(numbers: Int64s) -> range | Int64s:
    first, last = int(numbers[0]), int(numbers[-1])
    return range(first, last + 1) if last - first == len(numbers) - 1 else numbers


def encode_dispatch(part: DispatchPart, rows: Rows, gathered: Gathered, subject: bytes) -> bytes:
    """Make the batch that is handed over."""
    return compose(BatchKind.DISPATCH, part, gathered, rows["sequence"], [subject])
