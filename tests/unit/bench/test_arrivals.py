"""Arrivals: which messages a figure is about."""

import time

import numpy as np
import pytest

from bench.arrivals import Arrivals


def test_what_is_due_while_a_run_begins_and_ends_is_not_counted_but_never_early() -> None:
    arrivals = Arrivals()
    now_ms = time.time_ns() // 1_000_000
    arrivals.add(now_ms - np.arange(20_000, 29_000, 1_000))
    arrivals.add(np.array([now_ms + 60_000]))
    assert arrivals.figures()["messages"] == 10 and arrivals.count == 10
    settled = arrivals.figures(4)
    assert settled["messages"] == 5 and settled["early"] == 1
    assert settled["late_ms_p50"] == pytest.approx(22_000, abs=2_000)
