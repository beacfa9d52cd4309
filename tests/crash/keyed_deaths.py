"""A short workload of keyed sends, moves and cancels, and what must hold after a death at each of its operations."""

from __future__ import annotations

from copy import deepcopy

from delayd.testing.clock import START_MS
from delayd.wire.asked import RescheduleAnswer
from tests.crash.delay_deaths import BEFORE_HOUR_MS, HOUR_MS, Death, finish
from tests.worlds.delay import World, wanted
from tests.worlds.key_books import KEEP, REJECT, REPLACE, KeyBooks

BEGIN_MS = HOUR_MS - BEFORE_HOUR_MS
NEAR_MS, FAR_MS = BEGIN_MS + 700, BEGIN_MS + 2 * HOUR_MS
A, B = b"a", b"b"
# The bugs of tests/worlds/bugs.py that these deaths must show.
SHOWN_BY = (
    "C1: a cancel is answered before its decision is durable",
    "C2: a checkpoint passes a decision and does not name its rows",
    "P1: a start does not read the decisions",
)


class KeyedDeath(Death):
    """One death; the books of keys are kept until then, and each next life goes on with a copy."""

    def __init__(self, at: int | None) -> None:
        self._keys = KeyBooks()
        self._asked: set[int] = set()
        super().__init__(at)

    def work(self, world: World) -> None:
        """Rows meet in memory and in files; each decision is followed by another one about the same message."""
        self._send(world, "first", FAR_MS, [A, B], [REJECT, REJECT])
        self._send(world, "second", FAR_MS, [A, A, B], [REPLACE, KEEP, REJECT])
        world.checkpoint()
        self._move(world, "second-0", FAR_MS + HOUR_MS)
        self._send(world, "third", NEAR_MS, [A, B], [REPLACE, KEEP])
        asked = world.receipts("first-1")
        self._asked.update(asked.sequences.tolist())
        world.cancel(asked)
        world.settle()
        self._send(world, "fourth", FAR_MS, [B], [REJECT])
        self._move(world, "fourth-0", NEAR_MS)
        world.pass_ms(800)
        world.checkpoint()
        self._send(world, "fifth", NEAR_MS + 500, [A, B], [REJECT, REJECT])
        world.send_again(2)
        world.settle()

    def finish(self, world: World, *, sealing: bool) -> None:
        """See Death; the verdicts are those of one dict of keys."""
        finish(world, sealing=sealing)
        deepcopy(self._keys).check(world.outside, dict.fromkeys(self._asked, 0))

    def _send(self, world: World, name: str, due_ms: int, keys: list[bytes], policies: list[int]) -> None:
        rows = wanted(len(keys), due_ms, name)
        self._keys.sent(world.outside.last_number + 1, keys, policies, world.outside)
        world.send(rows, keys, policies)
        world.settle()
        self._keys.look(world.outside)

    def _move(self, world: World, name: str, due_ms: int) -> None:
        asked = world.receipts(name)
        told = world.reschedule(asked, START_MS + due_ms)
        world.settle()
        for sequence, row in zip(asked.sequences.tolist(), told[0], strict=True):
            if row["answer"] == RescheduleAnswer.MOVED and row["sequence"] != sequence:
                world.outside.cancelled.add(sequence)  # It is never delivered.
