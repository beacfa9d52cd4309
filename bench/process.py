"""What the kernel says of a process: its memory, and what it wrote to the disk."""

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
