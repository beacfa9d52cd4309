"""Stored quota: the quota of a subject, from the state of a delay server that does not run (docs/quotas.md).

Invariant: the state of a running server is not read, for it changes under the reader (rule L6).
"""

import os

from delayd.holder import LOCK, is_held
from delayd.log.quota import NO_LIMITS, Limits, decode_limits, quota_key
from delayd.reading.directory import Directory
from delayd.state import LMDB_FILE, check_stored, read_state_file


def server_runs(directory: Directory) -> bool:
    """Whether a server has the directory open at this moment."""
    lock = f"{directory.path}/{LOCK}"
    return os.path.exists(lock) and is_held(os.stat(lock))


def stored_quota(directory: Directory, subject: bytes) -> Limits:
    """The quota of a subject; all None when it has none.

    Raises:
        DamagedData: the state, or this value, does not check.
        FileNotFoundError: there is no state, for example in a copy that left it out.
    """
    path, wanted = f"{directory.path}/state.lmdb/{LMDB_FILE}", quota_key(subject)
    for pair in read_state_file(path):
        if pair.key == wanted:
            return decode_limits(check_stored(path, *pair))
    return NO_LIMITS
