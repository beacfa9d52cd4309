"""``delayd backup`` and ``delayd restore`` with real servers: under load, interrupted, damaged and put back."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from delayd.client.asking import ask
from delayd.net.connection import Connection
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType
from tests.end_to_end.cluster import Cluster, alarm_of, cluster, logged
from tests.unit.cli.runner import Ran, run
from tests.waiting import wait_until

ROLES = ("delay", "realtime", "meta")
BETWEEN_CUTS_S = 0.8  # Hundreds of messages become due; two seconds would end the hold.


def backed_up(production: Cluster, folder: Path, *options: str) -> Ran:
    data = ("--data", str(production.data), "--meta", production.meta.address)
    return run("backup", str(folder), *data, *options)


def held(ran: Ran) -> dict[str, dict[str, object]]:
    assert ran.code == 0, ran.err
    return {row["role"]: row for row in json.loads(ran.out)}


class Load:
    """Sends to one subject as fast as one thread can, and notes what was accepted."""

    def __init__(self, meta: str, delay_s: float = 0.3) -> None:
        self.accepted: list[str] = []
        self._meta, self._delay_s = meta, delay_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with delayd.Producer(self._meta) as producer:
            number = 0
            while not self._end.is_set():
                bodies = [f"{number + each}" for each in range(50)]
                pending = [
                    producer.send_nowait("s", body.encode(), delay=timedelta(seconds=self._delay_s)) for body in bodies
                ]
                for each in pending:
                    each.receipt(20)
                self.accepted += bodies
                number += 50


def consumed(production: Cluster, count: int) -> list[str]:
    return production.consumed(count, within_s=30)


def test_a_backup_under_load_is_of_one_instant_and_starts_with_balanced_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_ask, cuts = ask.ask, 0

    async def slow_ask(connection: Connection, request: RequestType, head: Mapping[str, HeadValue]) -> Head:
        nonlocal cuts
        if request is RequestType.CUT and not head["hold_ms"]:
            # The delay server is cut, its target is not. What became due meanwhile must not leave. When the machine
            # stands still for longer than the hold, the servers are cut once more, and that must not take long.
            cuts += 1
            await asyncio.sleep(BETWEEN_CUTS_S if cuts == 1 else 0)
        return await true_ask(connection, request, head)

    monkeypatch.setattr(ask, "ask", slow_ask)
    data, folder, elsewhere = tmp_path / "data", tmp_path / "backup", tmp_path / "elsewhere"
    with cluster(data) as production:
        with Load(production.meta.address) as load:
            wait_until(lambda: len(load.accepted) > 500, "messages are accepted")
            sure = len(load.accepted)
            ran = backed_up(production, folder)
            assert ran.code == 0, ran.err
            assert "its servers fit each other" in ran.out
            after = len(load.accepted)
            wait_until(lambda: len(load.accepted) > after + 100, "the servers serve on")
        wait_until(lambda: not any((data / role / "backup").exists() for role in ROLES), "the cut is removed")
    ran = run("restore", str(folder), "--data", str(elsewhere))
    assert ran.code == 0, ran.err
    assert "they go on from that moment" in ran.out
    with cluster(elsewhere) as restored:
        found = consumed(restored, sure)
        assert len(found) >= sure and len(found) == len(set(found)), "each message once"
        assert set(load.accepted[:sure]) <= set(found)
        rest = restored.consumed(100_000, within_s=2)
        assert not set(rest) & set(found)
        for server in (restored.delay, restored.realtime):
            assert "target_refused" not in server.log and "restored_origin" not in server.log
        restored.send("later", subject="other")
        assert restored.consumed(1, subject="other") == ["later"]
        (pulled,) = (elsewhere / "realtime/pull").glob("*.log")
        assert pulled.read_bytes().count(b"group_ids_skipped") == 1, "rule Q2"
    audit = run("audit", "--data", str(elsewhere), "--grace", "0ms")
    assert audit.code == 0, audit.out + audit.err
    assert "the books balance" in audit.out


def test_a_backup_that_is_killed_goes_on_and_a_later_one_copies_only_what_came(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        production.send(*map(str, range(200)))
        words = ("backup", str(folder), "--data", str(data), "--meta", production.meta.address)
        killed = subprocess.Popen([sys.executable, "-m", "delayd", *words], stdout=subprocess.PIPE)
        wait_until(lambda: (folder / "backup.unfinished").exists() or killed.poll() is not None, "it has begun")
        killed.kill()
        killed.communicate()
        if not (folder / "backup.json").exists():
            assert "not finished" in run("backup", str(folder), "--show").err
            refused = run("restore", str(folder), "--data", str(tmp_path / "x"))
            assert refused.code == 2 and "not finished" in refused.err
        first = held(backed_up(production, folder, "--format", "json"))
        assert set(first) == set(ROLES)
        production.send("more")
        second = held(backed_up(production, folder, "--format", "json"))
        assert second["delay"]["log_end"] > first["delay"]["log_end"]  # type: ignore[operator]
        # The servers hold nothing for a backup that has ended.
        wait_until(lambda: not any((data / role / "backup").exists() for role in ROLES), "the cut is removed")
    assert held(run("backup", str(folder), "--show", "--format", "json")) == second


def test_each_form_of_what_a_backup_holds(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        production.send("1", subject="s")
        with delayd.Producer(production.meta.address) as producer:
            producer.send("s", b"2", delay=timedelta(hours=1), key="k")
        # In order, so that the state names a run of keys, which a backup leaves out.
        assert production.delay.terminate() == 0
    # Stopped servers are locked and copied without being asked.
    ran = run("backup", str(folder), "--data", str(data), "--format", "csv")
    assert ran.code == 0, ran.err
    names, *rows = (line.split(",") for line in ran.out.splitlines())
    assert [row[names.index("role")] for row in rows] == list(ROLES)
    for columns in ("80", "40"):
        shown = run("backup", str(folder), "--show", environment={"COLUMNS": columns, "LINES": ""})
        assert shown.code == 0
        table = shown.out.split(f"{folder} is whole")[0]
        assert all(len(line) <= int(columns) for line in table.splitlines()), table
        for row in rows:
            assert row[names.index("log_id")] in table
    assert run("audit", "--data", str(folder)).code == 0
    assert run("log", "verify", "--data", str(folder)).code == 0


def test_a_damaged_file_of_a_server_is_named_and_everything_else_is_in_the_backup(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        production.send("1", "2")
        assert production.consumed(2) == ["1", "2"]
        # In order, so that a checkpoint counts what is damaged now; else it could be the torn end of a crash.
        for server in (production.delay, production.realtime):
            assert server.terminate() == 0
    (log,) = (data / "realtime" / "message").iterdir()
    flipped = bytearray(log.read_bytes())
    flipped[300] ^= 1
    log.write_bytes(flipped)
    ran = run("backup", str(folder), "--data", str(data))
    assert ran.code == 3 and log.name in ran.err and "is whole" in ran.out
    assert (folder / "realtime" / "message" / log.name).read_bytes() == bytes(flipped)


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        production.send("1")
        assert run("backup", str(data / "in"), "--data", str(data)).code == 2
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").touch()
        refused = run("backup", str(tmp_path / "other"), "--data", str(data), "--meta", production.meta.address)
        assert refused.code == 2 and "not empty" in refused.err
        assert backed_up(production, folder).code == 0
        over = run("restore", str(folder), "--data", str(data))
        assert over.code == 2 and "in use" in over.err
        assert production.consumed(1) == ["1"]
    over = run("restore", str(folder), "--data", str(data))
    assert over.code == 2 and "not empty" in over.err


def test_rule_H8_a_delay_server_that_is_restored_alone_waits_for_an_operator(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    with cluster(data) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        assert backed_up(production, folder, "--role", "delay").code == 0
        for body in ("2", "3"):
            production.send(body)
            assert production.consumed(1) == [body]
        production.delay.kill()
        shutil.rmtree(data / "delay")
        ran = run("restore", str(folder), "--data", str(data), "--role", "delay")
        assert ran.code == 0 and "target accept" in ran.out
        production.delay.start()
        logged(production.delay, "fenced by=target")
        assert alarm_of(production)
        assert production.consumed(1, within_s=1) == []
