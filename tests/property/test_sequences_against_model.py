"""Sequences that come in pieces, against Python's sets; parts stay few, and whoever copies them misses nothing."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from delayd.batch.sequences import PART_ROWS_MAX, Pile, Sequences, add_part, among, find, find_each

SEQUENCES = st.integers(0, 40) | st.sampled_from([1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
SETS = st.sets(SEQUENCES, max_size=12)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
T = TypeVar("T")
BOUNDS = st.sampled_from([PART_ROWS_MAX, 100, 60, 10])


def array(values: Sequence[int]) -> Sequences:
    return np.array(values, np.uint64)


def flat(parts: Iterable[Iterable[T]]) -> list[T]:
    return list(chain.from_iterable(parts))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "in_one"]), SETS), max_size=30), st.lists(SEQUENCES))
def test_a_pile_has_what_a_set_has(changes: list[tuple[str, set[int]]], asked: list[int]) -> None:
    pile, model = Pile(array([3, 5])), {3, 5}
    for change, values in changes:
        if change == "add":
            pile.add(array(sorted(values - model)))
            model |= values
        elif change == "remove":
            pile.remove(array(sorted(values)))
            model -= values
        else:
            assert pile.in_one().tolist() == sorted(model)
        assert pile.has(array(asked)).tolist() == [sequence in model for sequence in asked]
        assert len(pile) == len(model)


def test_an_empty_pile_has_nothing() -> None:
    assert len(Pile()) == 0
    assert Pile().has(array([1, 2])).tolist() == [False, False]
    assert Pile().in_one().tolist() == []


@given(LENGTHS, BOUNDS)
@example([40, 12, 10, 10], PART_ROWS_MAX)  # As the module's docstring has it.
def test_each_part_is_more_than_twice_as_long_as_the_next_unless_the_bound_keeps_them_apart(
    lengths: list[int], rows_max: int
) -> None:
    parts: list[list[int]] = []
    came = 0
    for length in lengths:
        add_part(parts, list(range(came, came + length)), flat, rows_max)
        came += length
        assert flat(parts) == list(range(came)), "the oldest first, and nothing is lost"
        sizes = [len(part) for part in parts]
        assert max(sizes) <= max(rows_max, *lengths)
        assert all(before > 2 * after or rows_max < PART_ROWS_MAX for before, after in pairwise(sizes)), (
            "so there are few"
        )
        assert all(before > 2 * after or before + after > rows_max for before, after in pairwise(sizes[-2:]))
    if lengths == [40, 12, 10, 10]:
        assert [len(part) for part in parts] == [62, 10]


@given(LENGTHS)
def test_each_time_that_a_row_is_moved_its_part_has_become_half_as_long_again(lengths: list[int]) -> None:
    def merge(some: Sequence[list[int]]) -> list[int]:
        both = flat(some)
        assert all(2 * len(both) >= 3 * len(part) for part in some[:-1])
        moves.update(row for part in some[:-1] for row in part)
        return both

    parts: list[list[int]] = []
    moves = Counter[int]()
    came = 0
    for length in lengths:
        add_part(parts, list(range(came, came + length)), merge)
        came += length
    assert 1.5 ** max(moves.values(), default=0) <= came


@given(LENGTHS)
def test_a_thread_that_copies_the_parts_during_a_merge_misses_none(lengths: list[int]) -> None:
    def merge(some: Sequence[list[int]]) -> list[int]:
        assert flat(parts) == list(range(came)), "what was there before is still there"
        return flat(some)

    parts: list[list[int]] = []
    came = 0
    for length in lengths:
        add_part(parts, list(range(came, came + length)), merge)
        came += length


@given(st.lists(SEQUENCES, max_size=30), SETS)
def test_places_are_those_of_a_list(known: list[int], wanted: set[int]) -> None:
    ordered, asked = sorted(known), sorted(wanted)
    rounds = [list(zip(*map(np.ndarray.tolist, each), strict=True)) for each in find_each(array(ordered), array(asked))]
    places = sorted((which, at) for which, wish in enumerate(asked) for at, own in enumerate(ordered) if own == wish)
    assert sorted(flat(rounds)) == places
    firsts = [(which, ordered.index(wish)) for which, wish in enumerate(asked) if wish in ordered]
    assert list(zip(*map(np.ndarray.tolist, find(array(ordered), array(asked))), strict=True)) == firsts
    assert rounds[:1] == [firsts][: len(rounds)]
    assert among(array(asked), array(ordered)).tolist() == [wish in known for wish in asked]
