"""The wheel: never early, in due order, each row once, and cheap where it matters."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.sequences import pack_locations
from delayd.delay.rows import Rows, due_at_ms, new_rows
from delayd.delay.timers.hour_wheel import FOLD_RUNS, OPEN_AHEAD_MS, SLOTS, HourWheel, prepare
from delayd.delay.timers.wheel import Wheel
from delayd.hours import HOUR_MS, hour_start_ms

HOUR = 490_000
START_MS = hour_start_ms(HOUR)
LAST_MS = START_MS + HOUR_MS - 1


def rows_due(*due_ms: int, hour: int = HOUR, first_sequence: int = 0) -> Rows:
    rows = new_rows(len(due_ms))
    rows["due_ms"], rows["hour"] = due_ms, hour
    rows["sequence"] = np.arange(first_sequence, first_sequence + len(due_ms))
    return rows


def wheel_with(*due_ms: int, live: bool = False) -> Wheel:
    wheel = Wheel()
    wheel.add_hour(HOUR, None if live else prepare(rows_due(*due_ms)))
    if live:
        wheel.insert(rows_due(*due_ms))
    return wheel


def taken_due(wheel: Wheel, now_ms: int, rows_max: int = 1_000_000) -> list[int]:
    return [instant - START_MS for instant in due_at_ms(wheel.take_due(now_ms, rows_max)).tolist()]


@pytest.mark.parametrize("live", [False, True])
def test_a_row_due_before_its_hour_leaves_then_and_not_when_the_hour_begins(live: bool) -> None:
    wheel = wheel_with(-30 * HOUR_MS, 600, -1_234, 0, live=live)
    assert wheel.next_due_ms(START_MS - 40 * HOUR_MS) == START_MS - 30 * HOUR_MS
    assert taken_due(wheel, START_MS - 30 * HOUR_MS - 1) == []
    assert taken_due(wheel, START_MS - 30 * HOUR_MS) == [-30 * HOUR_MS]
    assert wheel.next_due_ms(START_MS - HOUR_MS) == START_MS - 1_234
    assert taken_due(wheel, START_MS - 1_235) == []
    assert taken_due(wheel, START_MS - 1_234) == [-1_234]
    assert taken_due(wheel, START_MS - 1) == []
    assert taken_due(wheel, START_MS + 600) == [0, 600]


def test_the_next_instant_is_the_opening_of_a_slot_and_then_its_first_row() -> None:
    wheel = wheel_with(60_123)
    opening = START_MS + 60_000 - OPEN_AHEAD_MS
    assert wheel.next_due_ms(START_MS) == opening
    assert taken_due(wheel, opening) == []
    assert wheel.next_due_ms(opening) == START_MS + 60_123
    assert wheel.next_due_ms(START_MS + 99_999) == START_MS + 99_999
    assert taken_due(wheel, START_MS + 60_123) == [60_123]
    assert wheel.next_due_ms(START_MS) is None


def test_the_next_hours_first_slot_opens_before_this_hour_ends() -> None:
    wheel = wheel_with(HOUR_MS - 10)
    wheel.add_hour(HOUR + 1, prepare(rows_due(0, hour=HOUR + 1)))
    before_end = LAST_MS + 1 - OPEN_AHEAD_MS
    assert taken_due(wheel, before_end) == []
    assert wheel.next_due_ms(before_end) == START_MS + HOUR_MS - 10
    assert taken_due(wheel, LAST_MS) == [HOUR_MS - 10]
    assert wheel.next_due_ms(LAST_MS) == LAST_MS + 1
    assert taken_due(wheel, LAST_MS + 1) == [HOUR_MS]


def test_whoever_only_takes_and_sleeps_until_the_next_instant_wakes_twice_a_slot() -> None:
    wheel = wheel_with(*[slot * 500 + 250 for slot in range(100)])
    now_ms, wakes, taken = START_MS, 0, 0
    while (instant := wheel.next_due_ms(now_ms)) is not None:
        now_ms, wakes = instant, wakes + 1
        taken += len(wheel.take_due(now_ms, 1_000))
    assert taken == 100
    assert wakes <= 200


def test_opening_ahead_leaves_slots_closed_while_due_rows_wait() -> None:
    hour_wheel = HourWheel(HOUR)
    hour_wheel.attach(prepare(rows_due(*range(0, HOUR_MS, 500))))
    for now_ms in range(START_MS, START_MS + 100_000, 50):
        hour_wheel.open_ahead(now_ms)
    assert len(hour_wheel.take_due(START_MS, SLOTS)) == 1
    assert len(hour_wheel.take_due(LAST_MS, SLOTS)) == SLOTS - 1


def test_short_delays_leave_few_runs_behind() -> None:
    hour_wheel = HourWheel(HOUR, tail_rows=64)
    generator = np.random.default_rng(3)
    taken = 0
    for now in range(0, 600_000, 100):
        due = now + generator.integers(1, 2_000, 60)
        due[0] = HOUR_MS - 1  # One row of each batch waits for the end of the hour.
        hour_wheel.insert(rows_due(*due.tolist()))
        taken += len(hour_wheel.take_due(START_MS + now, 10_000))
    assert len(hour_wheel._runs) < 6_000 // 64 * FOLD_RUNS, "5,600 tails were filled, and 6,000 rows of them remain"
    assert taken + len(hour_wheel.rows()) == 6_000 * 60


def test_the_lowest_message_log_offset_ignores_schedule_logs_and_rises_as_rows_leave() -> None:
    wheel = Wheel(tail_rows=4)
    assert wheel.lowest_message_log_offset() is None
    loaded, live = rows_due(100, 200, 300_000), rows_due(150, 10_000)
    loaded["location"] = pack_locations(True, 8, np.arange(3, dtype=np.uint16))
    live["location"] = pack_locations(False, np.array([800, 1_600], np.uint64), np.arange(2, dtype=np.uint16))
    wheel.add_hour(HOUR, prepare(loaded))
    assert wheel.lowest_message_log_offset() is None
    wheel.insert(live)
    assert wheel.lowest_message_log_offset() == 800
    wheel.take_due(START_MS + 150, 10)
    assert wheel.lowest_message_log_offset() == 1_600
    wheel.take_due(START_MS + 10_000, 10)
    assert wheel.lowest_message_log_offset() is None


def test_rows_may_span_hours_and_an_unloaded_one_refuses_them_whole() -> None:
    wheel = Wheel()
    wheel.add_hour(HOUR)
    rows = np.concatenate([rows_due(1, 2), rows_due(3, hour=HOUR + 1)])
    assert wheel.holds(rows).tolist() == [True, True, False]
    with pytest.raises(AssertionError, match="loaded hours"):
        wheel.insert(rows)
    assert len(wheel) == 0
    wheel.add_hour(HOUR + 1)
    wheel.insert(rows)
    assert (wheel.len_of(HOUR), wheel.len_of(HOUR + 1), wheel.len_of(HOUR + 2)) == (2, 1, 0)
    assert sorted(wheel.rows_of(HOUR)["due_ms"].tolist()) == [1, 2]


def test_an_hour_is_dropped_only_when_empty() -> None:
    wheel = wheel_with(1)
    with pytest.raises(AssertionError, match="last row"):
        wheel.drop_hour(HOUR)
    wheel.take_due(LAST_MS, 1)
    wheel.drop_hour(HOUR)
    assert not wheel.has_hour(HOUR)
    assert wheel.hours() == ()


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_due_after_its_hour_is_refused(count: int) -> None:
    wheel = wheel_with(live=True)
    with pytest.raises(AssertionError, match="before its filing hour ends"):
        wheel.insert(rows_due(*[HOUR_MS] * count))
    with pytest.raises(AssertionError, match="before its filing hour ends"):
        prepare(rows_due(*[HOUR_MS] * count))
    assert len(wheel) == 0


def test_rows_of_another_hour_do_not_join() -> None:
    wheel = Wheel()
    with pytest.raises(AssertionError, match="hour they join"):
        wheel.add_hour(HOUR, prepare(rows_due(1, hour=HOUR + 1)))


def test_a_million_rows_at_one_instant_leave_in_slices_that_view_one_array() -> None:
    wheel = Wheel()
    rows = new_rows(1_000_000)
    rows["due_ms"], rows["hour"], rows["sequence"] = 1_800_000, HOUR, np.arange(1_000_000)
    wheel.add_hour(HOUR, prepare(rows))
    wheel.open_ahead(START_MS + 1_800_000 - OPEN_AHEAD_MS)
    slices = [wheel.take_due(START_MS + 1_800_000, 10_000) for _ in range(100)]
    assert all(len(part) == 10_000 and np.shares_memory(part[-1:], part.base) for part in slices)
    assert len({id(part.base) for part in slices}) == 1
    assert np.array_equal(np.concatenate([part["sequence"] for part in slices]), rows["sequence"])
    assert len(wheel) == 0


def test_a_big_slot_is_sorted_while_it_is_prepared_so_that_opening_it_copies_nothing() -> None:
    due = np.random.default_rng(4).integers(1_000, 1_500, 10_000)
    prepared = prepare(rows_due(*due.tolist(), 1_500, 999))
    wheel = Wheel()
    wheel.add_hour(HOUR, prepared)
    assert taken_due(wheel, START_MS + 999) == [999]
    rows = wheel.take_due(START_MS + 1_499, 20_000)
    assert rows["due_ms"].tolist() == sorted(due.tolist())
    assert np.shares_memory(rows, prepared.rows)
