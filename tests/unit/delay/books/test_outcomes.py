"""The dispatch logs of more hours than may be open: each outcome is in its hour's file, or beside it and told."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from delayd import open_files
from delayd.delay.books.dispatch_logs import read_outcomes
from delayd.delay.books.outcomes import OutcomeLog, reopen_dispatch_log
from delayd.delay.quarantine import quarantine_path
from delayd.disk import RealDisk
from delayd.errors import DamagedData
from delayd.identity import Identity
from delayd.log.dispatch import NewPart, Outcome
from delayd.log.schedule import dispatch_path
from delayd.site import Site
from delayd.testing.clock import SimClock
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState

LOG_ID = 7
MOST = 3
FIRST = 500_000
HOURS = range(FIRST, FIRST + 20)


class Hours:
    """An outcome log on a disk of which few files may be open, with an outcome in each hour."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.disk = RealDisk()
        self.thread = StepExecutor()
        self.damaged: dict[int, DamagedData] = {}
        site = Site(self.disk, MemoryState(), folder, Identity(LOG_ID, 1), SimClock(), self.thread)
        self.log = OutcomeLog(site, 20, {}, {}, self.damaged, self.damaged.__setitem__)
        self.record(1)

    def record(self, sequence: int) -> None:
        """Write one more outcome in each hour."""
        for hour in HOURS:
            part = NewPart(np.array([sequence], np.uint64), np.array([0], np.int64), Outcome.CANCELLED)
            self.log.record(hour, part, lambda: None)
        self.log.commit()
        self.thread.run_all()

    def path(self, hour: int) -> Path:
        return Path(dispatch_path(self.folder, hour))

    def sequences(self, path: str) -> list[int]:
        segment = reopen_dispatch_log(self.disk, path, LOG_ID)
        assert segment is not None
        found: list[int] = read_outcomes(segment).sequences.tolist()
        segment.close()
        return found


@pytest.fixture
def hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hours:
    monkeypatch.setattr(open_files, "OPEN_FILES_MAX", MOST)
    return Hours(str(tmp_path))


def test_more_hours_than_files_may_be_open_take_outcomes_again_and_again(hours: Hours) -> None:
    for sequence in (2, 3):
        hours.record(sequence)
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert len([link for link in links if link.startswith(f"{hours.folder}/dispatch")]) <= MOST
    assert [hours.sequences(str(hours.path(hour))) for hour in HOURS] == [[1, 2, 3]] * len(HOURS)
    assert hours.log.idle and not hours.log.blocked and not hours.damaged


def test_a_closed_dispatch_log_that_was_removed_is_told_and_later_outcomes_are_beside_it(hours: Hours) -> None:
    hours.path(FIRST).unlink()
    hours.record(2)
    assert list(hours.damaged) == [FIRST]
    assert hours.sequences(quarantine_path(hours.folder, FIRST, 1)) == [2]
    assert hours.sequences(str(hours.path(FIRST + 1))) == [1, 2]
    assert hours.log.idle and not hours.log.blocked


def test_a_look_tells_of_a_closed_dispatch_log_that_was_removed(hours: Hours) -> None:
    hours.path(FIRST).unlink()
    hours.log.look()
    hours.thread.run_all()
    assert list(hours.damaged) == [FIRST]
    hours.record(2)
    assert hours.sequences(quarantine_path(hours.folder, FIRST, 1)) == [2]


def test_a_whole_copy_that_was_put_in_the_place_of_a_closed_dispatch_log_is_written_on(hours: Hours) -> None:
    whole = hours.path(FIRST).read_bytes()
    (hours.path(FIRST).parent / "copy").write_bytes(whole)
    os.rename(hours.path(FIRST).parent / "copy", hours.path(FIRST))
    hours.record(2)
    assert hours.sequences(str(hours.path(FIRST))) == [1, 2] and not hours.damaged


def test_an_older_copy_in_the_place_of_a_closed_dispatch_log_is_damage_and_takes_nothing(hours: Hours) -> None:
    older = hours.path(FIRST).read_bytes()
    hours.record(2)
    (hours.path(FIRST).parent / "copy").write_bytes(older)
    os.rename(hours.path(FIRST).parent / "copy", hours.path(FIRST))
    hours.record(3)
    assert list(hours.damaged) == [FIRST] and hours.path(FIRST).read_bytes() == older
    assert hours.sequences(quarantine_path(hours.folder, FIRST, 1)) == [3]
