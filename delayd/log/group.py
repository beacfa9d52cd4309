"""CommitGroup: the bytes that one group commit appends to a log, a header and whole batches (docs/formats/group.md,
version 1).

A group is valid only at its own offset, in its own log, behind its own predecessor; one checksum covers its batches.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from crc32c import crc32c

from delayd.batch.batch import PADS, Batch, parse
from delayd.batch.columns import Buffer, padded

MAGIC = 0x50555247
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
VERSION = 1
HEADER = struct.Struct("<IBBBBIIQQQQqQIIII")
HEADER_CHECKED = HEADER.size - 4  # The header's own checksum is its last field.
BATCHES_MAX = 65_536
BYTES_MAX = (64 << 20) + (1 << 20)  # Four batches at their limit, the most that one frame brings, and the table.


class GroupKind(IntEnum):
    """DATA and CONTROL hold batches; a TICK holds none and only moves the log's clock (rule P5)."""

    DATA = 1
    CONTROL = 2
    TICK = 3


class GroupHeader(NamedTuple):
    """The fields of a group's header; offsets are bytes of the log."""

    kind: int
    total_bytes: int
    batch_count: int
    log_id: int
    offset: int
    epoch: int
    base_sequence: int
    appended_at_ms: int
    durable_offset: int
    previous_crc32c: int
    row_count: int
    content_crc32c: int
    header_crc32c: int


class NewGroup(NamedTuple):
    """The fields of a group that the caller gives; the log stamps the rest.

    ``sizes`` are the bytes of each batch; empty when each buffer of ``batches`` is a whole one, and not a piece.
    """

    kind: GroupKind
    batches: Sequence[Buffer]
    epoch: int
    appended_at_ms: int
    base_sequence: int = 0
    row_count: int = 0
    sizes: Sequence[int] = ()


class CommitGroup(NamedTuple):
    """A verified group: its header and a view of all its bytes."""

    header: GroupHeader
    buffer: memoryview

    @property
    def end(self) -> int:
        """Offset behind the group."""
        return self.header.offset + self.header.total_bytes

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield each batch with its offset in the log; their bytes are already verified by the group's checksum."""
        table = batch_sizes(self.buffer, self.header)
        position = content_position(self.header.batch_count)
        for size in table:
            batch = parse(self.buffer[position : position + size])
            batch.verified = True
            yield self.header.offset + position, batch
            position += size


class BadGroup(Exception):
    """The bytes at an offset are not the group that belongs there; the message says why. Never leaves this package."""


def content_position(batch_count: int) -> int:
    """Where the first batch begins, from the start of the group."""
    return HEADER.size + padded(4 * batch_count)


def encode_header(
    new: NewGroup, sizes: Sequence[int], log_id: int, offset: int, durable_offset: int, previous_crc32c: int
) -> tuple[bytes, int]:
    """Make header and table of a group to be written at ``offset``: return the bytes, and header_crc32c for the next
    group.
    """
    content_crc32c = 0
    for batch in new.batches:
        content_crc32c = crc32c(batch, content_crc32c)
    table = struct.pack(f"<{len(sizes)}I", *sizes)
    total_bytes = content_position(len(sizes)) + sum(sizes)
    # A group that no reader would accept must not be written: recovery would cut it off as a torn tail.
    if total_bytes > BYTES_MAX or total_bytes & 7 or len(sizes) > BATCHES_MAX:
        raise AssertionError(f"a group of {len(sizes)} batches in {total_bytes} bytes is not possible")
    checked = HEADER.pack(
        *(MAGIC, VERSION, new.kind, 0, 0, total_bytes, len(sizes), log_id, offset, new.epoch, new.base_sequence),
        *(new.appended_at_ms, durable_offset, previous_crc32c, new.row_count, content_crc32c, 0),
    )[:HEADER_CHECKED]
    header_crc32c = crc32c(table, crc32c(checked))
    return b"".join((checked, header_crc32c.to_bytes(4, "little"), table, PADS[-len(table) & 7])), header_crc32c


def parse_header(buffer: Buffer, position: int, log_id: int, offset: int) -> GroupHeader:
    """Read the header and table at ``position``, which must be those of ``offset`` in the log.

    Raises:
        BadGroup: they are not; `IncompleteGroup` when only bytes are missing, `NewerGroup` when this code is too old.
    """
    available = len(buffer) - position
    if available < HEADER.size:
        raise IncompleteGroup(HEADER.size, "the header is cut short")
    fields = HEADER.unpack_from(buffer, position)
    magic, version, _, _, _, total_bytes, batch_count = fields[:7]
    if magic != MAGIC:
        raise BadGroup(f"magic {magic:#x} is not that of a group")
    content = content_position(batch_count)
    if batch_count > BATCHES_MAX or not content <= total_bytes <= BYTES_MAX or total_bytes & 7:
        raise BadGroup(f"{batch_count} batches in {total_bytes} bytes are not possible")
    if available < content:
        raise IncompleteGroup(content, "the table is cut short")
    view = memoryview(buffer)
    table = view[position + HEADER.size : position + HEADER.size + 4 * batch_count]
    if crc32c(table, crc32c(view[position : position + HEADER_CHECKED])) != fields[-1]:
        raise BadGroup("the checksum of the header differs")
    # The version is checked only behind a checksum that fits, because torn bytes can look like any version.
    if version != VERSION:
        raise NewerGroup(version)
    header = GroupHeader._make((fields[2], *fields[5:]))
    if header.log_id != log_id:
        raise BadGroup(f"it belongs to the log {header.log_id:016x}")
    if header.offset != offset:
        raise BadGroup(f"it belongs at offset {header.offset}")
    return header


def verify_group(buffer: memoryview, header: GroupHeader, previous_crc32c: int | None) -> None:
    """Check chain, content checksum and batch lengths of the group that begins at byte 0 of ``buffer``.

    Raises:
        BadGroup: one of them differs; `IncompleteGroup` when only bytes are missing.
    """
    verify_chain(buffer, header, previous_crc32c)
    if len(buffer) < header.total_bytes:
        raise IncompleteGroup(header.total_bytes, "the batches are cut short")
    if crc32c(buffer[content_position(header.batch_count) : header.total_bytes]) != header.content_crc32c:
        raise BadGroup("the checksum of the batches differs")


def verify_chain(buffer: Buffer, header: GroupHeader, previous_crc32c: int | None) -> None:
    """Check what header and table say of a group: that it follows its predecessor, and that its length is right.

    Raises:
        BadGroup: one of them differs.
    """
    if previous_crc32c is not None and header.previous_crc32c != previous_crc32c:
        raise BadGroup("it does not follow the group before it")
    if content_position(header.batch_count) + sum(batch_sizes(buffer, header)) != header.total_bytes:
        raise BadGroup("the lengths of the batches do not add up")


def batch_sizes(buffer: Buffer, header: GroupHeader) -> tuple[int, ...]:
    """The table of the group that begins at byte 0 of ``buffer``: bytes of each batch."""
    return struct.unpack_from(f"<{header.batch_count}I", buffer, HEADER.size)


class NewerGroup(BadGroup):
    """An intact group of a version that this code does not read."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} is not known; this is version {VERSION}")
        self.version = version


class IncompleteGroup(BadGroup):
    """More bytes are needed: ``size_bytes`` in all, counted from the start of the group."""

    def __init__(self, size_bytes: int, reason: str) -> None:
        super().__init__(reason)
        self.size_bytes = size_bytes
