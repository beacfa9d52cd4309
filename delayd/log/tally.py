"""Tally log: the rows that a realtime server held of each delay server and hour, closed segment by closed segment.

It outlives the segments (docs/formats/tally.md, version 1). A group holds the entries of one segment of the message
log, by origin and hour; a segment without messages has one entry without an origin, so that every segment has an entry.

A `Tallier` counts them from stored bytes, and names the rows that don't match their hash (docs/formats/content.md). The
batches of a group are taken together, because many hold one row: so a batch costs a few entries of arrays, and no calls
of its own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, encode, parse
from delayd.batch.columns import DTYPES, HEADER_BYTES, MAGIC, REGIONS, ROWS_MAX, VERSION, BatchKind, ColumnId, Int64s
from delayd.batch.content import (
    HASHED_REGIONS,
    NOT_STATED,
    Region,
    Tally,
    UInt64s,
    hash_items,
    hash_rows,
    states_of,
    tally,
)
from delayd.batch.names import SUBJECT_BYTES_MAX
from delayd.batch.validate import check_batch
from delayd.log.group import HEADER, CommitGroup, GroupKind, content_position
from delayd.log.log import LogPlace
from delayd.log.segment import FileKind

FOLDER = "tally"
TALLY = np.dtype(
    [
        ("begin", "<u8"),  # The segment of the message log: [begin, end), in offsets.
        ("end", "<u8"),
        ("origin_log_id", "<u8"),
        ("hour", "<u4"),
        ("differing", "<u4"),  # Rows whose bytes don't give the content hash that is stored beside them.
        ("rows", "<u8"),
        ("first", "<u8"),
        ("second", "<u8"),
        ("batches", "<u4"),
        ("zero", "<u4"),
    ]
)
Tallies = NDArray[np.void]  # TALLY[n]
NO_TALLIES: Tallies = np.empty(0, TALLY)


def tally_place(folder: str, log_id: int) -> LogPlace:
    """Where the tally log of a realtime server's directory is."""
    return LogPlace(f"{folder}/{FOLDER}", FileKind.TALLY, log_id)


def encode_tallies(entries: Tallies) -> list[bytes]:
    """Make TALLY batches of entries, in order."""
    column = np.ascontiguousarray(entries).view(DTYPES[ColumnId.TALLY])
    parts = [column[first : first + ROWS_MAX] for first in range(0, len(column), ROWS_MAX)]
    return [encode(BatchKind.TALLY, None, len(part), [(ColumnId.TALLY, part)], [b""]) for part in parts]


def decode_tallies(batch: Batch) -> Tallies:
    """View the entries of a verified TALLY batch: TALLY[count]."""
    return np.frombuffer(batch.buffer, TALLY, batch.count, batch.offsets[ColumnId.TALLY])


def sum_tallies(entries: Tallies) -> Iterator[tuple[tuple[int, int], Tally, int]]:
    """The tally of each origin and hour, in this order, with the number of rows that differ from their hash."""
    order = np.lexsort((entries["hour"], entries["origin_log_id"]))
    sums: dict[tuple[int, int], tuple[Tally, int]] = {}
    for entry in entries[order[entries["rows"][order] > 0]]:
        key = int(entry["origin_log_id"]), int(entry["hour"])
        before, differing = sums.get(key, (Tally(), 0))
        own = Tally(int(entry["rows"]), int(entry["first"]), int(entry["second"]))
        sums[key] = before + own, differing + int(entry["differing"])
    return ((key, *found) for key, found in sums.items())


def covered(entries: Tallies) -> list[tuple[int, int]]:
    """The ranges of the message log that entries count, joined where one begins at the end of another."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(set(zip(entries["begin"].tolist(), entries["end"].tolist(), strict=True))):
        if ranges and begin == ranges[-1][1]:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((begin, end))
    return ranges


def joined(parts: Sequence[Tallies]) -> Tallies:
    """All entries of several batches."""
    return np.concatenate([NO_TALLIES, *parts])


Bools = NDArray[np.bool_]

KIND_PART_BYTES = 56
DIRECTORY_AT = HEADER_BYTES + KIND_PART_BYTES
FRONT_WORDS = np.arange(DIRECTORY_AT >> 3)
# Batches from a delay server have these columns, and tags and headers where a row has some; any other batch is read
# alone.
PLAIN = ((ColumnId.DELIVER_AT_MS, 8), (ColumnId.SEQUENCE, 8), (ColumnId.BODY_END, 4), (ColumnId.CONTENT_HASH, 8))
WITH_HEADERS = (*PLAIN[:2], (ColumnId.HEADERS_END, 4), *PLAIN[2:])
WITH_TAGS = (*PLAIN[:2], (ColumnId.TAG_BLOOM, 8), (ColumnId.TAGS_END, 4), *PLAIN[2:])
WITH_BOTH = (*WITH_TAGS[:4], (ColumnId.HEADERS_END, 4), *PLAIN[2:])
SHAPES = (PLAIN, WITH_HEADERS, WITH_TAGS, WITH_BOTH)  # Each has another number of columns.
SMALL_ROWS = 4_096  # A batch with more rows is worth calls and memory of its own.
DIFFERING_TOLD = 100  # Rows of a segment that are logged one by one; all are counted.
FRONT = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("kind", "u1"),
        ("flags", "<u2"),
        ("total_bytes", "<u4"),
        ("count", "<u4"),
        ("heap_offset", "<u4"),
        ("column_count", "<u2"),
        ("kind_bytes", "<u2"),
        ("subject_count", "<u4"),
        ("columns_crc32c", "<u4"),
        ("heap_crc32c", "<u4"),
        ("header_crc32c", "<u4"),
        ("origin_log_id", "<u8"),
        ("epoch", "<u8"),
        ("batch_id", "<u8"),
        ("w_epoch", "<u8"),
        ("w_id", "<u8"),
        ("claimed_at_ms", "<i8"),
        ("hour", "<u4"),
        ("zero", "<u4"),
    ]
)


class Differing(NamedTuple):
    """A row whose bytes don't give its content hash: offset of its batch, row in it, number at the delay server."""

    offset: int
    row: int
    sequence: int
    origin_log_id: int


class _Rows(NamedTuple):
    """Rows of some batches; ``batch_of`` is each row's index among these batches."""

    sequence: UInt64s
    due: Int64s
    stated: UInt64s
    made: UInt64s  # The hashes that their bytes give.
    batch_of: Int64s
    offsets: Int64s  # Where these batches begin.
    counts: Int64s
    origins: UInt64s
    hours: UInt64s


class Tallier:
    """Gathers the tallies of one range of a realtime message log; ``entries`` and ``differing`` are its results."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.end = begin
        self._found: list[Tallies] = []
        self.differing: list[Differing] = []
        self.differing_count = 0

    def take(self, group: CommitGroup) -> None:
        """Add a verified group, the next one of the log.

        Raises:
            BatchMalformed, BadSubject, MessageTooLarge: intake would not have taken one of the batches.
        """
        self.end = group.end
        if group.header.kind == GroupKind.DATA:
            for rows in _read_group(group):
                self._add(rows)

    def entries(self) -> Tallies:
        """One entry for each origin and hour, in this order; for a range without messages one entry that says so."""
        found = joined(self._found)
        if not len(found):
            found = np.zeros(1, TALLY)
        # Parts of an hour that came in several groups become one entry.
        order = np.lexsort((found["hour"], found["origin_log_id"]))
        found = found[order]
        changes = found["hour"][1:] != found["hour"][:-1]
        changes |= found["origin_log_id"][1:] != found["origin_log_id"][:-1]
        firsts = np.concatenate(([0], np.flatnonzero(changes) + 1))
        entries = found[firsts]
        for name in ("rows", "first", "second", "differing", "batches"):
            entries[name] = np.add.reduceat(found[name], firsts)
        entries["begin"], entries["end"] = self._begin, self.end
        return entries

    def _add(self, rows: _Rows) -> None:
        differs = (rows.stated != rows.made) & (rows.stated != NOT_STATED)
        wrong = np.flatnonzero(differs)
        self.differing_count += len(wrong)
        if len(wrong):
            firsts = np.cumsum(rows.counts) - rows.counts
            for row in wrong[: DIFFERING_TOLD - len(self.differing)].tolist():
                batch = int(rows.batch_of[row])
                self.differing.append(
                    Differing(
                        offset=int(rows.offsets[batch]),
                        row=row - int(firsts[batch]),
                        sequence=int(rows.sequence[row]),
                        origin_log_id=int(rows.origins[batch]),
                    )
                )
        hashes = np.where(rows.stated == NOT_STATED, rows.stated, rows.made)
        self._found.append(_tallies(rows, hashes, differs))


def _tallies(rows: _Rows, hashes: UInt64s, differs: Bools) -> Tallies:
    """One entry for each origin and hour of some rows."""
    keys = np.stack((rows.origins, rows.hours), axis=1)
    if (keys == keys[0]).all():
        distinct, which = keys[:1], np.zeros(len(keys), np.int64)
    else:
        distinct, which = np.unique(keys, axis=0, return_inverse=True)
        which = which.ravel()
    entries = np.zeros(len(distinct), TALLY)
    entries["origin_log_id"], entries["hour"] = distinct[:, 0], distinct[:, 1]
    entries["batches"] = np.bincount(which, minlength=len(distinct))
    sequence, due, key_of = rows.sequence, rows.due, which.take(rows.batch_of)
    entries["differing"] = np.bincount(key_of[differs], minlength=len(distinct))
    if len(distinct) > 1:
        order = np.argsort(key_of, kind="stable")
        sequence, due, hashes, key_of = sequence[order], due[order], hashes[order], key_of[order]
    bounds = np.searchsorted(key_of, np.arange(len(distinct) + 1))
    for number in range(len(distinct)):
        own = slice(bounds[number], bounds[number + 1])
        found = tally(sequence[own], due[own], hashes[own])
        entries["rows"][number], entries["first"][number], entries["second"][number] = found
    return entries


def _read_group(group: CommitGroup) -> Iterator[_Rows]:
    """The rows of a group's batches: small batches of one shape together, every other batch alone."""
    header, buffer = group.header, group.buffer
    sizes = np.frombuffer(buffer, np.uint32, header.batch_count, HEADER.size).astype(np.int64)
    begins = np.cumsum(sizes) - sizes + content_position(header.batch_count)
    alone = np.ones(len(begins), np.bool_)
    if (sizes >= DIRECTORY_AT + 8).all() and not (sizes & 7).any():
        words = np.frombuffer(buffer, np.uint64)
        fronts = words.take((begins >> 3)[:, None] + FRONT_WORDS).view(FRONT).ravel()
        small = fronts["count"] <= SMALL_ROWS
        small &= (fronts["magic"] == MAGIC) & (fronts["version"] == VERSION) & (fronts["kind"] == BatchKind.DISPATCH)
        small &= (fronts["kind_bytes"] == KIND_PART_BYTES) & (fronts["count"] > 0) & (fronts["subject_count"] == 1)
        small &= fronts["total_bytes"] == sizes
        for shape in SHAPES:
            chosen = np.flatnonzero(small & (fronts["column_count"] == len(shape)))
            if len(chosen):
                several = _Several(buffer, header.offset, begins[chosen], fronts[chosen], shape)
                alone[chosen[several.sound]] = False
                if several.sound.any():
                    yield several.rows()
    for place in np.flatnonzero(alone).tolist():
        begin = int(begins[place])
        batch = parse(buffer[begin : begin + int(sizes[place])])
        if batch.kind is BatchKind.DISPATCH:
            yield _rows_of(batch, header.offset + begin)


def _rows_of(batch: Batch, offset: int) -> _Rows:
    check_batch(batch)
    part = batch.dispatch
    return _Rows(
        sequence=batch.uint64s(ColumnId.SEQUENCE),
        due=batch.int64s(ColumnId.DELIVER_AT_MS),
        stated=batch.content_hashes(),
        made=hash_rows(batch),
        batch_of=np.zeros(batch.count, np.int64),
        offsets=np.array([offset]),
        counts=np.array([batch.count]),
        origins=np.array([part.origin_log_id], np.uint64),
        hours=np.array([part.hour], np.uint64),
    )


class _Several:
    """Small batches of one shape; ``sound`` says which of them have everything where the shape has it."""

    def __init__(
        self, buffer: memoryview, offset: int, begins: Int64s, fronts: Tallies, shape: tuple[tuple[ColumnId, int], ...]
    ) -> None:
        self._words = np.frombuffer(buffer, np.uint64)
        self._halves = np.frombuffer(buffer, np.uint32)
        counts = fronts["count"].astype(np.int64)
        at = DIRECTORY_AT + 8 * len(shape) + np.zeros(len(counts), np.int64)
        entries, places = [], dict[ColumnId, Int64s]()
        for column, width in shape:
            places[column] = begins + at
            entries.append(np.uint64(column | width << 16) | at.astype(np.uint64) << np.uint64(32))
            at += (counts * width + 7) & ~7
        # The directory must agree: then all columns are within the batch, and the heap is behind them.
        heap_bytes = fronts["total_bytes"].astype(np.int64) - at
        self.sound = (fronts["heap_offset"] == at) & (heap_bytes >= 16)
        for number, entry in enumerate(entries):
            self.sound &= self._words.take((begins + DIRECTORY_AT + 8 * number >> 3), mode="clip") == entry
        heaps = begins + at
        names = self._halves.take(heaps >> 2, mode="clip").astype(np.int64)
        self.sound &= (names > 0) & (names <= SUBJECT_BYTES_MAX) & (8 + ((names + 7) & ~7) <= heap_bytes)
        regions = [column for column, _ in shape if column in REGIONS]
        kept = np.flatnonzero(self.sound)
        self._keep(kept, counts, heaps, names, places)
        self._regions: dict[ColumnId, tuple[Int64s, Int64s]] = {}
        first = 8 + ((self._names + 7) & ~7)
        whole = np.ones(len(kept), np.bool_)
        for column in regions:
            first, fits = self._bounds(column, first, heap_bytes[kept])
            whole &= fits
        whole &= first == heap_bytes[kept]
        if not whole.all():
            # These batches don't fit the shape, so they are read one by one; the others are laid out once more without
            # them.
            self.sound[kept[~whole]] = False
            kept = np.flatnonzero(self.sound)
            self._keep(kept, counts, heaps, names, places)
            self._regions = {}
            first = 8 + ((self._names + 7) & ~7)
            for column in regions:
                first, _ = self._bounds(column, first, heap_bytes[kept])
        self._offsets = begins[kept] + offset
        self._origins = fronts["origin_log_id"][kept]
        self._hours = fronts["hour"][kept].astype(np.uint64)

    def rows(self) -> _Rows:
        """The rows of the sound batches."""
        states = states_of(Region(self._gather(self._heaps + 8, (self._names + 7) & ~7), self._names))
        parts = {
            column: Region(self._gather(*self._range_of(bounds)), bounds[1] - bounds[0])
            for column, bounds in self._regions.items()
            if column in HASHED_REGIONS
        }
        made = hash_items(states.take(self._batch_of), parts.get(ColumnId.HEADERS_END), parts[ColumnId.BODY_END])
        sequence, due, stated = (
            self._words.take(self._row_words(column))
            for column in (ColumnId.SEQUENCE, ColumnId.DELIVER_AT_MS, ColumnId.CONTENT_HASH)
        )
        facts = (self._batch_of, self._offsets, self._counts, self._origins, self._hours)
        return _Rows(sequence, due.view(np.int64), stated, made, *facts)

    def _keep(self, kept: Int64s, counts: Int64s, heaps: Int64s, names: Int64s, places: dict[ColumnId, Int64s]) -> None:
        self._counts, self._heaps, self._names = counts[kept], heaps[kept], names[kept]
        self._places = {column: at[kept] for column, at in places.items()}
        self._batch_of = np.repeat(np.arange(len(kept)), self._counts)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._row = np.arange(len(self._batch_of)) - self._firsts.take(self._batch_of)

    def _row_words(self, column: ColumnId) -> Int64s:
        """For each row, the index of its word in a column of 8 bytes."""
        return (self._places[column] >> 3).take(self._batch_of) + self._row

    def _bounds(self, column: ColumnId, first: Int64s, heap_bytes: Int64s) -> tuple[Int64s, Bools]:
        """Note where the items of a region begin and end in their heaps; return where the next region begins, and what
        fits.
        """
        ends = self._halves.take((self._places[column] >> 2).take(self._batch_of) + self._row).astype(np.int64)
        starts = np.empty_like(ends)
        starts[1:] = (ends[:-1] + 7) & ~7
        starts[self._firsts] = first
        self._regions[column] = starts, ends
        lengths = ends - starts
        fits = np.ones(len(first), np.bool_)
        if len(ends):
            fits = np.minimum.reduceat(lengths, self._firsts) >= 0
            fits &= np.maximum.reduceat(ends, self._firsts) <= heap_bytes
        return (ends[self._firsts + self._counts - 1] + 7) & ~7, fits

    def _range_of(self, bounds: tuple[Int64s, Int64s]) -> tuple[Int64s, Int64s]:
        """Where a region begins in the group, and its bytes, batch by batch."""
        starts, ends = bounds
        begins = starts[self._firsts]
        return self._heaps + begins, ((ends[self._firsts + self._counts - 1] + 7) & ~7) - begins

    def _gather(self, begins: Int64s, sizes: Int64s) -> UInt64s:
        """The words of one range for each batch, one behind the other."""
        counts = sizes >> 3
        places = np.repeat((begins >> 3) - (np.cumsum(counts) - counts), counts)
        places += np.arange(len(places))
        return self._words.take(places)
