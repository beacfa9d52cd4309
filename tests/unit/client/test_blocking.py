"""Producer and Consumer: the blocking forms, used from several threads and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import uvloop
from freezegun import freeze_time

from delayd.client.producer import Producer
from delayd.client.pulling import stock
from delayd.client.pulling.consumer import Consumer
from delayd.errors import AlreadyClosed, BadSubject, DelaydError, OutcomeUnknown, PastHorizon, QueueFull, StaleHandle
from tests.unit.client.servers import refuse
from tests.unit.client.world import LIMIT_S, PAST_MS, THREADS_AT_A_FORK, add_messages, fork, world_aside
from tests.unit.net.loopback import StillLoop
from tests.waiting import DEADLINE_S, wait_until

# Forks with a producer that is connected; the child ends as any program does, the parent goes on.
FORKING = """
import gc, os, sys
from delayd import Producer
producer = Producer(sys.argv[1], timeout_ms=10_000)
producer.send("a", b"1", deliver_at_ms=10**12)
child = os.fork()
if child == 0:
    del producer
    gc.collect()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for _ in range(5):
    assert not producer.send("a", b"2", deliver_at_ms=10**12).duplicate
producer.close()
"""


def test_a_blocking_send_returns_its_receipt() -> None:
    with world_aside() as (world, _), Producer(world.address) as producer:
        receipt = producer.send("a", b"x", delay=timedelta(minutes=1), headers={"a": "b"})
        assert receipt.sequence == 1 and not receipt.was_due
        with pytest.raises(BadSubject):
            producer.send("a b", b"x", deliver_at_ms=PAST_MS)
        assert len(producer.send_batch("a", [b"x"] * 100, PAST_MS)) == 100


@pytest.mark.parametrize("frozen", ["2020-01-01T00:00:00Z", "2040-01-01T00:00:00Z"])
def test_rule_T2_a_caller_whose_clock_is_frozen_sends_and_pulls_as_any_other(frozen: str) -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 3))
        now_ms = time.time_ns() // 1_000_000
        soon = datetime.now(UTC) + timedelta(hours=1)
        with freeze_time(frozen), Producer(world.address) as producer, Consumer(world.address, "a", "g") as consumer:
            after = producer.send("a", b"x", delay=timedelta(seconds=5)).deliver_at_ms
            at = producer.send("a", b"x", deliver_at=soon).deliver_at_ms
            pulled = [next(consumer).body for _ in range(3)]
        assert now_ms + 5_000 <= after <= now_ms + 5_000 + DEADLINE_S * 1_000
        assert at == -(-int(soon.timestamp() * 1_000_000) // 1_000)
        assert pulled == [b"0", b"1", b"2"]


def test_an_instant_past_the_horizon_is_told_with_the_clock_that_it_was_held_against() -> None:
    told = rf"{datetime.now(UTC):%Y-%m-%d}T.* by this machine's clock"
    with world_aside() as (world, _), Producer(world.address) as producer, pytest.raises(PastHorizon, match=told):
        producer.send("a", b"x", deliver_at=datetime(2101, 1, 1, tzinfo=UTC))


def test_sends_of_many_threads_share_batches_and_each_gets_its_own_receipt() -> None:
    with world_aside() as (world, _), Producer(world.address) as producer:
        sequences: dict[bytes, int] = {}

        def send(thread: int) -> None:
            for row in range(50):
                body = b"%d.%d" % (thread, row)
                sequences[body] = producer.send("a", body, deliver_at_ms=PAST_MS).sequence

        threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        kept = [body for _, body, _ in world.delay.rows]
        assert len(kept) == 400
        assert sequences == {body: sequence for sequence, body in enumerate(kept, 1)}
        assert len(world.delay.kept) < 400


def test_futures_of_sends_that_nobody_waited_for_are_done_after_a_flush() -> None:
    with world_aside() as (world, _), Producer(world.address) as producer:
        futures = [producer.send_nowait("a", b"%d" % row, deliver_at_ms=PAST_MS + row) for row in range(1_000)]
        producer.flush()
        due_ms = [future.result(timedelta(0)).deliver_at_ms for future in futures]
        assert due_ms == [PAST_MS + row for row in range(1_000)]


def test_the_error_of_a_send_is_raised_where_it_is_waited_for() -> None:
    with world_aside() as (world, do), Producer(world.address) as producer:
        step = refuse(world.delay, BadSubject("refused by the server"), [])
        do(lambda: world.delay.script.extend([step, step]))
        with pytest.raises(BadSubject, match="refused by the server"):
            producer.send("a", b"x", deliver_at_ms=PAST_MS)
        with pytest.raises(BadSubject, match="refused by the server"):
            producer.send_nowait("a", b"x", deliver_at_ms=PAST_MS).result(timedelta(seconds=DEADLINE_S))


def test_a_blocking_send_past_a_full_queue_waits_for_room() -> None:
    with world_aside() as (world, do), Producer(world.address, queue_bytes_max=4 << 20) as producer:
        do(lambda: setattr(world.delay, "holding", True))
        futures = [producer.send_nowait("a", bytes(3 << 20), deliver_at_ms=PAST_MS)]
        second = threading.Thread(
            target=lambda: futures.append(producer.send_nowait("a", bytes(3 << 20), deliver_at_ms=PAST_MS))
        )
        second.start()
        wait_until(lambda: bool(world.delay.held))
        second.join(0.05)
        assert second.is_alive() and len(futures) == 1
        do(world.delay.release)
        second.join(DEADLINE_S)
        assert [future.result(timedelta(seconds=DEADLINE_S)).sequence for future in futures] == [1, 2]


def test_a_blocking_send_is_refused_when_the_queue_stays_full_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with world_aside() as (world, do):
        # On this loop no time passes, so the send that fills the queue does not end.
        monkeypatch.setattr(uvloop, "new_event_loop", StillLoop)
        with Producer(world.address, queue_bytes_max=4 << 20, timeout_ms=200) as producer:
            do(lambda: setattr(world.delay, "holding", True))
            first = producer.send_nowait("a", bytes(3 << 20), deliver_at_ms=PAST_MS)
            with pytest.raises(QueueFull, match=r"4194304 bytes of sends are queued and none left for 0\.2 s"):
                producer.send_nowait("a", bytes(3 << 20), deliver_at_ms=PAST_MS)
            wait_until(lambda: bool(world.delay.held))
            do(world.delay.release)
            assert first.result(DEADLINE_S).sequence == 1


def test_an_unknown_outcome_has_a_handle_that_any_producer_can_ask_with(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[StillLoop] = []

    def new_loop() -> StillLoop:
        loops.append(StillLoop())
        return loops[-1]

    with world_aside() as (world, do):
        monkeypatch.setattr(uvloop, "new_event_loop", new_loop)
        with Producer(world.address) as producer:
            do(lambda: setattr(world.delay, "holding", True))
            sending = producer.send_nowait("a", b"x", deliver_at_ms=PAST_MS)
            wait_until(lambda: bool(world.delay.held))
            loops[0].call_soon_threadsafe(loops[0].skip, LIMIT_S)
            with pytest.raises(OutcomeUnknown) as unknown:
                sending.result(timedelta(seconds=DEADLINE_S))
        do(world.delay.release)
        with Producer(world.address) as other:
            outcome = other.outcome(unknown.value.handle)
        assert outcome is not None and outcome.base_sequence == 1


def test_close_ends_what_is_queued_and_the_thread() -> None:
    with world_aside() as (world, _):
        producer = Producer(world.address)
        futures = [producer.send_nowait("a", b"x", deliver_at_ms=PAST_MS) for _ in range(100)]
        producer.close()
        assert all(future.done() for future in futures) and len(world.delay.rows) == 100
        assert "delayd-producer" not in [thread.name for thread in threading.enumerate()]
        with pytest.raises(AlreadyClosed):
            producer.send("a", b"x", deliver_at_ms=PAST_MS)
        producer.close()


def test_a_client_that_was_never_used_asks_nothing_of_the_network() -> None:
    with world_aside() as (world, _):
        Producer(world.address).close()
        Consumer(world.address, "a", "g").close()
        assert world.meta.seen == [] and not any("delayd" in thread.name for thread in threading.enumerate())


def test_a_blocking_consumer_iterates_pulls_and_acknowledges(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is left at the break stays in stock, however long the machine stands still.
    monkeypatch.setattr(stock, "HOLD_S", DEADLINE_S)
    with world_aside() as (world, do):
        do(partial(add_messages, world, 10))
        with Consumer(world.address, "a", "g", max_messages=4) as consumer:
            for message in consumer:
                message.ack(wait=message.sequence == 3)
                if message.sequence == 3:
                    break
            assert world.realtime.acked == [0, 1, 2]
            last = next(consumer)
            assert last.body == b"3"
            last.nack(timedelta(0))
        wait_until(lambda: not world.realtime.held)
        with Consumer(world.address, "a", "g") as consumer:
            seen: list[bytes] = []
            while len(seen) < 7:
                batch = consumer.pull(wait=timedelta(seconds=1))
                seen += batch.bodies
                batch.ack()
            assert sorted(seen) == [b"%d" % row for row in range(3, 10)]
        assert sorted(world.realtime.acked) == list(range(10))


def test_acknowledgements_that_nobody_waits_for_all_reach_the_server() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 500))
        with Consumer(world.address, "a", "g", max_messages=500) as consumer:
            messages = [next(consumer) for _ in range(500)]
            # While this thread runs on, the loop does not: it finds many of them at once.
            for message in messages:
                message.ack(wait=False)
            consumer.flush()
            assert sorted(world.realtime.acked) == list(range(500))


def test_late_acknowledgements_of_a_blocking_consumer_fail_at_the_next_call() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 1))
        with Consumer(world.address, "a", "g", prefetch=False) as consumer:
            message = next(consumer)
            do(world.realtime.restart)
            message.ack(wait=False)
            with pytest.raises(StaleHandle):
                consumer.flush()
            with pytest.raises(StaleHandle):
                message.ack()


def test_rule_I2_after_a_fork_parent_and_child_are_two_producers() -> None:
    with world_aside() as (world, _), Producer(world.address) as producer:
        producer.send("a", b"parent", deliver_at_ms=PAST_MS)
        child = fork()
        if child == 0:
            status = 1
            try:
                receipt = producer.send("a", b"child", deliver_at_ms=PAST_MS)
                producer.close()
                status = 0 if receipt.sequence else 1
            except DelaydError as error:
                print(error)
            finally:
                os._exit(status)
        _, waited = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(waited) == 0
        assert producer.send("a", b"parent", deliver_at_ms=PAST_MS).sequence == 3
        ids = [kept.batch.producer.producer_id for kept in world.delay.kept]
        assert ids[0] == ids[2] != ids[1]
        assert [kept.number for kept in world.delay.kept] == [1, 1, 2]


def test_rule_I2_a_child_that_ends_leaves_the_sockets_of_its_parent_alone() -> None:
    with world_aside() as (world, do):
        program = [sys.executable, "-W", THREADS_AT_A_FORK, "-c", FORKING, world.address]
        ended = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
        assert do(lambda: len(world.delay.seen)) == 6


def test_rule_I2_a_consumer_works_in_a_child_too() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 4))
        with Consumer(world.address, "a", "g", max_messages=2, prefetch=False) as consumer:
            consumer.pull().ack()
            child = fork()
            if child == 0:
                status = 1
                try:
                    batch = consumer.pull()
                    batch.ack()
                    consumer.close()
                    status = 0 if batch.bodies == [b"2", b"3"] else 1
                finally:
                    os._exit(status)
            _, waited = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(waited) == 0
        assert sorted(world.realtime.acked) == [0, 1, 2, 3]
