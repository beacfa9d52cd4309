"""What callers hear of a message is true, wherever its row stands: in an hour that is mended, beside a damaged file, or
in a directory that was restored.
"""

from __future__ import annotations

import numpy as np

from delayd.delay.core import DelayCore
from delayd.hours import hour_of_ms
from delayd.log.ended import decode_ended, others_filed_at_ms
from delayd.log.schedule import RESTORED_STEP
from delayd.machine.executor import Priority
from delayd.testing.clock import START_MS
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import PowerLoss
from delayd.wire.ending import (
    AnswerRows,
    Asked,
    CancelAnswer,
    MessageState,
    RescheduleAnswer,
)
from tests.unit.delay.ending.keyed import KEEP, KEPT, REJECT, sent
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
HOUR = hour_of_ms(START_MS)


def delivered(world: World) -> list[bytes]:
    return [body for target in world.outside.targets.values() for kept in target.log for body in kept.bodies]


def flip(disk: MemoryDisk, path: str) -> None:
    """Damage the last byte of a file; a second time is a repair."""
    file = disk.open(path, write=True)
    at = file.size() - 1
    file.pwritev([bytes([file.pread(1, at)[0] ^ 1])], at)
    file.sync()


class HeldJobs:
    """Takes jobs out of the worker's queue, so that they take as long as the test wants."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._held: list[tuple[Priority, object]] = []

    def hold(self) -> bool:
        """Take those that wait now; whether there were any."""
        jobs = self._world.threads.worker._waiting.jobs  # type: ignore[attr-defined]
        for priority in Priority:
            for job in [job for job in jobs[priority] if self._name in repr(job)]:
                jobs[priority].remove(job)
                self._held.append((priority, job))
        return bool(self._held)

    def release(self) -> None:
        jobs = self._world.threads.worker._waiting.jobs  # type: ignore[attr-defined]
        for priority, job in self._held:
            jobs[priority].append(job)
        self._held.clear()
        self._world.settle()


def test_a_kept_send_is_told_the_filing_hour_of_an_earlier_message_that_was_due_already() -> None:
    world = World()
    world.meta_up = False  # Nobody says where the message goes.
    late_ms = START_MS - 2 * HOUR_MS
    sent(world, [(late_ms, b"orders.eu", b"late-0")], [b"k"], REJECT)
    (verdict,) = sent(world, [(late_ms, b"orders.eu", b"kept-0")], [b"k"], KEEP)
    assert verdict[0] == KEPT
    _, accepted = world.outside.accepted[world.outside.last_number]
    row = decode_ended(accepted.decided)
    told = Asked(row["other"].copy(), row["other_at_ms"].copy(), others_filed_at_ms(row))
    assert hour_of_ms(int(told.accepted_at_ms[0])) == HOUR
    assert world.states(told) == [MessageState.PENDING]
    answers = world.cancel(told)
    world.settle()
    assert answers == [[CancelAnswer.CANCELLED]]


class Restored(DelayCore):
    """A server that finds its directory in another place, as each copy does."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.ask_targets_first()


def test_rule_I5_a_restored_server_gives_no_sequence_that_the_lost_files_gave() -> None:
    world = World()
    world.send(wanted(1, HOUR_MS, "first"))
    world.settle()
    world.checkpoint()
    backup = world.remains(PowerLoss.ALL_LOST)
    world.send(wanted(1, 2 * HOUR_MS, "lost"))
    world.settle()
    lost = world.receipts("lost")
    restored = World(backup, core=Restored)
    restored.pass_ms(2_000)
    number = restored.send(wanted(1, 2 * HOUR_MS, "new"))
    restored.settle()
    new = restored.outside.accepted[number][1].base_sequence
    assert new == int(lost.sequences[0]) + RESTORED_STEP
    assert restored.states(lost) == [MessageState.UNKNOWN]
    answers = restored.cancel(lost)
    restored.settle()
    assert answers == [[CancelAnswer.UNKNOWN]]
    assert restored.states(restored.receipts("new")) == [MessageState.PENDING]
    restored.checkpoint()
    for _ in range(3):
        restored.clock.advance(HOUR_MS)
        restored.pass_ms(2_000)
    assert np.array_equal(np.array(restored.core.intake.skipped), [(new - RESTORED_STEP, RESTORED_STEP)])
    restored.check_books()


def test_a_message_that_has_just_been_cancelled_says_when() -> None:
    world = World()
    sent(world, wanted(1, 5 * HOUR_MS, "first"), [b"k"], REJECT)
    receipt = world.receipts("first")
    world.cancel(receipt)
    told: list[AnswerRows] = []
    while not world.core.ledger.owed.all().size and (move := world.next_move()) is not None:
        move()
    world.core.endings.get(receipt, told.append)  # type: ignore[arg-type]
    world.settle()
    (rows,) = told
    assert MessageState(int(rows["state"][0])) is MessageState.CANCELLED
    assert rows["decided_at_ms"].tolist() == [world.core.intake.appended_at_ms]


def test_two_receipts_of_one_message_are_moved_to_two_instants_one_after_the_other() -> None:
    world = World()
    world.send(wanted(1, 5 * HOUR_MS, "first"))
    world.settle()
    first = world.receipts("first")
    told = world.reschedule(first, START_MS + 6 * HOUR_MS)
    world.settle()
    (moved,) = told
    second = Asked(*(moved[name].copy() for name in ("sequence", "deliver_at_ms", "accepted_at_ms")))
    both = Asked._make(np.concatenate(columns) for columns in zip(first, second, strict=True))
    instants = [START_MS + 7 * HOUR_MS, START_MS + 8 * HOUR_MS]
    answers = world.reschedule(both, *instants)
    world.settle()
    (rows,) = answers
    assert rows["answer"].tolist() == [RescheduleAnswer.MOVED] * 2
    assert rows["deliver_at_ms"].tolist() == instants
    asked: list[AnswerRows] = []
    world.core.endings.get(first, asked.append)  # type: ignore[arg-type]
    world.settle()
    due = int(asked[0]["deliver_at_ms"][0])
    assert due in instants
    newest = max(rows["sequence"].tolist())
    assert asked[0]["sequence"].tolist() == [newest], "the wish that was done last stands"
