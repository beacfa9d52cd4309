"""What quotas count with, against dicts and by lines: profiles of seconds, places, and rows that are taken off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.batch.batch import parse
from delayd.delay.quotas import counting
from delayd.delay.quotas.counting import BLOCK_ROWS, AllCounted, CountedRows, make_rows, rows_of_subjects
from delayd.delay.quotas.seconds import BLOCK_S, DENSE_BYTES, HOUR_S, Picker, Profile, fill
from tests.batches import messages
from tests.counts import lines

BEGIN_S = 500_000 * HOUR_S


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(1, 60), st.none() | st.integers(0, 12))
def test_filling_is_what_one_message_after_the_other_would_do(loads: list[int], count: int, limit: int | None) -> None:
    expected = list(loads)
    for _ in range(count):
        low = min(expected)
        if limit is not None and low >= limit:
            assert fill(np.array(loads), count, limit) is None
            return
        expected[expected.index(low)] += 1
    chosen = fill(np.array(loads), count, limit)
    assert chosen is not None
    assert (np.array(loads) + np.bincount(chosen, minlength=len(loads))).tolist() == expected


@given(st.integers(1, 5 * BLOCK_S), st.integers(0, 1 << 32))
def test_picking_finds_the_first_of_the_emptiest_seconds(length: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    loads = draw.integers(0, 3, length)
    picker = Picker(loads)
    for _ in range(30):
        first, last = sorted(draw.integers(0, length, 2).tolist())
        expected = first + int(loads[first : last + 1].argmin())
        assert picker.pick(first, last, 4) == (None if loads[expected] >= 4 else expected)
        loads[expected] += loads[expected] < 4


# Profiles: how many rows are due in each second.


@pytest.mark.parametrize("seed", range(12))
def test_a_profile_is_a_count_by_second(seed: int) -> None:
    random = Random(seed)
    profile, model = Profile(), Counter[int]()
    spread = random.choice([300, 4 * HOUR_S])
    for _ in range(60):
        some = [BEGIN_S + random.randrange(spread) for _ in range(random.choice([1, 3, 50, 400]))]
        step = random.choice(["add", "add", "remove", "merge", "take off", "forget"])
        other = Profile()
        other.add(np.array(some))
        if step == "add":
            profile.add(np.array(some))
            model.update(some)
        elif step == "remove":
            gone = random.sample(sorted(model.elements()), min(model.total(), len(some)))
            profile.remove(np.array(gone, np.int64))
            model = +(model - Counter(gone))
        elif step == "merge":
            other.merge(profile)
            profile = other
            model.update(some)
        elif step == "take off":
            profile.merge(other)
            profile.take_off(other)
        else:
            before = BEGIN_S + random.randrange(2 * HOUR_S)
            profile.forget_before(before)
            model = Counter({second: n for second, n in model.items() if second // HOUR_S >= before // HOUR_S})
        assert profile.at(np.array(some)).tolist() == [model[second] for second in some]
        first = BEGIN_S + random.randrange(spread)
        assert profile.window(first, 5_000).tolist() == [model[first + at] for at in range(5_000)]
        assert profile.next_from(first) == min((second for second in model if second >= first), default=None)
        assert profile.highest_from(first)[1] == max((n for second, n in model.items() if second >= first), default=0)
        hours = len({second // HOUR_S for second in model})
        assert profile.held_bytes <= hours * DENSE_BYTES and bool(profile.held_bytes) == bool(model)


@pytest.mark.parametrize(
    ("ask", "most"),
    [
        (lambda profile: profile.highest_from(BEGIN_S + 5 * HOUR_S), 4 * 730 + 500),
        (lambda profile: profile.next_from(BEGIN_S + 5 * HOUR_S), 2 * 730 + 200),
        (lambda profile: profile.forget_before(BEGIN_S + 5 * HOUR_S + 3), 600),
        (lambda profile: profile.remove(np.array([BEGIN_S + 9 * HOUR_S])), 200),
    ],
    ids=["highest", "next", "forget", "remove"],
)
def test_rule_B2_two_years_of_hours_are_not_looked_through(ask: Callable[[Profile], object], most: int) -> None:
    profile = Profile()
    profile.add(BEGIN_S + np.arange(17_000) * HOUR_S)
    profile.forget_before(BEGIN_S)
    assert lines(lambda: ask(profile)) <= most


def test_blocks_that_overlap_are_put_in_order_by_the_removals_that_meet_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of `delayd.delay.quotas.counting`."""
    monkeypatch.setattr(counting, "BLOCK_ROWS", 8)
    held = AllCounted()
    held.found(_rows_of(1, 3, 5, 7, 8, 9, 10, 11))
    held.add(_rows_of(12, 13))
    held.found(_rows_of(2, 6))
    assert _blocks(held) == [[1, 3, 5, 7, 8, 9, 10, 11], [2, 6, 12, 13]]
    assert held.remove(np.array([6], np.uint64)).n == 1
    assert _blocks(held) == [[1, 2, 3, 5, 7, 8, 9, 10], [11, 12, 13]]
    assert held.remove(np.array([1, 3, 5, 8, 9], np.uint64)).n == 5
    assert _blocks(held) == [[2, 7, 10, 11, 12, 13]]


def test_countings_whose_rows_alternate_leave_blocks_that_do_not_overlap_after_some_removals() -> None:
    held, total, subjects = AllCounted(), 12 * BLOCK_ROWS, 3
    for subject in range(subjects):
        for piece in _rows_of(*range(subject, total, subjects)).cut():
            held.found(piece)
    gone = Random(1).sample(range(total), 200)
    for sequence in gone:
        assert held.remove(np.array([sequence], np.uint64)).n == 1
    blocks = _blocks(held)
    assert all(one[-1] < other[0] for one, other in pairwise(blocks))
    assert sum(map(len, blocks)) == total - len(gone) and len(blocks) <= 2 * total // BLOCK_ROWS


def _rows_of(*sequences: int) -> CountedRows:
    numbers = np.array(sequences, np.int64)
    return make_rows(numbers.astype(np.uint64), 0, numbers, numbers)


def _blocks(held: AllCounted) -> list[list[int]]:
    return [block.rows_left().sequences.tolist() for block in held._blocks]


def test_rule_B2_taking_rows_off_costs_the_same_however_many_there_are_and_came_one_by_one() -> None:
    """Rows of a counted subject come one by one, and after each of them rows of other subjects end."""
    held, sequence, one = AllCounted(), 0, np.array([1])

    def one_comes() -> None:
        nonlocal sequence
        held.add(make_rows(np.array([sequence], np.uint64), 0, one, one))
        held.remove(np.arange(sequence + 1, sequence + 11, dtype=np.uint64))
        sequence += 11

    one_comes()
    first = lines(one_comes)
    for _ in range(3_000):
        one_comes()
    assert lines(one_comes) <= first + 100
    rows = np.arange(sequence, sequence + 40 * BLOCK_ROWS)
    for part in make_rows(rows.astype(np.uint64), 1, rows, rows).cut():
        held.found(part)
    sequence += 40 * BLOCK_ROWS
    one_comes()
    assert lines(one_comes) <= first + 200, "a few looks at each part"


def test_the_bytes_of_a_row_are_those_of_its_body_and_its_headers_and_one_due_already_counts_now() -> None:
    due = [BEGIN_S * 1_000, (BEGIN_S + 9) * 1_000]
    batch = parse(messages([b"12345", b"1"], due=due, headers=[msgpack.packb({"a": "b"}), b""], subjects=[b"orders"]))
    ((number, rows, seconds, sizes),) = rows_of_subjects(batch, {b"orders": 7}, (BEGIN_S + 3) * 1_000)
    assert (number, rows.tolist(), seconds.tolist()) == (7, [0, 1], [BEGIN_S + 3, BEGIN_S + 9])
    assert sizes.tolist() == [5 + len(msgpack.packb({"a": "b"})), 1]
