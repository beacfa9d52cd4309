"""Subjects leave a realtime server, and what stays behind there is counted and told (docs/cluster.md)."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import delayd
from delayd.config import Value
from tests.end_to_end.processes import ServerProcess
from tests.unit.cli.runner import Ran, run
from tests.waiting import wait_until

META: dict[str, Value] = {"heartbeat_ms": 100, "lease_ms": 1_500}


def test_all_subjects_of_a_server_go_but_for_those_whose_messages_would_be_stranded(tmp_path: Path) -> None:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path, META))
        own: dict[str, Value] = {"meta": meta.address, "secret_file": str(tmp_path / "cluster.secret")}
        stack.enter_context(ServerProcess("delay", tmp_path, own))
        stack.enter_context(ServerProcess("realtime", tmp_path, own))

        def move(*words: str) -> Ran:
            return run("route", "move", *words, "--yes", "--meta", meta.address, "--data", str(tmp_path))

        with delayd.Producer(meta.address) as producer:
            for subject in ("full", "empty"):
                producer.send(subject, b"first", delay=timedelta(0))
                with delayd.Consumer(meta.address, subject, group="g") as consumer:
                    consumer.pull(1, wait=timedelta(seconds=10)).ack()
            producer.send_batch("full", [b"x"] * 40, delay=timedelta(0))
            source = run("servers", "--meta", meta.address, "--role", "realtime", "--format", "csv").out.split(",")
            old = next(word for word in source if len(word) == 16 and word.isalnum())
            refused = move("--all-from", old)
            assert refused.code == 4 and "start one" in refused.err, "there is no other server"
            second = tmp_path / "second"
            stack.enter_context(ServerProcess("realtime", second, own))
            told = wait_until(
                lambda: ran if "40 messages" in (ran := move("--all-from", old)).out else None, "all 40 are there"
            )
            assert told is not None and told.code == 4
            assert "full stays: 40 messages for the group g are not consumed" in told.out
            assert "of 1 subjects" in told.out or "of 2 subjects" in told.out
            moved = move("--all-from", old, "--strand")
            assert moved.code == 0 and f"40 messages for the group g stay at {old}" in moved.out, moved.out
            assert f"`delayd route move full --to {old}`" in moved.out
            back = move("full", "--to", old)
            assert back.code == 0 and "stay" not in back.out
            with delayd.Consumer(meta.address, "full", group="g") as consumer:
                found = 0

                def all_came() -> bool:
                    nonlocal found
                    batch = consumer.pull(100, wait=timedelta(seconds=0.5))
                    found += len(batch)
                    batch.ack()
                    return found >= 40

                wait_until(all_came, lambda: f"{found} of 40 come")
        assert move().code == 2 and move("full", "--all-from", old).code == 2
