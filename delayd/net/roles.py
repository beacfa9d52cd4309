"""Roles: a server begins in no folder that is that of a server of another role.

Invariant: the check writes nothing, and knows a folder by what its server has written there.
"""

from delayd.errors import BadSetting, DataError
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, kind_of_file
from delayd.machine.disk import Disk, list_named, open_named
from delayd.machine.state import State

ROLES = {FileKind.MESSAGE: "delay", FileKind.REALTIME: "realtime"}
"""Whose message log the files of a kind are."""
SERVER_PREFIX = b"server/"  # In meta's state only: the servers that have registered.


def check_role(disk: Disk, folder: str, role: str) -> None:
    """Raise BadSetting when a folder is that of a server of another role, by the first file of its message log."""
    try:
        path = next((f"{folder}/message/{name}" for name in list_named(disk, f"{folder}/message")), "")
        file = open_named(disk, path) if path else None
    except (DataError, FileNotFoundError):
        return  # What is wrong with the log is said when it is opened.
    if file is None:
        return
    try:
        kind = kind_of_file(file.pread(FILE_HEADER_BYTES, 0))
    except DataError:
        return
    finally:
        file.close()
    owner = next((owner for own, owner in ROLES.items() if own == kind), role)
    if owner != role:
        raise _put_here(folder, owner, role)


def check_not_metas(state: State, folder: str, role: str) -> None:
    """Raise BadSetting when a folder is meta's, which has no logs, by what its state holds; closes the state then."""
    if state.scan(SERVER_PREFIX):
        state.close()
        raise _put_here(folder, "meta", role)


def _put_here(folder: str, owner: str, role: str) -> BadSetting:
    return BadSetting(
        f"{folder} is the folder of a {owner} server, and this is a {role} server: somebody has put it here; put"
        " each folder back in its place before you start a server",
        setting="data",
    )
