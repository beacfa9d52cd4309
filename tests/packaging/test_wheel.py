"""The wheel: it installs nothing but delayd's own names, and runs with what it requires, where no repository is."""

import subprocess
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import delayd
from tests.end_to_end.up_process import watched
from tests.packaging.commands import REPOSITORY, run
from tests.packaging.conftest import make_environment, requirements

OWN_NAMES = {"delayd", "pyspark_delayd.py"}
INFORMATION = f"delayd-{delayd.__version__}.dist-info"


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_installs_only_names_of_its_own(wheel: Path) -> None:
    names = {name.split("/")[0] for name in names_in(wheel)}
    assert "delayd" in names
    assert names <= OWN_NAMES | {INFORMATION}


@pytest.mark.parametrize("folder", ["realtime", "meta", "cli", "spark"])
def test_the_wheel_carries_each_program_inside_delayd(wheel: Path, folder: str) -> None:
    packed = {name for name in names_in(wheel) if name.startswith(f"delayd/{folder}/")}
    sources = (REPOSITORY / folder).rglob("*.py")
    assert packed == {f"delayd/{source.relative_to(REPOSITORY)}" for source in sources}


def test_the_wheel_has_types_and_a_licence_and_neither_tests_nor_examples(wheel: Path) -> None:
    names = names_in(wheel)
    assert {"delayd/py.typed", f"{INFORMATION}/licenses/LICENSE"} <= names
    assert not [name for name in names if {"tests", "bench", "examples", "docs"} & set(name.split("/"))]
    assert not [name for name in names if "__pycache__" in name]


def test_the_metadata_says_what_delayd_is(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("delayd", delayd.__version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (REPOSITORY / "README.md").read_text()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    extras = ["archive", "bench", "dev", "fast", "gateway", "proof", "report", "spark", "sql"]
    assert metadata.get_all("Provides-Extra") == extras


def test_the_installed_command_says_its_version_and_its_help(environment: Path, tmp_path: Path) -> None:
    command = str(environment / "bin" / "delayd")
    assert run(command, "--version", folder=tmp_path) == f"delayd, version {delayd.__version__}\n"
    assert run(command, "--help", folder=tmp_path).startswith("Usage: delayd [OPTIONS] COMMAND")


def test_python_dash_m_delayd_is_the_same_command(environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    assert run(python, "-m", "delayd", "--version", folder=tmp_path) == f"delayd, version {delayd.__version__}\n"


def test_the_installed_programs_are_those_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    python = str(environment / "bin" / "python")
    script = "from delayd.programs import find; print(*(find(name).__file__ for name in ('realtime', 'meta', 'cli')))"
    found = run(python, "-c", script, folder=tmp_path).split()
    assert [Path(file).parent.name for file in found] == ["realtime", "meta", "cli"]
    assert all(Path(file).is_relative_to(environment) for file in found)


def test_what_is_installed_schedules_delivers_and_audits(environment: Path, tmp_path: Path) -> None:
    command = str(environment / "bin" / "delayd")
    with watched([command, "up", "--data", "data", "--port", "0"], tmp_path, tmp_path) as up:
        meta = up.meta
        kept = run(command, "send", "orders", "order 42", "--in", "100ms", "--meta", meta, folder=tmp_path)
        assert kept.startswith("kept as sequence 1 of log ")
        given = ("--group", "shop", "--max", "1", "--wait", "30s", "--meta", meta)
        came = run(command, "consume", "orders", *given, folder=tmp_path)
        assert came.rstrip().endswith("order 42")
        # The outcome is in the books within 50 ms of the delivery.
        books = (command, "audit", "--data", "data")
        up.until(lambda: "scheduled 1 = dispatched 1" in run(*books, folder=tmp_path), "the audit knows the delivery")
        assert up.end() == 0


def test_without_its_extra_the_spark_audit_says_how_to_get_it(environment: Path, tmp_path: Path) -> None:
    command = [str(environment / "bin" / "delayd"), "spark-audit", "--data", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "delayd: an audit in Spark needs pyspark: pip install 'delayd[spark]'\n"
    # The module that Spark imports in each session of this Python must not fail either.
    run(str(environment / "bin" / "python"), "-W", "error", "-c", "import pyspark_delayd", folder=tmp_path)


def test_without_its_extra_the_picture_of_an_audit_says_how_to_get_it(environment: Path, tmp_path: Path) -> None:
    command = [str(environment / "bin" / "delayd"), "audit", "--data", ".", "--report", "audit.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr == "delayd: a picture of an audit needs matplotlib: pip install 'delayd[report]'\n"


@pytest.fixture(scope="module")
def data(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of servers that have ended, with one message."""
    folder, command = tmp_path_factory.mktemp("servers"), str(environment / "bin" / "delayd")
    with watched([command, "up", "--data", "data", "--port", "0"], folder, folder) as up:
        run(command, "send", "orders", "order 42", "--in", "1h", "--meta", up.meta, folder=folder)
        assert up.end() == 0
    return folder / "data"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("archive", ["archive", "--to", "books"]),
        ("proof", ["tree-head"]),
        ("report", ["audit", "--report", "audit.png"]),
        ("spark", ["export", "--out", "rows"]),
        ("sql", ["sql", "select subject from schedule"]),
    ],
)
def test_an_extra_is_all_that_its_commands_need(
    extra: str, words: list[str], data: Path, wheel: Path, metadata: Message, tmp_path: Path
) -> None:
    """For `gateway` see test_container.py."""
    made = make_environment(tmp_path / "environment", wheel, requirements(metadata, extra))
    run(str(made / "bin" / "delayd"), *words, "--data", str(data), folder=tmp_path)


def test_with_the_extra_spark_finds_the_data_source(spark_environment: Path, tmp_path: Path) -> None:
    script = (
        "import pyspark_delayd; print(pyspark_delayd.DefaultSource.name(), pyspark_delayd.DefaultSource.__module__)"
    )
    assert (
        run(str(spark_environment / "bin" / "python"), "-c", script, folder=tmp_path) == "delayd delayd.spark.source\n"
    )
