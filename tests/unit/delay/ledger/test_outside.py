"""Rows that wait for a target are looked up, not searched through; and each is found where it stands now."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from delayd.delay.ledger import wanted as room
from delayd.delay.ledger.wanted import Outside, Wanted, sort_rows
from delayd.delay.rows import Rows, new_rows
from delayd.hours import HOUR_MS
from delayd.outcome import MessageState
from delayd.wire.asked import CancelAnswer
from tests.worlds.delay import TARGET_IDS, World, wanted

HOUR = 500_000


def rows_of(sequences: list[int]) -> Rows:
    rows = new_rows(len(sequences))
    rows["sequence"], rows["hour"], rows["due_ms"] = sequences, HOUR, np.array(sequences) % 1_000
    return rows


def wanted_of(sequences: list[int], off_ms: int = 0) -> Wanted:
    rising = np.array(sorted(sequences), np.uint64)
    due = np.int64(HOUR) * HOUR_MS + (rising % np.uint64(1_000)).astype(np.int64) + off_ms
    return Wanted(rising, due, np.full(len(rising), HOUR, np.uint32))


def found(index: Outside, asked: Wanted, arrays: list[Rows]) -> list[int]:
    here = {id(array) for array in arrays}
    told: list[int] = []
    for array, at, names in index.find(asked, arrays):
        assert id(array) in here
        assert array["sequence"].take(at).tolist() == asked.sequences.take(names).tolist()
        told += asked.sequences.take(names).tolist()
    return sorted(told)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_is_what_stands_in_the_arrays_now(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SORT_FROM_ROWS", 20)
    monkeypatch.setattr(room, "RUN_ROWS_MAX", 50)
    random, index = Random(seed), Outside()
    arrays: list[Rows] = []
    free = list(range(1, 2_000))
    random.shuffle(free)
    for _ in range(60):
        kind = random.random()
        if kind < 0.5 and len(free) > 40:
            arrays.append(rows_of([free.pop() for _ in range(random.randrange(1, 40))]))
        elif kind < 0.7 and arrays:
            gone = arrays.pop(random.randrange(len(arrays)))
            free += gone["sequence"].tolist()
        elif arrays:
            # Its rows stand in another array now, without one of them.
            at = random.randrange(len(arrays))
            free.append(int(arrays[at]["sequence"][0]))
            arrays[at] = arrays[at][1:].copy()
        arrays = [array for array in arrays if len(array)]
        unsorted = index.unsorted(arrays)
        if unsorted and random.random() < 0.8:
            index.take(sort_rows(unsorted))
            assert not index.unsorted(arrays)
        stand = sorted(sequence for array in arrays for sequence in array["sequence"].tolist())
        some = random.sample(range(1, 2_100), 50) + stand[:5]
        assert found(index, wanted_of(list(set(some))), arrays) == sorted(set(some) & set(stand))
        assert not found(index, wanted_of(stand or [1], off_ms=1_001), arrays), "another instant is another row"


def test_rule_B2_a_request_is_a_look_up_however_many_rows_wait_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SORT_FROM_ROWS", 100)
    world = World(segment_bytes=1 << 20)
    world.send(wanted(1, 0, "left"))
    world.pass_ms(1_000)
    world.crash_target(TARGET_IDS[0])
    for number in range(8):
        world.send(wanted(400, 2_000 + number, f"w{number}"))
        world.settle()
    world.pass_ms(3_000)
    assert world.core.standing.counters()["waiting_rows"] == 3_200
    compared: list[int] = []
    find = Wanted.find

    def counting(self: Wanted, rows: Rows) -> object:
        compared.append(len(rows))
        return find(self, rows)

    monkeypatch.setattr(Wanted, "find", counting)
    receipts = world.receipts("left", "w3", "w7")
    for row in (0, 1, 200, 600):
        one = receipts.take([row])
        compared.clear()
        assert world.states(one) == [MessageState.DISPATCHED if row == 0 else MessageState.PENDING]
        assert sum(compared) < 1_000, "what waits is not searched through"
        if row:
            told = world.cancel(one)
            world.settle()
            assert told == [[CancelAnswer.CANCELLED]]
            assert world.states(one) == [MessageState.CANCELLED]
    assert world.core.standing.counters()["waiting_rows"] == 3_197
