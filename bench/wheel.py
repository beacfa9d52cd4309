"""Micro-benchmark of the wheel: one JSON line a figure, medians of a few repeats, done in well under a minute.

Run ``python -m bench.wheel [--rows 1000000]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from delayd.delay.rows import ROW_BYTES, Rows, new_rows
from delayd.delay.timers.wheel import OPEN_AHEAD_MS, PreparedRows, Wheel, prepare
from delayd.hours import HOUR_MS, hour_start_ms

HOUR = 490_000
START_MS = hour_start_ms(HOUR)
REPEATS = 5
GENERATOR = np.random.default_rng(1)


def main() -> None:
    """Run every benchmark and print its figures."""
    parser = argparse.ArgumentParser(description="Measure the wheel.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the loaded hour")
    rows = parser.parse_args().rows
    bench_load(rows)
    bench_jitter_beside_a_load(rows)
    bench_insert()
    bench_open()
    bench_take()
    bench_drain(rows)
    bench_herd(rows)
    bench_late_rows()


def random_rows(count: int, low_ms: int = 0, high_ms: int = HOUR_MS) -> Rows:
    """Rows due at random within a part of the hour."""
    rows = new_rows(count)
    rows["due_ms"], rows["hour"] = GENERATOR.integers(low_ms, high_ms, count), HOUR
    rows["sequence"] = rows["location"] = np.arange(count)
    return rows


def bench_load(count: int) -> None:
    """Order an hour by slot off the loop, and attach it on the loop."""
    rows = random_rows(count)
    prepared = prepare(rows)
    report("load: prepare", "ms", [timed_us(lambda: prepare(rows)) / 1e3 for _ in range(REPEATS)], rows=count)
    report("load: attach", "us", [timed_us(lambda: Wheel().add_hour(HOUR, prepared)) for _ in range(REPEATS)])
    print(json.dumps({"bench": "wheel", "name": "load: bytes a row", "value": ROW_BYTES, "rows": count}))


def bench_jitter_beside_a_load(count: int) -> None:
    """Lateness of a 1 ms sleeper while another thread prepares hours: shows whether the GIL is released."""
    rows = random_rows(count)
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            prepare(rows)

    thread = threading.Thread(target=load)
    thread.start()
    late_ms = [timed_us(lambda: time.sleep(0.001)) / 1e3 - 1 for _ in range(1_000)]
    stop.set()
    thread.join()
    report("load: lateness of a 1 ms sleeper beside it", "ms", late_ms)


def bench_insert() -> None:
    """Insert live rows over the whole hour, no slot of it open."""
    for count, repeats in ((1, 100_000), (100, 10_000), (10_000, 100)):
        sets = [random_rows(count) for _ in range(50)]
        wheel = new_wheel()
        took_us = [timed_us(partial(wheel.insert, sets[i % 50])) for i in range(repeats)]
        report("insert", "us", took_us, rows=count, mean=statistics.mean(took_us))


def bench_open() -> None:
    """Gather and sort one slot: loaded rows only, and out of thirty runs and a tail."""
    for count in (138, 50_000, 1_000_000):
        prepared = prepare(random_rows(count, 0, 500))
        took_us = [timed_open_us(prepared_wheel(prepared)) for _ in range(REPEATS)]
        report("open a loaded slot", "us", took_us, rows=count)
    took_us = []
    for _ in range(REPEATS):
        wheel = new_wheel()
        for _ in range(31):
            wheel.insert(random_rows(65_000))
        took_us.append(timed_open_us(wheel))
    report("open a slot out of 30 runs and a tail", "us", took_us, rows=31 * 65_000 // 7_200)


def bench_take() -> None:
    """Take what is due each millisecond of one slot, and with nothing due at all."""
    for count in (139, 50_000):
        wheel = prepared_wheel(prepare(random_rows(count, 500, 1_000)))
        wheel.open_ahead(START_MS + 499)
        took_us = [timed_us(partial(wheel.take_due, START_MS + now, 10_000)) for now in range(500, 1_000)]
        report("take what is due, a tick", "us", took_us, rows=count)
    wheel = prepared_wheel(prepare(random_rows(139, 500, 1_000)))
    wheel.open_ahead(START_MS + 499)
    took_us = [timed_us(lambda: wheel.take_due(START_MS + 499, 10_000)) for _ in range(1_000)]
    report("take when nothing is due", "us", took_us)
    report("next instant", "us", [timed_us(lambda: wheel.next_due_ms(START_MS + 499)) for _ in range(1_000)])


def bench_drain(count: int) -> None:
    """Catch up with a whole hour that is past due, in takes of 10,000 rows."""
    wheel = prepared_wheel(prepare(random_rows(count)))
    took_us = []
    while len(wheel):
        took_us.append(timed_us(lambda: wheel.take_due(START_MS + HOUR_MS, 10_000)))
    report("catch up, a take of 10,000", "us", took_us, rows=count, rows_a_second=round(count / sum(took_us) * 1e6))


def bench_herd(count: int) -> None:
    """All rows at one instant, loaded and live: opening, then takes of 10,000."""
    at_ms = 1_800_000
    for name in ("loaded", "live"):
        rows = random_rows(count, at_ms, at_ms + 1)
        wheel = prepared_wheel(prepare(rows)) if name == "loaded" else new_wheel()
        if name == "live":
            for start in range(0, count, 10_000):
                wheel.insert(rows[start : start + 10_000])
        opening_us = timed_us(partial(wheel.open_ahead, START_MS + at_ms - OPEN_AHEAD_MS))
        report(f"one instant, {name}: open", "ms", [opening_us / 1e3], rows=count)
        took_us = []
        while len(wheel):
            took_us.append(timed_us(partial(wheel.take_due, START_MS + at_ms, 10_000)))
        report(f"one instant, {name}: a take of 10,000", "us", took_us, rows=count)


def bench_late_rows() -> None:
    """Single rows for the open slot while 200,000 rows stand ready, taken every 20 rows."""
    wheel = prepared_wheel(prepare(random_rows(200_000, 0, 500)))
    wheel.open_ahead(START_MS)
    late = [random_rows(1, 0, 500) for _ in range(5_000)]
    insert_us, take_us = [], []
    for index, row in enumerate(late):
        insert_us.append(timed_us(partial(wheel.insert, row)))
        if index % 20 == 0:
            take_us.append(timed_us(lambda: wheel.take_due(START_MS + 499, 20)))
    report("insert into the open slot", "us", insert_us, rows=1, mean=statistics.mean(insert_us))
    report("take 20 beside late rows", "us", take_us, mean=statistics.mean(take_us))


def new_wheel() -> Wheel:
    """Make a wheel with one empty hour."""
    wheel = Wheel()
    wheel.add_hour(HOUR)
    return wheel


def prepared_wheel(prepared: PreparedRows) -> Wheel:
    """Make a wheel with one loaded hour."""
    wheel = Wheel()
    wheel.add_hour(HOUR, prepared)
    return wheel


def timed_open_us(wheel: Wheel) -> float:
    """Open the hour's first slot."""
    return timed_us(lambda: wheel.open_ahead(START_MS))


def timed_us(call: Callable[[], object]) -> float:
    """Call once, and say how many microseconds it took."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def report(name: str, unit: str, values: list[float], **facts: float) -> None:
    """Print one figure: median, p99 and the largest."""
    ordered = sorted(values)
    figures = {
        "median": statistics.median(ordered),
        "p99": ordered[int(len(ordered) * 0.99) - 1 if len(ordered) >= 100 else -1],
        "max": ordered[-1],
        **facts,
    }
    rounded = {key: round(value, 2) for key, value in figures.items()}
    print(json.dumps({"bench": "wheel", "name": name, "unit": unit, **rounded}), flush=True)


if __name__ == "__main__":
    gc.freeze()
    main()
