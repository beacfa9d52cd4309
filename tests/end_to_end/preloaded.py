"""C libraries that tests put before libc in the processes that they start, steered through a file that all have mapped.

Invariant: the process that runs the tests is never under them.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent


class Preloaded:
    """One library, ``NAME.c`` of this folder, and its control file, which the environment names to it."""

    def __init__(self, folder: Path, name: str, variable: str, control: bytes) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            pytest.skip(f"no C compiler: {name} can't be put before a process")
        folder.mkdir(parents=True, exist_ok=True)
        self.library = folder / f"{name}.so"
        self.variable = variable
        self.control = folder / f"{name}.control"
        self.control.write_bytes(control)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self.library), str(SOURCES / f"{name}.c")]
        subprocess.run(command, check=True)

    def write(self, data: bytes, position: int = 0) -> None:
        """Write into the control file, in place: the processes have mapped it, and eight bytes are one store."""
        with self.control.open("r+b", buffering=0) as file:
            file.seek(position)
            file.write(data)

    @contextmanager
    def preloaded(self) -> Iterator[dict[str, str]]:
        """Processes started meanwhile are under it, and under those preloaded around it; their environment."""
        others = os.environ.get("LD_PRELOAD")
        names = environment_of(self)
        if others:
            names["LD_PRELOAD"] += f":{others}"
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield {**os.environ}
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def environment_of(*libraries: Preloaded) -> dict[str, str]:
    """The environment in which a process loads these libraries."""
    names = {library.variable: str(library.control) for library in libraries}
    return {**names, "LD_PRELOAD": ":".join(str(library.library) for library in libraries)} if libraries else {}
