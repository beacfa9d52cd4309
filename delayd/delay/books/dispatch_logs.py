"""Dispatch logs: it finds, opens and reads them, together with the files beside a damaged one (rule L5)."""

from collections.abc import Callable, Sequence

from delayd.batch.batch import Batch
from delayd.delay.books.outcomes import append_parts, reopen_dispatch_log
from delayd.delay.quarantine import forget_quarantine, missing_parts, quarantine_path
from delayd.errors import DamagedData
from delayd.hours import hour_from_name
from delayd.log.dispatch import OutcomeRows, decode_outcomes
from delayd.log.schedule import dispatch_path
from delayd.log.segment import Segment
from delayd.machine.disk import Disk


def list_dispatch_logs(disk: Disk, folder: str) -> list[tuple[int, str]]:
    """Hours that have a dispatch log, rising, each with its path."""
    found: list[tuple[int, str]] = []
    for day in disk.list_folder(f"{folder}/dispatch"):
        for name in disk.list_folder(f"{folder}/dispatch/{day}"):
            # A log that was being written again when its server died has another name.
            if name.endswith(".log"):
                found.append((hour_from_name(name.removesuffix(".log")), f"{folder}/dispatch/{day}/{name}"))
    return found


def open_dispatch_log(
    disk: Disk, folder: str, log_id: int, epoch: int, hour: int, known: int, beside: Sequence[int], now_ms: int
) -> tuple[Segment, OutcomeRows] | None:
    """Open an hour's dispatch log, with what came to be known while it was damaged; None when it holds nothing yet.

    ``beside`` numbers the files that tell so; they are gone once all of it is in the log.

    Raises:
        DamagedData, Shortage: it does not check or can't be read; all up to the offset ``known`` was durable.
    """
    segment = reopen_dispatch_log(disk, dispatch_path(folder, hour), log_id, known, hour)
    if segment is None:
        return None
    try:
        outcomes = read_outcomes(segment)
        for number in beside:
            other = reopen_dispatch_log(disk, quarantine_path(folder, hour, number), log_id, 0, hour)
            if other is None:
                continue
            try:
                parts = missing_parts(read_outcomes(other), outcomes)
            finally:
                other.close()
            if parts:
                append_parts(segment, hour, parts, epoch, now_ms)
                outcomes = read_outcomes(segment)
        if beside:
            forget_quarantine(disk, folder, hour, beside)
    except BaseException:
        segment.close()
        raise
    return segment, outcomes


def read_outcomes(
    segment: Segment, until: int | None = None, give_way: Callable[[], None] = lambda: None
) -> OutcomeRows:
    """Decode the outcomes of an hour: all of the file, or those below the offset ``until``, where a group ends.

    ``give_way`` is called between groups, so that more urgent jobs can run.

    Raises:
        DamagedData: a group does not check, or none ends at ``until``.
    """
    scan = segment.scan(0, 0)
    batches: list[Batch] = []
    while until is None or scan.offset < until:
        group = next(scan, None)
        if group is None:
            break
        batches.extend(batch for _, batch in group.batches())
        give_way()
    if scan.reason or (until is not None and scan.offset != until):
        reason = scan.reason or f"no group ends at offset {until}, up to which it was fsynced"
        raise DamagedData(segment.path, segment.position(scan.offset), reason)
    return decode_outcomes(batches)
