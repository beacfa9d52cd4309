"""Intake: what is proved of a DISPATCH frame before any of it is kept.

A frame is taken or refused as a whole (rule H6), so everything is checked before anything is queued.
"""

from delayd.batch import Batch, BatchKind, DispatchPart, parse
from delayd.errors import BatchMalformed
from delayd.validate import check_batch

from .handoff import Origin, W

FRAME_BATCHES_MAX = 32_768  # The answer names each batch and must fit one head.


def read_frame(body: memoryview, origin: Origin) -> tuple[list[Batch], list[DispatchPart]]:
    """The batches of a frame of the current session of ``origin``, verified.

    Raises:
        BatchMalformed, BadSubject, MessageTooLarge: one of them can't be taken, so none is.
    """
    batches: list[Batch] = []
    parts: list[DispatchPart] = []
    keys: set[W] = set()
    position = 0
    while position < len(body):
        batch = parse(body, position)
        position += batch.total_bytes
        if batch.kind != BatchKind.DISPATCH:
            raise BatchMalformed(f"a {batch.kind.name} batch can't be dispatched")
        batch.verify()
        check_batch(batch)
        part = batch.dispatch
        key = (part.epoch, part.batch_id)
        _check_part(part, key, origin)
        batches.append(batch)
        parts.append(part)
        keys.add(key)
    if not 0 < len(batches) <= FRAME_BATCHES_MAX:
        raise BatchMalformed(f"a frame of {len(batches)} batches; it has 1 to {FRAME_BATCHES_MAX}")
    if len(keys) < len(batches):
        raise BatchMalformed("two batches of a frame have one number")
    return batches, parts


def _check_part(part: DispatchPart, key: W, origin: Origin) -> None:
    if part.origin_log_id != origin.log_id or part.epoch != origin.epoch:
        raise BatchMalformed(
            f"batch {part.batch_id} is of the server {part.origin_log_id:016x} in epoch {part.epoch}, its session "
            f"is of {origin.log_id:016x} in epoch {origin.epoch}"
        )
    if origin.decided_or_held(key):
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} was sent before")
    if (part.w_epoch, part.w_id) >= key:
        raise BatchMalformed(f"batch {part.batch_id} of epoch {part.epoch} is not above its own W")
