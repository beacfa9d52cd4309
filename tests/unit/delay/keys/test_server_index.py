"""The index of keys in a server: what enters it, what a checkpoint counts of it, and how it is made again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.content import Names
from delayd.hours import hour_of_ms
from delayd.log.hour import ENDED, EndedRows
from delayd.log.key_run import STATE_KEY, KnownRuns, run_path
from delayd.outcome import Reason
from delayd.testing.clock import START_MS
from tests.batches import SUBJECT, messages
from tests.worlds.delay import PRODUCER_ID, World, small_slots
from tests.worlds.files import FOLDER

HOUR_MS = 3_600_000
REPLACE = 2
FAR_MS = 40 * HOUR_MS


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_slots():
        yield


def send(world: World, keys: list[bytes], number: int, due_ms: int = FAR_MS) -> None:
    """Send one message a key, in one batch."""
    bodies = [b"%d-%d" % (number, row) for row in range(len(keys))]
    due = [START_MS + due_ms + row for row in range(len(keys))]
    flags = [REPLACE if key else 0 for key in keys]
    data = messages(bodies, due=due, keys=keys, flags=flags, part=ProducerPart(PRODUCER_ID, number, 0))
    world.core.send(parse(data), lambda what, duplicate: None)
    world.settle()


def found(world: World, keys: list[bytes]) -> list[int]:
    """The sequence of the newest row of each key."""
    names = Names.of_lists([SUBJECT] * len(keys), keys)
    view = world.core.logs.keys.view()
    sequences: list[int] = view.find(view.asked(names), lambda: None).rows["sequence"].tolist()
    return sequences


def known(world: World) -> KnownRuns:
    """What the state says."""
    stored = world.state.get(STATE_KEY)
    assert stored is not None
    return KnownRuns.decode(stored)


def make_again(world: World) -> None:
    """Let the ticks pass in which the index is made again."""
    world.pass_ms(2_000)


def test_a_row_that_took_no_key_has_no_entry_after_the_index_was_made_again() -> None:
    world = World()
    send(world, [b"a"], 1)
    send(world, [b"a"], 2, FAR_MS + HOUR_MS)
    send(world, [b"b"], 3)
    world.core.memory.ledger.owed.take(ended_rows(world, [(2, FAR_MS + HOUR_MS)], Reason.REJECTED))
    world.core.memory.ledger.owed.take(ended_rows(world, [(3, FAR_MS)], Reason.CANCELLED))
    world.pass_ms(100)
    world.checkpoint()
    world.disk.remove(run_path(FOLDER, known(world).runs[0].number))
    again = world.after_crash()
    make_again(again)
    assert found(again, [b"a", b"b"]) == [1, 3]


def ended_rows(world: World, rows: list[tuple[int, int]], reason: Reason) -> EndedRows:
    found = np.zeros(len(rows), ENDED)
    for row, (sequence, due_ms) in zip(found, rows, strict=True):
        row["sequence"], row["deliver_at_ms"] = sequence, START_MS + due_ms
        row["hour"], row["reason"] = hour_of_ms(START_MS + due_ms), reason
    return found
