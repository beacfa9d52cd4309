"""Hour table: what of each hour's schedule log is valid, by the last checkpoint (docs/formats/checkpoint.md)."""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from delayd.log.schedule import DEAD, HOUR_ROW, REMOVED, SEALED, decode_hours

PREFIX = b"hour/"
OUTCOME_PREFIX = b"outcomes/"
OUTCOME_ROW = struct.Struct("<QQ")


class HourFile(NamedTuple):
    """One schedule log: bytes of groups that are valid, rows in them, checksum of the last group, flags."""

    length: int = 0
    rows: int = 0
    last_crc32c: int = 0
    flags: int = 0

    @property
    def sealed(self) -> bool:
        """Whether each of its rows has exactly one outcome and no more will come (rule S1)."""
        return bool(self.flags & SEALED)

    @property
    def dead(self) -> bool:
        """Whether a sealed hour has rows that are DEAD."""
        return bool(self.flags & DEAD)

    @property
    def removed(self) -> bool:
        """Whether its files are being removed, or are gone."""
        return bool(self.flags & REMOVED)

    def with_flags(self, flags: int) -> "HourFile":
        """The same with more flags."""
        return self._replace(flags=self.flags | flags)


class OutcomeEnd(NamedTuple):
    """One dispatch log: bytes of groups that are durable, and rows in them. A cache: no decision rests on it (P2).

    What does not check below ``length`` is damage, though it be the last group of the file (rule L5).
    """

    length: int = 0
    rows: int = 0


class HourTable:
    """Hours by number; changed on the loop only, when a checkpoint or a seal is durable."""

    def __init__(self, files: dict[int, HourFile] | None = None) -> None:
        self.files = files or {}

    def get(self, hour: int) -> HourFile:
        """The hour's file; an empty one when nothing was written yet."""
        return self.files.get(hour, NOTHING)

    def unsealed(self, until: int) -> list[int]:
        """Hours up to ``until`` that are not sealed, rising."""
        return sorted(hour for hour, file in self.files.items() if hour <= until and not file.sealed)

    def encode(self) -> bytes:
        """Make the table that the checkpoint file publishes."""
        table = np.zeros(len(self.files), HOUR_ROW)
        for index, hour in enumerate(sorted(self.files)):
            file = self.files[hour]
            table[index] = (hour, file.last_crc32c, file.length, file.rows, file.flags)
        return table.tobytes()


NOTHING = HourFile()


def hour_put(hour: int, file: HourFile) -> tuple[bytes, bytes]:
    """The LMDB row of an hour."""
    row = np.zeros(1, HOUR_ROW)
    row[0] = (hour, file.last_crc32c, file.length, file.rows, file.flags)
    return hour_key(hour), row.tobytes()


def hour_key(hour: int) -> bytes:
    """The LMDB key of an hour."""
    return PREFIX + hour.to_bytes(4)


def load_hours(pairs: Iterable[tuple[bytes, bytes]]) -> HourTable:
    """Take over the rows of the last checkpoint."""
    table = HourTable()
    for _, value in pairs:
        hour, crc, length, rows, flags = decode_hours(value)[0].tolist()
        table.files[hour] = HourFile(length, rows, crc, flags)
    return table


def outcome_put(hour: int, end: OutcomeEnd) -> tuple[bytes, bytes]:
    """The LMDB row of an hour's dispatch log."""
    return outcome_key(hour), OUTCOME_ROW.pack(*end)


def outcome_key(hour: int) -> bytes:
    """The LMDB key of an hour's dispatch log."""
    return OUTCOME_PREFIX + hour.to_bytes(4)


def load_outcome_ends(pairs: Iterable[tuple[bytes, bytes]]) -> dict[int, OutcomeEnd]:
    """Take over what the last checkpoint knew of the dispatch logs, by hour."""
    first = len(OUTCOME_PREFIX)
    return {int.from_bytes(key[first:]): OutcomeEnd(*OUTCOME_ROW.unpack(value)) for key, value in pairs}
