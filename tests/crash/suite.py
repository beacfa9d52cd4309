"""All crash workloads by name, each with the faults that happen beside the crash."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from delayd.log import checkpoint
from delayd.testing.disk import Faults
from tests.crash.file_workloads import ConsumeWorkload, DispatchWorkload, ScheduleWorkload
from tests.crash.harness import Explorer, Report
from tests.crash.workloads import CheckpointWorkload, LogWorkload

SLOT_BYTES = 2_048  # Slots of their real size would make each of the many disks 8 MiB large.


def log_alone() -> Report:
    """Nothing goes wrong but the crash."""
    return explore_log("log", Faults())


def log_with_a_failed_write() -> Report:
    """A write of two groups fails half done and is refused; the log goes on."""
    return explore_log("log with a failed write", Faults(fail_write_at=3))


def log_with_a_failed_roll() -> Report:
    """The header of a new segment can't be written; the next append tries again."""
    return explore_log("log with a failed roll", Faults(fail_write_at=7))


def log_failed_syncs() -> Report:
    """Each sync of the log fails once."""
    return Explorer("log, each sync failing", LogWorkload()).explore_failed_syncs()


def explore_log(name: str, faults: Faults, first: int = 1, *, recoveries: bool = True) -> Report:
    """Die in the log's workload at each operation from ``first`` on, with the same faults each time."""
    return Explorer(name, LogWorkload(), lambda: replace(faults), recoveries=recoveries).explore(first)


def dispatch_log() -> Report:
    """One hour's outcomes."""
    return Explorer("dispatch log", DispatchWorkload()).explore()


def schedule_logs() -> Report:
    """Checkpoints over four hours."""
    return Explorer("schedule logs", ScheduleWorkload()).explore()


def consume_log() -> Report:
    """Checkpoints of one subject."""
    return Explorer("consume log", ConsumeWorkload()).explore()


def checkpoint_alone() -> Report:
    """Nothing goes wrong but the crash."""
    with _small_slots():
        return Explorer("checkpoint", CheckpointWorkload()).explore()


def checkpoint_with_a_failed_write() -> Report:
    """A publication fails half done; the next one must not go over the only valid slot."""
    with _small_slots():
        faults = Faults(fail_write_at=3)
        return Explorer("checkpoint with a failed write", CheckpointWorkload(), lambda: replace(faults)).explore()


def checkpoint_failed_syncs() -> Report:
    """Each sync of the checkpoint file fails once."""
    with _small_slots():
        return Explorer("checkpoint, each sync failing", CheckpointWorkload()).explore_failed_syncs()


@contextmanager
def _small_slots() -> Iterator[None]:
    with patch.multiple(checkpoint, SLOT_BYTES=SLOT_BYTES, PAYLOAD_BYTES_MAX=SLOT_BYTES - checkpoint.HEADER.size):
        yield


SUITE = (
    log_alone,
    log_with_a_failed_write,
    log_with_a_failed_roll,
    dispatch_log,
    schedule_logs,
    consume_log,
    checkpoint_alone,
    checkpoint_with_a_failed_write,
)
FAILED_SYNCS = (log_failed_syncs, checkpoint_failed_syncs)


def run_all() -> Iterator[Report]:
    """Each workload's report, then their sum."""
    total = Report()
    for explore in (*SUITE, *FAILED_SYNCS):
        report = explore()
        total.add(report)
        yield report
    total.names = [f"{len(SUITE) + len(FAILED_SYNCS)} workloads"]
    yield total
