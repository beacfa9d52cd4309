"""States that wait for an operator, brought about for real: what `delayd status` prints leads out of each of them."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import delayd
from delayd.config import Value
from delayd.waits import WaitKind
from tests.end_to_end.cluster import (
    META,
    Cluster,
    cluster,
    decide,
    do_as_status_says,
    log_id_of,
    until_away,
    until_gone,
    until_told,
)
from tests.end_to_end.processes import ServerProcess
from tests.named_commands import commands_in

ALL_BYTES = 1 << 46  # A reserve that no disk has free.
SLACK: dict[str, Value] = {"free_bytes_all": 0}


def test_a_cluster_that_lacks_servers_and_disk_says_what_to_start_and_to_free(tmp_path: Path) -> None:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path, META))
        own: dict[str, Value] = {"meta": meta.address}
        for kind in (WaitKind.NO_DELAY_SERVER, WaitKind.NO_REALTIME_SERVER):
            assert f"--meta {meta.address}" in until_told(meta.address, kind).command
        full: dict[str, Value] = {"free_bytes_far": ALL_BYTES, "free_bytes_all": ALL_BYTES}
        delay = stack.enter_context(ServerProcess("delay", tmp_path, own | full))
        until_told(meta.address, WaitKind.DISK_FULL)
        assert delay.terminate() == 0
        delay.settings = own | SLACK | {"free_bytes_far": ALL_BYTES}
        delay.start()
        until_told(meta.address, WaitKind.DISK_NEARLY_FULL)
        until_gone(meta.address, WaitKind.DISK_FULL)
        with delayd.Producer(meta.address) as producer:
            producer.send("s", b"1", delay=timedelta(0))
        assert "delayd realtime --data" in until_told(meta.address, WaitKind.NO_TARGET).command
        realtime = stack.enter_context(ServerProcess("realtime", tmp_path, own | {"free_bytes_all": ALL_BYTES}))
        until_told(meta.address, WaitKind.TARGET_DISK_FULL)
        for gone in (WaitKind.NO_TARGET, WaitKind.NO_DELAY_SERVER, WaitKind.NO_REALTIME_SERVER):
            until_gone(meta.address, gone)
        for server in (delay, realtime):
            assert server.terminate() == 0
            server.settings = own | SLACK
            server.start()
        for gone in (WaitKind.DISK_NEARLY_FULL, WaitKind.TARGET_DISK_FULL, WaitKind.ROWS_TARGET_AWAY):
            until_gone(meta.address, gone)
        assert Cluster(tmp_path, meta, delay, realtime).consumed(1) == ["1"]


def test_a_damaged_file_is_put_back_or_given_up_as_status_says(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        meta = production.meta.address
        production.send("1")
        assert production.consumed(1) == ["1"]
        assert production.delay.terminate() == 0
        (dispatched,) = (tmp_path / "delay/dispatch").glob("*/*.log")
        whole = dispatched.read_bytes()
        dispatched.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        production.delay.start()
        wait = until_told(meta, WaitKind.FILE_SET_ASIDE_OR_DROPPED)
        release, drop = commands_in(wait.command)
        assert f"put {dispatched}" in wait.command and drop[:2] == ["quarantine", "drop"]
        dispatched.with_suffix(".copy").write_bytes(whole)
        dispatched.with_suffix(".copy").rename(dispatched)
        decide(production, *release)
        until_gone(meta, WaitKind.FILE_SET_ASIDE_OR_DROPPED)
        # Without a copy it is given up.
        assert production.delay.terminate() == 0
        dispatched.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
        production.delay.start()
        do_as_status_says(production, WaitKind.FILE_SET_ASIDE_OR_DROPPED, "quarantine drop")
        production.send("3")
        assert "3" in production.consumed(2, within_s=5)


def test_servers_that_are_gone_for_good_are_forgotten_as_status_says(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        meta = production.meta.address
        own: dict[str, Value] = {"meta": meta}
        production.send("1")
        assert production.consumed(1) == ["1"]
        lost = [log_id_of(production, role) for role in ("delay", "realtime")]
        with (
            ServerProcess("delay", tmp_path / "other", own),
            ServerProcess("realtime", tmp_path / "other", own),
        ):
            for server in (production.delay, production.realtime):
                server.kill()
            for log_id in lost:
                until_away(production, log_id)
            do_as_status_says(production, WaitKind.DELAY_AWAY, "server forget delay")
            do_as_status_says(production, WaitKind.REALTIME_AWAY, "server forget realtime")
            production.send("2")
            assert production.consumed(1) == ["2"]
