"""Counted rows and profiles against dicts: what is added is found once, and memory is given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from delayd.delay.quotas import counted as counted_module
from delayd.delay.quotas.counted import BLOCK_ROWS, ROW_BYTES, Counted, CountedRows, join, make_rows
from delayd.delay.quotas.profile import DENSE_BYTES, ENTRY_BYTES, HOUR_S, SPARSE_MAX, Profile
from tests.counts import lines

BEGIN_S = 500_000 * HOUR_S


def seconds_of(counts: Counter[int]) -> list[int]:
    return sorted(counts.elements())


@pytest.mark.parametrize("seed", range(20))
def test_a_profile_is_a_count_by_second(seed: int) -> None:
    random = Random(seed)
    profile, model = Profile(), Counter[int]()
    spread = random.choice([300, 4 * HOUR_S])
    for _ in range(60):
        some = [BEGIN_S + random.randrange(spread) for _ in range(random.choice([1, 3, 50, 400]))]
        step = random.choice(["add", "add", "remove", "merge", "forget"])
        if step == "add":
            profile.add(np.array(some))
            model.update(some)
        elif step == "remove":
            gone = random.sample(seconds_of(model), min(model.total(), len(some)))
            profile.remove(np.array(gone, np.int64))
            model.subtract(gone)
            model = +model
        elif step == "merge":
            other = Profile()
            other.add(np.array(some))
            other.merge(profile)
            profile = other
            model.update(some)
        else:
            before = BEGIN_S + random.randrange(2 * HOUR_S)
            profile.forget_before(before)
            model = Counter({second: n for second, n in model.items() if second // HOUR_S >= before // HOUR_S})
        asked = np.array(some)
        assert profile.at(asked).tolist() == [model[second] for second in some]
        first = BEGIN_S + random.randrange(spread)
        window = profile.window(first, 5_000)
        assert window.tolist() == [model[first + at] for at in range(5_000)]
        assert profile.next_from(first) == min((second for second in model if second >= first), default=None)
        _, highest = profile.highest_from(first)
        assert highest == max((n for second, n in model.items() if second >= first), default=0)
        hours = len({second // HOUR_S for second in model})
        assert profile.held_bytes <= hours * DENSE_BYTES, "never more than an array an hour"
        assert bool(profile.held_bytes) == bool(model)


def test_an_hour_with_few_seconds_takes_little_memory() -> None:
    profile = Profile()
    profile.add(BEGIN_S + np.arange(SPARSE_MAX))
    assert profile.held_bytes == (SPARSE_MAX + 1) * ENTRY_BYTES
    profile.add(np.array([BEGIN_S + SPARSE_MAX]))
    assert profile.held_bytes == DENSE_BYTES
    profile.remove(BEGIN_S + np.arange(SPARSE_MAX + 1))
    assert profile.held_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_counted_rows_are_taken_off_once_and_their_memory_is_given_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_module, "BLOCK_ROWS", 64)
    random = Random(seed)
    counted, model = Counted(), dict[int, tuple[int, int]]()
    begin = {"old": 1, "add": 100_000}
    for _ in range(120):
        step = random.choice(["add", "add", "add", "remove", "remove", "old", "forget"])
        if step in ("add", "old"):
            count = random.choice([1, 5, 200])
            # Rows that a counting has found are older than those that came meanwhile.
            sequences = np.arange(begin[step], begin[step] + count)
            begin[step] += count
            subject = random.randrange(3)
            counted.add(make_rows(sequences.astype(np.uint64), subject, sequences % 1_000, sequences % 77))
            model.update({int(sequence): (subject, int(sequence) % 77) for sequence in sequences})
        elif step == "remove":
            known = random.sample(sorted(model), random.randrange(len(model) + 1))
            wanted = sorted({*known, *random.sample(range(begin["add"] + 1_000), 20)})
            found = counted.remove(np.array(wanted, np.uint64))
            expected = {sequence: model.pop(sequence) for sequence in wanted if sequence in model}
            assert _rows(found) == expected
            assert _rows(counted.remove(np.array(wanted, np.uint64))) == {}
        else:
            subject = random.randrange(3)
            counted.forget(subject)
            model = {sequence: row for sequence, row in model.items() if row[0] != subject}
        assert counted.held_bytes <= ROW_BYTES * (3 * len(model) + 10 * 64)
    assert _rows(counted.remove(np.arange(begin["add"] + 1_000, dtype=np.uint64))) == model
    assert counted.held_bytes == 0


def _rows(rows: CountedRows) -> dict[int, tuple[int, int]]:
    pairs = zip(rows.subjects.tolist(), rows.sizes.tolist(), strict=True)
    return dict(zip(rows.sequences.tolist(), pairs, strict=True))


def test_rows_of_several_parts_are_joined_in_the_order_of_their_sequences() -> None:
    one = make_rows(np.array([5, 9], np.uint64), 1, np.array([1, 2]), np.array([10, 20]))
    two = make_rows(np.array([7], np.uint64), 2, np.array([3]), np.array([30]))
    assert join([one, two]).sequences.tolist() == [5, 7, 9]
    assert len(join([]).sequences) == 0


def test_rule_B2_taking_rows_off_costs_the_same_however_many_there_are_and_came_one_by_one() -> None:
    """Rows of a counted subject come one by one, and after each of them rows of other subjects end."""
    counted, sequence = Counted(), 0
    second, size = np.array([BEGIN_S]), np.array([100])

    def one_comes() -> None:
        nonlocal sequence
        counted.add(make_rows(np.array([sequence], np.uint64), 0, second, size))
        counted.remove(np.arange(sequence + 1, sequence + 11, dtype=np.uint64))
        sequence += 11

    one_comes()
    first = lines(one_comes)
    for _ in range(3_000):
        one_comes()
    assert lines(one_comes) <= first + 10
    for begin in range(sequence, sequence + 40 * BLOCK_ROWS, BLOCK_ROWS):
        rows = np.arange(begin, begin + BLOCK_ROWS)
        counted.add(make_rows(rows.astype(np.uint64), 1, rows, rows))
    sequence += 40 * BLOCK_ROWS
    one_comes()
    assert lines(one_comes) <= first + 40, "a look-up among the blocks"


@pytest.mark.parametrize("seed", range(10))
def test_counted_rows_between_others_are_taken_a_turn_at_a_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_module, "BLOCK_ROWS", 64)
    monkeypatch.setattr(counted_module, "TURN_ROWS", 100)
    draw = np.random.default_rng(seed)
    owner = draw.integers(0, 3, 5_000)  # 0: here first; 1: found by a counting; 2: nobody's.
    counted = Counted()
    here, found = np.flatnonzero(owner == 0), np.flatnonzero(owner == 1)
    for part in np.array_split(here, 40):
        counted.add(make_rows(part.astype(np.uint64), 0, part, part))
    rows, turns = make_rows(found.astype(np.uint64), 1, found, found), 0
    while len(rows.sequences):
        before = len(rows.sequences)
        rows = counted.merge(rows)
        turns += 1
        assert before - len(rows.sequences) <= 100 + 64
    assert turns > 10
    expected = np.flatnonzero(owner < 2).tolist()
    gone = sorted(draw.choice(expected, 2_000, replace=False).tolist())
    assert counted.remove(np.array(gone, np.uint64)).sequences.tolist() == gone
    left = sorted({*expected} - {*gone})
    assert counted.remove(np.arange(5_000, dtype=np.uint64)).sequences.tolist() == left
    assert counted.held_bytes == 0


HOURS = 17_000
TWO_YEARS = BEGIN_S + np.arange(HOURS) * HOUR_S


def two_years() -> Profile:
    """A message in each hour of two years."""
    profile = Profile()
    profile.add(TWO_YEARS)
    return profile


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
    profile = two_years()
    profile.forget_before(BEGIN_S)
    assert lines(lambda: ask(profile)) <= most


def test_rule_B2_many_seconds_in_many_hours_are_looked_up_in_linear_time() -> None:
    profile = two_years()
    few, many = TWO_YEARS[:1_000], TWO_YEARS[:10_000]
    assert lines(lambda: profile.at(many)) <= 11 * lines(lambda: profile.at(few))
    assert profile.at(many).tolist() == [1] * 10_000


def test_a_profile_is_taken_off_another() -> None:
    profile = two_years()
    other = Profile()
    other.add(np.concatenate((TWO_YEARS[:10], BEGIN_S + np.arange(HOUR_S), BEGIN_S + np.arange(3 * SPARSE_MAX))))
    profile.merge(other)
    assert profile.highest_from(BEGIN_S) == (BEGIN_S, 4)
    profile.take_off(other)
    assert profile.window(BEGIN_S, 20 * HOUR_S).sum() == 20
    assert profile.highest_from(BEGIN_S) == (BEGIN_S, 1)
