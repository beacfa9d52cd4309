"""Ranges against a plain set."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from realtime.ranges import Ranges

NUMBERS = st.integers(0, 30)
CHANGES = st.lists(st.tuples(st.booleans(), NUMBERS, st.integers(1, 12)), max_size=30)


@given(CHANGES, NUMBERS, st.integers(1, 12))
def test_ranges_hold_what_a_set_holds(changes: list[tuple[bool, int, int]], start: int, length: int) -> None:
    ranges, model = Ranges(), set[int]()
    for adds, first, count in changes:
        numbers = set(range(first, first + count))
        if adds:
            ranges.add(first, first + count)
            model |= numbers
        else:
            removed = {number for run in ranges.remove(first, first + count) for number in range(*run)}
            assert removed == model & numbers
            model -= numbers
        runs = list(ranges)
        assert {number for run in runs for number in range(*run)} == model
        assert all(end < following for (_, end), (following, _) in pairwise(runs))
        assert all(first < end for first, end in runs)
    assert ranges.total == len(model)
    assert bool(ranges) == bool(model)
    assert ranges.overlaps(start, start + length) == bool(model & set(range(start, start + length)))
    within = ranges.within(start, start + length)
    assert {number for run in within for number in range(*run)} == model & set(range(start, start + length))
    if model:
        assert ranges.first == min(model)
