"""What is known of rows that an earlier life handed over: looked up and added to without a pass over their hour."""

import tracemalloc

import numpy as np

from delayd.delay.filing.hour_table import HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.delay.timers.earlier import EarlierOutcomes
from delayd.sequences import Sequences

HOUR = 500_000
ROWS = 1_000_000
BATCHES = 40  # A window holds about this many batches when many messages are due at once.


def earlier_outcomes(settled: list[Sequences]) -> EarlierOutcomes:
    """One hour whose even sequences have an outcome."""
    decided = {HOUR: np.arange(0, 2 * ROWS, 2, dtype=np.uint64)}
    return EarlierOutcomes(decided, {}, HourTable(), PendingRows(), settled.append)


def test_rows_of_answers_count_as_decided_beside_those_of_the_dispatch_log() -> None:
    settled: list[Sequences] = []
    earlier = earlier_outcomes(settled)
    asked = np.array([6, 7, 9, 2 * ROWS], np.uint64)
    assert earlier.without_outcome(HOUR, asked).tolist() == [False, True, True, True]
    earlier.decided(HOUR, np.array([9], np.uint64))
    earlier.decided(HOUR, np.array([2 * ROWS], np.uint64))
    assert earlier.without_outcome(HOUR, asked).tolist() == [False, True, False, False]
    earlier.settle()
    earlier.settle()
    assert [found.tolist() for found in settled] == [[9, 2 * ROWS]]
    both = earlier.of(HOUR)
    assert len(both) == ROWS + 2 and bool((both[1:] > both[:-1]).all())
    assert earlier.without_outcome(HOUR, asked).tolist() == [False, True, False, False]


def test_rows_of_an_hour_that_is_not_known_count_as_decided_until_an_answer_names_some() -> None:
    earlier = earlier_outcomes([])
    assert not earlier.without_outcome(HOUR + 1, np.array([1, 2], np.uint64)).any()
    earlier.forget(HOUR)
    assert len(earlier) == 0


def test_a_batch_of_an_answer_costs_no_pass_over_the_outcomes_of_its_hour() -> None:
    earlier = earlier_outcomes([])
    hour_bytes = earlier.of(HOUR).nbytes
    tracemalloc.start()
    try:
        for batch in range(BATCHES):
            sequences = np.arange(1_000 * batch + 1, 1_000 * batch + 1_001, 2, dtype=np.uint64)
            assert earlier.without_outcome(HOUR, sequences).all()
            earlier.decided(HOUR, sequences)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < hour_bytes / 4
