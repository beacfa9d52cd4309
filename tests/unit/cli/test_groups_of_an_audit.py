"""``delayd audit --groups``: what groups of consumers were given, and what became of it."""

import json
from pathlib import Path

import pytest

from delayd.machine.disk import RealDisk
from tests.simulation.audit import BOOKS, copy_tree
from tests.tamper.honest import honest

from .runner import run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A delay and two realtime servers with sealed and deleted hours, on the real disk."""
    root = tmp_path_factory.mktemp("books")
    disk, _ = honest()
    for name in ("delay", "realtime-0", "realtime-1"):
        copy_tree(disk, f"{BOOKS}/{name}", RealDisk(), f"{root}/{name}")
    return root


def test_consumption_is_shown_by_group_when_it_is_asked_for(data: Path) -> None:
    ran = run("audit", "--data", str(data), "--groups")
    (heading,) = [line for line in ran.out.splitlines() if "pulled" in line]
    assert heading.split()[:4] == ["subject", "group", "pulled", "redelivered"]
    found = json.loads(run("audit", "--data", str(data), "--format", "json").out)["groups"]
    assert found
    for books in found:
        parts = books["acknowledged"] + books["given_back"] + books["sent_back"]
        parts += books["lapsed"] + books["outstanding"]
        assert books["pulled"] == parts > 0
    # An audit of chosen hours does not read the pull log, unless it is told to.
    some = ("audit", "--data", str(data), "--from", "2027-01-15T00:00Z", "--format", "json")
    assert json.loads(run(*some).out)["groups"] == []
    assert json.loads(run(*some, "--groups").out)["groups"] == found
