"""Says at the end of a test run how much the crash tests tried."""

from __future__ import annotations

import pytest

from tests.crash.harness import Report

REPORTS = pytest.StashKey[list[Report]]()


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
