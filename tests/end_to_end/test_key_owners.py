"""Keys on two real delay servers: each key has one owner, and slots move when nothing keyed is pending (rule I4)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest

import delayd
from delayd.batch.content import Names, slots_of_names
from delayd.wire.meta import slots_of_text
from tests.end_to_end.processes import ServerProcess
from tests.end_to_end.up_process import Up, up
from tests.unit.cli.runner import Ran, run
from tests.waiting import wait_until

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("owners"), "--port", "0") as servers:
        yield servers


@pytest.fixture(scope="module")
def second(running: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {"meta": running.meta, "secret_file": str(running.data / "cluster.secret")}
    with delayd.Producer(running.meta) as producer:
        producer.send("s", b"x", delay=HOUR, key="before the second server")
    with ServerProcess("delay", tmp_path_factory.mktemp("second"), settings) as server:
        # The second server gets slots as soon as the first one knows it.
        with delayd.Producer(running.meta) as producer:
            wait_until(lambda: both_own(running, producer), lambda: str(listed(running)))
        yield server


def slots(running: Up, *arguments: str) -> Ran:
    return run("slots", *arguments, "--meta", running.meta, "--data", str(running.data))


def listed(running: Up) -> list[dict[str, object]]:
    ran = run("slots", "list", "--meta", running.meta, "--format", "json")
    assert ran.code == 0, ran.err
    rows: list[dict[str, object]] = json.loads(ran.out)
    return rows


def both_own(running: Up, producer: delayd.Producer) -> bool:
    """Whether both servers own slots, after a key was used that was not used before."""
    keys = (f"new-{time.monotonic_ns()}" for _ in itertools.count())
    # Its message stays pending, so it must not be in the slot that a test moves.
    key = next(key for key in keys if slot_of(key) != slot_of("moving"))
    producer.send("s", b"x", delay=HOUR, key=key)
    rows = listed(running)
    return len(rows) == 2 and all(row["count"] for row in rows)


def slot_of(key: str) -> str:
    return str(slots_of_names(Names.of_lists([b"s"], [key.encode()]))[0])


def test_each_key_has_one_owner_whoever_sends(running: Up, second: ServerProcess) -> None:
    keys = [f"order-{number}" for number in range(400)]
    with delayd.Producer(running.meta) as one, delayd.Producer(running.meta) as other:
        first = one.send_batch("s", [b"1"] * len(keys), delay=HOUR, keys=keys)
        assert not first.verdicts.any()
        assert len(np.unique(first.log_ids)) == 2, "both own some of them"
        again = other.send_batch("s", [b"2"] * len(keys), delay=HOUR, keys=keys)
        assert (again.verdicts == delayd.SendVerdict.REJECTED).all()
        assert (again.others == first.sequences).all() and (again.log_ids == first.log_ids).all()
        assert (other.get_batch("s", keys=keys)["state"] == delayd.MessageState.PENDING).all()
        assert (one.cancel_batch("s", keys=keys) == delayd.CancelAnswer.CANCELLED).all()
    assert sum(int(str(row["count"])) for row in listed(running)) >= 300
    for columns in ("80", "40"):
        shown = run("slots", "list", "--meta", running.meta, environment={"COLUMNS": columns, "LINES": ""})
        assert shown.code == 0 and max(map(len, shown.out.splitlines())) <= int(columns)


def test_a_slot_moves_only_when_no_message_with_a_key_of_it_is_pending(running: Up, second: ServerProcess) -> None:
    with delayd.Producer(running.meta) as producer:
        receipt = producer.send("s", b"x", delay=HOUR, key="moving")
        (target,) = [
            str(row["delay_log_id"]) for row in listed(running) if row["delay_log_id"] != f"{receipt.log_id:016x}"
        ]

        def refused() -> bool:
            ran = slots(running, "move", slot_of("moving"), "--to", target)
            assert ran.code == 4, ran
            return "1 messages with keys of these slots are pending" in ran.err

        # Messages of other tests in this slot may just be ending.
        wait_until(refused, "it is refused for this message alone")
        assert producer.get("s", key="moving").state is delayd.MessageState.PENDING
        assert producer.cancel("s", key="moving") is delayd.CancelAnswer.CANCELLED
        moved = slots(running, "move", slot_of("moving"), "--to", target)
        assert (moved.code, moved.out) == (0, f"moved the slots {slot_of('moving')} to {target}\n"), moved.err
        after = producer.send("s", b"x", delay=HOUR, key="moving")
        assert f"{after.log_id:016x}" == target
        # A producer that has asked nobody yet, and the servers after a restart, agree.
        with delayd.Producer(running.meta) as other, pytest.raises(delayd.KeyPending) as met:
            other.send("s", b"x", delay=HOUR, key="moving")
        assert met.value.log_id == after.log_id
        second.kill()
        second.start()
        with delayd.Producer(running.meta) as other, pytest.raises(delayd.KeyPending):
            other.send("s", b"x", delay=HOUR, key="moving")


def test_a_key_of_a_server_that_is_away_waits_and_goes_to_no_other(running: Up, second: ServerProcess) -> None:
    with delayd.Producer(running.meta) as producer:
        # Enough keys that both servers own slots.
        producer.send_batch("s", [b"1"] * 400, delay=HOUR, keys=[f"many-{number}" for number in range(400)])
    second.kill()
    wait_until(lambda: any(row["state"] == "away" for row in listed(running)), lambda: str(listed(running)))
    (away,) = [str(row["delay_log_id"]) for row in listed(running) if row["state"] == "away"]
    (its,) = [str(row["slots"]) for row in listed(running) if row["delay_log_id"] == away]
    own = set(np.flatnonzero(slots_of_text(its)).tolist())
    key = next(f"k{number}" for number in range(100_000) if int(slot_of(f"k{number}")) in own)
    with delayd.Producer(running.meta, timeout_ms=2_000) as producer, pytest.raises(delayd.RetryLater):
        producer.send("s", b"x", delay=HOUR, key=key)
    second.start()
    with delayd.Producer(running.meta) as producer:
        assert f"{producer.send('s', b'x', delay=HOUR, key=key).log_id:016x}" == away


@pytest.mark.parametrize("wrong", ["1024", "", "a-b", "7-3"])
def test_what_names_no_slots_is_refused(running: Up, wrong: str) -> None:
    ran = slots(running, "move", wrong, "--to", "1")
    assert ran.code == 2 and "slot" in ran.err


def test_nobody_gets_slots_that_meta_does_not_know(running: Up) -> None:
    ran = slots(running, "move", "7", "--to", "77")
    assert ran.code == 2 and "meta knows no delay server 0000000000000077" in ran.err
