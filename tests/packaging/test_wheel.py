"""The wheel: it installs nothing but delayd's own names, and runs where the repository can't be seen."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import delayd

_REPOSITORY = Path(delayd.__file__).parents[1]
_OWN_NAMES = {"delayd", "pyspark_delayd.py"}

pytestmark = pytest.mark.serial  # A second build beside it would share hatchling's files in the repository.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(_REPOSITORY))
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, whose dependencies come from this one's site-packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    _run(sys.executable, "-m", "pip", "--python", str(folder), "install", "--no-deps", "--no-index", str(wheel))
    # A path line adds the packages there but runs none of their .pth files, so the editable delayd stays unseen.
    (own / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def test_the_wheel_installs_only_names_of_its_own(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    information = f"delayd-{delayd.__version__}.dist-info"
    assert "delayd" in names
    assert names <= _OWN_NAMES | {information}


@pytest.mark.parametrize("folder", ["realtime", "meta", "cli", "spark"])
def test_the_wheel_carries_each_program_inside_delayd(wheel: Path, folder: str) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"delayd/{folder}/")}
    sources = (_REPOSITORY / folder).rglob("*.py")
    assert packed == {f"delayd/{source.relative_to(_REPOSITORY)}" for source in sources}


def test_the_installed_command_says_its_version_and_its_help(environment: Path, tmp_path: Path) -> None:
    command = str(environment / "bin" / "delayd")
    assert _run(command, "--version", folder=tmp_path) == f"delayd, version {delayd.__version__}\n"
    assert _run(command, "--help", folder=tmp_path).startswith("Usage: delayd [OPTIONS] COMMAND")


def test_python_dash_m_delayd_is_the_same_command(environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    assert _run(python, "-m", "delayd", "--version", folder=tmp_path) == f"delayd, version {delayd.__version__}\n"


def test_the_installed_programs_are_those_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    script = "from delayd.programs import find; print(*(find(name).__file__ for name in ('realtime', 'meta', 'cli')))"
    found = _run(python, "-c", script, folder=tmp_path).split()
    assert [Path(file).parent.name for file in found] == ["realtime", "meta", "cli"]
    assert all(Path(file).is_relative_to(environment) for file in found)


def _run(*command: str, folder: Path = _REPOSITORY) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
