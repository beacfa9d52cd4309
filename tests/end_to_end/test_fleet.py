"""A cluster on two machines: one audit of both directories proves what none of them shows alone."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from tests.end_to_end.cluster import META, command
from tests.end_to_end.processes import ServerProcess
from tests.unit.cli.runner import run
from tests.waiting import wait_until

MESSAGES = 20


@pytest.mark.timeout(120)
def test_two_machines_are_audited_together_and_meta_says_who_is_missing(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with ServerProcess("meta", a, META) as meta:
        own = {"meta": meta.address}
        with ServerProcess("delay", a, own), ServerProcess("realtime", b, own):
            with delayd.Producer(meta.address) as producer:
                for _ in range(MESSAGES):
                    producer.send("orders", b"x", delay=timedelta(0))

            def audited() -> dict[str, object]:
                words = ("audit", str(a), str(b), "--discover", "--meta", meta.address, "--format", "json")
                found: dict[str, object] = json.loads(command(*words))
                return found

            wait_until(lambda: audited()["total"]["dispatched"] == MESSAGES, "all are proved")  # type: ignore[index]
            told = audited()
            assert (told["balanced"], told["absent"], told["missing"]) == (True, [], [])
            listed = json.loads(command("servers", "--meta", meta.address, "--role", "realtime", "--format", "json"))
            realtime = listed[0]["log_id"], listed[0]["address"]
            alone = run("audit", str(a), "--discover", "--meta", meta.address)
            assert alone.code == 0
            expected = f"meta knows realtime server {realtime[0]} at {realtime[1]}, and its directory is not here"
            assert expected in alone.out
            assert f"nothing but dispatch logs shows that {MESSAGES} messages" in alone.out
            assert "meta knows" not in run("audit", str(a)).out
    gone = run("audit", str(a), str(b), "--discover", "--meta", meta.address)
    assert gone.code not in (0, 3) and meta.address in gone.err and gone.out == ""
