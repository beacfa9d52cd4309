"""What the kernel says of a process, and the length of files."""

import subprocess
import sys
from pathlib import Path

from bench.process import file_bytes, written_by_children_bytes

MIB = 1 << 20


def test_memory_is_what_a_process_keeps() -> None:
    # In a process of its own, for this one may have memory left that earlier tests gave back.
    program = """
import os
from bench.process import memory_bytes
before = memory_bytes(os.getpid())
kept = bytearray(os.urandom(32 << 20))
print(memory_bytes(os.getpid()) - before - len(kept))
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert abs(int(ran.stdout)) < 8 * MIB


def test_the_most_memory_is_that_of_the_process_itself_and_not_of_its_parent() -> None:
    parent = """
import subprocess, sys
from bench.process import memory_bytes_max
kept = b"x" * (256 << 20)
child = "from bench.process import memory_bytes_max; print(memory_bytes_max())"
ran = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True)
print(memory_bytes_max(), ran.stdout)
"""
    ran = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True)
    own, of_child = map(int, ran.stdout.split())
    assert own > 256 * MIB and of_child < 128 * MIB


def test_bytes_of_files_below_a_folder_are_summed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "one").write_bytes(bytes(100))
    (tmp_path / "inner" / "two").write_bytes(bytes(23))
    assert file_bytes(tmp_path) == 123


def test_bytes_written_are_those_that_the_disk_gets_so_a_page_that_is_synced_twice_counts_twice(tmp_path: Path) -> None:
    program = f"""
import os
file = os.open({str(tmp_path / "file")!r}, os.O_CREAT | os.O_WRONLY)
for number in range(10):
    os.pwrite(file, bytes(100), number * 100)
    os.fdatasync(file)
"""
    before = written_by_children_bytes()
    subprocess.run([sys.executable, "-B", "-c", program], check=True)
    written = written_by_children_bytes() - before
    # In memory alone nothing is written; a file system adds a page or two of its own.
    assert written == 0 or 10 * 4096 <= written <= 14 * 4096
    assert file_bytes(tmp_path) == 1_000
