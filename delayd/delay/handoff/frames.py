"""Frames: due rows, with their bodies, as DISPATCH batches of one subject and one filing hour each (rule H1)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import DISPATCH_PART, Batch, encode_columns, with_front
from delayd.batch.columns import FEW_ROWS, HEADER_BYTES, BatchKind, Buffer, ColumnId, DispatchPart, Int64s
from delayd.batch.content import NOT_STATED, hash_bares
from delayd.batch.gather import (
    BESIDE_BARE,
    DUE,
    U64,
    Gathered,
    Pick,
    columns_of,
    compose,
    gather,
    gather_singles,
    item_of,
    reorder,
)
from delayd.batch.sequences import ROW_BITS, ROW_MASK
from delayd.delay.rows import NO_ROWS, Rows
from delayd.errors import DamagedData, Shortage
from delayd.kernel import choose

PICK_ROWS = 8  # A pick costs as much as this many rows copied one by one: numpy calls against plain integers.
SINGLE_BYTES_MAX = 4_096  # Longer rows cost by their bytes, and nothing is saved by looking at them together.


class Batches(Protocol):
    """Provides stored batches: `delayd.delay.filing.schedule_log.Sources`."""

    def batch(self, hour: int, location: int) -> Batch:
        """The verified batch that a location of a row filed in ``hour`` names."""


def split_by_subject_and_hour(rows: Rows, parts_max: int) -> tuple[list[Rows], Rows]:
    """Split rows by subject and filing hour, each part in the order that it had; return the parts, and the rows that
    are left.

    Rows that are left belong to the subjects and hours whose first rows came last. They are given back before all other
    waiting rows and go into the next frame, so no subject waits for subjects that came after it.
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


class Few(NamedTuple):
    """A few rows that are copied when their batch is made: the verified batch of each."""

    batches: list[Batch]


def collect(rows: Rows, sources: Batches) -> Gathered | Few:
    """Copy the items of rows of one hour, in their order, or find them if they are few and none of them may expire.

    Raises:
        DamagedData: a batch that holds one of them does not check.
    """
    hour = int(rows["hour"][0])
    locations = rows["location"]
    if len(rows) <= FEW_ROWS:
        places = locations.tolist()
        batches = [sources.batch(hour, place) for place in places]
        for batch in batches:
            if ColumnId.EXPIRES_AT_MS in batch.offsets:
                return gather_singles(batches, [place & ROW_MASK for place in places])
            if not batch.verified:
                batch.verify()
        return Few(batches)
    # Neighbours in a batch have neighbouring locations. Batch offsets are multiples of 8, so neighbours across two
    # batches can't look like that.
    breaks = np.flatnonzero(locations[1:] != locations[:-1] + np.uint64(1)) + 1
    if len(rows) >= PICK_ROWS * (len(breaks) + 1):
        return _collect_runs(hour, locations, [0, *breaks.tolist(), len(rows)], sources)
    order = np.argsort(locations)
    ordered = locations.take(order)
    changes = np.flatnonzero(ordered[1:] >> np.uint64(ROW_BITS) != ordered[:-1] >> np.uint64(ROW_BITS)) + 1
    if len(rows) >= PICK_ROWS * (len(changes) + 1):
        return _collect_by_source(hour, ordered, order, [0, *changes.tolist(), len(rows)], sources)
    # Rows are read batch by batch: if they are of more batches than the cache holds, the same batches would be read
    # again and again.
    found = dict(zip(order.tolist(), (sources.batch(hour, place) for place in ordered.tolist()), strict=True))
    numbers = [place & ROW_MASK for place in locations.tolist()]
    return gather_singles([found[index] for index in range(len(rows))], numbers)


def _collect_runs(hour: int, locations: NDArray[np.uint64], bounds: list[int], sources: Batches) -> Gathered:
    """Copy rows that are neighbours in one batch together, in their order."""
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


class Single(NamedTuple):
    """A row that is alone of its subject and hour in a frame: what its batch says."""

    hour: int
    subject: bytes
    row: tuple[int, int, int]  # deliver_at_ms, sequence, content hash.
    body: Buffer  # Zeros follow the ``length`` bytes up to a multiple of 8.
    length: int
    deliver_at_ms: Int64s  # The first and the last value of ``row`` again, as columns of one row.
    hashes: NDArray[np.uint64]


def collect_singles(parts: Sequence[Rows], sources: Batches, names: Sequence[bytes]) -> dict[int, Single]:
    """Those parts of a frame that are one row, by their place: what `collect` and `encode_dispatch` say of them.

    With many subjects a frame is mostly such parts. Each alone would cost some ten numpy calls, and all together take
    as many. A part is left to those two functions if its batch has more than bodies and numbers, or if its row has a
    long body or can't be read.
    """
    places: list[int] = []
    rows: list[tuple[int, bytes, int, int]] = []
    due: list[int] = []
    hashes: list[int] = []
    bodies: list[Buffer] = []
    for place, part in enumerate(parts):
        if len(part) > 1:
            continue
        _, size, subject, hour, sequence, location = part.item()
        if size > SINGLE_BYTES_MAX:
            continue
        try:
            batch = sources.batch(hour, location)
        except (DamagedData, Shortage):
            continue
        offsets = batch.offsets
        if not batch.layout.columns.isdisjoint(BESIDE_BARE):
            continue
        if not batch.verified:
            batch.verify()
        row = location & ROW_MASK
        length, body = item_of(batch, ColumnId.BODY_END, row)
        places.append(place)
        rows.append((hour, names[subject], sequence, length))
        bodies.append(body)
        due += DUE.unpack_from(batch.buffer, offsets[ColumnId.DELIVER_AT_MS] + 8 * row)
        if ColumnId.CONTENT_HASH in offsets:
            hashes += U64.unpack_from(batch.buffer, offsets[ColumnId.CONTENT_HASH] + 8 * row)
        else:
            hashes.append(NOT_STATED)
    unhashed = [at for at, content_hash in enumerate(hashes) if content_hash == NOT_STATED]
    if unhashed:
        names_bodies_lengths = ((rows[at][1], bodies[at], rows[at][3]) for at in unhashed)
        for at, made in zip(unhashed, hash_bares(*zip(*names_bodies_lengths, strict=True)), strict=True):
            hashes[at] = made
    due_column, hash_column = np.array(due, np.int64), np.array(hashes, np.uint64)
    return {
        place: Single(
            hour,
            subject,
            (due[at], sequence, hashes[at]),
            bodies[at],
            length,
            due_column[at : at + 1],
            hash_column[at : at + 1],
        )
        for at, (place, (hour, subject, sequence, length)) in enumerate(zip(places, rows, strict=True))
    }


class Dispatched(NamedTuple):
    """A batch that is handed over, in two pieces, with the instants and the content hashes of its rows."""

    pieces: tuple[bytes, bytes]
    deliver_at_ms: Int64s
    hashes: NDArray[np.uint64]


def encode_dispatch(part: DispatchPart, rows: Rows, collected: Gathered | Few, subject: bytes) -> Dispatched:
    """Make the batch that is handed over."""
    if isinstance(collected, Gathered):
        front, heap, made = compose(BatchKind.DISPATCH, part, collected, rows["sequence"], [subject])
        return Dispatched((front, heap), collected.deliver_at_ms, made)
    kind_part = DISPATCH_PART.pack(*part)
    columns, heap, due, hashes = _pick_rows(HEADER_BYTES + len(kind_part), subject, rows, collected.batches)
    pieces = with_front(BatchKind.DISPATCH, kind_part, len(rows), columns, heap, 1)
    return Dispatched(pieces, np.frombuffer(due, np.int64), np.frombuffer(hashes, np.uint64))


def pick_rows(
    begin: int, subject: bytes, rows: Rows, batches: list[Batch]
) -> tuple[bytes, bytes, Int64s | bytes, NDArray[np.uint64] | bytes]:
    """The directory and the columns of a DISPATCH batch, which stand in it from ``begin`` on, its heap, and the
    instants and content hashes of its rows; the twin of a compiled piece.
    """
    locations = rows["location"].tolist()
    first, last = locations[0] & ROW_MASK, locations[-1] & ROW_MASK
    if len(rows) >= PICK_ROWS and locations == list(range(locations[0], locations[0] + len(rows))):
        gathered = gather([Pick(batches[0], range(first, last + 1))])
    else:
        gathered = gather_singles(batches, [place & ROW_MASK for place in locations])
    columns, heap, hashes = columns_of(gathered, rows["sequence"], [subject])
    return encode_columns(begin, columns), heap, gathered.deliver_at_ms, hashes


_pick_rows = choose("pick_rows", pick_rows)
