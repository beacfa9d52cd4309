"""Counted: files that are gone or too short though a checkpoint counts something in them (rule P3, L5).

Invariant: a server publishes what retention removes before it removes it. So if a file is missing without that,
somebody else has taken it: that is damage, and never a loss.
"""

from collections.abc import Iterator

from delayd.disk import Disk
from delayd.errors import DamagedData, DataError
from delayd.log.checkpoint import read_checkpoint
from delayd.log.log import segment_name
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.reading.directory import Directory, Role
from delayd.reading.groups import LogMoved, file_size
from delayd.reading.schedule import ScheduleSnapshot, take_snapshot

PUBLISHED_OFFSETS = {
    Role.DELAY: {"message": "replay_offset"},
    Role.REALTIME: {"message": "indexed_offset", "pull": "pull_offset", "tally": "tally_offset"},
}


def missing_files(disk: Disk, directory: Directory) -> Iterator[DamagedData]:
    """Name each file that is gone; nothing when the checkpoint can't be read, which is reported as damage of its
    own.
    """
    yield from _missing_segments(disk, directory)
    if directory.role is not Role.DELAY:
        return
    lost = [path for path in _counted(disk, directory) if not disk.exists(path)]
    # Retention of a running server publishes a removal first, so the checkpoint is read once more.
    counted = _counted(disk, directory) if lost else {}
    for path in lost:
        if path in counted:
            yield DamagedData(path, 0, f"the file is gone, and the checkpoint counts {counted[path]}")


def need_counted(disk: Disk, directory: Directory) -> None:
    """Refuse to go on when a file is gone, or a dispatch log or message log is shorter than its checkpoint says.

    Raises:
        DamagedData: the first of them.
    """
    for error in missing_files(disk, directory):
        raise error
    for path, missing in _short(disk, directory).items():
        # A cut file stays cut; one that retention removed at this moment is not counted any more.
        if _short(disk, directory).get(path) == missing:
            size, length = missing
            what = f"the checkpoint says that {length - size} more bytes are there"
            raise DamagedData(path, size + FILE_HEADER_BYTES, what)


def _short(disk: Disk, directory: Directory) -> dict[str, tuple[int, int]]:
    """Files that are shorter than the checkpoint counts, by path: their bytes of groups, and the counted ones."""
    if directory.role is Role.DELAY:
        snapshot = take_snapshot(disk, directory)
        ends = {dispatch_path(directory.path, hour): end for hour, end in _ends(snapshot).items()}
    else:
        published = read_checkpoint(disk, directory.path, directory.log_id) or {}
        ends = {}
        for log, name in PUBLISHED_OFFSETS[directory.role].items():
            offset, names = published.get(name, 0), _log_names(disk, f"{directory.path}/{log}")
            if names and isinstance(offset, int):
                ends[f"{directory.path}/{log}/{names[-1]}"] = offset - int(names[-1].removesuffix(".log"))
    found: dict[str, tuple[int, int]] = {}
    for path, end in ends.items():
        try:
            size = file_size(disk, path)
        except LogMoved:
            continue
        if size < end:
            found[path] = size, end
    return found


def _ends(snapshot: ScheduleSnapshot) -> dict[int, int]:
    """The published ends of dispatch logs whose hours retention does not remove."""
    hours = snapshot.hours
    return {hour: end for hour, end in snapshot.outcome_ends.items() if not (hour in hours and hours[hour].removed)}


def _missing_segments(disk: Disk, directory: Directory) -> Iterator[DamagedData]:
    """Logs that lack the segment with what the checkpoint counts, or an earlier segment that should be kept."""
    logs = PUBLISHED_OFFSETS[directory.role]
    before = {log: _log_names(disk, f"{directory.path}/{log}") for log in logs}
    try:
        published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    except DataError:
        return
    keep_from = published.get("keep_from")
    for log, name in logs.items():
        # The names were listed before the checkpoint was read, so the checkpoint knows of each segment that was removed
        # by then.
        offset, folder, names = published.get(name, 0), f"{directory.path}/{log}", before[log]
        if not isinstance(offset, int) or not offset:
            continue
        first = int(names[0].removesuffix(".log")) if names else None
        if first is None or first > offset:
            what = f"the segment with offset {offset} is gone, up to which its checkpoint counts"
            yield DamagedData(folder, 0, what)
        elif log == "message" and isinstance(keep_from, int) and first > keep_from:
            what = f"the log begins at offset {first}, and its server has removed nothing from {keep_from} on"
            yield DamagedData(f"{folder}/{segment_name(first)}", 0, what)


def _counted(disk: Disk, directory: Directory) -> dict[str, str]:
    """The files in which the checkpoint counts something, by path, with what it counts."""
    try:
        snapshot = take_snapshot(disk, directory)
    except DataError:
        return {}
    counted: dict[str, str] = {}
    kept = {hour: each for hour, each in snapshot.hours.items() if not each.removed}
    for hour, each in kept.items():
        if each.length:
            counted[schedule_path(directory.path, hour)] = f"{each.rows:,} messages in it"
        if each.sealed:
            counted[dispatch_path(directory.path, hour)] = f"the outcomes of {each.rows:,} messages in it"
    for hour, length in _ends(snapshot).items():
        if length:
            counted.setdefault(dispatch_path(directory.path, hour), f"{length:,} bytes in it")
    if snapshot.word.seals or any(each.sealed for each in snapshot.hours.values()):
        folder = f"{directory.path}/seal"
        counted[f"{folder}/{segment_name(0)}"] = "sealed hours"
    return counted


def _log_names(disk: Disk, folder: str) -> list[str]:
    return [name for name in disk.list_folder(folder) if name.endswith(".log")]
