"""Backup: copies the directories of running or stopped servers, and puts such copies back (docs/backup.md).

nothing ──▶ unfinished (journal, and no state under its name) ──▶ whole (manifest) ──▶ unfinished (a later call)
empty ──▶ unfinished (journal; the state has another name, so no server starts) ──▶ restored

Invariants. The manifest ``backup.json`` is written last and removed first, so a folder that has one is a whole backup;
while a backup is unfinished no server starts on it, because the file of its state has another name. A file counts as
copied when it is durable; its line in the journal ``backup.unfinished`` is written after that, and a line that does not
check says nothing. Nothing is put over files that are not of this restore, and nothing into a directory that a server
uses.

Logs only grow. So a file that an earlier call copied goes on where its copy ends, and a copy that is as long as it is
to be is not read again. Files of a running server are copied up to the bytes of its cut (delayd.net.cut), and schedule
logs up to those that the state counts. Left out is what a start makes again: the folder ``keys``, and
what belongs to one process or one place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import msgpack
import numpy as np
from crc32c import crc32c

from delayd.errors import BadArgument, DamagedData, DamagedValue, DataError, NewerFormat, Unreadable
from delayd.hours import hour_name
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_checkpoint
from delayd.log.hour import HOUR_ROW, REMOVED, decode_hours, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.machine.disk import Disk, Lock, open_named
from delayd.machine.identity import LOCK
from delayd.machine.state import LMDB_FILE, check_stored, read_pairs
from delayd.reading.findings import FOLDER as ACCEPTANCES
from delayd.reading.findings import acceptance_files
from delayd.reading.proofs import FOLDER as PROOFS
from delayd.reading.proofs import proof_files

NAME = "backup.json"
FORMAT = 1
_MARK = b"\ncrc32c "
UNFINISHED = "backup.unfinished"  # The journal of a backup or a restore that is under way.
PIECE_BYTES = 1 << 20
UNSYNCED_BYTES_MAX = 256 << 20  # What a power cut may take back of a backup; more would make one sync last for seconds.
UNSYNCED_FILES_MAX = 512
Progress = Callable[[int], None]
"""Called with the bytes of each piece."""
STATE = f"state.lmdb/{LMDB_FILE}"
HOUR_PREFIX = b"hour/"
FLAT_LOGS = ("message", "pull", "seal", "quarantine")
DEEP_LOGS = ("dispatch", "consume")  # A folder for each day or subject.
ROLES = ("delay", "realtime", "meta")  # In the order in which running servers are cut.
BACKUP_LOCK = "backup.lock"
STAGED = ".new"  # Behind the names of files that get their own name at the end.
CUTS_MAX = 5  # Retention removes files once in minutes; a backup that loses files so often has another reason.
HEAD = "."  # Stands for the backup itself in the journal of a restore.


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """One copied file: its path below the folder, its bytes, and CRC32C over them.

    ``source`` is device and inode of the file that it was copied from: a file that takes its place has others.
    """

    path: str
    size_bytes: int
    crc32c: int
    source: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the backup holds of one server. Offsets, sequences and hours are 0 or empty where a role has none."""

    role: str
    log_id: int  # 0 of a server that had no messages yet, and of meta.
    epoch: int  # As the last checkpoint says.
    running: bool  # Whether it was cut while it ran.
    cut_ms: int  # The moment that the files are of.
    offset: int  # Up to where the last checkpoint counts the message log: what a start need not replay.
    end: int  # Where the message log ends.
    next_sequence: int  # Behind the last message that the checkpoint counts.
    hours: int  # How many hours have a schedule log.
    first_hour: str
    last_hour: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole backup."""

    made_at_ms: int
    version: str  # The one of delayd.
    at_one_instant: bool  # Whether the servers fit each other, so that nothing is lost or doubled between them.
    servers: tuple[Held, ...]
    damaged: tuple[str, ...]  # Sentences about files that did not check where they were copied from.
    entries: tuple[CopiedFile, ...]
    moment_ms: int = 0  # When all servers of the cluster were cut together; 0 when these were cut alone.

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


def encode(manifest: Manifest) -> bytes:
    """The bytes of the file: JSON, one file a line, and a last line with CRC32C over all before it."""
    fields = asdict(manifest)
    entries = fields.pop("entries")
    head = json.dumps({"format": FORMAT, **fields, "files": len(entries)})
    text = "\n".join((head, *map(json.dumps, entries))).encode()
    return text + _MARK + f"{crc32c(text):08x}\n".encode()


def decode(path: str, data: bytes) -> Manifest:
    """Read the bytes of the file.

    Raises:
        DamagedData: they do not check.
        NewerFormat: a newer delayd wrote them.
    """
    text, mark, check = data.rpartition(_MARK)
    if not mark or check.strip() != f"{crc32c(text):08x}".encode():
        raise DamagedData(path, 0, "its checksum differs")
    head, *lines = map(json.loads, text.splitlines())
    if head.pop("format") > FORMAT:
        raise NewerFormat(path, FORMAT + 1, FORMAT)
    if head.pop("files") != len(lines):
        raise DamagedData(path, 0, "it lists another number of files than it counts")
    servers = tuple(Held(**each) for each in head.pop("servers"))
    entries = tuple(CopiedFile(**line) for line in lines)
    return Manifest(servers=servers, damaged=tuple(head.pop("damaged")), entries=entries, **head)


def read_manifest(disk: Disk, folder: str) -> Manifest:
    """The manifest of a backup.

    Raises:
        BadArgument: the folder is no backup, or one that is not whole.
        DamagedData, NewerFormat: see `decode`.
    """
    path = f"{folder}/{NAME}"
    if not disk.exists(path):
        if disk.exists(f"{folder}/{UNFINISHED}"):
            raise BadArgument(f"the backup in {folder} was not finished; run `delayd backup {folder}` again")
        raise BadArgument(f"{folder} holds no backup: {NAME} is missing; give the folder that `delayd backup` wrote")
    with closing(open_named(disk, path)) as file:
        return decode(path, file.pread(file.size(), 0))


def write_manifest(disk: Disk, folder: str, manifest: Manifest) -> None:
    """Write it under another name, make it durable, and give it its name; durable on return."""
    new = f"{folder}/{NAME}.new"
    if disk.exists(new):
        disk.remove(new)
    with closing(disk.open(new, create=True)) as file:
        file.pwritev([encode(manifest)], 0)
        file.sync()
    disk.rename(new, f"{folder}/{NAME}")
    disk.sync_folder(folder)


class Journal:
    """The journal of one folder; it is made if it is not there."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._path = f"{folder}/{UNFINISHED}"
        self.lines: dict[str, CopiedFile] = {}
        begun = disk.exists(self._path)  # By an earlier call.
        self._file = disk.open(self._path, write=True, create=not begun)
        if begun:
            data = self._file.pread(self._file.size(), 0)
            self.lines = {line.path: line for line in map(_decode, data.splitlines()) if line is not None}
        else:
            disk.sync_folder(folder)
        self._end = self._file.size()

    def add(self, lines: Iterable[CopiedFile]) -> None:
        """Note files that are durable; the notes themselves are durable on return."""
        data = b"\n" + b"".join(_encode(line) for line in lines)
        self._file.pwritev([data], self._end)
        self._file.sync()
        self._end += len(data)

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def remove(self) -> None:
        self._file.close()
        self._disk.remove(self._path)
        self._disk.sync_folder(self._folder)


def read_journal(disk: Disk, folder: str) -> int | None:
    """How many files an unfinished backup has; None when none is under way."""
    path = f"{folder}/{UNFINISHED}"
    if not disk.exists(path):
        return None
    with closing(open_named(disk, path)) as file:
        return sum(_decode(line) is not None for line in file.pread(file.size(), 0).splitlines())


def _encode(entry: CopiedFile) -> bytes:
    text = json.dumps([entry.path, entry.size_bytes, entry.crc32c, entry.source]).encode()
    return text + f" {crc32c(text):08x}\n".encode()


def _decode(data: bytes) -> CopiedFile | None:
    text, _, check = data.rpartition(b" ")
    if not text or check != f"{crc32c(text):08x}".encode():
        return None
    return CopiedFile(*json.loads(text))


class Copier:
    """Copies files of one disk into one folder of another; `flush` at the end."""

    def __init__(self, source: Disk, target: Disk, folder: str, journal: Journal, progress: Progress) -> None:
        self._source = source
        self._target = target
        self._folder = folder
        self._journal = journal
        self._progress = progress
        self._unsynced: list[CopiedFile] = []
        self._unsynced_bytes = 0

    def copy(self, path: str, name: str, size: int | None = None) -> tuple[CopiedFile, DataError | None]:
        """Copy the file ``path`` as ``name``, its first ``size`` bytes or all of it.

        Returns what was copied, and why that is not all: the file can't be read behind it, or is shorter.

        Raises:
            FileNotFoundError: it is gone.
            DiskFull, NotWritable: the copy can't be written.
        """
        source = self._source.file_id(path)
        if source is None:
            raise FileNotFoundError(path)
        failed: DataError | None = None
        try:
            file = open_named(self._source, path)
        except Unreadable as error:
            return CopiedFile(name, 0, 0, source), error
        try:
            wanted = file.size() if size is None else size
            known = self._journal.lines.get(name)
            copy = f"{self._folder}/{name}"
            if known is not None and (known.source != source or not self._has(copy, known, wanted)):
                known = None
            if known is not None and known.size_bytes == wanted:
                self._progress(wanted)
                return known, None
            begin, checksum = (known.size_bytes, known.crc32c) if known is not None else (0, 0)
            self._progress(begin)
            if known is None and self._target.exists(copy):
                self._target.remove(copy)
            self._target.make_folder(copy.rpartition("/")[0])
            with closing(self._target.open(copy, write=True, create=known is None)) as to:
                to.truncate(begin)
                position = begin
                while position < wanted:
                    try:
                        piece = file.pread(min(PIECE_BYTES, wanted - position), position)
                        if not piece:
                            raise DamagedData(path, position, f"the file ends {wanted - position} bytes early")
                    except DamagedData as error:
                        failed = error
                        break
                    to.pwritev([piece], position)
                    checksum = crc32c(piece, checksum)
                    position += len(piece)
                    self._progress(len(piece))
                if not self._target.reports_sync_errors:
                    to.sync()
        finally:
            file.close()
        entry = CopiedFile(name, position, checksum, source)
        if failed is None:
            self._unsynced.append(entry)
        self._unsynced_bytes += position - begin
        if self._unsynced_bytes >= UNSYNCED_BYTES_MAX or len(self._unsynced) >= UNSYNCED_FILES_MAX:
            self.flush()
        return entry, failed

    def fresh(self, path: str, name: str) -> tuple[CopiedFile, DataError | None]:
        """Copy a file that does not only grow, whatever an earlier call has copied of it."""
        self._journal.lines.pop(name, None)
        return self.copy(path, name)

    def flush(self) -> None:
        if self._target.reports_sync_errors:
            self._target.sync_filesystem(self._folder)
        else:
            for folder in sorted({entry.path.rpartition("/")[0] for entry in self._unsynced}):
                self._target.sync_folder(f"{self._folder}/{folder}" if folder else self._folder)
        if self._unsynced:
            self._journal.add(self._unsynced)
            self._journal.lines |= {entry.path: entry for entry in self._unsynced}
        self._unsynced, self._unsynced_bytes = [], 0

    def _has(self, copy: str, entry: CopiedFile, wanted: int) -> bool:
        """Whether an earlier call's copy is a beginning of what is wanted now."""
        if entry.size_bytes > wanted or not self._target.exists(copy):
            return False
        with closing(open_named(self._target, copy)) as file:
            return file.size() >= entry.size_bytes


@dataclass(frozen=True, slots=True)
class ServerSource:
    """One server's directory, for the time of a backup."""

    role: str
    folder: str
    cut_ms: int
    state: str  # Path of the file of the state: the server's own copy, or of a stopped server the file itself.
    checkpoint: str  # Path of the checkpoint file, or of the copy in the cut.
    sizes: dict[str, int] | None  # The sizes of the cut of a running server, by path below the folder.

    @property
    def running(self) -> bool:
        return self.sizes is not None


def files_of(disk: Disk, source: ServerSource, copies: Disk, state: str) -> dict[str, int | None]:
    """The files of the logs by path below the server's folder, each with the bytes to copy; None for all of it.

    ``state``, on the disk ``copies``, is a file of the state that no server has open.
    """
    # The server that runs writes neither acceptances nor proofs, so no cut fixes them; each is whole or not there.
    found: dict[str, int | None] = {f"{ACCEPTANCES}/{name}": None for name in acceptance_files(disk, source.folder)}
    found.update({f"{PROOFS}/{name}": None for name in proof_files(disk, source.folder)})
    if source.sizes is not None:
        found.update(source.sizes)
        found.update(_deep(disk, source.folder, "consume"))
        found.update(_schedule(disk, source.folder, copies, state))
    else:
        for log in FLAT_LOGS:
            found.update({f"{log}/{name}": None for name in disk.list_folder(f"{source.folder}/{log}")})
        for log in (*DEEP_LOGS, "schedule"):
            found.update(_deep(disk, source.folder, log))
    return dict(sorted(found.items()))


def _deep(disk: Disk, folder: str, log: str) -> dict[str, int | None]:
    return {
        f"{log}/{inner}/{name}": None
        for inner in disk.list_folder(f"{folder}/{log}")
        for name in disk.list_folder(f"{folder}/{log}/{inner}")
    }


def _schedule(disk: Disk, folder: str, copies: Disk, state: str) -> dict[str, int | None]:
    """The schedule logs that the state counts; what is behind the counted bytes may be cut off and written anew."""
    found: dict[str, int | None] = {}
    with closing(open_named(copies, state)) as file:
        pairs = read_pairs(state, file.pread, file.size())
    for key, stored, position in pairs:
        if not key.startswith(HOUR_PREFIX):
            continue
        hour = int.from_bytes(key[len(HOUR_PREFIX) :], "big")
        path = schedule_path(folder, hour)
        name = path.removeprefix(f"{folder}/")
        try:
            row = np.frombuffer(check_stored(state, key, stored, position), HOUR_ROW)[0]
        except DamagedValue:
            # A start has the value from elsewhere.
            if disk.exists(path):
                found[name] = None
            continue
        if int(row["length"]) and not (int(row["flags"]) & REMOVED):
            found[name] = FILE_HEADER_BYTES + int(row["length"])
    return found


Stage = Callable[[ServerSource], None]
"""Copies what a source may not have for long."""


class ServersCut(NamedTuple):
    """The servers of a backup at one moment, or at several."""

    sources: Sequence[ServerSource]
    at_one_instant: bool
    moment_ms: int = 0  # When all servers of the cluster were cut; 0 when only these were.


@dataclass(frozen=True, slots=True)
class BackupTerms:
    """What a backup asks of its surroundings."""

    cut: Callable[[Stage], ServersCut]  # Cuts or locks the servers, and calls its argument for each.
    check: Callable[[str], list[str]]  # Names the damaged files of a folder, each in a sentence.
    progress: Progress
    now_ms: int
    version: str


def take(source: Disk, target: Disk, folder: str, roles: Sequence[str], terms: BackupTerms) -> Manifest:
    """Copy the servers into ``folder``, a new or empty one or one of an earlier call; returns what it holds then.

    Raises:
        BadArgument: the folder holds something else, or servers that this backup is not of.
        DirectoryInUse: another backup is written there.
        DiskFull, NotWritable: the backup can't go on; another call goes on where this one ended.
    """
    target.make_folder(folder)
    lock = target.lock(f"{folder}/{BACKUP_LOCK}", "backup")
    try:
        journal = _begin(target, folder, roles)
        try:
            manifest = _fill(source, target, folder, journal, terms)
        except BaseException:
            journal.close()
            raise
        journal.remove()
        return manifest
    finally:
        lock.release()


def _begin(disk: Disk, folder: str, roles: Sequence[str]) -> Journal:
    """Note in the journal what the folder holds already; a whole backup in it stays whole."""
    whole = disk.exists(f"{folder}/{NAME}")
    others = set(disk.list_folder(folder)) - {BACKUP_LOCK, NAME, UNFINISHED}
    if not whole and not disk.exists(f"{folder}/{UNFINISHED}") and others:
        raise BadArgument(f"{folder} is not empty and holds no backup; give a new folder, or that of an earlier backup")
    before = read_manifest(disk, folder).entries if whole else ()
    journal = Journal(disk, folder)
    try:
        known = {path.partition("/")[0] for path in (*journal.lines, *(entry.path for entry in before))}
        if not known <= set(roles):
            which = ", ".join(sorted(known - set(roles)))
            raise BadArgument(f"{folder} holds a backup of {which}, too; give another folder")
        if before:
            journal.add(before)
            journal.lines |= {entry.path: entry for entry in before}
    except BaseException:
        journal.close()
        raise
    return journal


def _begin_anew(disk: Disk, folder: str, roles: Sequence[str]) -> None:
    """Make the folder an unfinished backup; until here nothing of an earlier one was changed."""
    if disk.exists(f"{folder}/{NAME}"):
        disk.remove(f"{folder}/{NAME}")
        disk.sync_folder(folder)
    for role in roles:
        state = f"{folder}/{role}/{STATE}"
        if disk.exists(state):
            disk.remove(state)
            disk.sync_folder(state.rpartition("/")[0])


def _fill(source: Disk, target: Disk, folder: str, journal: Journal, terms: BackupTerms) -> Manifest:
    for left in reversed(range(CUTS_MAX)):
        copier = Copier(source, target, folder, journal, terms.progress)
        entries: list[CopiedFile] = []
        damaged: list[str] = []
        staged: list[CopiedFile] = []

        cut = terms.cut(partial(_stage, source, copier, staged=staged, damaged=damaged))
        _begin_anew(target, folder, [each.role for each in cut.sources])
        gone = 0
        for each in cut.sources:
            state = f"{folder}/{each.role}/{STATE}{STAGED}"
            names = files_of(source, each, target, state)
            for name, size in names.items():
                try:
                    entry, failed = copier.copy(f"{each.folder}/{name}", f"{each.role}/{name}", size)
                except FileNotFoundError:
                    gone += 1
                    if left == 0 or not each.running:
                        damaged.append(f"{each.folder}/{name} is gone")
                    continue
                entries.append(entry)
                if failed is not None:
                    damaged.append(failed.message)
        if gone and left and any(each.running for each in cut.sources):
            copier.flush()
            continue  # Retention has removed files since the cut: a new cut knows which, and the rest is copied.
        break
    copier.flush()
    _remove_others(target, folder, cut.sources, {entry.path for entry in entries})
    for entry in staged:
        target.rename(f"{folder}/{entry.path}{STAGED}", f"{folder}/{entry.path}")
        target.sync_folder(f"{folder}/{entry.path}".rpartition("/")[0])
    found = terms.check(folder)
    held = tuple(_held(target, folder, each, entries) for each in cut.sources)
    damaged += [sentence for sentence in found if sentence not in damaged]
    copied = (*staged, *entries)
    manifest = Manifest(terms.now_ms, terms.version, cut.at_one_instant, held, tuple(damaged), copied, cut.moment_ms)
    write_manifest(target, folder, manifest)
    return manifest


def _stage(source: Disk, copier: Copier, each: ServerSource, staged: list[CopiedFile], damaged: list[str]) -> None:
    """Copy the state and the checkpoint under names that no server looks for."""
    for path, name in ((each.state, STATE), (each.checkpoint, CHECKPOINT)):
        if not source.exists(path):
            continue
        entry, failed = copier.fresh(path, f"{each.role}/{name}{STAGED}")
        if failed is not None:
            damaged.append(failed.message)
        staged.append(CopiedFile(f"{each.role}/{name}", entry.size_bytes, entry.crc32c, entry.source))


def _remove_others(disk: Disk, folder: str, sources: Sequence[ServerSource], wanted: set[str]) -> None:
    """Remove copies of files that retention has removed since an earlier call."""
    for each in sources:
        own = ServerSource(each.role, f"{folder}/{each.role}", 0, "", "", None)
        for name in files_of(disk, own, disk, ""):
            if f"{each.role}/{name}" not in wanted:
                disk.remove(f"{folder}/{each.role}/{name}")


def _held(disk: Disk, folder: str, source: ServerSource, entries: Sequence[CopiedFile]) -> Held:
    home = f"{folder}/{source.role}"
    log_id, epoch = _identity(disk, f"{home}/{STATE}")
    try:
        published = read_checkpoint(disk, home) or {}
    except DataError:
        published = {}  # The check of the backup has named it.
    offset = published.get("replay_offset", published.get("indexed_offset", 0))
    following = published.get("next_sequence", 0)
    table = published.get("hours", b"")
    hours = decode_hours(table)["hour"].tolist() if isinstance(table, bytes) else []
    log = [entry for entry in entries if entry.path.startswith(f"{source.role}/message/")]
    base = int(log[-1].path.rpartition("/")[2].removesuffix(".log")) if log else 0
    return Held(
        role=source.role,
        log_id=log_id,
        epoch=epoch,
        running=source.running,
        cut_ms=source.cut_ms,
        offset=offset if isinstance(offset, int) else 0,
        end=max(0, base + log[-1].size_bytes - FILE_HEADER_BYTES) if log else 0,
        next_sequence=following if isinstance(following, int) else 0,
        hours=len(hours),
        first_hour=hour_name(hours[0]) if hours else "",
        last_hour=hour_name(hours[-1]) if hours else "",
    )


def _identity(disk: Disk, path: str) -> tuple[int, int]:
    if not disk.exists(path):
        return 0, 0
    file = open_named(disk, path)
    try:
        pairs = {pair.key: pair for pair in read_pairs(path, file.pread, file.size())}
        numbers = [
            msgpack.unpackb(check_stored(path, key, pairs[key].stored)) if key in pairs else 0
            for key in (b"log_id", b"epoch")
        ]
    except DamagedData:
        return 0, 0
    finally:
        file.close()
    return int(numbers[0]), int(numbers[1])


def restore(
    source: Disk,
    target: Disk,
    folder: str,
    manifest: Manifest,
    data: str,
    roles: Sequence[str],
    progress: Progress,
    *,
    damaged_too: bool = False,
) -> list[str]:
    """Copy the servers of ``roles`` from the backup in ``folder`` into the data directory ``data``.

    Returns sentences about files that do not check. When there are some, the servers are put into their place only if
    that is wanted ``damaged_too``.

    Raises:
        BadArgument: a server's folder is not empty, or has the beginning of another restore.
        DirectoryInUse: a server runs there.
        DiskFull, NotWritable: another call goes on where this one ended.
    """
    missing = [role for role in roles if role not in {each.role for each in manifest.servers}]
    if missing:
        raise BadArgument(f"the backup in {folder} holds no {' and no '.join(missing)} server")
    head = CopiedFile(HEAD, manifest.size_bytes, crc32c(encode(manifest)), 0)
    homes: list[_HomeFolder] = []
    damaged: list[str] = []
    try:
        # All are locked and looked at before the first is written to.
        for role in roles:
            homes.append(_HomeFolder(target, data, role, head))
        for home in homes:
            damaged += home.fill(source, folder, manifest, progress)
        if not damaged or damaged_too:
            for home in homes:
                home.finish()
    finally:
        for home in homes:
            home.close()
    return damaged


class _HomeFolder:
    """One server's folder."""

    def __init__(self, disk: Disk, data: str, role: str, head: CopiedFile) -> None:
        self._disk = disk
        self._role = role
        self._path = f"{data}/{role}"
        disk.make_folder(self._path)
        self._lock: Lock = disk.lock(f"{self._path}/{LOCK}", "restore")
        try:
            begun = disk.exists(f"{self._path}/{UNFINISHED}")
            others = set(disk.list_folder(self._path)) - {LOCK, UNFINISHED}
            if others and not begun:
                raise BadArgument(
                    f"{self._path} is not empty; move its files to another place first, or restore into another --data"
                )
            self._journal = Journal(disk, self._path)
            known = self._journal.lines.get(HEAD)
            if known not in (None, head) or (known is None and others):
                self._journal.close()
                raise BadArgument(f"{self._path} has the beginning of another restore; empty it, and begin again")
        except BaseException:
            self._lock.release()
            raise
        self._done = False
        if known is None:
            self._journal.add([head])

    def fill(self, source: Disk, folder: str, manifest: Manifest, progress: Progress) -> list[str]:
        """Copy all files; sentences about those that differ from what the backup says of them."""
        copier = Copier(source, self._disk, self._path, self._journal, progress)
        damaged: list[str] = []
        for entry in manifest.entries:
            role, _, name = entry.path.partition("/")
            if role != self._role:
                continue
            path = f"{folder}/{entry.path}"
            to = name + STAGED if name == STATE else name
            try:
                copied, failed = copier.copy(path, to, entry.size_bytes)
            except FileNotFoundError:
                damaged.append(f"{path} is gone")
                continue
            if failed is not None:
                damaged.append(failed.message)
            elif copied.crc32c != entry.crc32c:
                damaged.append(DamagedData(path, 0, "its checksum is not that of the backup").message)
        copier.flush()
        return damaged

    def finish(self) -> None:
        state = f"{self._path}/{STATE}"
        if self._disk.exists(state + STAGED):
            self._disk.rename(state + STAGED, state)
            self._disk.sync_folder(state.rpartition("/")[0])
        self._journal.remove()
        self._done = True

    def close(self) -> None:
        """Give the folder free; a restore that is not done can go on later."""
        if not self._done:
            self._journal.close()
        self._lock.release()
