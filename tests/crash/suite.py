"""All crash workloads by name, each with the faults that happen beside the crash."""

from __future__ import annotations

from collections.abc import Iterator

from delayd.testing.disk import Faults
from tests.crash.harness import Explorer, Report
from tests.crash.workloads import CheckpointWorkload, LogWorkload


def log_alone() -> Report:
    """Nothing goes wrong but the crash."""
    return Explorer("log", LogWorkload()).explore()


def log_with_a_failed_write() -> Report:
    """A write of two groups fails half done and is refused; the log goes on."""
    return Explorer("log with a failed write", LogWorkload(), lambda: Faults(fail_write_at=3)).explore()


def log_with_a_failed_creation() -> Report:
    """The header of a new segment can't be written; the next append tries again."""
    return Explorer("log with a failed roll", LogWorkload(), lambda: Faults(fail_write_at=7)).explore()


def checkpoint_alone() -> Report:
    """Nothing goes wrong but the crash."""
    return Explorer("checkpoint", CheckpointWorkload()).explore()


def checkpoint_with_a_failed_write() -> Report:
    """A publication fails half done; the next one must not go over the only valid slot."""
    return Explorer("checkpoint with a failed write", CheckpointWorkload(), lambda: Faults(fail_write_at=3)).explore()


SUITE = (
    log_alone,
    log_with_a_failed_write,
    log_with_a_failed_creation,
    checkpoint_alone,
    checkpoint_with_a_failed_write,
)


def run_all() -> Iterator[Report]:
    """Each workload's report, then their sum."""
    total = Report()
    for explore in SUITE:
        report = explore()
        total.add(report)
        yield report
    total.names = [f"{len(SUITE)} workloads"]
    yield total
