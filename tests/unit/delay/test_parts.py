"""The small parts between a log and the network: pending rows, waiting rows, outcomes, batches by location."""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from delayd.batch.columns import BYTES_MAX, HEADER
from delayd.batch.sequences import pack_locations
from delayd.delay.filing.pending import PendingRows
from delayd.delay.filing.schedule_log import read_batch
from delayd.delay.handoff.window import WaitingRows
from delayd.delay.rows import Rows, new_rows
from delayd.errors import DamagedData
from delayd.hours import hour_of_ms
from delayd.testing.clock import START_MS

HOUR = hour_of_ms(START_MS)


def rows_of(sequences: range, length: int = 100, hour: int = HOUR) -> Rows:
    rows = new_rows(len(sequences))
    rows["sequence"] = sequences
    rows["length"] = length
    rows["hour"] = hour
    offsets: NDArray[np.uint64] = np.array(sequences, np.uint64) * np.uint64(8)
    rows["location"] = pack_locations(False, offsets, np.zeros(len(sequences), np.uint16))
    return rows


def sequences_of(rows: Rows) -> list[int]:
    found: list[int] = rows["sequence"].tolist()
    return found


def test_pending_rows_of_hours_to_come_stand_in_blocks_while_checkpoints_take_from_the_front() -> None:
    pending, total = PendingRows(), 0
    draw = np.random.default_rng(1)
    kept: list[tuple[int, int]] = []
    for _ in range(60):
        rows = rows_of(range(total, total + int(draw.integers(1, 9_000))), hour=HOUR + int(draw.integers(0, 3)))
        total += len(rows)
        pending.keep(rows)
        kept += [(HOUR, sequence) for sequence in sequences_of(rows)] if int(rows["hour"][0]) == HOUR else []
        if draw.integers(3) == 0:
            taken, covered = pending.take(), total
            late = rows_of(range(total, total + 5))
            total += 5
            pending.keep(late)
            pending.drop(taken)
            kept = [(hour, sequence) for hour, sequence in kept if sequence >= covered]
            kept += [(HOUR, sequence) for sequence in sequences_of(late)]
        assert sequences_of(pending.of_hour(HOUR)) == [sequence for _, sequence in kept]
        assert pending.count_by_hour().get(HOUR, 0) == len(kept) and pending.has_hour(HOUR) == bool(kept)
    pending.drop(pending.take())
    assert len(pending) == 0 and pending.count_by_hour() == {} and not pending.has_hour(HOUR)


def test_pending_rows_of_loaded_hours_are_counted_and_take_no_memory() -> None:
    pending = PendingRows()
    pending.keep(rows_of(range(10), hour=HOUR))
    pending.keep(rows_of(range(10, 30), hour=HOUR + 7))
    assert pending.hours_apart == 8
    pending.settle(HOUR)
    assert len(pending) == 30 and pending.hours_apart == 1 and not len(pending.of_hour(HOUR))
    taken = pending.take()
    pending.count(rows_of(range(30, 34), hour=HOUR + 1))
    pending.count(np.concatenate((rows_of(range(34, 36)), rows_of(range(36, 40), hour=HOUR + 1))))
    assert pending.count_by_hour() == {HOUR: 12, HOUR + 7: 20, HOUR + 1: 8} and pending.has_hour(HOUR + 1)
    tracemalloc.start()
    for _ in range(50):
        pending.count(rows_of(range(10_000)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10_000, "less than a fiftieth of a byte a row"
    pending.drop(taken)
    assert len(pending) == 500_010 and pending.count_by_hour() == {HOUR: 500_002, HOUR + 1: 8}


def test_waiting_rows_are_taken_from_the_front_within_both_limits_and_at_least_one() -> None:
    waiting = WaitingRows()
    waiting.add(rows_of(range(5)))
    waiting.add(rows_of(range(5, 8), length=1_000))
    assert sequences_of(waiting.take(3, 10_000)) == [0, 1, 2]
    assert sequences_of(waiting.take(100, 1_250)) == [3, 4, 5]
    assert sequences_of(waiting.take(100, 10)) == [6]
    assert len(waiting) == 1
    assert sequences_of(waiting.take(100, 10_000)) == [7]
    assert not len(waiting.take(100, 10_000))


def test_rows_that_are_given_back_are_the_first_again_and_decided_ones_are_dropped() -> None:
    waiting = WaitingRows()
    waiting.add(rows_of(range(6)))
    taken = waiting.take(2, 10_000)
    waiting.give_back(taken)
    waiting.remove(np.array([0, 3, 9], np.uint64))
    assert waiting.lowest_message_log_offset() == 8
    assert sequences_of(waiting.take(10, 10_000)) == [1, 2, 4, 5]
    assert waiting.lowest_message_log_offset() is None


def test_bytes_that_claim_to_be_a_huge_batch_are_damage_and_size_no_read() -> None:
    sizes: list[int] = []

    def read(offset: int, size: int) -> bytes:
        sizes.append(size)
        return HEADER.pack(0x48435442, 1, 1, 0, 0xFFFF_FFF8, *([0] * (len(HEADER.unpack(bytes(HEADER.size))) - 5)))

    with pytest.raises(DamagedData, match="the batch at offset 64"):
        read_batch(lambda at: ("log", at), read, 64)
    assert max(sizes) < BYTES_MAX
