"""Frames: due rows, with their bodies, as DISPATCH batches of one subject and one filing hour each (rule H1)."""

from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.batch import FEW_ROWS, Batch, BatchKind, DispatchPart, Int64s
from delayd.content import NOT_STATED, hash_bare
from delayd.delay.rows import NO_ROWS, Rows
from delayd.encode import encode_one
from delayd.gather import Gathered, Pick, compose, gather, gather_singles, reorder
from delayd.location import ROW_BITS, ROW_MASK

PICK_ROWS = 8  # A pick costs as much as so many rows one by one: numpy calls against plain integers.


class Batches(Protocol):
    """Where stored batches are had from: `delayd.delay.filing.sources.Sources`."""

    def batch(self, hour: int, location: int) -> Batch:
        """The verified batch that a location of a row filed in ``hour`` names."""


def split_by_subject_and_hour(rows: Rows, parts_max: int) -> tuple[list[Rows], Rows]:
    """Rows of one subject and one filing hour at a time, each in the order they had, and the rows that are left.

    What is left are the subjects and hours whose first rows came last, in their order: given back before all others
    they are in the next frame, and no subject waits for others that came after it.
    """
    subjects, hours = rows["subject"], rows["hour"]
    if len(rows) <= FEW_ROWS:
        names, times = subjects.tolist(), hours.tolist()
        if names.count(names[0]) == len(names) and times.count(times[0]) == len(times):
            return [rows], NO_ROWS
    elif bool((subjects == subjects[0]).all()) and bool((hours == hours[0]).all()):
        return [rows], NO_ROWS
    order = np.lexsort((hours, subjects))
    subjects, hours = subjects.take(order), hours.take(order)
    changes = np.flatnonzero((subjects[1:] != subjects[:-1]) | (hours[1:] != hours[:-1])) + 1
    bounds = np.concatenate(([0], changes, [len(rows)]))
    by_first_row = np.argsort(order.take(bounds[:-1]))
    ordered = rows.take(order)
    taken = by_first_row[:parts_max]
    lows, highs = bounds.take(taken).tolist(), bounds.take(taken + 1).tolist()
    parts = [ordered[low:high] for low, high in zip(lows, highs, strict=True)]
    if len(by_first_row) <= parts_max:
        return parts, NO_ROWS
    is_left = np.ones(len(bounds) - 1, np.bool_)
    is_left[taken] = False
    return parts, rows.take(np.sort(order[np.repeat(is_left, np.diff(bounds))]))


def split_by_source(rows: Rows) -> list[Rows]:
    """The rows of each stored batch, in the order they had."""
    batches = rows["location"] >> np.uint64(ROW_BITS)
    order = np.argsort(batches, kind="stable")
    batches = batches.take(order)
    return np.split(rows.take(order), np.flatnonzero(batches[1:] != batches[:-1]) + 1)


def collect(rows: Rows, sources: Batches) -> Gathered:
    """Copy headers and bodies of rows of one hour, in their order.

    Raises:
        DamagedData: a batch that holds one of them does not check.
    """
    hour = int(rows["hour"][0])
    locations = rows["location"]
    if len(rows) >= PICK_ROWS:
        # Neighbours in a batch have neighbouring locations; its offset is a multiple of 8, so no carry looks like one.
        breaks = np.flatnonzero(locations[1:] != locations[:-1] + np.uint64(1)) + 1
        if len(rows) >= PICK_ROWS * (len(breaks) + 1):
            return _collect_runs(hour, locations, [0, *breaks.tolist(), len(rows)], sources)
    places = locations.tolist()
    numbers = [place & ROW_MASK for place in places]
    if len(rows) <= FEW_ROWS:
        return gather_singles([sources.batch(hour, place) for place in places], numbers)
    order = np.argsort(locations)
    ordered = locations.take(order)
    changes = np.flatnonzero(ordered[1:] >> np.uint64(ROW_BITS) != ordered[:-1] >> np.uint64(ROW_BITS)) + 1
    if len(rows) >= PICK_ROWS * (len(changes) + 1):
        return _collect_by_source(hour, ordered, order, [0, *changes.tolist(), len(rows)], sources)
    # Batch by batch, or rows of more batches than are cached would have the same ones read again and again.
    found = dict(zip(order.tolist(), (sources.batch(hour, place) for place in ordered.tolist()), strict=True))
    return gather_singles([found[index] for index in range(len(rows))], numbers)


def _collect_runs(hour: int, locations: NDArray[np.uint64], bounds: list[int], sources: Batches) -> Gathered:
    """Copy neighbours of one batch together, in their order."""
    picks = []
    for location, (low, high) in zip(locations.take(bounds[:-1]).tolist(), pairwise(bounds), strict=True):
        row = location & ROW_MASK
        picks.append(Pick(sources.batch(hour, location), range(row, row + high - low)))
    return gather(picks)


def _collect_by_source(
    hour: int, locations: NDArray[np.uint64], order: Int64s, bounds: list[int], sources: Batches
) -> Gathered:
    """Copy batch by batch, between ``bounds`` of sorted locations, then put the rows back into their order."""
    numbers = (locations & np.uint64(ROW_MASK)).astype(np.int64)
    firsts = locations.take(bounds[:-1]).tolist()
    picks = [
        Pick(sources.batch(hour, location), _rows(numbers[low:high]))
        for location, (low, high) in zip(firsts, pairwise(bounds), strict=True)
    ]
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return reorder(gather(picks), inverse)


def _rows(numbers: Int64s) -> range | Int64s:
    first, last = int(numbers[0]), int(numbers[-1])
    return range(first, last + 1) if last - first == len(numbers) - 1 else numbers


def encode_dispatch(
    part: DispatchPart, rows: Rows, gathered: Gathered, subject: bytes
) -> tuple[tuple[bytes, ...], NDArray[np.uint64]]:
    """Make the batch that is handed over, in one or two pieces: the pieces, and the rows' content hashes."""
    if len(rows) == 1 and gathered.headers_lengths is None:
        # With many subjects most batches of a frame have one row.
        body, length = gathered.bodies[0], int(gathered.body_lengths[0])
        stated = NOT_STATED if gathered.hashes is None else int(gathered.hashes[0])
        content_hash = stated or hash_bare(subject, body, length)
        values = int(gathered.deliver_at_ms[0]), int(rows["sequence"][0]), content_hash
        one = encode_one(BatchKind.DISPATCH, part, values, subject, body, length)
        return (one,), np.array([content_hash], np.uint64)
    front, heap, hashes = compose(BatchKind.DISPATCH, part, gathered, rows["sequence"], [subject])
    return (front, heap), hashes
