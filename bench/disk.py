"""Measures how much disk a delay and a realtime server need, day after day, and that retention frees it.

Run ``python -m bench.disk [--messages 10000000] [--folder DIR]``: one simulated day of messages, due up to three hours
ahead and spread over the day, through the real cores onto real files; then hours without any, until retention has
passed them all. One JSON line; exit code 1 when the bound below is passed, or when anything is left over at the end.

The bound, in bytes, is the sum of

- rows an hour * (half of the hours ahead, as delays are spread evenly, + hours kept + 2: the present hour, and one that
  is being sealed or on its way out) * bytes of a row in the schedule and the dispatch log;
- rows an hour * (hours kept + 1) * bytes of a row in the realtime log;
- rows of 80 minutes * bytes of a row in the message log: what came for the present hour is read there until it is due,
  and readers may hold a checkpoint for minutes;
- two segments of both message logs, and what does not grow: checkpoint files and states.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.pair import Pair
from delayd.batch.batch import Batch, encode, encode_subject_table, parse
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, Int64s, ProducerPart
from delayd.config import DelayConfig, RealtimeConfig
from delayd.hours import HOUR_MS
from delayd.reading.seals import SealState, verify_seals

MESSAGES = 10_000_000
SUBJECTS = (b"orders.cancel", b"orders.remind", b"mail.later")
BODY_BYTES = 64
BATCH_ROWS = 2_000
STEP_MS = 120_000  # The clock moves by this much at a time; each step costs some fsyncs.
DAY_HOURS = 24
AHEAD_HOURS = 3
KEPT_HOURS = 2
SEGMENT_BYTES = 8 << 20  # Small, so that segments roll and go many times a day, also in a short run.
CHECKPOINT_MS = 300_000
SWEEP_MS = 360_000  # Less often than in a server, because the clock moves by minutes.
ROW_SCHEDULE = BODY_BYTES + 28  # Due, sequence, subject, end of the body, and its part of the headers around.
ROW_DISPATCH = 18
ROW_MESSAGE = BODY_BYTES + 24
ROW_REALTIME = BODY_BYTES + 48  # And eight bytes in the consume log.
FIXED_BYTES = 16 << 20  # Two checkpoint files of 8 MiB, two LMDB files of a few hundred KiB.


class Sample(NamedTuple):
    """Bytes on disk, and files, by what they hold."""

    total: int
    schedule: int
    dispatch: int
    hour: int  # The largest file of each of the two.
    message: int
    message_segments: int
    realtime: int


def main() -> int:
    """Run once and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.disk", description="Live through a day; watch the disk.")
    parser.add_argument("--messages", type=int, default=MESSAGES, help=f"in the day (default: {MESSAGES:,})")
    parser.add_argument("--folder", help="where to work; by default the folder for temporary files")
    arguments = parser.parse_args()
    figures = measure(arguments.messages, arguments.folder)
    print(json.dumps(figures))
    return 0 if figures["bounded"] and figures["reclaimed"] else 1


def bound_bytes(messages: int) -> int:
    """The most bytes that may be on the disk; see above."""
    hourly = messages / DAY_HOURS
    filed = hourly * (AHEAD_HOURS / 2 + KEPT_HOURS + 2) * (ROW_SCHEDULE + ROW_DISPATCH)
    handed_over = hourly * (KEPT_HOURS + 1) * ROW_REALTIME
    intake = hourly * 80 / 60 * ROW_MESSAGE
    return int(filed + handed_over + intake) + 2 * 2 * SEGMENT_BYTES + FIXED_BYTES


def measure(messages: int, folder: str | None = None, step_ms: int = STEP_MS) -> dict[str, object]:
    """Live through the day and what follows, ``step_ms`` at a time; the figures."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="delayd-bench-", dir=folder) as data:
        pair = new_pair(data)
        day = a_day(messages, pair.clock.now_ms(), step_ms)
        samples = [live_an_hour(pair, data, step_ms, batches) for batches in day]
        samples += [live_an_hour(pair, data, step_ms, []) for _ in range(AHEAD_HOURS + KEPT_HOURS + 4)]
        handed_over = int(pair.realtime.counters["messages"])
        pair.close()
        seals = verify_seals(data)
        end = _sample(data)
    half = DAY_HOURS // 2
    peak, bound = max(sample.total for sample in samples), bound_bytes(messages)
    sealed_rows = sum(report.seal.facts.rows for report in seals.seals if report.seal is not None)
    reclaimed = handed_over == sealed_rows == messages and not (seals.broken or end.schedule or end.dispatch)
    return {
        "messages": messages,
        "handed_over": handed_over,
        "sealed_rows": sealed_rows,
        "hours_deleted": sum(report.state is SealState.DELETED for report in seals.seals),
        "written_bytes": messages * (ROW_SCHEDULE + ROW_DISPATCH + ROW_MESSAGE + ROW_REALTIME),
        "bound_bytes": bound,
        "peak_bytes": peak,
        "peak_first_half_bytes": max(sample.total for sample in samples[:half]),
        "peak_second_half_bytes": max(sample.total for sample in samples[half:DAY_HOURS]),
        "schedule_bytes_max": max(sample.schedule for sample in samples),
        "dispatch_bytes_max": max(sample.dispatch for sample in samples),
        "message_bytes_max": max(sample.message for sample in samples),
        "realtime_bytes_max": max(sample.realtime for sample in samples),
        "bytes_a_kept_hour": max(sample.hour for sample in samples),
        "end_bytes": end.total,
        "message_segments_max": max(sample.message_segments for sample in samples),
        "message_segments_end": end.message_segments,
        "hourly_bytes": [sample.total for sample in samples],
        "bounded": peak <= bound,
        "reclaimed": reclaimed,
        "seconds": round(time.perf_counter() - began, 1),
    }


def new_pair(data: str) -> Pair:
    """Both servers over an empty folder."""
    return Pair(
        DelayConfig(
            data=data,
            segment_bytes=SEGMENT_BYTES,
            checkpoint_every_ms=CHECKPOINT_MS,
            free_bytes_far=0,
            free_bytes_all=0,
            retention_hours=KEPT_HOURS,
        ),
        RealtimeConfig(
            data=data,
            segment_bytes=SEGMENT_BYTES,
            checkpoint_every_ms=CHECKPOINT_MS,
            free_bytes_all=0,
            retention_ms=KEPT_HOURS * HOUR_MS,
        ),
    )


def a_day(messages: int, begin_ms: int, step_ms: int) -> Iterator[list[list[Batch]]]:
    """The batches of each hour, step by step; made when they are wanted."""
    draw = np.random.default_rng(1)
    steps = HOUR_MS // step_ms
    bounds = np.linspace(0, messages, DAY_HOURS * steps + 1).astype(np.int64)
    counts = np.diff(bounds).reshape(DAY_HOURS, steps)
    number = 0
    for hour in range(DAY_HOURS):
        batches: list[list[Batch]] = []
        for step in range(steps):
            now_ms = begin_ms + hour * HOUR_MS + step * step_ms
            due = now_ms + draw.integers(0, AHEAD_HOURS * HOUR_MS, counts[hour, step])
            made: list[Batch] = []
            for start in range(0, len(due), BATCH_ROWS):
                number += 1
                made.append(_batch(due[start : start + BATCH_ROWS], number))
            batches.append(made)
        yield batches


def _batch(due: Int64s, number: int) -> Batch:
    count = len(due)
    table = encode_subject_table([SUBJECTS[number % len(SUBJECTS)]])
    ends = len(table) + BODY_BYTES * np.arange(1, count + 1)
    columns: list[tuple[ColumnId, ColumnArray]] = [
        (ColumnId.DELIVER_AT_MS, due),
        (ColumnId.BODY_END, ends.astype(np.uint32)),
    ]
    part = ProducerPart(1, number, number)
    return parse(encode(BatchKind.PRODUCER, part, count, columns, [table, bytes(BODY_BYTES * count)], 1))


def live_an_hour(pair: Pair, data: str, step_ms: int, batches: list[list[Batch]]) -> Sample:
    """Send what is to be sent at each step, and let the time pass; what is on the disk then."""
    for step in range(HOUR_MS // step_ms):
        for batch in batches[step] if batches else []:
            pair.send(batch)
        pair.settle()
        pair.clock.advance(step_ms)
        pair.settle()
        if step * step_ms % SWEEP_MS == 0:
            pair.delay.sweep()
            pair.realtime.retain()
            pair.settle()
    return _sample(data)


def _sample(data: str) -> Sample:
    sizes = {path: path.stat().st_blocks * 512 for path in Path(data).rglob("*") if path.is_file()}

    def of(part: str) -> list[int]:
        return [size for path, size in sizes.items() if path.is_relative_to(f"{data}/{part}")]

    segments = of("delay/message")
    schedule, dispatch = of("delay/schedule"), of("delay/dispatch")
    hour = max(schedule, default=0) + max(dispatch, default=0)
    logs = (sum(schedule), sum(dispatch), hour, sum(segments), len(segments))
    return Sample(sum(sizes.values()), *logs, sum(of("realtime")))


if __name__ == "__main__":
    sys.exit(main())
