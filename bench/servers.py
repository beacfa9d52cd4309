"""Three real servers in a directory of their own, for one benchmark; they end with it."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STOP_S = 10


@dataclass(frozen=True, slots=True)
class Servers:
    """Where they are: meta's address, the data directory, process ids by role."""

    meta: str
    data: Path
    pids: dict[str, int]


@contextlib.contextmanager
def servers(*roles: str) -> Iterator[Servers]:
    """Start meta and the given roles as processes, each on a free port."""
    with tempfile.TemporaryDirectory(prefix="delayd-bench-") as folder, contextlib.ExitStack() as stack:
        meta, pid = _start(stack, folder, "meta")
        pids = {"meta": pid}
        for role in roles:
            _, pids[role] = _start(stack, folder, role, "--meta", meta)
        yield Servers(meta, Path(folder), pids)


def _start(stack: contextlib.ExitStack, folder: str, role: str, *arguments: str) -> tuple[str, int]:
    with (Path(folder) / f"{role}.err").open("w") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "delayd", role, "--data", folder, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    stack.callback(_stop, child)
    assert child.stdout is not None
    words = child.stdout.readline().split()
    if words[:1] != ["ready"]:
        raise RuntimeError(f"{role} did not start: {(Path(folder) / f'{role}.err').read_text()}")
    return words[2], child.pid


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
