"""What the crash tests run: a log that rolls and loses its oldest segments, and a checkpoint file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from delayd.errors import DataError
from delayd.log.checkpoint import CheckpointFile, Payload, read_checkpoint
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.testing.disk import MemoryDisk
from tests.batches import messages

FOLDER = "/data/message"
LOG_ID = 0x1122334455667788
PLACE = LogPlace(FOLDER, FileKind.MESSAGE, LOG_ID, segment_bytes=1_500)
NOW_MS = 1_700_000_000_000


@cache
def group_of(number: int, body_bytes: int = 40) -> NewGroup:
    """A group that is known again by its number; it spans sectors when its body does."""
    body = (b"%d." % number).ljust(body_bytes, b"%d" % (number % 10))
    if body_bytes == 0:
        return NewGroup(GroupKind.TICK, [], 1, NOW_MS + number, base_sequence=number)
    kind = GroupKind.CONTROL if number % 4 == 3 else GroupKind.DATA
    return NewGroup(kind, [messages([body, b"second"])], 1, NOW_MS + number, base_sequence=number, row_count=2)


@dataclass(slots=True)
class LogFacts:
    """What the user of a log knows: numbers of groups, in order."""

    attempted: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    acknowledged: int = 0
    refused: list[int] = field(default_factory=list)
    start: int = 0  # A durable checkpoint: offset, checksum, and how many groups are before it.
    start_crc32c: int = 0
    passed: int = 0


class LogWorkload:
    """Appends, flushes, rolls and deletions of one log."""

    def new(self) -> LogFacts:
        """See `Workload`."""
        return LogFacts()

    def run(self, disk: MemoryDisk, facts: LogFacts) -> None:
        """See `Workload`."""
        log = open_log(disk, PLACE, NOW_MS)
        self._append(log, facts, 1)
        self._flush(log, facts)
        self._append(log, facts, 2, 3)
        self._flush(log, facts)
        self._append(log, facts, 4)
        self._append(log, facts, 5, body_bytes=0)
        self._checkpoint(log, facts, 3)
        self._append(log, facts, 6, body_bytes=1_300)
        self._flush(log, facts)
        self._append(log, facts, 7, body_bytes=700)
        self._append(log, facts, 8, 9, body_bytes=600)
        self._flush(log, facts)
        self._append(log, facts, 10)
        self._append(log, facts, 11)
        self._flush(log, facts)
        self._checkpoint(log, facts, 10)
        log.remove(log.detach_below(facts.start))
        self._append(log, facts, 12, 13)
        self._flush(log, facts)
        self._append(log, facts, 14, 15)
        self._append(log, facts, 16, body_bytes=900)
        self._flush(log, facts)
        log.close()

    def recover(self, disk: MemoryDisk, facts: LogFacts) -> Sequence[int]:
        """The numbers of the groups from the checkpoint on, each as it was appended."""
        log = open_log(disk, PLACE, NOW_MS, facts.start, facts.start_crc32c)
        try:
            return self._numbers(log, facts)
        finally:
            if not disk.crashed:
                log.close()

    def check(self, found: object, facts: LogFacts) -> None:
        """See `Workload`."""
        assert isinstance(found, list)
        assert found == facts.attempted[facts.passed : facts.passed + len(found)], f"{found} of {facts.attempted}"
        assert facts.passed + len(found) >= facts.acknowledged, f"{found}, acknowledged were {facts.acknowledged}"

    def go_on(self, disk: MemoryDisk, facts: LogFacts) -> None:
        """See `Workload`."""
        log = open_log(disk, PLACE, NOW_MS, facts.start, facts.start_crc32c)
        found = self._numbers(log, facts)
        facts = LogFacts(list(facts.attempted), dict(facts.sizes), 0, [], facts.start, facts.start_crc32c, 0)
        self._append(log, facts, 101)
        self._append(log, facts, 102, body_bytes=1_600)
        self._append(log, facts, 103)
        log.flush()
        assert self.recover(disk.after_crash(), facts) == [*found, 101, 102, 103]

    def _append(self, log: Log, facts: LogFacts, *numbers: int, body_bytes: int = 40) -> None:
        facts.sizes.update(dict.fromkeys(numbers, body_bytes))
        facts.attempted += numbers
        try:
            log.append([group_of(number, body_bytes) for number in numbers], NOW_MS)
        except (OSError, DataError):
            # Refused by name: whoever sent it was told that it was never appended.
            del facts.attempted[-len(numbers) :]
            facts.refused += numbers

    def _flush(self, log: Log, facts: LogFacts) -> None:
        log.flush()
        facts.acknowledged = len(facts.attempted)

    def _checkpoint(self, log: Log, facts: LogFacts, passed: int) -> None:
        groups = list(log.scan(facts.start, log.durable, facts.start_crc32c))[: passed - facts.passed]
        facts.start, facts.start_crc32c = groups[-1].end, groups[-1].header.header_crc32c
        facts.passed += len(groups)

    def _numbers(self, log: Log, facts: LogFacts) -> list[int]:
        numbers: list[int] = []
        for group in log.scan(facts.start, log.end, facts.start_crc32c):
            number = group.header.base_sequence
            batches = [bytes(batch.buffer) for _, batch in group.batches()]
            assert batches == group_of(number, facts.sizes[number]).batches, f"group {number} has other bytes"
            numbers.append(number)
        return numbers


@dataclass(slots=True)
class CheckpointFacts:
    """Publications by their numbers, from 1."""

    attempted: int = 0
    published: int = 0


class CheckpointWorkload:
    """Publications of growing and shrinking size."""

    def new(self) -> CheckpointFacts:
        """See `Workload`."""
        return CheckpointFacts()

    def run(self, disk: MemoryDisk, facts: CheckpointFacts) -> None:
        """See `Workload`."""
        disk.make_folder("/data")
        file = CheckpointFile(disk, "/data", LOG_ID)
        for number in range(1, 6):
            self._publish(file, facts, number)
        file.close()

    def recover(self, disk: MemoryDisk, facts: CheckpointFacts) -> object:
        """The number of the newest publication, 0 when there is none."""
        disk.make_folder("/data")
        file = CheckpointFile(disk, "/data", LOG_ID)
        found = read_checkpoint(disk, "/data", LOG_ID)
        file.close()
        if found is None:
            return 0
        assert found == {**payload_of(int(str(found["number"]))), "log_id": LOG_ID}
        return found["number"]

    def check(self, found: object, facts: CheckpointFacts) -> None:
        """See `Workload`."""
        assert isinstance(found, int)
        assert facts.published <= found <= facts.attempted, f"{found}, published were {facts.published}"

    def go_on(self, disk: MemoryDisk, facts: CheckpointFacts) -> None:
        """Two more publications, each of which dies half done and leaves the one before."""
        disk.make_folder("/data")
        file = CheckpointFile(disk, "/data", LOG_ID)
        for number in (101, 102, 103):
            file.publish(payload_of(number), NOW_MS)
            assert self.recover(disk.after_crash(), facts) == number

    def _publish(self, file: CheckpointFile, facts: CheckpointFacts, number: int) -> None:
        facts.attempted = number
        try:
            file.publish(payload_of(number), NOW_MS)
        except (OSError, DataError):
            return
        facts.published = number


def payload_of(number: int) -> Payload:
    """A payload of a size of its own."""
    return {"number": number, "hours": bytes([number]) * (number * 397 % 1_700)}
