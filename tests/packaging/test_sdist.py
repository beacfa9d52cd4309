"""The source distribution: a wheel built from it has what the repository's wheel has."""

import tarfile
import zipfile
from pathlib import Path

import delayd
from tests.packaging.commands import build

FOLDER = f"delayd-{delayd.__version__}"


def test_the_sdist_has_sources_tests_and_documents_and_nothing_that_tools_left(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{FOLDER}/") for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "delayd/py.typed", "docs/rules.md"}
    assert wanted | {"tests/conftest.py", "examples/README.md", "deploy/delayd.service", "Dockerfile"} <= names
    left = (".venv", ".git", ".ci", ".mypy_cache", ".hypothesis", "__pycache__", "delayd-data", "dist")
    assert not [name for name in names if set(name.split("/")) & set(left)]


def test_a_wheel_built_from_the_sdist_has_all_of_the_repositorys_wheel(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build(tmp_path / FOLDER, "--wheel", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert set(first.namelist()) == set(second.namelist())
