"""Spark on many directories and archives: what it says otherwise than numpy of each.

Invariant: one session and one job for all of them, or the start of each would take longer than the audits.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delayd.errors import BadArgument, DamagedData, DelaydError
from delayd.machine.disk import RealDisk
from delayd.reading.books import AuditReport
from delayd.reading.files.stored_groups import LogMoved
from delayd.reading.files.target_index import Chunk, LogPiece, scan_piece, split_piece
from delayd.reading.fleet import Fleet, plan_fleet
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import Folder
from spark.audit import audit_frame, parts_of, report_of
from tests.simulation.audit import BOOKS
from tests.three_audits import report_differences

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTS = (
    2  # Parts of each directory: with two, the plan must also bring a task what it needs to know of the other hours.
)
TASKS = 8  # A task costs 60 to 75 ms, and an audit of such a directory less.


@dataclass(frozen=True)
class Compared:
    """What Spark says otherwise, by directory; and how many directories numpy calls sound, unsound and unreadable."""

    differences: Mapping[str, list[str]]
    verdicts: Counter[str]


def compare_in_spark(session: SparkSession, folders: Mapping[str, str], now_ms: int) -> Compared:
    """Audit directories or archives, given by name and path, with numpy and in Spark."""
    fleets: dict[str, Fleet] = {}
    expected: dict[str, AuditReport | str] = {}
    verdicts = Counter[str]()
    for name, data in folders.items():
        try:
            here = plan_fleet(RealDisk(), (data,), now_ms=now_ms)
            fleets[name] = plan_fleet(RealDisk(), (data,), now_ms=now_ms, scan=_scan)
        except (BadArgument, DamagedData, LogMoved):
            verdicts["unreadable"] += 1
            continue  # Spark's driver makes the plan by the same code, so both end with the same words.
        expected[name] = _said(here.audit)
    owners = [(name, part) for name, fleet in fleets.items() for part in parts_of(fleet, PARTS)]
    rows = defaultdict[str, list[dict[str, Any]]](list)
    for row in audit_frame(session, [part for _, part in owners], None, TASKS).toArrow().to_pylist():
        rows[owners[row["part"]][0]].append(row)
    differences: dict[str, list[str]] = {}
    for name, fleet in fleets.items():
        ours, theirs = expected[name], _said(partial(report_of, rows[name], fleet, None))
        if isinstance(ours, AuditReport):
            verdicts["sound" if ours.balanced else "unsound"] += 1
        else:
            verdicts["unreadable"] += 1
        if ours != theirs:
            if isinstance(ours, AuditReport) and isinstance(theirs, AuditReport):
                differences[name] = report_differences(ours, theirs)
            else:
                differences[name] = [f"numpy says {ours}", f"Spark says {theirs}"]
    return Compared(differences, verdicts)


def write_tree(disk: MemoryDisk, path: Path, folder: str = BOOKS) -> str:
    """Write a folder of a fake disk to the real one; its path."""
    path.mkdir(parents=True)
    for name in disk.list_folder(folder):
        if isinstance(disk._find(f"{folder}/{name}"), Folder):
            write_tree(disk, path / name, f"{folder}/{name}")
            continue
        file = disk.open(f"{folder}/{name}")
        (path / name).write_bytes(file.pread(file.size(), 0))
        file.close()
    return str(path)


def _scan(pieces: Sequence[LogPiece]) -> Iterator[Chunk]:
    """What tasks find, each in one segment; a job for each of so many directories would take long."""
    for piece in pieces:
        for part in split_piece(RealDisk(), piece, 1):
            yield from (pickle.loads(pickle.dumps(chunk)) for chunk in scan_piece(RealDisk(), part))


def _said(audit: Callable[[], AuditReport]) -> AuditReport | str:
    """A report, or the words that an audit ends with."""
    try:
        return audit()
    except DelaydError as error:
        return error.message
    except LogMoved as moved:
        return str(moved)
