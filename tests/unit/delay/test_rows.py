"""Rows of the delay server and the tables that hold them: exact, and no look at them takes a line or a copy a row."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.columns import HEADER
from delayd.delay.filing.hour_table import HourFile, HourPart, HourTable, hour_put, hour_puts, load_hours, merge_hours
from delayd.delay.filing.schedule_log import read_batch
from delayd.delay.ledger.files import HourOutcomes
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.rows import (
    COARSE_FROM_MS,
    COARSE_MAX,
    COARSE_MS,
    ROW,
    Rows,
    decode_due,
    due_at_ms,
    due_by,
    due_within,
    encode_due,
    filing_hours,
    new_rows,
)
from delayd.delay.timers.hour_wheel import FOLD_RUNS, OPEN_AHEAD_MS, HourWheel, prepare
from delayd.delay.timers.loading import load_hour
from delayd.delay.timers.wheel import Wheel
from delayd.errors import DamagedData
from delayd.hours import HOUR_MS, hour_of_ms, hour_start_ms
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import DEAD, SEALED, NewPart, encode_outcomes, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, create_segment
from delayd.outcome import MessageState, Outcome
from delayd.testing.clock import START_MS as CLOCK_MS
from delayd.testing.disk import MemoryDisk
from tests.counts import lines
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, TARGET_IDS, World, wanted

HOUR = 490_000
BEGIN_MS = hour_start_ms(HOUR)


# Due instants, 32 bits each.

AFTER_MS = [
    *(HOUR_MS - 1, 0, -1, -COARSE_FROM_MS + 1, -COARSE_FROM_MS, -COARSE_FROM_MS - 1),
    *(-COARSE_FROM_MS - 999, -COARSE_FROM_MS - 1_000, -COARSE_FROM_MS - 1_001, -60 * 24 * HOUR_MS, -730 * 24 * HOUR_MS),
    -COARSE_FROM_MS - COARSE_MAX * COARSE_MS,
]


@pytest.mark.parametrize("after_ms", AFTER_MS)
def test_rules_T1_T4_a_row_fires_at_its_due_instant_however_long_before_its_hour(after_ms: int) -> None:
    due_ms = encode_due(after_ms)
    fires_ms = decode_due(due_ms)
    assert 0 <= fires_ms - after_ms < (COARSE_MS if after_ms < -COARSE_FROM_MS else 1)
    rows = new_rows(1)
    rows["hour"], rows["due_ms"] = HOUR, due_within(np.array([BEGIN_MS + after_ms]), np.array([HOUR], np.uint32))
    assert (rows["due_ms"].tolist(), due_at_ms(rows).tolist()) == ([due_ms], [BEGIN_MS + fires_ms])
    assert due_by(fires_ms) >= due_ms > due_by(fires_ms - 1), "what is due by an instant fires no later"


def test_rule_P5_a_row_is_filed_in_the_hour_of_the_later_of_due_and_appended() -> None:
    now_ms = BEGIN_MS + 1_234
    deliver_at = np.array([now_ms - HOUR_MS, now_ms, now_ms + HOUR_MS], np.int64)
    hours = filing_hours(deliver_at, now_ms)
    assert hours.tolist() == [HOUR, HOUR, HOUR + 1]
    assert due_within(deliver_at, hours).tolist() == [1_234 - HOUR_MS, 1_234, 1_234]
    long_ago = -(1 << 50)
    assert decode_due(encode_due(long_ago)) > long_ago and encode_due(long_ago) >= -(1 << 31), "late and never early"
    assert ROW.itemsize == 32


# The wheel; tests/property has its contents.


def rows_due(*due_ms: int) -> Rows:
    rows = new_rows(len(due_ms))
    rows["due_ms"], rows["hour"], rows["sequence"] = due_ms, HOUR, np.arange(len(due_ms))
    return rows


def test_whoever_only_takes_and_sleeps_until_the_next_instant_wakes_twice_a_slot() -> None:
    wheel = Wheel()
    wheel.add_hour(HOUR, prepare(rows_due(*[slot * 500 + 250 for slot in range(100)])))
    now_ms, wakes, taken = BEGIN_MS, 0, 0
    while (instant := wheel.next_due_ms(now_ms)) is not None:
        now_ms, wakes = instant, wakes + 1
        taken += len(wheel.take_due(now_ms, 1_000))
    assert taken == 100 and wakes <= 200


def test_a_herd_leaves_in_slices_that_view_one_array_sorted_while_it_was_prepared() -> None:
    wheel = Wheel()
    due = np.random.default_rng(4).integers(1_800_000, 1_800_499, 1_000_000)
    prepared = prepare(rows_due(*due.tolist()))
    wheel.add_hour(HOUR, prepared)
    wheel.open_ahead(BEGIN_MS + 1_800_000 - OPEN_AHEAD_MS)
    slices = [wheel.take_due(BEGIN_MS + 1_800_500, 10_000) for _ in range(100)]
    assert all(len(part) == 10_000 and np.shares_memory(part, prepared.rows) for part in slices)
    assert np.array_equal(np.concatenate([part["due_ms"] for part in slices]), np.sort(due))


def test_short_delays_leave_few_runs_behind() -> None:
    wheel, draw, taken = HourWheel(HOUR, tail_rows=64), np.random.default_rng(3), 0
    for now in range(0, 600_000, 100):
        due = now + draw.integers(1, 2_000, 60)
        due[0] = HOUR_MS - 1  # One row of each batch waits for the end of the hour.
        wheel.insert(rows_due(*due.tolist()))
        taken += len(wheel.take_due(BEGIN_MS + now, 10_000))
    assert len(wheel._runs) < 6_000 // 64 * FOLD_RUNS, "5,600 tails were filled, and 6,000 rows of them remain"
    assert taken + len(wheel.rows()) == 6_000 * 60


# The table of hours.


def table_of(files: dict[int, HourFile]) -> HourTable:
    table = HourTable()
    for hour, file in files.items():
        table.set(hour, file)
    return table


@pytest.mark.parametrize("seed", range(12))
def test_a_table_of_hours_holds_what_a_dictionary_does_after_any_changes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    table, files = HourTable(), dict[int, HourFile]()
    for _ in range(60):
        hours = [HOUR + int(hour) for hour in draw.integers(0, 61, int(draw.integers(0, 9)))]
        newer = {
            hour: HourFile(*(int(draw.integers(0, high)) for high in (1 << 47, 1 << 33, 1 << 32, 8))) for hour in hours
        }
        before, kept = table.rows, table.rows.tobytes()
        match int(draw.integers(0, 3)):
            case 0:
                merged = merge_hours(table.rows, table_of(newer).rows)
                assert merged.tobytes() == table_of({**files, **newer}).rows.tobytes()
            case 1:
                files.update(newer)
                table.update(table_of(newer).rows)
            case _:
                for hour in hours:
                    files.pop(hour, None)
                table.remove(hours)
        assert before.tobytes() == kept, "who took the rows on another thread keeps them"
        until, found = HOUR + int(draw.integers(-1, 62)), sorted(files)
        assert table.rows["hour"].tolist() == found
        assert all(table.get(hour) == files.get(hour, HourFile()) for hour in range(HOUR - 1, HOUR + 62))
        assert table.sealed() == [hour for hour in found if files[hour].sealed]
        assert table.unsealed(until) == [hour for hour in found if hour <= until and not files[hour].sealed]
        left = [hour for hour in found if hour <= until and files[hour].sealed and not files[hour].dead]
        assert table.deletable(until) == left
        assert list(hour_puts(table.rows)) == [hour_put(hour, files[hour]) for hour in found]
        assert load_hours(hour_puts(table.rows)).rows.tobytes() == table.rows.tobytes()


def test_a_look_at_two_years_of_hours_takes_the_loop_no_line_an_hour() -> None:
    hours = 17_520
    table = table_of({HOUR + hour: HourFile(8, 1, 1, SEALED | DEAD) for hour in range(hours)})
    newer = table_of({HOUR + 5: HourFile(16, 2, 2, SEALED | DEAD)})
    assert lines(lambda: (table.unsealed(HOUR + hours), table.deletable(HOUR + hours), table.get(HOUR))) < 100
    assert lines(lambda: table.update(newer.rows)) < 1_000 and int(table.rows["rows"].sum()) == hours + 1


# What is known of an hour's dispatch log.


def outcomes_of(disk: MemoryDisk, first: int, groups: int, at_ms: int) -> Segment:
    """A dispatch log of so many groups with fifty outcomes each."""
    segment = create_segment(disk, "dispatch.log", FileHeader(FileKind.DISPATCH, 1))
    for number in range(groups):
        sequences = np.arange(50, dtype=np.uint64) + np.uint64(first + 50 * number)
        data = encode_outcomes(HOUR, [NewPart(sequences, np.full(50, 7, np.int64), Outcome.DISPATCHED)])
        segment.append([NewGroup(GroupKind.DATA, [data], 1, at_ms, 0, 50)])
    segment.flush()
    return segment


@pytest.mark.parametrize("more", [0, 1])
def test_rule_L5_another_dispatch_log_is_noticed_also_when_it_is_as_long_and_damage_changes_nothing(more: int) -> None:
    disk, known = MemoryDisk(), HourOutcomes()
    segment = outcomes_of(disk, 1, 3, 1_000)
    known.read_on(segment, segment.end, lambda: None)
    disk.remove("dispatch.log")
    other = outcomes_of(disk, 1_001, 3 + more, 2_000)
    with pytest.raises(DamagedData):
        known.read_on(other, other.end, lambda: None)
    asked = np.array([1, 150, 151, 1_001], np.uint64)
    found = set(known.find(segment, asked).sequences.tolist())
    assert known.end == segment.end and found & {*asked.tolist()} == {1, 150}


def test_rule_B2_a_request_is_a_look_up_however_many_rows_wait_for_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.ledger.wanted.SORT_FROM_ROWS", 100)
    world = World.greeted(segment_bytes=1 << 20)
    world.crash_target(TARGET_IDS[0])
    for number in range(8):
        world.send(wanted(400, 2_000 + number, f"w{number}"))
        world.settle()
    world.pass_ms(3_000)
    compared: list[int] = []
    find = Wanted.find

    def counting(self: Wanted, rows: Rows) -> object:
        compared.append(len(rows))
        return find(self, rows)

    monkeypatch.setattr(Wanted, "find", counting)
    for row in (1, 200, 600):
        one = world.receipts("w3", "w7").take([row])
        compared.clear()
        assert world.states(one) == [MessageState.PENDING] and sum(compared) < 1_000, "it is not searched through"
        world.cancel(one)
        world.settle()
        assert world.states(one) == [MessageState.CANCELLED]
    assert world.status("waiting_rows") == 3_197


# What is read of a schedule log.

FAR_MS = 2 * HOUR_MS
FAR = hour_of_ms(CLOCK_MS + FAR_MS)
PATH = schedule_path(FOLDER, FAR)


def filed(*names: str) -> World:
    """Three rows in a batch of its own for each name."""
    world = World()
    for name in names:
        world.send(wanted(3, FAR_MS, name))
        world.settle()
        world.checkpoint()
    return world


def test_each_byte_of_columns_headers_and_subjects_is_checked_and_none_of_a_body() -> None:
    world = filed("x" * 22, "y" * 22)
    whole, unnoticed = content(world.disk, PATH), 0
    parts = [HourPart(FAR, world.hours().get(FAR))]
    for at in range(FILE_HEADER_BYTES, len(whole)):
        put(world.disk, PATH, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = load_hour(world.disk, FOLDER, world.server.log_id, FAR, parts)
        unnoticed += found.damage is None
        rows = len(found.prepared.rows)
        assert rows == 6 if found.damage is None else rows <= 3, "what follows it is set aside with it"
    bodies, pads = 6 * 24, 2 * 4  # Nobody notices flips in bodies and in the padding of a group's table here.
    assert unnoticed == bodies + pads, "names of subjects are checked too: a flipped bit makes another name of one"


def test_bytes_that_claim_to_be_a_huge_batch_are_damage_and_size_no_read() -> None:
    sizes: list[int] = []

    def read(offset: int, size: int) -> bytes:
        sizes.append(size)
        return HEADER.pack(0x48435442, 1, 1, 0, 0xFFFF_FFF8, *([0] * (len(HEADER.unpack(bytes(HEADER.size))) - 5)))

    with pytest.raises(DamagedData, match="the batch at offset 64"):
        read_batch(lambda at: ("log", at), read, 64)
    assert max(sizes) < 4 << 20
