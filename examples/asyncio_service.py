"""A service on asyncio that schedules work and does it, and stops gracefully.

At SIGTERM or Ctrl-C it takes nothing more, finishes what it holds, acknowledges it, and ends: nothing is done twice
because of a deployment. What is still pending waits on the delay server for the next start.

    delayd up
    python examples/asyncio_service.py --rate 20 --delay 0.5
"""

import argparse
import asyncio
import os
import signal
from datetime import timedelta

import delayd

SUBJECT = "service.work"


async def take_orders(meta: str, rate: float, delay: timedelta, stopping: asyncio.Event) -> None:
    """Schedule a piece of work for each order, ``rate`` a second."""
    count = 0
    async with delayd.AsyncProducer(meta) as producer:  # Its end waits for the receipts of all sends.
        while not stopping.is_set():
            receipt = await producer.send(SUBJECT, b"order %d" % count, delay=delay)
            count += 1
            if count == 1:
                print(f"the first order is kept as {receipt.sequence}", flush=True)
            await asyncio.sleep(1 / rate)
    print(f"took {count} orders", flush=True)


async def work(meta: str, stopping: asyncio.Event) -> None:
    """Do what is due, a few at a time."""
    count = 0
    async with delayd.AsyncConsumer(meta, SUBJECT, "service", max_messages=10) as consumer:
        while not stopping.is_set():
            # Half a second bounds how long a stop waits here; a message ends the wait at once.
            for message in await consumer.pull(wait=timedelta(milliseconds=500)):
                await asyncio.sleep(0.001)  # The work.
                await message.ack(wait=False)  # The end of the block waits until all of them are durable.
                count += 1
                if count == 1:
                    print(f"the first order was done {message.late_ms} ms after it was due", flush=True)
    print(f"did {count} orders", flush=True)


async def main() -> None:
    """An asyncio service; Ctrl-C stops it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--meta", default=os.environ.get("DELAYD_META", "127.0.0.1:7400"), metavar="HOST:PORT")
    parser.add_argument("--rate", type=float, default=20.0, metavar="PER_SECOND")
    parser.add_argument("--delay", type=float, default=0.5, metavar="SECONDS")
    arguments = parser.parse_args()

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(take_orders(arguments.meta, arguments.rate, timedelta(seconds=arguments.delay), stopping))
        tasks.create_task(work(arguments.meta, stopping))
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
