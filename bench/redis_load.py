"""Fills a Redis server with messages, batch by batch, the answers of some of them still on their way."""

from collections.abc import Iterable

from bench.messages import BATCH_ROWS, BODIES, UNDER_WAY, Instants
from bench.redis_peer import Line, zadd


def fill(line: Line, batches: Iterable[Instants], first_id: int = 0) -> None:
    """Schedule all messages; returns when the last answer has come."""
    for number, due_ms in enumerate(batches):
        line.send(zadd(first_id + number * BATCH_ROWS, due_ms.tolist(), BODIES), 1)
        if line.unanswered == UNDER_WAY:
            line.settle(UNDER_WAY // 2)
    line.settle()
