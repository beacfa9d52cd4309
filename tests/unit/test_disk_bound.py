"""Disk use is bounded, shown in small by the same program that lives through a day of ten million messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import disk
from delayd.delay.retention import Retention, SegmentRetention

MESSAGES = 300_000
STEP_MS = 1_800_000  # Fewer steps, fewer fsyncs: a few seconds.


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not grow with messages is small too, or a leak of this many would hide in it."""
    monkeypatch.setattr(disk, "SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "FIXED_BYTES", 6 << 20)


def test_what_is_not_kept_any_more_is_given_back(tmp_path: Path) -> None:
    found = disk.measure(MESSAGES, str(tmp_path), STEP_MS)
    assert found["bounded"] and found["reclaimed"], found
    assert found["handed_over"] == found["sealed_rows"] == MESSAGES
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", [(Retention, "sweep"), (SegmentRetention, "release")])
def test_rule_P6_without_retention_the_bound_is_passed(
    broken: tuple[object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken, lambda *arguments: None)
    found = disk.measure(MESSAGES, str(tmp_path), STEP_MS)
    assert not found["bounded"], found
