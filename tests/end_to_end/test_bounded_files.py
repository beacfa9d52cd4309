"""Cancels in many hours leave few files open: the whole command, with fewer hours."""

from pathlib import Path

from tests.end_to_end.bounded_files import DURING_MAX, count_open


def test_cancels_in_more_hours_than_files_may_be_open_leave_few_files_open(tmp_path: Path) -> None:
    hours = DURING_MAX + 256
    opened = count_open(tmp_path, cancels=2 * hours, hours=hours, after_s=1.0, seed=1)
    assert opened.cancelled == 2 * hours and opened.by_key and opened.delivered
    assert opened.faults == [], opened.line
