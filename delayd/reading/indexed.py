"""Indexed: reads groups of a realtime message log from the index files of its segments, when few of its rows are
needed.

Invariant: an index is used only when it gives the segment's own checksums: its groups chain from the file header of the
segment to that of the next one, and the content checksum of each group follows from its pieces. So an index that leaves
out or changes anything is rejected, and the segment is read. The next file header is not part of the index.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from crc32c import crc32c

from delayd.disk import Disk
from delayd.log.group import CommitGroup
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FileHeader
from delayd.log.segment_index import FRONT_BYTES, IndexedGroup, read_index
from delayd.reading.crc import joined
from delayd.reading.groups import TornTail, file_size, open_base, read_log, segment_bases
from delayd.reading.skim import Skimmed, read_known

CHECKED_BYTES = 96  # The bytes of a front that its header's checksum covers, and that checksum.
HEAP_OFFSET, COLUMNS_CRC32C = 4, 7  # Words of 32 bits in the front of a batch.
PIECES = 4  # The pieces of a batch: the front's beginning, the columns, the subject table, the rest of the heap.


def read_by_index(
    disk: Disk, place: LogPlace, bounds: tuple[int, int, int], torn: list[TornTail]
) -> Iterator[CommitGroup | Skimmed | IndexedGroup]:
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
