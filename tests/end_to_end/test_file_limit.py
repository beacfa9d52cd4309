"""Files and connections: a server takes what its user may have, and says so when that is too little."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from delayd.net.files import FILES_MIN

STOP_DEADLINE_S = 30.0


@pytest.mark.parametrize("hard", [1_000, FILES_MIN])
def test_a_server_raises_its_soft_limit_of_files_and_warns_of_a_low_hard_one(tmp_path: Path, hard: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"this user may not have {hard} files")
    command = [sys.executable, "-m", "delayd", "meta", "--data", str(tmp_path), "--port", "0", "--exit-with-stdin"]
    limited = ["sh", "-c", f'ulimit -Sn 256 && ulimit -Hn {hard} && exec "$@"', "sh", *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(limited, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        pid = int(process.stdout.readline().rpartition("pid=")[2])
        limits = Path(f"/proc/{pid}/limits").read_text()
        _, log = process.communicate(timeout=STOP_DEADLINE_S)
    found = re.search(r"^Max open files +(\d+) +(\d+)", limits, re.MULTILINE)
    assert found is not None and found.groups() == (str(hard), str(hard))
    assert (f"few_files limit={hard} wanted={FILES_MIN} connections_max=" in log) == (hard < FILES_MIN)
    assert process.returncode == 0
