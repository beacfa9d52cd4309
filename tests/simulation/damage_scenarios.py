"""Scenarios of damage: reads that fail, files that are gone for a while, flipped bits, each mended by the end.

Invariant: what is damaged here is put back as it was, so that nothing may be lost, doubled or stuck for good.
"""

from __future__ import annotations

from delayd.testing.disk import MemoryDisk
from tests.simulation.damage import Damage, Flipped, Gone, file_of, files_of
from tests.simulation.parts import Parts
from tests.simulation.realtime_side import RealtimeSide
from tests.simulation.steps import Kinds

FILE_HEADER_BYTES = 64
LASTING = 1 << 40  # Reads that fail: until the disk is mended.


class DamageScenarios(Parts):
    """What a disk does beside losing power: each scenario damages, lets work happen, and mostly mends."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        return [(4, self.realtime_reads_fail), (3, self.realtime_bit_flips)]

    def asked_for(self) -> Kinds:
        """What is drawn only where it is asked for: a few seeds in a thousand show what is not mended yet."""
        return [(3, self.realtime_file_gone), (3, self.consume_bit_flips), (4, self.consume_reads_fail)]

    def realtime_reads_fail(self) -> None:
        """A realtime server's disk can't read the message log, once or for a while (rule L10)."""
        self._fail_reads("/message/")

    def consume_reads_fail(self) -> None:
        """A realtime server's disk can't read consume logs, once or for a while (rule L10)."""
        self._fail_reads("/consume/")

    def _fail_reads(self, part: str) -> None:
        side = self.steps.side()
        reads = self.random.choice((1, 1, 3, LASTING))
        self.tell(f"     {reads} reads of {part} at {side.name} fail")
        self.cluster.damaged = True
        side.disk.faults.fail_reads[part] = reads
        self._work_at(side)
        if self.chance(0.5):
            side.disk.faults.fail_reads.clear()
            self._work_at(side)

    def realtime_bit_flips(self) -> None:
        """A bit of the message log flips, below what is durable (rule L5)."""
        self._flip("/message/")

    def consume_bit_flips(self) -> None:
        """A bit of a consume log flips (rule L9)."""
        self._flip("/consume/")

    def _flip(self, part: str) -> None:
        side = self.steps.side()
        self._work_at(side)
        # A consume log is rebuilt; of the message log the last groups could not be told from a torn tail.
        flipped = self._flip_a_bit(side.disk, part, followed=part == "/message/")
        if flipped is None:
            return
        self._damage(side, flipped)
        if self.chance(0.5):
            self.realtime_dies_and_starts(side)
        self._work_at(side)
        if self.chance(0.5):
            self.cluster.mend()
            self._work_at(side)

    def realtime_file_gone(self) -> None:
        """A consume segment is gone, and comes back (rule L9)."""
        side = self.steps.side()
        self._work_at(side)
        path = self._some_file(side.disk, "/consume/")
        if path is None:
            return
        self.tell(f"     {path} at {side.name} is gone")
        self._damage(side, Gone(side.disk, path))
        if self.chance(0.5):
            self.realtime_dies_and_starts(side)
        self._work_at(side)
        if self.chance(0.5):
            self.cluster.mend()
            self._work_at(side)

    def _work_at(self, side: RealtimeSide) -> None:
        for _ in range(self.random.choice((1, 2))):
            if self.cluster.delay_up:
                self.steps.send_due()
            for _ in range(self.random.choice((2, 5))):
                self.steps.consume()
                self.moves(6)
            if self.chance(0.3):
                side.checkpoint()
            if self.chance(0.2):
                side.retain()
            self.cluster.calm(self.random.choice((60, 400, 2_500)))

    def _flip_a_bit(self, disk: MemoryDisk, part: str, *, followed: bool) -> Damage | None:
        path = self._some_file(disk, part, followed=followed)
        if path is None:
            return None
        node = file_of(disk, path)
        assert node is not None, "it was listed"
        # What is not durable is no damage when it is lost.
        if node.pending or len(node.cached) <= FILE_HEADER_BYTES:
            return None
        position, mask = self.random.randrange(len(node.cached)), 1 << self.random.randrange(8)
        self.tell(f"     bit {mask:x} at {position} of {path} flips")
        return Flipped(disk, path, position, mask)

    def _damage(self, side: RealtimeSide, damage: Damage) -> None:
        self.cluster.damaged = True
        side.damages.add(damage)

    def _some_file(self, disk: MemoryDisk, part: str, *, followed: bool = False) -> str | None:
        """A file of some kind; ``followed`` by another one: what is in the last group of a log may be a torn tail."""
        paths = sorted(path for path in files_of(disk) if part in path and path.endswith(".log"))
        if followed:
            folders = [path.rpartition("/")[0] for path in paths]
            paths = [path for path, this, next_ in zip(paths, folders, folders[1:], strict=False) if this == next_]
        return self.random.choice(paths) if paths else None
