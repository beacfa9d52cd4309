"""Files: what schedule logs and dispatch logs say of rows that are nowhere in memory.

They are read on the worker thread, over bytes that are durable and counted, so what is found stays true. What was read
of an hour is remembered; the loop may use that as long as nothing was written since, and then it waits for no thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.sequences import Indices, Locations, Sequences, add_part, find, pack_locations
from delayd.delay.filing.hour_table import HourPart
from delayd.delay.filing.schedule_log import scan_fronts
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.rows import COARSE_FROM_MS, COARSE_MS
from delayd.delay.subjects import Subjects
from delayd.errors import DamagedData, DataError
from delayd.hours import hour_start_ms
from delayd.log.hour import OutcomeRows, decode_outcomes, dispatch_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, Segment, open_segment
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.outcome import Outcome, Reason
from delayd.wire.asked import ANSWER, AnswerRows

log = logging.getLogger(__name__)

ROW_BYTES = 28
REMEMBERED_BYTES_MAX = 96 << 20  # Rows of far hours that stay in memory, ROW_BYTES each: more than three million.
AT_HAND_ROWS_MAX = 1_024  # The loop looks so many up in what is remembered, in some 50 us for each hour.
HANDED_OVER = (Outcome.DISPATCHED, Outcome.IN_DOUBT)  # Other outcomes have an attempt in their files, and had none.
OUTCOMES_BYTES_MAX = 48 << 20  # Four million rows with outcomes, of all hours, take this much.


class HourPlace(NamedTuple):
    """What is to be read of one hour: the files as far as they are counted, and the wanted rows by their places."""

    hour: int
    rows: Indices
    filed: tuple[HourPart, ...]  # Empty where the rows of the hour are in memory.
    outcomes_end: int | None  # None: all of the dispatch log.


class LookedUp(NamedTuple):
    """What the files say of each wanted row."""

    answers: AnswerRows  # State UNKNOWN where no outcome is found.
    filed: NDArray[np.bool_]  # Rows that stand in the schedule log of an hour that is not loaded.
    locations: Locations  # The places of these rows.
    unread: NDArray[np.bool_]  # Rows of hours whose files could not be read.


class _Filed(NamedTuple):
    """The filed rows of an hour."""

    parts: tuple[HourPart, ...]
    sequences: Sequences  # Rising.
    deliver_at_ms: Int64s
    locations: Locations
    subjects: NDArray[np.uint32]  # Which of ``names`` each row has.
    names: list[bytes]


class HourReader:
    """Reads the files of hours.

    What is remembered of an hour's rows never changes, and what is known of its outcomes only grows.
    """

    def __init__(self, site: Site) -> None:
        self._disk = site.disk
        self._folder = site.folder
        self._log_id = site.log_id
        self._worker = site.worker
        self._remembered: OrderedDict[int, _Filed] = OrderedDict()
        self._remembered_bytes = 0
        self._outcomes: OrderedDict[int, HourOutcomes] = OrderedDict()

    def at_hand(self, wanted: Wanted, places: Sequence[HourPlace]) -> LookedUp | None:
        """The same as `look_up` tells, from what is remembered; None when a file must be read. The loop calls it."""
        if len(wanted) > AT_HAND_ROWS_MAX:
            return None
        found = _nothing_found(len(wanted))
        for place in places:
            own = wanted.take(place.rows)
            if place.outcomes_end != 0:
                known = self._outcomes.get(place.hour)
                if known is None or place.outcomes_end is None or known.has_any(own.sequences, place.outcomes_end):
                    return None
            if place.filed:
                filed = self._remembered.get(place.hour)
                if filed is None or filed.parts != place.filed:
                    return None
                _find_filed(filed, place, own, found)
        return found

    def look_up(self, wanted: Wanted, places: Sequence[HourPlace], told: Callable[[Done[LookedUp]], None]) -> None:
        """Call back with what became of wanted rows."""
        self._worker.submit(partial(self._look_up, wanted, places), told, Priority.DUE)

    def _look_up(self, wanted: Wanted, places: Sequence[HourPlace]) -> LookedUp:
        """On the worker thread."""
        found = _nothing_found(len(wanted))
        for place in places:
            own = wanted.take(place.rows)
            try:
                if place.outcomes_end != 0:
                    self._read_outcomes(place, own, found.answers)
                if place.filed:
                    _find_filed(self._filed(place.hour, place.filed), place, own, found)
            except (DataError, FileNotFoundError) as error:
                # Whoever looks after the file finds the same damage; this request is asked again meanwhile.
                log.warning("rows_not_looked_up hour=%d reason=%r", place.hour, str(error))
                found.unread[place.rows] = True
            self._worker.give_way()
        return found

    def _read_outcomes(self, place: HourPlace, own: Wanted, answers: AnswerRows) -> None:
        path = dispatch_path(self._folder, place.hour)
        segment = open_segment(self._disk, path, FileKind.DISPATCH, self._log_id, write=False)
        try:
            outcomes = self._find_outcomes(segment, place, own)
        finally:
            segment.close()
        rows = np.flatnonzero(np.isin(outcomes.sequences, own.sequences))
        at = np.searchsorted(own.sequences, outcomes.sequences.take(rows))
        behind_ms = outcomes.deliver_at_ms.take(rows) - own.deliver_at_ms.take(at)
        # A row that the server ended by itself has the instant of its memory, which is coarse when it is so late.
        is_coarse = own.deliver_at_ms.take(at) < hour_start_ms(place.hour) - COARSE_FROM_MS
        same = (behind_ms == 0) | (is_coarse & (behind_ms > 0) & (behind_ms < COARSE_MS))
        rows, at = rows.compress(same), at.compress(same)
        parts = outcomes.parts.take(outcomes.part_of.take(rows))
        told = np.zeros(len(rows), ANSWER)
        for outcome in Outcome:
            told["state"][parts["outcome"] == outcome] = outcome.state
        cancelled = parts["outcome"] == Outcome.CANCELLED
        for reason in Reason:
            told["state"][cancelled & (parts["reason"] == reason)] = reason.state
        told["attempt"] = np.where(np.isin(parts["outcome"], HANDED_OVER), parts["attempt"], 0)
        told["deliver_at_ms"] = own.deliver_at_ms.take(at)
        told["decided_at_ms"] = parts["claimed_at_ms"]
        told["target_log_id"] = parts["target_log_id"]
        told["target_offset"] = parts["target_offset"]
        # These two fields of CANCELLED rows name another row. That of a DRAINED one is at another delay server, due at
        # the same instant, and the second field says when it was accepted there.
        drained = cancelled & (parts["reason"] == Reason.DRAINED)
        told["target_appended_at_ms"] = np.where(cancelled & ~drained, 0, parts["target_appended_at_ms"])
        told["other"] = outcomes.others(rows)
        told["other_at_ms"] = np.where(cancelled, parts["target_appended_at_ms"], 0)
        told["other_at_ms"][drained] = told["deliver_at_ms"][drained]
        answers[place.rows.take(at)] = told

    def _find_outcomes(self, segment: Segment, place: HourPlace, own: Wanted) -> OutcomeRows:
        known = self._outcomes.get(place.hour)
        if known is not None:
            try:
                return self._read_on(known, segment, place, own)
            except DamagedData:
                # Another file stands there by now; or else the same damage is found again.
                pass
        known = self._outcomes[place.hour] = HourOutcomes()
        return self._read_on(known, segment, place, own)

    def _read_on(self, known: HourOutcomes, segment: Segment, place: HourPlace, own: Wanted) -> OutcomeRows:
        end = segment.file.size() - FILE_HEADER_BYTES if place.outcomes_end is None else place.outcomes_end
        known.read_on(segment, end, self._worker.give_way)
        found = known.find(segment, own.sequences)
        self._outcomes[place.hour] = known
        self._outcomes.move_to_end(place.hour)
        while sum(each.size_bytes for each in self._outcomes.values()) > OUTCOMES_BYTES_MAX and len(self._outcomes) > 1:
            self._outcomes.popitem(last=False)
        return found

    def _filed(self, hour: int, parts: tuple[HourPart, ...]) -> _Filed:
        """The rows of an hour, remembered for the next request; an hour may have more rows than are remembered."""
        known = self._remembered.get(hour)
        if known is not None and known.parts == parts:
            self._remembered.move_to_end(hour)
            return known
        sequences: list[Sequences] = [np.empty(0, np.uint64)]
        due: list[Int64s] = [np.empty(0, np.int64)]
        locations: list[Locations] = [np.empty(0, np.uint64)]
        numbers: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)]
        subjects = Subjects()
        for stored in chain.from_iterable(scan_fronts(self._disk, self._folder, self._log_id, part) for part in parts):
            sequences.append(stored.batch.uint64s(ColumnId.SEQUENCE).copy())
            due.append(stored.batch.int64s(ColumnId.DELIVER_AT_MS).copy())
            locations.append(pack_locations(True, stored.offset, np.arange(stored.batch.count, dtype=np.uint16)))
            numbers.append(_subjects_of(stored.batch, subjects))
            self._worker.give_way()
        joined = np.concatenate(sequences)
        order = np.argsort(joined, kind="stable")
        filed = _Filed(
            parts,
            joined.take(order),
            np.concatenate(due).take(order),
            np.concatenate(locations).take(order),
            np.concatenate(numbers).take(order),
            subjects.names,
        )
        if known is not None:
            self._remembered_bytes -= ROW_BYTES * len(known.sequences)
        self._remembered[hour] = filed
        self._remembered.move_to_end(hour)
        self._remembered_bytes += ROW_BYTES * len(joined)
        while self._remembered_bytes > REMEMBERED_BYTES_MAX and len(self._remembered) > 1:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_bytes -= ROW_BYTES * len(oldest.sequences)
        return filed


def _nothing_found(count: int) -> LookedUp:
    marks = np.zeros((2, count), np.bool_)
    return LookedUp(np.zeros(count, ANSWER), marks[0], np.zeros(count, np.uint64), marks[1])


def _find_filed(filed: _Filed, place: HourPlace, own: Wanted, found: LookedUp) -> None:
    """Note which rows of one place are filed, and where."""
    at = np.searchsorted(filed.sequences, own.sequences)
    at[at == len(filed.sequences)] = 0
    same = filed.sequences.take(at) == own.sequences
    same &= filed.deliver_at_ms.take(at) == own.deliver_at_ms
    if own.of_subject is not None and same.any():
        numbers = filed.subjects.take(at.compress(same)).tolist()
        same[same] = own.of_subject.keep_named([filed.names[number] for number in numbers])
    found.filed[place.rows] = same
    found.locations[place.rows] = filed.locations.take(at)


def _subjects_of(batch: Batch, subjects: Subjects) -> NDArray[np.uint32]:
    """The subject of each row of a batch, by number."""
    numbers = subjects.of_batch(batch)
    if ColumnId.SUBJECT in batch.offsets:
        return numbers.take(batch.uint32s(ColumnId.SUBJECT))
    return np.repeat(numbers[:1], batch.count)


BLOCK_BYTES = 4 << 10  # Groups that are read together.
OUTCOME_BYTES = 12


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the rows that have outcomes, by rising sequence, and the block of each."""

    sequences: Sequences
    blocks: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.sequences)


class HourOutcomes:
    """What is known of one hour's dispatch log, up to the offset ``end``.

    It knows of each row with an outcome in which block of the file that stands, and nothing else. An example: groups
    begin at the offsets 0, 2,000 and 4,200, and the last one ends at 5,000. The first two are block 0; the third lies
    4,096 bytes or more behind the begin of that block, so it is block 1. To find the outcome of a row of block 1, the
    bytes from 4,200 to 5,000 are read and checked.
    """

    def __init__(self) -> None:
        self.end = 0
        self._last = 0  # Offset of the last group below ``end``.
        self._crc32c = 0  # That group ends with it.
        self._starts: list[int] = []  # Offsets of the blocks.
        self._parts: list[_Part] = []

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        return OUTCOME_BYTES * sum(map(len, self._parts))

    def read_on(self, segment: Segment, until: int, give_way: Callable[[], None]) -> None:
        """Read what has been appended since, up to the offset ``until`` at least, where a group ends.

        Raises:
            DamagedData: a group does not check, or does not follow what was read before, or none ends there.
        """
        if self.end and segment.read_front(self._last, None)[0].header_crc32c != self._crc32c:
            raise DamagedData(segment.path, segment.position(self._last), "another group stands there by now")
        while self.end < until:
            self._read_piece(segment, until, give_way)

    def _read_piece(self, segment: Segment, until: int, give_way: Callable[[], None]) -> None:
        began = last = self.end
        scan = segment.scan(began, self._crc32c)
        starts: list[int] = []
        sequences: list[Sequences] = []
        counts: list[int] = []
        while scan.offset < until:
            offset, group = scan.offset, next(scan, None)
            if group is None:
                break
            last = offset
            if not starts or offset - starts[-1] >= BLOCK_BYTES:
                starts.append(offset)
                counts.append(0)
            for _, batch in group.batches():
                sequences.append(batch.uint64s(ColumnId.SEQUENCE).copy())
                counts[-1] += batch.count
            give_way()
        _check_end(segment, scan.offset, until, scan.reason)
        if self.end != began:
            # A more urgent look-up has read on while this one gave way.
            return
        assert scan.crc32c is not None, "a group ends there"
        blocks = np.arange(len(self._starts), len(self._starts) + len(starts), dtype=np.uint32)
        part = _in_order([_Part(np.concatenate(sequences), blocks.repeat(counts))])
        add_part(self._parts, part, _in_order)
        self._starts += starts
        self.end, self._last, self._crc32c = until, last, scan.crc32c

    def has_any(self, wanted: Sequences, until: int) -> bool:
        """Whether one of the wanted rows may have an outcome up to the offset ``until``; the loop may ask, too."""
        if self.end < until:
            return True
        # The end was looked at first, so whatever another thread adds meanwhile lies behind it.
        return any(len(_blocks_of(part, wanted)) for part in tuple(self._parts))

    def find(self, segment: Segment, wanted: Sequences) -> OutcomeRows:
        """Outcomes among which are those of the wanted rows that have one.

        Raises:
            DamagedData: a group does not check.
        """
        blocks: set[int] = set()
        for part in self._parts:
            blocks.update(_blocks_of(part, wanted).tolist())
        return decode_outcomes([batch for block in sorted(blocks) for batch in self._read(segment, block)])

    def _read(self, segment: Segment, block: int) -> Iterator[Batch]:
        start = self._starts[block]
        end = self._starts[block + 1] if block + 1 < len(self._starts) else self.end
        scan = segment.scan(start, None, end - start)
        while scan.offset < end:
            group = next(scan, None)
            if group is None:
                break
            for _, batch in group.batches():
                yield batch
        _check_end(segment, scan.offset, end, scan.reason)


def _blocks_of(part: _Part, wanted: Sequences) -> NDArray[np.uint32]:
    """The blocks in which the outcomes of wanted rows stand, for those that have one."""
    return part.blocks.take(find(part.sequences, wanted)[1])


def _in_order(parts: Sequence[_Part]) -> _Part:
    sequences = np.concatenate([part.sequences for part in parts])
    order = np.argsort(sequences, kind="stable")
    return _Part(sequences.take(order), np.concatenate([part.blocks for part in parts]).take(order))


def _check_end(segment: Segment, offset: int, until: int, reason: str) -> None:
    if reason or offset != until:
        what = reason or f"no group ends at offset {until}, up to which it was fsynced"
        raise DamagedData(segment.path, segment.position(offset), what)
