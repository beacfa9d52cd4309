"""Logs of one file: dispatch logs recover by themselves, schedule and consume logs by what a checkpoint counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from delayd.batch.columns import BatchKind, ColumnId, SchedulePart
from delayd.delay.books.outcomes import reopen_dispatch_log
from delayd.delay.filing.hour_table import FiledHours, HourTable, merge_hours
from delayd.delay.filing.schedule_writer import ScheduleWriter
from delayd.log.consume import ConsumeTail, append_entries, check_tail, consume_place, read_entries
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import dispatch_path
from delayd.log.log import Log, LogPlace
from delayd.log.segment import FileHeader, FileKind, Segment, create_segment
from delayd.machine.alarms import Alarms
from delayd.machine.disk import File
from delayd.machine.identity import Identity, Site
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from tests.batches import messages
from tests.worlds.files import read_schedule_log

FOLDER = "/data"
LOG_ID = 0x99
HOUR = 498_664
NOW_MS = 1_700_000_000_000


@dataclass(slots=True)
class DispatchFacts:
    """Outcomes by number, in the order of the file."""

    attempted: list[int] = field(default_factory=list)
    acknowledged: int = 0


class DispatchWorkload:
    """One hour's dispatch log, created by its first outcome."""

    path = dispatch_path(FOLDER, HOUR)

    def new(self) -> DispatchFacts:
        """See `Workload`."""
        return DispatchFacts()

    def run(self, disk: MemoryDisk, facts: DispatchFacts) -> None:
        """See `Workload`."""
        segment = self._open(disk)
        for number in range(1, 7):
            facts.attempted.append(number)
            segment.append([outcome_group(number)])
            if number % 3:
                segment.flush()
                facts.acknowledged = number
        segment.flush()
        segment.close()

    def recover(self, disk: MemoryDisk, facts: DispatchFacts) -> object:
        """See `Workload`."""
        segment = self._reopen(disk)
        if segment is None:
            return []
        found = [group.header.base_sequence for group in segment.scan(0, 0)]
        segment.close()
        return found

    def check(self, found: object, facts: DispatchFacts) -> None:
        """See `Workload`."""
        assert isinstance(found, list)
        assert found == facts.attempted[: len(found)]
        assert len(found) >= facts.acknowledged

    def go_on(self, disk: MemoryDisk, facts: DispatchFacts) -> None:
        """See `Workload`."""
        before = self.recover(disk, facts)
        assert isinstance(before, list)
        segment = self._reopen(disk) or self._open(disk)
        segment.append([outcome_group(50)])
        segment.flush()
        assert self.recover(disk.after_crash(), facts) == [*before, 50]

    def _open(self, disk: MemoryDisk) -> Segment:
        disk.make_folder(self.path.rpartition("/")[0])
        return create_segment(disk, self.path, FileHeader(FileKind.DISPATCH, LOG_ID, 0, HOUR, NOW_MS))

    def _reopen(self, disk: MemoryDisk) -> Segment | None:
        return reopen_dispatch_log(disk, self.path, LOG_ID) if disk.exists(self.path) else None


@dataclass(slots=True)
class ScheduleFacts:
    """What the last durable checkpoint counts of each hour, and the sequences that this names."""

    hours: HourTable = field(default_factory=HourTable)
    sequences: dict[int, list[int]] = field(default_factory=dict)


class ScheduleWorkload:
    """Checkpoints that write two hours each, the second one larger than a sector."""

    def new(self) -> ScheduleFacts:
        """See `Workload`."""
        return ScheduleFacts()

    def run(self, disk: MemoryDisk, facts: ScheduleFacts) -> None:
        """See `Workload`."""
        for number in range(1, 5):
            self._checkpoint(disk, facts, {HOUR: number, HOUR + number % 2 + 1: 10 * number})

    def recover(self, disk: MemoryDisk, facts: ScheduleFacts) -> object:
        """The sequences that the checkpoint counts."""
        found: dict[int, list[int]] = {}
        for hour in facts.hours.rows["hour"].tolist():
            stored, damage = read_schedule_log(disk, FOLDER, LOG_ID, hour, facts.hours.get(hour))
            if damage is not None:
                raise damage
            found[hour] = [int(one.batch.uint64s(ColumnId.SEQUENCE)[0]) for one in stored]
        return found

    def check(self, found: object, facts: ScheduleFacts) -> None:
        """See `Workload`."""
        assert found == facts.sequences

    def go_on(self, disk: MemoryDisk, facts: ScheduleFacts) -> None:
        """What the checkpoint that died left behind is cut, and the next one counts its own."""
        later = ScheduleFacts(facts.hours, {hour: list(found) for hour, found in facts.sequences.items()})
        self._checkpoint(disk, later, {HOUR: 70, HOUR + 1: 71, HOUR + 2: 72, HOUR + 3: 73})
        self.check(self.recover(disk.after_crash(), later), later)

    def _checkpoint(self, disk: MemoryDisk, facts: ScheduleFacts, numbers: dict[int, int]) -> None:
        place = LogPlace(FOLDER, FileKind.MESSAGE, LOG_ID)
        log = Log(disk, place, [])
        site = Site(disk, MemoryState(), FOLDER, Identity(LOG_ID, 1), Alarms(SimClock()), StepExecutor())
        writer = ScheduleWriter(site, log, FiledHours(facts.hours, HourTable()), NOW_MS, lambda: None)
        for hour, number in numbers.items():
            part = SchedulePart(0, number, hour)
            data = messages([bytes(90 * number)], sequences=[number], kind=BatchKind.SCHEDULE, part=part)
            writer._append(hour, [[data]], 1, 0)
        writer._sync()
        # From here on the transaction that names these lengths may be durable.
        facts.hours = HourTable(merge_hours(facts.hours.rows, writer.written.rows))
        for hour, number in numbers.items():
            facts.sequences = {**facts.sequences, hour: [*facts.sequences.get(hour, []), number]}


@dataclass(slots=True)
class ConsumeFacts:
    """What the last durable checkpoint counts."""

    tail: ConsumeTail = field(default_factory=ConsumeTail)


class ConsumeWorkload:
    """Entries written at checkpoints."""

    place = consume_place(FOLDER, LOG_ID, 3)

    def new(self) -> ConsumeFacts:
        """See `Workload`."""
        return ConsumeFacts()

    def run(self, disk: MemoryDisk, facts: ConsumeFacts) -> None:
        """See `Workload`."""
        for count in (3, 90, 1, 200):
            facts.tail = self._checkpoint(disk, facts.tail, count)

    def recover(self, disk: MemoryDisk, facts: ConsumeFacts) -> object:
        """See `Workload`."""
        check_tail(disk, self.place, facts.tail)
        if not facts.tail.count:
            return []
        return read_entries(disk, self.place, 0, facts.tail.count).tolist()

    def check(self, found: object, facts: ConsumeFacts) -> None:
        """See `Workload`."""
        assert found == list(range(facts.tail.count))

    def go_on(self, disk: MemoryDisk, facts: ConsumeFacts) -> None:
        """See `Workload`."""
        later = ConsumeFacts(self._checkpoint(disk, facts.tail, 70))
        self.check(self.recover(disk.after_crash(), later), later)

    def _checkpoint(self, disk: MemoryDisk, tail: ConsumeTail, count: int) -> ConsumeTail:
        unsynced: list[File] = []
        entries = np.arange(tail.end, tail.end + count, dtype=np.uint64)
        tail = append_entries(disk, self.place, tail, entries, NOW_MS, unsynced)
        for file in unsynced:
            file.sync()
            file.close()
        return tail


def outcome_group(number: int) -> NewGroup:
    """A group that is known again by its number."""
    return NewGroup(GroupKind.DATA, [messages([bytes(60 * number)])], 1, NOW_MS, number, 1)
