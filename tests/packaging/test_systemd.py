"""The systemd units: systemd takes them, and they agree with what the servers need and how they end."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.main import NOT_BALANCED, USAGE
from cli.serve import STOP_LAST_S, STOP_S
from delayd.net.budget import FILES_MIN
from delayd.net.program import STOP_MS_MAX
from tests.end_to_end.up_process import watched
from tests.packaging.commands import REPOSITORY

UNITS = sorted((REPOSITORY / "deploy").glob("*.service"))
PROGRAM = "/opt/delayd/bin/delayd"  # Where docs/deploy.md installs it.
EXPOSURE_MAX = 15  # On a scale to 100: systemd calls up to 20 well protected.

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Each setting of a unit with its values, in order."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def installed(unit: Path, folder: Path) -> Path:
    """A unit as it would be found here, where the program lies elsewhere; of a template one that is started."""
    text = unit.read_text().replace(PROGRAM, str(Path(sys.executable).with_name("delayd")))
    copy = folder / unit.name.replace("@", "@realtime")
    copy.write_text(text)
    return copy


def test_there_is_a_unit_for_all_servers_and_one_for_each() -> None:
    assert [unit.name for unit in UNITS] == ["delayd.service", "delayd@.service"]


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong_with_a_unit(unit: Path, tmp_path: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(installed(unit, tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_calls_a_unit_well_protected(unit: Path, tmp_path: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE_MAX}"]
    done = subprocess.run(
        [*command, str(installed(unit, tmp_path))], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_gives_a_server_its_files_its_directory_and_time_to_stop(unit: Path) -> None:
    settings = settings_of(unit)
    assert int(settings["LimitNOFILE"][0]) >= FILES_MIN
    assert settings["StateDirectory"] == ["delayd"] and settings["ProtectSystem"] == ["strict"]
    assert "--data %S/delayd" in settings["ExecStart"][0]
    # Stopped on damage or a failed fsync it must stay down (rule L1).
    assert str(NOT_BALANCED) in settings["RestartPreventExitStatus"][0].split()
    assert settings["Restart"] == ["on-failure"] and int(settings["StartLimitBurst"][0]) > 0
    stop_s = STOP_MS_MAX / 1000 if "@" in unit.name else STOP_S + STOP_LAST_S
    assert stop_s + 2 <= float(settings["TimeoutStopSec"][0])


def test_the_unit_of_all_servers_stops_them_through_up_alone() -> None:
    settings = settings_of(REPOSITORY / "deploy" / "delayd.service")
    # A server that got the signal of systemd and that of `up` would end at once.
    assert settings["KillMode"] == ["mixed"]
    assert str(USAGE) in settings["RestartPreventExitStatus"][0].split()
    assert settings["OOMPolicy"] == ["continue"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_serves_until_it_is_stopped(unit: Path, tmp_path: Path) -> None:
    (line,) = settings_of(unit)["ExecStart"]
    values = {"%S": str(tmp_path), "%i": "meta", "$DELAYD_OPTIONS": "--port 0", PROGRAM: f"{sys.executable} -m delayd"}
    for name, value in values.items():
        line = line.replace(name, value)
    (tmp_path / "delayd").mkdir()
    with watched(shlex.split(line), tmp_path, REPOSITORY) as running:
        last = "ready meta " if "@" in unit.name else "ready"
        running.until(lambda: any(each.startswith(last) for each in running.lines[-1:]), "it is ready")
        began = time.monotonic()
        assert running.end() == 0
        assert time.monotonic() - began < float(settings_of(unit)["TimeoutStopSec"][0])
    assert (tmp_path / "delayd" / "meta").is_dir()
