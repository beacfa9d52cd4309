"""AsyncProducer: many messages at once, as columns."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import numpy as np

from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import BatchFailed
from delayd.errors import (
    BadArgument,
    BadInstant,
    BadSubject,
    DelaydError,
    HourFull,
    PastHorizon,
)
from tests.unit.client.servers import refuse
from tests.unit.client.world import PAST_MS, World, on_loop
from tests.unit.net.loopback import error_of
from tests.waiting import until


def test_a_large_batch_is_split_and_its_receipt_names_every_row() -> None:
    async def scenario(world: World) -> None:
        count = 20_000
        due = PAST_MS + np.arange(count, dtype=np.int64)[::-1]
        bodies = [b"%d" % row for row in range(count)]
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send_batch("a", bodies, due)
        assert len(world.delay.kept) == 3
        by_sequence = dict(zip(range(1, count + 1), world.delay.rows, strict=True))
        assert [by_sequence[sequence] for sequence in receipt.sequences.tolist()] == [
            (b"a", body, at) for body, at in zip(bodies, due.tolist(), strict=True)
        ]
        assert receipt.deliver_at_ms.tolist() == due.tolist()
        assert receipt.rows.tolist() == list(range(count)) and receipt.was_due.all()
        assert set(receipt.log_ids.tolist()) == {101}

    on_loop(scenario)


def test_a_batch_of_large_messages_is_split_by_bytes() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send_batch("a", [bytes(3 << 20)] * 5, PAST_MS, headers={"a": "b"})
        assert len(receipt) == 5 and len(world.delay.kept) == 5

    on_loop(scenario)


def test_an_empty_batch_has_an_empty_receipt() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send_batch("a", [], PAST_MS)
        assert len(receipt) == 0 and receipt.sequences.tolist() == [] and receipt.was_due.tolist() == []
        assert world.delay.seen == []

    on_loop(scenario)


def test_a_delay_for_a_batch_is_one_instant_for_all() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            before = world.delay.now_ms()
            receipt = await producer.send_batch("a", [b"x"] * 10, delay=timedelta(minutes=1))
        assert len(set(receipt.deliver_at_ms.tolist())) == 1
        assert 0 <= receipt.deliver_at_ms[0] - before - 60_000 < 1_000

    on_loop(scenario)


def test_faulty_columns_are_named_by_their_row() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            text: bytes = "text"  # type: ignore[assignment]
            assert "row 1" in (await error_of(producer.send_batch("a", [b"", text], PAST_MS))).message
            assert "row 2" in (await error_of(producer.send_batch("a", [b"", b"", bytes(5 << 20)], PAST_MS))).message
            alone: list[bytes] = b"one body"  # type: ignore[assignment]
            assert "a list of bytes, not bytes" in (await error_of(producer.send_batch("a", alone, PAST_MS))).message
            faults: list[DelaydError] = [
                await error_of(producer.send_batch("a", [b"x"] * 3, [PAST_MS, PAST_MS])),
                await error_of(producer.send_batch("a", [b"x"], [1.5])),  # type: ignore[list-item]
                await error_of(producer.send_batch("a", [b"x"], [-1])),
                await error_of(producer.send_batch("a", [b"x"] * 2, [PAST_MS, 1_795_248_000])),
                await error_of(producer.send_batch("a", [b"x"], np.array([2**63], np.uint64))),
                await error_of(producer.send_batch("a", [b"x"], PAST_MS, delay=timedelta(1))),
                await error_of(producer.send_batch("a", [b"x"], PAST_MS, headers=[None, None])),
                await error_of(producer.send_batch("", [b"x"], PAST_MS)),
            ]
        assert [type(fault) for fault in faults] == [BadArgument] * 2 + [BadInstant] * 2 + [PastHorizon] + [
            BadArgument
        ] * 2 + [BadSubject]
        assert world.delay.seen == []

    on_loop(scenario)


def test_refused_rows_of_a_batch_are_named_with_the_receipt_of_the_others() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(refuse(world.delay, HourFull("that hour is full"), [0, 2]))
            error = await error_of(
                producer.send_batch("a", [b"0", b"1", b"2", b"3"], [PAST_MS + row for row in range(4)])
            )
            assert isinstance(error, BatchFailed)
            assert [(failure.rows.tolist(), type(failure.error)) for failure in error.failures] == [([0, 2], HourFull)]
            assert error.receipt.rows.tolist() == [1, 3] and error.receipt.deliver_at_ms.tolist() == [
                PAST_MS + 1,
                PAST_MS + 3,
            ]
            world.delay.script.append(refuse(world.delay, HourFull("that hour is full"), []))
            assert isinstance(await error_of(producer.send_batch("a", [b"0", b"1"], PAST_MS)), HourFull)

    on_loop(scenario)


def test_at_most_sixteen_pieces_of_batches_are_under_way() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"warm", deliver_at_ms=PAST_MS)
            world.delay.holding = True
            sending = asyncio.create_task(producer.send_batch("a", [b"x"] * (8_192 * 20), PAST_MS))
            await until(lambda: len(world.delay.held) == 16)
            await asyncio.sleep(0.02)
            assert len(world.delay.held) == 16
            world.delay.release()
            assert len(await sending) == 8_192 * 20

    on_loop(scenario)
