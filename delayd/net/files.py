"""Files: how many connections the limit of open files leaves room for.

Invariant: connections never take the files that logs, checkpoints and the state need: idle clients can't end a server.
"""

import resource

CONNECTIONS_MAX = 4096  # Connections of one server; the budget bounds what all of them make it hold.
CONNECTIONS_MIN = 16
# 512 that a checkpoint holds open, 96 others that were used last, and those of the state and the process itself.
FILES_KEPT_MIN = 640
# As many descriptors are left for files as for connections, and then they are never short.
FILES_MIN = 2 * CONNECTIONS_MAX


def raise_file_limit() -> int:
    """Raise this process's limit to the hard one and return it; the lower soft limit is for programs that use
    select.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_max() -> int:
    """The number of connections for this process's limit: half of the files, unless that leaves too few for the
    rest.
    """
    return connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def connections_for(files: int) -> int:
    """As `connections_max`, for a given limit."""
    kept = max(FILES_KEPT_MIN, files // 2)
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, files - kept))
