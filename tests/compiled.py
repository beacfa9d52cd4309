"""The compiled pieces of delayd, built from kernel/ for tests: the environment of the tests itself runs their twins."""

import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parent.parent / "kernel" / "src"
FAULTS = Path(__file__).parent / "lane_faults.c"
NAME = "delayd_kernel"
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror", "-shared", "-fPIC")


def build_kernel(folder: Path, *, faults: bool = False) -> Path:
    """Build the module into a folder, which a process finds by PYTHONPATH; skip the test without a compiler. With
    ``faults`` the system calls of its lane fail as `Faults` says.

    CFLAGS of the environment are added, so that sanitizers can be on.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python: the kernel can't be built")
    path = folder / f"{NAME}.abi3.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    sources = sorted(map(str, SOURCES.glob("*.c")))
    more = shlex.split(os.environ.get("CFLAGS", ""))
    if faults:
        sources.append(str(FAULTS))
        more += ["-Wl,--wrap=pwritev64,--wrap=fdatasync"]
    subprocess.run([compiler, *FLAGS, *more, include, *sources, "-o", str(path)], check=True)
    return path


def load_kernel(path: Path) -> ModuleType:
    """Load a built module, beside whatever `delayd.kernel` has taken."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Faults:
    """What the next system calls of lanes do, the compiled one's and the twin's: a number for each call.

    One that is not negative lets so many bytes of a write through; a negative one is an errno, and nothing is done.
    Behind the numbers a call does all.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._compiled = ctypes.CDLL(str(path))
        self._writes: list[int] = []
        self._syncs: list[int] = []
        self._pwritev, self._fdatasync = os.pwritev, os.fdatasync
        monkeypatch.setattr(os, "pwritev", self._write)
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def script(self, writes: Sequence[int] = (), syncs: Sequence[int] = (), *, of_python: bool = True) -> None:
        """Set the numbers, at most sixteen each, of the compiled lane alone or ``of_python``, too."""
        self._writes, self._syncs = (list(writes), list(syncs)) if of_python else ([], [])
        for is_sync, numbers in ((0, writes), (1, syncs)):
            self._compiled.script(is_sync, len(numbers), (ctypes.c_int * len(numbers))(*numbers))

    def _write(self, descriptor: int, buffers: Sequence[bytes], position: int) -> int:
        if not self._writes:
            return self._pwritev(descriptor, buffers, position)
        return self._pwritev(descriptor, [b"".join(buffers)[: _bytes(self._writes.pop(0))]], position)

    def _sync(self, descriptor: int) -> None:
        if self._syncs:
            _bytes(self._syncs.pop(0))
        self._fdatasync(descriptor)


def _bytes(number: int) -> int:
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    return number
