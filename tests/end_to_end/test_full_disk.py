"""A full disk under real servers, on a small file system of its own (rule L8)."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .small_disk import PRIVATE, private_mounts

DISK = "32m"
STORIES = (("delay",), ("realtime",), ("delay", "realtime", "meta"))
LIMIT_S = 90


def tell(folder: Path, roles: tuple[str, ...]) -> str:
    """Run the story of these roles' disk; what it says when it fails."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    story = [sys.executable, "-m", "tests.end_to_end.full_disk", str(disk), str(folder / "data"), *roles]
    script = f'mount -t tmpfs -o size={DISK} none "$0" && exec "$@"'
    told = subprocess.run(
        [*PRIVATE, "sh", "-c", script, str(disk), *story], capture_output=True, text=True, timeout=LIMIT_S
    )
    return told.stderr if told.returncode else ""


@pytest.mark.serial
def test_rule_L8_a_full_disk_is_refused_by_name_and_everything_recovers_by_itself(tmp_path: Path) -> None:
    private_mounts(tmp_path)
    # The stories wait most of the time, so they are told at once.
    with ThreadPoolExecutor(len(STORIES)) as pool:
        folders = [tmp_path / "-".join(roles) for roles in STORIES]
        failures = {roles: said for roles, said in zip(STORIES, pool.map(tell, folders, STORIES), strict=True) if said}
    assert not failures, "\n".join(f"the disk of {roles}: {said}" for roles, said in failures.items())
