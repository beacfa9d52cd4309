"""Salvage: the batches of a file that check, also behind damage, for a reader that shows whatever can be read.

Invariant: what is handed out is verified as a whole. Everything else between two places of the file is reported.
"""

from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from delayd.batch import Batch, parse
from delayd.errors import BatchMalformed, DamagedData
from delayd.log.group import (
    MAGIC_BYTES,
    BadGroup,
    GroupHeader,
    IncompleteGroup,
    batch_sizes,
    content_position,
    parse_header,
    verify_chain,
)
from delayd.log.segment import Segment

FRONT_BYTES = 4_096  # A header with the table of a thousand batches.
RESYNC_BYTES = 4 << 20


class Space:
    """Memory for the bytes of one group, which the next one uses again: new memory costs more than reading does."""

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, size: int) -> bytearray:
        """At least ``size`` bytes, whatever they hold."""
        if size > len(self._data):
            self._data = bytearray(max(size, 2 * len(self._data)))
        return self._data


class Salvaged(NamedTuple):
    """The sound batches of one group: memory that begins with the bytes of the group, and where in it each batch
    stands. The next group uses the memory again.
    """

    header: GroupHeader
    data: bytearray
    batches: list[tuple[int, Batch]]

    @property
    def end(self) -> int:
        """Offset behind the group."""
        return self.header.offset + self.header.total_bytes


def salvage(
    segment: Segment,
    begin: int,
    stop: int,
    previous_crc32c: int | None,
    damage: list[DamagedData],
    space: Space,
    *,
    torn: bool = False,
) -> Iterator[Salvaged]:
    """Yield the groups of a file that lie in [begin, stop), offsets of its log.

    Args:
        segment: the file, open.
        begin: offset of a group.
        stop: where a group ends, unless ``torn``.
        previous_crc32c: of the group before ``begin``; None when it is not known.
        damage: receives what does not check.
        space: where the groups are read to.
        torn: whether bytes at the end may be an append that is under way, which is no damage.
    """
    offset, crc = begin, previous_crc32c
    while offset < stop:
        try:
            front, header = _front(segment, offset)
            verify_chain(front, header, crc)
            if header.offset + header.total_bytes > stop:
                raise IncompleteGroup(header.total_bytes, "the batches are cut short")
        except BadGroup as error:
            found = _next_group(segment, offset, stop)
            if found is None and torn:
                return
            damage.append(DamagedData(segment.path, segment.position(offset), str(error)))
            if found is None:
                return
            offset, crc = found, None
            continue
        yield _read(segment, header, damage, space)
        offset, crc = header.offset + header.total_bytes, header.header_crc32c


def group_ends(segment: Segment, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where each group of a file from ``begin`` on ends, and the checksum of its header, up to ``stop`` or the first
    header that is damaged.
    """
    offset = begin
    while offset < stop:
        try:
            _, header = _front(segment, offset)
        except BadGroup:
            return  # Whoever reads this part reports it.
        offset += header.total_bytes
        yield offset, header.header_crc32c


def _front(segment: Segment, offset: int) -> tuple[bytes, GroupHeader]:
    position, size = segment.position(offset), FRONT_BYTES
    while True:
        front = segment.file.pread(size, position)
        try:
            return front, parse_header(front, 0, segment.header.log_id, offset)
        except IncompleteGroup as error:
            if len(front) < size or error.size_bytes <= size:
                raise
            size = error.size_bytes


def _read(segment: Segment, header: GroupHeader, damage: list[DamagedData], space: Space) -> Salvaged:
    position = segment.position(header.offset)
    data = space.take(header.total_bytes)
    view, begin = memoryview(data)[: header.total_bytes], content_position(header.batch_count)
    # Behind what was read stands another group, which would check.
    view = view[: segment.file.pread_into(view, position)]
    whole = len(view) == header.total_bytes and crc32c(view[begin:]) == header.content_crc32c
    batches: list[tuple[int, Batch]] = []
    for size in batch_sizes(view, header) if len(view) >= begin else ():
        try:
            batch = parse(view[begin : begin + size])
            if not whole:
                batch.verify()
            batches.append((begin, batch))
        except BatchMalformed as error:
            damage.append(DamagedData(segment.path, position + begin, str(error)))
        begin += size
    if not whole and not any(error.position >= position for error in damage):
        damage.append(DamagedData(segment.path, position, "the checksum of the batches differs"))
    return Salvaged(header, data, batches)


def _next_group(segment: Segment, offset: int, stop: int) -> int | None:
    """The offset of the first group behind a bad one."""
    position, until = segment.position(offset) + 8, segment.position(stop)
    while position < until:
        data = segment.file.pread(min(RESYNC_BYTES, until - position), position)
        if not data:
            return None
        at = data.find(MAGIC_BYTES)
        while at >= 0:
            found = offset + position + at - segment.position(offset)
            if (position + at) % 8 == 0 and _is_group(segment, found):
                return found
            at = data.find(MAGIC_BYTES, at + 4)
        # The magic itself may lie across two reads; groups begin at multiples of 8, so the last 8 bytes are enough.
        position += max(8, len(data) - 8) if len(data) == RESYNC_BYTES else len(data)
    return None


def _is_group(segment: Segment, offset: int) -> bool:
    try:
        _front(segment, offset)
    except BadGroup:
        return False
    return True
