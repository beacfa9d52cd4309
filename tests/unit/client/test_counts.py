"""What sends cost a producer, and messages a consumer, as counts that fail when they grow."""

import asyncio
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from types import FrameType

import numpy as np
import uvloop

from delayd.batch.columns import ColumnId, ProducerPart
from delayd.client.producer import AsyncProducer
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.client.sending.options import Items
from delayd.client.sending.outbox import CROWD_ROWS, pack_rows
from delayd.client.sending.receipts import Receipt
from delayd.wire.requests import RequestType
from tests.unit.client.world import PAST_MS, World, on_loop, world_aside

# Calls of Python functions on the producer's thread, measured and rounded up by a tenth: each costs 0.1 us or more.
SEND_CALLS = 4  # send, single, queue and the outbox's add; rounding up would allow one more.
SINGLES_BATCH_CALLS_MAX = (
    190  # A batch of single sends from its first row to its receipts, those of its rows not counted.
)
MESSAGE_CALLS_MAX = 27  # One message of an `async for`, with its acknowledgement, which travels with others.
BATCH_CALLS_MAX = 160  # One `send_batch` from the call to the receipt.

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
        async with AsyncConsumer(world.address, "a", "g") as consumer:
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


def test_a_crowd_of_senders_leaves_in_two_batches_so_that_one_is_made_while_the_other_is_stored() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", BODY, deliver_at_ms=PAST_MS)

            async def sender() -> None:
                for _ in range(3):
                    await producer.send("a", BODY, deliver_at_ms=PAST_MS)

            await asyncio.gather(*(sender() for _ in range(2 * CROWD_ROWS)))
        sizes = [kept.batch.count for kept in world.delay.kept[1:]]
        assert sum(sizes) == 6 * CROWD_ROWS and len(sizes) == 6, sizes

    on_loop(scenario)


def test_a_crowd_leaves_before_the_turn_of_the_loop_ends() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", BODY, deliver_at_ms=PAST_MS)
            group = producer._own.standing().core.sender.groups.choose()
            assert group is not None and group.link.standing is not None
            writer = group.link.standing._writer
            writes = writer.flushes
            futures = [producer.send("a", BODY, deliver_at_ms=PAST_MS) for _ in range(CROWD_ROWS)]
            # The server has the first half while the senders of the other half have not had their turn.
            assert writer.flushes == writes + 1
            await asyncio.gather(*futures)

    on_loop(scenario)


def test_a_batch_is_one_frame_and_one_write() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send_batch("a", [BODY] * 500, PAST_MS)
            group = producer._own.standing().core.sender.groups.choose()
            assert group is not None and group.link.standing is not None
            connection = group.link.standing
            writes = connection._writer.flushes
            await producer.send_batch("a", [BODY] * 500, PAST_MS)
            assert connection._writer.flushes == writes + 1
        frames = [frame for frame in world.delay.seen if frame.type == RequestType.SEND]
        assert len(frames) == 2

    on_loop(scenario)


def test_a_body_is_copied_once_into_its_batch() -> None:
    columns = {ColumnId.DELIVER_AT_MS: np.array([1])}
    regions = {ColumnId.BODY_END: Items([bytes(4 << 20)], np.array([4 << 20]))}
    tracemalloc.start()
    try:
        pieces = pack_rows(ProducerPart(1, 1, 1), [b"a"], columns, regions)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, pieces)) > 4 << 20 and peak < 5 << 20
