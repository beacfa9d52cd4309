"""States of keys whose owner is not known, and of a delay server that is emptied: `delayd status` says the way out."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import delayd
from delayd.config import Value
from delayd.machine.operating import WaitKind
from tests.end_to_end.cluster import cluster, log_id_of, until_away
from tests.end_to_end.draining import open_fleet
from tests.end_to_end.trials import Operator, tries
from tests.waiting import wait_until

ALL_BYTES = 1 << 46  # A reserve that no disk has free.
FULL: dict[str, Value] = {"free_bytes_far": ALL_BYTES, "free_bytes_all": ALL_BYTES}
HOUR = timedelta(hours=1)


@tries(WaitKind.SLOTS_UNKNOWN)
def test_keys_that_were_not_used_wait_for_the_only_server_that_may_own_them(tmp_path: Path) -> None:
    with cluster(tmp_path / "data") as production:
        production.send("1")
        owner = log_id_of(production, "delay")
        production.delay.kill()
        until_away(production, owner)
        with production.delay.elsewhere(tmp_path / "other"):
            production.operator.follow(WaitKind.SLOTS_UNKNOWN, 0)
            with delayd.Producer(production.meta.address) as producer:
                producer.send("s", b"2", delay=HOUR, key="new")


@tries(WaitKind.SLOTS_LEAVING, WaitKind.DRAIN_REFUSED, WaitKind.DRAINED_AWAY)
def test_a_drain_that_was_stopped_at_a_full_and_an_absent_server_ends_as_status_says(tmp_path: Path) -> None:
    with open_fleet(tmp_path) as fleet:
        operator, own = Operator(fleet.meta.address, fleet.data), dict(fleet.new.settings)
        assert fleet.new.terminate() == 0
        fleet.new.settings = own | FULL
        fleet.new.start()
        with delayd.Producer(fleet.meta.address) as producer:
            wait_until(lambda: producer.get("s", key="first").state is delayd.MessageState.DISPATCHED, "it is done")
            producer.send("s", b"2", delay=HOUR, key="first")
        place = ("--meta", fleet.meta.address, "--data", str(fleet.data))
        command = [sys.executable, "-m", "delayd", "server", "drain", fleet.old.address, *place]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as drain:
            operator.until_told(WaitKind.SLOTS_LEAVING)
            drain.kill()
        operator.until_told(WaitKind.DRAIN_REFUSED)
        fleet.new.kill()
        operator.until_told(WaitKind.DRAINED_AWAY)
        fleet.new.start()
        operator.until_gone(WaitKind.DRAINED_AWAY)
        # That server says what it waits for.
        operator.until_told(WaitKind.DISK_FULL)
        assert fleet.new.terminate() == 0
        fleet.new.settings = own
        fleet.new.start()
        operator.until_gone(WaitKind.DRAIN_REFUSED)
        operator.follow(WaitKind.SLOTS_LEAVING, 0)
