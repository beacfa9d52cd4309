"""The disk that a torture makes fail: only the reads that are meant, and only meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

from .bad_disk import BadDisk
from .wall_clock import WallClock

PROGRAM = """
import os, sys, time
for path in sys.argv[1:]:
    try:
        file = os.open(path, os.O_RDONLY)
        buffer = bytearray(4)
        told = os.pread(file, 4, 0).decode()
        assert os.preadv(file, [buffer], 0) == 4
    except OSError as error:
        told = os.strerror(error.errno)
    print(told)
print(round(time.time() / 3600))
"""


def test_reads_of_the_named_files_fail_while_they_are_meant_to(tmp_path: Path) -> None:
    disk, wall = BadDisk(tmp_path / "disk"), WallClock(tmp_path / "wall")
    paths = [tmp_path / "bad" / "1.log", tmp_path / "good" / "1.log"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("text")

    def told() -> list[str]:
        # With both libraries at once, as a torture has them.
        with wall.preloaded(), disk.preloaded() as environment:
            command = [sys.executable, "-c", PROGRAM, *map(str, paths)]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.split("\n")[:3]

    first = told()
    wall.step(2 * 3_600_000)
    with disk.failing("/bad/"):
        second = told()
    third = told()
    assert [first[:2], second[:2], third[:2]] == [["text"] * 2, ["Input/output error", "text"], ["text"] * 2]
    assert int(second[2]) - int(first[2]) in (2, 3)
    assert disk.failed == 1
    assert "LD_PRELOAD" not in os.environ
