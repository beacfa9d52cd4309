"""``delayd top`` with real servers: one snapshot for a pipe, and a screen that a key ends."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from tests.end_to_end.cluster import cluster
from tests.unit.cli.runner import run
from tests.waiting import DEADLINE_S


def test_a_snapshot_has_rates_and_the_lag_of_groups(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        production.send("1", "2", "3")
        assert production.consumed(3) == ["1", "2", "3"]
        production.send("4")
        words = ("top", "--once", "--every", "200ms", "--meta", production.meta.address)
        ran = run(*words, "--format", "json")
        assert ran.code == 0, ran.err
        found = json.loads(ran.out)
        assert [row["server"] for row in found["servers"]] == ["delay", "realtime"]
        delay, realtime = found["servers"]
        assert delay["in_per_s"] == 0 and realtime["out_per_s"] == 0 and delay["not_filed"] is not None
        assert {"late_p50_ms", "late_p99_ms", "late_max_ms"} <= delay.keys() and realtime["late_p99_ms"] is None
        (group,) = found["groups"]
        assert (group["subject"], group["group"], group["outstanding"]) == ("s", "g", 0)
        assert group["realtime_log_id"] == realtime["log_id"]
        for columns in ("80", "40"):
            shown = run(*words, environment={"COLUMNS": columns, "LINES": ""})
            assert shown.code == 0 and "realtime" in shown.out and "lag" in shown.out
            assert all(len(line) <= int(columns) for line in shown.out.splitlines()), shown.out


def test_a_screen_is_drawn_and_q_ends_it(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        production.send("1")
        assert production.consumed(1) == ["1"]
        controller, terminal = pty.openpty()
        command = [sys.executable, "-m", "delayd", "top", "--every", "200ms", "--meta", production.meta.address]
        watching = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE)
        os.close(terminal)
        shown, deadline = b"", time.monotonic() + DEADLINE_S
        while b"lag" not in shown and time.monotonic() < deadline:
            shown += os.read(controller, 4_096)
        assert b"realtime" in shown and b"lag" in shown, shown
        os.write(controller, b"q")
        _, said = watching.communicate(timeout=DEADLINE_S)
        assert (watching.returncode, said) == (0, b"")
        os.close(controller)
