"""A server's home: its housekeeping goes on, at its pace, whatever is done to the wall clock (rule T3)."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import apscheduler.schedulers.base
import pytest

from delayd.config import DelayConfig, MetaConfig, RealtimeConfig
from delayd.errors import BadSetting, Shortage
from delayd.log.segment import FileHeader, FileKind, create_segment
from delayd.machine import executor
from delayd.machine.disk import RealDisk
from delayd.machine.lane import Lane
from delayd.machine.state import LmdbState
from delayd.net import home
from delayd.net.home import Home
from delayd.net.machine import REAL_MACHINE, SERVER_PREFIX
from meta.server import MetaService
from tests.waiting import until

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


def test_without_a_descriptor_for_a_thread_the_start_is_put_off_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, lanes = DelayConfig(data=str(tmp_path)), list[type[Lane]]()

    def last_lane() -> Lane:
        if not lanes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return lanes.pop()()

    async def opened() -> None:
        Home(config, REAL_MACHINE, ("first", "second"), lambda: None)

    monkeypatch.setattr(executor, "lane", last_lane)
    for _ in range(2):  # The lock and the state are free for the next start.
        lanes[:] = [Lane]
        with pytest.raises(Shortage, match="the eventfd of delay-second can't be opened"):
            asyncio.run(opened())
        assert "delay-first" not in [thread.name for thread in threading.enumerate()]


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
