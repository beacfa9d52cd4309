"""How fast one client process sends messages with keys in columns of 500, and cancels them by their keys.

Each key is new, as in a service that names its messages; others are pending already, most of them in files of the
index.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from bench.cancels import SUBJECT, cancel_columns, rate, tomorrow, under_way, with_producer
from bench.figures import Figures
from bench.messages import BATCH_ROWS, BODIES, Instants, latencies
from delayd.client.producer import AsyncProducer


class _Column(NamedTuple):
    """Messages of one batch."""

    keys: list[str]
    due_ms: Instants


def send_keys_in_columns(messages: int, pending: int) -> Figures:
    """Send batches of 500 with new keys, sixteen under way, while so many keys are pending."""

    async def run(producer: AsyncProducer) -> Figures:
        await _send(producer, _columns(pending, 0))
        columns = _columns(messages, pending)
        began = time.perf_counter()
        took = await _send(producer, columns)
        return {"messages_s": rate(messages, began), **latencies(took)}

    return with_producer(run)


def cancel_keys_in_columns(messages: int, pending: int) -> Figures:
    """Cancel 500 messages a request by their keys, sixteen under way, while so many others are pending."""

    async def run(producer: AsyncProducer) -> Figures:
        await _send(producer, _columns(pending, 0))
        columns = _columns(messages, pending)
        await _send(producer, columns)
        return await cancel_columns(columns, lambda column: producer.cancel_batch(SUBJECT, keys=column.keys))

    return with_producer(run)


async def _send(producer: AsyncProducer, columns: list[_Column]) -> list[float]:
    took: list[float] = []

    async def send(column: _Column) -> None:
        began = time.perf_counter()
        receipt = await producer.send_batch(SUBJECT, BODIES, column.due_ms, keys=column.keys)
        took.append(time.perf_counter() - began)
        assert len(receipt) == BATCH_ROWS

    await under_way(columns, send)
    return took


def _columns(messages: int, first: int) -> list[_Column]:
    instants = tomorrow(messages)
    begins = range(first, first + messages, BATCH_ROWS)
    return [
        _Column([f"order-{number:09}" for number in range(begin, begin + BATCH_ROWS)], due_ms)
        for begin, due_ms in zip(begins, instants, strict=True)
    ]
