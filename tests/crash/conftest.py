"""Small checkpoint files for all crash tests, and what is said at the end of a run of how much they tried."""

from __future__ import annotations

import pytest

from delayd.log import checkpoint
from tests.crash.harness import Report

REPORTS = pytest.StashKey[list[Report]]()
SLOT_BYTES = 4_096


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of their real size would make each of the many disks 8 MiB large."""
    monkeypatch.setattr(checkpoint, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(checkpoint, "PAYLOAD_BYTES_MAX", SLOT_BYTES - checkpoint.HEADER.size)


@pytest.fixture
def reports(request: pytest.FixtureRequest) -> list[Report]:
    """Where a test leaves its report for the summary."""
    return request.config.stash.setdefault(REPORTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for each workload."""
    found = config.stash.get(REPORTS, [])
    if found:
        terminalreporter.section("crash tests")
    for report in found:
        terminalreporter.write_line(str(report))
