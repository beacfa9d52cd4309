"""Places: the least loaded instants of a window are chosen, never one outside of it, and callers get different ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.batch.columns import Int64s
from delayd.delay.quotas import quotas as quotas_module
from delayd.delay.quotas.quotas import APART_MAX, PLACES_MAX, SPREAD_MS_MAX
from delayd.delay.quotas.seconds import BLOCK_S, GIVEN_MS, Picker, fill
from delayd.errors import BadArgument, DelaydError, QuotaReached, SlowDown
from delayd.log.control import QuotaLimits
from delayd.testing.clock import START_MS
from tests.unit.delay.quotas.setting import SUBJECT, set_quota
from tests.worlds.delay import World, wanted

MINUTE_MS = 60_000


def ask(world: World, due_ms: list[int], spread_ms: int, subject: bytes = SUBJECT) -> list[int] | DelaydError:
    """Instants after START_MS, for messages that are due so long after it."""
    told: list[Int64s | DelaydError] = []
    world.core.places(subject, np.array(due_ms, np.int64) + START_MS, spread_ms, told.append)
    world.settle()
    (answer,) = told
    return answer if isinstance(answer, DelaydError) else (answer - START_MS).tolist()


def test_an_instant_that_was_given_out_counts_for_some_seconds_or_until_its_message_comes() -> None:
    world = World()
    assert set_quota(world, QuotaLimits(per_second=1)) is None
    assert ask(world, [MINUTE_MS], 1_000) == [60_000]
    assert ask(world, [MINUTE_MS], 1_000) == [61_000]
    full = ask(world, [MINUTE_MS], 1_000)
    assert isinstance(full, QuotaReached)
    world.send(wanted(1, 60_000, "came"))
    world.settle()
    assert not world.outside.refused
    assert isinstance(ask(world, [MINUTE_MS], 1_000), QuotaReached)
    world.pass_ms(GIVEN_MS + 1_000)
    assert ask(world, [MINUTE_MS], 1_000) == [61_000]


def test_what_no_server_takes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for due_ms, spread_ms, words in (
        ([0], SPREAD_MS_MAX + 1, "longer than 7 days"),
        ([0] * APART_MAX + [1_000], 1_000, f"ask for {APART_MAX}"),
        ([0, 86_402_000], 1_000, "more than a day apart"),
    ):
        with pytest.raises(BadArgument, match=words):
            ask(world, due_ms, spread_ms)
    monkeypatch.setattr(quotas_module, "WATCHED_MAX", 1)
    ask(world, [0], 1_000)
    with pytest.raises(SlowDown):
        ask(world, [0], 1_000, b"another")


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=40),
    st.integers(1, 60),
    st.none() | st.integers(0, 12),
)
def test_filling_is_what_one_message_after_the_other_would_do(loads: list[int], count: int, limit: int | None) -> None:
    expected: list[int] | None = list(loads)
    for _ in range(count):
        assert expected is not None
        low = min(expected)
        if limit is not None and low >= limit:
            expected = None
            break
        expected[expected.index(low)] += 1
    chosen = fill(np.array(loads), count, limit)
    if chosen is None or expected is None:
        assert chosen is None and expected is None
    else:
        assert (np.array(loads) + np.bincount(chosen, minlength=len(loads))).tolist() == expected


@given(st.integers(1, 5 * BLOCK_S), st.integers(0, 1 << 32))
def test_picking_finds_the_first_of_the_emptiest_seconds(length: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    loads = draw.integers(0, 3, length)
    picker = Picker(loads)
    for _ in range(30):
        first, last = sorted(draw.integers(0, length, 2).tolist())
        expected = first + int(loads[first : last + 1].argmin())
        if loads[expected] >= 4:
            assert picker.pick(first, last, 4) is None
        else:
            assert picker.pick(first, last, 4) == expected
            loads[expected] += 1


def test_rule_B2_many_places_are_chosen_beside_the_loop_and_later_callers_see_what_was_given() -> None:
    world = World()
    assert ask(world, [MINUTE_MS], 0) == [MINUTE_MS]
    told: list[Int64s | DelaydError] = []
    due_ms = np.full(PLACES_MAX, START_MS + 2 * MINUTE_MS, np.int64)
    for own in (due_ms, due_ms[:1]):
        world.core.places(SUBJECT, own, (PLACES_MAX + 5) * 1_000, told.append)
    assert not told
    world.settle()
    many, one = ((each - START_MS) // 1_000 for each in told if not isinstance(each, DelaydError))
    assert many.tolist() == list(range(120, 120 + PLACES_MAX))
    assert one.tolist() == [120 + PLACES_MAX]
