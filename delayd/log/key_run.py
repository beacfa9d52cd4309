"""Key run: a file of the index of keys, and what the state says of all of them (docs/formats/keys.md, version 1).

Invariant: every byte that is used has been checked in the same reading; a byte that does not check, or can't be read,
is damage with path and position.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgpack
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.columns import Int64s, padded
from delayd.errors import DamagedData
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, UnfinishedFile, read_file_header
from delayd.machine.disk import NamedReads

FOLDER = "keys"
# [seed, next_number, [[number, entries, total_bytes, tables_crc32c], …], whole]: the runs of the index of keys that
# count, oldest first. When `whole` is false, the index must be made again.
STATE_KEY = b"keys"
HEADER = struct.Struct("<QQQQIII16xI")
HEADER_AT = FILE_HEADER_BYTES
HEADER_BYTES = 64
BLOCKS_AT = HEADER_AT + HEADER_BYTES
BLOCK_ENTRIES = 64  # One look-up of a known name reads one block: about 3 KB.

Halves = NDArray[np.uint32]


class RunName(NamedTuple):
    """What the state says of a run: which file it is, and what the file must be."""

    number: int
    entries: int
    total_bytes: int
    tables_crc32c: int


class KnownRuns(NamedTuple):
    """What the state says of the index: the seed of its hashes, and the runs that count, oldest first.

    When it is not ``whole``, the index must be made again.
    """

    seed: int
    next_number: int
    runs: tuple[RunName, ...] = ()
    whole: bool = True

    def encode(self) -> bytes:
        """As the state keeps it."""
        data: bytes = msgpack.packb([self.seed, self.next_number, [list(run) for run in self.runs], self.whole])
        return data

    @classmethod
    def decode(cls, data: bytes) -> KnownRuns:
        """Read what `encode` made; the state has checked the bytes."""
        seed, next_number, runs, whole = msgpack.unpackb(data)
        return cls(seed, next_number, tuple(RunName(*run) for run in runs), whole)


class RunHeader(NamedTuple):
    """The facts of a run: behind the file header."""

    entries: int
    seed: int
    tables_at: int
    total_bytes: int
    buckets: int
    blocks: int
    tables_crc32c: int

    def encode(self) -> bytes:
        """Make the 64 bytes."""
        data = HEADER.pack(*self, 0)[:-4]
        return data + crc32c(data).to_bytes(4, "little")

    def name(self, number: int) -> RunName:
        """What the state says of this run."""
        return RunName(number, self.entries, self.total_bytes, self.tables_crc32c)


class Tables(NamedTuple):
    """What a run keeps in memory."""

    first: Halves  # By bucket: its first entry; one more is the end.
    fingerprints: NDArray[np.uint16]
    starts: Int64s  # By block: its position in the file; one more is the end.
    crcs: Halves  # By block.

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return sum(part.nbytes for part in self)


class RunFile(NamedTuple):
    """An open file of a run, whose headers and tables check."""

    path: str
    file: NamedReads
    number: int
    header: RunHeader
    tables: Tables

    @property
    def name(self) -> RunName:
        """What the state says of it, if it counts."""
        return self.header.name(self.number)

    def entries_in(self, block: int) -> int:
        """How many entries a block has."""
        return min(BLOCK_ENTRIES, self.header.entries - block * BLOCK_ENTRIES)

    def block(self, number: int) -> bytes:
        """Read a block.

        Raises:
            DamagedData: it does not check or can't be read. Shortage: this process can't read now.
        """
        position, end = self.tables.starts[number : number + 2].tolist()
        data = self.file.pread(end - position, position)
        if len(data) != end - position:
            raise DamagedData(self.path, position, f"the file ends {end - position - len(data)} bytes early")
        if crc32c(data) != self.tables.crcs[number]:
            raise DamagedData(self.path, position, "the checksum of a block of keys differs")
        return data


def run_path(folder: str, number: int) -> str:
    """Name the file of a run; ``folder`` is the server's."""
    return f"{folder}/{FOLDER}/{number:020}.log"


def read_run_file(path: str, file: NamedReads, log_id: int | None) -> RunFile:
    """Read the headers and tables of a file that is open.

    Raises:
        UnfinishedFile: its writing did not finish.
        DamagedData: it is another file, or does not check. Shortage: this process can't read now.
    """
    data = file.pread(BLOCKS_AT, 0)
    if not any(data[:FILE_HEADER_BYTES]):
        raise UnfinishedFile(path)
    found = read_file_header(path, data[:FILE_HEADER_BYTES], FileKind.KEYS, log_id)
    header = _read_header(path, data[HEADER_AT:])
    if file.size() != header.total_bytes:
        raise DamagedData(path, file.size(), f"it has {file.size()} bytes, and {header.total_bytes} belong there")
    return RunFile(path, file, found.number, header, _read_tables(path, file, header))


def _read_header(path: str, data: bytes) -> RunHeader:
    if len(data) != HEADER_BYTES or crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise DamagedData(path, HEADER_AT, "the checksum of the header of a run of keys differs")
    return RunHeader(*HEADER.unpack(data)[:-1])


def _read_tables(path: str, file: NamedReads, header: RunHeader) -> Tables:
    data = file.pread(header.total_bytes - header.tables_at, header.tables_at)
    sizes = [4 * (header.buckets + 1), 2 * header.entries, 4 * header.blocks, 4 * header.blocks]
    if len(data) != sum(map(padded, sizes)) or crc32c(data) != header.tables_crc32c:
        raise DamagedData(path, header.tables_at, "the checksum of the tables of a run of keys differs")
    at = [0]
    for size in sizes:
        at.append(at[-1] + padded(size))
    first = np.frombuffer(data, np.uint32, header.buckets + 1, at[0]).copy()
    fingerprints = np.frombuffer(data, np.uint16, header.entries, at[1]).copy()
    starts = np.zeros(header.blocks + 1, np.int64)
    np.cumsum(np.frombuffer(data, np.uint32, header.blocks, at[2]), out=starts[1:])
    starts += BLOCKS_AT
    return Tables(first, fingerprints, starts, np.frombuffer(data, np.uint32, header.blocks, at[3]).copy())
