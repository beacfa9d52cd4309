"""Lines whose rate a peer controls: a few, then a count."""

import logging

import pytest

from delayd.machine.operating import LINES_A_MINUTE, MINUTE_S, LogLimit

log = logging.getLogger(__name__)


def test_rule_B1_a_flood_of_one_cause_writes_a_few_lines_and_one_count_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    limit = LogLimit(log, lambda: now[0])
    caplog.set_level(logging.INFO)
    for number in range(5_000):
        now[0] += MINUTE_S / 2_500
        limit.warning("flood", "flooded number=%d", number)
    limit.info("calm", "calm")
    now[0] += MINUTE_S
    limit.tell()
    limit.tell()
    lines = [record.getMessage() for record in caplog.records]
    counted = [int(line.rpartition("count=")[2]) for line in lines if line.startswith("lines_left_out cause=flood")]
    flooded = [line for line in lines if line.startswith("flooded")]
    assert len(flooded) <= 3 * LINES_A_MINUTE and flooded[0] == "flooded number=0"
    assert len(flooded) + sum(counted) == 5_000
    assert len(counted) <= 3
    assert lines.count("calm") == 1


def test_what_happens_seldom_is_always_written(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limit = LogLimit(log, lambda: now[0])
    for _ in range(10 * LINES_A_MINUTE):
        now[0] += MINUTE_S / LINES_A_MINUTE
        limit.warning("seldom", "seldom")
    assert [record.getMessage() for record in caplog.records] == ["seldom"] * (10 * LINES_A_MINUTE)
