"""A held start: a file that is put back is noticed, however early."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from delayd.address import Endpoint
from delayd.errors import DamagedData
from delayd.net import held_start
from delayd.net.held_start import HeldServer, HeldStart
from tests.trust import SECRET
from tests.waiting import DEADLINE_S


def test_a_file_that_is_put_back_as_soon_as_the_start_has_failed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_start, "LOOK_S", 0.01)
    monkeypatch.setattr(held_start, "RESTED_S", 0.02)
    monkeypatch.setattr(held_start, "AGAIN_S", 10 * DEADLINE_S)

    async def scenario() -> None:
        held = HeldStart(
            HeldServer("delay", Endpoint("127.0.0.1", 0), SECRET), DamagedData(str(tmp_path / "log"), 0, "is gone")
        )
        held.tell(DamagedData(str(tmp_path / "log"), 0, "is gone"))
        (tmp_path / "log").write_bytes(b"whole")
        await asyncio.wait_for(held.until_changed(asyncio.Event()), DEADLINE_S)

    asyncio.run(scenario())
