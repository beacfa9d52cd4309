"""Intake: it checks a DISPATCH frame before any of it is kept.

A frame is taken or refused as a whole (rule H6), so everything is checked before anything is queued.
"""

import struct

from crc32c import crc32c

from delayd.batch.batch import BARE_COLUMNS_AT, BARE_DIRECTORY, BARE_HEAP_AT, PADS, Batch, parse, read_directory
from delayd.batch.columns import (
    HEADER,
    HEADER_BYTES,
    HEADER_CHECKED,
    MAGIC,
    PARTS,
    VERSION,
    BatchKind,
    ColumnId,
    DispatchPart,
    padded,
)
from delayd.batch.names import HEADERS_BYTES_MAX
from delayd.batch.validate import check_batch, names_one_subject
from delayd.errors import BatchMalformed
from delayd.hours import INSTANT_MS_MAX, hour_of_ms
from delayd.wire.heads import INT_MAX

from .handoff import Origin, W

# A batch of one row without headers, up to its heap: header, kind part with its reserve, directory, columns.
BARE = struct.Struct(f"{HEADER.format} {PARTS[BatchKind.DISPATCH][0].format[1:].replace('4x', 'I')} 32s qQIIQ")
assert BARE.size == BARE_HEAP_AT, "its columns end where its heap begins"
BARE_DIRECTORY_AT = BARE_HEAP_AT - 64
BARE_BEGIN = (MAGIC, VERSION, BatchKind.DISPATCH, 0)
BARE_SHAPE = (1, BARE_HEAP_AT, 4, BARE_DIRECTORY_AT - HEADER_BYTES, 1)  # From the count of rows to that of subjects.
BARE_LAYOUT = read_directory(BARE_DIRECTORY, 1, BARE_COLUMNS_AT, BARE_HEAP_AT)
NAME_BYTES = struct.Struct("<I")
HOUR_MAX = hour_of_ms(INSTANT_MS_MAX)
FRAME_BATCHES_MAX = 32_768  # The answer names each batch and must fit one head.


def read_frame(body: memoryview, origin: Origin) -> tuple[list[Batch], list[DispatchPart], int]:
    """The batches of a frame of the current session of ``origin``, verified, and their highest sequence.

    Raises:
        BatchMalformed, BadSubject, MessageTooLarge: one of them can't be taken, so none is.
    """
    batches: list[Batch] = []
    parts: list[DispatchPart] = []
    keys: set[W] = set()
    highest = 0
    position = 0
    while position < len(body):
        batch, part, sequence = read_bare(body, position) or read_batch(body, position)
        position += batch.total_bytes
        if sequence > highest:
            highest = sequence
        key = (part.epoch, part.batch_id)
        _check_part(part, key, origin)
        batches.append(batch)
        parts.append(part)
        keys.add(key)
    if not 0 < len(batches) <= FRAME_BATCHES_MAX:
        raise BatchMalformed(f"a frame of {len(batches)} batches; it has 1 to {FRAME_BATCHES_MAX}")
    if len(keys) < len(batches):
        raise BatchMalformed("two batches of a frame have one number")
    return batches, parts, highest


def read_bare(body: memoryview, position: int) -> tuple[Batch, DispatchPart, int] | None:
    """The result of `read_batch` for a batch that `encode_bare` made; None for any other or faulty batch.

    With many subjects nearly every batch of a frame is made so. This takes a third of the time, because there is only
    one layout.
    """
    if len(body) - position < BARE.size:
        return None
    front = BARE.unpack_from(body, position)
    if front[:4] != BARE_BEGIN or front[5:10] != BARE_SHAPE or front[20] or front[21] != BARE_DIRECTORY or front[25]:
        return None
    total_bytes, columns_crc32c, heap_crc32c, header_crc32c = front[4], front[10], front[11], front[12]
    heap_bytes = total_bytes - BARE_HEAP_AT
    if not 8 <= heap_bytes <= HEADERS_BYTES_MAX or total_bytes & 7 or total_bytes > len(body) - position:
        return None
    view = body[position : position + total_bytes]
    heap = view[BARE_HEAP_AT:]
    checked = crc32c(view[HEADER_BYTES:BARE_DIRECTORY_AT], crc32c(view[:HEADER_CHECKED]))
    columns = view[BARE_DIRECTORY_AT:BARE_HEAP_AT]
    if checked != header_crc32c or crc32c(columns) != columns_crc32c or crc32c(heap) != heap_crc32c:
        return None
    (name_bytes,) = NAME_BYTES.unpack_from(heap)
    table_bytes = 8 + padded(name_bytes)
    due, sequence, end = front[22], front[23], front[24]
    if not table_bytes <= end <= heap_bytes or padded(end) != heap_bytes or heap[end:] != PADS[heap_bytes - end]:
        return None
    claimed_at_ms, hour = front[18], front[19]
    if not 0 <= due <= INSTANT_MS_MAX or sequence > INT_MAX or not 0 <= claimed_at_ms <= INSTANT_MS_MAX:
        return None
    if hour > HOUR_MAX or not names_one_subject(bytes(heap[:table_bytes])):
        return None
    batch = Batch(view, BatchKind.DISPATCH, front[:13], BARE_LAYOUT)
    batch.verified = True
    return batch, DispatchPart._make(front[13:20]), sequence


def read_batch(body: memoryview, position: int) -> tuple[Batch, DispatchPart, int]:
    """The verified batch at ``position``, its kind part, and its highest sequence; raises as `read_frame` does."""
    batch = parse(body, position)
    if batch.kind != BatchKind.DISPATCH:
        raise BatchMalformed(f"a {batch.kind.name} batch can't be dispatched")
    batch.verify()
    check_batch(batch)
    part = batch.dispatch
    return batch, part, _check_values(batch, part)


def _check_values(batch: Batch, part: DispatchPart) -> int:
    """Check that all instants are dates that can be shown, and all sequences numbers that logs can store; return the
    highest sequence.
    """
    if not 0 <= part.claimed_at_ms <= INSTANT_MS_MAX:
        raise BatchMalformed(f"batch {part.batch_id} was claimed at {part.claimed_at_ms}, which is no instant")
    if part.hour > HOUR_MAX:
        raise BatchMalformed(f"batch {part.batch_id} is of the hour {part.hour}, behind the last one of the calendar")
    for column in (ColumnId.DELIVER_AT_MS, ColumnId.ACCEPTED_AT_MS, ColumnId.EXPIRES_AT_MS):
        # Read as unsigned, an instant before 1970 is above the limit, too.
        if column in batch.offsets and batch.highest(column) > INSTANT_MS_MAX:
            instants = batch.int64s(column)
            row = int(((instants < 0) | (instants > INSTANT_MS_MAX)).argmax())
            name = column.name.lower()
            raise BatchMalformed(f"row {row}: {name} is {int(instants[row])}, which is no instant")
    highest = batch.highest(ColumnId.SEQUENCE)
    if highest > INT_MAX:
        raise BatchMalformed(f"batch {part.batch_id} has a sequence above {INT_MAX}")
    return highest


def _check_part(part: DispatchPart, key: W, origin: Origin) -> None:
    if part.origin_log_id != origin.log_id or part.epoch != origin.epoch:
        raise BatchMalformed(
            f"batch {part.batch_id} is of the server {part.origin_log_id:016x} in epoch {part.epoch}, its session "
            f"is of {origin.log_id:016x} in epoch {origin.epoch}"
        )
    if part.w_epoch > part.epoch:
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} names a W of epoch {part.w_epoch}")
    if origin.decided_or_held(key):
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} was sent before")
    if (part.w_epoch, part.w_id) >= key:
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} is not above its own W")
