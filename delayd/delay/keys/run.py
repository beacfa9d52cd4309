"""Run: entries that say which row took a name, sorted by the hash of the name, and files of them (docs/formats/keys.md,
version 1).

Invariants: entries are not changed once they are made, so any thread may look up in them. A file counts only when the
state names it, and it is synced before that. Every byte that is used has been checked in the same reading; a byte that
does not check, or can't be read, is damage with path and position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s, padded
from delayd.batch.content import Bools, Hasher, Names, UInt64s, word_counts
from delayd.delay.rows import Stored, filing_hours
from delayd.errors import DamagedData, DataError
from delayd.log.key_run import (
    BLOCK_ENTRIES,
    BLOCKS_AT,
    FOLDER,
    HEADER_AT,
    Halves,
    RunFile,
    RunHeader,
    RunName,
    read_run_file,
    run_path,
)
from delayd.log.segment import FileHeader, UnfinishedFile
from delayd.machine.disk import Disk, open_named

ROW = np.dtype([("sequence", "<u8"), ("deliver_at_ms", "<i8"), ("hour", "<u4")])
NO_SEQUENCE = 0  # No row has this sequence.

Rows = NDArray[np.void]
Index = NDArray[np.intp]


class AskedNames(NamedTuple):
    """Names that are looked up, with their hashes."""

    names: Names
    hashes: UInt64s

    def take(self, rows: Int64s | Index) -> AskedNames:
        """Some of them."""
        return AskedNames(self.names.take(rows), self.hashes.take(rows))


class Newest:
    """The newest entry of each name that was looked up: ``rows`` (ROW[n]), with sequence 0 where there is none."""

    __slots__ = ("rows",)

    def __init__(self, n: int) -> None:
        self.rows: Rows = np.zeros(n, ROW)

    @property
    def known(self) -> Bools:
        """Whether each name has an entry."""
        known: Bools = self.rows["sequence"] != NO_SEQUENCE
        return known

    def take_newer(self, asked: Int64s | Index, rows: Rows) -> None:
        """Note entries of the names ``asked``, each at most once, where they are newer than what was found."""
        newer = rows["sequence"] > self.rows["sequence"].take(asked)
        self.rows[asked[newer]] = rows[newer]


@dataclass(frozen=True, slots=True)
class Entries:
    """Sorted entries: by hash, and the entries of one hash by sequence."""

    hashes: UInt64s
    rows: Rows
    names: Names

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, places: Int64s | Index) -> Entries:
        """Some of the entries, in the same order; the words of their names are shared."""
        return Entries(self.hashes.take(places), self.rows.take(places), self.names.take(places))

    def packed(self) -> Entries:
        """The same entries with words of their own."""
        return replace(self, names=self.names.packed())

    def find(self, asked: AskedNames, found: Newest) -> None:
        """Note the newest entry of each name that has one here.

        An example: the names a and b have one hash. Of a there are the rows 1 and 5, of b row 2, so the entries of this
        hash are a 1, b 2, a 5. The search stops at a 5. That is the answer for a; b goes one back, and finds b 2.
        """
        places = self.hashes.searchsorted(asked.hashes, "right") - 1
        rows = np.flatnonzero(places >= 0)
        # The newest entry of a hash stands last. Only names that share a hash take a second round.
        while len(rows):
            rows = rows[self.hashes.take(places.take(rows)) == asked.hashes.take(rows)]
            at = places.take(rows)
            same = self.names.take(at).equal(asked.names.take(rows))
            found.take_newer(rows[same], self.rows.take(at[same]))
            rows = rows[~same]
            places[rows] -= 1
            rows = rows[places.take(rows) >= 0]


NO_ENTRIES = Entries(np.empty(0, np.uint64), np.empty(0, ROW), Names.of_lists([], []))


def new_entries(
    hasher: Hasher, names: Names, sequences: UInt64s, deliver_at_ms: Int64s, hours: NDArray[np.uint32]
) -> Entries:
    """Entries of rows by rising sequence; ``names`` are packed."""
    rows = np.empty(len(sequences), ROW)
    rows["sequence"], rows["deliver_at_ms"], rows["hour"] = sequences, deliver_at_ms, hours
    hashes = hasher.hashes(names)
    order = np.argsort(hashes, kind="stable")
    return Entries(hashes.take(order), rows.take(order), names.take(order))


def merge(parts: Sequence[Entries]) -> Entries:
    """The newest entry of each name out of all parts, in any order."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return NO_ENTRIES
    hashes = np.concatenate([part.hashes for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    names = Names.joined([part.names for part in parts])
    # A stable sort of runs that are sorted takes linear time.
    order = np.argsort(hashes, kind="stable")
    hashes = hashes.take(order)
    twins = hashes[1:] == hashes[:-1]
    if twins.any():
        order, kept = _newest(order, twins, rows, names)
        hashes = hashes[kept]
    return Entries(hashes, rows.take(order), names.take(order))


def _newest(order: Index, twins: Bools, rows: Rows, names: Names) -> tuple[Index, Bools]:
    """Sort the entries of each hash by sequence, and leave out those that have a newer one of the same name.

    ``twins`` says of each entry but the last whether the next one has the same hash.
    """
    shared = np.zeros(len(order), np.bool_)
    shared[:-1] |= twins
    shared[1:] |= twins
    places = np.flatnonzero(shared)
    # Entries of one hash have one number.
    group = np.cumsum(np.concatenate(([True], ~twins)))[places]
    sequences = rows["sequence"].take(order.take(places))
    order[places] = order.take(places).take(np.lexsort((sequences, group)))
    kept = np.ones(len(order), np.bool_)
    first = np.flatnonzero(twins)
    same = names.take(order.take(first)).equal(names.take(order.take(first + 1)))
    kept[first[same]] = False
    if not same.all():
        # Two names share a hash: then an older entry of a name need not stand directly before the newer one.
        ends = np.flatnonzero(np.concatenate((group[1:] != group[:-1], [True])))
        starts = np.concatenate(([0], ends[:-1] + 1))
        mixed_groups = set(np.searchsorted(places, first[~same]).tolist())
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if not mixed_groups.isdisjoint(range(start, end + 1)):
                _newest_of_one_hash(order, places[start : end + 1], names, kept)
    return order[kept], kept


def _newest_of_one_hash(order: Index, places: Index, names: Names, kept: Bools) -> None:
    seen: set[tuple[bytes, bytes]] = set()
    for place in reversed(places.tolist()):
        (text,) = names.take(order[place : place + 1]).texts()
        kept[place] = text not in seen
        seen.add(text)


Hours = NDArray[np.uint32]


class KeyedRows(NamedTuple):
    """Rows with keys, by rising sequence; their names are packed."""

    names: Names
    sequences: UInt64s
    deliver_at_ms: Int64s
    hours: Hours  # Filing hours.

    @property
    def n(self) -> int:
        """How many rows these are."""
        return len(self.sequences)

    def kept(self, kept: Bools) -> KeyedRows:
        """Some of the rows."""
        if kept.all():
            return self
        chosen = np.flatnonzero(kept)
        names = self.names.take(chosen).packed()
        return KeyedRows(names, self.sequences[chosen], self.deliver_at_ms[chosen], self.hours[chosen])


def sent_rows(stored: Stored, appended_at_ms: int) -> KeyedRows:
    """The keyed rows of a batch in the message log."""
    batch = stored.batch
    places = batch.keyed_rows()
    due = batch.int64s(ColumnId.DELIVER_AT_MS).take(places)
    sequences = places.astype(np.uint64) + np.uint64(stored.base_sequence)
    return KeyedRows(Names.of_batch(batch, places), sequences, due, filing_hours(due, appended_at_ms))


def filed_rows(batch: Batch, hour: int) -> KeyedRows:
    """The keyed rows of a batch in the schedule log of an hour."""
    places = batch.keyed_rows()
    sequences = batch.uint64s(ColumnId.SEQUENCE).take(places)
    order = np.argsort(sequences, kind="stable")
    places, sequences = places.take(order), sequences.take(order)
    due = batch.int64s(ColumnId.DELIVER_AT_MS).take(places)
    return KeyedRows(Names.of_batch(batch, places), sequences, due, np.full(len(places), hour, np.uint32))


BUCKET_ENTRIES = 16  # With fewer entries in a bucket, the table of buckets takes more memory than it saves time.
ENTRY = np.dtype(
    [
        ("sequence", "<u8"),
        ("due_low", "<u4"),
        ("due_high", "<u2"),
        ("subject_bytes", "u1"),
        ("key_bytes", "u1"),
        ("hour", "<u4"),
    ]
)
ENTRY_HALVES = ENTRY.itemsize // 4
LENGTHS_HALF = 3  # The half of an entry that holds the two lengths, in its upper bytes.
ASKED_PIECE = 4_096  # Names looked up in one go: their candidates stay in the cache.
BLOCKS_PIECE = 512  # Blocks read in one go, about 2 MiB.
PIECE_ENTRIES = 64 << 10  # Entries written or merged in one go, about 4 MiB: 10 to 20 ms of work.

GiveWay = Callable[[], None]


class OpenRun:
    """An open run; any thread may look up in it."""

    def __init__(self, file: RunFile) -> None:
        self.path = file.path
        self.name = file.name
        self._file = file
        self._header = file.header
        self._tables = file.tables

    def __len__(self) -> int:
        return self._header.entries

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return self._header.blocks

    def find(self, asked: AskedNames, found: Newest, give_way: GiveWay) -> None:
        """Note the entry of each name that has one here; a name that has none costs no reading.

        Raises:
            DamagedData: a block does not check or can't be read. Shortage: this process can't read now.
        """
        for low in range(0, len(asked.hashes), ASKED_PIECE):
            rows, places = self._candidates(asked.hashes[low : low + ASKED_PIECE])
            if len(rows):
                self._compare(asked, rows + low, places, found, give_way)

    def read(self, first: int, blocks: int, hasher: Hasher) -> Entries:
        """The entries of some blocks, in order; errors as of `find`."""
        data = [self._file.block(number) for number in range(first, min(first + blocks, self.blocks))]
        parts = [_parse(block, self._file.entries_in(first + place)) for place, block in enumerate(data)]
        entries = np.concatenate([part for part, _ in parts])
        words = np.concatenate([words for _, words in parts])
        counts = word_counts(entries["subject_bytes"], entries["key_bytes"])
        names = Names(words, np.cumsum(counts) - counts, entries["subject_bytes"].copy(), entries["key_bytes"].copy())
        return Entries(hasher.hashes(names), _rows(entries), names)

    def close(self) -> None:
        """Close the file."""
        self._file.file.close()

    def _candidates(self, hashes: UInt64s) -> tuple[Index, Index]:
        """Which names may have an entry, and the place of that entry."""
        buckets = _buckets(hashes, self._header.buckets)
        starts = self._tables.first.take(buckets).astype(np.int64)
        counts = self._tables.first.take(buckets + 1) - starts
        rows = np.repeat(np.arange(len(hashes)), counts)
        places = np.arange(len(rows))
        places += np.repeat(starts - (np.cumsum(counts) - counts), counts)
        chosen = np.flatnonzero(self._tables.fingerprints.take(places) == _fingerprints(hashes).take(rows))
        return rows.take(chosen), places.take(chosen)

    def _compare(self, asked: AskedNames, rows: Index, places: Index, found: Newest, give_way: GiveWay) -> None:
        """Compare names with the entries at ``places``, whole."""
        order = np.argsort(places, kind="stable")
        rows, places = rows.take(order), places.take(order)
        numbers = places // BLOCK_ENTRIES
        begins = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
        cuts = [*begins[::BLOCKS_PIECE].tolist(), len(numbers)]
        for low, high in pairwise(cuts):
            of = slice(low, high)
            read = numbers[begins[(begins >= low) & (begins < high)]]
            data = [self._file.block(number) for number in read.tolist()]
            halves = np.frombuffer(b"".join(data), np.uint32)
            sizes = np.fromiter(map(len, data), np.int64, len(data))
            block_of = np.searchsorted(read, numbers[of])
            at = ((np.cumsum(sizes) - sizes) >> 2).take(block_of)
            entries, names = _entries_at(halves, at, self._count_of(numbers[of]), places[of] % BLOCK_ENTRIES)
            same = names.equal(asked.names.take(rows[of]))
            found.take_newer(rows[of][same], _rows(entries[same]))
            give_way()

    def _count_of(self, blocks: Index) -> Index:
        """How many entries each of these blocks has."""
        return np.minimum(BLOCK_ENTRIES, self._header.entries - blocks * BLOCK_ENTRIES)


class RunWriter:
    """Writes a run from pieces, in the order of their hashes; nothing refers to the file before `finish`."""

    def __init__(self, disk: Disk, folder: str, header: FileHeader, seed: int, entries_max: int) -> None:
        self._disk = disk
        self._path = run_path(folder, header.number)
        self._header = header
        self._seed = seed
        self._counts = np.zeros(_buckets_for(entries_max), np.uint32)
        self._fingerprints: list[NDArray[np.uint16]] = []
        self._block_bytes: list[int] = []
        self._crcs: list[int] = []
        self._position = BLOCKS_AT
        self._rest: Entries | None = None  # Entries that do not fill a block yet.
        disk.make_folder(f"{folder}/{FOLDER}")
        if disk.exists(self._path):
            disk.remove(self._path)
        self._file = open_named(disk, self._path, write=True, create=True)

    def add(self, entries: Entries) -> None:
        """Write the next entries; DiskFull, OSError when the disk refuses."""
        if self._rest is not None:
            entries = _behind(self._rest, entries)
        whole = len(entries) // BLOCK_ENTRIES * BLOCK_ENTRIES
        self._write(entries.take(np.arange(whole)))
        self._rest = entries.take(np.arange(whole, len(entries)))

    def finish(self) -> RunName:
        """Write the tables and sync file and folder; return what the state must say of the run."""
        if self._rest is not None:
            self._write(self._rest)
        fingerprints = np.concatenate([np.empty(0, np.uint16), *self._fingerprints])
        first = np.zeros(len(self._counts) + 1, np.uint32)
        np.cumsum(self._counts, out=first[1:])
        sizes = np.array(self._block_bytes, np.uint32)
        tables = b"".join(_table(part) for part in (first, fingerprints, sizes, np.array(self._crcs, np.uint32)))
        facts = RunHeader(
            entries=len(fingerprints),
            seed=self._seed,
            tables_at=self._position,
            total_bytes=self._position + len(tables),
            buckets=len(self._counts),
            blocks=len(sizes),
            tables_crc32c=crc32c(tables),
        )
        self._file.pwritev([tables], self._position)
        self._file.pwritev([self._header.encode(), facts.encode()], 0)
        self._file.sync()
        self._file.close()
        self._disk.sync_folder(self._path.rpartition("/")[0])
        return facts.name(self._header.number)

    def abandon(self) -> None:
        """Close and remove the file, as far as the disk lets us; a start removes what is left."""
        self._file.close()
        self._disk.remove(self._path)

    def _write(self, entries: Entries) -> None:
        if not len(entries):
            return
        buckets = _buckets(entries.hashes, len(self._counts))
        base = int(buckets[0])
        counts = np.bincount(buckets - base)
        self._counts[base : base + len(counts)] += counts.astype(np.uint32)
        self._fingerprints.append(_fingerprints(entries.hashes))
        names = entries.names.packed()
        data = _encode(entries.rows, names).view(np.uint8).data
        ends = np.cumsum(names.counts())[BLOCK_ENTRIES - 1 :: BLOCK_ENTRIES].tolist()
        if len(entries) % BLOCK_ENTRIES:
            ends.append(len(names.words))
        words = names.words.data.cast("B")
        blocks: list[bytes] = []
        begin = 0
        for number, end in enumerate(ends):
            low = number * BLOCK_ENTRIES * ENTRY.itemsize
            part = data[low : low + BLOCK_ENTRIES * ENTRY.itemsize]
            block = b"".join((part, bytes(-len(part) & 7), words[begin << 3 : end << 3]))
            blocks.append(block)
            self._crcs.append(crc32c(block))
            begin = end
        self._block_bytes.extend(map(len, blocks))
        written = b"".join(blocks)
        self._file.pwritev([written], self._position)
        self._position += len(written)


def write_run(disk: Disk, folder: str, header: FileHeader, seed: int, entries: Entries, give_way: GiveWay) -> RunName:
    """Write entries as a run, durable on return.

    Raises:
        DiskFull, OSError, DataError: it can't be written, and nothing refers to what was.
        SyncFailed: the disk refuses the sync, and then the server must stop.
    """
    return write_pieces(disk, folder, header, seed, len(entries), _pieces(entries), give_way)


def write_pieces(
    disk: Disk,
    folder: str,
    header: FileHeader,
    seed: int,
    entries_max: int,
    pieces: Iterator[Entries],
    give_way: GiveWay,
) -> RunName:
    """Do the same as `write_run` for entries in pieces, which are sorted as a whole."""
    writer = RunWriter(disk, folder, header, seed, entries_max)
    try:
        for piece in pieces:
            writer.add(piece)
            give_way()
        return writer.finish()
    except (OSError, DataError):
        writer.abandon()
        raise


def open_run(disk: Disk, folder: str, log_id: int, seed: int, name: RunName) -> OpenRun:
    """Open a run that the state names, and read its tables.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedData: it is another file, or does not check. Shortage: this process can't read now.
    """
    path = run_path(folder, name.number)
    file = open_named(disk, path)
    try:
        found = read_run_file(path, file, log_id)
        if found.number != name.number:
            raise DamagedData(path, 0, f"it is run {found.number} of the keys, and {name.number} belongs here")
        if found.name != name:
            raise DamagedData(path, HEADER_AT, "it is another run than the one that the state names")
        if found.header.seed != seed:
            raise DamagedData(path, HEADER_AT, "its keys are hashed with another seed")
        file.keep_open(True)  # Runs are few, and a removed one is still read.
        return OpenRun(found)
    except UnfinishedFile:
        file.close()
        raise DamagedData(path, 0, "its writing did not finish") from None
    except BaseException:
        file.close()
        raise


def _buckets_for(entries: int) -> int:
    return max(1, entries // BUCKET_ENTRIES)


def _buckets(hashes: UInt64s, buckets: int) -> Index:
    """The bucket of each hash: it rises with the hash."""
    return ((hashes >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)).astype(np.intp)


def _fingerprints(hashes: UInt64s) -> NDArray[np.uint16]:
    return hashes.astype(np.uint16)


def _pieces(entries: Entries) -> Iterator[Entries]:
    for low in range(0, len(entries), PIECE_ENTRIES):
        yield entries.take(np.arange(low, min(low + PIECE_ENTRIES, len(entries))))


def _behind(first: Entries, second: Entries) -> Entries:
    return Entries(
        np.concatenate((first.hashes, second.hashes)),
        np.concatenate((first.rows, second.rows)),
        Names.joined((first.names.packed(), second.names)),
    )


def _encode(rows: NDArray[np.void], names: Names) -> NDArray[np.void]:
    entries = np.empty(len(rows), ENTRY)
    due = rows["deliver_at_ms"].view(np.int64)
    entries["sequence"], entries["hour"] = rows["sequence"], rows["hour"]
    entries["due_low"], entries["due_high"] = due & 0xFFFF_FFFF, due >> 32
    entries["subject_bytes"], entries["key_bytes"] = names.subject_bytes, names.key_bytes
    return entries


def _rows(entries: NDArray[np.void]) -> NDArray[np.void]:
    rows = np.empty(len(entries), ROW)
    rows["sequence"], rows["hour"] = entries["sequence"], entries["hour"]
    rows["deliver_at_ms"] = entries["due_low"] | entries["due_high"].astype(np.int64) << 32
    return rows


def _parse(block: bytes, entries: int) -> tuple[NDArray[np.void], UInt64s]:
    """The entries of a block, and the words of their names."""
    size = padded(entries * ENTRY.itemsize)
    return np.frombuffer(block, ENTRY, entries), np.frombuffer(block, np.uint64, (len(block) - size) >> 3, size)


def _entries_at(halves: Halves, at: Int64s, counts: Index, places: Index) -> tuple[NDArray[np.void], Names]:
    """Entries out of blocks that lie in ``halves``: the block of entry i begins at ``at[i]`` and has ``counts[i]``
    entries, and the entry is number ``places[i]`` of it.
    """
    fields = halves.take(at[:, None] + (ENTRY_HALVES * places)[:, None] + np.arange(ENTRY_HALVES))
    entries = fields.view(ENTRY).reshape(-1)
    before = np.arange(BLOCK_ENTRIES)
    index = np.minimum(at[:, None] + (ENTRY_HALVES * before + LENGTHS_HALF), len(halves) - 1)
    lengths = halves.take(index)
    words = ((lengths >> 16 & 0xFF) + 7 >> 3) + ((lengths >> 24) + 7 >> 3)
    skipped = np.where(before < places[:, None], words, 0).sum(axis=1, dtype=np.int64)
    # Names begin behind the block's entries, rounded up to whole words.
    begin = (at >> 1) + ((counts * ENTRY_HALVES + 1) >> 1)
    names = Names(halves.view(np.uint64), begin + skipped, entries["subject_bytes"].copy(), entries["key_bytes"].copy())
    return entries, names


def _table(part: Sequence[int] | NDArray[np.generic]) -> bytes:
    data = np.ascontiguousarray(part).tobytes()
    return data + bytes(-len(data) & 7)
