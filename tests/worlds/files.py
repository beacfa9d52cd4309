"""What a delay server's files say, read as they are, apart from its memory; AssertionError where they can't be true."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import numpy as np

from delayd.batch.columns import ColumnId
from delayd.errors import DamagedData
from delayd.hours import hour_start_ms
from delayd.log.hour import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, open_segment
from delayd.machine.disk import Disk
from delayd.outcome import Outcome
from delayd.reading.seals import verify_seals
from delayd.testing.disk import Faults, MemoryDisk
from tests.worlds.delay_adapter import (
    HourFile,
    HourTable,
    Stored,
    list_dispatch_logs,
    read_outcomes,
    scan_schedule_log,
)

DATA = "/data"
FOLDER = "/data/delay"


def deleted_rows(disk: MemoryDisk, hours: HourTable) -> dict[int, int]:
    """Rows by hour, as its seal has it, of hours whose files retention has begun to remove, or has removed."""
    with _undisturbed(disk):
        seals = verify_seals(DATA, disk=disk).seals
    return {
        each.hour: each.seal.facts.rows
        for each in seals
        if each.seal is not None
        and (each.hour not in hours or hours.get(each.hour).removed)
        and not disk.exists(schedule_path(FOLDER, each.hour))
    }


@contextmanager
def _undisturbed(disk: MemoryDisk) -> Iterator[None]:
    """Leave no trace of a reader: planned faults wait for the server, and the reader's operations are not counted."""
    faults, operations, syncs = disk.faults, len(disk.operations), disk.syncs
    disk.faults = Faults()
    yield
    disk.faults, disk.syncs = faults, syncs
    del disk.operations[operations:]


def told_outcomes(disk: Disk, log_id: int) -> dict[int, tuple[int, int, int, int]]:
    """By sequence: hour, target, offset there and batch id, as the dispatch logs have it of rows that were handed over;
    each row has one outcome.
    """
    return _told(disk, log_id)[0]


def cancelled_outcomes(disk: Disk, log_id: int) -> dict[int, int]:
    """By sequence: the hour of each row that the dispatch logs call CANCELLED."""
    return _told(disk, log_id)[1]


def _told(disk: Disk, log_id: int) -> tuple[dict[int, tuple[int, int, int, int]], dict[int, int]]:
    found: dict[int, tuple[int, int, int, int]] = {}
    cancelled: dict[int, int] = {}
    for hour, path in list_dispatch_logs(disk, FOLDER):
        segment = open_segment(disk, path, FileKind.DISPATCH, log_id, write=False)
        rows = read_outcomes(segment)
        # As lists, for each look at a field of a numpy row takes longer than all else here.
        fields = [
            rows.parts[name].tolist() for name in ("outcome", "reason", "target_log_id", "target_offset", "batch_id")
        ]
        parts = list(zip(*fields, strict=True))
        for sequence, part_of in zip(rows.sequences.tolist(), rows.part_of.tolist(), strict=True):
            outcome, reason, target_log_id, target_offset, batch_id = parts[part_of]
            assert sequence not in found and sequence not in cancelled, f"sequence {sequence} has two outcomes"
            if outcome == Outcome.CANCELLED and reason:
                cancelled[sequence] = hour
                continue
            assert outcome == Outcome.DISPATCHED, f"sequence {sequence} is {Outcome(outcome).name}"
            found[sequence] = (hour, target_log_id, target_offset, batch_id)
    return found, cancelled


def filed_rows(disk: Disk, log_id: int, hours: HourTable, deleted: Container[int]) -> dict[int, int]:
    """By sequence: the hour whose schedule log has it, as far as the checkpoint counts; each once."""
    found: dict[int, int] = {}
    for hour in hours.rows["hour"].tolist():
        if hour in deleted:
            continue
        stored, damage = read_schedule_log(disk, FOLDER, log_id, hour, hours.get(hour))
        assert damage is None, str(damage)
        in_order: dict[int, list[tuple[int, int]]] = {}
        for entry in stored:
            sequences = entry.batch.uint64s(ColumnId.SEQUENCE).tolist()
            due_ms = np.maximum(entry.batch.int64s(ColumnId.DELIVER_AT_MS), hour_start_ms(hour)).tolist()
            in_order.setdefault(entry.batch.schedule.source_end, []).extend(zip(due_ms, sequences, strict=True))
            for sequence in sequences:
                assert sequence not in found, f"sequence {sequence} is filed twice"
                found[sequence] = hour
        for rows in in_order.values():
            assert rows == sorted(rows), "what one checkpoint files of an hour rises by due instant and sequence"
    return found


def read_schedule_log(
    disk: Disk, folder: str, log_id: int, hour: int, file: HourFile
) -> tuple[list[Stored], DamagedData | None]:
    """Read the batches that the checkpoint counts, and what stopped the reading early, if anything did."""
    stored: list[Stored] = []
    try:
        for entry in scan_schedule_log(disk, folder, log_id, hour, file):
            stored.append(entry)
    except DamagedData as damage:
        # What is wrong with the file as a whole is said at its first group: then no batch of it counts.
        return [] if damage.position <= FILE_HEADER_BYTES else stored, damage
    return stored, None
