"""The launcher: what it hands to the command line is loaded when it is called, and not before."""

import subprocess
import sys
from types import ModuleType

import pytest

import cli.main
from cli.main import Programs
from delayd.__main__ import main


def test_the_command_line_alone_loads_no_server_and_no_spark() -> None:
    script = "import sys; sys.argv[1:] = ['--help']; from delayd.__main__ import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "cli.main" in loaded
    assert not loaded & {"meta", "realtime", "spark", "delayd.delay", "uvloop", "pyspark"}


def _audit(programs: Programs) -> int:
    programs.spark_audit("data", hours=(), late_ms_limit=0, lost_grace_ms=0, findings_limit=0, proved={})
    return 0


def test_without_pyspark_the_audit_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ModuleType("spark.session")

    def audit(data: str, **terms: object) -> object:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")

    vars(program)["audit"] = audit
    monkeypatch.setitem(sys.modules, "spark.session", program)
    monkeypatch.setattr(cli.main, "main", _audit)
    assert main() == 1
    assert capsys.readouterr().err == "delayd: Spark needs pyspark: pip install 'delayd[spark]'\n"
