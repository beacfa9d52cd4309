"""A wall clock that a test sets while servers run on it, and on nothing else: for processes started inside it.

Invariant: their monotonic clocks and timers are the machine's, so a step is what an administrator's would be.
"""

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("wall_clock.c")
STEP = struct.Struct("<q")


class WallClock:
    """The wall clock of every process that was started inside `preloaded`."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            pytest.skip("no C compiler: the wall clock of a process can't be set")
        folder.mkdir(parents=True, exist_ok=True)
        self._library = folder / "wall_clock.so"
        self._file = folder / "wall_ms"
        self._file.write_bytes(STEP.pack(0))
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)]
        subprocess.run(command, check=True)

    @property
    def ahead_ms(self) -> int:
        """How far it is ahead of the machine's."""
        (ahead_ms,) = STEP.unpack(self._file.read_bytes())
        return int(ahead_ms)

    def now_ms(self) -> int:
        """What it shows."""
        return time.time_ns() // 1_000_000 + self.ahead_ms

    def step(self, ms: int) -> None:
        """Set it ahead or back, for all processes at once."""
        # Written in place: the processes have mapped the file, and eight bytes are one store.
        with self._file.open("r+b", buffering=0) as file:
            file.write(STEP.pack(self.ahead_ms + ms))

    @contextmanager
    def preloaded(self) -> Iterator[dict[str, str]]:
        """Processes started meanwhile go by it; the environment that makes them."""
        names = {"LD_PRELOAD": str(self._library), "DELAYD_TEST_WALL_MS": str(self._file)}
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
