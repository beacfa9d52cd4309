"""What sends cost a producer, and messages a consumer, as counts that fail when they grow."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from types import FrameType

import numpy as np
import uvloop

from delayd import AsyncConsumer, AsyncProducer, Receipt
from tests.unit.client.world import PAST_MS, World, on_loop, world_aside

# Calls of Python functions on the producer's thread, measured and rounded up by a tenth: each costs 0.1 us or more.
SEND_CALLS = 4  # send, single, queue and the outbox's add; rounding up would allow one more.


SINGLES_BATCH_CALLS_MAX = (
    190  # A batch of single sends from its first row to its receipts, those of its rows not counted.
)


MESSAGE_CALLS_MAX = 27  # One message of an `async for`, with its acknowledgement, which travels with others.


BATCH_CALLS_MAX = 165  # One `send_batch` from the call to the receipt.


TRIES = 10  # The least of them counts: an answer may come in two reads, and other things happen in a loop.


BODY = b"x" * 200


class Counted:
    """How many Python functions were called."""

    calls = 0


@contextmanager
def counting() -> Iterator[Counted]:
    counted = Counted()

    def seen(frame: FrameType, event: str, argument: object) -> None:
        counted.calls += event == "call"

    sys.setprofile(seen)
    try:
        yield counted
    finally:
        sys.setprofile(None)


async def on_producer(address: str, sends: int) -> tuple[int, int]:
    """Calls of so many single sends made in one turn of the loop: of the sends, and of all until the receipts came."""
    async with AsyncProducer(address) as producer:
        await producer.send("a", BODY, deliver_at_ms=PAST_MS)
        tries: list[tuple[int, int]] = []
        for _ in range(TRIES):
            with counting() as counted:
                futures = [producer.send("a", BODY, deliver_at_ms=PAST_MS) for _ in range(sends)]
                of_sends = counted.calls
                await futures[-1]
            assert all(isinstance(future.result(), Receipt) for future in futures)
            tries.append((of_sends, counted.calls))
        return min(tries, key=lambda calls: calls[1])


def test_a_single_send_costs_four_calls_and_its_receipt_none() -> None:
    with world_aside() as (world, _):
        few = uvloop.run(on_producer(world.address, 10))
        many = uvloop.run(on_producer(world.address, 110))
    assert many[0] - few[0] == 100 * SEND_CALLS
    for of_sends, of_all in (few, many):
        assert of_all - of_sends <= SINGLES_BATCH_CALLS_MAX


def test_a_message_that_is_acknowledged_costs_as_many_calls_as_these() -> None:
    async def scenario(world: World) -> None:
        for _ in range(300):
            world.realtime.add(b"1")
        costs: list[int] = []
        async with AsyncConsumer(world.address, "orders", "g") as consumer:
            with counting() as counted:
                async for message in consumer:
                    await message.ack(wait=False)
                    costs.append(counted.calls)
                    if len(costs) == 300:
                        break
        # Most messages come from the stock, and in their turn nothing else is done.
        cost = median(after - before for before, after in pairwise(costs))
        assert cost <= MESSAGE_CALLS_MAX, cost

    on_loop(scenario)


def test_the_calls_of_a_batch_do_not_grow_with_its_rows() -> None:
    async def scenario(address: str, rows: int) -> int:
        async with AsyncProducer(address) as producer:
            due_ms = np.full(rows, PAST_MS)
            await producer.send_batch("a", [BODY] * rows, due_ms)
            tries: list[int] = []
            for _ in range(TRIES):
                with counting() as counted:
                    await producer.send_batch("a", [BODY] * rows, due_ms)
                tries.append(counted.calls)
            return min(tries)

    with world_aside() as (world, _):
        for rows in (5, 500):
            assert uvloop.run(scenario(world.address, rows)) <= BATCH_CALLS_MAX
