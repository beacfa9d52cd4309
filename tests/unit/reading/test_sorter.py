"""The order of an hour's logs: each column lands where its rows belong, whether logs share it or not."""

import numpy as np
import pytest

from delayd.reading.files.row_arrays import Sorter


def sort(sorter: Sorter, sequence: list[int], due: list[int], own: list[int]) -> list[tuple[int, int, int]]:
    columns = np.array(sequence, np.uint64), np.array(due, np.int64), np.array(own, np.int64)
    sequences, (dues, others) = sorter.sort(columns[0], columns[1:])
    return list(zip(sequences.tolist(), dues.tolist(), others.tolist(), strict=True))


@pytest.mark.parametrize(
    "sequence", [[3, 1, 2], [2, 1, 2, 1], [9, 7, 7, 8], [1 << 63, 5, 1], [4, 4, 2, 2, 3], [10, 1, 5_000, 2]]
)
@pytest.mark.parametrize("differs", ["nothing", "one due", "one sequence", "length"])
def test_each_log_gets_its_own_rows_by_sequence(sequence: list[int], differs: str) -> None:
    sorter = Sorter()
    due = [100 + row for row in range(len(sequence))]
    logs = [(sequence, due)]
    if differs == "one due":
        logs.append((sequence, [*due[:-1], 7]))
    elif differs == "one sequence":
        logs.append(([*sequence[:-1], sequence[-1] + 1], due))
    elif differs == "length":
        logs.append((sequence[:-1], due[:-1]))
    for times, (numbers, dues) in enumerate([*logs, *logs, logs[0]]):
        own = [1_000 * times + row for row in range(len(numbers))]
        expected = sorted(zip(numbers, dues, own, strict=True), key=lambda row: row[0])
        assert sort(sorter, numbers, dues, own) == expected


def test_sequences_that_two_logs_share_are_sorted_once_and_never_written_to() -> None:
    sorter, given = Sorter(), np.array([3, 1, 2], np.uint64)
    first, _ = sorter.sort(given, [])
    second, _ = sorter.sort(given.copy(), [])
    assert second is first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0
