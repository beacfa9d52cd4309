"""How many connections the limit of open files leaves room for.

Invariant: connections never take the files that logs, checkpoints and the state need: idle clients can't end a server.
"""

import resource

CONNECTIONS_MAX = 4096  # Connections of one server; the budget of all of them bounds what they make it hold.
CONNECTIONS_MIN = 16
FILES_KEPT_MIN = 640  # 512 that a checkpoint holds open, segments, the state, and those of the process itself.
# Files are allowed as many descriptors as connections: a checkpoint holds 512 open, and each 256 MiB of log one.
FILES_MIN = 2 * CONNECTIONS_MAX


def raise_file_limit() -> int:
    """Take what this user may have; returns the limit. The soft one is for programs that use select."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_max() -> int:
    """The connections that go with this process's limit: half of the files, unless that leaves too few for the rest."""
    return connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def connections_for(files: int) -> int:
    """As `connections_max`, for a limit."""
    kept = max(FILES_KEPT_MIN, files // 2)
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, files - kept))
