"""Dying at each disk operation, and proof that these tests would notice a missing sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delayd.log.checkpoint import CheckpointFile, Payload
from delayd.log.segment import Segment
from delayd.testing.disk import Faults, MemoryDisk, MemoryFile
from tests.crash.harness import Explorer, Report, Violation
from tests.crash.suite import FAILED_SYNCS, SUITE, checkpoint_alone, explore_log, log_alone, log_failed_syncs
from tests.crash.workloads import LogFacts, LogWorkload


@pytest.mark.parametrize("explore", SUITE, ids=lambda explore: explore.__name__)
def test_rule_L1_what_was_acknowledged_is_there_wherever_and_however_it_dies(
    explore: Callable[[], Report], reports: list[Report]
) -> None:
    report = explore()
    reports.append(report)
    assert report.operations > 10
    assert report.recoveries > report.operations


@pytest.mark.parametrize("explore", FAILED_SYNCS, ids=lambda explore: explore.__name__)
def test_rule_L1_after_a_failed_sync_it_stops_and_recovery_writes_back_what_the_page_cache_shows(
    explore: Callable[[], Report], reports: list[Report]
) -> None:
    reports.append(explore())


def test_without_the_write_back_of_recovery_the_crash_tests_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "_write_back", lambda segment, start, end: None)
    with pytest.raises(Violation, match="at the failed sync"):
        log_failed_syncs()


def test_without_the_sync_of_recovery_the_crash_tests_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    recover = Segment.recover

    def recover_without_sync(segment: Segment, *arguments: object, **named: object) -> object:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(MemoryFile, "sync", lambda file: None)
            return recover(segment, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Segment, "recover", recover_without_sync)
    with pytest.raises(Violation):
        log_alone()


def test_without_the_sync_of_a_flush_the_crash_tests_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(segment: Segment) -> None:
        segment.durable = segment.end

    monkeypatch.setattr(Segment, "flush", flush)
    with pytest.raises(Violation):
        log_alone()


def test_without_the_sync_of_folders_the_crash_tests_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryDisk, "sync_folder", lambda disk, path: None)
    with pytest.raises(Violation):
        log_alone()


def test_when_a_publication_goes_over_the_newest_slot_the_crash_tests_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = CheckpointFile.publish

    def publish_over_the_newest(file: CheckpointFile, payload: Payload, now_ms: int) -> None:
        publish(file, payload, now_ms)
        file._generation += 1

    monkeypatch.setattr(CheckpointFile, "publish", publish_over_the_newest)
    with pytest.raises(Violation):
        checkpoint_alone()


@pytest.mark.parametrize(
    "recoveries",
    [
        # Deaths in the workload alone notice every needed sync, in a tenth of the time.
        False,
        # The long form also dies in each recovery: even then nothing notices that one of the others is missing.
        pytest.param(True, marks=pytest.mark.long),
    ],
)
def test_every_single_sync_of_the_log_is_needed(recoveries: bool) -> None:
    disk = MemoryDisk()
    LogWorkload().run(disk, LogFacts())
    syncs = [at for at, operation in enumerate(disk.operations, 1) if operation.startswith("sync")]
    unnoticed = [disk.operations[at - 1] for sync, at in enumerate(syncs, 1) if not _is_noticed(sync, at, recoveries)]
    # Two rolls flush what the workload had flushed by itself, and removed segments that come back do no harm.
    assert unnoticed == NOT_NEEDED


NOT_NEEDED = [
    "sync /data/message/00000000000000000000.log",
    "sync /data/message/00000000000000002664.log",
    "sync_folder /data/message",
]


def _is_noticed(sync: int, operation: int, recoveries: bool) -> bool:
    try:
        explore_log(f"without sync {sync}", Faults(skip_sync_at=sync), operation, recoveries=recoveries)
    except Violation:
        return True
    return False


def test_a_log_that_refused_a_write_goes_on_without_it() -> None:
    for fail_write_at, refused in ((3, [2, 3]), (7, [7])):
        disk = MemoryDisk(Faults(fail_write_at=fail_write_at))
        facts = LogFacts()
        LogWorkload().run(disk, facts)
        assert facts.refused == refused
        found = LogWorkload().recover(disk.after_crash(), facts)
        LogWorkload().check(found, facts)


def test_the_harness_itself_notices_a_log_that_shows_what_was_refused() -> None:
    class Forgetful(LogWorkload):
        def check(self, found: object, facts: LogFacts) -> None:
            super().check(found, facts)
            assert isinstance(found, list)
            assert 8 not in found

    with pytest.raises(Violation, match="died"):
        Explorer("forgetful", Forgetful()).explore()
