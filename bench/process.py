"""What the kernel says of a process: its memory, its CPU time, and what it wrote to the disk."""

import contextlib
import os
import resource
from pathlib import Path

KIB = 1024
BLOCK_BYTES = 512  # The kernel's unit, whatever the disk's is.


def memory_bytes(pid: int) -> int:
    """Memory that the process keeps from others: its Pss, where pages that several share count in part."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * KIB


def memory_bytes_max() -> int:
    """The most memory that this process ever had: its highest resident set.

    `getrusage` would tell that of the parent where the parent's was higher, for a child begins as its parent.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * KIB


def family_cpu_s() -> float:
    """Seconds of CPU time of this process and of all below it, such as a JVM and its workers, also of those that have
    ended and were waited for.
    """
    return sum(sum(map(int, words[11:15])) for words in _family().values()) / os.sysconf("SC_CLK_TCK")


def workers_memory_bytes_max() -> int:
    """The most memory that any of the processes below this one that run Spark's tasks ever had."""
    peaks = [0]
    for pid in _family():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
            peaks.append(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * KIB)
    return max(peaks)


def _family() -> dict[int, list[str]]:
    """This process and all below it: the words of each one's status, which begin with its state and its parent."""
    known: dict[int, list[str]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended meanwhile.
            known[int(name)] = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
    return {pid: words for pid, words in known.items() if _is_below(pid, known)}


def _is_below(pid: int, known: dict[int, list[str]]) -> bool:
    while pid != os.getpid() and pid in known:
        pid = int(known[pid][1])
    return pid == os.getpid()


def written_by_children_bytes() -> int:
    """Bytes that children of this process, which have ended, made the disk write in their lives.

    The kernel counts whole pages (`write_bytes` of /proc/PID/io); a page that is filled in two syncs counts twice.
    """
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock * BLOCK_BYTES


def file_bytes(folder: Path) -> int:
    """Lengths of all files below a folder; a file that is removed meanwhile counts as 0."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
