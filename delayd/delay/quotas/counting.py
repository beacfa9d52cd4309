"""Counting: it reads from the logs which rows of some subjects are pending, on the worker thread and in pieces.

What is read was durable when the loop made the `Snapshot`. Outcomes and rows that came later are the loop's to add.

1. The schedule logs of hours that are not sealed, and the message log above the replay offset, have the rows.
2. The dispatch logs of the hours in which rows were found have the outcomes; decisions may be ahead of them.
3. The other rows are pending.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.sequences import among
from delayd.delay.books.dispatch_logs import read_outcomes
from delayd.delay.filing.hour_table import HourTable
from delayd.delay.filing.schedule_log import scan_fronts
from delayd.delay.intake import Mark
from delayd.delay.quarantine import schedule_beside_path
from delayd.delay.quotas.counted import ROW_BYTES, CountedRows, join, make_rows
from delayd.delay.quotas.profile import Profile
from delayd.delay.rows import filing_hours
from delayd.delay.stored import stored_batches
from delayd.errors import DamagedData, NewerFormat, SlowDown
from delayd.hours import hour_name
from delayd.log.ended import EndedRows
from delayd.log.group import GroupKind
from delayd.log.log import Log
from delayd.log.schedule import HourRows, dispatch_path
from delayd.log.segment import FileKind, UnfinishedFile, open_segment
from delayd.machine.disk import Disk

log = logging.getLogger(__name__)

SECOND_MS = 1_000
# What is wrong with an hour's file. The server sets such an hour aside and counts anew when it is whole or given up; a
# counting that lacked memory or descriptors is repeated as a whole.
UNREAD = (DamagedData, NewerFormat, FileNotFoundError, UnfinishedFile)


class Snapshot(NamedTuple):
    """What the loop knew when the counting began."""

    subjects: Mapping[bytes, int]  # The subjects to be counted, and their numbers.
    filed: HourRows
    beside: HourRows
    replay: Mark
    durable: int
    outcome_ends: Mapping[int, int]  # By hour: the durable end of its dispatch log.
    ended: list[EndedRows]  # Rows that decisions have ended; their outcomes may not be written.
    room_bytes: int  # What the counts may take.


class Tallied(NamedTuple):
    """What is pending for one subject."""

    rows: int
    bytes: int
    profile: Profile


class Found(NamedTuple):
    """The result of a counting."""

    rows: CountedRows
    tallied: dict[int, Tallied]  # By the subject's number.


class Counting:
    """One reading of the logs of a directory."""

    def __init__(
        self, disk: Disk, folder: str, log_id: int, message_log: Log, snapshot: Snapshot, give_way: Callable[[], None]
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._log_id = log_id
        self._message_log = message_log
        self._snapshot = snapshot
        self._give_way = give_way
        self._rows = 0
        self._ended = np.empty(0, np.uint64)  # Their sequences, sorted.

    def run(self) -> Found:
        """Count.

        Raises:
            SlowDown: the counts take more memory than there is room for.
            DataError: the message log can't be read, or nothing can now (Shortage).
        """
        # There may be millions of them, so they are put in order here, and not on the loop.
        self._ended = np.sort(np.concatenate([self._ended, *(part["sequence"] for part in self._snapshot.ended)]))
        by_hour: defaultdict[int, list[CountedRows]] = defaultdict(list)
        for hour, rows in self._logged():
            by_hour[hour].append(rows)
        filed, beside = HourTable(self._snapshot.filed), HourTable(self._snapshot.beside)
        for hour in sorted({*filed.rows["hour"].tolist(), *beside.rows["hour"].tolist()}):
            if not filed.get(hour).sealed:
                by_hour[hour] += self._filed(hour, filed, beside)
                self._give_way()
        pending = [self._without_ended(hour, parts) for hour, parts in by_hour.items() if parts]
        self._give_way()
        rows = join(pending)
        return Found(rows, self._tally(rows))

    def _logged(self) -> Iterator[tuple[int, CountedRows]]:
        """Rows of the message log that are not filed yet, by hour."""
        snapshot = self._snapshot
        for group in self._message_log.scan(snapshot.replay.offset, snapshot.durable, snapshot.replay.crc32c):
            if group.header.kind != GroupKind.DATA:
                continue
            appended_at_ms = group.header.appended_at_ms
            for stored in stored_batches(group):
                batch = stored.batch
                sequences = np.arange(stored.base_sequence, stored.base_sequence + batch.count, dtype=np.uint64)
                hours = filing_hours(batch.int64s(ColumnId.DELIVER_AT_MS), appended_at_ms)
                for rows, own in self._wanted(batch, sequences, appended_at_ms):
                    for hour in np.unique(hours.take(own)).tolist():
                        yield hour, rows.take(np.flatnonzero(hours.take(own) == hour))
            self._give_way()

    def _filed(self, hour: int, filed: HourTable, beside: HourTable) -> list[CountedRows]:
        """Rows of an hour's schedule log, and of the file beside it."""
        found: list[CountedRows] = []
        for file, path in ((filed.get(hour), ""), (beside.get(hour), schedule_beside_path(self._folder, hour))):
            try:
                for stored in scan_fronts(self._disk, self._folder, self._log_id, hour, file, path):
                    # It does not matter which second of the past a row counts in: no row is accepted for it any more.
                    sequences = stored.batch.uint64s(ColumnId.SEQUENCE)
                    found += [rows for rows, _ in self._wanted(stored.batch, sequences, 0)]
            except UNREAD as error:
                log.warning("quota_hour_not_counted hour=%s reason=%r", hour_name(hour), str(error))
        return found

    def _wanted(
        self, batch: Batch, sequences: NDArray[np.uint64], accepted_at_ms: int
    ) -> Iterator[tuple[CountedRows, NDArray[np.intp]]]:
        for number, own, seconds, sizes in rows_of_subjects(batch, self._snapshot.subjects, accepted_at_ms):
            self._rows += len(own)
            if self._rows * ROW_BYTES > self._snapshot.room_bytes:
                raise SlowDown(f"to count {self._rows} messages and more takes more memory than allowed")
            yield make_rows(sequences.take(own), number, seconds, sizes), own

    def _without_ended(self, hour: int, parts: list[CountedRows]) -> CountedRows:
        rows = join(parts)
        gone = among(rows.sequences, self._ended)
        end = self._snapshot.outcome_ends.get(hour, 0)
        if end:
            gone |= among(rows.sequences, np.sort(self._outcomes(hour, end), kind="stable"))
        self._give_way()
        return rows.take(np.flatnonzero(~gone))

    def _outcomes(self, hour: int, end: int) -> NDArray[np.uint64]:
        try:
            path = dispatch_path(self._folder, hour)
            segment = open_segment(self._disk, path, FileKind.DISPATCH, self._log_id, write=False)
            try:
                return read_outcomes(segment, end, self._give_way).sequences
            finally:
                segment.close()
        except UNREAD as error:
            # Without it all rows of the hour count as pending, which is too many rather than too few.
            log.warning("quota_hour_not_counted hour=%s reason=%r", hour_name(hour), str(error))
            return np.empty(0, np.uint64)

    def _tally(self, rows: CountedRows) -> dict[int, Tallied]:
        """What is pending for each subject."""
        tallied: dict[int, Tallied] = {}
        room_bytes = self._snapshot.room_bytes - len(rows.sequences) * ROW_BYTES
        order = np.argsort(rows.subjects, kind="stable")
        bounds = np.searchsorted(rows.subjects.take(order), [*self._snapshot.subjects.values()])
        ends = np.searchsorted(rows.subjects.take(order), [*self._snapshot.subjects.values()], "right")
        for number, low, high in zip(self._snapshot.subjects.values(), bounds.tolist(), ends.tolist(), strict=True):
            own = order[low:high]
            profile = Profile()
            profile.add(rows.seconds.take(own).astype(np.int64))
            room_bytes -= profile.held_bytes
            if room_bytes < 0:
                raise SlowDown("to count the messages of all seconds takes more memory than allowed")
            tallied[number] = Tallied(len(own), int(rows.sizes.take(own).sum(dtype=np.int64)), profile)
            self._give_way()
        return tallied


def rows_of_subjects(
    batch: Batch, subjects: Mapping[bytes, int], accepted_at_ms: int
) -> Iterable[tuple[int, NDArray[np.intp], Int64s, Int64s]]:
    """For each of these subjects that a batch has: its number, its rows, the seconds in which they are due, and their
    bytes.

    A row that was due when it was accepted counts in the second in which it was.
    """
    numbers = [subjects.get(name) for name in batch.subjects()]
    found = {number for number in numbers if number is not None}
    if not found:
        return []
    seconds = np.maximum(batch.int64s(ColumnId.DELIVER_AT_MS), accepted_at_ms) // SECOND_MS
    sizes = batch.body_bytes()
    if ColumnId.HEADERS_END in batch:
        starts, ends = batch.region(ColumnId.HEADERS_END)
        sizes += ends - starts
    if len(numbers) == 1:
        return [(found.pop(), np.arange(batch.count), seconds, sizes)]
    # A table may name a subject twice.
    number_of = np.array([-1 if number is None else number for number in numbers])
    of_rows = number_of.take(batch.uint32s(ColumnId.SUBJECT))
    order = np.argsort(of_rows, kind="stable")
    wanted = np.array(sorted(found))
    bounds = np.searchsorted(of_rows.take(order), (wanted, wanted + 1)).T.tolist()
    rows = [
        (number, order[low:high]) for number, (low, high) in zip(wanted.tolist(), bounds, strict=True) if low < high
    ]
    return [(number, own, seconds.take(own), sizes.take(own)) for number, own in rows]
