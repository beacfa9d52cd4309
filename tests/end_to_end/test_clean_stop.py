"""A stop that nothing disturbs leaves no line of level ERROR in a log, whatever the server is doing at that moment."""

import asyncio
import logging
from functools import partial
from pathlib import Path

import pytest

from delayd.config import DelayConfig, RealtimeConfig
from delayd.delay import server as delay_module
from delayd.delay.server import DelayServer
from delayd.net import home
from delayd.net.server import run
from realtime import server as realtime_module
from realtime.server import RealtimeServer
from tests.trust import put_secret

META_NOWHERE = "127.0.0.1:1"
STOPS = 12  # Each after one turn of the loop more than the one before: a job takes three.


@pytest.fixture(autouse=True)
def jobs_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each housekeeping job is due again as soon as it has run, so a stop meets all of them."""
    monkeypatch.setattr(home, "LOOK_STATE_S", 0)
    monkeypatch.setattr(delay_module, "SWEEP_S", 0)
    monkeypatch.setattr(realtime_module, "RETAIN_EVERY_S", 0)


@pytest.mark.parametrize("role", ["delay", "realtime"])
def test_a_stop_amid_all_jobs_logs_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture, role: str) -> None:
    bugs: list[object] = []

    async def life(turns: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: bugs.append(context))
        server: DelayServer | RealtimeServer
        if role == "delay":
            server = DelayServer(DelayConfig(data=str(tmp_path), port=0, meta=META_NOWHERE), bugs.append)
        else:
            server = RealtimeServer(RealtimeConfig(data=str(tmp_path), port=0, meta=META_NOWHERE), bugs.append)
        await server.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.stop()
        for _ in range(STOPS):
            await asyncio.sleep(0)

    put_secret(tmp_path)
    for turns in range(STOPS):
        run(partial(life, turns))
        assert not bugs, f"{turns} turns after its start"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
