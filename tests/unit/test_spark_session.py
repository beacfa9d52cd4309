"""Where Spark or its workers can't run, one sentence says what to install."""

from pathlib import Path

import pytest

from delayd.errors import BadSetting
from spark.session import check_spark, named_workers


def test_a_java_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_java(tmp_path, monkeypatch, 'openjdk version "11.0.2" 2019-01-15')
    with pytest.raises(BadSetting, match=r"needs Java 17 or newer, this is Java 11: install Java 17"):
        check_spark()


def test_a_missing_java_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadSetting, match="needs Java, and this machine has none"):
        check_spark()


def test_a_missing_pyspark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark.session.find_spec", lambda name: None)
    with pytest.raises(BadSetting, match=r"needs pyspark: pip install 'delayd\[spark\]'"):
        check_spark()


@pytest.mark.parametrize(
    ("said", "lacks"),
    [
        ("ModuleNotFoundError: No module named 'delayd'", "delayd"),
        ("ModuleNotFoundError: No module named 'spark.audit'", "delayd"),
        ("ModuleNotFoundError: No module named 'pyarrow.lib'", "pyarrow"),
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delayd", "delayd"),
    ],
)
def test_workers_that_lack_something_are_named(monkeypatch: pytest.MonkeyPatch, said: str, lacks: str) -> None:
    errors = pytest.importorskip("pyspark.errors")
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    with pytest.raises(BadSetting, match=f"workers run /opt/python, which lacks {lacks}: run pip"), named_workers():
        raise errors.PySparkException(said)


def test_other_faults_of_a_query_are_told_as_they_are() -> None:
    errors = pytest.importorskip("pyspark.errors")
    with pytest.raises(errors.PySparkException, match="sparkling"), named_workers():
        raise errors.PySparkException("No module named 'sparkling'")


def _fake_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
