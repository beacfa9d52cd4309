"""Seals: an hour whose two logs agree row by row gets a record in the seal log (docs/formats/seal.md, rules S1, S4).

Invariant: a seal is durable before the state counts it, and an hour has one seal. If a crash leaves a seal uncounted,
the next start finds it, and it is not written a second time. Sets of sequences are compared, never counters; the
digests are over rows in order of sequence. Only the worker thread uses this, in pieces that spend their time in numpy
and hashlib, which release the GIL.
"""

import hashlib
import logging
import struct
from collections.abc import Callable, Iterable

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.content import NOT_STATED, tally
from delayd.delay.filing.hour_table import HourTable
from delayd.errors import DamagedData, DamagedValue, key_text
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import (
    OUTCOME_ROW,
    SCHEDULE_ROW,
    SEALED_OUTCOMES,
    OutcomeRows,
    Seal,
    SealFacts,
    SealMark,
    decode_seals,
    encode_seal,
    seal_place,
)
from delayd.log.log import Log, open_log, write_again
from delayd.machine.identity import Site
from delayd.outcome import Outcome

KEY = b"seal"  # [offset, crc32c, seals, sha256]: how far the seal log is counted (docs/formats/seal.md).
PIECE_ROWS = 8_192  # 640 KiB of outcome rows: one piece takes some 2 ms.
PIECE_BYTES = 4 << 20  # This much of the schedule side's columns is hashed at a time: some 3 ms.
SEQUENCES_NAMED = 10
U32 = struct.Struct("<I")
OPAQUE_ROW = np.dtype((np.void, SCHEDULE_ROW.itemsize))  # Copied whole, not column by column.
Packed = NDArray[np.void]  # Its dtype is SCHEDULE_ROW.
COPIED = (  # Columns that a row takes over from its part.
    *("claimed_at_ms", "target_log_id", "epoch", "batch_id"),
    *("target_appended_at_ms", "target_offset", "outcome", "reason", "attempt"),
)

log = logging.getLogger(__name__)


class SealDiffers(Exception):
    """An hour has a seal that a crash left uncounted, and comparing its files now gives another one."""


class SealLog:
    """The open seal log; made by `open_seal_log`."""

    def __init__(self, log: Log, epoch: int, end: SealMark, uncounted: dict[int, tuple[SealMark, Seal]]) -> None:
        self.end = end  # Just behind the last durable seal.
        self._log = log
        self._epoch = epoch
        self._uncounted = uncounted  # By hour, in the order of the log: the mark before a seal, and the seal.

    def add(self, facts: SealFacts, now_ms: int) -> None:
        """Append the seal of an hour; durable on return.

        Raises:
            SealDiffers: the hour has another seal.
            DiskFull: nothing was appended.
            DamagedData: the file was removed, replaced or cut; nothing was appended.
        """
        known = self._uncounted.get(facts.hour)
        if known is not None:
            if known[1].facts != facts:
                raise SealDiffers(f"seal {known[1].number} says {known[1].facts}, the files say {facts}")
            return
        if damage := self.look():
            raise damage
        before = self.end
        seal = Seal(self._log.place.log_id, before.seals, facts, before.sha256)
        batch = encode_seal(seal)
        self._log.append([NewGroup(GroupKind.DATA, [batch], self._epoch, now_ms, 0, 1)], now_ms)
        self._log.flush()
        self._uncounted[facts.hour] = (before, seal)
        self.end = SealMark(self._log.end, self._log.crc32c, before.seals + 1, seal.sha256)

    def put(self, hour: int) -> tuple[bytes, bytes]:
        """The row of the state that counts an hour's seal; seals of other hours that the state does not call sealed
        still wait.
        """
        left = (mark for other, (mark, _) in self._uncounted.items() if other != hour)
        return KEY, msgpack.packb(next(left, self.end))

    def counted(self, hour: int) -> None:
        """The state now counts an hour's seal."""
        self._uncounted.pop(hour, None)

    def last_hour(self) -> int:
        """The latest hour that has a seal, in the whole log; -1 without any. Reads all of it."""
        return max((seal.facts.hour for seal in self.since(0)), default=-1)

    def since(self, number: int) -> list[Seal]:
        """The durable seals from a number on. Reads the whole log. Raises DamagedData when it does not check."""
        found: list[Seal] = []
        for group in self._log.scan(self._log.start, self._log.durable):
            for _, batch in group.batches():
                if batch.kind == BatchKind.SEAL:
                    found += [seal for seal in decode_seals(batch) if seal.number >= number]
        return found

    def look(self) -> DamagedData | None:
        """Check the log's files; return the damage if someone has changed them."""
        return next((found.damage for found in self._log.look()), None)

    def write_again(self) -> None:
        """Write removed files again, when nothing is under way any more."""
        write_again(self._log.segments)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def open_seal_log(site: Site, hours: HourTable, *, whole: bool) -> SealLog:
    """Open the seal log at its end; seals of ``hours`` that the state does not call sealed wait to be counted.

    With ``whole`` the log is read from its beginning, because an hour may be sealed though the state does not say so.
    That is also done when the state's mark does not check (rule L9).

    Raises:
        DamagedData, Shortage: it can't be read, is shorter than the state counts, or the seals behind that point don't
            continue the chain.
    """
    mark, place = SealMark(), seal_place(site.folder, site.log_id)
    try:
        row = site.state.get(KEY)
        if row and not whole:
            mark = SealMark(*msgpack.unpackb(row))
    except DamagedValue as error:
        log.warning("value_rebuilt key=%s source=%s", key_text(error.key), place.folder)
    seal_log = open_log(site.disk, place, site.clock.now_ms(), mark.offset, mark.crc32c)
    uncounted: dict[int, tuple[SealMark, Seal]] = {}
    end = mark
    for group in seal_log.scan(mark.offset, seal_log.durable, mark.crc32c):
        seals = [seal for _, batch in group.batches() if batch.kind == BatchKind.SEAL for seal in decode_seals(batch)]
        for seal in seals:
            if (seal.number, seal.previous_sha256) != (end.seals, end.sha256):
                seal_log.close()
                what = f"seal {seal.number} does not follow the {end.seals} seals before it"
                raise DamagedData(seal_log.place.folder, group.header.offset, what)
            # An hour that is not in the table was deleted, so its seal was counted.
            if seal.facts.hour in hours and not hours.get(seal.facts.hour).sealed:
                uncounted[seal.facts.hour] = (end, seal)
            end = SealMark(group.end, group.header.header_crc32c, seal.number + 1, seal.sha256)
    return SealLog(seal_log, site.epoch, end, uncounted)


class ContentDiffers(Exception):
    """The hashes in the schedule log and in the dispatch log of an hour are not the same."""


def compare(
    hour: int, batches: Iterable[Batch], outcomes: OutcomeRows, give_way: Callable[[], None] = lambda: None
) -> SealFacts | None:
    """Read the schedule side of an hour and compare it with its outcomes.

    1. Some sequence was filed and has no outcome, or has one and was not filed, or stands twice: there is no seal yet.
       Filed are 1, 2 and 3, and 1 and 3 have outcomes: message 2 is still to be handed over.
    2. The sequences are the same, and a row's outcome states another content hash than its file: ContentDiffers. A row
       that was never handed over, such as a cancelled one, may state none and is not compared.
    3. All agrees: filed are 1, 2 and 3; 3 and 1 were dispatched, 2 was given up. The seal says 3 rows, 2 dispatched,
       1 dead, and has a digest of each side, over the rows in the order 1, 2, 3.

    ``batches`` are SCHEDULE batches, their rows in any order; each is let go when the next one is asked for.
    ``outcomes`` are all of the hour, in any order. ``give_way`` is called between pieces, so that more urgent jobs can
    run. None is returned where not each scheduled sequence has exactly one outcome.

    Raises:
        ContentDiffers: a row was handed over with other content than it was filed with (rule S6).
    """
    side = _ScheduleSide()
    for batch in batches:
        side.add(batch)
        give_way()
    rows = side.rows()
    scheduled = rows["sequence"]
    order = np.argsort(outcomes.sequences, kind="stable")
    repeats = bool((scheduled[1:] == scheduled[:-1]).any())
    if not len(rows) or repeats or not np.array_equal(scheduled, outcomes.sequences.take(order)):
        return None
    stated = outcomes.content_hash.take(order)
    differs = np.flatnonzero((stated != rows["content_hash"]) & (stated != NOT_STATED))
    if len(differs):
        named = scheduled.take(differs[:SEQUENCES_NAMED]).tolist()
        raise ContentDiffers(
            f"{len(differs)} rows were handed over with other content than they were filed with, among them {named}"
        )
    dispatched = np.flatnonzero(outcomes.parts["outcome"].take(outcomes.part_of) == Outcome.DISPATCHED)
    handed_over = tally(
        outcomes.sequences.take(dispatched),
        outcomes.deliver_at_ms.take(dispatched),
        outcomes.content_hash.take(dispatched),
    )
    kinds = np.bincount(outcomes.parts["outcome"], outcomes.parts["count"], max(Outcome) + 1)
    return SealFacts(
        hour=hour,
        rows=len(rows),
        body_bytes=int(rows["body_bytes"].sum(dtype=np.uint64)),
        **{outcome.word: int(kinds[outcome]) for outcome in SEALED_OUTCOMES},
        due_min_ms=int(rows["deliver_at_ms"].min()),
        due_max_ms=int(rows["deliver_at_ms"].max()),
        tally_first=handed_over.first,
        tally_second=handed_over.second,
        schedule_sha256=side.sha256(rows, give_way),
        outcomes_sha256=_outcomes_sha256(outcomes, order, give_way),
    )


class _ScheduleSide:
    """The rows that the digest of the schedule side covers, 32 bytes a row, collected from batches as they arrive."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}  # Subjects in the order in which batches name them.
        self._parts: list[Packed] = [np.empty(0, SCHEDULE_ROW)]

    def add(self, batch: Batch) -> None:
        rows = np.empty(batch.count, SCHEDULE_ROW)
        rows["sequence"], rows["deliver_at_ms"] = batch.uint64s(ColumnId.SEQUENCE), batch.int64s(ColumnId.DELIVER_AT_MS)
        rows["subject"], rows["body_bytes"] = self._subjects(batch), batch.body_bytes()
        rows["content_hash"] = batch.content_hashes()
        self._parts.append(rows)

    def rows(self) -> Packed:
        """All rows by rising sequence."""
        rows = np.concatenate([part.view(OPAQUE_ROW) for part in self._parts])
        self._parts.clear()
        return rows.take(np.argsort(rows.view(SCHEDULE_ROW)["sequence"], kind="stable")).view(SCHEDULE_ROW)

    def sha256(self, rows: Packed, give_way: Callable[[], None]) -> bytes:
        """The digest of rows by rising sequence; their subjects are numbered anew, in this order."""
        names = list(self._numbers)
        subjects = rows["subject"]
        first = np.full(len(names), len(rows))
        # Rows are written in reverse, so that the first row of each subject is written last and stays.
        first[subjects[::-1]] = np.arange(len(rows))[::-1]
        seen = np.argsort(first)[: np.count_nonzero(first < len(rows))]
        number_of = np.zeros(len(names), np.uint32)
        number_of[seen] = np.arange(len(seen))
        rows["subject"] = number_of.take(subjects)
        digest, columns = hashlib.sha256(), rows.view(np.uint8).data
        for start in range(0, len(columns), PIECE_BYTES):
            digest.update(columns[start : start + PIECE_BYTES])
            give_way()
        for number in seen.tolist():
            digest.update(U32.pack(len(names[number])) + names[number])
        return digest.digest()

    def _subjects(self, batch: Batch) -> NDArray[np.uint32] | int:
        numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in batch.subjects()]
        if ColumnId.SUBJECT not in batch:
            return numbers[0]
        return np.array(numbers, np.uint32).take(batch.uint32s(ColumnId.SUBJECT))


def _outcomes_sha256(outcomes: OutcomeRows, order: NDArray[np.intp], give_way: Callable[[], None]) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, len(order), PIECE_ROWS):
        piece = order[start : start + PIECE_ROWS]
        parts = outcomes.parts.take(outcomes.part_of.take(piece))
        rows = np.zeros(len(piece), OUTCOME_ROW)
        rows["sequence"], rows["deliver_at_ms"] = outcomes.sequences.take(piece), outcomes.deliver_at_ms.take(piece)
        for name in COPIED:
            rows[name] = parts[name]
        rows["content_hash"] = outcomes.content_hash.take(piece)
        digest.update(rows.view(np.uint8).data)
        give_way()
    return digest.digest()
