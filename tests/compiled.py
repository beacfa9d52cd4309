"""The compiled pieces of delayd, built from kernel/ for tests: the environment of the tests itself runs their twins."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parent.parent / "kernel" / "src"
NAME = "delayd_kernel"
FLAGS = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror", "-shared", "-fPIC")


def build_kernel(folder: Path) -> Path:
    """Build the module into a folder, which a process finds by PYTHONPATH; skip the test without a compiler.

    CFLAGS of the environment are added, so that sanitizers can be on.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python: the kernel can't be built")
    path = folder / f"{NAME}.abi3.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    sources = sorted(map(str, SOURCES.glob("*.c")))
    more = shlex.split(os.environ.get("CFLAGS", ""))
    subprocess.run([compiler, *FLAGS, *more, include, *sources, "-o", str(path)], check=True)
    return path


def load_kernel(path: Path) -> ModuleType:
    """Load a built module, beside whatever `delayd.kernel` has taken."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
