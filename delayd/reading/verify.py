"""Verify: checks every byte of a data directory's files, or of single files, against its checksums.

Invariant: damage in one file is reported with path and position, and does not keep the others from being read.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from delayd.disk import Disk, RealDisk, open_named
from delayd.errors import BadArgument, DamagedData, DamagedValue, DataError
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_checkpoint
from delayd.log.key_run import FOLDER as KEYS_FOLDER
from delayd.log.key_run import STATE_KEY as KEYS_KEY
from delayd.log.key_run import KnownRuns, read_run_file, run_path
from delayd.log.proof import decided_behind, pulled_behind
from delayd.log.quota import NO_LIMITS, Limits, decode_limits, quota_key
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, UnfinishedFile, open_segment
from delayd.log.tally import FOLDER, covered
from delayd.place import MARKER
from delayd.reading.acceptances import read_acceptances
from delayd.reading.consumption import wrong_entries
from delayd.reading.directory import MESSAGE_KINDS, Directory, Role, need_log_file, open_any, server_runs
from delayd.reading.groups import LogMoved, TornTail, file_size
from delayd.reading.schedule import BESIDE_SUFFIX, beside_path
from delayd.reading.sides import read_held, segment_differs
from delayd.reading.verify_file import ALONE, FileReport, Place, State, damage_report, damaged_end, verify_file
from delayd.reading.word import log_names, missing_files, published_ends, take_snapshot
from delayd.state import LMDB_FILE, check_pairs, check_stored, read_state_file
from delayd.state_file import Pair, read_pairs

STATE_KIND = "state"
ACCEPTANCE_KIND = "acceptance"
LOGS = {
    Role.DELAY: {
        "message": FileKind.MESSAGE,
        "schedule": FileKind.SCHEDULE,
        "dispatch": FileKind.DISPATCH,
        "quarantine": FileKind.DISPATCH,
        "seal": FileKind.SEAL,
        KEYS_FOLDER: FileKind.KEYS,
    },
    Role.REALTIME: {
        "message": FileKind.REALTIME,
        "consume": FileKind.CONSUME,
        "pull": FileKind.PULL,
        "tally": FileKind.TALLY,
        "index": FileKind.INDEX,
    },
}
# The other folders hold a folder for each day or subject.
ONE_FOLDER = ("message", "pull", "seal", "quarantine", "tally", "index", KEYS_FOLDER)
INNER_LOGS = ("schedule", "dispatch", "consume")
Progress = Callable[[int, int], None]  # Files read, files in all.


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All files, by path or in the order in which they were named."""

    files: tuple[FileReport, ...]

    @property
    def damaged(self) -> tuple[FileReport, ...]:
        """The files with damage."""
        return tuple(file for file in self.files if file.state is State.DAMAGED)

    @property
    def torn(self) -> tuple[TornTail, ...]:
        """Tails of appends that are under way or that a crash cut short: recovery cuts them off."""
        return tuple(file.torn for file in self.files if file.torn is not None)

    @property
    def sound(self) -> bool:
        """Whether no file is damaged."""
        return not self.damaged


class _Home(NamedTuple):
    """A server's directory; ``log_id`` is None when no file in it tells.

    ``durable`` holds, by path, the offsets up to which the checkpoint file says that a log was fsynced (rule L5).
    """

    path: str
    role: Role
    log_id: int | None
    durable: dict[str, int]

    @property
    def logs(self) -> dict[str, FileKind]:
        """The logs in its folders, and their kinds."""
        return LOGS[self.role]


def verify_directory(data: str, *, progress: Progress | None = None, disk: Disk | None = None) -> VerifyReport:
    """Read every file of the servers in ``data``, live, stopped or copied; nothing is changed.

    Args:
        data: the directory that `delayd up --data` was given, or one server's.
        progress: called with the files read and all files.
        disk: where ``data`` is.

    Raises:
        BadArgument: there is nothing to verify.
    """
    disk = disk or RealDisk()
    places: list[Place] = []
    gone: list[FileReport] = []
    states: list[FileReport] = []
    missing: list[FileReport] = []
    accepted: list[FileReport] = []
    homes: list[_Home] = []
    for path in _home_paths(disk, data):
        home = _read_home(disk, path)
        homes.append(home)
        own = list(_places(disk, home))
        places += own
        kinds = {place.kind for place in own}
        later = {kind for log, kind in home.logs.items() if log in INNER_LOGS}
        if home.logs["message"] not in kinds and kinds & later:
            error = DamagedData(f"{path}/message", 0, "the message log is gone, other logs are there")
            gone.append(damage_report(error.path, home.logs["message"].name.lower(), error))
        missing += _missing(disk, home)
        accepted += _acceptances(disk, home)
        states += _state(disk, path)
    if not places:
        raise BadArgument(f"{data} holds no messages of delayd; give the directory that `delayd up --data` was given")
    states += _state(disk, f"{data.rstrip('/')}/meta")
    files = list(_verify(disk, places, progress, chained=True))
    found = list(_with_proofs(disk, homes, _with_wrong_entries(disk, homes, files)))
    tallied = [report for home in homes for report in _tallied(disk, home, found)]
    return VerifyReport((*gone, *found, *tallied, *missing, *accepted, *states))


def _with_wrong_entries(disk: Disk, homes: Sequence[_Home], files: Sequence[FileReport]) -> Iterator[FileReport]:
    """The reports, with the entries of consume logs that differ from the message logs that they are derived from."""
    wrong: dict[str, DamagedData] = {}
    for home in homes:
        if home.role is Role.REALTIME and home.log_id is not None:
            wrong |= {error.path: error for error in wrong_entries(disk, Directory(home.path, home.role, home.log_id))}
    for file in files:
        error = wrong.get(file.path)
        if error is None or file.state is State.DAMAGED:
            yield file
        else:
            yield damage_report(file.path, file.kind, error, file.size_bytes)


def _with_proofs(disk: Disk, homes: Sequence[_Home], files: Iterable[FileReport]) -> Iterator[FileReport]:
    """The reports; the end of a message log is damage where a later fact names a message behind it (rule L5)."""
    by_folder = {f"{os.path.abspath(home.path)}/message": home for home in homes}
    for file in files:
        home = by_folder.get(os.path.dirname(os.path.abspath(file.path)))
        error = None if home is None else _missing_behind(disk, home, file)
        yield file if error is None else damaged_end(file, error)


def _missing_behind(disk: Disk, home: _Home, file: FileReport) -> DamagedData | None:
    """The damage at the end of a message log, which looks like a torn tail, or like all that was ever written; None
    where nothing proves it.
    """
    folder, _, name = file.path.rpartition("/")
    if home.log_id is None or file.state not in (State.OK, State.TORN) or name != log_names(disk, folder)[-1]:
        return None
    torn = file.torn or TornTail(file.path, file.size_bytes, 0, "the log ends there")
    try:
        segment = open_segment(disk, file.path, home.logs["message"], home.log_id, write=False)
        try:
            end = segment.base_offset + torn.position - FILE_HEADER_BYTES
            why = _why_durable(disk, home, home.log_id, end)
            # A running server may have finished this append, or begun a new file, before it wrote the fact: so the end
            # is read once more, after the fact.
            if why and next(segment.scan(end), None) is None and name == log_names(disk, folder)[-1]:
                return DamagedData(file.path, torn.position, f"{torn.reason}, and {why}")
        finally:
            segment.close()
    except (DataError, UnfinishedFile, FileNotFoundError):
        pass  # A file that does not check or can't be read has a report of its own.
    return None


def _why_durable(disk: Disk, home: _Home, log_id: int, end: int) -> str:
    if home.role is Role.DELAY:
        return decided_behind(disk, home.path, log_id, end)
    stored = _stored(disk, home.path)
    if stored is None:
        return ""
    file, pairs, _ = stored

    def scan(prefix: bytes, damaged: list[DamagedValue]) -> list[tuple[bytes, bytes]]:
        return check_pairs(file, [pair[:2] for pair in pairs if pair.key.startswith(prefix)], damaged)

    return pulled_behind(disk, scan, home.path, log_id, end)


def verify_files(paths: Sequence[str], *, progress: Progress | None = None, disk: Disk | None = None) -> VerifyReport:
    """Read single files, each on its own; what the directory around a file says about it is taken into account.

    Args:
        paths: log files and checkpoints, in a server's directory or anywhere else.
        progress: called with the files read and all files.
        disk: where they are.

    Raises:
        BadArgument: one of them is neither.
    """
    disk = disk or RealDisk()
    for path in paths:
        if os.path.basename(path) != CHECKPOINT:
            need_log_file(disk, path)
    homes: dict[str, _Home] = {}
    places = [_place_of(disk, path, homes) for path in paths]
    files = list(_verify(disk, places, progress, chained=False))
    return VerifyReport(tuple(_with_proofs(disk, list(homes.values()), files)))


def stored_quota(directory: Directory, subject: bytes) -> Limits:
    """The quota of a subject, from the state of a server that does not run; all None when it has none.

    The state of a running server changes under its reader (rule L6).

    Raises:
        DamagedData: the state, or this value, does not check.
        FileNotFoundError: there is no state, for example in a copy that left it out.
    """
    path, wanted = f"{directory.path}/state.lmdb/{LMDB_FILE}", quota_key(subject)
    for pair in read_state_file(path):
        if pair.key == wanted:
            return decode_limits(check_stored(path, *pair))
    return NO_LIMITS


def _verify(disk: Disk, places: Sequence[Place], progress: Progress | None, *, chained: bool) -> Iterator[FileReport]:
    before, link = "", None
    for done, place in enumerate(places, 1):
        folder = place.path.rpartition("/")[0]
        found = verify_file(disk, place, link if chained and folder == before else None)
        before, link = folder, found[1] if found else None
        if found is not None:
            yield found[0]
        if progress is not None:
            progress(done, len(places))


def _home_paths(disk: Disk, data: str) -> list[str]:
    data = data.rstrip("/") or "/"
    names = disk.list_folder(data)
    if any(log in names for log in (*ONE_FOLDER, *INNER_LOGS)):
        return [data]
    paths = [f"{data}/{name}" for name in names if name.startswith(tuple(Role))]
    # A file of such a name, as an operator's own log may have, is not a server's directory.
    kept = (*ONE_FOLDER, *INNER_LOGS, CHECKPOINT)
    return [path for path in paths if any(disk.exists(f"{path}/{name}") for name in kept)]


def _read_home(disk: Disk, path: str) -> _Home:
    directory = _identify(disk, path)
    if directory is None:
        return _Home(path, _role_by_folders(disk, path), None, {})
    return _Home(path, directory.role, directory.log_id, _published_ends(disk, directory))


def _identify(disk: Disk, path: str) -> Directory | None:
    """Find out whose directory it is, from the first file that tells: damage must not keep the other files from being
    read.
    """
    for name in log_names(disk, f"{path}/message"):
        try:
            segment = open_any(disk, f"{path}/message/{name}")
        except (UnfinishedFile, FileNotFoundError, DataError):
            continue
        segment.close()
        role = MESSAGE_KINDS.get(FileKind(segment.header.kind))
        if role is not None:
            return Directory(path, role, segment.header.log_id)
    try:
        log_id = (read_checkpoint(disk, path) or {}).get("log_id")
    except DataError:
        return None
    return Directory(path, _role_by_folders(disk, path), log_id) if isinstance(log_id, int) else None


def _role_by_folders(disk: Disk, path: str) -> Role:
    names = disk.list_folder(path)
    return Role.REALTIME if "consume" in names or "pull" in names else Role.DELAY


def _missing(disk: Disk, home: _Home) -> Iterator[FileReport]:
    """Files that the checkpoint counts and that are missing."""
    if home.log_id is None:
        return
    directory = Directory(home.path, home.role, home.log_id)
    for error in missing_files(disk, directory):
        yield damage_report(error.path, error.path[len(home.path) + 1 :].partition("/")[0], error)


def _acceptances(disk: Disk, home: _Home) -> Iterator[FileReport]:
    """The words of operators on findings, each in a file of its own."""
    if home.role is not Role.DELAY or home.log_id is None:
        return
    for each in read_acceptances(disk, Directory(home.path, home.role, home.log_id)):
        if each.error is not None:
            yield damage_report(each.path, ACCEPTANCE_KIND, each.error)
        else:
            yield FileReport(each.path, ACCEPTANCE_KIND, State.OK, each.size_bytes, rows=1)


def _tallied(disk: Disk, home: _Home, found: Sequence[FileReport]) -> Iterator[FileReport]:
    """Entries of a tally log that differ from their segment's bytes, and segments without entries."""
    if home.role is not Role.REALTIME or home.log_id is None:
        return
    try:
        held = read_held(disk, Directory(home.path, home.role, home.log_id), [])
    except (DataError, LogMoved):
        return  # Its damaged files have reports of their own.
    folder, path = f"{home.path}/message/", f"{home.path}/{FOLDER}"
    kind = FileKind.TALLY.name.lower()
    for report in found:
        if report.tallies is None or not report.path.startswith(folder):
            continue
        begin = report.tallies["begin"][0]
        entries = held.entries[held.entries["begin"] == begin]
        if not len(entries):
            continue  # The segment is still written to, or was closed a moment ago.
        what = segment_differs(entries, report.tallies)
        if (entries["end"] != report.tallies["end"][0]).any():
            what = "it ends elsewhere"
        if what:
            error = DamagedData(path, 0, f"the entries of the segment at offset {begin} do not agree with it: {what}")
            yield damage_report(error.path, kind, error)
    for (_, end), (begin, _) in pairwise(covered(held.entries)):
        if begin < end:
            error = DamagedData(path, 0, f"two entries speak of the messages from offset {begin} on")
            yield damage_report(error.path, kind, error)


def _stored(disk: Disk, path: str) -> tuple[str, list[Pair], int] | None:
    """The file of a stopped server's state, its pairs and its size; None when there is no state, or when it can't be
    read here because its server runs (rule L6).

    Raises:
        DamagedData, NewerFormat: the file is gone or does not check.
    """
    folder = f"{path}/state.lmdb"
    file = f"{folder}/{LMDB_FILE}"
    if not disk.exists(folder) or server_runs(path):
        return None
    if not disk.exists(file):
        raise DamagedData(file, 0, "the file is gone; nothing else says who this server is")
    opened = open_named(disk, file)
    try:
        size = opened.size()
        return file, read_pairs(file, opened.pread, size) if size else [], size
    finally:
        opened.close()


def _state(disk: Disk, path: str) -> Iterator[FileReport]:
    """The state of a stopped server, value by value."""
    try:
        stored = _stored(disk, path)
        if stored is None:
            return
        file, pairs, size = stored
        damaged = [found for pair in pairs if (found := _value_error(file, pair)) is not None]
        for value in damaged:
            yield damage_report(file, STATE_KIND, value, size)
        if (
            not damaged
            and not pairs
            and any(disk.exists(f"{path}/{name}") for name in (*ONE_FOLDER, CHECKPOINT, MARKER))
        ):
            # A start leaves it so when it found no state and refused to go on.
            yield damage_report(file, STATE_KIND, DamagedData(file, 0, "it holds nothing, and this server has lived"))
        elif not damaged:
            yield FileReport(file, STATE_KIND, State.OK, size, rows=len(pairs))
        for pair in pairs:
            if pair.key == KEYS_KEY and not damaged:
                yield from _named_runs(disk, path, KnownRuns.decode(check_stored(file, *pair)))
    except DataError as error:
        yield damage_report(f"{path}/state.lmdb/{LMDB_FILE}", STATE_KIND, error)


def _named_runs(disk: Disk, path: str, known: KnownRuns) -> Iterator[FileReport]:
    """Runs of keys that are not what a state says of them."""
    for name in known.runs:
        place = run_path(path, name.number)
        what = ""
        try:
            file = open_named(disk, place)
            try:
                if read_run_file(place, file, None).name != name:
                    what = "the state names another run"
            finally:
                file.close()
        except FileNotFoundError:
            what = "the state names this file, and it is gone"
        except UnfinishedFile:
            what = "the state names this file, and its writing did not finish"
        except DataError:
            continue  # The file has a report of its own.
        if what:
            yield damage_report(place, FileKind.KEYS.name.lower(), DamagedData(place, 0, what))


def _value_error(path: str, pair: Pair) -> DamagedValue | None:
    try:
        check_stored(path, pair.key, pair.stored, pair.position)
    except DamagedValue as error:
        return error
    return None


def _published_ends(disk: Disk, directory: Directory) -> dict[str, int]:
    """The offsets up to which the checkpoint calls files durable, by path; nothing when it can't be read, which is
    reported.
    """
    try:
        logs = published_ends(disk, directory)
        # The message log may be damaged, so what the checkpoint says of other files must not depend on it.
        snapshot = take_snapshot(disk, directory, tail=False) if directory.role == Role.DELAY else None
    except DataError:
        return {}
    filed = snapshot.hours if snapshot else {}
    ends = {schedule_path(directory.path, hour): each.length for hour, each in filed.items()}
    if snapshot:
        ends |= {beside_path(directory.path, hour): each.length for hour, each in snapshot.word.beside.items()}
    if snapshot:
        ends |= {dispatch_path(directory.path, hour): end for hour, end in snapshot.outcome_ends.items()}
    # An hour is sealed when all of its outcomes are durable, and gets none after that.
    sealed = [dispatch_path(directory.path, hour) for hour, each in filed.items() if each.sealed]
    ends |= {path: _size(disk, path) for path in sealed}
    for path, end in logs.items():
        # Segments before the last one are whole in any case.
        if end > 0:
            ends[path] = end + int(path.rpartition("/")[2].removesuffix(".log"))
    return ends


def _size(disk: Disk, path: str) -> int:
    """Bytes of groups in a file; 0 when retention removed it."""
    try:
        return file_size(disk, path)
    except LogMoved:
        return 0


def _places(disk: Disk, home: _Home) -> Iterator[Place]:
    if disk.exists(f"{home.path}/{CHECKPOINT}"):
        yield Place(f"{home.path}/{CHECKPOINT}", FileKind.CHECKPOINT, home.log_id)
    for log, kind in home.logs.items():
        folder = f"{home.path}/{log}"
        folders = [folder] if log in ONE_FOLDER else [f"{folder}/{inner}" for inner in disk.list_folder(folder)]
        for inner in folders:
            names = log_names(disk, inner)
            for name in names:
                path = f"{inner}/{name}"
                own = _kind_of(kind, name)
                last = own in ALONE or name == names[-1]
                yield Place(path, own, home.log_id, True, last, home.durable.get(path, 0))


def _place_of(disk: Disk, path: str, homes: dict[str, _Home]) -> Place:
    """A single file with what the directory around it says, if it lies where a server keeps such a file."""
    full = os.path.abspath(path)
    folder, _, name = full.rpartition("/")
    above, _, log = folder.rpartition("/")
    if name == CHECKPOINT:
        above, log = folder, CHECKPOINT
    elif log not in ONE_FOLDER:
        above, _, log = above.rpartition("/")
    if log not in (*ONE_FOLDER, *INNER_LOGS, CHECKPOINT):
        return Place(path)
    home = homes.get(above) or _read_home(disk, above)
    homes[above] = home
    if log == CHECKPOINT:
        return Place(path, FileKind.CHECKPOINT, home.log_id)
    if home.log_id is None or log not in home.logs:
        return Place(path)
    kind = _kind_of(home.logs[log], name)
    last = kind in ALONE or not any(other > name for other in log_names(disk, folder))
    return Place(path, kind, home.log_id, True, last, home.durable.get(full, 0))


def _kind_of(kind: FileKind, name: str) -> FileKind:
    """The kind of a file in a folder: files beside damaged ones hold outcomes, or filed rows if the name says so."""
    return FileKind.SCHEDULE if name.endswith(BESIDE_SUFFIX) else kind
