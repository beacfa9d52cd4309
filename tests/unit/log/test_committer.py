"""The group commit: one group at a time, told in order and only when it is durable, whatever the disk says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from delayd.errors import DiskFull, ServerStopped, Shortage, SyncFailed
from delayd.log.committer import Committer
from delayd.machine.executor import Executor
from delayd.testing.clock import SimClock
from delayd.testing.executor import StepExecutor
from tests.worlds.executor import InlineExecutor


class Letters(Committer[str, str]):
    """A log of letters: a group is at most two of them; ``fails`` is what the next write raises."""

    def __init__(self, thread: Executor, *, refuses: bool = False, answers: dict[str, str] | None = None) -> None:
        super().__init__("log of letters", thread, SimClock())
        self.waiting = ""
        self.fails: Exception | None = None
        self.on_disk: list[str] = []
        self.told: list[str] = []
        self.done: list[str] = []  # The same, when all of it was told.
        self.answers = answers or {}  # What is put when a group is told.
        self.refuses = refuses
        self.errors: list[BaseException] = []
        self.on_failure = self.errors.append

    def put(self, letters: str) -> None:
        self.waiting += letters
        self.commit()

    def _close(self) -> str | None:
        group, self.waiting = self.waiting[:2], self.waiting[2:]
        if self.waiting:
            self.commit()
        return group or None

    def _jobs(self, group: str) -> tuple[Callable[[], str], Callable[[], object] | None]:
        return partial(self._write, group), None

    def _write(self, group: str) -> str:
        if self.fails is not None:
            raise self.fails
        self.on_disk.append(group)
        return group.upper()

    def _durable(self, group: str, written: str) -> None:
        assert self.on_disk[len(self.told)] == group, "it is told before it is durable, or out of order"
        self.told.append(written)
        self.put(self.answers.pop(group, ""))
        self.done.append(written)

    def _no_space(self, group: str, error: DiskFull) -> str | None:
        return None if self.refuses else group


def test_what_arrives_while_the_disk_is_busy_becomes_the_next_groups_and_the_disk_never_waits_for_who_is_told() -> None:
    thread = StepExecutor()
    letters = Letters(thread, answers={"a": "d"})
    for each in "abc":
        letters.put(each)
    assert (thread.waiting, letters.told, letters.idle) == (1, [], False)
    thread.step()
    assert (letters.told, thread.waiting) == (["A"], 1), "the disk has the next group before this one is told"
    thread.run_all()
    assert letters.on_disk == ["a", "bc", "d"] and letters.told == ["A", "BC", "D"] and letters.idle


def test_groups_are_told_in_order_where_each_write_returns_at_once() -> None:
    letters = Letters(InlineExecutor(), answers={"a": "bcde", "bc": "f"})
    letters.put("a")
    assert letters.told == letters.done == ["A", "BC", "DE", "F"] and letters.idle


@pytest.mark.parametrize("refuses", [False, True])
def test_rule_L8_a_group_that_finds_no_space_is_written_again_first_or_refused(refuses: bool) -> None:
    letters = Letters(InlineExecutor(), refuses=refuses)
    letters.fails = DiskFull("log")
    letters.put("a")
    letters.retry()
    assert not letters.told and letters.idle is refuses
    if not refuses:
        letters.put("b")
    letters.fails = None
    letters.put("c")
    letters.retry()
    assert letters.told == (["C"] if refuses else ["A", "BC"]) and letters.idle and not letters.errors


@pytest.mark.parametrize(
    ("met", "said"),
    [
        (SyncFailed("log", "the disk is bad"), SyncFailed),
        (OSError(5, "Input/output error"), ServerStopped),
        (Shortage("log", 24), Shortage),
    ],
)
def test_rule_L1_after_any_other_failure_nothing_is_told_or_written_any_more(
    met: Exception, said: type[Exception]
) -> None:
    letters = Letters(InlineExecutor())
    letters.fails = met
    letters.put("a")
    letters.fails = None
    letters.put("b")
    (error,) = letters.errors
    assert type(error) is said and letters.on_disk == letters.told == []


class Two(Letters):
    """A log with a written end and a durable one."""

    def __init__(self, thread: Executor) -> None:
        super().__init__(thread)
        self.fails_to_sync: Exception | None = None
        self.written: list[str] = []
        self.synced = 0

    def _written(self, group: str, written: str) -> None:
        assert self.on_disk[len(self.written)] == group and written not in self.told
        self.written.append(written)

    def _jobs(self, group: str) -> tuple[Callable[[], str], Callable[[], object] | None]:
        return partial(self._write, group), self._fsync

    def _fsync(self) -> None:
        if self.fails_to_sync is not None:
            raise self.fails_to_sync
        self.synced = len(self.on_disk)

    def _durable(self, group: str, written: str) -> None:
        assert len(self.told) < self.synced, "it is told before it is durable"
        super()._durable(group, written)


def test_a_group_is_told_as_written_before_its_fsync_and_the_next_one_is_written_behind_it() -> None:
    thread = StepExecutor()
    letters = Two(thread)
    letters.put("a")
    letters.put("b")
    thread.step()
    assert (letters.written, letters.told) == (["A"], [])
    assert not letters.idle
    thread.step()
    assert (letters.written, letters.told) == (["A"], ["A"])
    thread.run_all()
    assert (letters.written, letters.told) == (["A", "B"], ["A", "B"])
    assert letters.idle


@pytest.mark.parametrize("thread", [InlineExecutor, StepExecutor])
def test_rule_L8_the_fsync_behind_a_write_without_space_tells_nothing(
    thread: type[InlineExecutor] | type[StepExecutor],
) -> None:
    letters = Two(made := thread())
    letters.fails = DiskFull("log")
    letters.put("a")
    if isinstance(made, StepExecutor):
        made.run_all()
    assert (letters.written, letters.told, letters.errors) == ([], [], [])
    letters.fails = None
    letters.retry()
    if isinstance(made, StepExecutor):
        made.run_all()
    assert (letters.written, letters.told) == (["A"], ["A"])


def test_rule_L1_a_failed_fsync_ends_the_server_and_what_was_written_is_told_to_nobody_as_durable() -> None:
    letters = Two(InlineExecutor())
    letters.fails_to_sync = SyncFailed("log", "the disk is bad")
    letters.put("a")
    assert (letters.written, letters.told) == (["A"], [])
    assert [type(error) for error in letters.errors] == [SyncFailed]
    letters.put("b")
    assert letters.on_disk == ["a"]


@pytest.mark.parametrize("thread", [InlineExecutor, StepExecutor])
def test_rule_L1_a_failed_fsync_behind_a_write_without_space_ends_the_server(
    thread: type[InlineExecutor] | type[StepExecutor],
) -> None:
    letters = Two(made := thread())
    letters.fails, letters.fails_to_sync = DiskFull("log"), SyncFailed("log", "the disk is bad")
    letters.put("a")
    if isinstance(made, StepExecutor):
        made.run_all()
    assert [type(error) for error in letters.errors] == [SyncFailed] and letters.told == []
