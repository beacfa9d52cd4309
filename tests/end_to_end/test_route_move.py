"""Subjects leave a realtime server, and what stays behind there is counted and told (docs/cluster.md)."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import pytest

import delayd
from cli.main import NOT_BALANCED
from delayd.client.pulling import many_source, source
from delayd.config import Value
from tests.end_to_end.processes import ServerProcess
from tests.named_commands import check_commands, commands_in
from tests.unit.cli.runner import Ran, run
from tests.waiting import DEADLINE_S, wait_until

LEASE = timedelta(minutes=10)  # Longer than a test.
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
                    consumer.pull(1, wait=timedelta(seconds=DEADLINE_S)).ack()
            producer.send_batch("full", [b"x"] * 40, delay=timedelta(0))
            (old,) = _realtime_ids(meta.address)
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
            new = _check_rows_of_groups(meta.address, old)
            # `status` names what nobody asks for as long as it lies there, with a command that can be typed as it is.
            lies = wait_until(
                lambda: ran if "40 messages of full" in (ran := run("status", "--meta", meta.address)).out else None,
                "status says what lies there",
            )
            assert lies is not None and lies.code == NOT_BALANCED, lies
            assert f"40 messages of full for group g: the subject is at realtime server {new} now" in " ".join(
                lies.out.split()
            )
            check_commands(lies.out)
            (command,) = [words for words in commands_in(lies.out) if "route" in words]
            assert command == ["route", "move", "full", "--to", old]
            back = run(*command, "--yes", "--meta", meta.address, "--data", str(tmp_path))
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
            wait_until(
                lambda: "of full for group" not in run("status", "--meta", meta.address).out,
                "status says no more that messages lie there",
            )
        assert move().code == 2 and move("full", "--all-from", old).code == 2


def _check_rows_of_groups(meta: str, old: str) -> str:
    """The group is at both servers once a consumer has asked the new one, and each row names its server."""

    def rows() -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(run("groups", "--meta", meta, "--format", "json").out)
        return [row for row in found if row["subject"] == "full"]

    assert "realtime log id" not in run("groups", "--meta", meta).out, "each group is at one server"
    with delayd.Consumer(meta, "full", group="g") as consumer:
        assert not consumer.pull(1, wait=timedelta(milliseconds=1)), "who starts now does not find them"
        wait_until(lambda: len(rows()) == 2, rows)
    waiting = {row["realtime_log_id"]: row["waiting"] for row in rows()}
    assert waiting.pop(old) == 40
    ((new, none),) = waiting.items()
    assert none == 0
    told = run("groups", "--meta", meta, "--subject", "full").out
    assert "realtime log id" in told and old in told and str(new) in told
    shown = json.loads(run("groups", "show", "full", "g", "--meta", meta, "--format", "json").out)
    assert {row["realtime_log_id"] for row in shown} == {old, new}
    return str(new)


def test_a_running_consumer_follows_a_subject_and_acknowledges_at_the_old_server_what_that_gave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for messages to be there before the consumers look.
    monkeypatch.setattr(source, "ROUTE_LOOK_S", 2.0)
    monkeypatch.setattr(many_source, "LOOK_S", 2.0)
    monkeypatch.setattr(many_source, "SETTLED_LOOK_S", 0.0)
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path, META))
        own: dict[str, Value] = {"meta": meta.address, "secret_file": str(tmp_path / "cluster.secret")}
        stack.enter_context(ServerProcess("delay", tmp_path, own))
        first = ServerProcess("realtime", tmp_path, own)
        stack.enter_context(first)
        producer = stack.enter_context(delayd.Producer(meta.address))
        consumer = stack.enter_context(delayd.Consumer(meta.address, "moved", group="g", lease=LEASE, timeout_ms=6_000))
        producer.send_batch("moved", [b"1", b"2"], delay=timedelta(0))
        old: list[delayd.Message] = []

        def both_came() -> bool:
            old.extend(consumer.pull(2, wait=timedelta(seconds=0.5)))
            return len(old) == 2

        wait_until(both_came, "both messages come")
        # Groups of their own, which begin now.
        every = [
            stack.enter_context(delayd.Consumer(meta.address, subject, group="all", broadcast=True))
            for subject in (["moved", "another"], "*", "moved")
        ]
        for each in every:
            assert not len(each.pull(wait=timedelta(0)))
        sent = count()
        (old_id,) = _realtime_ids(meta.address)
        stack.enter_context(ServerProcess("realtime", tmp_path / "second", own))

        def moved_to_the_second() -> bool:
            ids = _realtime_ids(meta.address)
            words = ["--to", *(ids - {old_id}), "--yes", "--meta", meta.address, "--data", str(tmp_path)]
            return len(ids) == 2 and run("route", "move", "moved", *words).code == 0

        wait_until(moved_to_the_second, "the subject moves")

        def follows() -> bool:
            producer.send("moved", b"on the way %d" % next(sent), delay=timedelta(0))
            consumer.pull(10, wait=timedelta(seconds=0.5)).ack()
            # Each server at which the consumer has asked has a row of the group.
            rows = run("groups", "--meta", meta.address).out.splitlines()
            return sum(row.split()[:2] == ["moved", "g"] for row in rows) == 2

        wait_until(follows, "the consumer asks the second server")
        producer.send("moved", b"new", delay=timedelta(0))
        wait_until(partial(_has_come, consumer, [], b"new"), "the message behind the move comes")
        wanted = {b"new", *(b"on the way %d" % number for number in range(next(sent)))}
        # The consumer of one subject has left the old server, so it misses what still came there after the move.
        for each, due in zip(every, (wanted, wanted, {b"new"}), strict=True):
            seen: set[bytes] = set()
            wait_until(partial(_has_seen, each, seen, due), f"each of them comes to {each}")
        old[0].ack()
        first.kill()
        with pytest.raises(delayd.ServerUnavailable):
            old[1].ack()
        first.start()
        old[1].ack()


def _has_seen(consumer: delayd.Consumer, seen: set[bytes], wanted: set[bytes]) -> bool:
    seen.update(consumer.pull(100, wait=timedelta(seconds=0.5)).bodies)
    return seen >= wanted


def test_an_exclusive_consumer_follows_a_subject_once_it_holds_nothing_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "ROUTE_LOOK_S", 0.1)
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path, META))
        own: dict[str, Value] = {"meta": meta.address, "secret_file": str(tmp_path / "cluster.secret")}
        stack.enter_context(ServerProcess("delay", tmp_path, own))
        stack.enter_context(ServerProcess("realtime", tmp_path, own))
        producer = stack.enter_context(delayd.Producer(meta.address))
        producer.send("led", b"1", delay=timedelta(0))
        lease = timedelta(seconds=5)
        lead = stack.enter_context(delayd.Consumer(meta.address, "led", "g", exclusive=True, lease=lease))
        (held,) = wait_until(lambda: list(lead.pull(1, wait=timedelta(seconds=1))))
        moved = ("route", "move", "--all-from", _realtime_ids(meta.address).pop(), "--strand", "--yes")
        stack.enter_context(ServerProcess("realtime", tmp_path / "second", own))
        secret = ("--meta", meta.address, "--data", str(tmp_path))
        wait_until(lambda: run(*moved, *secret).code == 0, "the subject moves")
        probe = stack.enter_context(delayd.Consumer(meta.address, "led", "probe"))

        def has_moved() -> bool:
            producer.send("led", b"on the way", delay=timedelta(0))
            held.extend(lease)
            lead.pull(10, wait=timedelta(0)).ack()
            return bool(probe.pull(1, wait=timedelta(seconds=0.2)))

        wait_until(has_moved, "messages go to the second server")
        producer.send("led", b"2", delay=timedelta(0))
        held.extend(lease)
        assert not lead.pull(10, wait=timedelta(seconds=1)), "it leads where it holds a message"
        held.ack()
        came: list[bytes] = []
        wait_until(partial(_has_come, lead, came, b"2"), lambda: came)


def _has_come(consumer: delayd.Consumer, came: list[bytes], wanted: bytes) -> bool:
    batch = consumer.pull(10, wait=timedelta(seconds=0.5))
    came.extend(batch.bodies)
    batch.ack()
    return wanted in came


def _realtime_ids(meta: str) -> set[str]:
    rows = run("servers", "--meta", meta, "--role", "realtime", "--format", "csv").out
    return {word for word in rows.replace("\n", ",").split(",") if len(word) == 16 and word.isalnum()}
