"""Counted rows and profiles against dicts: what is added is found once, and memory is given back."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from delayd.delay.quotas import counted as counted_module
from delayd.delay.quotas.counted import ROW_BYTES, Counted, CountedRows, join, make_rows
from delayd.delay.quotas.profile import DENSE_BYTES, ENTRY_BYTES, HOUR_S, SPARSE_MAX, Profile

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
