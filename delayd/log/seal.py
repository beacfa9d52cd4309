"""Seal log: one record for each sealed hour, chained by SHA-256 (docs/formats/seal.md, version 1; rule S4).

Counts and digests are over rows, so they stay true however an hour's rows lie in batches.
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch, encode
from delayd.batch.columns import DTYPES, BatchKind, ColumnId
from delayd.log.log import LogPlace
from delayd.log.segment import FileKind

SEAL = struct.Struct("<QIIQQQQQQQqqQQ32s32s32s")
SHA256_BYTES = 32
NO_SEAL = bytes(SHA256_BYTES)  # Stands in place of the predecessor's digest in the first seal.
SCHEDULE_ROW = np.dtype(
    [
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        ("subject", "<u4"),
        ("body_bytes", "<u4"),
        ("content_hash", "<u8"),
    ]
)
OUTCOME_ROW = np.dtype(
    [
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        ("claimed_at_ms", "<i8"),
        ("target_log_id", "<u8"),
        ("epoch", "<u8"),
        ("batch_id", "<u8"),
        ("target_appended_at_ms", "<i8"),
        ("target_offset", "<u8"),
        ("outcome", "u1"),
        ("reason", "u1"),
        ("attempt", "<u2"),
        ("reserved", "<u4"),
        ("content_hash", "<u8"),
    ]
)


class SealFacts(NamedTuple):
    """The facts of an hour's rows; equal whenever the rows are equal."""

    hour: int
    rows: int
    body_bytes: int
    dispatched: int
    cancelled: int
    dead: int
    expired: int
    in_doubt: int
    due_min_ms: int
    due_max_ms: int
    tally_first: int  # The tally of the rows that were handed over (docs/formats/content.md).
    tally_second: int
    schedule_sha256: bytes
    outcomes_sha256: bytes


class Seal(NamedTuple):
    """A record of the log: the facts of an hour, and the record's place in the chain."""

    log_id: int
    number: int
    facts: SealFacts
    previous_sha256: bytes

    def encode(self) -> bytes:
        """Make the 200 bytes."""
        hour, *facts = self.facts
        return SEAL.pack(self.log_id, hour, self.number, *facts, self.previous_sha256)

    @property
    def sha256(self) -> bytes:
        """The digest that the next seal names as its predecessor."""
        return hashlib.sha256(self.encode()).digest()


def seal_place(folder: str, log_id: int) -> LogPlace:
    """Where the seal log of a delay server's directory is."""
    return LogPlace(f"{folder}/seal", FileKind.SEAL, log_id)


def encode_seal(seal: Seal) -> bytes:
    """Make the SEAL batch of one seal."""
    column = np.frombuffer(seal.encode(), DTYPES[ColumnId.SEAL])
    return encode(BatchKind.SEAL, None, 1, [(ColumnId.SEAL, column)], [b""])


def decode_seals(batch: Batch) -> list[Seal]:
    """Read the seals of a verified SEAL batch."""
    start = batch.offsets[ColumnId.SEAL]
    rows = SEAL.iter_unpack(batch.buffer[start : start + SEAL.size * batch.count])
    return [Seal(log_id, number, SealFacts(hour, *facts), previous) for log_id, hour, number, *facts, previous in rows]


class SealMark(NamedTuple):
    """A place in the chain: offset and checksum of the log there, how many seals are before it, and the digest of the
    last one.
    """

    offset: int = 0
    crc32c: int = 0
    seals: int = 0
    sha256: bytes = NO_SEAL
