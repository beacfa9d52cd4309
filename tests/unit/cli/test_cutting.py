"""Cutting: servers that were too slow are cut again, and get longer each time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from cli import ask
from cli.backup import HOLDS_MS, Running, cut_servers
from delayd.net.connection import Connection
from delayd.net.cut import HOLD_MS_MAX
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType

SERVERS = [Running(role, role, cast(Connection, None)) for role in ("realtime", "meta", "delay")]


@pytest.mark.parametrize("tries", [1, 2, 3, 4])
def test_each_try_to_cut_all_at_one_moment_may_take_longer(monkeypatch: pytest.MonkeyPatch, tries: int) -> None:
    cuts: list[HeadValue] = []

    async def answer(connection: Connection, request: RequestType, head: Mapping[str, HeadValue]) -> Head:
        if request is RequestType.CUT:
            cuts.append(head["hold_ms"])
            return {"cut": len(cuts)}
        return {"held": len(cuts) == 3 * tries}

    monkeypatch.setattr(ask, "ask", answer)
    fixed = asyncio.run(cut_servers(SERVERS, {}))
    assert cuts == [hold for hold_ms in HOLDS_MS[:tries] for hold in (hold_ms, 0, 0)], "delay servers come first"
    assert fixed.held is (tries <= len(HOLDS_MS))


def test_the_servers_take_each_hold() -> None:
    assert list(HOLDS_MS) == sorted(HOLDS_MS) and HOLDS_MS[-1] <= HOLD_MS_MAX
