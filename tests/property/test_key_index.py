"""The index of keys against a dict: adds, checkpoints, merges, and a crash at any disk operation (rules L4, L9, C3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delayd.batch.content import Hasher, Names
from delayd.delay.keys import index as index_module
from delayd.delay.keys import run as run_module
from delayd.errors import DataError
from delayd.log import key_run
from delayd.testing.disk import Crash, Faults, MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.worlds.keys import DUE_MS, HOUR, SEED, KeyHouse, KeyRow, Name

SUBJECTS = [b"s", b"orders.eu", b"s" * 255]
KEYS = [*(b"%d" % n for n in range(9)), b"12345678", b"123456789", b"k" * 200, b"\0", b"\0\0"]
names = st.builds(lambda subject, key: (subject, key), st.sampled_from(SUBJECTS), st.sampled_from(KEYS))
ALL = [(subject, key) for subject in SUBJECTS for key in KEYS]


class WeakHasher(Hasher):
    """Gives names few different hashes, so that all of them meet."""

    def hashes(self, names: Names) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Only bits of the bucket and the fingerprint."""
        return super().hashes(names) & np.uint64(0xE000_0000_0000_0001)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows then fill many blocks, pieces and buckets."""
    for module in (index_module, run_module, key_run):
        monkeypatch.setattr(module, "BLOCK_ENTRIES", 4)
    for module in (index_module, run_module):
        monkeypatch.setattr(module, "PIECE_ENTRIES", 16)
    monkeypatch.setattr(run_module, "BLOCKS_PIECE", 2)
    monkeypatch.setattr(run_module, "ASKED_PIECE", 7)
    monkeypatch.setattr(run_module, "BUCKET_ENTRIES", 3)
    monkeypatch.setattr(index_module, "LOOP_ENTRIES", 12)
    monkeypatch.setattr(index_module, "MEMORY_ENTRIES", 40)


class IndexAgainstDict(RuleBasedStateMachine):
    """The model: all rows in their order, and how many of them the last checkpoint counts."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[KeyRow] = []
        self.counted = 0
        self.house = KeyHouse(MemoryDisk(Faults()))

    @initialize(weak=st.booleans())
    def choose_hashes(self, weak: bool) -> None:
        """Half of the examples have names that share a hash."""
        self.weak = weak
        self.take(self.house)

    def take(self, house: KeyHouse) -> None:
        """Go on with another life."""
        self.house = house
        house.filed_hours = {HOUR + n for n in range(4)}
        if self.weak:
            house.index._hasher = WeakHasher(SEED)

    @rule(added=st.lists(st.tuples(names, st.integers(-5, 5), st.integers(0, 3)), min_size=1, max_size=40))
    def add(self, added: list[tuple[Name, int, int]]) -> None:
        """Rows with rising sequences, some of them of one name."""
        new = [
            KeyRow(name, len(self.rows) + n + 1, DUE_MS + late, HOUR + hour)
            for n, (name, late, hour) in enumerate(added)
        ]
        self.rows += new
        self.house.add(new)

    @rule(meanwhile=st.lists(names, max_size=3))
    def checkpoint(self, meanwhile: list[Name]) -> None:
        """Rows may come between its steps."""
        frozen, count = self.house.index.freeze(), len(self.rows)
        if meanwhile:
            self.add([(name, 0, 0) for name in meanwhile])
        written = self.house.index.write(frozen)
        self.house.state.commit([(key_run.STATE_KEY, written.known.encode())])
        self.house.index.counted(written)
        self.counted = count

    @rule(room=st.integers(0, 900))
    def checkpoint_on_a_full_disk(self, room: int) -> None:
        """Its rows stay in memory for the next one."""
        disk = self.house.disk
        disk.capacity_bytes = disk.used_bytes + room
        try:
            self.checkpoint([])
        except DataError:
            pass
        disk.capacity_bytes = 1 << 40

    @rule(jobs=st.integers(1, 4))
    def merge(self, jobs: int) -> None:
        """Whatever waits beside the loop."""
        for _ in range(jobs):
            self.house.worker.step()

    @rule(
        at=st.integers(1, 12),
        jobs=st.booleans(),
        way=st.sampled_from(list(PowerLoss)),
        seed=st.integers(0, 1_000),
    )
    def die_at_an_operation(self, at: int, jobs: bool, way: PowerLoss, seed: int) -> None:
        """In the middle of a checkpoint or of a merge."""
        disk = self.house.disk
        disk.faults.crash_at = len(disk.operations) + at
        try:
            if jobs:
                self.house.worker.run_all()
            self.checkpoint([])
            self.house.worker.run_all()
        except Crash:
            self.start_again(disk.after_crash(way, seed))
        disk.faults.crash_at = None

    @rule(way=st.sampled_from([None, *PowerLoss]))
    def die(self, way: PowerLoss | None) -> None:
        """Between two operations."""
        disk = self.house.disk
        self.start_again(disk.after_kill() if way is None else disk.after_crash(way))

    def start_again(self, disk: MemoryDisk) -> None:
        """Nothing that the state names is missing; the rows above the checkpoint come from the message log."""
        house = self.house.started_again(disk)
        assert house.index.whole
        before = self.counted
        counted = max((run.number for run in house.known.runs), default=0)
        # The crash may have come behind the commit, whose checkpoint counted all rows.
        if counted and counted != max((run.number for run in self.house.known.runs), default=0):
            before = self.counted_by(house)
        self.take(house)
        self.counted = before
        if self.rows[before:]:
            house.add(self.rows[before:])

    def counted_by(self, house: KeyHouse) -> int:
        """How many rows the state counts: those up to the highest sequence in a run."""
        return max(
            int(run.read(0, run.blocks, house.index._hasher).rows["sequence"].max()) for run in house.index.view().runs
        )

    @invariant()
    def it_finds_what_the_dict_has(self) -> None:
        """The newest row of each name."""
        newest = {row.name: tuple(row[1:]) for row in self.rows}
        assert self.house.find(ALL) == [newest.get(name, (0, 0, 0)) for name in ALL]


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(max_examples=100, stateful_step_count=20)
