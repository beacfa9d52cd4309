"""Sources: which files of a server's directory belong to a backup, and how many bytes of each.

Of a running server these are the bytes of its cut (delayd.net.cut), and of schedule logs those that the state counts.
Left out is what a start makes again: the folders ``index`` and ``keys``, and what belongs to one process or one place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delayd.disk import Disk, open_named
from delayd.errors import DamagedValue
from delayd.log.schedule import HOUR_ROW, REMOVED, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.reading.acceptances import FOLDER as ACCEPTANCES
from delayd.reading.acceptances import acceptance_files
from delayd.state import LMDB_FILE, check_stored
from delayd.state_file import read_pairs

STATE = f"state.lmdb/{LMDB_FILE}"
HOUR_PREFIX = b"hour/"
FLAT_LOGS = ("message", "pull", "seal", "quarantine", "tally")
DEEP_LOGS = ("dispatch", "consume")  # A folder for each day or subject.
ROLES = ("delay", "realtime", "meta")  # In the order in which running servers are cut.


@dataclass(frozen=True, slots=True)
class Source:
    """One server's directory, for the time of a backup."""

    role: str
    folder: str
    cut_ms: int
    state: str  # Path of the file of the state: the server's own copy, or of a stopped server the file itself.
    checkpoint: str  # Path of the checkpoint file, or of the copy in the cut.
    sizes: dict[str, int] | None  # Of a running server: the sizes of its cut, by path below the folder.

    @property
    def running(self) -> bool:
        """Whether it was cut while it ran."""
        return self.sizes is not None


def files_of(disk: Disk, source: Source, copies: Disk, state: str) -> dict[str, int | None]:
    """The files of the logs by path below the server's folder, each with the bytes to copy; None for all of it.

    ``state``, on the disk ``copies``, is a file of the state that no server has open.
    """
    # The server that runs writes none of the acceptances, so no cut fixes them; each is whole or not there.
    found: dict[str, int | None] = {f"{ACCEPTANCES}/{name}": None for name in acceptance_files(disk, source.folder)}
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
    file = open_named(copies, state)
    try:
        pairs = read_pairs(state, file.pread, file.size())
    finally:
        file.close()
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
