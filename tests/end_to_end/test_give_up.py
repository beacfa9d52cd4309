"""A log whose damaged end keeps its server from starting is given up while that server waits (rule L5)."""

import os
from pathlib import Path

import pytest

from tests.end_to_end.cluster import alarm_of, cluster, command, decide, log_id_of
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
        assert "delayd log give-up" in status.out and " held " in status.out, status.out
        given_up = run("log", "give-up", str(tmp_path / folder), stdin=b"y\n")
        assert given_up.code == 0 and "is given up" in given_up.err and "start the server" in given_up.out, given_up
        server.until_ready()
        if folder == "realtime/message":
            assert alarm_of(production)
            decide(production, "quarantine", "drop", "window")
            decide(production, "target", "accept", log_id_of(production, "realtime"))
        production.send("6")
        assert production.consumed(1) == ["6"]
        again = run("log", "give-up", "--yes", str(tmp_path / folder))
        assert again.code != 0 and "pid" in again.err, "a server that runs has its log open"
        command("quarantine", "list", "--meta", production.meta.address)


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
        assert status.code == 3 and "delayd quarantine release pull" in status.out, status
        if mended == "put back":
            path.with_suffix(".copy").write_bytes(whole)
            path.with_suffix(".copy").rename(path)
        else:
            decide(production, "quarantine", "drop", "pull")
        assert (
            production.consumed(1 if mended == "put back" else 3)
            == ["4", "5", "6"][-1 if mended == "put back" else 0 :]
        )


def _outcome_bytes(data: Path) -> int:
    return sum(path.stat().st_size for path in (data / "delay/dispatch").rglob("*.log"))
