"""The audit of a simulated cluster's files: no honest directory has a finding (rules S5, S7).

Invariant: the files are copied as a kill of all servers leaves them, so an audit changes nothing of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayd.reading.books import AuditReport, audit_directory
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import Folder
from tests.delay_harness import FOLDER

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

BOOKS = "/books"


def audit_cluster(cluster: Cluster) -> AuditReport:
    """Audit the directories of all servers."""
    disk = MemoryDisk()
    own = cluster.world.disk if cluster.delay_up else cluster.remains.disk
    copy_tree(own.after_kill(), FOLDER, disk, f"{BOOKS}/delay")
    for number, side in enumerate(cluster.sides):
        copy_tree(side.disk.after_kill(), side.config.folder, disk, f"{BOOKS}/realtime-{number}")
    return audit_directory(BOOKS, now_ms=cluster.machine.wall_ms, disk=disk)


def copy_tree(source: MemoryDisk, folder: str, target: MemoryDisk, place: str) -> None:
    """Copy a folder and all that is in it."""
    target.make_folder(place)
    for name in source.list_folder(folder):
        if isinstance(source._find(f"{folder}/{name}"), Folder):
            copy_tree(source, f"{folder}/{name}", target, f"{place}/{name}")
            continue
        read, written = source.open(f"{folder}/{name}"), target.open(f"{place}/{name}", write=True, create=True)
        written.pwritev([read.pread(read.size(), 0)], 0)
        written.sync()
        read.close()
        written.close()
