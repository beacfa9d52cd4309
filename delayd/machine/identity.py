"""Identity: the log_id of a server's directory, for ever, and the epoch of this start (docs/formats/checkpoint.md).

Invariant: the epoch has risen by one, durably, before the server does anything else, so no two lives of a directory
share one (rules L7, H3). No other file has these numbers, so they are stored twice (rule L9).

The *place* is a number for the folder of a server's files; it is the same at each start, and each copy has another one.
Two processes in one place exclude each other by its lock (rule L7), so a server that starts in its old place is the
only one with its log_id there. A copy has a folder of its own, and so another place. A copy may also be put back where
its original was, perhaps under the same inode: then a marker file shows that, because no copying can set a file's time
of status change (ctime). A copy tool that leaves the marker alone still replaces the file of the state.

The *holder* is the process that holds LOCK, the lock of the directory. The file has one line, ``pid 42 delay``, or
``pid 42 delay of pid 40`` for a child that ends with its supervisor; a second line, ``stopping``, is written when the
server begins to stop.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from delayd.errors import BadSetting, DamagedData, EpochOutOfRange, NewerFormat, StateMissing
from delayd.machine.alarms import Alarms
from delayd.machine.clock import Clock
from delayd.machine.disk import Disk
from delayd.machine.executor import Executor
from delayd.machine.state import LMDB_FILE, State

FORMAT = 1  # One version for everything in a server's directory.
U64_MAX = (1 << 64) - 1
EPOCH_MAX = (1 << 62) - 1  # Far below the limit of any column that holds an epoch.
# Starts that nobody heard of, such as those of a server that died at each start for months.
EPOCH_STEPS_MAX = 1_000_000

_KEYS = (b"format", b"log_id", b"epoch")
_COPY_KEY = b"identity"  # All three in one value.
# Any of these shows that a server has lived here.
_FILES = ("checkpoint", "place", "message", "schedule", "dispatch", "seal", "consume", "pull")
_CLUSTER_KEYS = (b"cluster_id", b"cluster_id.copy")  # Stored twice, for the same reason.


class Identity(NamedTuple):
    """A directory and its life."""

    log_id: int
    epoch: int


def draw_id() -> int:
    """A random id of 64 bits whose 16 hexadecimal digits begin with a letter.

    Programs that guess the types of CSV columns read 1234567890123456 and 12e4567890123456 as numbers.
    """
    return secrets.choice(range(0xA, 0x10)) << 60 | secrets.randbits(60)


def open_identity(state: State, path: str, draw_u64: Callable[[], int], disk: Disk | None = None) -> Identity:
    """Begin the next epoch of a server's state; a new directory draws its log_id. Commits once.

    `path` is the state's path, for errors. With `disk` an empty state is refused if the directory has logs.

    Raises:
        NewerFormat: a newer delayd wrote it.
        DamagedData: a number does not check in either of its places.
        StateMissing: the directory has logs, and no state.
    """
    numbers = [_read(state, path, index) for index in range(len(_KEYS))]
    version = numbers[0]
    if version is None:
        _need_new(path, disk)
        # 0 is the value of an unset field, so no directory has it.
        log_id, epoch = draw_u64() or 1, 1
    else:
        if version > FORMAT:
            raise NewerFormat(path, version, FORMAT)
        known = [_needed(path, index, numbers[index]) for index in (1, 2)]
        log_id, epoch = known[0], known[1] + 1
    values = (FORMAT, log_id, epoch)
    puts = [(key, msgpack.packb(number)) for key, number in zip(_KEYS, values, strict=True)]
    state.commit([*puts, (_COPY_KEY, msgpack.packb(values))])
    return Identity(log_id, epoch)


def known_identity(state: State, path: str) -> Identity:
    """The identity of a state's server in its last life; zeros before its first. DamagedData as `open_identity`."""
    log_id, epoch = (_read(state, path, index) or 0 for index in (1, 2))
    return Identity(log_id, epoch)


def check_epoch(epoch: int, heard: int, who: str) -> None:
    """Refuse an epoch that can't be the next one of a server: EpochOutOfRange. `heard`: the last one, 0 for none."""
    if epoch > EPOCH_MAX or (heard and epoch > heard + EPOCH_STEPS_MAX):
        raise EpochOutOfRange(
            f"epoch {epoch} of {who} can't be: epoch {heard} was heard last, each start adds one, and {EPOCH_MAX} is "
            "the last one; look at where this number comes from"
        )


def open_cluster_id(state: State, path: str, draw_u64: Callable[[], int], wanted: int = 0) -> int:
    """The id of meta's cluster: drawn once, or taken over, when meta first starts on an empty directory.

    Raises:
        BadSetting: another one than the wanted is known already.
        DamagedData: it does not check in either of its places.
    """
    cluster_id = known_cluster_id(state, path)
    if not cluster_id:
        cluster_id = wanted or draw_u64() or 1
        keep_cluster_id(state, cluster_id)
    elif wanted and wanted != cluster_id:
        raise BadSetting(
            f"cluster_id is {wanted:016x}, and this directory is of cluster {cluster_id:016x}; leave the setting out, "
            "or start on an empty directory",
            setting="cluster_id",
        )
    return cluster_id


def known_cluster_id(state: State, path: str) -> int:
    """The cluster that a server belongs to; 0 before it was told. Raises DamagedData if neither copy checks."""
    damage: DamagedData | None = None
    for key in _CLUSTER_KEYS:
        try:
            value = state.get(key)
            if value is not None:
                return _number(path, key, value, None)
        except DamagedData as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return 0


def keep_cluster_id(state: State, cluster_id: int) -> None:
    """Remember the cluster for good; durable on return."""
    state.commit([(key, msgpack.packb(cluster_id)) for key in _CLUSTER_KEYS])


def _need_new(path: str, disk: Disk | None) -> None:
    folder = path.rpartition("/")[0]
    if disk is None:
        return
    for name in _FILES:
        found = f"{folder}/{name}"
        if disk.exists(found) and (name in ("checkpoint", "place") or disk.list_folder(found)):
            raise StateMissing(path, found)


def _needed(path: str, index: int, number: int | None) -> int:
    if number is None:
        raise DamagedData(path, 0, f"the key {_KEYS[index].decode()} is missing")
    return number


def _read(state: State, path: str, index: int) -> int | None:
    """One of the numbers, from its copy if it does not check; None when neither exists."""
    damage: DamagedData | None = None
    for key, place in ((_KEYS[index], None), (_COPY_KEY, index)):
        try:
            value = state.get(key)
            if value is not None:
                return _number(path, key, value, place)
        except DamagedData as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return None


def _number(path: str, key: bytes, value: bytes, place: int | None) -> int:
    try:
        number = msgpack.unpackb(value)
        if place is not None:
            number = number[place]
    except (ValueError, TypeError, IndexError) as error:
        raise DamagedData(path, 0, f"the value of {key.decode()} is no msgpack") from error
    if type(number) is not int or not 0 <= number <= U64_MAX:
        raise DamagedData(path, 0, f"the value of {key.decode()} is no number")
    return number


# The folder in which the server ran last; of delay and realtime servers, in which meta took it, and all targets had
# answered it, last (docs/protocol.md, Meta).
PLACE_KEY = b"place"
MARKER = "place"  # In a server's folder.
MARKER_TEXT = b"The time of this file tells its server whether the folder was copied or restored.\n"
MACHINE_ID = "/etc/machine-id"  # Made by systemd; without it only the file system tells machines apart.


def place_of(folder: str) -> int:
    """64 bits of machine, file system, inodes and marker; never 0. Copying the folder anywhere changes it.

    A ``chown`` or ``chmod`` of the marker, or a hard link to it, changes the place too. Makes the marker if there is
    none.
    """
    file_system = os.statvfs(folder).f_fsid
    marker = _marker(os.path.join(folder, MARKER))
    numbers = (os.stat(folder).st_ino, _state_inode(folder), marker.st_ino, marker.st_ctime_ns)
    parts = (_machine_id(), *(number.to_bytes(8, "little") for number in (file_system, *numbers)))
    return int.from_bytes(hashlib.sha256(b"|".join(parts)).digest()[:8], "little") or 1


def known_place(state: State) -> int | None:
    """The place that a server has stored; None when there is none, or it does not check."""
    try:
        value = state.get(PLACE_KEY)
        place = None if value is None else msgpack.unpackb(value)
    except (DamagedData, ValueError):
        return None
    return place if type(place) is int else None


def keep_place(state: State, place: int) -> None:
    """Store a place; durable on return."""
    state.commit([(PLACE_KEY, msgpack.packb(place))])


def settle_place(state: State, place: int) -> bool:
    """Store the place if it differs from the stored one; return whether there was one and it differed."""
    known = known_place(state)
    if known != place:
        keep_place(state, place)
    return known is not None and known != place


def _marker(path: str) -> os.stat_result:
    """The system's facts about the marker file, which is created at the first look and never changed."""
    if not os.path.exists(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, MARKER_TEXT)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return os.stat(path)


def _state_inode(folder: str) -> int:
    try:
        return os.stat(os.path.join(folder, "state.lmdb", LMDB_FILE)).st_ino
    except FileNotFoundError:
        return 0  # No server has opened this folder yet.


def _machine_id() -> bytes:
    try:
        with open(MACHINE_ID, "rb") as file:
            return file.read(64).strip()
    except OSError:
        return b""


LOCK = "LOCK"
LOCKS = "/proc/locks"  # Linux lists each held flock here, so a look takes no lock that a starting server needs.
LINES_BYTES_MAX = 200
STOPPING = "stopping"

_LINE = re.compile(r"pid (\d+) \w+(?: of pid (\d+))?")


def holder_name(role: str, *, supervised: bool) -> str:
    """The text that a server writes into its LOCK behind its own pid."""
    return f"{role} of pid {os.getppid()}" if supervised else role


def is_held(lock: os.stat_result) -> bool:
    """Whether a server holds this LOCK at this moment; also False where the system can't tell."""
    try:
        with open(LOCKS, encoding="ascii") as lines:
            held = {line.split()[5] for line in lines if " FLOCK " in line}
    except (FileNotFoundError, NotADirectoryError):
        return False
    return f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}" in held


def leaving(path: str) -> str:
    """Name the holder of the LOCK ``path`` that is about to end; empty when nobody holds it or its holder serves on."""
    try:
        # Without O_NONBLOCK the open of a pipe that has this name would never return.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""  # No server was here, or only one of another user: the starting server finds out which.
    try:
        held = is_held(os.fstat(descriptor))
        lines = os.pread(descriptor, LINES_BYTES_MAX, 0).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""  # There is a folder or a pipe of this name: the starting server reports that.
    finally:
        os.close(descriptor)
    found = _LINE.fullmatch(lines[0]) if held and lines else None
    if found is None:
        return ""
    pid, supervisor = found.groups()
    is_orphan = supervisor is not None and _parent_of(int(pid)) not in (int(supervisor), 0)
    return lines[0] if STOPPING in lines[1:] or is_orphan else ""


def mark_stopping(path: str) -> None:
    """Write into the LOCK ``path`` that its holder stops, if that is this process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        line = os.pread(descriptor, LINES_BYTES_MAX, 0)
        found = _LINE.fullmatch(line.decode("utf-8", "replace").strip())
        if found is not None and int(found[1]) == os.getpid():
            os.pwrite(descriptor, f"{STOPPING}\n".encode(), len(line))
    finally:
        os.close(descriptor)


def _parent_of(pid: int) -> int:
    """The parent of a process; 0 when that is not known, as for a process of another container."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return 0


@dataclass(frozen=True, slots=True)
class Site:
    """One data directory, in one life of its server. ``worker`` keeps the order of its own jobs."""

    disk: Disk
    state: State
    folder: str
    identity: Identity
    alarms: Alarms
    worker: Executor

    @property
    def clock(self) -> Clock:
        """The clock of the alarms."""
        return self.alarms.clock

    @property
    def log_id(self) -> int:
        """The number that names the directory for ever."""
        return self.identity.log_id

    @property
    def epoch(self) -> int:
        """The number of this life of the directory's server."""
        return self.identity.epoch
