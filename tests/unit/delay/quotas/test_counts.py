"""Counted rows and profiles against dicts: what is added is found once, and memory is given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import msgpack
import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.delay.quotas import counting as counted_module
from delayd.delay.quotas.counting import BLOCK_ROWS, ROW_BYTES, AllCounted, CountedRows, make_rows, rows_of_subjects
from delayd.delay.quotas.seconds import DENSE_BYTES, HOUR_S, SPARSE_MAX, Profile
from tests.batches import messages
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


@pytest.mark.parametrize("seed", range(20))
def test_counted_rows_are_taken_off_once_and_their_memory_is_given_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_module, "BLOCK_ROWS", 64)
    random, held = Random(seed), AllCounted()
    model: dict[int, tuple[int, int]] = {}
    begin = {"old": 1, "add": 100_000}  # Rows that a counting has found are older than those that came meanwhile.
    for _ in range(120):
        step = random.choice(["add", "add", "add", "remove", "remove", "old", "forget"])
        subject = random.randrange(3)
        if step in begin:
            sequences = np.arange(begin[step], begin[step] + random.choice([1, 5, 64, 200]))
            begin[step] = int(sequences[-1]) + 1
            for rows in make_rows(sequences.astype(np.uint64), subject, sequences % 1_000, sequences % 77).cut():
                held.add(rows)
            model |= {sequence: (subject, sequence % 77) for sequence in sequences.tolist()}
        elif step == "remove":
            known = random.sample(sorted(model), random.randrange(len(model) + 1))
            wanted = sorted({*known, *random.sample(range(begin["add"] + 1_000), 20)})
            found = held.remove(np.array(wanted, np.uint64))
            assert _rows(found) == {sequence: model.pop(sequence) for sequence in wanted if sequence in model}
            assert not held.remove(np.array(wanted, np.uint64)).n
        else:
            held.forget(subject)
            model = {sequence: row for sequence, row in model.items() if row[0] != subject}
        for _ in range(100):  # Each call gives back the memory of some parts.
            held.remove(np.array([0], np.uint64))
        assert held.held_bytes <= ROW_BYTES * 2 * len(model)
    assert _rows(held.remove(np.arange(begin["add"] + 1_000, dtype=np.uint64))) == model


def _rows(rows: CountedRows) -> dict[int, tuple[int, int]]:
    pairs = zip(rows.subjects.tolist(), rows.sizes.tolist(), strict=True)
    return dict(zip(rows.sequences.tolist(), pairs, strict=True))


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
        held.add(part)
    sequence += 40 * BLOCK_ROWS
    one_comes()
    assert lines(one_comes) <= first + 200, "a few looks at each part"


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


def test_the_bytes_of_a_row_are_those_of_its_body_and_its_headers_and_one_due_already_counts_now() -> None:
    due = [BEGIN_S * 1_000, (BEGIN_S + 9) * 1_000]
    batch = parse(messages([b"12345", b"1"], due=due, headers=[msgpack.packb({"a": "b"}), b""], subjects=[b"orders"]))
    ((number, rows, seconds, sizes),) = rows_of_subjects(batch, {b"orders": 7}, (BEGIN_S + 3) * 1_000)
    assert (number, rows.tolist(), seconds.tolist()) == (7, [0, 1], [BEGIN_S + 3, BEGIN_S + 9])
    assert sizes.tolist() == [5 + len(msgpack.packb({"a": "b"})), 1]
    assert not rows_of_subjects(batch, {b"mails": 7}, 0)
