"""Rows with keys, for tests of the index of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from delayd.batch.content import Hasher, Names
from delayd.delay.keys.index import KeyIndex, open_index
from delayd.delay.keys.run import Entries, KeyedRows, Newest, new_entries
from delayd.log.key_run import STATE_KEY, KnownRuns
from delayd.machine.alarms import Alarms
from delayd.machine.identity import Identity, Site
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState

FOLDER = "/data"
LOG_ID = 7
SEED = 0x1234_5678_9ABC_DEF0
DUE_MS = 1_795_190_400_000  # 2026-11-20T16:00Z
HOUR = 498_664

Name = tuple[bytes, bytes]


class KeyRow(NamedTuple):
    """A row that took a key."""

    name: Name
    sequence: int
    deliver_at_ms: int = DUE_MS
    hour: int = HOUR


def names_of(names: Sequence[Name]) -> Names:
    """As arrays."""
    return Names.of_lists([subject for subject, _ in names], [key for _, key in names])


def entries_of(rows: Sequence[KeyRow], hasher: Hasher | None = None) -> Entries:
    """As the index keeps them."""
    return new_entries(hasher or Hasher(SEED), *keyed_rows_of(rows))


def keyed_rows_of(rows: Sequence[KeyRow]) -> KeyedRows:
    """As the index takes them."""
    return KeyedRows(
        names_of([row.name for row in rows]),
        np.array([row.sequence for row in rows], np.uint64),
        np.array([row.deliver_at_ms for row in rows], np.int64),
        np.array([row.hour for row in rows], np.uint32),
    )


def facts(found: Newest) -> list[tuple[int, int, int]]:
    """Sequence, due instant and hour that were found for each name; zeros for none."""
    return [(int(row["sequence"]), int(row["deliver_at_ms"]), int(row["hour"])) for row in found.rows]


class KeyHouse:
    """An index in a directory of its own, with the checkpoints that name its runs."""

    def __init__(self, disk: MemoryDisk | None = None, state: MemoryState | None = None, seed: int = SEED) -> None:
        self.disk = disk or MemoryDisk()
        self.state = state or MemoryState(self.disk)
        self.worker = StepExecutor()
        self.filed_hours = {HOUR}
        site = Site(self.disk, self.state, FOLDER, Identity(LOG_ID, 1), Alarms(SimClock()), self.worker)
        self.disk.make_folder(FOLDER)
        stored = self.state.get(STATE_KEY)
        self.known = KnownRuns(seed, 1) if stored is None else KnownRuns.decode(stored)
        opened = open_index(self.disk, FOLDER, LOG_ID, self.known)
        self.index = KeyIndex(site, opened, lambda: np.array(sorted(self.filed_hours), np.uint32))

    def add(self, rows: Sequence[KeyRow]) -> None:
        """Take durable rows."""
        self.index.add(keyed_rows_of(rows))

    def find(self, names: Sequence[Name]) -> list[tuple[int, int, int]]:
        """See `facts`."""
        view = self.index.view()
        return facts(view.find(view.asked(names_of(names)), lambda: None))

    def checkpoint(self) -> None:
        """Write, name and count what is in memory."""
        written = self.index.write(self.index.freeze())
        self.state.commit([(STATE_KEY, written.known.encode())])
        self.known = written.known
        self.index.counted(written)

    def files(self) -> list[str]:
        """Files of runs."""
        return self.disk.list_folder(f"{FOLDER}/keys")

    def started_again(self, disk: MemoryDisk) -> KeyHouse:
        """The index as the next start finds it on ``disk``."""
        return KeyHouse(disk, self.state.after_crash(disk))
