"""Tests of sequences against which rows are held: by a table or by a search, the answer is that of a Python set."""

import numpy as np
import pytest

from delayd.batch.sequences import NO_SEQUENCES, SequenceSet
from delayd.delay.rows import new_rows

TOP = (1 << 64) - 1
CASES = {
    "none": [],
    "one": [5],
    "from 0 on": [0, 1, 3],
    "close together": [1_000, 1_001, 1_005, 1_040],
    "far apart": [3, 1 << 40, (1 << 40) + 2],
    "the largest": [TOP - 3, TOP - 1, TOP],
}
ASKED = [0, 1, 2, 3, 4, 5, 6, 999, 1_000, 1_002, 1_005, 1_040, 1_041, (1 << 40) - 1, 1 << 40, 1 << 62, 1 << 63]
ASKED += [(1 << 63) + 5, TOP - 4, TOP - 3, TOP - 2, TOP - 1, TOP]


@pytest.mark.parametrize("rows", [1, 1_000], ids=["searched", "table"])
@pytest.mark.parametrize("members", CASES.values(), ids=CASES.keys())
def test_a_set_says_which_sequences_it_has(members: list[int], rows: int) -> None:
    known = SequenceSet(np.array(members, np.uint64), rows)
    has = known.has(np.array(ASKED, np.uint64)).tolist()
    assert [sequence for sequence, found in zip(ASKED, has, strict=True) if found] == sorted(set(members) & set(ASKED))
    assert known.has(NO_SEQUENCES).tolist() == []


@pytest.mark.parametrize("members", CASES.values(), ids=CASES.keys())
def test_rows_of_a_set_are_left_out(members: list[int]) -> None:
    rows = new_rows(len(ASKED))
    rows["sequence"] = ASKED
    left = SequenceSet(np.array(members, np.uint64), len(rows)).without(rows)
    assert left["sequence"].tolist() == [sequence for sequence in ASKED if sequence not in members]


def test_rows_of_which_none_is_in_a_set_are_not_copied() -> None:
    rows = new_rows(3)
    rows["sequence"] = [1, 2, 3]
    assert SequenceSet(np.array([7, 9], np.uint64), 3).without(rows) is rows
