"""Appends and fsyncs of a log on the thread of a server: as calls of a lane they are what they are when called.

Each test runs with both lanes; ``make asan`` runs them with the sanitizers.
"""

from __future__ import annotations

import errno
import operator
import select
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delayd.errors import DiskFull, ServerStopped, SyncFailed
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import CALL_BYTES_MAX, Log, LogPlace, LogWrite, Written, open_log
from delayd.log.segment import FileKind
from delayd.machine import executor
from delayd.machine.disk import RealDisk
from delayd.machine.executor import Done, ThreadExecutor
from delayd.machine.lane import Lane
from delayd.testing.disk import MemoryDisk
from tests.batches import messages
from tests.compiled import Faults, build_kernel, load_kernel
from tests.waiting import DEADLINE_S
from tests.worlds.executor import ReaderLoop

SEGMENT_BYTES = 2_000
NO_SPACE = -errno.ENOSPC


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernel(tmp_path_factory.mktemp("kernel"), faults=True)


@pytest.fixture
def faults(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    made = Faults(kernel, monkeypatch)
    yield made
    made.script()  # The compiled lane of the next test has no faults that were left over.


class Rig:
    """A log on a real disk, and the thread of its appends."""

    def __init__(self, folder: Path) -> None:
        self.disk = RealDisk()
        self.place = LogPlace(str(folder / "message"), FileKind.MESSAGE, 77, SEGMENT_BYTES)
        self.log = open_log(self.disk, self.place, 5)
        self.loop = ReaderLoop()
        self.told: list[Done[Any]] = []
        self.thread = ThreadExecutor("commit", self.loop, operator.call)

    def submit(self, *jobs: Callable[[], object]) -> None:
        for job in jobs:
            self.thread.submit(job, self.told.append)

    def settle(self, count: int) -> list[Done[Any]]:
        """Hear of so many jobs."""
        while len(self.told) < count:
            assert self.loop.run_once(DEADLINE_S)
        self.loop.run_once(0)  # The twin may tell of an event behind what it told of.
        assert len(self.told) == count
        told, self.told = self.told, []
        return told

    def pair(self, *groups: NewGroup) -> tuple[LogWrite, LogWrite]:
        """An append, and its fsync behind it."""
        write = LogWrite(self.log, groups, 5, sync=False)
        return write, LogWrite(self.log, (), 5, sync=True, behind=write)

    def close(self) -> None:
        self.thread.close()
        self.log.close()
        self.disk.close()


@pytest.fixture(params=["python", "compiled"])
def rig(request: pytest.FixtureRequest, kernel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(executor, "lane", Lane if request.param == "python" else load_kernel(kernel).lane)
    made = Rig(tmp_path)
    yield made
    made.close()


def group(number: int, size: int = 100) -> NewGroup:
    return NewGroup(GroupKind.DATA, [messages([b"x" * size])], 1, number, number, 1)


def numbers(log: Log) -> list[int]:
    return [found.header.base_sequence for found in log.scan(0, log.durable)]


def files(folder: Path) -> dict[str, bytes]:
    # The first 64 bytes name the instant of the creation, which is the same here.
    return {path.name: path.read_bytes() for path in sorted((folder / "message").iterdir())}


def begun(work: LogWrite) -> bool:
    """Whether a job would be calls of a lane; its loan ends at once."""
    if work.begin() is None:
        return False
    assert work.end(errno.ECANCELED) is None
    return True


def test_the_files_are_those_of_appends_that_are_called(rig: Rig, tmp_path: Path, faults: Faults) -> None:
    other = open_log(MemoryDisk(), rig.place, 5)
    sizes = [10, 900, 0, 700, 300, CALL_BYTES_MAX + 1, 50, 20]
    for at, size in enumerate(sizes):
        faults.script([3, 1, 70])  # The system may take some bytes at a time.
        groups = [group(at, size), NewGroup(GroupKind.TICK, [], 1, at)]
        if at & 1:
            rig.submit(*rig.pair(*groups))
        else:
            rig.submit(LogWrite(rig.log, groups, 5, sync=True))
        first, *_ = rig.settle(1 + (at & 1))
        offsets = other.append(groups, 5)
        other.flush()
        assert first.result() == Written(offsets, other.end, other.crc32c)
        assert (rig.log.end, rig.log.durable, rig.log.crc32c) == (other.end, other.durable, other.crc32c)
    assert len(rig.log.segments) > 2 and numbers(rig.log)[::2] == [*range(len(sizes))]
    written = files(tmp_path)
    folder = other.disk
    for name, data in written.items():
        found = folder.open(f"{rig.place.folder}/{name}")
        assert found.pread(found.size(), 0) == data


def test_what_is_large_or_rolls_or_is_in_memory_is_called_and_the_rest_is_not(rig: Rig) -> None:
    assert begun(LogWrite(rig.log, [group(1)], 5, sync=True)) and begun(LogWrite(rig.log, (), 5, sync=True))
    assert not begun(LogWrite(rig.log, [group(1, CALL_BYTES_MAX)], 5, sync=True))
    rig.submit(LogWrite(rig.log, [group(1, SEGMENT_BYTES)], 5, sync=True))
    rig.settle(1)
    assert not begun(LogWrite(rig.log, [group(2)], 5, sync=True)) and begun(LogWrite(rig.log, (), 5, sync=True))
    memory = open_log(MemoryDisk(), rig.place, 5)
    assert not begun(LogWrite(memory, [group(1)], 5, sync=True))


def test_a_written_end_is_told_before_the_durable_one(rig: Rig) -> None:
    write, sync = rig.pair(group(1))
    rig.submit(write)
    (told,) = rig.settle(1)
    assert told.result().end == rig.log.end > rig.log.durable == 0
    rig.submit(sync)
    rig.settle(1)
    assert rig.log.durable == rig.log.end


def test_an_fsync_covers_what_was_appended_when_it_began_and_no_more(rig: Rig) -> None:
    rig.log.append([group(1)], 5)
    end = rig.log.end
    rig.submit(LogWrite(rig.log, (), 5, sync=True))
    rig.log.append([group(2)], 5)
    rig.settle(1)
    assert rig.log.durable == end < rig.log.end


def test_an_fsync_that_ends_behind_a_roll_takes_nothing_back(rig: Rig) -> None:
    rig.log.append([group(1)], 5)
    rig.submit(LogWrite(rig.log, (), 5, sync=True))
    # The loop appends to a pull log while the thread syncs it; the roll syncs the rest of the segment.
    rig.log.append([group(2, SEGMENT_BYTES)], 5)
    rig.log.append([group(3)], 5)
    rig.settle(1)
    first, second = rig.log.segments
    assert first.durable == second.base_offset == first.end
    Path(first.path).unlink()
    (found,) = rig.log.look(write_again=True)
    assert found.whole is not None and found.whole.end == first.end
    found.whole.close()


def test_rule_L3_an_append_without_space_is_cut_back_and_told_and_the_fsync_behind_it_tells_nothing(
    rig: Rig, faults: Faults, tmp_path: Path
) -> None:
    rig.submit(*rig.pair(group(1)))
    rig.settle(2)
    before = files(tmp_path), rig.log.end, rig.log.durable
    faults.script([50, NO_SPACE, 20, NO_SPACE])
    rig.submit(*rig.pair(group(2)))
    refused, synced = rig.settle(2)
    with pytest.raises(DiskFull):
        refused.result()
    assert synced.result().offsets == [] and (files(tmp_path), rig.log.end, rig.log.durable) == before
    faults.script()
    rig.submit(*rig.pair(group(3)))
    rig.settle(2)
    assert numbers(rig.log) == [1, 3]


def test_an_append_that_finds_space_when_it_is_called_is_written_once(rig: Rig, faults: Faults) -> None:
    faults.script([50, NO_SPACE], of_python=isinstance(rig.thread._lane, Lane))
    rig.submit(*rig.pair(group(1)))
    written, _ = rig.settle(2)
    assert written.result().offsets == [0] and numbers(rig.log) == [1]


@pytest.mark.parametrize("apart", [False, True])
def test_rule_L1_a_failed_fsync_is_told_and_nothing_is_written_or_synced_any_more(
    rig: Rig, faults: Faults, apart: bool
) -> None:
    faults.script(syncs=[-errno.EIO])
    rig.submit(*rig.pair(group(1)) if apart else [LogWrite(rig.log, [group(1)], 5, sync=True)])
    told = rig.settle(1 + apart)[-1]
    with pytest.raises(SyncFailed, match="Input/output error"):
        told.result()
    assert rig.log.durable == 0
    rig.submit(LogWrite(rig.log, [group(2)], 5, sync=True), LogWrite(rig.log, (), 5, sync=True))
    for refused in rig.settle(2):
        with pytest.raises(ServerStopped, match="an earlier write"):
            refused.result()
    with pytest.raises(SyncFailed, match="failed before"):
        rig.disk.sync_filesystem(str(rig.place.folder))


def test_rule_L1_no_fsync_counts_in_any_thread_before_the_loop_has_heard_of_one_that_failed(
    rig: Rig, faults: Faults
) -> None:
    rig.log.append([group(1)], 5)
    faults.script(syncs=[-errno.EIO])
    rig.submit(LogWrite(rig.log, (), 5, sync=True))
    assert select.select([rig.thread._lane], [], [], DEADLINE_S)[0]
    with pytest.raises(SyncFailed, match="failed before"):
        rig.disk.sync_folder(rig.place.folder)
    # A new segment would say that the one before it is durable.
    with pytest.raises(SyncFailed, match="failed before"):
        rig.log.roll(5)
    assert len(rig.log.segments) == 1 and rig.log.durable == 0
    with pytest.raises(ServerStopped):
        rig.settle(1)[0].result()


def test_rule_L1_no_fsync_counts_behind_another_one_of_the_disk_that_failed_meanwhile(rig: Rig, tmp_path: Path) -> None:
    work = LogWrite(rig.log, [group(1)], 5, sync=True)
    assert work.begin() is not None
    rig.disk._latch.failed("another", OSError(errno.EIO, "bad"))
    judged = work.end(0)
    assert judged is not None and rig.log.durable == 0
    with pytest.raises(SyncFailed, match="a sync of another failed before"):
        judged.result()
    assert not begun(LogWrite(rig.log, (), 5, sync=True))


@pytest.mark.parametrize("fails", [False, True])
def test_jobs_and_calls_are_never_under_way_together_and_are_told_in_order(
    rig: Rig, faults: Faults, fails: bool
) -> None:
    for number in range(3):  # All of it fits the first segment.
        ends: list[int] = []
        look = partial(_note, ends, rig.log)
        # A write whose calls fail comes before what was held behind them, too.
        faults.script([5, NO_SPACE] if fails else [], of_python=isinstance(rig.thread._lane, Lane))
        rig.submit(*rig.pair(group(number, 10)), look, LogWrite(rig.log, [group(number, 10)], 5, sync=True), look)
        first, synced, _, second, _ = (done.result() for done in rig.settle(5))
        assert ends == [first.end, second.end] and first.end == synced.end < second.end == rig.log.durable


def _note(ends: list[int], log: Log) -> None:
    ends.append(log.end)


def test_one_who_is_told_may_raise_and_all_others_are_told(rig: Rig) -> None:
    heard: list[int] = []

    def hear(number: int, done: Done[Any]) -> None:
        heard.append(number)
        if number == 1:
            raise KeyError("in a callback")

    for number in range(4):
        rig.thread.submit(LogWrite(rig.log, [group(number, 10)], 5, sync=True), partial(hear, number))
    with pytest.raises(KeyError):
        while True:
            assert rig.loop.run_once(DEADLINE_S)
    while len(heard) < 4:
        assert rig.loop.run_once(DEADLINE_S)
    assert heard == [0, 1, 2, 3]


def test_a_close_lets_ended_calls_take_effect_and_tells_nobody(rig: Rig) -> None:
    rig.submit(LogWrite(rig.log, [group(1)], 5, sync=True))
    assert select.select([rig.thread._lane], [], [], DEADLINE_S)[0]
    rig.thread.close()
    assert not rig.told and rig.log.durable == rig.log.end > 0
    with pytest.raises(RuntimeError, match="commit is closed"):
        rig.submit(LogWrite(rig.log, (), 5, sync=True))
