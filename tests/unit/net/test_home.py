"""A server's home: its housekeeping goes on, at its pace, whatever is done to the wall clock (rule T3)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import apscheduler.schedulers.base
import pytest

from delayd.config import DelayConfig, MetaConfig, RealtimeConfig
from delayd.errors import BadSetting
from delayd.log.segment import FileHeader, FileKind, create_segment
from delayd.machine.disk import RealDisk
from delayd.machine.state import LmdbState
from delayd.net import home
from delayd.net.connection import CLOSE_MS_MAX
from delayd.net.home import Home
from delayd.net.machine import REAL_MACHINE, SERVER_PREFIX
from delayd.net.program import STOP_MS_MAX
from meta.server import MetaService
from tests.waiting import DEADLINE_S, until

EVERY_S = 0.02
DAY = timedelta(days=1)


class Wall(datetime):
    """The wall clock as the scheduler reads it, set ahead or back by a test."""

    step = timedelta()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Wall:
        read = datetime.now(tz) + cls.step
        return cls(*read.timetuple()[:6], read.microsecond, tzinfo=tz)


@pytest.fixture(autouse=True)
def wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wall, "step", timedelta())
    monkeypatch.setattr(home, "LOOK_S", 0.05)
    for module in (home, apscheduler.schedulers.base):
        monkeypatch.setattr(module, "datetime", Wall)


@contextmanager
def a_home(folder: Path, job: Callable[[], None], every_s: float = EVERY_S) -> Iterator[Home]:
    found = Home(DelayConfig(data=str(folder)), REAL_MACHINE, (), lambda: None)
    found.every(every_s, job)
    core = Core()
    try:
        yield found
    finally:
        asyncio.get_running_loop().create_task(found.stop(core))
        found.close(core)


class Core:
    """Nothing to stop, nothing to close."""

    def stop(self, stopped: Callable[[], None]) -> None:
        stopped()

    def close(self) -> None: ...


@pytest.mark.parametrize("step", [-DAY, -timedelta(hours=1), -timedelta(seconds=1), timedelta(), 3_650 * DAY])
def test_rule_T3_jobs_go_on_at_their_pace_after_a_step_of_the_wall_clock(tmp_path: Path, step: timedelta) -> None:
    async def scenario() -> None:
        loop, runs = asyncio.get_running_loop(), list[float]()
        with a_home(tmp_path, lambda: runs.append(loop.time())):
            await until(lambda: len(runs) >= 3, "runs before the step")
            Wall.step = step
            began, before = loop.time(), len(runs)
            await until(lambda: len(runs) >= before + 5, "runs after the step")
        assert runs[before + 4] - began >= 3 * EVERY_S, "a step ahead brings no burst of runs"

    asyncio.run(scenario())


def test_rule_T3_jobs_go_on_after_any_number_of_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "LOOK_S", 0.001)

    async def scenario() -> None:
        runs = list[float]()
        with a_home(tmp_path, lambda: runs.append(0.0), every_s=0.002):
            for _ in range(100):
                Wall.step -= DAY
                runs.clear()
                # A job is moved to now at any instant of its own run: none of these may be its last.
                await until(lambda: bool(runs), "a run after a step")

    asyncio.run(scenario())


def test_a_job_that_fails_is_told_to_the_loop_and_not_only_to_a_log(tmp_path: Path) -> None:
    told: list[BaseException] = []

    def job() -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        with a_home(tmp_path, job):
            await until(lambda: bool(told), "the error")

    asyncio.run(scenario())
    assert isinstance(told[0], ZeroDivisionError)


def test_a_stop_in_the_turn_in_which_a_job_is_due_logs_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        found, core = Home(DelayConfig(data=str(tmp_path)), REAL_MACHINE, (), lambda: None), Core()
        # The scheduler's turn, in which the job is due, and the end of the scheduler are both queued on the loop.
        found.every(0, lambda: None)
        await found.stop(core)
        await turns()
        found.close(core)

    asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


def test_no_job_is_called_after_the_stop_began_however_often_jobs_are_due(tmp_path: Path) -> None:
    async def scenario(turns_before: int) -> None:
        found, core, late = Home(DelayConfig(data=str(tmp_path)), REAL_MACHINE, (), lambda: None), Core(), list[int]()
        found.every(0, lambda: late.append(turns_before))
        await turns(turns_before)
        late.clear()
        await found.stop(core)
        await turns()
        found.close(core)
        assert not late, "the core was stopped under this job"

    for turns_before in range(12):
        asyncio.run(scenario(turns_before))


def test_nobody_hears_of_a_job_that_ends_while_the_threads_are_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        heard, runs = list[int](), threading.Event()
        found, core = Home(DelayConfig(data=str(tmp_path)), REAL_MACHINE, ("worker",), lambda: heard.append(1)), Core()
        await found.stop(core)
        found.executors[0].submit(runs.set, lambda done: heard.append(2))
        assert runs.wait(DEADLINE_S)
        found.close(core)
        await turns()
        assert not heard

    asyncio.run(scenario())


class BusyCore(Core):
    """Its last checkpoint never ends by itself."""

    def stop(self, stopped: Callable[[], None]) -> None: ...


def test_a_core_that_goes_on_with_its_last_checkpoint_holds_up_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(home, "CORE_STOP_MS", 20)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        found, core = Home(DelayConfig(data=str(tmp_path)), REAL_MACHINE, ("worker",), lambda: None), BusyCore()
        (worker,), runs = found.executors, threading.Event()

        def checkpoint() -> None:
            while True:
                runs.set()
                worker.give_way()

        worker.submit(checkpoint, lambda done: None)
        assert runs.wait(DEADLINE_S)
        await found.stop(core)
        found.close(core)
        Home(DelayConfig(data=str(tmp_path)), REAL_MACHINE, (), lambda: None).close(None)  # The directory is free.

    asyncio.run(scenario())
    assert "last_checkpoint_given_up limit_ms=20" in caplog.text


def test_what_a_stop_waits_for_fits_into_its_limit() -> None:
    # Half a second is kept for the interpreter's own end, and half of one for the pieces of work that threads are in.
    assert home.CORE_STOP_MS + CLOSE_MS_MAX + 500 + 500 < STOP_MS_MAX


async def turns(count: int = 8) -> None:
    """Let a loop go round; each callback that a callback plans takes one turn more."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [FileKind.MESSAGE, FileKind.REALTIME])
def test_a_folder_that_was_put_in_the_place_of_another_roles_is_named(tmp_path: Path, kind: FileKind) -> None:
    config = (DelayConfig if kind is FileKind.REALTIME else RealtimeConfig)(data=str(tmp_path))
    path = f"{config.folder}/message/{0:020}.log"
    disk = RealDisk()
    disk.make_folder(f"{config.folder}/message")
    create_segment(disk, path, FileHeader(kind, 7, 0, 0, 0)).close()
    before = Path(path).read_bytes()

    async def opened() -> None:
        Home(config, REAL_MACHINE, (), lambda: None)

    for _ in range(2):  # The lock is free for the next start.
        with pytest.raises(BadSetting, match="put each folder back in its place") as raised:
            asyncio.run(opened())
        assert ("realtime" if kind is FileKind.REALTIME else "delay") in raised.value.message
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("config", [DelayConfig, RealtimeConfig])
def test_meta_s_folder_in_the_place_of_another_server_s_is_named(
    tmp_path: Path, config: type[DelayConfig] | type[RealtimeConfig]
) -> None:
    ours = config(data=str(tmp_path))
    state = LmdbState(f"{ours.folder}/state.lmdb")
    state.commit([(SERVER_PREFIX + b"delay/12345678", b"x")])
    state.close()

    async def opened() -> None:
        Home(ours, REAL_MACHINE, (), lambda: None)

    for _ in range(2):  # The lock and the state are free for the next start.
        with pytest.raises(BadSetting, match="is the folder of a meta server"):
            asyncio.run(opened())


@pytest.mark.parametrize("kind", [FileKind.MESSAGE, FileKind.REALTIME])
def test_another_server_s_folder_in_the_place_of_meta_s_is_named(tmp_path: Path, kind: FileKind) -> None:
    config = MetaConfig(data=str(tmp_path))
    disk = RealDisk()
    disk.make_folder(f"{config.folder}/message")
    create_segment(disk, f"{config.folder}/message/{0:020}.log", FileHeader(kind, 7, 0, 0, 0)).close()

    async def opened() -> None:
        MetaService(config, lambda error: None).open()

    for _ in range(2):
        with pytest.raises(BadSetting, match="and this is a meta server"):
            asyncio.run(opened())
    assert not Path(f"{config.folder}/state.lmdb").exists()
