"""A delay server is cordoned, drained and retired beside traffic, and killed meanwhile (rule I7; docs/drain.md)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from delayd import Receipt
from delayd.machine.operating import WaitKind
from tests.end_to_end.draining import Fleet, open_fleet
from tests.end_to_end.torture_drain import torture
from tests.end_to_end.trials import Operator, tries
from tests.unit.cli.runner import run
from tests.waiting import wait_until

HOUR = timedelta(hours=1)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with open_fleet(tmp_path) as running:
        yield running


def one_of(receipt: delayd.BatchReceipt, row: int) -> Receipt:
    columns = (receipt.log_ids, receipt.sequences, receipt.deliver_at_ms, receipt.accepted_at_ms)
    log_id, sequence, due_ms, accepted_ms = (int(column[row]) for column in columns)
    return Receipt(delayd.LogId(log_id), sequence, due_ms, accepted_ms, False, False)


def test_an_emptied_server_leaves_and_each_message_comes_once(fleet: Fleet) -> None:
    soon = timedelta(seconds=6)  # Far enough away to be moved.
    with delayd.Producer(fleet.meta.address) as producer:
        first = producer.send_batch("s", [b"soon-%d" % number for number in range(3_000)], delay=soon)
        far = [producer.send_batch("s", [b"far-%d" % n for n in range(500)], delay=HOUR) for _ in range(4)]
        keys = [f"key-{number}" for number in range(50)]
        producer.send_batch("s", [b"keyed"] * 50, delay=soon, keys=keys)
        stop = threading.Event()
        sent: list[int] = []

        def send() -> None:
            while not stop.wait(0.02):
                sent.extend(producer.send_batch("s", [b"beside-%d" % len(sent)], delay=soon).log_ids.tolist())

        sender = threading.Thread(target=send)
        sender.start()
        try:
            drained = fleet.command("drain", fleet.old.address)
        finally:
            stop.set()
            sender.join()
        assert drained.code == 0 and "holds nothing any more" in drained.out, drained.err
        assert fleet.state_of(fleet.old) == "cordoned"
        old = next(batch for batch in far if int(batch.log_ids[0]) != sent[-1])
        receipt = one_of(old, 0)
        assert producer.get("s", receipt=receipt).state is delayd.MessageState.PENDING
        moved = producer.reschedule("s", receipt=receipt, delay=2 * HOUR)
        assert moved.receipt is not None and int(moved.receipt.log_id) == sent[-1]
        assert producer.cancel("s", receipt=receipt) is delayd.CancelAnswer.CANCELLED
        assert producer.get("s", key="key-7").state is not delayd.MessageState.UNKNOWN
        _retire(fleet)
        expected = Counter(b"soon-%d" % number for number in range(3_000))
        expected += Counter([b"first", *[b"beside-%d" % number for number in range(len(sent))]])
        found: Counter[bytes] = Counter()
        with delayd.Consumer(fleet.meta.address, "s", group="g") as consumer:

            def all_came() -> bool:
                batch = consumer.pull(1_000, wait=timedelta(seconds=0.5))
                found.update(bytes(body) for body in batch.bodies)
                batch.ack()
                return found.total() >= expected.total() + 50

            wait_until(all_came, lambda: f"{found.total()} of {expected.total() + 50} come")
        assert found == expected + Counter({b"keyed": 50})
        assert len(first) == 3_000
    for data in (fleet.old_data, fleet.new_data):
        audited = run("audit", "--data", str(data / "delay"))
        assert audited.code == 0 and "lost 0, duplicate 0, early 0, orphan 0" in audited.out, audited.out
    fleet.old.kill()
    # Whoever starts the directory again is told so.
    fleet.old.start()
    wait_until(lambda: fleet.old.log.count(" retired reason=") == 2, "it is retired")
    assert "CRITICAL" not in fleet.old.log


@tries(WaitKind.RETIRED)
def test_a_retired_server_says_that_it_is_and_that_it_can_be_stopped(fleet: Fleet) -> None:
    assert fleet.command("drain", fleet.old.address).code == 0
    _retire(fleet)
    operator = Operator(fleet.meta.address, fleet.data)
    operator._replace(server=fleet.old.address).until_told(WaitKind.RETIRED)
    assert " fenced " not in fleet.old.log and " CRITICAL " not in fleet.old.log
    assert fleet.old.terminate() == 0
    operator.until_gone(WaitKind.RETIRED)


def _retire(fleet: Fleet) -> None:
    retired = fleet.command("retire", fleet.old.address, "--yes")
    assert retired.code == 0, retired.err
    assert fleet.state_of(fleet.old) == "gone"


def test_a_drain_goes_on_after_either_server_was_killed(fleet: Fleet) -> None:
    bodies = Counter(b"far-%d" % number for number in range(40_000))
    with delayd.Producer(fleet.meta.address) as producer:
        producer.send_batch("s", list(bodies), delay=HOUR)
    for victim in (fleet.old, fleet.new):
        command = threading.Thread(target=lambda: fleet.command("drain", fleet.old.address))
        command.start()
        wait_until(lambda: fleet.state_of(fleet.old) == "cordoned", "the command has begun")
        victim.kill()
        victim.start()
        command.join()
    again = wait_until(
        lambda: ran if (ran := fleet.command("drain", fleet.old.address)).code == 0 else None, "the drain ends"
    )
    assert again is not None
    with delayd.Producer(fleet.meta.address) as producer:
        pending = Counter(bytes(row.body or b"") for page in producer.pending("s", contents=True) for row in page)
    assert pending == bodies


def test_the_last_server_that_takes_messages_is_not_cordoned(fleet: Fleet) -> None:
    assert fleet.command("cordon", fleet.old.address).code == 0
    refused = fleet.command("cordon", fleet.new.address)
    assert refused.code == 2 and "start another one first" in refused.err
    refused = fleet.command("retire", fleet.new.address, "--yes")
    assert refused.code == 2 and "cordon and drain it first" in refused.err
    assert fleet.command("uncordon", fleet.old.address).code == 0
    assert fleet.state_of(fleet.old) == "serves"
    assert fleet.command("drain", "127.0.0.1:1").code == 2


def test_a_drain_beside_traffic_and_kills_of_both_servers_loses_and_doubles_nothing(tmp_path: Path) -> None:
    found = torture(tmp_path, messages=4_000, due_within_s=5, seed=1)
    assert found.faults == [], found.line
