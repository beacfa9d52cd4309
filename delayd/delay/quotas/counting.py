"""Counting: the pending rows of counted subjects, found by their sequences, and the reading that finds them first.

A counting reads the logs on the worker thread and in pieces. What it reads was durable when the loop made the
`Snapshot`; outcomes and rows that came later are the loop's to add.

1. The schedule logs of hours that are not sealed, and the message log above the replay offset, have the rows.
2. The dispatch logs of the hours in which rows were found have their outcomes; decisions may be ahead of them.
3. The other rows are pending.

From then on the loop holds them, 20 bytes each, in blocks whose rows rise. A block has at most BLOCK_ROWS rows, because
the loop waits while two are merged; 150 blocks are 20 million rows. Invariant: a row that was taken off is found no
more. An example, with blocks of at most 8 rows:

1. The sequences 1 3 5 7 8 9 10 11 are here. 12 and 13 come: 1 3 5 7 8 9 10 11 | 12 13.
2. A counting has found 2 and 6, which are older: 1 3 5 7 8 9 10 11 | 2 6 12 13.
3. 6 ends. It may be in both blocks, so they are put in order: 1 2 3 5 7 8 9 10 | 11 12 13.
4. 1, 3, 5, 8 and 9 end. Less than half of the first block is left, so it joins a neighbour: 2 7 10 11 12 13.
"""

import logging
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.labels import dead_letters
from delayd.batch.sequences import NO_SEQUENCES, Sequences, add_part, among, find
from delayd.delay.books.outcomes import read_outcomes
from delayd.delay.filing.hour_table import FiledHours, HourPart, HourTable
from delayd.delay.filing.schedule_log import scan_fronts
from delayd.delay.intake import Mark
from delayd.delay.quotas.seconds import Profile
from delayd.delay.rows import filing_hours, stored_batches
from delayd.errors import DamagedData, NewerFormat, SlowDown
from delayd.hours import hour_name
from delayd.log.group import GroupKind
from delayd.log.hour import EndedRows, HourRows, dispatch_path
from delayd.log.log import Log
from delayd.log.segment import FileKind, UnfinishedFile, open_segment
from delayd.machine.identity import Site

log = logging.getLogger(__name__)

SECOND_MS = 1_000
# What is wrong with an hour's file. The server sets such an hour aside and counts anew when it is whole or given up; a
# counting that lacked memory or descriptors is repeated as a whole.
UNREAD = (DamagedData, NewerFormat, FileNotFoundError, UnfinishedFile)


BLOCK_ROWS = 131_072  # Two blocks of half of this are merged in some milliseconds.
COMPACTED_MAX = 4  # Thin blocks of which one call copies what is left; a later call goes on.
ROW_BYTES = 20
DEAD_LETTERS = b""  # What dead letters are counted under, in place of their subjects; no subject has this name.
GONE = 0xFFFF_FFFF  # The subject of a row that was taken off.
NO_FIRST = 1 << 64  # Above each sequence.


class CountedRows(NamedTuple):
    """Columns of n rows, by rising sequence."""

    sequences: Sequences
    subjects: NDArray[np.uint32]  # Numbers that `Quotas` gives to counted subjects.
    seconds: NDArray[np.uint32]  # Since the epoch.
    sizes: NDArray[np.uint32]  # Bytes of bodies and headers.

    @property
    def n(self) -> int:
        """How many rows these are."""
        return len(self.sequences)

    def take(self, rows: NDArray[np.intp]) -> "CountedRows":
        """Copy some of the rows."""
        sequences, subjects, seconds, sizes = self
        return CountedRows(sequences.take(rows), subjects.take(rows), seconds.take(rows), sizes.take(rows))

    def cut(self) -> "list[CountedRows]":
        """Copy the rows into pieces that are as long as a block may be."""
        return [self.take(np.arange(low, min(self.n, low + BLOCK_ROWS))) for low in range(0, self.n, BLOCK_ROWS)]


def make_rows(sequences: Sequences, subject: int, seconds: Int64s, sizes: Int64s) -> CountedRows:
    """Rows of one subject."""
    subjects = np.full(len(sequences), subject, np.uint32)
    return CountedRows(sequences, subjects, seconds.astype(np.uint32), sizes.astype(np.uint32))


def join(parts: Sequence[CountedRows]) -> CountedRows:
    """Rows of several parts, by rising sequence."""
    sequences, subjects, seconds, sizes = (np.concatenate(columns) for columns in zip(NO_ROWS, *parts, strict=True))
    return CountedRows(sequences, subjects, seconds, sizes).take(np.argsort(sequences, kind="stable"))


NO_ROWS = CountedRows(np.empty(0, np.uint64), *(np.empty(0, np.uint32) for _ in range(3)))


class _Block:
    """Rows of which ``left`` are not gone."""

    __slots__ = ("first", "last", "left", "rows")

    def __init__(self, rows: CountedRows) -> None:
        """Take rows, none of which is gone."""
        self.rows = rows
        self.first, self.last, self.left = int(rows.sequences[0]), int(rows.sequences[-1]), rows.n

    def __len__(self) -> int:
        return self.left

    @property
    def is_thin(self) -> bool:
        return 2 * self.left < self.rows.n

    def rows_left(self) -> CountedRows:
        return self.rows.take(np.flatnonzero(self.rows.subjects != GONE))

    def take_off(self, at: NDArray[np.intp]) -> CountedRows:
        """Take off the rows at these places, but for those that are gone."""
        found = self.rows.take(at.compress(self.rows.subjects.take(at) != GONE))
        self.rows.subjects[at] = GONE
        self.left -= found.n
        return found


class AllCounted:
    """The rows of all counted subjects.

    Blocks stand in the order of their lowest sequences. What a counting finds may lie between the rows that came
    meanwhile, or that another counting found, so blocks may overlap: 1 to 90 and 40 to 70. A removal that meets such
    two puts the rows of both in order, 1 to 60 and 61 to 90, until no removal meets two for one sequence.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._thin: list[_Block] = []  # Most of their rows are gone, and their memory is not given back yet.
        self._new: list[CountedRows] = []  # Rows that came last: mostly one each, so they are joined when many came.
        self._new_rows, self._new_first = 0, NO_FIRST

    @property
    def held_bytes(self) -> int:
        """Memory of the rows."""
        return ROW_BYTES * (sum(block.rows.n for block in self._blocks) + self._new_rows)

    def add(self, rows: CountedRows) -> None:
        """Take rows of a batch that came, by rising sequence and behind those of all batches before."""
        if rows.n:
            # Rows of a batch come subject by subject, so the lowest one may come last.
            self._new_first = min(self._new_first, int(rows.sequences[0]))
            self._new.append(rows)
            self._new_rows += rows.n
            if self._new_rows >= BLOCK_ROWS:
                self._put_in_blocks()

    def found(self, rows: CountedRows) -> None:
        """Take a piece of the rows that a counting has found, by rising sequence."""
        if rows.n:
            self._put_in_blocks()
            block = _Block(rows)
            insort(self._blocks, block, key=_first)
            self._fit(block)

    def remove(self, sequences: Sequences) -> CountedRows:
        """Take off those of these rows that are here; returns them. ``sequences`` rise."""
        if not len(sequences):
            self._tidy([])
            return NO_ROWS
        low, high = int(sequences[0]), int(sequences[-1])
        if high >= self._new_first:
            self._put_in_blocks()
        met = [block for block in self._blocks if block.first <= high and low <= block.last]
        found = [block.take_off(np.unique(find(block.rows.sequences, sequences)[1])) for block in met]
        self._thin += [block for block in met if block.is_thin]
        self._tidy(met)
        return found[0] if len(found) == 1 else join(found)

    def forget(self, *numbers: int) -> None:
        """Forget the rows of subjects that are not counted any more."""
        self._put_in_blocks()
        for block in self._blocks:
            block.take_off(np.flatnonzero(np.isin(block.rows.subjects, np.array(numbers, np.uint32))))
        self._thin = [block for block in self._blocks if block.is_thin]
        self._tidy([])

    def _put_in_blocks(self) -> None:
        """Put the rows that came last into blocks."""
        if self._new:
            new, self._new, self._new_rows, self._new_first = self._new, [], 0, NO_FIRST
            for rows in join(new).cut():
                add_part(self._blocks, _Block(rows), _merged, BLOCK_ROWS)

    def _tidy(self, met: Sequence[_Block]) -> None:
        """Give back the memory of rows that are gone, and put two blocks in order that overlap."""
        thin, self._thin = self._thin[:COMPACTED_MAX], self._thin[COMPACTED_MAX:]
        for block in thin:
            if block in self._blocks:
                self._fit(block)
        for one, other in pairwise(met):
            if one.last >= other.first and one in self._blocks and other in self._blocks:
                self._replace(one, other)
                return

    def _fit(self, block: _Block) -> None:
        """Make one block of this one and a neighbour that is not much longer, or copy what is left of a thin one."""
        at, own = self._blocks.index(block), len(block)
        sides = [each for each in self._blocks[max(0, at - 1) : at + 2] if each is not block]
        near = [each for each in sides if len(each) <= min(2 * own, BLOCK_ROWS - own)][:1]
        if near or block.is_thin:
            self._replace(block, *near)

    def _replace(self, *blocks: _Block) -> None:
        rows = join([block.rows_left() for block in blocks])
        self._blocks = [block for block in self._blocks if block not in blocks]
        for piece in rows.cut():
            insort(self._blocks, _Block(piece), key=_first)


def _first(block: _Block) -> int:
    return block.first


class Pending:
    """How many messages of a subject are pending, with how many bytes, and how many are due in each second."""

    __slots__ = ("bytes", "profile", "rows")

    def __init__(self) -> None:
        self.rows = self.bytes = 0
        self.profile = Profile()

    def add(self, seconds: Int64s, sizes: NDArray[np.integer]) -> None:
        """Count messages."""
        self.rows += len(seconds)
        self.bytes += int(sizes.sum(dtype=np.int64))
        self.profile.add(seconds)

    def remove(self, seconds: Int64s, sizes: NDArray[np.integer], after_s: int = -1) -> None:
        """Count messages no more. Those that have left count in their second up to ``after_s``: a second would have
        room again and again until it is over.
        """
        self.rows -= len(seconds)
        self.bytes -= int(sizes.sum(dtype=np.int64))
        self.profile.remove(seconds.compress(seconds > after_s))

    def merge(self, other: "Pending") -> None:
        """Take what another one counts, which is used no more."""
        self.rows += other.rows
        self.bytes += other.bytes
        # The other one is a reading of all logs, and mostly larger.
        other.profile.merge(self.profile)
        self.profile = other.profile


def _merged(blocks: Sequence[_Block]) -> _Block:
    return _Block(join([block.rows_left() for block in blocks]))


class Snapshot(NamedTuple):
    """What the loop knew when the counting began."""

    subjects: Mapping[bytes, int]  # The subjects to be counted, and their numbers.
    flags: int  # Hours without these flags have none of their rows.
    filed: HourRows
    beside: HourRows
    replay: Mark
    durable: int
    outcome_ends: Mapping[int, int]  # By hour: the durable end of its dispatch log.
    ended: list[EndedRows]  # Rows that decisions have ended; their outcomes may not be written.
    room_bytes: int  # What the counts may take.


class Found(NamedTuple):
    """The result of a counting."""

    rows: list[CountedRows]  # In pieces, as `AllCounted` takes them.
    pending: dict[int, Pending]  # By the subject's number.


class Counting:
    """One reading of the logs of a directory, on the worker thread."""

    def __init__(self, site: Site, message_log: Log, snapshot: Snapshot, give_way: Callable[[], None]) -> None:
        self._site = site
        self._message_log = message_log
        self._snapshot = snapshot
        self._give_way = give_way
        self._hours: set[int] = set()  # In which rows were found.
        self._rows = 0

    def run(self) -> Found:
        """Count.

        Raises:
            SlowDown: the counts take more memory than there is room for.
            DataError: the message log can't be read, or nothing can now (Shortage).
        """
        filed = FiledHours(HourTable(self._snapshot.filed), HourTable(self._snapshot.beside))
        parts = [*self._logged()]
        for hour in filed.all().tolist():
            if not filed.get(hour).sealed:
                for part in filed.parts(hour):
                    if part.counted.flags & self._snapshot.flags == self._snapshot.flags:
                        parts += self._filed(part)
                self._give_way()
        rows = self._without_ended(join(parts))
        return Found(rows.cut(), self._pending(rows))

    def _logged(self) -> Iterator[CountedRows]:
        """Rows of the message log that are not filed yet."""
        snapshot = self._snapshot
        for group in self._message_log.scan(snapshot.replay.offset, snapshot.durable, snapshot.replay.crc32c):
            if group.header.kind != GroupKind.DATA:
                continue
            appended_at_ms = group.header.appended_at_ms
            for stored in stored_batches(group):
                batch = stored.batch
                sequences = np.arange(stored.base_sequence, stored.base_sequence + batch.count, dtype=np.uint64)
                yield from self._wanted(batch, sequences, appended_at_ms)
                self._hours.update(filing_hours(batch.int64s(ColumnId.DELIVER_AT_MS), appended_at_ms).tolist())
            self._give_way()

    def _filed(self, part: HourPart) -> list[CountedRows]:
        """Rows of a schedule log."""
        site, found = self._site, list[CountedRows]()
        try:
            for stored in scan_fronts(site.disk, site.folder, site.log_id, part):
                # It does not matter which second of the past a row counts in: no row is accepted for it any more.
                found += self._wanted(stored.batch, stored.batch.uint64s(ColumnId.SEQUENCE), 0)
        except UNREAD as error:
            log.warning("hour_not_counted hour=%s reason=%r", hour_name(part.hour), str(error))
        if found:
            self._hours.add(part.hour)
        return found

    def _wanted(self, batch: Batch, sequences: Sequences, accepted_at_ms: int) -> Iterator[CountedRows]:
        for number, own, seconds, sizes in rows_of_subjects(batch, self._snapshot.subjects, accepted_at_ms):
            self._rows += len(own)
            if self._rows * ROW_BYTES > self._snapshot.room_bytes:
                raise SlowDown(f"to count {self._rows} messages and more takes more memory than allowed")
            yield make_rows(sequences.take(own), number, seconds, sizes)

    def _without_ended(self, rows: CountedRows) -> CountedRows:
        # There may be millions of ended rows, so they are put in order here, and not on the loop.
        ended = np.sort(np.concatenate([NO_SEQUENCES, *(part["sequence"] for part in self._snapshot.ended)]))
        pending = ~among(rows.sequences, ended)
        for hour, end in self._snapshot.outcome_ends.items():
            if hour in self._hours and end:
                pending[find(rows.sequences, np.sort(self._outcomes(hour, end)))[1]] = False
                self._give_way()
        return rows.take(np.flatnonzero(pending))

    def _outcomes(self, hour: int, end: int) -> Sequences:
        try:
            path = dispatch_path(self._site.folder, hour)
            segment = open_segment(self._site.disk, path, FileKind.DISPATCH, self._site.log_id, write=False)
            try:
                return read_outcomes(segment, end, self._give_way).sequences
            finally:
                segment.close()
        except UNREAD as error:
            # Without it all rows of the hour count as pending, which is too many rather than too few.
            log.warning("hour_not_counted hour=%s reason=%r", hour_name(hour), str(error))
            return NO_SEQUENCES

    def _pending(self, rows: CountedRows) -> dict[int, Pending]:
        """What is pending for each subject."""
        counts: dict[int, Pending] = {}
        room_bytes = self._snapshot.room_bytes - rows.n * ROW_BYTES
        order = np.argsort(rows.subjects, kind="stable")
        subjects = rows.subjects.take(order)
        for number in self._snapshot.subjects.values():
            own = order[subjects.searchsorted(number) : subjects.searchsorted(number, "right")]
            counts[number] = pending = Pending()
            pending.add(rows.seconds.take(own).astype(np.int64), rows.sizes.take(own))
            room_bytes -= pending.profile.held_bytes
            if room_bytes < 0:
                raise SlowDown("to count the messages of all seconds takes more memory than allowed")
            self._give_way()
        return counts


def rows_of_subjects(
    batch: Batch, subjects: Mapping[bytes, int], accepted_at_ms: int
) -> Iterable[tuple[int, NDArray[np.intp], Int64s, Int64s]]:
    """For each of these subjects that a batch has: its number, its rows, the seconds in which they are due, and their
    bytes.

    A row that was due when it was accepted counts in the second in which it was. Dead letters count as `DEAD_LETTERS`
    alone: no subject of theirs is counted.
    """
    numbers = [subjects.get(name) for name in batch.subjects()]
    found = {number for number in numbers if number is not None}
    letters = dead_letters(batch).tolist() if DEAD_LETTERS in subjects else []
    if not found and not letters:
        return []
    seconds = np.maximum(batch.int64s(ColumnId.DELIVER_AT_MS), accepted_at_ms) // SECOND_MS
    sizes = batch.body_bytes()
    if ColumnId.HEADERS_END in batch:
        starts, ends = batch.region(ColumnId.HEADERS_END)
        sizes += ends - starts
    if len(numbers) == 1 and found:
        return [(found.pop(), np.arange(batch.count), seconds, sizes)]
    # A table may name a subject twice.
    number_of = np.array([-1 if number is None else number for number in numbers])
    of_rows = number_of.take(batch.uint32s(ColumnId.SUBJECT)) if len(numbers) > 1 else np.full(batch.count, -1)
    if letters:
        found.add(subjects[DEAD_LETTERS])
        of_rows[letters] = subjects[DEAD_LETTERS]
    order = np.argsort(of_rows, kind="stable")
    wanted = np.array(sorted(found))
    bounds = np.searchsorted(of_rows.take(order), (wanted, wanted + 1)).T.tolist()
    rows = [
        (number, order[low:high]) for number, (low, high) in zip(wanted.tolist(), bounds, strict=True) if low < high
    ]
    return [(number, own, seconds.take(own), sizes.take(own)) for number, own in rows]
