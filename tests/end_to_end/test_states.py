"""States that wait for an operator, brought about for real: what `delayd status` prints leads out of each of them."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import delayd
from delayd.config import Value
from delayd.machine.operating import WaitKind
from tests.end_to_end import (
    full_disk,
    test_copies,
    test_drain,
    test_empty_meta,
    test_seal_hook,
    test_states_of_files,
    test_states_of_keys,
    test_states_of_places,
)
from tests.end_to_end.cluster import META, Cluster, cluster, log_id_of, until_away
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.trials import TRIED_BY, Operator, server_to_start, tries

ALL_BYTES = 1 << 46  # A reserve that no disk has free.
SLACK: dict[str, Value] = {"free_bytes_all": 0}


def test_each_state_is_led_out_of_by_a_test() -> None:
    elsewhere = (
        full_disk,
        test_copies,
        test_drain,
        test_empty_meta,
        test_seal_hook,
        test_states_of_files,
        test_states_of_keys,
        test_states_of_places,
    )
    assert all(elsewhere), "their tests have said what they try"
    untried = [kind.name for kind in WaitKind if kind not in TRIED_BY]
    assert not untried, f"no test does what `delayd status` says in {untried}"


@tries(
    *(WaitKind.NO_DELAY_SERVER, WaitKind.NO_REALTIME_SERVER, WaitKind.NO_TARGET),
    *(WaitKind.DISK_FULL, WaitKind.DISK_NEARLY_FULL, WaitKind.TARGET_DISK_FULL),
)
def test_a_cluster_that_lacks_servers_and_disk_says_what_to_start_and_to_free(tmp_path: Path) -> None:
    with ExitStack() as stack:
        meta = stack.enter_context(ServerProcess("meta", tmp_path, META))
        operator = Operator(meta.address, tmp_path)
        operator.until_told(WaitKind.NO_REALTIME_SERVER)
        delay = server_to_start(operator.until_told(WaitKind.NO_DELAY_SERVER), tmp_path, meta)
        own = dict(delay.settings)
        delay.settings = own | {"free_bytes_far": ALL_BYTES, "free_bytes_all": ALL_BYTES}
        stack.enter_context(delay)
        operator.until_gone(WaitKind.NO_DELAY_SERVER)
        operator.until_told(WaitKind.DISK_FULL)
        assert delay.terminate() == 0
        delay.settings = own | SLACK | {"free_bytes_far": ALL_BYTES}
        delay.start()
        operator.until_told(WaitKind.DISK_NEARLY_FULL)
        operator.until_gone(WaitKind.DISK_FULL)
        with delayd.Producer(meta.address) as producer:
            producer.send("s", b"1", delay=timedelta(0))
        realtime = server_to_start(operator.until_told(WaitKind.NO_TARGET), tmp_path, meta)
        realtime.settings |= {"free_bytes_all": ALL_BYTES}
        stack.enter_context(realtime)
        operator.until_told(WaitKind.TARGET_DISK_FULL)
        for gone in (WaitKind.NO_TARGET, WaitKind.NO_REALTIME_SERVER):
            operator.until_gone(gone)
        for server in (delay, realtime):
            assert server.terminate() == 0
            server.settings = own | SLACK
            server.start()
        for gone in (WaitKind.DISK_NEARLY_FULL, WaitKind.TARGET_DISK_FULL):
            operator.until_gone(gone)
        assert Cluster(tmp_path, meta, delay, realtime).consumed(1) == ["1"]


@tries(WaitKind.DELAY_AWAY, WaitKind.REALTIME_AWAY)
def test_servers_that_are_gone_for_good_are_forgotten_as_status_says(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        own: dict[str, Value] = {"meta": production.meta.address}
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
            production.operator.follow(WaitKind.DELAY_AWAY, 0)
            production.operator.follow(WaitKind.REALTIME_AWAY, 0)
            production.send("2")
            assert production.consumed(1) == ["2"]


@tries(WaitKind.RETRIES_AWAY, WaitKind.RETRIES_REFUSED)
def test_messages_that_come_again_wait_for_their_delay_server_and_for_its_disk(tmp_path: Path) -> None:
    with cluster(tmp_path) as production:
        operator, delay = production.operator, production.delay
        production.send("1")
        with delayd.Consumer(production.meta.address, "s", group="g") as consumer:
            delay_settings = dict(delay.settings)
            for kind in (WaitKind.RETRIES_AWAY, WaitKind.RETRIES_REFUSED):
                message = next(consumer)
                if kind is WaitKind.RETRIES_AWAY:
                    delay.kill()
                else:
                    assert delay.terminate() == 0
                    delay.settings = delay_settings | {"free_bytes_far": ALL_BYTES, "free_bytes_all": ALL_BYTES}
                    delay.start()
                    operator.until_told(WaitKind.DISK_FULL)
                message.nack(timedelta(milliseconds=1))
                operator.until_told(kind)
                if kind is WaitKind.RETRIES_REFUSED:
                    assert delay.terminate() == 0
                    delay.settings = delay_settings
                delay.start()
                operator.until_gone(kind)
        assert production.consumed(1) == ["1"]
