"""The delay server: each read fails once, each file and each value is damaged; a sample here, all by hand.

`python -m tests.faults` tries all of them.
"""

from __future__ import annotations

import pytest

from tests.faults.delay import (
    Report,
    Violation,
    count_reads,
    damage_file,
    delay_files,
    fail_read,
    first_life,
    flip,
)
from tests.faults.harness import FileFault, ReadFault

READS_STEP = 3  # Every third read here, each in one of the ways.


def test_rule_L10_reads_that_fail_once_concern_what_they_are_of_and_the_rest_goes_on() -> None:
    remains, report = first_life(), Report()
    reads = count_reads(remains)
    assert len(reads.paths) > 50 and {"schedule", "dispatch", "message", "seal"} <= {
        path.split("/")[3] for path in reads.paths
    }
    for at in range(0, len(reads.paths), READS_STEP):
        fail_read(remains, at, list(ReadFault)[at // READS_STEP % len(ReadFault)], report)
    assert report.read_faults > 10


@pytest.mark.parametrize("fault", FileFault)
def test_rule_L10_a_damaged_file_is_named_and_the_rest_is_delivered_and_a_copy_mends_it(fault: FileFault) -> None:
    remains, report = first_life(), Report()
    for path in delay_files(remains):
        damage_file(remains, path, fault, report)
    assert report.file_faults


def test_rule_L10_a_file_that_is_deleted_below_a_live_server_ends_nothing() -> None:
    remains, report = first_life(), Report()
    for path in delay_files(remains):
        damage_file(remains, path, FileFault.MISSING, report, live_first=True)
    assert report.file_faults > 5


def test_rule_L9_each_value_of_the_state_is_rebuilt_or_concerns_only_what_it_names() -> None:
    remains, report = first_life(), Report()
    for key in remains.state.all_keys():
        flip(remains, key, report)
    assert report.values > 15


def test_a_promise_that_is_broken_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.mending.Mending.step", lambda self: None)
    remains, report = first_life(), Report()
    with pytest.raises(Violation, match="still set aside"):
        for path in delay_files(remains):
            if "/schedule/" in path:
                damage_file(remains, path, FileFault.MISSING, report)
