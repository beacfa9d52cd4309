"""Indexed: reads groups of a realtime message log from the index files of its segments, when few of its rows are
needed.

Invariant: an index is used only when it gives the segment's own checksums: its groups chain from the file header of the
segment to that of the next one, and the content checksum of each group follows from its pieces. So an index that leaves
out or changes anything is rejected, and the segment is read. The next file header is not part of the index.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.disk import Disk
from delayd.log.group import CommitGroup
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FileHeader
from delayd.log.segment_index import FRONT_BYTES, IndexedGroup, read_index
from delayd.reading.groups import Group, TornTail, file_size, open_base, read_known, read_log, segment_bases

CHECKED_BYTES = 96  # The bytes of a front that its header's checksum covers, and that checksum.
HEAP_OFFSET, COLUMNS_CRC32C = 4, 7  # Words of 32 bits in the front of a batch.
POLYNOMIAL = np.uint32(0x82F63B78)  # Castagnoli's polynomial, with its bits reversed.
LENGTH_BITS = 27  # Lengths below 128 MiB: a group is shorter.
PIECES = 4  # The pieces of a batch: the front's beginning, the columns, the subject table, the rest of the heap.

UInt32s = NDArray[np.uint32]


def read_by_index(
    disk: Disk, place: LogPlace, bounds: tuple[int, int, int], torn: list[TornTail]
) -> Iterator[Group | IndexedGroup]:
    """As `read_known`, but segments with a valid index are read from it."""
    start, durable, stop = bounds
    bases = segment_bases(disk, place)
    offset, crc = start, None
    for base, following in pairwise(bases):
        if base != offset or following > stop:
            continue
        header, after = _header(disk, place, base, last=False), _header(disk, place, following, last=True)
        if header is None or after is None:
            break
        size = file_size(disk, f"{place.folder}/{segment_name(base)}")
        groups = None
        # A cut file, or one that does not follow, is reported by the reader of segments.
        if crc in (None, header.previous_crc32c) and size == following - base:
            groups = read_index(disk, place, base, following, after.previous_crc32c)
        if groups is not None and proves(groups, header, after):
            yield from groups
        else:
            yield from read_log(disk, place, base, following, torn, crc)
        offset, crc = following, after.previous_crc32c
    yield from read_known(disk, place, (offset, durable, stop), torn, crc)


def proves(groups: Sequence[CommitGroup | IndexedGroup], header: FileHeader, following: FileHeader) -> bool:
    """Whether these are all groups of the segment between two file headers, unchanged."""
    offset, crc = header.base_offset, header.previous_crc32c
    for group in groups:
        if (group.header.offset, group.header.previous_crc32c) != (offset, crc):
            return False
        offset, crc = group.end, group.header.header_crc32c
    if (offset, crc) != (following.base_offset, following.previous_crc32c):
        return False
    return _contents_check([group for group in groups if isinstance(group, IndexedGroup)])


def _contents_check(groups: Sequence[IndexedGroup]) -> bool:
    """Whether the content checksum of each group follows from its pieces; groups without a batch have none."""
    if not groups:
        return True
    fronts = np.concatenate([group.fronts for group in groups]).reshape(-1, FRONT_BYTES // 8)
    if not len(fronts) or any(not len(group.sizes) for group in groups):
        return False
    words = fronts.view(np.uint32)
    sizes = np.concatenate([group.sizes for group in groups])
    tables = [8 * np.diff(group.name_starts) for group in groups]
    heaps, table_bytes = words[:, HEAP_OFFSET].astype(np.int64), np.concatenate(tables)
    lengths = np.empty((len(fronts), PIECES), np.int64)
    lengths[:, 0], lengths[:, 1], lengths[:, 2] = CHECKED_BYTES, heaps - CHECKED_BYTES, table_bytes
    lengths[:, 3] = sizes - heaps - table_bytes
    if (lengths < 0).any():
        return False
    crcs = np.empty((len(fronts), PIECES), np.uint32)
    data = memoryview(fronts.tobytes())
    crcs[:, 0] = [crc32c(data[at : at + CHECKED_BYTES]) for at in range(0, len(data), FRONT_BYTES)]
    crcs[:, 1] = words[:, COLUMNS_CRC32C]
    crcs[:, 2] = [crc for group in groups for crc in _tables_crc32c(group)]
    crcs[:, 3] = np.concatenate([group.rests for group in groups])
    counts = np.array([len(group.sizes) for group in groups])
    starts = PIECES * (np.cumsum(counts) - counts)
    said = np.array([group.header.content_crc32c for group in groups], np.uint32)
    return bool((joined(crcs.ravel(), lengths.ravel(), starts) == said).all())


def _tables_crc32c(group: IndexedGroup) -> list[int]:
    """The checksum of each batch's subject table."""
    data = memoryview(group.names.tobytes())
    bounds = (8 * group.name_starts).tolist()
    return [crc32c(data[begin:end]) for begin, end in pairwise(bounds)]


def _header(disk: Disk, place: LogPlace, base: int, *, last: bool) -> FileHeader | None:
    segment = open_base(disk, place, base, last=last)
    if segment is None:
        return None
    segment.close()
    return segment.header


def joined(crcs: UInt32s, lengths: Int64s, starts: Int64s) -> UInt32s:
    """The CRC-32C of each whole; its pieces stand one behind the other, beginning at its entry of ``starts``.

    A checksum is a polynomial's remainder, so the checksum of ``a + b`` is that of ``a``, moved on by the length of
    ``b``, plus that of ``b``. Moving on by 2^k bytes is linear: four tables of 256 entries, one for each byte of it.

    Args:
        crcs: of each piece.
        lengths: of each piece, in bytes.
        starts: for each whole the index of its first piece, rising; each has one.
    """
    ends = np.cumsum(lengths)
    counts = np.diff(np.append(starts, len(lengths)))
    behind = np.repeat(ends[starts + counts - 1], counts) - ends
    return np.bitwise_xor.reduceat(_moved(crcs, behind), starts)


def _moved(crcs: UInt32s, lengths: Int64s) -> UInt32s:
    """Each checksum, moved on by ``lengths`` bytes."""
    moved = crcs.copy()
    for bit in range(LENGTH_BITS):
        rows = np.flatnonzero(lengths >> bit & 1)
        if len(rows):
            moved[rows] = _apply(_tables(bit), moved[rows])
    return moved


def _apply(tables: UInt32s, values: UInt32s) -> UInt32s:
    found: UInt32s = tables[0].take(values & np.uint32(255))
    for byte in (1, 2, 3):
        found ^= tables[byte].take(values >> np.uint32(8 * byte) & np.uint32(255))
    return found


@lru_cache(maxsize=LENGTH_BITS)
def _tables(bit: int) -> UInt32s:
    """Tables that move a checksum on by 2^bit bytes: uint32[4, 256]."""
    if bit:
        before = _tables(bit - 1)
        return _apply(before, before.ravel()).reshape(4, 256)
    values = np.arange(256, dtype=np.uint32) << (np.arange(4, dtype=np.uint32) * np.uint32(8))[:, None]
    for _ in range(8):
        values = values >> np.uint32(1) ^ POLYNOMIAL * (values & np.uint32(1))
    return values
