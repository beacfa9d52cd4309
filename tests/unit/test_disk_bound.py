"""Disk use is bounded, shown in small by the same program that lives through a day of ten million messages."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from bench import disk
from delayd.delay.books.retention import Retention, SegmentRetention
from delayd.reading.books import audit_directory
from delayd.reading.seals import SealState

MESSAGES = 300_000
STEP_MS = 1_800_000  # Fewer steps, fewer fsyncs: a few seconds.


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small what does not grow with messages, or a leak of this many messages would hide in it."""
    monkeypatch.setattr(disk, "SEGMENT_BYTES", 1 << 20)
    monkeypatch.setattr(disk, "FIXED_BYTES", 6 << 20)


def test_what_is_not_kept_any_more_is_given_back(tmp_path: Path) -> None:
    found = disk.measure(MESSAGES, str(tmp_path), STEP_MS)
    assert found["bounded"] and found["reclaimed"], found
    assert found["handed_over"] == found["sealed_rows"] == MESSAGES
    assert not list(tmp_path.iterdir())


def test_rule_P3_a_reader_beside_finds_each_hour_whole_or_removed_and_the_books_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "KEPT_HOURS", 1)
    pair = disk.new_pair(str(tmp_path))
    deleted = 0
    for batches in islice(disk.a_day(60_000, pair.clock.now_ms(), STEP_MS), 8):
        disk.live_an_hour(pair, str(tmp_path), STEP_MS, batches)
        report = audit_directory(str(tmp_path), now_ms=pair.clock.now_ms())
        assert report.balanced, report.findings[:3]
        states = [seal.state for seal in report.seals]
        assert states == sorted(states, key=[SealState.DELETED, SealState.VERIFIED].index)
        deleted = states.count(SealState.DELETED)
        gone = [seal.seal.facts.rows for seal in report.seals[:deleted] if seal.seal is not None]
        assert report.deleted_rows <= sum(gone), "the target holds no more of deleted hours than their seals say"
    pair.close()
    assert deleted >= 3


@pytest.mark.parametrize("broken", [(Retention, "sweep"), (SegmentRetention, "release")])
def test_rule_P6_without_retention_the_bound_is_passed(
    broken: tuple[object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken, lambda *arguments, **named: None)
    found = disk.measure(MESSAGES, str(tmp_path), STEP_MS)
    assert not found["bounded"], found
