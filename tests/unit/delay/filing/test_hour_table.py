"""Hour table: it does what a dictionary does, and no look at it takes the loop a line an hour."""

import numpy as np
import pytest

from delayd.delay.filing.hour_table import HourFile, HourTable, hour_put, hour_puts, load_hours, merge_hours
from delayd.hours import hour_of_ms
from delayd.log.hour import DEAD, SEALED
from delayd.testing.clock import START_MS
from tests.counts import lines

HOUR = hour_of_ms(START_MS)
HOURS = 17_520  # Two years.


def table_of(files: dict[int, HourFile]) -> HourTable:
    table = HourTable()
    for hour, file in files.items():
        table.set(hour, file)
    return table


def drawn(draw: np.random.Generator) -> HourFile:
    length, rows, crc, flags = (int(draw.integers(0, high)) for high in (1 << 47, 1 << 33, 1 << 32, 8))
    return HourFile(length, rows, crc, flags)


def check(table: HourTable, files: dict[int, HourFile], until: int) -> None:
    hours = sorted(files)
    assert table.rows["hour"].tolist() == hours and len(table) == len(files)
    for hour in range(HOUR - 1, HOUR + 62):
        assert table.get(hour) == files.get(hour, HourFile()) and (hour in table) == (hour in files)
    assert table.sealed() == [hour for hour in hours if files[hour].sealed]
    assert table.unsealed(until) == [hour for hour in hours if hour <= until and not files[hour].sealed]
    assert table.deletable(until) == [
        hour for hour in hours if hour <= until and files[hour].sealed and not files[hour].dead
    ]
    assert list(hour_puts(table.rows)) == [hour_put(hour, files[hour]) for hour in hours]
    assert load_hours(hour_puts(table.rows)).rows.tobytes() == table.rows.tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_a_table_holds_what_a_dictionary_does_after_any_changes(seed: int) -> None:
    draw = np.random.default_rng(seed)
    table, files = HourTable(), dict[int, HourFile]()
    for _ in range(60):
        hours = [HOUR + int(hour) for hour in draw.integers(0, 61, int(draw.integers(0, 9)))]
        before, kept = table.rows, table.rows.tobytes()
        match int(draw.integers(0, 4)):
            case 0:
                for hour in hours:
                    files[hour] = drawn(draw)
                    table.set(hour, files[hour])
            case 1:
                newer = {hour: drawn(draw) for hour in hours}
                files.update(newer)
                table.update(table_of(newer).rows)
                assert before.tobytes() == kept, "who took the rows on another thread keeps them"
            case 2:
                newer = {hour: drawn(draw) for hour in hours}
                merged = merge_hours(table.rows, table_of(newer).rows)
                assert merged.tobytes() == table_of({**files, **newer}).rows.tobytes()
                assert table.rows is before
            case _:
                for hour in hours:
                    files.pop(hour, None)
                table.remove(hours)
                assert before.tobytes() == kept, "who took the rows on another thread keeps them"
        check(table, files, HOUR + int(draw.integers(-1, 62)))


def test_a_look_at_two_years_of_hours_takes_the_loop_no_line_an_hour() -> None:
    table = table_of({HOUR + hour: HourFile(8, 1, 1, SEALED | DEAD) for hour in range(HOURS)})
    newer = table_of({HOUR + 5: HourFile(16, 2, 2, SEALED | DEAD)})
    assert lines(lambda: (table.unsealed(HOUR + HOURS), table.deletable(HOUR + HOURS), table.get(HOUR))) < 100
    assert lines(lambda: table.update(newer.rows)) < 1_000 and int(table.rows["rows"].sum()) == HOURS + 1
