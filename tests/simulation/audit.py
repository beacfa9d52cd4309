"""The audit of a simulated cluster's files: no honest directory, and no archive of one, has a finding (rules S5, S7).

Invariant: the files are copied as a kill of all servers leaves them, so an audit changes nothing of a run.

``python -m tests.simulation.audit --directories 200`` audits as many directories, photographed at random moments of
runs: after kills, power losses, clock steps, retention, damage that was mended, with targets that are away or full.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

from delayd.errors import DamagedData
from delayd.machine.disk import Disk, RealDisk
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.findings import FindingKind
from delayd.reading.verify import verify_directory
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import Folder
from tests.simulation.cluster import HOUR_MS, Cluster
from tests.simulation.run import Run
from tests.unit.cli.runner import run as run_command
from tests.worlds.delay import FOLDER, small_slots

BOOKS = "/books"
PHOTOGRAPHED = 0.03  # This share of the steps of a run is photographed.
HOURS_AFTER = 4  # Pass when a run has ended, each with its seals and what retention removes then.
SEEDS_A_CHUNK = 5
SHOWN = 3  # Findings of a directory.


class Photographed(NamedTuple):
    """A directory at some moment of a run, as it was audited."""

    moment: str
    scheduled: int
    hours: int
    sealed: int
    waiting: int
    deleted_rows: int
    archived: int  # Hours of its archive.
    wrong: tuple[str, ...]


class AuditedRun(Run):
    """A run whose directories are audited at random moments, and for some hours after its end."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.directories: list[Photographed] = []
        self._moments = Random(seed)  # Apart, so that the run is the one that its seed names.

    def _step(self, number: int) -> None:
        super()._step(number)
        if self._moments.random() < PHOTOGRAPHED:
            self._photograph(f"step {number}")

    def _epilogue(self) -> None:
        """Hours pass instead; what an operator says for good may cost messages, which an audit names."""
        cluster = self.cluster
        for hour in range(HOURS_AFTER):
            self._photograph(f"the end and {hour} hours")
            self._steps.send()
            cluster.calm(5_000)
            cluster.machine.advance(HOUR_MS)
            # A seal, a mark and a removal each need a sweep, and a mark is published before files go.
            for _ in range(3):
                self._steps.checkpoint_delay()
                cluster.calm(1_000)
                cluster.world.sweep()
                cluster.calm(1_000)
                for side in cluster.sides:
                    side.retain()
                cluster.calm(1_000)

    def _photograph(self, moment: str) -> None:
        self.directories.append(photograph(self.cluster, f"seed {self.seed}, {moment}"))


def photograph(cluster: Cluster, moment: str) -> Photographed:
    """Audit the directories of all servers, and read every byte of them."""
    disk = directories_of(cluster)
    try:
        report = _audit(disk, cluster)
    except DamagedData as damage:
        return Photographed(moment, 0, 0, 0, 0, 0, 0, (f"damage: {damage}",))
    wrong = [
        f"{finding.kind.name} hour {finding.hour} sequence {finding.sequence}: {finding.detail}"
        for finding in report.findings
        if finding.kind is not FindingKind.LATE
    ]
    wrong += [f"a broken seal: {seal}" for seal in report.broken_seals]
    wrong += [f"damage: {file}" for file in verify_directory(BOOKS, disk=disk).damaged]
    archived, told = audit_of_archive(disk, cluster.machine.wall_ms)
    wrong += told
    total = report.total
    figures = total.scheduled, len(report.hours), len(report.seals), total.waiting, report.deleted_rows, archived
    return Photographed(moment, *figures, tuple(wrong))


def audit_of_archive(disk: MemoryDisk, now_ms: int) -> tuple[int, list[str]]:
    """Archive a directory, and audit the archive, alone and beside the directory: its hours, and what is wrong."""
    # Commands look at the clock of this machine, and the one of the simulation is months ahead.
    with TemporaryDirectory() as folder, patch.object(time, "time_ns", lambda: now_ms * 1_000_000):
        data, archive = f"{folder}/data", f"{folder}/archive"
        copy_tree(disk, BOOKS, RealDisk(), data)
        ran = run_command("archive", "--data", data, "--to", archive)
        if ran.code:
            return 0, [f"not archived: {ran.out}{ran.err}"]
        if not any(Path(archive).glob("notes/**/*.json")):
            return 0, []  # No hour is sealed.
        wrong, hours = list[str](), 0
        for places in ((data, archive), (archive,)):
            ran = run_command("audit", *places, "--format", "json", "--findings", "1000")
            if not ran.out:
                return 0, [f"not audited: {ran.err}"]
            said = json.loads(ran.out)
            kinds = [f"{each['finding']} {each['detail']}" for each in said["findings"] if each["finding"] != "LATE"]
            wrong += [f"the archive{' and the directory' * (len(places) - 1)}: {each}" for each in kinds]
            wrong += [f"the archive: a broken seal: {each['differs']}" for each in said["broken_seals"]]
            hours = len(said["hours"])
        return hours, wrong


def audit_cluster(cluster: Cluster) -> AuditReport:
    """Audit the directories of all servers."""
    return _audit(directories_of(cluster), cluster)


def _audit(disk: MemoryDisk, cluster: Cluster) -> AuditReport:
    return audit_directory(BOOKS, now_ms=cluster.machine.wall_ms, disk=disk)


def directories_of(cluster: Cluster) -> MemoryDisk:
    """A copy of all directories at this moment; what was damaged on purpose is as it was written."""
    disk = MemoryDisk()
    own = cluster.world.disk if cluster.delay_up else cluster.remains.disk
    with ExitStack() as mended:
        mended.enter_context(cluster.delay_damages.as_written(own))
        copy_tree(own.after_kill(), FOLDER, disk, f"{BOOKS}/delay")
        for number, side in enumerate(cluster.sides):
            mended.enter_context(side.damages.as_written(side.disk))
            copy_tree(side.disk.after_kill(), side.config.folder, disk, f"{BOOKS}/realtime-{number}")
    return disk


def copy_tree(source: MemoryDisk, folder: str, target: Disk, place: str) -> None:
    """Copy a folder and all that is in it."""
    target.make_folder(place)
    for name in source.list_folder(folder):
        if isinstance(source._find(f"{folder}/{name}"), Folder):
            copy_tree(source, f"{folder}/{name}", target, f"{place}/{name}")
            continue
        read, written = source.open(f"{folder}/{name}"), target.open(f"{place}/{name}", write=True, create=True)
        written.pwritev([read.pread(read.size(), 0)], 0)
        written.sync()
        read.close()
        written.close()


def audited(seeds: range) -> tuple[list[Photographed], Counter[str]]:
    """The directories of some runs, and how often each kind of step was taken."""
    found: list[Photographed] = []
    taken: Counter[str] = Counter()
    with small_slots():
        for seed in seeds:
            run = AuditedRun(seed)
            taken += run.run()
            found += run.directories
    return found, taken


def main() -> int:
    """Audit as many directories as the arguments say; 1 when one has a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.audit", description=__doc__.split("\n")[0])
    parser.add_argument("--directories", type=int, default=200, help="how many (200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    arguments = parser.parse_args()
    begun = time.monotonic()
    directories: list[Photographed] = []
    taken: Counter[str] = Counter()
    for found, kinds in _chunks(arguments.first, arguments.jobs):
        for each in found:
            if each.wrong:
                print(f"{each.moment}: {len(each.wrong)} findings", *each.wrong[:SHOWN], sep="\n  ", flush=True)
        directories += found
        taken += kinds
        if len(directories) >= arguments.directories:
            break
    wrong = sum(bool(each.wrong) for each in directories)
    print(", ".join(f"{kind} {number:,}" for kind, number in taken.most_common()))
    print(
        f"{len(directories)} directories, {wrong} with a finding: {sum(each.scheduled for each in directories):,} "
        f"messages, {sum(each.hours for each in directories):,} hours, {sum(each.sealed for each in directories):,} "
        f"seals, {sum(each.waiting for each in directories):,} waiting, "
        f"{sum(each.archived for each in directories):,} hours archived, "
        f"{sum(each.deleted_rows for each in directories):,} rows of deleted hours; {time.monotonic() - begun:.0f} s"
    )
    return int(bool(wrong))


def _chunks(first: int, jobs: int) -> Iterator[tuple[list[Photographed], Counter[str]]]:
    """Runs without end, some at a time."""
    ranges = (range(start, start + SEEDS_A_CHUNK) for start in count(first, SEEDS_A_CHUNK))
    with ProcessPoolExecutor(jobs, initializer=partial(logging.disable, logging.CRITICAL)) as pool:
        while True:
            yield from pool.map(audited, [next(ranges) for _ in range(jobs)])


if __name__ == "__main__":
    sys.exit(main())
