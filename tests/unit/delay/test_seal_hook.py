"""The command that gets each new seal: told once or more, in order, and harmless when it fails, hangs or is missing."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop

from delayd.config import DelayConfig
from delayd.delay import seal_hook
from delayd.delay.seal_hook import SealHook, line_of
from delayd.log.hour import NO_SEAL, Seal, SealFacts, SealMark
from tests.waiting import DEADLINE_S
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
FIRST_HOUR = 498_664


def seals(count: int) -> list[Seal]:
    found: list[Seal] = []
    for number in range(count):
        facts = SealFacts(FIRST_HOUR + number, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, bytes(32), bytes(32))
        found.append(Seal(0xDE1A, number, facts, found[-1].sha256 if found else NO_SEAL))
    return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_hook, "LOOK_S", 0.01)
    monkeypatch.setattr(seal_hook, "AGAIN_S", 0.02)


class Told:
    """A seal log, and the hook of one life of its server."""

    def __init__(self, folder: Path, command: str, count: int) -> None:
        self.seals, self.output = seals(count), folder / "output"
        self.waits: Callable[[], bool] = lambda: False
        self.unreadable = False
        self._folder, self._command = folder / "delay", command
        self._folder.mkdir()
        self.hook = self.born()

    def born(self) -> SealHook:
        return SealHook(DelayConfig(data=str(self._folder.parent), seal_hook=self._command), self)

    def seal_end(self) -> SealMark:
        return SealMark(seals=len(self.seals))

    def seals_since(self, number: int, done: Callable[[Sequence[Seal]], None]) -> None:
        done([] if self.unreadable else self.seals[number:])

    def live(self, until: Callable[[], bool]) -> None:
        """Run it until something holds, and cancel it, as a stop does."""

        async def run() -> None:
            task = asyncio.get_running_loop().create_task(self.hook.run())
            end = time.monotonic() + DEADLINE_S
            while not until():
                assert time.monotonic() < end and not task.done(), f"{self.lines()}"
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        uvloop.run(run())  # As servers do.

    def lines(self) -> list[str]:
        return self.output.read_text().splitlines(keepends=True) if self.output.exists() else []

    def taken(self) -> str:
        path = self._folder / "seal-hook"
        return path.read_text() if path.exists() else ""


def test_each_seal_is_told_in_order_and_the_next_life_goes_on(tmp_path: Path) -> None:
    told = Told(tmp_path, f"cat >> {tmp_path}/output", 3)
    told.live(lambda: told.taken() == "3\n")
    assert told.lines() == [line_of(seal) for seal in seals(3)]
    assert told.lines()[1] == f"2026112017 000000000000de1a 1 {seals(2)[1].sha256.hex()}\n"
    told.seals, told.hook = seals(5), told.born()
    told.live(lambda: told.taken() == "5\n")
    assert told.lines() == [line_of(seal) for seal in seals(5)]


def test_one_run_gets_a_bounded_number_of_seals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_hook, "SEALS_MAX", 2)
    told = Told(tmp_path, f"(cat; echo) >> {tmp_path}/output", 5)
    told.live(lambda: told.taken() == "5\n")
    assert [len(run.split("\n")) for run in told.output.read_text().split("\n\n") if run] == [2, 2, 1]


def test_a_command_that_fails_is_repeated_told_once_and_shown_by_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = f"echo >> {tmp_path}/runs; test -e {tmp_path}/works && cat >> {tmp_path}/output || exit 3"
    told = Told(tmp_path, command, 2)
    runs = tmp_path / "runs"
    told.live(lambda: runs.exists() and len(runs.read_text()) >= 3)
    (wait,) = told.hook.waits()
    assert wait.what == "2 seals for the command of `seal_hook`"
    assert wait.why == "it ended with exit code 3"
    assert [record.message for record in caplog.records] == [
        "seal_hook_failed seals=2 reason='it ended with exit code 3'"
    ]
    assert told.taken() == ""
    (tmp_path / "works").touch()
    told.live(lambda: told.taken() == "2\n")
    assert list(told.hook.waits()) == []
    assert told.lines() == [line_of(seal) for seal in seals(2)]


def test_a_command_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal_hook, "RUN_S_MAX", 0.3)
    told = Told(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; wait", 1)
    told.live(lambda: any(True for _ in told.hook.waits()))
    (wait,) = told.hook.waits()
    assert wait.why == "it did not end within 0.3 s, and was ended"
    assert gone(int((tmp_path / "child").read_text()))


@pytest.mark.parametrize("slow", [False, True], ids=["runs", "starts"])
def test_a_stop_ends_a_command_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    start = asyncio.create_subprocess_shell

    async def started(command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await start(command, **options)
        await asyncio.sleep(0.5 if slow else 0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_shell", started)
    child = tmp_path / "child"
    told = Told(tmp_path, f"sleep 600 & echo $! > {child}; wait", 1)
    told.live(lambda: child.exists() and bool(child.read_text().strip()))
    assert gone(int(child.read_text()))
    assert told.taken() == ""


def test_hours_are_kept_while_the_command_has_not_taken_their_seals_where_the_setting_says_so(tmp_path: Path) -> None:
    (tmp_path / "delay").mkdir()
    for waits in (False, True):
        config = DelayConfig(data=str(tmp_path), seal_hook="exit 3", retention_waits=waits)
        (tmp_path / "delay" / "seal-hook").write_text("0")
        world = World(retention_hours=1)
        retention = world.core.upkeep.retention
        SealHook(config, retention)
        world.send(wanted(3, 500, "a"))
        world.drain()
        world.check_sealing()
        world.clock.advance(2 * HOUR_MS)
        world.delete_hours()
        assert bool(world.deleted()) is not waits
        (tmp_path / "delay" / "seal-hook").write_text("1")
        SealHook(config, retention)
        world.delete_hours()
        assert world.deleted()


def gone(pid: int) -> bool:
    """Whether a process has ended, or ends soon."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_a_command_that_is_missing_harms_nobody(tmp_path: Path) -> None:
    told = Told(tmp_path, f"{tmp_path}/nothing", 1)
    told.live(lambda: any(True for _ in told.hook.waits()))
    assert [wait.why for wait in told.hook.waits()] == ["it ended with exit code 127"]


def test_a_command_that_reads_nothing_has_taken_its_seals(tmp_path: Path) -> None:
    told = Told(tmp_path, "exit 0", 1_000)
    told.live(lambda: told.taken() == "1000\n")


def test_a_seal_log_that_can_not_be_read_is_tried_again(tmp_path: Path) -> None:
    told = Told(tmp_path, "exit 0", 1)
    told.unreadable = True
    told.live(lambda: any(True for _ in told.hook.waits()))
    told.unreadable = False
    told.live(lambda: told.taken() == "1\n")


@pytest.mark.parametrize("text", ["", "x", "-4", "9", "1" * 40])
def test_seals_are_told_again_when_the_file_does_not_say_how_many_were(tmp_path: Path, text: str) -> None:
    told = Told(tmp_path, f"cat >> {tmp_path}/output", 2)
    (tmp_path / "delay" / "seal-hook").write_text(text)
    told.hook = told.born()
    told.live(lambda: told.taken() == "2\n")
    assert told.lines() == [line_of(seal) for seal in seals(2)]


def test_a_number_that_can_not_be_kept_means_that_seals_are_told_again(tmp_path: Path) -> None:
    told, folder = Told(tmp_path, f"cat >> {tmp_path}/output", 1), tmp_path / "delay"
    folder.rmdir()
    told.live(lambda: len(told.lines()) >= 2)
    assert any("No such file" in wait.why for wait in told.hook.waits())
    folder.mkdir()
    told.live(lambda: told.taken() == "1\n")
