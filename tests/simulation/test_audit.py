"""Directories of simulated clusters, at any moment of a run, and archives of them: audits find nothing (S5, S7).

Any number of directories: ``python -m tests.simulation.audit --directories N``.
"""

import tempfile
from pathlib import Path

import pytest

from tests.simulation.audit import audited

SEEDS = 14  # Enough for a bit of everything.


@pytest.mark.timeout(300)  # 5 s on an idle machine.
def test_rule_S7_an_honest_directory_has_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where tests write, an fsync may cost nothing.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directories, taken = audited(range(SEEDS))
    assert [each for each in directories if each.wrong] == []
    # They are not all alike: kills, seals, deleted hours.
    assert len(directories) >= SEEDS and taken["delay_dies"] and taken["step_wall"]
    assert any(each.sealed for each in directories) and any(each.deleted_rows for each in directories)
    assert any(each.archived for each in directories)
