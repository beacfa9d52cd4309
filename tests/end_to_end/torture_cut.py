"""Cuts connections of another process, as a network would; the process itself goes on.

Invariant: what was sent before the cut still arrives, as late as the other side reads it (rule H3). Linux only: a
connection is borrowed through `pidfd_getfd`, which a parent may do with its children.
"""

import ctypes
import os
import random
import socket

PIDFD_GETFD = 438  # The same number on every architecture; the standard library has no name for it.

_libc = ctypes.CDLL(None, use_errno=True)


def cut_connections(pid: int, draw: random.Random, share: float, ports: frozenset[int] | None = None) -> int:
    """Cut a share of a process's TCP connections, or of those to certain ports; how many."""
    process = os.pidfd_open(pid)
    try:
        taken = [_connection(process, pid, int(name)) for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int)]
    finally:
        os.close(process)
    cut = 0
    for connection in taken:
        if connection is None:
            continue
        with connection:
            wanted = ports is None or connection.getpeername()[1] in ports
            if wanted and draw.random() < share:
                connection.shutdown(draw.choice((socket.SHUT_RDWR, socket.SHUT_WR)))
                cut += 1
    return cut


def _connection(process: int, pid: int, descriptor: int) -> socket.socket | None:
    """A connected TCP socket of the process, shared with it; None for any other descriptor."""
    try:
        if not os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("socket:"):
            return None
    except FileNotFoundError:
        return None
    borrowed = _libc.syscall(PIDFD_GETFD, process, descriptor, 0)
    if borrowed < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "pidfd_getfd")
    found = socket.socket(fileno=borrowed)
    try:
        if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
            found.getpeername()
            return found
    except OSError:
        # It listens, or has been closed meanwhile.
        pass
    found.close()
    return None
