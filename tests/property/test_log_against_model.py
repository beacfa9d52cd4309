"""A log against a list: whatever is done in whatever order, it holds what the list holds, across crashes and kills."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delayd.errors import DataError
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.testing.disk import Faults, MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.batches import messages

PLACE = LogPlace("/data/message", FileKind.REALTIME, 5, segment_bytes=1_200)


class LogAgainstModel(RuleBasedStateMachine):
    """The model: numbers of groups appended, how many are durable, and a checkpoint that starts of logs begin at."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk(Faults())
        self.numbers: list[int] = []
        self.durable = 0
        self.next = 0
        self.start, self.start_crc32c, self.passed = 0, 0, 0
        self.log: Log = open_log(self.disk, PLACE, 1)

    def group(self, body_bytes: int) -> NewGroup:
        """A new group, or a tick for a body of nothing."""
        self.next += 1
        batches = [messages([bytes(body_bytes)])] if body_bytes else []
        return NewGroup(GroupKind.DATA if batches else GroupKind.TICK, batches, 1, self.next, self.next, len(batches))

    @rule(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=3))
    def append(self, sizes: list[int]) -> None:
        """Not durable yet, but for what a roll flushes."""
        groups = [self.group(size) for size in sizes]
        self.log.append(groups, 1)
        self.numbers += [group.base_sequence for group in groups]

    @rule(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=3), room=st.integers(0, 600))
    def append_to_a_full_disk(self, sizes: list[int], room: int) -> None:
        """Either all of it is appended or nothing."""
        groups = [self.group(size) for size in sizes]
        self.disk.capacity_bytes = self.disk.used_bytes + room
        try:
            self.log.append(groups, 1)
            self.numbers += [group.base_sequence for group in groups]
        except DataError:
            pass
        self.disk.capacity_bytes = 1 << 40

    @rule()
    def flush(self) -> None:
        """All of it is durable."""
        self.log.flush()
        self.durable = len(self.numbers)

    @rule(part=st.floats(0, 1))
    def checkpoint(self, part: float) -> None:
        """Somewhere between the last one and the durable end."""
        groups = list(self.log.scan(self.start, self.log.durable, self.start_crc32c))
        groups = groups[: int(part * len(groups))]
        if groups:
            self.start, self.start_crc32c = groups[-1].end, groups[-1].header.header_crc32c
            self.passed += len(groups)

    @rule()
    def delete(self) -> None:
        """What only the checkpoint's past needs."""
        self.log.remove(self.log.detach_below(self.start))

    @rule(way=st.sampled_from(list(PowerLoss)), seed=st.integers(0, 1_000))
    def lose_power(self, way: PowerLoss, seed: int) -> None:
        """What was durable is there, and perhaps some of what followed it, in order."""
        self.start_again(self.disk.after_crash(way, seed))

    @rule()
    def kill(self) -> None:
        """All of it is there, and durable once the next process has it."""
        self.start_again(self.disk.after_kill())
        assert self.durable == len(self.numbers)

    @precondition(lambda self: len(self.numbers) > self.durable)
    @rule()
    def lose_power_after_a_kill(self) -> None:
        """What the next process showed stays."""
        self.kill()
        shown = len(self.numbers)
        self.start_again(self.disk.after_crash())
        assert len(self.numbers) == shown

    def start_again(self, disk: MemoryDisk) -> None:
        """Recover, and let the model forget what was lost."""
        appended = self.numbers
        self.disk = disk
        self.log = open_log(disk, PLACE, 2, self.start, self.start_crc32c)
        assert self.log.durable == self.log.end
        found = appended[: self.passed] + self.found()
        assert found == appended[: len(found)]
        assert len(found) >= self.durable
        self.numbers, self.durable = found, len(found)

    def found(self) -> list[int]:
        """Numbers of the groups from the checkpoint on."""
        return [group.header.base_sequence for group in self.log.scan(self.start, self.log.end, self.start_crc32c)]

    @invariant()
    def it_holds_what_the_list_holds(self) -> None:
        """Also what is not durable yet."""
        assert self.found() == self.numbers[self.passed :]


TestLogAgainstModel = LogAgainstModel.TestCase
TestLogAgainstModel.settings = settings(max_examples=60, stateful_step_count=30)
