"""Place: a number for the folder of a server's files; it is the same at each start, and each copy has another one.

Two processes in one place exclude each other by its lock (rule L7), so a server that starts in its old place is the
only one with its log_id there. A copy has a folder of its own, and so another place. A copy may also be put back where
its original was, perhaps under the same inode: then a marker file shows that, because no copying can set a file's time
of status change (ctime). A copy tool that leaves the marker alone still replaces the file of the state.
"""

import hashlib
import os

import msgpack

from delayd.errors import DamagedData
from delayd.state import LMDB_FILE, State

PLACE_KEY = b"place"  # In a server's state.
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
