"""Metrics as text: another reader finds what was put in, and buckets have exactly the values below their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from delayd.machine.histogram import NOTED_MAX, Histogram
from delayd.wire.exposition import MILLISECONDS, PIECE_LINES, Family, Metric, MetricKind, exposition, histogram
from delayd.wire.frame import Head
from delayd.wire.metrics import METRICS, Asked, families_of

GAUGE = Metric("some_bytes", MetricKind.GAUGE, 'Bytes,\nwith a \\ and a "quote".', ("name",))
LATE = Metric("late_seconds", MetricKind.HISTOGRAM, "How late.", ("server",))


def text(*families: Family) -> str:
    return b"".join(exposition(families)).decode()


def test_another_reader_finds_what_was_put_in() -> None:
    names = ['a"b', "a\\b", "a\nb", "ä €", "", "a,b}"]
    page = text(Family(GAUGE, [((name,), number) for number, name in enumerate(names)]), Family(LATE, ()))
    (family,) = text_string_to_metric_families(page)
    assert [(each.labels["name"], each.value) for each in family.samples] == [
        (name, number) for number, name in enumerate(names)
    ]
    assert family.type == "gauge" and family.documentation == GAUGE.text


def test_a_histogram_has_exactly_the_values_below_each_bound() -> None:
    values = np.random.default_rng(5).lognormal(6, 3, 20_000).astype(np.int64)
    noted = Histogram()
    for begin in range(0, len(values), 100):
        noted.late((1_000_000 - values[begin : begin + 100]).tobytes(), 1_000_000)
    family = Family(LATE, histogram(MILLISECONDS, [(("a",), noted.counted())]))
    (read,) = text_string_to_metric_families(text(family))
    buckets = {each.labels["le"]: each.value for each in read.samples if each.name == "late_seconds_bucket"}
    assert buckets.pop("+Inf") == len(values) and len(buckets) == 23
    assert buckets == {bound: np.count_nonzero(values < float(bound) * 1_000) for bound in buckets}
    told = {each.name: each.value for each in read.samples if "le" not in each.labels}
    assert told["late_seconds_count"] == len(values)
    assert told["late_seconds_sum"] == pytest.approx(values.sum() / 1_000)


def test_a_histogram_keeps_little_of_what_is_noted_and_loses_nothing() -> None:
    noted = Histogram()
    for number in range(10 * NOTED_MAX):
        noted.add(number)
        noted.late(np.array([7, 9], np.int64).tobytes(), 8)  # One of them is early by the clock of another server.
        assert len(noted._values) < NOTED_MAX and len(noted._ats) < NOTED_MAX
    noted.late(np.zeros(1 << 20, np.int64).tobytes(), 3)  # All of one step, so they are counted as one number.
    assert max(map(len, noted._columns)) < 1_000, "a large column is counted at once"
    counts, total = noted.counted()
    assert counts.sum() == 30 * NOTED_MAX + (1 << 20)
    assert total == sum(range(10 * NOTED_MAX)) + 10 * NOTED_MAX + 3 * (1 << 20)
    counts[:] = 0
    assert noted.counted().counts.sum() > 0, "the array is the caller's"


def test_a_page_comes_in_pieces_and_is_made_as_it_is_taken() -> None:
    made = 0

    def rows() -> object:
        nonlocal made
        for number in range(10 * PIECE_LINES):
            made += 1
            yield ((str(number),), number)

    pieces = exposition([Family(GAUGE, rows())])  # type: ignore[arg-type]
    assert next(pieces).count(b"\n") == PIECE_LINES + 1  # The two lines of the head come as one.
    assert made < 2 * PIECE_LINES
    assert sum(piece.count(b"\n") for piece in pieces) == 9 * PIECE_LINES + 1


def test_each_metric_has_one_name_and_a_unit_that_prometheus_knows() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.text.endswith(".") and "_ms" not in metric.name
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)


def test_what_a_server_does_not_tell_or_tells_wrongly_has_no_sample() -> None:
    counters: Head = {"pending_minute": 3, "accepted_rows": "many", "unheard_of": 1}
    delay: Head = {"counters": counters, "fenced": True, "waits": None}
    page = text(*families_of([Asked("delay", "a", delay), Asked("meta", "b", {"counters": None, "now_ms": 1_500})]))
    assert 'delayd_pending_messages{role="delay",server="a",due="minute"} 3\n' in page
    assert 'delayd_fenced{role="delay",server="a"} 1\n' in page and "accepted" not in page and "unheard" not in page
    assert 'delayd_clock_seconds{role="meta",server="b"} 1.5\n' in page
