"""A log whose damaged end keeps its server from starting is given up while that server waits (rule L5)."""

import json
import os
from pathlib import Path

import pytest

from delayd.config import Value
from tests.end_to_end.cluster import COMMAND_EVERY_S, alarm_of, cluster, command, decide, flip_value, log_id_of, stopped
from tests.end_to_end.processes import ServerProcess
from tests.unit.cli.runner import run
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("folder", "damage"), [("realtime/message", "cut"), ("delay/message", "cut"), ("delay/message", "flipped")]
)
def test_a_server_starts_without_the_damaged_end_of_its_log(tmp_path: Path, folder: str, damage: str) -> None:
    with cluster(tmp_path) as production:
        production.send("1", "2", "3")
        assert production.consumed(3) == ["1", "2", "3"]
        server = production.delay if folder.startswith("delay") else production.realtime
        # A stop in order writes a checkpoint; what comes behind it is not in any.
        assert server.terminate() == 0
        server.start()
        told = _outcome_bytes(tmp_path)
        production.send("4")
        assert production.consumed(1) == ["4"]
        wait_until(lambda: _outcome_bytes(tmp_path) > told, lambda: server.log)
        told = _outcome_bytes(tmp_path)
        production.send("5")
        assert production.consumed(1) == ["5"]
        wait_until(lambda: _outcome_bytes(tmp_path) > told, lambda: server.log)
        server.kill()
        (path,) = (tmp_path / folder).glob("*.log")
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            if damage == "cut":
                file.truncate(size // 4)
            else:
                # Nothing stands behind the last group, but its outcome says that it was durable.
                file.seek(size - 1)
                file.write(bytes([path.read_bytes()[-1] ^ 1]))
        server.start_held()
        verified = run("log", "verify", "--data", str(tmp_path))
        assert verified.code == 3 and str(path) in verified.out, verified
        status = run("status", "--meta", production.meta.address)
        assert status.code == 3 and str(path) in status.out, status
        assert "delayd mend give-up" in status.out and " held " in status.out, status.out
        (offline,) = _mendable("--data", str(tmp_path))
        assert (offline["id"], offline["path"]) == (str(tmp_path / folder), str(path)), offline
        (listed,) = _mendable("--meta", production.meta.address)
        assert str(path) in str(listed["reason"]) and "lost for good" in str(listed["costs"]), listed
        assert listed["command"] == offline["command"] == f"delayd mend give-up {tmp_path / folder}"
        given_up = run(*str(listed["command"]).split()[1:], stdin=b"y\n")
        assert given_up.code == 0 and "is given up" in given_up.err and "start the server" in given_up.out, given_up
        server.until_ready()
        if folder == "realtime/message":
            assert alarm_of(production)
            decide(production, "mend", "give-up", "window")
            decide(production, "target", "accept", log_id_of(production, "realtime"))
        production.send("6")
        assert production.consumed(1) == ["6"]
        again = run("mend", "give-up", "--yes", str(tmp_path / folder))
        assert again.code != 0 and "pid" in again.err, "a server that runs has its log open"
        command("mend", "list", "--meta", production.meta.address)


@pytest.mark.parametrize("mended", ["put back", "given up"])
def test_consumers_wait_for_a_damaged_pull_log_and_nobody_else_does(tmp_path: Path, mended: str) -> None:
    with cluster(tmp_path) as production:
        production.send("1", "2", "3")
        assert sorted(production.consumed(3)) == ["1", "2", "3"]
        server = production.realtime
        assert server.terminate() == 0
        server.start()
        production.send("4", "5")
        assert sorted(production.consumed(2)) == ["4", "5"]
        server.kill()
        (path,) = (tmp_path / "realtime/pull").glob("*.log")
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 4])
        server.start()
        production.send("6")
        status = run("status", "--meta", production.meta.address)
        assert status.code == 3 and "delayd mend take pull" in status.out, status
        if mended == "put back":
            path.with_suffix(".copy").write_bytes(whole)
            path.with_suffix(".copy").rename(path)
        else:
            rows = _mendable("--meta", production.meta.address)
            assert [(row["id"], row["decision"]) for row in rows] == [("pull", "take"), ("pull", "give-up")]
            decide(production, *str(rows[1]["command"]).split()[1:])
        assert (
            production.consumed(1 if mended == "put back" else 3)
            == ["4", "5", "6"][-1 if mended == "put back" else 0 :]
        )


def test_an_id_that_two_servers_list_is_decided_on_at_the_one_that_the_command_names(tmp_path: Path) -> None:
    with cluster(tmp_path, checkpoint_every_ms=200) as production:
        at_meta = ("--meta", production.meta.address)
        production.send("1")
        assert production.consumed(1) == ["1"]
        first = log_id_of(production, "realtime")
        own: dict[str, Value] = {"meta": production.meta.address, "checkpoint_every_ms": 200}
        with ServerProcess("realtime", tmp_path / "other", own) as other:

            def others() -> set[str]:
                rows = json.loads(command("servers", *at_meta, "--role", "realtime", "--format", "json"))
                return {str(row["log_id"]) for row in rows} - {first}

            (second,) = wait_until(others, "meta hears of it", every_s=COMMAND_EVERY_S)
            # It has no subject yet, so it gets the next one.
            production.send("2", subject="t")
            assert production.consumed(1, "t") == ["2"]
            for server, data in ((production.realtime, tmp_path), (other, tmp_path / "other")):
                with stopped(server):
                    flip_value(data / "realtime", b"group/")
            damaged = [row for row in _mendable(*at_meta) if row["decision"] == "give-up"]
            assert [(row["id"], row["log_id"]) for row in damaged] == [
                ("group/00000001", log_id) for log_id in sorted((first, second))
            ]
            refused = run("mend", "give-up", "group/00000001", *at_meta, "--data", str(tmp_path), "--yes")
            assert refused.code == 2 and "2 servers list group/00000001; say which" in refused.err, refused
            decide(production, *str(damaged[0]["command"]).split()[1:])
            assert {row["log_id"] for row in _mendable(*at_meta)} == {damaged[1]["log_id"]}


def _mendable(*options: str) -> list[dict[str, object]]:
    """The rows of what waits to be mended."""
    found: list[dict[str, object]] = json.loads(command("mend", "list", *options, "--format", "json"))
    return found


def _outcome_bytes(data: Path) -> int:
    return sum(path.stat().st_size for path in (data / "delay/dispatch").rglob("*.log"))
