"""Consumed: compares consume logs with the message log that they are derived from (docs/formats/consume.md, rule L9).

Invariant: entries follow each other as the subject's messages do. A log that ends early is not damaged: its server's
state says how much of it is valid, and the rest is made anew.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from delayd.disk import Disk, open_named
from delayd.errors import DamagedData, DataError
from delayd.location import ROW_BITS
from delayd.log.checkpoint import read_checkpoint
from delayd.log.consume import ENTRY_BYTES, PAGE_BYTES, PAGE_ENTRIES, Entries
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, UnfinishedFile, open_segment
from delayd.reading.directory import Directory
from delayd.reading.groups import LogMoved
from delayd.reading.realtime import Batches, TargetIndex, TargetIndexer

PAGE_DTYPE = np.dtype([("entries", "<u8", PAGE_ENTRIES), ("crc32c", "<u4"), ("zero", "<u4")])


def wrong_entries(disk: Disk, directory: Directory) -> Iterator[DamagedData]:
    """Name the first wrong entry of each consume log; nothing where the message log or a file can't be read.

    Such damage is named where the file itself is verified.
    """
    try:
        published = read_checkpoint(disk, directory.path, directory.log_id) or {}
        indexer = TargetIndexer(disk, [directory], [])
        indexer.scan(newer=False)
    except (DataError, LogMoved):
        return
    index, stop = indexer.index(), published.get("indexed_offset", 0)
    of_subject: dict[int, str] = {}  # Folders, by the number of their subject in the index.
    folder = f"{directory.path}/consume"
    for name in disk.list_folder(folder):
        try:
            found = _check(disk, directory, f"{folder}/{name}", index, stop if isinstance(stop, int) else 0, of_subject)
        except (DataError, FileNotFoundError, UnfinishedFile):
            continue
        if found is not None:
            yield found


def _check(
    disk: Disk, directory: Directory, folder: str, index: TargetIndex, stop: int, of_subject: dict[int, str]
) -> DamagedData | None:
    """What is wrong with the consume log in a folder; ``of_subject`` is given the folder of its subject."""
    (target,) = index.targets
    pieces: list[tuple[str, int, Entries]] = []  # Path, consume sequence of the first entry, entries.
    for name in sorted(each for each in disk.list_folder(folder) if each.endswith(".log")):
        path = f"{folder}/{name}"
        segment = open_segment(disk, path, FileKind.CONSUME, directory.log_id, write=False)
        segment.close()
        if f"{segment.header.number:08}" != folder.rpartition("/")[2]:
            return DamagedData(path, 0, f"its header says that it is of subject {segment.header.number}")
        pieces.append((path, segment.header.base_offset, _entries(disk, path)))
    if not pieces:
        return None
    path, base, _ = pieces[0]
    entries = np.concatenate([piece for _, _, piece in pieces])
    offsets = entries >> np.uint64(ROW_BITS)
    # Zeros lie before the first entry of a rebuilt log; entries below the log's start are of removed messages.
    chosen = np.flatnonzero((offsets >= target.start) & (offsets < stop) & (entries > 0))
    if not len(chosen):
        return None
    first, last = int(chosen[0]), int(chosen[-1]) + 1
    subject = _subject_at(index.batches, int(offsets[first]))
    if subject is None:
        return _wrong(pieces, first, "it names no stored batch")
    if subject in of_subject:
        return DamagedData(path, 0, f"it holds messages of {index.subjects[subject]!r}, as {of_subject[subject]} does")
    of_subject[subject] = folder
    expected = _rows_of(index.batches[index.batches["subject"] == subject])
    begin = int(np.searchsorted(expected, entries[first]))
    if target.start == 0 and begin != base + first:
        return _wrong(pieces, first, f"it is message {begin} of its subject, and stands in place {base + first}")
    wanted = expected[begin : begin + last - first]
    differs = np.flatnonzero(entries[first : first + len(wanted)] != wanted)
    if len(differs) or len(wanted) < last - first:
        at = first + (int(differs[0]) if len(differs) else len(wanted))
        return _wrong(pieces, at, "it is not that of the next message of its subject")
    return None


def _wrong(pieces: list[tuple[str, int, Entries]], at: int, what: str) -> DamagedData:
    """Damage at an entry, counted over all pieces."""
    for path, base, entries in pieces:
        if at < len(entries):
            position = FILE_HEADER_BYTES + at // PAGE_ENTRIES * PAGE_BYTES + at % PAGE_ENTRIES * ENTRY_BYTES
            return DamagedData(path, position, f"the entry of consume sequence {base + at}: {what}")
        at -= len(entries)
    raise IndexError(at)


def _entries(disk: Disk, path: str) -> Entries:
    """All entries of a segment: those of its full pages, and those of the last one."""
    file = open_named(disk, path)
    try:
        data = file.pread(max(0, file.size() - FILE_HEADER_BYTES), FILE_HEADER_BYTES)
    finally:
        file.close()
    pages = np.frombuffer(data, PAGE_DTYPE, len(data) // PAGE_BYTES)
    rest = data[pages.nbytes :]
    last = np.frombuffer(rest, np.uint64, min(len(rest) // ENTRY_BYTES, PAGE_ENTRIES))
    return np.concatenate((pages["entries"].ravel(), last))


def _rows_of(batches: Batches) -> NDArray[np.uint64]:
    """The entries of all rows of batches, which are by rising offset."""
    counts = batches["count"].astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    rows = (np.arange(len(first)) - first).astype(np.uint64)
    return (np.repeat(batches["offset"], counts) << np.uint64(ROW_BITS)) | rows


def _subject_at(batches: Batches, offset: int) -> int | None:
    """The subject of the batch that is stored at an offset, as a number of the index."""
    at = int(np.searchsorted(batches["offset"], np.uint64(offset)))
    if at == len(batches) or batches["offset"][at] != offset:
        return None
    return int(batches["subject"][at])
