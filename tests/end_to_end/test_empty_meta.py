"""A meta whose directory is lost: keys stay with the delay servers that own them, and go to no other (rule I4)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import delayd
from delayd.batch.content import Names, slots_of_names
from delayd.config import Value
from delayd.errors import DelaydError, OwnerUnknown
from delayd.machine.operating import WaitKind
from delayd.wire.meta import slots_of_text
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.trials import Operator, tries
from tests.unit.cli.runner import Ran, run
from tests.waiting import holds_once, wait_until

HOUR = timedelta(hours=1)
TIMES: dict[str, Value] = {"heartbeat_ms": 50, "lease_ms": 1_000}
KEYS = [f"order-{number}" for number in range(200)]


class Cluster:
    """Meta and two delay servers that both own keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = ServerProcess("meta", folder / "meta", TIMES)
        self.meta.start()
        self.delays = [ServerProcess("delay", folder / name, {"meta": self.meta.address}) for name in ("one", "two")]
        for delay in self.delays:
            delay.start()
        with delayd.Producer(self.meta.address) as producer:
            number = iter(range(1 << 30))
            wait_until(lambda: self._both_own(producer, next(number)), lambda: str(self.slots()))
            receipt = producer.send_batch("s", [b"1"] * len(KEYS), delay=HOUR, keys=KEYS)
        self.owners = [f"{log_id:016x}" for log_id in receipt.log_ids.tolist()]
        used = {slot for row in self.slots() for slot in np.flatnonzero(slots_of_text(str(row["slots"]))).tolist()}
        self.unused_key = next(key for key in map(str, range(10_000)) if slot_of(key) not in used)

    def _both_own(self, producer: delayd.Producer, number: int) -> bool:
        producer.send("s", b"x", delay=HOUR, key=f"new-{number}")
        rows = self.slots()
        return len(rows) == 2 and all(row["count"] for row in rows)

    def lose_meta_while_one_is_away(self) -> tuple[str, str]:
        """Another meta takes the place of the lost one, with its cluster's id; returns who is here, and who is away."""
        self.delays[1].kill()
        self.meta.kill()
        cluster_id = self.meta.log.partition(" opened ")[2].partition(" cluster_id=")[2][:16]
        another = ServerProcess("meta", self.folder / "another", {**TIMES, "cluster_id": cluster_id})
        another.port, self.meta = self.meta.port, another
        another.start()
        wait_until(lambda: any(row["delay_log_id"] and row["count"] for row in self.slots()), lambda: str(self.slots()))
        (here,) = (str(row["delay_log_id"]) for row in self.slots() if row["delay_log_id"])
        (away,) = set(self.owners) - {here}
        return here, away

    def slots(self) -> list[dict[str, object]]:
        ran = self.run("list", "--format", "json")
        assert ran.code == 0, ran.err
        rows: list[dict[str, object]] = json.loads(ran.out)
        return rows

    def run(self, *arguments: str) -> Ran:
        return run("slots", *arguments, "--meta", self.meta.address)

    def keys_of(self, owner: str) -> list[str]:
        return [key for key, its_owner in zip(KEYS, self.owners, strict=True) if its_owner == owner]

    def end(self) -> None:
        for server in (self.meta, *self.delays):
            server.end()


def slot_of(key: str) -> int:
    return int(slots_of_names(Names.of_lists([b"s"], [key.encode()]))[0])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def test_rule_I4_keys_wait_for_a_server_that_was_away_while_meta_was_lost(cluster: Cluster) -> None:
    here, away = cluster.lose_meta_while_one_is_away()
    its = cluster.keys_of(away)
    with delayd.Producer(cluster.meta.address, timeout_ms=300) as hasty:

        def is_refused(call: Callable[..., object], **arguments: object) -> None:
            with pytest.raises(DelaydError) as refused:
                call("s", **arguments)
            assert isinstance(refused.value, OwnerUnknown) and "delayd status" in refused.value.message

        # Nothing is heard within the limit when the machine stands still.
        for key in (its[0], cluster.unused_key):
            holds_once(partial(is_refused, hasty.send, body=b"2", delay=HOUR, key=key))
        holds_once(partial(is_refused, hasty.get, key=its[0]))
    with delayd.Producer(cluster.meta.address) as producer:
        assert (producer.get_batch("s", keys=cluster.keys_of(here))["state"] == delayd.MessageState.PENDING).all()
        waiting = producer.send_nowait("s", b"2", delay=HOUR, key=its[0])
        cluster.delays[1].start()
        with pytest.raises(delayd.KeyPending) as met:
            waiting.result()
        assert f"{met.value.log_id:016x}" == away
        again = producer.send_batch("s", [b"2"] * len(KEYS), delay=HOUR, keys=KEYS)
        assert (again.verdicts == delayd.SendVerdict.REJECTED).all()
        assert [f"{log_id:016x}" for log_id in again.log_ids.tolist()] == cluster.owners
        producer.send("s", b"2", delay=HOUR, key=cluster.unused_key)


@tries(WaitKind.SLOTS_WITHHELD)
def test_an_operator_says_that_the_server_that_is_away_is_gone_for_good(cluster: Cluster) -> None:
    here, away = cluster.lose_meta_while_one_is_away()
    assert [row["state"] for row in cluster.slots() if not row["delay_log_id"]] == ["owner unknown"]
    operator = Operator(cluster.meta.address, cluster.folder / "another")
    assert operator.follow(WaitKind.SLOTS_WITHHELD, 0).startswith("all owners of slots have registered")
    with delayd.Producer(cluster.meta.address) as producer:
        assert f"{producer.send('s', b'2', delay=HOUR, key=cluster.keys_of(away)[0]).log_id:016x}" == here


@tries(WaitKind.SLOTS_DISPUTED)
def test_a_key_that_two_servers_own_after_meta_was_restored_goes_to_the_one_that_status_names(cluster: Cluster) -> None:
    data, backup, meta = cluster.folder / "meta", cluster.folder / "backup", cluster.meta
    state = data / "meta/state.lmdb/data.mdb"
    assert meta.terminate() == 0
    shutil.copyfile(state, backup)
    meta.start()
    with delayd.Producer(meta.address) as producer:
        first = producer.send("s", b"1", delay=HOUR, key=cluster.unused_key)
    owner = next(delay for delay in cluster.delays if f"log_id={first.log_id:016x}" in delay.log)
    owner.kill()
    meta.kill()
    # The backup does not know that the key has an owner. A folder that is whole again would tell that it was restored.
    shutil.copyfile(backup, state)
    meta.start()
    wait_until(lambda: any(row["state"] == "away" for row in cluster.slots()), lambda: str(cluster.slots()))
    with delayd.Producer(meta.address) as producer:
        second = producer.send("s", b"2", delay=HOUR, key=cluster.unused_key)
        assert second.log_id != first.log_id
        owner.start()
        assert "moved" in Operator(meta.address, data).follow(WaitKind.SLOTS_DISPUTED, 0)
        assert producer.get("s", key=cluster.unused_key).state is delayd.MessageState.PENDING
