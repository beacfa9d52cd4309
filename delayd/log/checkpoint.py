"""Checkpoint file: a server publishes its checkpoint in it for readers in other processes (docs/formats/checkpoint.md,
version 1).

Two slots are written in turn, so from the second publication on one durable slot is there at every instant.
"""

import logging
import struct
from contextlib import closing
from typing import NamedTuple, cast

import msgpack
from crc32c import crc32c

from delayd.errors import DamagedData, DataError, NewerFormat
from delayd.log.segment import FileKind
from delayd.machine.clock import ClockGap
from delayd.machine.disk import Disk, File, open_named

MAGIC = b"delaydcp"
VERSION = 1
HEADER = struct.Struct("<8sHHIQQq16xII")
SLOT_BYTES = 4 << 20  # The hour table of all 17,568 hours needs 562 KB.
PAYLOAD_BYTES_MAX = SLOT_BYTES - HEADER.size
NAME = "checkpoint"

log = logging.getLogger(__name__)

Value = int | str | bytes | list["Value"] | None
Payload = dict[str, Value]


class CheckpointFile:
    """The writer of one directory's checkpoint file; opening it makes the newest slot durable (rule L1)."""

    def __init__(self, disk: Disk, folder: str, log_id: int) -> None:
        self._disk = disk
        self._folder = folder
        self._log_id = log_id
        self._file: File | None = None
        self._generation = 0
        try:
            self._file = self._open()
        except DataError as error:
            # The file repeats values of the state: the next publication opens it again.
            log.warning("checkpoint_file_rebuilt reason=%r", str(error))

    def _open(self) -> File:
        path = f"{self._folder}/{NAME}"
        file = open_named(self._disk, path, write=True, create=not self._disk.exists(path))
        try:
            try:
                found = _newest(path, file, self._log_id)
            except DamagedData as error:
                log.warning("checkpoint_file_rebuilt reason=%r", str(error))
                found = None
                # The damaged slot may become readable later. A reader that skipped it now would take the older slot, so
                # the file is emptied.
                file.truncate(0)
            if found:
                # A writer that died may have left the slot unsynced, and the next publication overwrites the other
                # slot.
                file.pwritev([file.pread(found.size_bytes, found.position)], found.position)
            file.sync()
            self._disk.sync_folder(self._folder)
        except BaseException:
            file.close()
            raise
        self._generation = found.generation if found else 0
        return file

    def publish(self, payload: Payload, now_ms: int) -> None:
        """Write the older slot and fsync it; after a DiskFull or OSError the newest slot is still the same one."""
        if self._file is None:
            self._file = self._open()
        data = cast(bytes, msgpack.packb(payload))
        if len(data) > PAYLOAD_BYTES_MAX:
            raise AssertionError(f"a checkpoint of {len(data)} bytes does not fit its slot")
        generation = self._generation + 1
        fields = (VERSION, FileKind.CHECKPOINT, len(data), self._log_id, generation, now_ms, crc32c(data))
        checked = HEADER.pack(MAGIC, *fields, 0)[:-4]
        slot = checked + crc32c(checked).to_bytes(4, "little") + data
        # The first generation goes to the first slot, so a file that reaches the second one has a valid slot.
        self._file.pwritev([slot], SLOT_BYTES * ((generation - 1) % 2))
        self._file.sync()
        self._generation = generation

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_checkpoint(disk: Disk, folder: str, log_id: int | None = None) -> Payload | None:
    """Read the newest valid checkpoint of a directory; None when none was published yet.

    Raises:
        DamagedData: both slots were written and neither checks.
        NewerFormat: it was written by a newer delayd.
    """
    path = f"{folder}/{NAME}"
    return read_checkpoint_file(disk, path, log_id) if disk.exists(path) else None


def gaps_of(payload: Payload) -> tuple[ClockGap, ...]:
    """When its server stood still, or doubted its clock; none in a file of an earlier delayd."""
    listed = payload.get("gaps")
    found = [gap for gap in listed if isinstance(gap, list) and len(gap) == 3] if isinstance(listed, list) else []
    return tuple(ClockGap(str(what), int(str(from_ms)), int(str(until_ms))) for what, from_ms, until_ms in found)


def read_gaps(disk: Disk, folder: str, log_id: int) -> tuple[int, tuple[ClockGap, ...]]:
    """Those in the newest checkpoint of a directory, and the byte at which it begins; (0, ()) when there is none."""
    path = f"{folder}/{NAME}"
    if not disk.exists(path):
        return 0, ()
    with closing(open_named(disk, path)) as file:
        found = _newest(path, file, log_id)
    return (0, ()) if found is None else (found.position + HEADER.size, gaps_of(found.payload))


def read_checkpoint_file(disk: Disk, path: str, log_id: int | None = None) -> Payload | None:
    """As `read_checkpoint`, for a file that is known to exist, under any name."""
    with closing(open_named(disk, path)) as file:
        found = _newest(path, file, log_id)
    return found.payload if found else None


class _Slot(NamedTuple):
    generation: int
    position: int
    size_bytes: int
    payload: Payload


def _newest(path: str, file: File, log_id: int | None) -> _Slot | None:
    slots = [_read_slot(path, file, position, log_id) for position in (0, SLOT_BYTES)]
    valid = [slot for slot in slots if slot is not None]
    if not valid and file.size() > SLOT_BYTES:
        raise DamagedData(path, 0, "neither of its two slots checks")
    return max(valid, key=lambda slot: slot.generation, default=None)


def _read_slot(path: str, file: File, position: int, log_id: int | None) -> _Slot | None:
    header = file.pread(HEADER.size, position)
    if len(header) < HEADER.size:
        return None
    magic, version, _, payload_bytes, found, generation, _, payload_crc32c, header_crc32c = HEADER.unpack(header)
    if magic != MAGIC or crc32c(header[:-4]) != header_crc32c:
        return None
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    if log_id is not None and found != log_id:
        raise DamagedData(path, position, f"it belongs to the directory with log_id {found:016x}")
    data = file.pread(min(payload_bytes, PAYLOAD_BYTES_MAX), position + HEADER.size)
    if len(data) != payload_bytes or crc32c(data) != payload_crc32c:
        return None
    payload = cast(Payload, msgpack.unpackb(data))
    payload["log_id"] = found
    return _Slot(generation, position, HEADER.size + payload_bytes, payload)
