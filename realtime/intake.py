"""Intake: it checks a DISPATCH frame before any of it is kept.

A frame is taken or refused as a whole (rule H6), so everything is checked before anything is queued.
"""

from delayd.batch import Batch, BatchKind, ColumnId, DispatchPart, parse
from delayd.errors import BatchMalformed
from delayd.hours import INSTANT_MS_MAX, hour_of_ms
from delayd.validate import check_batch
from delayd.wire.requests import INT_MAX

from .handoff import Origin, W

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
        batch = parse(body, position)
        position += batch.total_bytes
        if batch.kind != BatchKind.DISPATCH:
            raise BatchMalformed(f"a {batch.kind.name} batch can't be dispatched")
        batch.verify()
        check_batch(batch)
        part = batch.dispatch
        highest = max(highest, _check_values(batch, part))
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


def _check_values(batch: Batch, part: DispatchPart) -> int:
    """Check that all instants are dates that can be shown, and all sequences numbers that logs can store; return the
    highest sequence.
    """
    if not 0 <= part.claimed_at_ms <= INSTANT_MS_MAX:
        raise BatchMalformed(f"batch {part.batch_id} was claimed at {part.claimed_at_ms}, which is no instant")
    if part.hour > HOUR_MAX:
        raise BatchMalformed(f"batch {part.batch_id} is of the hour {part.hour}, behind the last one of the calendar")
    for column in (ColumnId.DELIVER_AT_MS, ColumnId.ACCEPTED_AT_MS):
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
