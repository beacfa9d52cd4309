"""A program that ends its home cleanly prints nothing: no log line, no warning, no file or loop that was left open."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys, tempfile, threading
from datetime import timedelta

import delayd
from delayd.testing import InMemoryBroker

def blocking(home):
    with home.producer() as producer:
        producer.send("orders.cancel", b"42", delay=timedelta(milliseconds=50))
        producer.send("orders.cancel", b"43", delay=timedelta(hours=1))
    with home.consumer("orders.cancel", group="billing") as consumer:
        for message in consumer:
            message.ack()
            break

def at_work(home):
    worker = home.worker(group="workers")

    @worker.on("orders.cancel")
    def handle(body):
        worker.stop()

    worker.run()

async def asynchronous(home):
    async with home.async_producer() as producer, home.async_consumer("mail.send", "g") as consumer:
        await producer.send("mail.send", b"1", delay=timedelta(0))
        async for message in consumer:
            await message.ack()
            break

def use(home):
    blocking(home)
    at_work(home)
    asyncio.run(asynchronous(home))
    blocking(home)

if sys.argv[1] == "embedded":
    for _ in range(4):
        with delayd.open(sys.argv[2]) as home:
            use(home)
else:
    with InMemoryBroker(tick=True) as home:
        use(home)
"""


@pytest.mark.parametrize("home", ["embedded", "memory"])
def test_a_clean_end_of_a_home_prints_nothing(home: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "always", "-c", PROGRAM, home, str(tmp_path / "home")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (told.stdout, told.stderr, told.returncode) == ("", "", 0)
