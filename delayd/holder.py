"""Holder: which process holds the LOCK of a server's directory, and whether it is about to end.

LOCK has one line, ``pid 42 delay``, or ``pid 42 delay of pid 40`` for a child that ends with its supervisor; a second
line, ``stopping``, is written when the server begins to stop.
"""

from __future__ import annotations

import os
import re

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
