"""Sending rows with keys in a world, and what their producer hears."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from delayd.batch.batch import Batch
from delayd.log.hour import decode_ended
from delayd.outcome import Reason
from delayd.wire.asked import AskedKeys, encode_asked_keys, read_asked_keys
from tests.worlds.delay import World
from tests.worlds.outside import Wanted

REJECT, KEEP, REPLACE = 0, 1, 2
ACCEPTED = 0
REJECTED, KEPT, IN_FLIGHT, REPLACED = Reason.REJECTED, Reason.KEPT, Reason.IN_FLIGHT, Reason.REPLACED

SUBJECT = b"orders.eu"

Verdict = tuple[int, int]
"""Of a row: the reason with which it met another, and the sequence of that one; zeros when it was plainly accepted."""


def send(world: World, rows: Sequence[Wanted], keys: Sequence[bytes], policy: int | Sequence[int] = REJECT) -> int:
    """Send rows with keys; the number of their batch."""
    policies = [policy] * len(keys) if isinstance(policy, int) else policy
    return world.send(rows, keys, [each if key else 0 for each, key in zip(policies, keys, strict=True)])


def verdicts(world: World, number: int) -> list[Verdict]:
    """What the producer was told of each row of a batch."""
    _, accepted = world.outside.accepted[number]
    told = [(ACCEPTED, 0)] * accepted.rows
    for row in decode_ended(accepted.decided):
        mine, other = int(row["sequence"]), int(row["other"])
        if row["reason"] == REPLACED:
            mine, other = other, mine
        told[mine - accepted.base_sequence] = (int(row["reason"]), other)
    return told


def sent(world: World, rows: Sequence[Wanted], keys: Sequence[bytes], policy: int | Sequence[int]) -> list[Verdict]:
    """Send rows and let everything happen that takes no time; the verdicts."""
    number = send(world, rows, keys, policy)
    world.settle()
    return verdicts(world, number)


def names(keys: Sequence[bytes], wanted_at_ms: Sequence[int] | None = None) -> Batch:
    """The body of a request by key, as a server reads it."""
    instants = None if wanted_at_ms is None else np.array(wanted_at_ms, np.int64)
    batch = read_asked_keys(encode_asked_keys(AskedKeys(SUBJECT, list(keys)), instants))
    assert batch is not None
    return batch
