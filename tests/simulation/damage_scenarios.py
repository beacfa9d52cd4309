"""Scenarios of damage: reads that fail, files that are gone for a while, flipped bits, each mended by the end.

Invariant: what is damaged here is put back as it was, so that nothing may be lost, doubled or stuck for good.
"""

from __future__ import annotations

from delayd.hours import NAME_DIGITS, hour_from_name
from delayd.log.segment import FileKind, UnfinishedFile, open_segment
from delayd.testing.disk import CAPACITY_BYTES, MemoryDisk, Misread
from tests.simulation.cluster import HOUR_MS, LOSSES
from tests.simulation.damage import Damage, Damages, Flipped, Gone, file_of, files_of
from tests.simulation.delay_side import NAME
from tests.simulation.parts import Parts
from tests.simulation.realtime_side import RealtimeSide
from tests.simulation.steps import Kinds
from tests.worlds.delay import FOLDER
from tests.worlds.delay_adapter import counted_outcomes, list_dispatch_logs, removed_hours

FILE_HEADER_BYTES = 64
LASTING = 1 << 40  # Reads that fail: until the disk is mended.
READ_BY_DELAY = ("/message/", "/schedule/", "/dispatch/")
READ_BY_REALTIME = ("/message/", "/pull/", "/consume/")


class DamageScenarios(Parts):
    """What a disk does beside losing power: each scenario damages, lets work happen, and mostly mends."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        kinds: Kinds = [(4, self.realtime_reads_fail), (4, self.consume_reads_fail), (3, self.realtime_bit_flips)]
        kinds += [(3, self.consume_bit_flips), (3, self.realtime_file_gone)]
        if self.cluster.delay_up:
            kinds += [(4, self.delay_reads_fail), (3, self.delay_file_changed), (3, self.delay_dispatch_changed)]
            kinds += [(3, self.delay_start_misreads), (3, self.delay_dispatch_gone)]
        return [*kinds, (3, self.realtime_start_misreads)]

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
        side.damages.fail_reads(side.disk, part, reads)
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

    def delay_reads_fail(self) -> None:
        """The delay server's disk can't read some kind of file, once or for a while (rule L10)."""
        cluster = self.cluster
        part = self.random.choice(READ_BY_DELAY)
        reads = self.random.choice((1, 1, 3, LASTING))
        self._work_at_delay()
        if not cluster.delay_up:
            return
        self.tell(f"     {reads} reads of {part} at {NAME} fail")
        cluster.damaged = True
        cluster.delay_damages.fail_reads(cluster.world.disk, part, reads)
        self._work_at_delay()
        if self.chance(0.5):
            cluster.mend()
            self._work_at_delay()

    def delay_file_changed(self) -> None:
        """An hour's schedule log is gone or has a bit that flipped, and is restored (rules L5, L10)."""
        cluster = self.cluster
        self._work_at_delay()
        if not cluster.delay_up:
            return
        disk = cluster.world.disk
        # The last outcomes of a dispatch log are no damage when they are lost: nobody could tell them from a torn tail.
        part = "/schedule/"
        if self.chance(0.5):
            path = self._some_file(disk, part)
            if path is None:
                return
            self.tell(f"     {path} at {NAME} is gone")
            hour = hour_from_name(path.rpartition("/")[2][:NAME_DIGITS])
            damage: Damage | None = Gone(disk, path, wanted=lambda: self._is_kept(hour))
        else:
            damage = self._flip_a_bit(disk, part, followed=False)
        if damage is None:
            return
        cluster.damaged = True
        cluster.delay_damages.add(damage)
        if self.chance(0.3):
            self.delay_dies_and_starts()
        self._work_at_delay()
        if self.chance(0.5):
            self._restore_at_delay()
            self._work_at_delay()

    def delay_dispatch_changed(self) -> None:
        """A bit of an hour's dispatch log flips, where it is durable, and the file is restored (rule L5)."""
        cluster = self.cluster
        self._work_at_delay()
        if not cluster.delay_up:
            return
        disk = cluster.world.disk
        path = self._some_file(disk, f"{FOLDER}/dispatch/")
        if path is None or disk.faults.fail_reads:
            return
        node = file_of(disk, path)
        # What is not durable is no damage when it is lost.
        if node is None or node.pending:
            return
        until = durable_named(disk, path, cluster.world.server.log_id)
        if until <= FILE_HEADER_BYTES:
            return
        position, mask = self.random.randrange(FILE_HEADER_BYTES, until), 1 << self.random.randrange(8)
        self.tell(f"     bit {mask:x} at {position} of {path} flips")
        cluster.damaged = True
        cluster.delay_damages.add(Flipped(disk, path, position, mask))
        if self.chance(0.6):
            self.delay_dies_and_starts()
        self._work_at_delay()
        if self.chance(0.6):
            self._restore_at_delay()
            self._work_at_delay()

    def delay_dispatch_gone(self) -> None:
        """An hour's dispatch log that a checkpoint counts is gone, and is restored (rules L5, L10)."""
        cluster = self.cluster
        self._work_at_delay()
        if not cluster.delay_up:
            return
        world, disk = cluster.world, cluster.world.disk
        hours = cluster.delay_hours()
        # An hour without its dispatch log is not sealed, so retention removes nothing of it meanwhile.
        here = [(hour, path) for hour, path in list_dispatch_logs(disk, FOLDER) if not hours.get(hour).sealed]
        paths = [path for hour, path in here if counted_outcomes(world.state, hour).length]
        if not paths or disk.faults.fail_reads:
            return
        path = self.random.choice(paths)
        node = file_of(disk, path)
        if node is None or node.pending:
            return
        self.tell(f"     {path} at {NAME} is gone")
        cluster.damaged = True
        cluster.delay_damages.add(Gone(disk, path))
        # While a server lives that has it open, the server writes it again itself, and nobody puts a copy there.
        self.delay_dies_and_starts()
        self._work_at_delay()
        if self.chance(0.6):
            self._restore_at_delay()
            self._work_at_delay()

    def delay_start_misreads(self) -> None:
        """A start of the delay server reads one piece of a log wrongly, and the disk has it well (rule L5)."""
        cluster = self.cluster
        self.some_work()
        if not cluster.delay_up:
            return
        cluster.delay_dies(self.random.choice((None, *LOSSES)))
        part = self.random.choice(READ_BY_DELAY)
        self._misread(cluster.delay_damages, cluster.remains.disk, part)
        cluster.delay_starts(faults=False)
        cluster.world.disk.faults.misreads.clear()
        self.some_work()

    def realtime_start_misreads(self) -> None:
        """A start of a realtime server reads one piece of a log wrongly, and the disk has it well (rule L5)."""
        side = self.steps.side()
        self._work_at(side)
        side.die(self.random.choice((None, *LOSSES)), self.random.randrange(1 << 16))
        self._misread(side.damages, side.disk, self.random.choice(READ_BY_REALTIME))
        self.cluster.side_starts(side, faults=False)
        side.disk.faults.misreads.clear()
        self._work_at(side)

    def _misread(self, damages: Damages, disk: MemoryDisk, part: str) -> None:
        which = Misread(self.random.choice((1, 2, 3, 5)), self.random.randrange(1 << 20))
        self.tell(f"     one read of {part} is wrong: {which}")
        self.cluster.damaged = True
        damages.misread(disk, part, which)

    def _is_kept(self, hour: int) -> bool:
        """Whether the delay server still has an hour: its retention removes what the published table calls removed."""
        cluster = self.cluster
        disk = cluster.world.disk if cluster.delay_up else cluster.remains.disk
        removed = removed_hours(disk, FOLDER, cluster.world.server.log_id) or []
        return hour in cluster.delay_hours() and hour not in removed

    def _restore_at_delay(self) -> None:
        """Put all files back; mostly an operator has what is quarantined read again, which is heard at once."""
        cluster = self.cluster
        cluster.mend()
        world = cluster.world
        if not cluster.delay_up or self.chance(0.3):
            return
        told: list[tuple[bool, str]] = []
        asked = [entry for entry in world.server.set_aside if entry.hour is not None]
        for entry in asked:
            self.tell(f"     an operator releases {entry.id}")
            world.server.release(entry.id, lambda done, text: told.append((done, text)))
        cluster.held.clear()
        full = world.disk.capacity_bytes < CAPACITY_BYTES
        cluster.calm(1_200)
        if world.own in cluster.lives() and world.clock.confirmed and not full:
            # The server may have found by itself that a file is whole, and be about to begin anew: then it takes back
            # all that is whole, and the word is not needed any more.
            wrong = [text for done, text in told if not done and "begin anew" not in text]
            assert len(told) == len(asked) and not wrong, f"of {len(asked)} restored files {told} was said"
            left = {entry.id for entry in asked} & {entry.id for entry in world.server.set_aside}
            assert not left, f"{sorted(left)} was restored, {told} was said, and it is still set aside"

    def _work_at_delay(self) -> None:
        cluster = self.cluster
        for _ in range(self.random.choice((1, 2))):
            if not cluster.delay_up:
                return
            self.steps.send_rows((-1_000, 1_500, HOUR_MS))
            if self.chance(0.6):
                self.steps.checkpoint_delay()
            cluster.calm(self.random.choice((60, 400, 2_500)))
            if self.chance(0.3) and cluster.delay_up:
                into_ms = cluster.machine.wall_ms % HOUR_MS
                cluster.advance(max(0, HOUR_MS - into_ms + self.random.choice((-2_000, 100))))
                cluster.calm(1_200)
                cluster.world.sweep()

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


def durable_named(disk: MemoryDisk, path: str, log_id: int) -> int:
    """The position in a dispatch log below which its groups say that everything is durable."""
    try:
        segment = open_segment(disk, path, FileKind.DISPATCH, log_id, write=False)
    except UnfinishedFile:
        return 0
    try:
        durable = max((group.header.durable_offset for group in segment.scan(0)), default=0)
        return segment.position(durable)
    finally:
        segment.close()
