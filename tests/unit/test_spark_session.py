"""Where Spark can't run, one sentence says what to install."""

from pathlib import Path

import pytest

from delayd.errors import BadSetting
from spark.session import check_spark


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


def _fake_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
