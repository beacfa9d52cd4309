"""What the kernel says of a process: its memory, and what it wrote to the disk."""

from pathlib import Path

KIB = 1024


def memory_bytes(pid: int) -> int:
    """Memory that the process keeps from others: its Pss, where pages that several share count in part."""
    return _fields(f"/proc/{pid}/smaps_rollup")["Pss"] * KIB


def written_bytes(pid: int) -> int:
    """Bytes that it made the disk write, in whole pages; a page that is filled in two syncs counts twice."""
    fields = _fields(f"/proc/{pid}/io")
    return fields["write_bytes"] - fields["cancelled_write_bytes"]


def file_bytes(folder: Path) -> int:
    """Lengths of all files below a folder; one that goes meanwhile is none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _fields(path: str) -> dict[str, int]:
    """The lines `name: number [unit]` of a file of /proc."""
    fields: dict[str, int] = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0])
    return fields
