"""A part of the random walks, and the bugs that few walks find; the others are found by ``--planted``."""

from __future__ import annotations

import pytest

from tests.groups.planted import PLANTED, walks_to_find
from tests.groups.run import walks
from tests.groups.walk import Kind

WALKS = 300
FOUND_WITHIN = 150
# What takes hundreds of walks: `python -m tests.groups --planted` waits for them.
RARE = (
    "Q3: a checkpoint forgets what pauses",
    "Q3: retention looks at new messages only",
    "L5: a checkpoint forgets what is quarantined",
    "Q2: numbers of an earlier life are used again",
    "Q3: a schedule is finished while its message has come again",
    "Q8: a group that is loaded again forgets what pauses",
    "Q10: what came again does not count",
)


def test_rule_Q5_groups_are_what_the_model_says_whatever_happens() -> None:
    report = walks(0, WALKS)
    assert not report.wrong, "\n".join(report.wrong.values())
    # The walks come to what they are for.
    for kind in ("kill", "lose_power", "rot", "restore", "retain", "ends_with_removed_messages"):
        assert report.counts[kind] > WALKS // 10, kind


def test_rule_Q8_ordered_groups_are_what_the_model_says_whatever_happens() -> None:
    report = walks(0, WALKS // 2, kind=Kind.ORDERED)
    assert not report.wrong, "\n".join(report.wrong.values())
    for kind in ("kill", "lose_power", "rot", "restore", "move"):
        assert report.counts[kind] > WALKS // 20, kind


def test_rule_Q10_bounded_groups_hold_no_more_than_they_may_whatever_happens() -> None:
    report = walks(0, WALKS // 3, kind=Kind.BOUNDED)
    assert not report.wrong, "\n".join(report.wrong.values())
    for kind in ("kill", "lose_power", "come_again", "move"):
        assert report.counts[kind] > WALKS // 30, kind


@pytest.mark.parametrize("name", [name for name in PLANTED if name not in RARE])
def test_a_planted_bug_is_found(name: str) -> None:
    taken, _ = walks_to_find(name, 0, FOUND_WITHIN)
    assert taken is not None


def test_a_seed_is_one_walk() -> None:
    first, second = walks(7, 1), walks(7, 1)
    assert first.counts == second.counts and first.wrong == second.wrong == {}
    assert set(RARE) <= set(PLANTED)
