"""``delayd seals --tallies`` and ``--against``: two machines compare some lines (docs/formats/tally.md)."""

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


def lines(data: Path, name: str, tmp_path: Path) -> Path:
    ran = run("seals", "--data", str(data / name), "--tallies")
    assert (ran.code, ran.err) == (0, "")
    path = tmp_path / f"{name}.tallies"
    path.write_text(ran.out)
    return path


def test_rule_S5_the_lines_of_one_machine_agree_with_the_directory_of_the_other(data: Path, tmp_path: Path) -> None:
    delay, *targets = (lines(data, name, tmp_path) for name in ("delay", "realtime-0", "realtime-1"))
    for folder, files in (("delay", targets), ("realtime-0", [delay, targets[1]])):
        options = [word for file in files for word in ("--against", str(file))]
        ran = run("seals", "--data", str(data / folder), *options)
        assert (ran.code, ran.out) == (0, "both sides: 9 agree\n")


def test_rule_S5_a_difference_is_named_and_exits_with_3(data: Path, tmp_path: Path) -> None:
    target, other = (lines(data, name, tmp_path) for name in ("realtime-0", "realtime-1"))
    text = target.read_text()
    # The last sealed hour: one message more.
    line = [each for each in text.splitlines() if each.split()[-2] == "5"][-1]
    words = line.split()
    target.write_text(text.replace(line, " ".join([*words[:3], "6", words[4]])))
    ran = run("seals", "--data", str(data / "delay"), "--against", str(target), "--against", str(other))
    assert ran.code == 3
    assert words[0] in ran.out and words[2] in ran.out and "handed over 5 with" in ran.out
    assert ran.out.endswith("both sides: 8 agree, 1 DIFFER\n")
    as_json = run("seals", "--data", str(data / "delay"), "--against", str(target), "--format", "json")
    assert as_json.code == 3 and '"DIFFER"' in as_json.out


def test_a_file_of_other_lines_is_refused(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("hello\n")
    ran = run("seals", "--data", str(data / "delay"), "--against", str(other))
    assert (ran.code, ran.out) == (2, "")
    assert "line 1: this is no line that `delayd seals --tallies` prints" in ran.err


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
