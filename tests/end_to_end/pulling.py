"""Pull from real servers until enough has come."""

from __future__ import annotations

import time
from datetime import timedelta

from delayd import Consumer
from tests.waiting import DEADLINE_S


def pull_all(consumer: Consumer, count: int) -> dict[bytes, int]:
    """Bodies until there are so many, each with how often it came."""
    found: dict[bytes, int] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count and time.monotonic() < deadline:
        batch = consumer.pull(wait=timedelta(milliseconds=500))
        for body in batch.bodies:
            found[body] = found.get(body, 0) + 1
        batch.ack()
    return found
