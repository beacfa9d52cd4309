"""The wheel against a sorted list: whatever comes in, each row leaves once and in the due order of its hour."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delayd.batch.sequences import pack_locations
from delayd.delay.rows import Rows, due_at_ms, new_rows
from delayd.delay.timers.wheel import OPEN_AHEAD_MS, Wheel, prepare
from delayd.hours import HOUR_MS

FIRST_HOUR = 490_000
HOURS = 3
START_MS = FIRST_HOUR * HOUR_MS

# Due times crowd at slot edges, hour edges and at a few instants that many rows share; some are before the hour.
DUE = st.one_of(
    st.integers(0, HOUR_MS - 1),
    st.integers(0, 3_000),
    st.integers(-2 * HOUR_MS, -1),
    st.sampled_from([0, 499, 500, 501, 65_499, 65_500, 65_536, HOUR_MS - 500, HOUR_MS - 1]),
)
STEPS = st.one_of(st.integers(0, 1_200), st.integers(-5_000, 200_000), st.sampled_from([HOUR_MS, -HOUR_MS]))


class WheelMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wheel = Wheel(tail_rows=16)  # Small, so that tails fill, runs form and runs are folded.
        self.model: list[tuple[int, int]] = []  # Sorted pairs of due instant and sequence.
        self.offsets: dict[int, int] = {}  # Message log offset by sequence.
        self.hours: dict[int, int] = {}  # Filing hour by sequence.
        self.sequences = 0
        self.now_ms = START_MS - 100

    def make(self, hour: int, due: list[int], in_schedule_log: bool) -> Rows:
        rows = new_rows(len(due))
        rows["due_ms"], rows["hour"] = due, hour
        rows["sequence"] = np.arange(self.sequences, self.sequences + len(due))
        offsets = rows["sequence"] * np.uint64(7_919) % np.uint64(10_007)
        rows["location"] = pack_locations(in_schedule_log, offsets, np.arange(len(due), dtype=np.uint32))
        if not in_schedule_log:
            self.offsets.update(zip(rows["sequence"].tolist(), offsets.tolist(), strict=True))
        self.hours.update((sequence, hour) for sequence in rows["sequence"].tolist())
        self.sequences += len(due)
        self.model += zip(due_at_ms(rows).tolist(), rows["sequence"].tolist(), strict=True)
        self.model.sort()
        return rows

    @rule(hour=st.integers(0, HOURS - 1), due=st.lists(DUE, max_size=60), in_schedule_log=st.booleans())
    def load(self, hour: int, due: list[int], in_schedule_log: bool) -> None:
        self.wheel.add_hour(FIRST_HOUR + hour, prepare(self.make(FIRST_HOUR + hour, due, in_schedule_log)))

    @rule(hour=st.integers(0, HOURS - 1), due=st.lists(DUE, min_size=1, max_size=60))
    def insert(self, hour: int, due: list[int]) -> None:
        self.wheel.add_hour(FIRST_HOUR + hour)
        self.wheel.insert(self.make(FIRST_HOUR + hour, due, False))

    @rule(ahead=st.lists(st.integers(-700, 700), min_size=1, max_size=3))
    def insert_near_now(self, ahead: list[int]) -> None:
        for each in ahead:
            instant = min(max(self.now_ms + each, START_MS), START_MS + HOURS * HOUR_MS - 1)
            self.insert(instant // HOUR_MS - FIRST_HOUR, [instant % HOUR_MS])

    @rule(due=st.lists(DUE, min_size=HOURS, max_size=30))
    def insert_over_hours(self, due: list[int]) -> None:
        rows = np.concatenate([self.make(FIRST_HOUR + i, due[i::HOURS], False) for i in range(HOURS)])
        for i in range(HOURS):
            self.wheel.add_hour(FIRST_HOUR + i)
        self.wheel.insert(rows.take(np.random.default_rng(len(due)).permutation(len(rows))))

    @rule(due=st.lists(DUE, min_size=1, max_size=30), in_schedule_log=st.booleans())
    def load_closed(self, due: list[int], in_schedule_log: bool) -> None:
        parts = [self.make(FIRST_HOUR + i, due[i::HOURS], in_schedule_log) for i in range(HOURS)]
        self.wheel.add_closed(np.concatenate([rows for rows in parts if len(rows)]))

    @rule(step=STEPS)
    def clock_moves(self, step: int) -> None:
        self.now_ms += step

    @rule(hour=st.integers(0, HOURS), before=st.integers(-1, 100))
    def clock_moves_to_an_hours_edge(self, hour: int, before: int) -> None:
        self.now_ms = START_MS + hour * HOUR_MS - before

    @rule()
    def clock_moves_to_the_next_instant(self) -> None:
        self.now_ms = self.wheel.next_due_ms(self.now_ms) or self.now_ms

    @rule(rows_max=st.sampled_from([0, 1, 3, 20, 1_000]))
    def take(self, rows_max: int) -> None:
        rows = self.wheel.take_due(self.now_ms, rows_max)
        due = due_at_ms(rows).tolist()
        ready = sorted((self.hours[sequence], instant) for instant, sequence in self.model if instant <= self.now_ms)
        assert due == [instant for _, instant in ready[:rows_max]]
        for pair in zip(due, rows["sequence"].tolist(), strict=True):
            self.model.remove(pair)

    @rule()
    def open_ahead(self) -> None:
        self.wheel.open_ahead(self.now_ms)

    @precondition(lambda self: any(not self.wheel.len_of(hour) for hour in self.wheel.hours()))
    @rule()
    def drop_empty_hours(self) -> None:
        for hour in self.wheel.hours():
            if not self.wheel.len_of(hour):
                self.wheel.drop_hour(hour)

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        assert len(self.wheel) == len(self.model)
        held = [self.wheel.rows_of(hour) for hour in self.wheel.hours()]
        pairs = [
            pair for rows in held for pair in zip(due_at_ms(rows).tolist(), rows["sequence"].tolist(), strict=True)
        ]
        assert sorted(pairs) == self.model

    @invariant()
    def it_wakes_no_later_than_the_next_row(self) -> None:
        instant = self.wheel.next_due_ms(self.now_ms)
        if not self.model:
            assert instant is None
        else:
            first = self.model[0][0]
            assert instant is not None
            # At the first slot's opening, at its first row, or now.
            assert max(self.now_ms, first - 500 - OPEN_AHEAD_MS) <= instant <= max(self.now_ms, first)

    @invariant()
    def it_knows_the_lowest_offset_it_refers_to(self) -> None:
        offsets = [self.offsets[sequence] for _, sequence in self.model if sequence in self.offsets]
        assert self.wheel.lowest_message_log_offset() == min(offsets, default=None)

    def teardown(self) -> None:
        self.now_ms = START_MS + HOURS * HOUR_MS
        while self.model:
            before = len(self.model)
            self.take(20)
            assert len(self.model) < before, "nothing is left when time has passed"


TestWheel = WheelMachine.TestCase
TestWheel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
