"""The delay server: each read fails once, each file and each value is damaged; a sample here, all by hand.

`python -m tests.faults` tries all of them.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.faults.delay import (
    Report,
    Violation,
    count_reads,
    damage_files,
    delay_files,
    fail_read,
    first_life,
    flip,
    neighbours,
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


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("fault", FileFault)
def test_rule_L10_a_damaged_file_is_named_and_the_rest_is_delivered_and_a_copy_mends_it(
    fault: FileFault, below: bool
) -> None:
    remains, report = first_life(), Report()
    for path in delay_files(remains):
        damage_files(remains, {path: fault}, report, below=below)
    # The last file of a folder, and the only one, has no neighbour behind it.
    assert report.file_faults == sum(has_neighbour(path, delay_files(remains), fault) for path in delay_files(remains))


def has_neighbour(path: str, files: list[str], fault: FileFault) -> bool:
    folder = path.rpartition("/")[0]
    return fault is not FileFault.SWAPPED or any(
        other > path and other.rpartition("/")[0] == folder and path.endswith(".log") for other in files
    )


@pytest.mark.parametrize("below", [False, True])
def test_rule_L10_files_beside_damaged_ones_are_damaged_too_and_both_are_named_and_mended(below: bool) -> None:
    remains, report = first_life(), Report()
    ways = list(product(FileFault, FileFault))
    pairs = neighbours(remains)
    for number, pair in enumerate(pairs * 2):
        # Each pair in two ways of the 49, others for each of them.
        faults = ways[(number * 11) % len(ways)]
        damage_files(remains, dict(zip(pair, faults, strict=True)), report, below=below)
    assert report.file_faults > len(pairs)


def test_rule_L9_each_value_of_the_state_is_rebuilt_or_concerns_only_what_it_names() -> None:
    remains, report = first_life(), Report()
    for key in remains.state.all_keys():
        flip(remains, key, report)
    assert report.values > 15


def test_a_promise_that_is_broken_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.damage.mending.Mending._look_at_aside", lambda self: None)
    remains, report = first_life(), Report()
    with pytest.raises(Violation, match="still set aside"):
        for path in delay_files(remains):
            if "/schedule/" in path:
                damage_files(remains, {path: FileFault.MISSING}, report)
