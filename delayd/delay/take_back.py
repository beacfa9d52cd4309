"""Taking back: what a start does with files that were set aside in an earlier life (rules L5, L10).

Each step may be repeated: a start that dies leaves what the next one needs.

1. A schedule log that is whole again: the groups of the file beside it are appended to it, as they are.
2. A schedule log that an operator gave up, and that is still damaged: its groups that check are written to a new file
   first. The damaged one is kept aside.
3. A dispatch log that is whole again: the outcomes of the files beside it are appended to it.
4. A dispatch log that an operator gave up: those of its files that don't check are kept aside. Each row that may have
   been handed over without anybody knowing becomes IN_DOUBT, so that it is never sent twice.

An example of 4: rows 1 to 6 are filed. The server sent 1, 2 and 3, and the log with their outcomes was damaged. It sent
4 then, whose outcome is in the file beside it; 5 and 6 are in the wheel when an operator gives the log up. The word
says: below 7, pending 5 and 6. The start finds the outcome of 4, loads 5 and 6, and puts 1, 2 and 3 in doubt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.batch.sequences import among
from delayd.delay.books.dispatch_logs import open_dispatch_log, read_outcomes
from delayd.delay.books.outcomes import reopen_dispatch_log
from delayd.delay.filing.hour_table import BESIDE_PREFIX, HourFile, hour_key, hour_put
from delayd.delay.filing.schedule_log import scan_groups
from delayd.delay.filing.words import GivenUp, salvage_key
from delayd.delay.kept import KeptState
from delayd.delay.quarantine import outcomes_beside, quarantine_path, schedule_beside_path
from delayd.delay.rows import Rows
from delayd.delay.state_values import DROPPED_KEY, encode_dropped
from delayd.errors import DamagedData, DiskFull
from delayd.hours import hour_name
from delayd.log.dispatch import OutcomeRows
from delayd.log.group import CommitGroup, GroupKind, NewGroup
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, create_segment, open_segment
from delayd.machine.identity import Site

log = logging.getLogger(__name__)


# Schedule logs.


def check_schedule(site: Site, hour: int, file: HourFile, beside: HourFile) -> None:
    """Read an hour's schedule log and the file beside it, on the worker thread.

    Raises:
        DamagedData, Shortage: one of them does not check or can't be read.
        DiskFull: there is no space to append the one to the other.
    """
    for path, counted in _files(site, hour, file, beside):
        for _ in scan_groups(site.disk, path, site.log_id, hour, counted):
            site.worker.give_way()
    if beside.length and site.disk.free_bytes(site.folder) < 2 * beside.length:
        raise DiskFull(schedule_path(site.folder, hour))


def take_back_schedules(site: Site, kept: KeptState) -> dict[int, DamagedData]:
    """Join the schedule logs that are whole again, or given up, with the files beside them; return the damage of the
    other hours that have such a file or word.
    """
    damaged: dict[int, DamagedData] = {}
    for hour in sorted({*kept.beside.rows["hour"].tolist(), *kept.salvage}):
        try:
            _join(site, hour, kept)
        except DamagedData as damage:
            damaged[hour] = damage
        except DiskFull as full:
            damaged[hour] = DamagedData(full.path, 0, f"{full.message}; rows beside it wait for that")
    return damaged


def _files(site: Site, hour: int, file: HourFile, beside: HourFile) -> list[tuple[str, HourFile]]:
    """The files of an hour that have rows."""
    paths = (schedule_path(site.folder, hour), schedule_beside_path(site.folder, hour))
    return [(path, counted) for path, counted in zip(paths, (file, beside), strict=True) if counted.length]


def _join(site: Site, hour: int, kept: KeptState) -> None:
    file, beside, puts = kept.hours.get(hour), kept.beside.get(hour), list[tuple[bytes, bytes]]()
    dropped = kept.dropped
    for path, counted in _files(site, hour, file, beside):
        try:
            for _ in scan_groups(site.disk, path, site.log_id, hour, counted):
                pass
        except DamagedData:
            if hour not in kept.salvage or path != schedule_path(site.folder, hour):
                raise
            file = _salvage(site, hour, counted)
            lost = counted.rows - file.rows
            dropped = dropped | {hour: dropped.get(hour, 0) + lost}
            puts.append((DROPPED_KEY, msgpack.packb(encode_dropped(dropped))))
            log.critical("rows_lost hour=%s rows=%d", hour_name(hour), lost)
    if beside.length:
        groups = scan_groups(site.disk, schedule_beside_path(site.folder, hour), site.log_id, hour, beside)
        file = _append(site, hour, file, groups)
    removes = [hour_key(hour, BESIDE_PREFIX), salvage_key(hour)]
    if file.length:
        site.state.commit([hour_put(hour, file), *puts], removes)
        kept.hours.set(hour, file)
    else:
        site.state.commit(puts, [hour_key(hour), *removes])
        kept.hours.remove([hour])
    kept.beside.remove([hour])
    kept.dropped = dropped
    if beside.length:
        site.disk.remove(schedule_beside_path(site.folder, hour))
        site.disk.sync_folder(f"{site.folder}/quarantine")
    log.info("schedule_log_taken_back hour=%s rows=%d", hour_name(hour), file.rows)


def _salvage(site: Site, hour: int, file: HourFile) -> HourFile:
    """Put the groups of a damaged schedule log that still check in its place; the damaged file is kept aside."""
    path = schedule_path(site.folder, hour)
    kept = HourFile(flags=file.flags)
    try:
        for group in scan_groups(site.disk, path, site.log_id, hour, file):
            kept = HourFile(group.end, kept.rows + group.header.row_count, group.header.header_crc32c, file.flags)
    except DamagedData as error:
        # Damage to the file's header makes all of the file unusable.
        if error.position <= FILE_HEADER_BYTES:
            kept = HourFile()
    aside = _keep_aside(site, path, f"{hour_name(hour)}.schedule.dropped")
    if not kept.length:
        return HourFile()
    groups = scan_groups(site.disk, aside, site.log_id, hour, kept)
    return _append(site, hour, HourFile(flags=file.flags), groups)


def _append(site: Site, hour: int, file: HourFile, groups: Iterator[CommitGroup]) -> HourFile:
    """Append groups as they are to an hour's schedule log, behind the bytes that ``file`` counts; durable on return."""
    path, disk = schedule_path(site.folder, hour), site.disk
    if file.length:
        segment = open_segment(disk, path, FileKind.SCHEDULE, site.log_id, write=True)
        segment.end = segment.durable = file.length
        segment.crc32c = file.last_crc32c
        segment.file.truncate(segment.position(file.length))
    else:
        disk.make_folder(path.rpartition("/")[0])
        if disk.exists(path):
            disk.remove(path)
        header = FileHeader(FileKind.SCHEDULE, site.log_id, 0, hour, site.clock.now_ms())
        segment = create_segment(disk, path, header)
    rows = file.rows
    try:
        for group in groups:
            batches = [batch.buffer for _, batch in group.batches()]
            count, at_ms = group.header.row_count, group.header.appended_at_ms
            segment.append([NewGroup(GroupKind.DATA, batches, site.epoch, at_ms, 0, count)])
            rows += count
        segment.flush()
    finally:
        segment.close()
    return HourFile(segment.end, rows, segment.crc32c, file.flags)


# Dispatch logs.


def take_back_outcomes(site: Site, hour: int, known: int) -> tuple[Segment, OutcomeRows] | None:
    """Open an hour's dispatch log, with what came to be known while it was damaged; None when it holds nothing yet.

    Raises:
        DamagedData, Shortage: it does not check or can't be read; all up to the offset ``known`` was durable.
    """
    beside = outcomes_beside(site.disk, site.folder).get(hour, [])
    return open_dispatch_log(site.disk, site.folder, site.log_id, site.epoch, hour, known, beside, site.clock.now_ms())


def give_up_outcomes(site: Site, hour: int) -> tuple[Segment, OutcomeRows]:
    """Open an hour's dispatch log that was given up: those of its files that don't check are kept aside."""
    path = dispatch_path(site.folder, hour)
    if not _checks(site, path, hour):
        _keep_aside(site, path, f"{hour_name(hour)}.dispatch.dropped")
    for number in outcomes_beside(site.disk, site.folder).get(hour, []):
        beside = quarantine_path(site.folder, hour, number)
        if not _checks(site, beside, hour):
            _keep_aside(site, beside, f"{hour_name(hour)}.{number}.dispatch.dropped")
    if not site.disk.exists(path):
        site.disk.make_folder(path.rpartition("/")[0])
        header = FileHeader(FileKind.DISPATCH, site.log_id, 0, hour, site.clock.now_ms())
        create_segment(site.disk, path, header).close()
    opened = take_back_outcomes(site, hour, 0)
    assert opened is not None, "it has its header"
    return opened


def _checks(site: Site, path: str, hour: int) -> bool:
    try:
        segment = reopen_dispatch_log(site.disk, path, site.log_id, 0, hour)
        if segment is None:
            return False  # A crash while the file was made left no header; opening removed it.
        try:
            read_outcomes(segment)
        finally:
            segment.close()
    except DamagedData:
        return False
    return True


def doubtful(rows: Rows, word: GivenUp) -> NDArray[np.bool_]:
    """Which rows without an outcome may have been handed over without anybody knowing."""
    return (rows["sequence"] < np.uint64(word.below)) & ~among(rows["sequence"], word.pending)


def _keep_aside(site: Site, path: str, name: str) -> str:
    """Put a file that an operator gave up aside, in case somebody can read it after all; return where it is."""
    target = f"{site.folder}/quarantine/{name}"
    if site.disk.exists(path):
        site.disk.make_folder(f"{site.folder}/quarantine")
        site.disk.rename(path, target)
        for each in (path, target):
            site.disk.sync_folder(each.rpartition("/")[0])
    return target
