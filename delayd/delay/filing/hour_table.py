"""Hour table: how much of each hour's schedule log is valid, by the last checkpoint (docs/formats/checkpoint.md), and
what an operator has said of an hour's damaged log, until a start has done it.
"""

import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.batch.sequences import NO_SEQUENCES, Sequences
from delayd.log.hour import DEAD, HOUR_ROW, REMOVED, SEALED, HourRows, decode_hours, schedule_beside_path, schedule_path

PREFIX = b"hour/"  # `<u32 hour>` Its 32 bytes, as in the checkpoint file.
# `<u32 hour>` The same of the file beside a damaged schedule log (docs/formats/schedule.md).
BESIDE_PREFIX = b"beside/"
# `<u32 hour>` u64 length · u64 rows · u64 dead, little-endian: how much of the hour's dispatch log was durable at the
# last checkpoint (rule L5), and how many of its rows are DEAD.
OUTCOME_PREFIX = b"outcomes/"
# `<u32 hour>` [at_ms, done]: when an operator gave the hour's dispatch log up, and whether each row that it may have
# named is IN_DOUBT, durably; gone with the hour. Until that is done also `below, pending`: rows of the hour with lower
# sequences are in doubt if they have no outcome and are not pending. `pending` (bin): rising u64 sequences, each less
# the one before, zlib.
GIVEN_UP_PREFIX = b"given_up/"
# `<u32 hour>` at_ms: when an operator gave the hour's schedule log up; gone when a start has done that.
SALVAGE_PREFIX = b"salvage/"
SEQUENCE_MAX = (1 << 64) - 1
OUTCOME_ROW = struct.Struct("<QQQ")
ROOM_MIN = 64  # A table grows by at least this many rows.
OPAQUE_ROW = np.dtype((np.void, HOUR_ROW.itemsize))  # Numpy copies opaque items as bytes (see rows.py).


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
    """One dispatch log: bytes of groups that are durable, rows in them, and how many of these are DEAD. A cache: no
    decision rests on it (P2).

    Bytes below ``length`` that do not check are damage, even in the last group of the file (rule L5).
    """

    length: int = 0
    rows: int = 0
    dead: int = 0


NOTHING = HourFile()
NO_HOURS = np.zeros(0, HOUR_ROW)


class HourTable:
    """Hours by number; changed on the loop only, when a checkpoint or a seal is durable.

    ``rows`` is HOUR_ROW[n] by rising hour. Adding or removing hours replaces this array and does not change the old
    one. So the worker thread, which takes the array once, has a complete table.
    """

    def __init__(self, rows: HourRows = NO_HOURS) -> None:
        self.rows = rows
        self._room = rows  # ``rows`` is the front of this array; hours that come in order fit behind it without a copy.

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, hour: int) -> bool:
        return _place(self.rows, hour) is not None

    def get(self, hour: int) -> HourFile:
        """The hour's file; an empty one when nothing was written yet."""
        rows = self.rows
        place = _place(rows, hour)
        if place is None:
            return NOTHING
        _, crc, length, count, flags = rows[place].item()
        return HourFile(length, count, crc, flags)

    def set(self, hour: int, file: HourFile) -> None:
        """Take over one hour: this costs little when the hour is known, or later than all others."""
        row, count, place = _pack(hour, file), len(self.rows), _place(self.rows, hour)
        if place is not None:
            self.rows[place] = row[0]
        elif count and hour < self.rows["hour"][-1]:
            self.update(row)
        else:
            if count == len(self._room):
                self._room = np.zeros(max(ROOM_MIN, 2 * count), HOUR_ROW)
                self._room[:count] = self.rows
            self._room[count] = row[0]
            self.rows = self._room[: count + 1]

    def update(self, rows: HourRows) -> None:
        """Take over hours: HOUR_ROW[n], by rising hour."""
        self.rows = self._room = merge_hours(self.rows, rows)

    def remove(self, hours: list[int]) -> None:
        """Forget hours."""
        self.rows = self._room = self.rows.take(np.flatnonzero(~np.isin(self.rows["hour"], hours)))

    def within(self, hours: range) -> list[int]:
        """Those of these neighbouring hours that are known, rising."""
        known = self.rows["hour"]
        found: list[int] = known[bisect_left(known, hours.start) : bisect_left(known, hours.stop)].tolist()
        return found

    def next_after(self, hour: int) -> int | None:
        """The first known hour after this one."""
        known = self.rows["hour"]
        place = bisect_right(known, hour)
        return int(known[place]) if place < len(known) else None

    def sealed(self) -> list[int]:
        """Hours that are sealed, rising."""
        return _hours(self.rows, SEALED, SEALED)

    def unsealed(self, until: int) -> list[int]:
        """Hours up to ``until`` that are not sealed, rising."""
        return _hours(self._until(until), SEALED, 0)

    def deletable(self, until: int) -> list[int]:
        """Hours up to ``until`` that are sealed and have no rows that are DEAD, rising (rule S2)."""
        return _hours(self._until(until), SEALED | DEAD, SEALED)

    def _until(self, hour: int) -> HourRows:
        return self.rows[: bisect_right(self.rows["hour"], hour)]


class HourPart(NamedTuple):
    """A file that has rows of one hour, as far as it counts: the hour's schedule log, or the file beside it."""

    hour: int
    counted: HourFile
    is_beside: bool = False

    def path(self, folder: str) -> str:
        """Name the file."""
        return (schedule_beside_path if self.is_beside else schedule_path)(folder, self.hour)


@dataclass(frozen=True, slots=True)
class FiledHours:
    """What the last checkpoint counts of each hour: whoever looks for rows of an hour looks into all of its parts."""

    hours: HourTable
    beside: HourTable  # Of the files beside damaged schedule logs.

    def __contains__(self, hour: int) -> bool:
        return hour in self.hours or hour in self.beside

    def get(self, hour: int) -> HourFile:
        """The hour's own file; an empty one when nothing was written yet."""
        return self.hours.get(hour)

    def parts(self, hour: int) -> tuple[HourPart, ...]:
        """The files that have rows of an hour: its own one first."""
        parts = HourPart(hour, self.hours.get(hour)), HourPart(hour, self.beside.get(hour), True)
        return tuple([part for part in parts if part.counted.length])

    def have(self, flag: int) -> bool:
        """Whether an hour that is not sealed has a flag."""
        return any(_hours(table.rows, SEALED | flag, flag) for table in (self.hours, self.beside))

    def count(self, flags: int, wanted: int) -> int:
        """How many rows are filed in hours which have exactly the ``wanted`` ones of these flags."""
        tables = [table.rows for table in (self.hours, self.beside)]
        return sum([int(rows["rows"][rows["flags"] & np.uint64(flags) == wanted].sum()) for rows in tables])

    def all(self) -> NDArray[np.uint32]:
        """The hours that have filed rows, rising."""
        return np.union1d(self.hours.rows["hour"], self.beside.rows["hour"])


def merge_hours(rows: HourRows, newer: HourRows) -> HourRows:
    """Copy two tables into one, by rising hour; where both have an hour, the newer row counts: the hours 5, 6 and 9 and
    the newer ones 6 and 7 make 5, 6 as it is newer, 7 and 9.
    """
    places = newer["hour"].searchsorted(rows["hour"])
    kept = np.flatnonzero(newer["hour"].searchsorted(rows["hour"], "right") == places)
    opaque = np.insert(newer.view(OPAQUE_ROW), places.take(kept), rows.view(OPAQUE_ROW).take(kept))
    return opaque.view(HOUR_ROW)


def hour_put(hour: int, file: HourFile) -> tuple[bytes, bytes]:
    """The LMDB row of an hour."""
    return hour_key(hour), _pack(hour, file).tobytes()


def hour_puts(rows: HourRows, prefix: bytes = PREFIX) -> Iterator[tuple[bytes, bytes]]:
    """The LMDB rows of hours, one at a time: as a list, those of two years take 3 MB."""
    return ((hour_key(int(row["hour"]), prefix), row.tobytes()) for row in rows)


def hour_key(hour: int, prefix: bytes = PREFIX) -> bytes:
    """The LMDB key of an hour."""
    return prefix + hour.to_bytes(4)


def hour_of_key(key: bytes) -> int | None:
    """The hour that a key ends with; None when it ends with no hour."""
    name = key.rpartition(b"/")[2] if len(key) < 5 else key[-4:]
    return int.from_bytes(name) if len(name) == 4 else None


def load_hours(pairs: Iterable[tuple[bytes, bytes]]) -> HourTable:
    """Take over the rows of the last checkpoint, which come in the order of their keys."""
    return HourTable(decode_hours(b"".join(value for _, value in pairs)).copy())


def _pack(hour: int, file: HourFile) -> HourRows:
    return np.array([(hour, file.last_crc32c, file.length, file.rows, file.flags)], HOUR_ROW)


def _place(rows: HourRows, hour: int) -> int | None:
    """Where an hour's row is."""
    place = bisect_left(rows["hour"], hour)
    return place if place < len(rows) and rows["hour"][place] == hour else None


def _hours(rows: HourRows, flags: int, wanted: int) -> list[int]:
    """Hours of rows which have exactly the ``wanted`` ones of these flags."""
    hours: list[int] = rows["hour"][rows["flags"] & np.uint64(flags) == wanted].tolist()
    return hours


def outcome_put(hour: int, end: OutcomeEnd) -> tuple[bytes, bytes]:
    """The LMDB row of an hour's dispatch log."""
    return hour_key(hour, OUTCOME_PREFIX), OUTCOME_ROW.pack(*end)


def load_outcome_ends(pairs: Iterable[tuple[bytes, bytes]]) -> dict[int, OutcomeEnd]:
    """Take over the ends of the dispatch logs from the last checkpoint, by hour."""
    first = len(OUTCOME_PREFIX)
    return {int.from_bytes(key[first:]): OutcomeEnd(*OUTCOME_ROW.unpack(value)) for key, value in pairs}


class GivenUp(NamedTuple):
    """An operator's word on an hour's dispatch log, and whether each row that it concerns is IN_DOUBT, durably.

    It concerns rows of the hour with sequences below ``below`` that have no outcome and are not ``pending`` (sorted).
    """

    at_ms: int
    done: bool
    below: int = SEQUENCE_MAX
    pending: Sequences = NO_SEQUENCES

    def encode(self) -> bytes:
        """As the state has it."""
        steps = np.diff(self.pending, prepend=np.uint64(0)).tobytes()
        known = [] if self.done else [self.below, zlib.compress(steps, 1)]
        return bytes(msgpack.packb([self.at_ms, self.done, *known]))

    @classmethod
    def decode(cls, value: bytes) -> "GivenUp":
        """Read what `encode` has encoded."""
        at_ms, done, *rest = msgpack.unpackb(value)
        if done:
            return cls(at_ms, True)
        below, steps = rest
        return cls(at_ms, False, below, np.cumsum(np.frombuffer(zlib.decompress(steps), np.uint64), dtype=np.uint64))
