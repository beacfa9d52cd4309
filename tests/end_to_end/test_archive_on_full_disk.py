"""A folder whose real file system is full: the archiver says one sentence, shows nothing half, and goes on later."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.reading.archived import FILES, write_books

from .small_disk import PRIVATE, private_mounts

LIMIT_S = 60
# Fills the disk in a namespace of its own: archives there, lists what is there, gives it space, and archives again.
SCRIPT = """
mount -t tmpfs -o size="$1" none "$0" && mkdir "$0/archive" || exit 99
"$3" -m delayd archive --data "$2" --to "$0/archive" >"$4/first" 2>"$4/error"
echo $? >"$4/code"
cp -a "$0/archive" "$4/left"
"$3" -m delayd audit --data "$0/archive" --format json >"$4/audit"
mount -o remount,size=32m "$0"
"$3" -m delayd archive --data "$2" --to "$0/archive" --format json >"$4/second" 2>"$4/said" || exit 98
"$3" -m delayd audit --data "$0/archive" || exit 97
cp -a "$0/archive" "$4/whole"
"""


@pytest.mark.parametrize("size", ["4k", "32k", "48k"])
def test_a_full_disk_ends_the_archiver_with_one_sentence_and_the_next_run_goes_on(tmp_path: Path, size: str) -> None:
    private_mounts(tmp_path)
    books = write_books(tmp_path / "data")
    books.close()
    disk, seen = tmp_path / "disk", tmp_path / "seen"
    disk.mkdir()
    seen.mkdir()
    command = [*PRIVATE, "sh", "-c", SCRIPT, str(disk), size, books.root, sys.executable, str(seen)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert told.returncode == 0, told.stdout + told.stderr
    (sentence,) = (seen / "error").read_text().splitlines()
    assert (seen / "code").read_text() == "2\n" and f"{disk}/archive" in sentence and "no space" in sentence, sentence
    left, whole = (files(seen / name) for name in ("left", "whole"))
    # What was visible is whole, because it is never changed.
    assert left.items() <= whole.items() and not [name for name in left if name.startswith(".")]
    notes = [name for name in left if name.startswith("notes/")]
    assert len(notes) < FILES and len(left) < len(whole) == 2 * FILES
    if notes:
        report = json.loads((seen / "audit").read_text())
        assert not report["broken_seals"] and not report["conservation"]
    assert f"{len(notes)} were before" in (seen / "said").read_text()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
