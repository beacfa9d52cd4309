"""A forecast counts each message once, however its pages come and are put together."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from delayd.gateway import forecast
from delayd.gateway.forecast import DueCounts
from delayd.hours import HOUR_MS, instant_text

BEGIN_MS = 500_000 * HOUR_MS


@pytest.mark.parametrize("unsorted_max", [0, 50, 1 << 20])
def test_pages_that_overlap_are_counted_as_one(unsorted_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "UNSORTED_MAX", unsorted_max)
    chance = np.random.default_rng(28)
    due_ms = BEGIN_MS + chance.integers(0, 40 * HOUR_MS, 3_000) // 60_000 * 60_000
    sizes = chance.integers(0, 1_000, len(due_ms))
    counts = DueCounts()
    for page in np.array_split(np.arange(len(due_ms)), 20):
        counts.add(due_ms[page], sizes[page])
    for by, length in (("hour", len("2027-01-31T09")), ("day", len("2027-01-31")), ("month", len("2027-01"))):
        messages, byte_count, seconds = Counter[str](), Counter[str](), dict[str, Counter[int]]()
        for instant, size in zip(due_ms.tolist(), sizes.tolist(), strict=True):
            name = instant_text(instant)[:length]
            messages[name] += 1
            byte_count[name] += size
            seconds.setdefault(name, Counter())[instant // 1_000 * 1_000] += 1
        periods = counts.periods(by)
        assert [period.period[:length] for period in periods] == sorted(messages)
        for name, period in zip(sorted(messages), periods, strict=True):
            most = max(seconds[name].values())
            first = min(second for second, count in seconds[name].items() if count == most)
            assert (period.messages, period.bytes) == (messages[name], byte_count[name])
            assert (period.fullest_second_ms, period.fullest_second_messages) == (first, most)


def test_without_messages_there_are_no_periods() -> None:
    assert DueCounts().periods("day") == []
