"""What a program that just ends leaves behind: nothing unsent or held without a word."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from delayd.client.engine import EXIT_S
from tests.unit.client.world import add_messages, world_aside
from tests.waiting import DEADLINE_S, wait_until

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
consumer = delayd.Consumer(sys.argv[1], "a", "g")
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


def test_no_thread_of_a_client_outlives_the_program() -> None:
    # It would crash in the event loop's C code, which needs the interpreter.
    with world_aside() as (world, do):
        do(partial(add_messages, world, 200))
        for program in (SENDS, CONSUMES):
            run(LISTS_THREADS + program, world.address, says="left: []\n")


def test_no_thread_of_an_open_directory_outlives_the_program(tmp_path: Path) -> None:
    told, _ = run(LISTS_THREADS + OPENS, str(tmp_path), says="left: []\n")
    assert "Traceback" not in told
