"""The checkpoint file: the newest publication is read, whatever happens to the one before it."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from delayd.errors import DamagedData, NewerFormat
from delayd.log.checkpoint import SLOT_BYTES, CheckpointFile, read_checkpoint
from delayd.testing.disk import MemoryDisk


@pytest.fixture
def disk() -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_folder("/data")
    return disk


def published(disk: MemoryDisk, count: int) -> CheckpointFile:
    file = CheckpointFile(disk, "/data", 7)
    for number in range(1, count + 1):
        file.publish({"number": number}, 5)
    return file


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_newest_publication_is_read_also_by_the_next_writer(disk: MemoryDisk, count: int) -> None:
    published(disk, count).close()
    assert read_checkpoint(disk, "/data") == {"number": count, "log_id": 7}
    again = CheckpointFile(disk, "/data", 7)
    again.publish({"number": 9}, 5)
    assert read_checkpoint(disk.after_crash(), "/data", 7) == {"number": 9, "log_id": 7}


@pytest.mark.parametrize("count", [2, 3])
def test_a_rotten_slot_leaves_the_other_one_and_two_of_them_are_damage(disk: MemoryDisk, count: int) -> None:
    published(disk, count).close()
    newest = SLOT_BYTES * ((count - 1) % 2)
    file = disk.open("/data/checkpoint", write=True)
    file.pwritev([b"?"], newest + 70)
    assert read_checkpoint(disk, "/data") == {"number": count - 1, "log_id": 7}
    file.pwritev([b"?"], SLOT_BYTES - newest + 20)
    with pytest.raises(DamagedData, match="neither"):
        read_checkpoint(disk, "/data")


def test_publications_that_fail_half_done_leave_the_newest_slot_alone(disk: MemoryDisk) -> None:
    file = published(disk, 2)
    for _ in range(3):
        disk.faults.fail_write_at = disk.writes + 1
        with pytest.raises(OSError):
            file.publish({"number": 3}, 5)
        assert read_checkpoint(disk, "/data") == {"number": 2, "log_id": 7}


def test_a_file_of_another_directory_or_a_newer_format_is_refused_by_name(disk: MemoryDisk) -> None:
    published(disk, 1).close()
    with pytest.raises(DamagedData, match="log_id"):
        read_checkpoint(disk, "/data", 8)
    file = disk.open("/data/checkpoint", write=True)
    header = bytearray(file.pread(64, 0))
    header[8] = 2
    header[60:] = crc32c(header[:60]).to_bytes(4, "little")
    file.pwritev([header], 0)
    with pytest.raises(NewerFormat, match="version 2"):
        read_checkpoint(disk, "/data")
