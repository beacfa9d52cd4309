"""All faults: ``python -m tests.faults``."""

from __future__ import annotations

import logging

from tests.faults.delay import Report, count_reads, damage_file, delay_files, fail_read, first_life, flip
from tests.faults.harness import FileFault, ReadFault


def main() -> None:
    """Try each fault of each read, file and value of the delay server."""
    logging.disable(logging.CRITICAL)
    remains, report = first_life(), Report()
    report.reads = len(count_reads(remains).paths)
    for at in range(report.reads):
        for read_fault in ReadFault:
            fail_read(remains, at, read_fault, report)
    for path in delay_files(remains):
        for file_fault in FileFault:
            damage_file(remains, path, file_fault, report)
        damage_file(remains, path, FileFault.MISSING, report, live_first=True)
    for key in remains.state.all_keys():
        flip(remains, key, report)
    print(report)


if __name__ == "__main__":
    main()
