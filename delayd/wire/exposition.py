"""Exposition: families of metrics as text, in the form that Prometheus reads (version 0.0.4).

The form is some lines of ours, because a server needs no package to be measured. It is sans I/O: pieces of bytes come
out, and whoever sends them lets others have their turn in between.

An example::

    # HELP delayd_free_bytes Free bytes of the disk.
    # TYPE delayd_free_bytes gauge
    delayd_free_bytes{role="delay",server="00f1"} 1048576
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

import numpy as np

from delayd.machine.histogram import LOWER_BOUNDS, Counted

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PIECE_LINES = 200  # Lines in one piece, some 0.3 ms of work.

Number = int | float


class MetricKind(StrEnum):
    """What a value may do between two scrapes."""

    COUNTER = "counter"  # It grows, and is 0 after a start.
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """What is told of a metric; its unit is the end of its name."""

    name: str
    kind: MetricKind
    text: str  # One sentence, which the page of metrics has too.
    labels: tuple[str, ...] = ()


class Family(NamedTuple):
    """A metric with its samples: values of all its labels, and the number."""

    metric: Metric
    samples: Iterable[tuple[Sequence[str], Number]]


class Steps(NamedTuple):
    """The buckets of a histogram in classic form. ``per_second`` says how many units of a value a second has; bounds
    are the powers of two from ``first`` to ``last``.
    """

    per_second: int
    first: int
    last: int


MILLISECONDS = Steps(1_000, 1, 1 << 22)  # 1 ms to 70 minutes.
NANOSECONDS = Steps(1_000_000_000, 1 << 16, 1 << 34)  # 66 us to 17 s.


def histogram(steps: Steps, labelled: Sequence[tuple[Sequence[str], Counted]]) -> list[tuple[Sequence[str], Number]]:
    """The samples of a histogram: those of ``_bucket`` have one label more, ``le``, those of ``_sum`` and ``_count``
    are told by "sum" and "count" in its place.

    A power of two begins a step of the scale, so each bucket has exactly the values below its bound. Values are whole
    units, rounded down: what counts as below 32 took less than 32.
    """
    samples: list[tuple[Sequence[str], Number]] = []
    bounds = [1 << power for power in range(steps.first.bit_length() - 1, steps.last.bit_length())]
    places = LOWER_BOUNDS.searchsorted(np.array(bounds)).tolist()
    for labels, (counts, total) in labelled:
        below = np.concatenate(([0], np.cumsum(counts)))
        for bound, place in zip(bounds, places, strict=True):
            samples.append(((*labels, f"{bound / steps.per_second:.12g}"), int(below[place])))
        samples.append(((*labels, "+Inf"), int(below[-1])))
        samples.append(((*labels, "sum"), total / steps.per_second))
        samples.append(((*labels, "count"), int(below[-1])))
    return samples


def exposition(families: Iterable[Family]) -> Iterator[bytes]:
    """The text, in pieces; a family without samples is left out."""
    lines = (line for metric, samples in families for line in _lines(metric, samples))
    while piece := list(islice(lines, PIECE_LINES)):
        yield "".join(piece).encode()


def _lines(metric: Metric, samples: Iterable[tuple[Sequence[str], Number]]) -> Iterator[str]:
    name, names = metric.name, metric.labels
    head = f"# HELP {name} {_help(metric.text)}\n# TYPE {name} {metric.kind}\n"
    for labels, value in samples:
        if head:
            yield head
            head = ""
        if metric.kind is not MetricKind.HISTOGRAM:
            yield f"{name}{_labels(names, labels)} {value}\n"
        elif labels[-1] in ("sum", "count"):
            yield f"{name}_{labels[-1]}{_labels(names, labels[:-1])} {value}\n"
        else:
            yield f"{name}_bucket{_labels((*names, 'le'), labels)} {value}\n"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return "{" + ",".join([f'{name}="{_value(value)}"' for name, value in zip(names, values, strict=True)]) + "}"


def _value(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
