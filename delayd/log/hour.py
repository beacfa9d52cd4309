"""The logs of an hour: where they are, what the dispatch log holds, and the seal (docs/formats/schedule.md,
dispatch.md, seal.md).

A *schedule log* has the messages of the hour, a *dispatch log* their outcomes, one for each. The table of a checkpoint
says how much of each schedule log is valid. Values that the rows of one handed-over batch have in common are stored
once, as a *part* in the heap of an OUTCOME batch. Rows that a decision has *ended* stand in control records of the
message log before their outcomes do.

The seal log has one record for each sealed hour, chained by SHA-256 (rule S4). Counts and digests are over rows, so
they stay true however an hour's rows lie in batches.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, encode
from delayd.batch.columns import DTYPES, BatchKind, Buffer, ColumnId, Int64s, OutcomePart
from delayd.batch.labels import OWN_TAGS_BIT
from delayd.errors import BatchMalformed, DamagedData
from delayd.hours import HOUR_MS, INSTANT_MS_MAX, hour_name
from delayd.log.log import LogPlace
from delayd.log.segment import FileKind, Segment, UnfinishedFile, open_segment
from delayd.machine.disk import Disk
from delayd.outcome import TOOK_NO_KEY, Outcome, Reason

SEALED = 1  # Flags of an hour: each of its rows has exactly one outcome (rule S1).
DEAD = 2  # Some of them are DEAD, so the hour is not to be deleted (rule S2).
# Retention removes its files, or has removed them: with this a reader knows why a file is missing (rule P3).
REMOVED = 4
HAD_DEAD_LETTERS = 8  # Some of them were filed as dead letters of a group: a start counts those that are left.
HOUR_ROW = np.dtype(
    [("hour", "<u4"), ("last_crc32c", "<u4"), ("length", "<u8"), ("rows", "<u8"), ("flags", "<u8")]
)  # 32 bytes an hour; ``length`` counts groups, without the file header.
HourRows = NDArray[np.void]
Skipped = tuple[int, int]
"""A first sequence, and how many sequences from it on an operator's decision left unused (rule S5)."""
RESTORED_STEP = 1 << 40  # Sequences that a restored server leaves unused: more than it took since its backup.


def schedule_path(folder: str, hour: int) -> str:
    """Name the schedule log of ``hour`` (hours since the epoch) in a delay server's directory."""
    name = hour_name(hour)
    return f"{folder}/schedule/{name[:8]}/{name}.log"


def dispatch_path(folder: str, hour: int) -> str:
    """Name the dispatch log of ``hour``."""
    name = hour_name(hour)
    return f"{folder}/dispatch/{name[:8]}/{name}.log"


def schedule_beside_path(folder: str, hour: int) -> str:
    """Path of the file that takes rows of an hour while its schedule log is damaged."""
    return f"{folder}/quarantine/{hour_name(hour)}.schedule.log"


def hour_flags(blooms: NDArray[np.uint64]) -> int:
    """What rows with these blooms of tags make of the flags of their hour."""
    return HAD_DEAD_LETTERS if bool((blooms & OWN_TAGS_BIT).any()) else 0


def decode_hours(table: bytes) -> HourRows:
    """View the hour table of a checkpoint: HOUR_ROW[n], by rising hour."""
    return np.frombuffer(table, HOUR_ROW)


def open_schedule_log(disk: Disk, path: str, log_id: int, hour: int, *, write: bool = False) -> Segment:
    """Open an hour's schedule log, or the file beside it, for reading.

    Raises:
        DamagedData, Shortage: it is gone, another hour's, or can't be read.
    """
    try:
        segment = open_segment(disk, path, FileKind.SCHEDULE, log_id, write=write)
    except FileNotFoundError:
        raise DamagedData(path, 0, "the file is gone") from None
    except UnfinishedFile:
        raise DamagedData(path, 0, "its file header is cut short") from None
    if segment.header.number != hour:
        segment.close()
        raise DamagedData(path, 0, f"its header says that it is of hour {hour_name(segment.header.number)}")
    return segment


PART = np.dtype(
    [
        ("target_log_id", "<u8"),
        ("epoch", "<u8"),
        ("batch_id", "<u8"),
        ("claimed_at_ms", "<i8"),
        ("target_appended_at_ms", "<i8"),
        ("target_offset", "<u8"),
        ("count", "<u4"),
        ("outcome", "u1"),
        ("reason", "u1"),
        ("attempt", "<u2"),
        ("reserved", "<u8"),
    ]
)

PACKED_PART = struct.Struct("<QQQqqQIBBHQ")  # The same, to pack a part in plain integers.
assert PACKED_PART.size == PART.itemsize, "a packed part is a part"

# How much of an hour's dispatch log is durable, as the checkpoint file publishes it; ``length`` counts groups.
END_ROW = np.dtype([("hour", "<u4"), ("zero", "<u4"), ("length", "<u8")])


class NewPart(NamedTuple):
    """Rows with the same outcome: columns of equal length, and the values that they share."""

    sequences: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.int64]
    outcome: Outcome
    claimed_at_ms: int = 0
    target_log_id: int = 0
    epoch: int = 0
    batch_id: int = 0
    target_appended_at_ms: int = 0
    target_offset: int = 0
    attempt: int = 1
    hashes: NDArray[np.uint64] | None = None  # One content hash a row; None where nobody has read the rows' contents.
    # CANCELLED rows have a reason; `batch_id` and `target_appended_at_ms` then name the other row. The other row of a
    # DRAINED one is at the delay server ``target_log_id``, which accepted it at `target_appended_at_ms`.
    reason: int = 0

    def stated_hashes(self) -> NDArray[np.uint64]:
        """The content hash of each row, 0 where it is not known."""
        return np.zeros(len(self.sequences), np.uint64) if self.hashes is None else self.hashes

    def only(self, chosen: NDArray[np.bool_]) -> "list[NewPart]":
        """Some of the rows; several parts where each row names another one and a row between them is left out."""
        places = np.flatnonzero(chosen)
        if not len(places):
            return []
        if self.outcome != Outcome.CANCELLED or self.reason <= Reason.CANCELLED:
            return [self._take(places)]
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        return [self._take(run)._replace(batch_id=self.batch_id + int(run[0])) for run in runs]

    def _take(self, places: NDArray[np.intp]) -> "NewPart":
        hashes = None if self.hashes is None else self.hashes.take(places)
        return self._replace(
            sequences=self.sequences.take(places), deliver_at_ms=self.deliver_at_ms.take(places), hashes=hashes
        )


class OutcomeRows(NamedTuple):
    """Decoded outcomes; ``parts`` is PART[m], ``part_of`` is for each row the index of its part."""

    sequences: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.int64]
    parts: NDArray[np.void]
    part_of: NDArray[np.int64]
    content_hash: NDArray[np.uint64]  # 0: not stated.

    def count_of(self, outcome: Outcome) -> int:
        """How many rows have this outcome."""
        return int(self.parts["count"][self.parts["outcome"] == outcome].sum())

    def others(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        """The sequences that some rows name: of the row that took their place, or that they met; 0 where there is none.

        The rows of one part name rows that follow one another. A part that holds only some of its rows has the place
        of the first one in ``reserved``.
        """
        part_of = self.part_of.take(rows)
        parts = self.parts.take(part_of)
        names = name_others(parts)
        after_first = rows - np.searchsorted(self.part_of, part_of)
        return np.where(names, parts["batch_id"] + parts["reserved"] + after_first.astype(np.uint64), np.uint64(0))

    def highest_sequence(self) -> int:
        """The highest sequence of their own server that they name, of their rows or of `others`; 0 when there is none.

        The other row of a DRAINED one is at another delay server, so it does not count.
        """
        parts = self.parts[name_others(self.parts) & (self.parts["reason"] != Reason.DRAINED)]
        others = parts["batch_id"] + parts["count"] - np.uint64(1)
        return max(int(self.sequences.max(initial=0)), int(others.max(initial=0)))


def name_others(parts: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which parts name another row for each of their rows."""
    found: NDArray[np.bool_] = (parts["outcome"] == Outcome.CANCELLED) & (parts["reason"] > Reason.CANCELLED)
    return found


NO_OUTCOMES = OutcomeRows(
    sequences=np.empty(0, np.uint64),
    deliver_at_ms=np.empty(0, np.int64),
    parts=np.empty(0, PART),
    part_of=np.empty(0, np.int64),
    content_hash=np.empty(0, np.uint64),
)


def encode_outcomes(hour: int, new: Sequence[NewPart]) -> bytes:
    """Make one OUTCOME batch of an hour; at most 65,536 rows in all."""
    parts = [
        PACKED_PART.pack(
            *(part.target_log_id, part.epoch, part.batch_id, part.claimed_at_ms, part.target_appended_at_ms),
            *(part.target_offset, len(part.sequences), part.outcome, part.reason, part.attempt, 0),
        )
        for part in new
    ]
    sequences, deliver_at_ms, hashes = join_columns(new)
    columns = [
        (ColumnId.DELIVER_AT_MS, deliver_at_ms),
        (ColumnId.SEQUENCE, sequences),
        (ColumnId.CONTENT_HASH, hashes),
    ]
    return encode(BatchKind.OUTCOME, OutcomePart(hour), len(sequences), columns, parts)


def join_columns(parts: Sequence[NewPart]) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]]:
    """Sequences, due instants and content hashes of the rows of several parts, one at least."""
    if len(parts) == 1:  # Mostly there is one part, and nothing needs to be copied.
        (part,) = parts
        return part.sequences, part.deliver_at_ms, part.stated_hashes()
    return (
        np.concatenate([part.sequences for part in parts]),
        np.concatenate([part.deliver_at_ms for part in parts]),
        np.concatenate([part.stated_hashes() for part in parts]),
    )


def missing_parts(outcomes: OutcomeRows, known: OutcomeRows) -> list[NewPart]:
    """The rows of ``outcomes`` that are not among the known ones, as they were recorded."""
    missing = ~np.isin(outcomes.sequences, known.sequences)
    parts: list[NewPart] = []
    for number in np.unique(outcomes.part_of[missing]).tolist():
        rows = outcomes.part_of == number
        part = outcomes.parts[number]
        whole = NewPart(
            outcomes.sequences[rows],
            outcomes.deliver_at_ms[rows],
            Outcome(int(part["outcome"])),
            claimed_at_ms=int(part["claimed_at_ms"]),
            target_log_id=int(part["target_log_id"]),
            epoch=int(part["epoch"]),
            batch_id=int(part["batch_id"]),
            target_appended_at_ms=int(part["target_appended_at_ms"]),
            target_offset=int(part["target_offset"]),
            attempt=int(part["attempt"]),
            hashes=outcomes.content_hash[rows],
            reason=int(part["reason"]),
        )
        parts += whole.only(missing[rows])
    return parts


def decode_outcomes(batches: Sequence[Batch]) -> OutcomeRows:
    """Gather the rows of OUTCOME batches, in order.

    Raises:
        BatchMalformed: the parts of a batch do not add up to its rows.
    """
    if not batches:
        return NO_OUTCOMES
    tables = [np.frombuffer(batch.heap, PART) for batch in batches]
    for batch, table in zip(batches, tables, strict=True):
        if int(table["count"].sum()) != batch.count:
            raise BatchMalformed(f"parts of {int(table['count'].sum())} rows do not add up to {batch.count}")
    # numpy joins tables of several fields some hundred times slower than Python joins bytes.
    parts = np.frombuffer(b"".join([batch.heap for batch in batches]), PART)
    return OutcomeRows(
        np.concatenate([batch.uint64s(ColumnId.SEQUENCE) for batch in batches]),
        np.concatenate([batch.int64s(ColumnId.DELIVER_AT_MS) for batch in batches]),
        parts,
        np.repeat(np.arange(len(parts)), parts["count"]),
        np.concatenate([batch.content_hashes() for batch in batches]),
    )


ENDED = np.dtype(
    [
        ("sequence", "<u8"),
        ("deliver_at_ms", "<i8"),
        # The sequence of the row that took its place, or that it met; else 0. Of a DRAINED row these two are the log_id
        # of the delay server that gets it, and the number of the batch in which it goes there.
        ("other", "<u8"),
        ("other_at_ms", "<i8"),
        # A row that took its place is filed in the hour of the later of these two instants (rule P5).
        ("decided_at_ms", "<i8"),
        ("hour", "<u4"),  # Filing hour.
        ("reason", "u1"),
        # A row that met another says how many hours after the hour of ``other_at_ms`` that one is filed, because it was
        # due already when it was accepted: the lowest 8 bits are here, 16 more in ``place``. All other rows have 0.
        ("late", "u1"),
        ("place", "<u2"),  # A DRAINED row says which row of that batch it is; else 0, but for rows that met another.
    ]
)
ENDED_BYTES = 48
assert ENDED.itemsize == ENDED_BYTES, "the columns of an ended row leave no gap"

# A row that a request by key has ended, or the first one that a move by receipt has, and the number of that try.
TRIED = np.dtype([("asker", "<u8"), ("number", "<u8"), ("low_water", "<u8"), ("sequence", "<u8")])
TRIED_BYTES = 32

TriedRows = NDArray[np.void]  # Its dtype is TRIED.
NO_TRIED: TriedRows = np.zeros(0, TRIED)

EndedRows = NDArray[np.void]  # Its dtype is ENDED.
NO_ENDED: EndedRows = np.zeros(0, ENDED)
LATE_HOURS_MAX = (1 << 24) - 1  # 1,900 years; no instant before 2001 is accepted.
_REASONS = np.array(sorted(Reason), np.uint8)


def note_hours_of_others(rows: EndedRows, hours: NDArray[np.uint32]) -> None:
    """Write the filing hour of the row that each of some new rows met."""
    late = hours.astype(np.int64) - rows["other_at_ms"] // HOUR_MS
    late = np.clip(late, 0, LATE_HOURS_MAX)
    rows["late"], rows["place"] = late & 0xFF, late >> 8


def others_filed_at_ms(rows: EndedRows) -> Int64s:
    """An instant in the filing hour of the row that each of some new rows met: with it and its due instant, the row
    can be asked about.
    """
    late = np.where(np.isin(rows["reason"], TOOK_NO_KEY), rows["late"] + (rows["place"].astype(np.int64) << 8), 0)
    begins = (rows["other_at_ms"] // HOUR_MS + late) * HOUR_MS
    filed: Int64s = np.minimum(np.where(late > 0, begins, rows["other_at_ms"]), INSTANT_MS_MAX)
    return filed


def decided_about(ended: EndedRows, base_sequence: int, count: int) -> EndedRows:
    """Those of a commit's decisions that the sender of a batch is told: its rows that ended at once, and the earlier
    rows that its rows have replaced.
    """
    first, end = np.uint64(base_sequence), np.uint64(base_sequence + count)
    mine = np.where(ended["reason"] == Reason.REPLACED, ended["other"], ended["sequence"])
    told = np.isin(ended["reason"], (*TOOK_NO_KEY, Reason.REPLACED)) & (mine >= first) & (mine < end)
    return ended.compress(told)


def decode_ended(data: bytes) -> EndedRows:
    """Read the rows of a record `ended`: a view of its bytes.

    Raises:
        BatchMalformed: they are not such rows.
    """
    if len(data) % ENDED_BYTES:
        raise BatchMalformed(f"{len(data)} bytes are not made of ended rows")
    rows = np.frombuffer(data, ENDED)
    sequences = rows["sequence"]
    if not bool((sequences[1:] > sequences[:-1]).all()):
        raise BatchMalformed("ended rows do not rise in sequence")
    if not bool(np.isin(rows["reason"], _REASONS).all()) or _has_strays(rows):
        raise BatchMalformed("an ended row has an unknown reason, or says what a row with its reason can't say")
    return rows


def _has_strays(rows: EndedRows) -> bool:
    """Whether a row says what only rows that met others, or only drained ones, may say."""
    met = np.isin(rows["reason"], TOOK_NO_KEY)
    places = rows["place"].compress(~met & (rows["reason"] != Reason.DRAINED))
    return bool(rows["late"].compress(~met).any() or places.any())


def decode_tried(data: bytes) -> TriedRows:
    """Read the rows of a record `tried`: a view of its bytes.

    Raises:
        BatchMalformed: they are not such rows.
    """
    if len(data) % TRIED_BYTES:
        raise BatchMalformed(f"{len(data)} bytes are not made of tries")
    return np.frombuffer(data, TRIED)


def tried_rows(ended: EndedRows, tried: TriedRows) -> Iterator[tuple[int, int, int, bytes]]:
    """For each try its asker, number and low-water mark, and the row that it ended, as `ENDED` has it; ``ended`` rise
    in sequence.
    """
    at = np.searchsorted(ended["sequence"], tried["sequence"])
    for (asker, number, low_water, sequence), place in zip(tried.tolist(), at.tolist(), strict=True):
        if place < len(ended) and int(ended["sequence"][place]) == sequence:
            yield asker, number, low_water, ended[place].tobytes()


SEAL = struct.Struct("<QIIQQQQQQQqqQQ32s32s32s")
# What a seal counts each for itself; what ended otherwise is in ``rows`` and in the digests alone.
SEALED_OUTCOMES = (Outcome.DISPATCHED, Outcome.CANCELLED, Outcome.DEAD, Outcome.EXPIRED, Outcome.IN_DOUBT)
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
    return [
        seal_of(batch.buffer[place : place + SEAL.size])
        for place in range(start, start + SEAL.size * batch.count, SEAL.size)
    ]


def seal_of(record: Buffer) -> Seal:
    """Read the 200 bytes of one seal."""
    log_id, hour, number, *facts, previous = SEAL.unpack(record)
    return Seal(log_id, number, SealFacts(hour, *facts), previous)


class SealMark(NamedTuple):
    """A place in the chain: offset and checksum of the log there, how many seals are before it, and the digest of the
    last one.
    """

    offset: int = 0
    crc32c: int = 0
    seals: int = 0
    sha256: bytes = NO_SEAL
