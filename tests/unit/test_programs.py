"""The finder: delayd's own module or an error that says what to do, in a repository and in a wheel's layout."""

import shutil
import subprocess
import sys
from pathlib import Path

import delayd

_PACKAGE = Path(delayd.__file__).parent
_FIND_META = "import sys; from delayd.programs import find; print(find('meta').__name__, find('meta').WHO)"


def test_a_folder_inside_delayd_wins_over_any_package_of_its_name(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    _make_package(stranger / "meta", "theirs")
    installed = tmp_path / "installed"
    _install_delayd(installed)
    _make_package(installed / "delayd" / "meta", "ours")
    assert _run(_FIND_META, stranger, installed).stdout == "delayd.meta ours\n"


def test_a_package_that_shadows_the_folder_is_named_with_its_distribution_and_is_not_imported(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    _make_package(stranger / "meta", "theirs")
    (stranger / "meta" / "__init__.py").write_text("print('the stranger ran')\n")
    record = stranger / "supermeta-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: supermeta\nVersion: 1.0\n")
    (record / "RECORD").write_text("meta/__init__.py,,\n")
    checkout = tmp_path / "checkout"
    _install_delayd(checkout)
    _make_package(checkout / "meta", "ours")

    found = _run(_FIND_META, stranger, checkout)

    assert found.returncode != 0
    assert "the stranger ran" not in found.stdout
    assert f"is shadowed by {stranger / 'meta' / '__init__.py'}, which supermeta installed" in found.stderr
    assert "remove that package" in found.stderr


def test_a_stranger_is_never_taken_for_a_folder_that_is_missing(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    _make_package(stranger / "meta", "theirs")
    installed = tmp_path / "installed"
    _install_delayd(installed)
    found = _run(_FIND_META, stranger, installed)
    assert found.returncode != 0
    assert "ProgramNotFound" in found.stderr
    assert "without its part 'meta': install delayd again" in found.stderr


def _install_delayd(folder: Path) -> None:
    package = folder / "delayd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(_PACKAGE / "programs.py", package)


def _make_package(folder: Path, who: str) -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"WHO = {who!r}\n")


def _run(program: str, *path: Path) -> subprocess.CompletedProcess[str]:
    # Isolated from this process, whose delayd is the real one; -S keeps the environment's packages out as well.
    script = f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}\n{program}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60)
