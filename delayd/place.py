"""Place: a number for the folder in which a server's files lie, the same at each start and another one for each copy.

Two processes in one place exclude each other by its lock (rule L7), so that a server which is back in its place is the
only one of its log_id there. A copy has a folder of its own, whatever is in it.
"""

import hashlib
import os

import msgpack

from delayd.errors import DamagedData
from delayd.state import State

PLACE_KEY = b"place"  # In a server's state.
MACHINE_ID = "/etc/machine-id"  # Made by systemd; without it the file system alone tells machines apart.


def place_of(folder: str) -> int:
    """64 bits of machine, file system and inode; never 0. Moving a folder to another file system changes it."""
    told = os.stat(folder)
    file_system = os.statvfs(folder).f_fsid
    parts = (_machine_id(), file_system.to_bytes(8, "little", signed=False), told.st_ino.to_bytes(8, "little"))
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
    """Store the place if it is another one than before; whether it is, and there was one."""
    known = known_place(state)
    if known != place:
        keep_place(state, place)
    return known is not None and known != place


def _machine_id() -> bytes:
    try:
        with open(MACHINE_ID, "rb") as file:
            return file.read(64).strip()
    except OSError:
        return b""
