"""Clients and the processes that they are in: forks, threads that hang, and the end of a program."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from freezegun import freeze_time

import delayd
from delayd import AsyncConsumer, AsyncProducer, Consumer, Producer
from delayd.client.engine import EXIT_S
from delayd.errors import AlreadyClosed, DelaydError, WrongLoop
from tests.unit.client.core_server import SUBJECT
from tests.unit.client.world import PAST_MS, THREADS_AT_A_FORK, World, add_messages, fork, on_loop, world_aside
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


@pytest.mark.parametrize("frozen", ["2020-01-01T00:00:00Z", "2040-01-01T00:00:00Z"])
def test_rule_T2_a_caller_whose_clock_is_frozen_sends_and_pulls_as_any_other(frozen: str) -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 3))
        now_ms = time.time_ns() // 1_000_000
        soon = datetime.now(UTC) + timedelta(hours=1)
        with (
            freeze_time(frozen),
            Producer(world.address) as producer,
            Consumer(world.address, "orders", "g") as consumer,
        ):
            after = producer.send("a", b"x", delay=timedelta(seconds=5)).deliver_at_ms
            at = producer.send("a", b"x", deliver_at=soon).deliver_at_ms
            pulled = [next(consumer).body for _ in range(3)]
        assert now_ms + 5_000 <= after <= now_ms + 5_000 + DEADLINE_S * 1_000
        assert at == -(-int(soon.timestamp() * 1_000_000) // 1_000)
        assert pulled == [b"0", b"1", b"2"]


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


CHILD_S = 20  # A child that hangs is killed, and its test fails.


Client = Producer | AsyncProducer | Consumer | AsyncConsumer


Called = Awaitable[None] | None


def sends(producer: Producer) -> None:
    producer.send("a", b"x", deliver_at_ms=PAST_MS)


async def sends_on_loop(producer: AsyncProducer) -> None:
    await producer.send("a", b"x", deliver_at_ms=PAST_MS)


def sends_many(producer: Producer) -> None:
    producer.send_batch("a", [b"x"], PAST_MS)


async def sends_many_on_loop(producer: AsyncProducer) -> None:
    await producer.send_batch("a", [b"x"], PAST_MS)


def pulls(consumer: Consumer) -> None:
    batch = consumer.pull()
    assert len(batch) == 1
    batch.ack()


async def pulls_on_loop(consumer: AsyncConsumer) -> None:
    batch = await consumer.pull()
    assert len(batch) == 1
    await batch.ack()


def iterates(consumer: Consumer) -> None:
    try:
        next(consumer).ack()
    except StopIteration:
        raise AlreadyClosed("the iteration ended") from None


async def iterates_on_loop(consumer: AsyncConsumer) -> None:
    try:
        await (await anext(consumer)).ack()
    except StopAsyncIteration:
        raise AlreadyClosed("the iteration ended") from None


USES: list[tuple[type[Client], Callable[..., Called]]] = [
    (Producer, sends),
    (Producer, sends_many),
    (AsyncProducer, sends_on_loop),
    (AsyncProducer, sends_many_on_loop),
    (Consumer, pulls),
    (Consumer, iterates),
    (AsyncConsumer, pulls_on_loop),
    (AsyncConsumer, iterates_on_loop),
]


of_each_client = pytest.mark.parametrize(("kind", "use"), USES, ids=[use.__name__ for _, use in USES])


def call(function: Callable[[], Called]) -> None:
    """Call it on a loop of its own, as a child does that has inherited a client."""

    async def called() -> None:
        result = function()
        if inspect.isawaitable(result):
            await result

    asyncio.run(called())


@contextmanager
def used(kind: type[Client], use: Callable[..., Called], world: World) -> Iterator[tuple[Client, Callable[..., None]]]:
    """A client that was used once, and what calls a function on the client's own loop, if it has one."""
    with asyncio.Runner() as runner:

        async def on_own_loop(function: Callable[[], Called]) -> None:
            result = function()
            if inspect.isawaitable(result):
                await result

        async def made() -> Client:
            if issubclass(kind, Producer | AsyncProducer):
                return kind(world.address)
            return kind(world.address, "orders", "g", prefetch=False)

        def do(function: Callable[[], Called]) -> None:
            if kind in (Producer, Consumer):
                function()
            else:
                runner.run(on_own_loop(function))

        client = runner.run(made())
        do(partial(use, client))
        yield client, do
        do(client.close)


def in_child(work: Callable[[], None]) -> int:
    """How a child ends that does this work."""
    child = fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(CHILD_S)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def connected(world: World) -> list[int]:
    return [server.connected_count for server in world.servers]


def test_rule_I2_no_client_is_left_out_here() -> None:
    offered = [getattr(delayd, name) for name in delayd.__all__]
    # A child can't go on with the servers of its parent, and is told so (tests/end_to_end/test_embedded.py).
    clients = {kind for kind in offered if hasattr(kind, "close")} - {delayd.Embedded}
    assert clients == {kind for kind, _ in USES} | {delayd.Admin, delayd.AsyncAdmin}


@of_each_client
def test_rule_I2_after_a_fork_parent_and_child_have_connections_of_their_own(
    kind: type[Client], use: Callable[..., Called]
) -> None:
    with world_aside() as (world, on_servers):
        on_servers(partial(add_messages, world, 3))
        with used(kind, use, world) as (client, do):
            before = on_servers(partial(connected, world))

            assert in_child(lambda: call(partial(use, client))) == 0
            after = on_servers(partial(connected, world))
            assert after[0] == before[0] + 1 and sum(after) == sum(before) + 2
            do(partial(use, client))
            assert on_servers(partial(connected, world)) == after


def test_rule_I2_a_child_that_is_forked_in_the_loop_of_a_client_is_not_in_that_loop() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer, AsyncConsumer(world.address, SUBJECT, "g") as consumer:
            add_messages(world, 2)
            await (await anext(consumer)).ack()
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)

            def work() -> None:
                with pytest.raises(WrongLoop):
                    producer.send("a", b"x", deliver_at_ms=PAST_MS)
                with pytest.raises(WrongLoop):
                    consumer.__anext__().send(None)

            assert in_child(work) == 0

    on_loop(scenario)


@of_each_client
def test_rule_I2_a_child_that_closes_what_it_inherited_leaves_it_to_its_parent(
    kind: type[Client], use: Callable[..., Called]
) -> None:
    with world_aside() as (world, on_servers):
        on_servers(partial(add_messages, world, 2))
        with used(kind, use, world) as (client, do):
            before = on_servers(partial(connected, world))

            def work() -> None:
                call(client.close)
                with pytest.raises(AlreadyClosed):
                    call(partial(use, client))

            assert in_child(work) == 0
            do(partial(use, client))
            assert on_servers(partial(connected, world)) == before


SENDS = """
import sys, delayd
producer = delayd.Producer(sys.argv[1])
for row in range(300):
    producer.send_nowait("a", b"%d" % row, deliver_at_ms=10**12)
"""


ASYNC_SENDS = """
import asyncio, sys, delayd

async def main():
    producer = delayd.AsyncProducer(sys.argv[1])
    for row in range(7):
        producer.send("a", b"%d" % row, deliver_at_ms=10**12)
    if sys.argv[2:]:
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


CONSUMES = """
import sys, delayd
consumer = delayd.Consumer(sys.argv[1], "orders", "g")
for message in consumer:
    message.ack(wait=False)
    if message.sequence == 20:
        break
"""


# A handler that is registered first runs last.
LISTS_THREADS = """
import atexit, threading

@atexit.register
def tell():
    print("left:", [thread.name for thread in threading.enumerate() if thread.name.startswith("delayd-")])
"""


OPENS = """
import sys, tempfile, delayd
from datetime import timedelta
opened = delayd.open(tempfile.mkdtemp(dir=sys.argv[1]))
producer = opened.producer()
producer.send("a", b"1", delay=timedelta(0))
assert opened.consumer("a", "g").pull().bodies == [b"1"]
"""


NOBODY = "127.0.0.1:9"  # The discard port, where nothing listens.


def run(program: str, *words: str, says: str = "") -> tuple[str, float]:
    """Run it to its end: what it said on stderr, and how long it took. It says ``says`` on stdout."""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == says
    return ended.stderr, time.monotonic() - began


def test_a_program_that_ends_with_a_producer_open_has_sent_everything() -> None:
    with world_aside() as (world, do):
        told, took_s = run(SENDS, world.address)
        assert told == "" and took_s < EXIT_S + DEADLINE_S
        assert do(lambda: [body for _, body, _ in world.delay.rows]) == [b"%d" % row for row in range(300)]


def test_a_program_that_can_not_send_everything_says_how_much_and_ends() -> None:
    told, took_s = run(LISTS_THREADS + SENDS, NOBODY, says="left: []\n")
    assert "ended_before_sent messages=300" in told and "Traceback" not in told
    assert EXIT_S <= took_s < EXIT_S + DEADLINE_S


def test_a_loop_that_ends_before_its_producer_says_how_much_was_not_sent() -> None:
    for more in ((), ("sleep",)):
        told, _ = run(ASYNC_SENDS, NOBODY, *more)
        assert "ended_before_sent messages=7" in told


def test_a_program_that_ends_with_a_consumer_open_acknowledges_and_gives_back() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 200))
        told, _ = run(CONSUMES, world.address)
        assert told == ""
        wait_until(lambda: sorted(world.realtime.acked) == list(range(20)))
        assert world.realtime.held == {} and world.realtime.counted == [] and world.realtime.returned


def test_no_thread_of_an_open_directory_outlives_the_program(tmp_path: Path) -> None:
    told, _ = run(LISTS_THREADS + OPENS, str(tmp_path), says="left: []\n")
    assert "Traceback" not in told
