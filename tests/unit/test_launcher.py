"""The launcher: what it hands to the command line is loaded when it is called, and not before."""

import subprocess
import sys
from types import ModuleType

import pytest

import cli.main
from cli.main import Programs
from delayd.__main__ import main
from delayd.errors import BadSetting


def test_the_command_line_alone_loads_no_server_and_no_spark() -> None:
    script = "import sys; sys.argv[1:] = ['--help']; from delayd.__main__ import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "cli.main" in loaded
    assert not loaded & {"meta", "realtime", "spark", "delayd.delay", "uvloop", "pyspark"}


def _audit(programs: Programs) -> int:
    programs.spark_audit("data", hours=(), late_ms_limit=0, lost_grace_ms=0, findings_limit=0, proved={})
    return 0


def test_without_pyspark_the_audit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ModuleType("spark.session")

    def audit(data: str, **terms: object) -> object:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")

    vars(program)["audit"] = audit
    monkeypatch.setitem(sys.modules, "spark.session", program)
    monkeypatch.setattr(cli.main, "main", _audit)
    with pytest.raises(BadSetting, match=r"^Spark needs pyspark: pip install 'delayd\[spark\]'$"):
        main()


def test_without_its_packages_a_gateway_says_what_to_install_and_that_the_user_must() -> None:
    script = "import sys; sys.modules['uvicorn'] = None; sys.argv[1:] = ['dev', '--port', '0'];"
    script += " from delayd.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "delayd: a gateway needs uvicorn: pip install 'delayd[gateway]'\n")
