"""A cluster of five servers that is cut at one moment and restored loses nothing and doubles nothing."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from cli import ask
from delayd.net.connection import Connection
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType
from tests.end_to_end.cluster_backup import one_round
from tests.unit.cli.runner import run

BETWEEN_CUTS_S = 1.0  # Hundreds of messages fall due and are given back meanwhile; two seconds would end the hold.
REALTIMES = 2
ROWS_S = 500


def test_a_restored_cluster_goes_on_from_the_moment_of_its_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_ask, cuts = ask.ask, 0

    async def slow_ask(connection: Connection, request: RequestType, head: Mapping[str, HeadValue]) -> Head:
        nonlocal cuts
        if request is RequestType.CUT and not head["hold_ms"]:
            # The delay servers are cut, and the realtime servers are not.
            cuts += 1
            await asyncio.sleep(BETWEEN_CUTS_S if cuts <= REALTIMES else 0)
        return await true_ask(connection, request, head)

    monkeypatch.setattr(ask, "ask", slow_ask)
    assert not one_round(tmp_path, Random(7), ROWS_S)


def test_a_backup_of_a_cut_needs_one_and_a_command_that_can_not_be_run_is_named(tmp_path: Path) -> None:
    assert run("cut", "--meta", "127.0.0.1:1", "--data", str(tmp_path), "--", "true").code in (2, 4)
