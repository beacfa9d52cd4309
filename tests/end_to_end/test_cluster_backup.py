"""A cluster of five servers that is cut at one moment and restored loses nothing and doubles nothing."""

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest

from delayd.backup import ROLES, read_manifest
from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.names import retry_subject
from delayd.client.asking import ask
from delayd.log.pull import RetryRow
from delayd.machine.disk import RealDisk
from delayd.net.connection import Connection
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_map, need_maps
from delayd.wire.requests import RequestType
from realtime.retries import RetriedRows, retry_batch
from tests.end_to_end.cluster import cluster
from tests.end_to_end.cluster_backup import one_round
from tests.end_to_end.processes import HOST, ServerProcess
from tests.trust import connect_trusted
from tests.unit.cli.runner import run
from tests.waiting import DEADLINE_S, wait_until
from tests.worlds.dispatch_batches import dispatch_batch

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
    _, faults = one_round(tmp_path, Random(7), ROWS_S)
    assert not faults


def test_a_server_that_stops_while_it_is_cut_gives_the_answers_that_it_has_held_back(tmp_path: Path) -> None:
    with (
        ServerProcess("meta", tmp_path) as meta,
        ServerProcess("realtime", tmp_path, {"meta": meta.address}) as realtime,
        ServerProcess("delay", tmp_path, {"meta": meta.address}) as delay,
    ):
        assert realtime.running

        async def scenario() -> int:
            cuts = await connect_trusted(HOST, delay.port)
            sends = await connect_trusted(HOST, delay.port)
            await cuts.request(RequestType.CUT, {"hold_ms": 5_000})
            due_ms = time.time_ns() // 1_000_000 + 3_600_000
            source = RetriedRows(parse(dispatch_batch(1, [b"a", b"b"])), 0, RetryRow(1, 0, 0, 2, 1, due_ms, "", "no"))
            batch = retry_batch(ProducerPart(77, 1, 1), retry_subject(0xB0B, 3), [source], due_ms)
            answered = sends.request(RequestType.SEND_AGAIN, {}, [batch], 20_000)
            async with asyncio.timeout(DEADLINE_S):
                kept: HeadValue = 0
                while kept != 2:
                    kept = need_map((await cuts.request(RequestType.STATUS, {})).head, "counters")["pending"]
            assert not answered.done(), "the answer waits for the end of the hold"
            code = asyncio.create_task(asyncio.to_thread(delay.terminate))
            (result,) = need_maps((await answered).head, "results")
            assert result["count"] == 2
            return await code

        assert asyncio.run(scenario()) == 0


def test_a_backup_of_a_cut_needs_one_and_a_cut_ends_as_its_command_does(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with cluster(data) as production:
        where = ("--meta", production.meta.address, "--data", str(data))
        alone = run("backup", str(tmp_path / "copy"), *where, "--cut")
        assert alone.code == 4 and "delayd cut" in alone.err
        no_program = run("cut", *where, "--", "no-such-program")
        assert no_program.code == 2 and "no-such-program" in no_program.err
        assert run("cut", *where, "--", "sh", "-c", "exit 7").code == 7
        words = f"{sys.executable} -m delayd backup {tmp_path / 'copy'} --data {data} --meta {production.meta.address}"
        both = run("cut", *where, "--", "sh", "-c", f"{words} --cut; {words}")
        assert both.code == 4, "a cut is not cut anew by another command"
        assert read_manifest(RealDisk(), str(tmp_path / "copy")).moment_ms
        # Nothing is left of a cut that has ended.
        wait_until(lambda: not any((data / role / "backup").exists() for role in ROLES), "the cut is removed")
    restored = run("restore", str(tmp_path / "copy"), "--data", str(tmp_path / "elsewhere"))
    assert restored.code == 0 and "in any order" in restored.out and "target accept" not in restored.out
