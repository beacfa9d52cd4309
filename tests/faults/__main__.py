"""All faults: ``python -m tests.faults``."""

from __future__ import annotations

import logging
from itertools import combinations, product

from tests.faults.delay import Report, count_reads, damage_files, delay_files, fail_read, first_life, flip
from tests.faults.harness import FileFault, ReadFault


def main() -> None:
    """Try each fault of each read, file and value of the delay server."""
    logging.disable(logging.CRITICAL)
    remains, report = first_life(), Report()
    report.reads = len(count_reads(remains).paths)
    for at in range(report.reads):
        for read_fault in ReadFault:
            fail_read(remains, at, read_fault, report)
    for below in (False, True):
        for path in delay_files(remains):
            for file_fault in FileFault:
                damage_files(remains, {path: file_fault}, report, below=below)
        for first, second in combinations(delay_files(remains), 2):
            for faults in product(FileFault, FileFault):
                damage_files(remains, dict(zip((first, second), faults, strict=True)), report, below=below)
    for key in remains.state.all_keys():
        flip(remains, key, report)
    print(report)


if __name__ == "__main__":
    main()
