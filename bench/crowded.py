"""What a single get and a single cancel take at an empty delay server, and at the same one when it has much to keep.

Then as many messages wait for a realtime server that is away, as many more have just been cancelled in thousands of
hours, so that most of their outcomes are owed, and each of these hours has endings. Callers ask one at a time.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta

import numpy as np
import uvloop

from bench.cancels import cancel_columns
from bench.figures import Figures
from bench.messages import BATCH_ROWS, BODIES, HOUR_MS, Instants, now_ms, send_batches
from bench.servers import Servers, servers
from delayd import CancelAnswer
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import BatchReceipt, Receipt
from delayd.config import parse_address
from delayd.net.entry import connect
from delayd.wire.heads import need_int, need_map
from delayd.wire.requests import RequestType

WAITING, ENDED, ASKED = "bench.waiting", "bench.ended", "bench.asked"
ASKS = 300  # One after the other, for a median.
AHEAD_MS = 40 * HOUR_MS
COLUMN_ROWS = 50_000  # A cancel of so many rows at a time: each commit ends many.
LIMIT_S = 120.0


def crowded(waiting: int, owed: int, hours: int) -> Figures:
    """Ask an empty server, fill it, ask it again; figures are medians in milliseconds, and their quotients."""
    with servers("delay", "realtime") as running:
        return uvloop.run(_run(running, waiting, owed, hours))


async def _run(running: Servers, waiting: int, owed: int, hours: int) -> Figures:
    async with AsyncProducer(running.meta) as producer:
        await producer.send(WAITING, b"the first one gives the subject its server", delay=timedelta(0))
        receipts = [await producer.send(ASKED, b"x", deliver_at_ms=now_ms() + AHEAD_MS) for _ in range(4 * ASKS)]
        empty = await _ask(producer, receipts[: 2 * ASKS])
        ended: list[BatchReceipt] = []
        for due_ms in _over(owed, hours):
            ended.append(await producer.send_batch(ENDED, [BODIES[0]] * len(due_ms), due_ms))
        running.kill("realtime")
        due = np.full(BATCH_ROWS, now_ms() + 500, np.int64)
        await send_batches(producer, WAITING, (due for _ in range(waiting // BATCH_ROWS)))
        await _until(running, lambda counters: counters["waiting_rows"] >= waiting // BATCH_ROWS * BATCH_ROWS)
        await cancel_columns(ended, lambda receipt: producer.cancel_batch(ENDED, receipt=receipt))
        before = await _counters(running)
        full = await _ask(producer, receipts[2 * ASKS :])
        after = await _counters(running)
    return {
        "get_empty_ms": empty[0],
        "get_crowded_ms": full[0],
        "get_times": full[0] / empty[0],
        "cancel_empty_ms": empty[1],
        "cancel_crowded_ms": full[1],
        "cancel_times": full[1] / empty[1],
        "waiting_rows": float(after["waiting_rows"]),
        "owed_rows_before": float(before["owed_rows"]),
        "owed_rows_after": float(after["owed_rows"]),
    }


async def _ask(producer: AsyncProducer, receipts: Sequence[Receipt]) -> tuple[float, float]:
    """The medians of gets and of cancels, in turns, in milliseconds."""
    gets: list[float] = []
    cancels: list[float] = []

    async def get(receipt: Receipt) -> None:
        await producer.get(ASKED, receipt=receipt)

    async def cancel(receipt: Receipt) -> None:
        assert await producer.cancel(ASKED, receipt=receipt) is CancelAnswer.CANCELLED

    for receipt in receipts[:ASKS]:
        gets.append(await _took_ms(get, receipt))
        cancels.append(await _took_ms(cancel, receipt))
    return float(np.median(gets)), float(np.median(cancels))


async def _took_ms(ask: Callable[[Receipt], Awaitable[None]], receipt: Receipt) -> float:
    began = time.perf_counter()
    await ask(receipt)
    return 1_000 * (time.perf_counter() - began)


def _over(messages: int, hours: int) -> Iterator[Instants]:
    """Instants in each of so many hours, for columns of `COLUMN_ROWS`."""
    first_ms = (now_ms() // HOUR_MS + 2) * HOUR_MS
    for first in range(0, messages, COLUMN_ROWS):
        numbers = np.arange(first, min(messages, first + COLUMN_ROWS), dtype=np.int64)
        yield first_ms + numbers * hours // messages * HOUR_MS + numbers % 1_000


async def _until(running: Servers, holds: Callable[[dict[str, int]], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds(await _counters(running)):
        assert time.monotonic() < until, "the server never got there"


async def _counters(running: Servers) -> dict[str, int]:
    connection = await connect(parse_address(running.addresses["delay"]))
    try:
        answer = await connection.request(RequestType.STATUS, {})
        counters = need_map(answer.head, "counters")
        return {name: need_int(counters, name) for name in ("waiting_rows", "owed_rows")}
    finally:
        connection.close()
        await connection.closed
