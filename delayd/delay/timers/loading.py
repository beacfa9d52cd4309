"""Loading: the coming hours enter the wheel, one after the other, before anything of them is due (rules P5, P7, B2).

A load reads the rows that the checkpoint counts, without those that have an outcome. After a long silence many hours
have passed that are not loaded. They are loaded in runs, many hours at a time, because most have few rows or none; no
new row is filed in such an hour. If an operator sets the log back meanwhile, new rows may be: then the run is left, and
its hours are loaded one by one.

Invariant: one replay offset divides the rows of an hour that is attached: below it they come from the schedule log, as
far as the last checkpoint counted it, above it from the pending rows. A load may run while a checkpoint writes. If that
checkpoint is counted before the load is attached, the load is done again. No other checkpoint begins meanwhile, so this
happens once at most.

An example, with loads ten minutes ahead. Message 1 of the hour from 16:00 is filed, message 2 came after the last
checkpoint. At 15:50 the worker reads row 1 from the schedule log. Row 2 is among the pending rows, and both are put in
order beside the loop. Message 3 comes meanwhile; its hour is not loaded, so its row is kept with the pending ones, and
goes into the wheel when the hour is attached. Had a checkpoint filed 2 and 3 in between, all would be read again.

     what is due ──▶ read the schedule logs ──▶ number their subjects ──▶ order the rows ──▶ attach
                     (worker thread)            (loop)                    (worker thread)    (loop)
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import ColumnId
from delayd.batch.sequences import NO_SEQUENCES, Sequences, SequenceSet, among
from delayd.delay.filing.checkpointer import Checkpointer
from delayd.delay.filing.hour_table import FiledHours, HourPart, HourTable
from delayd.delay.filing.pending import PendingRows, counts_of_hours, rows_of_hour, rows_of_hours
from delayd.delay.filing.schedule_log import scan_fronts
from delayd.delay.rows import (
    ROW,
    Rows,
    Stored,
    copy_rows,
    hour_span,
    join_rows,
    numbers_of,
    rows_of,
    subjects_of,
    tabulate,
    without,
)
from delayd.delay.subjects import Subjects
from delayd.delay.timers.hour_wheel import PreparedRows, prepare
from delayd.delay.timers.wheel import Wheel
from delayd.errors import DamagedData, Shortage
from delayd.hours import hour_name, hour_of_ms
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.machine.disk import Disk
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site

RUN_HOURS = 4_096  # Looked at together, when they have passed.

log = logging.getLogger(__name__)


PIECE_ROWS = 32_768  # Made into pending rows at a time: their columns stay in the processor's cache meanwhile.
# A run of hours that have passed has so many rows at most, and so many hours with rows: the loop takes some 10 ms to
# attach it, and for each hour that is filed a file is read.
RUN_ROWS = 16_384
RUN_FILLED = 256


class LoadedHour(NamedTuple):
    """An hour as its schedule log has it; ``prepared`` names each subject by its place in ``names``."""

    hour: int
    prepared: PreparedRows
    names: list[bytes]
    damage: DamagedData | None
    unread: int  # Rows of its files that the damage keeps from being read.

    @property
    def sequences(self) -> NDArray[np.uint64]:
        """The sequences of its rows, sorted: a copy."""
        return np.sort(self.prepared.rows["sequence"])


def load_hour(
    disk: Disk,
    folder: str,
    log_id: int,
    hour: int,
    parts: Sequence[HourPart],
    ended: NDArray[np.uint64] = NO_SEQUENCES,
    *,
    whole: bool = False,
) -> LoadedHour:
    """Read an hour, without the rows whose sequences are ``ended`` (sorted), and unless ``whole`` without those that
    were handed over before they were filed: these have ended, too. Runs on the worker thread.

    Bodies are not read here: a row's whole batch is verified before the row is handed over. Bytes that do not check are
    quarantined together with all that follows them in the file: ``damage`` says where first.
    """
    subjects, has_outcome = Subjects(), SequenceSet(ended, sum([part.counted.rows for part in parts]))
    rows, damage, unread = list[Rows](), None, 0
    for part in parts:
        of_part, read, found = _load(scan_fronts(disk, folder, log_id, part), hour, has_outcome, subjects, whole=whole)
        rows, damage, unread = rows + of_part, damage or found, unread + part.counted.rows - read
    return LoadedHour(hour, prepare(_joined(rows)), subjects.names, damage, unread)


class FilesOfHour(NamedTuple):
    """What is filed of an hour, and which of its rows have an outcome: sequences that rise."""

    parts: tuple[HourPart, ...]
    ended: NDArray[np.uint64]

    @property
    def rows(self) -> int:
        """How many rows its files have."""
        return sum([part.counted.rows for part in self.parts])


NO_FILES = FilesOfHour((), NO_SEQUENCES)


class LoadedRun(NamedTuple):
    """Neighbouring hours that were loaded together; ``loaded`` are those of them that are filed, and a single one."""

    hours: range
    loaded: list[LoadedHour]


def load_run(site: Site, hours: range, files: Mapping[int, FilesOfHour], kept: Sequence[Rows]) -> LoadedRun:
    """Read a single hour, or of hours that have passed the first ones, as many as a run may have.

    ``files`` has the hours that are filed, rising, and ``kept`` the rows that no checkpoint counts. Runs on the worker
    thread.
    """
    if len(hours) > 1:
        hours = _run_of(hours, files, kept)
    filed = hours if len(hours) == 1 else [hour for hour in files if hour in hours]
    load = partial(load_hour, site.disk, site.folder, site.log_id)
    return LoadedRun(hours, [load(hour, *files.get(hour, NO_FILES)) for hour in filed])


def _run_of(hours: range, files: Mapping[int, FilesOfHour], kept: Sequence[Rows]) -> range:
    counts = counts_of_hours(kept, hours)
    for hour, of_hour in files.items():
        counts[hour - hours.start] += of_hour.rows
    whole = (np.cumsum(counts) <= RUN_ROWS) & (np.cumsum(counts > 0) <= RUN_FILLED)
    return hours[: max(1, int(np.count_nonzero(whole)))]


def order_run(
    run: LoadedRun,
    numbers: Sequence[NDArray[np.uint32]],
    kept: Sequence[Rows],
    ended: Mapping[int, NDArray[np.uint64]],
) -> Rows:
    """Put all rows of a run of hours that have passed into the order of their hours.

    ``numbers`` are the server's numbers of the subjects of each loaded hour. Kept rows whose sequences are ``ended``
    are left out. Runs on the worker thread, and takes the loaded rows over.
    """
    parts: list[Rows] = []
    for loaded, of_loaded in zip(run.loaded, numbers, strict=True):
        rows = loaded.prepared.rows
        rows["subject"] = of_loaded.take(rows["subject"])
        parts.append(rows)
    rows = rows_of_hours(kept, run.hours)
    for hour, sequences in ended.items():
        of_hour = np.flatnonzero(rows["hour"] == np.uint32(hour))
        rows = np.delete(rows, of_hour.compress(among(rows["sequence"].take(of_hour), sequences)))
    joined = join_rows([*parts, rows])
    return joined.take(np.argsort(joined["hour"], kind="stable"))


def _load(
    fronts: Iterator[Stored], hour: int, has_outcome: SequenceSet, subjects: Subjects, *, whole: bool
) -> tuple[list[Rows], int, DamagedData | None]:
    """Read the rows of a file as far as it checks: those to load, how many there are of all, and the damage that
    stopped the reading early.
    """
    parts, damage, stored, count, read = [np.empty(0, ROW)], None, list[Stored](), 0, 0
    while True:
        try:
            entry = next(fronts, None)
        except DamagedData as error:
            entry, damage = None, error
            # Damage to the file's header makes all of the file unusable.
            if error.position <= FILE_HEADER_BYTES:
                return [np.empty(0, ROW)], 0, damage
        if stored and (entry is None or count >= PIECE_ROWS):
            found = _rows_of(stored, hour, subjects)
            parts.append(has_outcome.without(found if whole else _with_bodies(found, stored)))
            stored, count, read = [], 0, read + count
        if entry is None:
            return parts, read, damage
        stored.append(entry)
        count += entry.batch.count


def _joined(parts: list[Rows]) -> Rows:
    """Join parts and empty the list: each is given back as soon as it is copied, so a large hour is there once."""
    joined = np.empty(sum(map(len, parts)), ROW)
    end = len(joined)
    while parts:
        part = parts.pop()
        end -= len(part)
        copy_rows(joined, end, part)
    return joined


def order_hour(
    loaded: LoadedHour, numbers: NDArray[np.uint32], kept: Sequence[Rows], ended: NDArray[np.uint64]
) -> list[PreparedRows]:
    """Order all rows of an hour for the wheel: those that were loaded, and the hour's rows among the ``kept`` ones.

    ``numbers`` are the server's numbers of the loaded subjects. Kept rows whose sequences are ``ended`` are left out.
    Runs on the worker thread, and takes the loaded rows over.
    """
    rows = loaded.prepared.rows
    # A server's first subjects mostly have the same numbers here and there, and a large hour is written for nothing.
    if len(rows) and not np.array_equal(numbers, np.arange(len(numbers))):
        rows["subject"] = numbers.take(rows["subject"])
    return [loaded.prepared, prepare(without(rows_of_hour(kept, loaded.hour), ended))]


def _rows_of(stored: list[Stored], hour: int, subjects: Subjects) -> Rows:
    table = tabulate(stored)
    hours = np.full(len(table.sequences), hour, np.uint32)
    return rows_of(stored, table, subjects_of(stored, numbers_of(stored, subjects)), hours, in_schedule_log=True)


def _with_bodies(rows: Rows, stored: Sequence[Stored]) -> Rows:
    """Rows whose bodies are in the file: the others were handed over before they were filed, and are never sent
    again.
    """
    if not any(ColumnId.BODY_LEFT_OUT in entry.batch for entry in stored):
        return rows
    left_out = [
        entry.batch.uint32s(ColumnId.BODY_LEFT_OUT)
        if ColumnId.BODY_LEFT_OUT in entry.batch
        else np.zeros(entry.batch.count, np.uint32)
        for entry in stored
    ]
    return rows.take(np.flatnonzero(np.concatenate(left_out) == 0))


@dataclass(slots=True)
class Hours:
    """All that is known of hours; for the loop alone."""

    filed: HourTable
    beside: HourTable  # The files beside damaged schedule logs: how much of them a checkpoint counts.
    pending: PendingRows
    wheel: Wheel
    subjects: Subjects
    withheld: set[int]  # Hours of which nothing is loaded, because any of their rows may have been handed over.
    loaded: range  # Hours that were loaded in this life; those before it were over at the start.
    loading: range = range(0)  # What is being loaded, or is to be loaded, though that may wait for something.

    @property
    def files(self) -> FiledHours:
        """The files that have rows of the hours."""
        return FiledHours(self.filed, self.beside)

    @property
    def loaded_until(self) -> int:
        """The last loaded hour."""
        return self.loaded.stop - 1

    def is_loaded(self, hour: int) -> bool:
        """Whether the rows of an hour are in the wheel, or have left it."""
        return hour < self.loaded.stop and hour not in self.withheld

    def are_far(self, hours: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of these are hours that are not loaded."""
        found: NDArray[np.bool_] = hours >= np.uint32(max(0, self.loaded.stop))
        if self.withheld:
            found |= np.isin(hours, np.array(sorted(self.withheld), np.uint32))
        return found

    def put_back(self, rows: Rows) -> None:
        """Put rows into the wheel whose hours may have left it."""
        for hour in np.unique(rows["hour"]).tolist():
            if not self.wheel.has_hour(hour):
                self.wheel.add_hour(hour)
        self.wheel.insert(rows)


Attached = Callable[[Sequence[LoadedHour]], None]
"""Called with the hours that have files, when they are loaded, in full or in part."""


class Loading:
    """Loads hours beside the loop; belongs to the loop."""

    def __init__(
        self,
        site: Site,
        hours: Hours,
        ended_in: Callable[[range], dict[int, Sequences]],
        load_ahead_ms: int,
        checkpointer: Checkpointer,
        attached: Attached,
    ) -> None:
        self.running = False
        self._hours = hours
        self._ended_in = ended_in  # Tells the rows of some hours that have ended, sorted: they are left out.
        self._site = site
        self._filed = hours.filed
        self._pending = hours.pending
        self._wheel = hours.wheel
        self._subjects = hours.subjects
        self._beside = hours.beside
        self._load_ahead_ms = load_ahead_ms
        self._checkpointer = checkpointer
        self._attached = attached
        self._short: Shortage | None = None
        self._reopened = False  # Whether the log was set back since the load began that is under way.

    @property
    def next_hour(self) -> int | None:
        """An hour that is not loaded, so that none between it and the loaded ones has rows; None when none has any."""
        filed, kept = self._filed.next_after(self._hours.loaded_until), self._pending.first_kept_hour
        hours = [hour for hour in (filed, kept) if hour is not None]
        return max(min(hours), self._hours.loaded_until + 1) if hours else None

    def take(self, rows: Rows) -> None:
        """Take rows that have just become durable: those of loaded hours enter the wheel, the others are kept."""
        span, loaded = hour_span(rows), self._hours.loaded
        if span[1] >= loaded.stop or self._hours.withheld:
            far = self._hours.are_far(rows["hour"])
            self._pending.keep(rows.take(np.flatnonzero(far)))
            rows = rows.take(np.flatnonzero(~far))
            span = hour_span(rows) if len(rows) else (loaded.start, loaded.start)
        self._pending.count(rows, span)
        if span[0] < loaded.start:
            # The clock was set back to before the start. Rows that these hours held then were loaded at the start, so
            # only these new rows are missing from the wheel.
            self._hours.put_back(rows)
        else:
            self._wheel.insert(rows, span)

    def reopen(self) -> None:
        """The log was set back: hours up to the last loaded one, which were empty and left the wheel, may get rows."""
        self._hours.loaded = range(self._hours.loaded.stop, self._hours.loaded.stop)
        self._reopened = self.running

    def drop_empty(self, before: int) -> None:
        """Drop the hours before this one that are empty."""
        for hour in self._wheel.hours():
            if hour < before and not self._wheel.len_of(hour):
                self._wheel.drop_hour(hour)

    def step(self, filing_ms: int, reach: int, passed: int, put_off: Callable[[], Collection[int]]) -> None:
        """Begin to load the next hours when they are due. New rows are filed in the hour of ``filing_ms`` or later, and
        in no hour before ``passed``.

        ``reach`` is the last hour that the log was ever stamped in: its rows may be due long before it, if the log was
        set back since. ``put_off`` names hours that are loaded later: rows of them are being claimed.
        """
        if self.running:
            return
        first = self._hours.loaded_until + 1
        stop = max(hour_of_ms(filing_ms + self._load_ahead_ms), reach) + 1
        self._hours.loading = range(first, min(stop, first + 1))
        if first >= stop:
            return
        later = {hour for hour in put_off() if hour >= first}
        if first in later:
            return
        if first in self._hours.withheld:
            self._load_until(first)
            self._hours.loading = range(first + 1, min(stop, first + 2))
            return
        stop = min(stop, passed, first + RUN_HOURS, *later, *(hour for hour in self._hours.withheld if hour > first))
        self.running = True
        self._read(range(first, max(stop, first + 1)))

    def _read(self, hours: range) -> None:
        self._hours.loading = hours
        filed = sorted({*self._filed.within(hours), *self._beside.within(hours)})
        ended = self._ended_in(hours)
        parts = self._hours.files.parts
        files = {hour: FilesOfHour(parts(hour), ended.get(hour, NO_SEQUENCES)) for hour in filed}
        work = partial(load_run, self._site, hours, files, self._pending.views(0))
        self._site.worker.submit(work, partial(self._number, self._checkpointer.replay.offset), Priority.DUE)

    def _load_until(self, hour: int) -> None:
        self._hours.loaded = range(self._hours.loaded.start, hour + 1)

    def _ended_of(self, hour: int) -> Sequences:
        return self._ended_in(range(hour, hour + 1)).get(hour, NO_SEQUENCES)

    def _number(self, replay_offset: int, done: Done[LoadedRun]) -> None:
        """Give their subjects the numbers of this server."""
        try:
            run = done.result()
        except Shortage as error:
            # The file is not damaged; the process was short of something. The next tick tries again.
            if str(self._short) != str(error):
                log.warning("load_put_off reason=%r", str(error))
            self._short, self.running, self._reopened = error, False, False
            return
        self._short, self._hours.loading = None, run.hours
        if self._reopened and len(run.hours) > 1:
            self._leave()
            return
        if self._checkpointer.replay.offset != replay_offset:
            self._read(run.hours)
            return
        numbers = [self._subjects.numbers(loaded.names) for loaded in run.loaded]
        views, kept = self._pending.views(0), self._pending.kept
        if len(run.hours) > 1:
            order = partial(order_run, run, numbers, views, self._ended_in(run.hours))
            self._site.worker.submit(order, partial(self._attach_run, replay_offset, run), Priority.DUE)
            return
        (loaded,) = run.loaded
        work = partial(order_hour, loaded, numbers[0], views, self._ended_of(loaded.hour))
        self._site.worker.submit(work, partial(self._attach, replay_offset, loaded, kept), Priority.DUE)

    def _attach(self, replay_offset: int, loaded: LoadedHour, kept: int, done: Done[list[PreparedRows]]) -> None:
        """Put the rows into the wheel, with the rows that arrived while they were being ordered."""
        prepared, hour = done.result(), loaded.hour
        if self._checkpointer.replay.offset != replay_offset:
            self._read(self._hours.loading)
            return
        self._wheel.add_hour(hour)
        for rows in prepared:
            self._wheel.add_hour(hour, rows)
        self._wheel.insert(without(self._pending.of_hour(hour, kept), self._ended_of(hour)))
        log.info("hour_loaded hour=%s rows=%d", hour_name(hour), self._wheel.len_of(hour))
        self._end(hour, [loaded])

    def _attach_run(self, replay_offset: int, run: LoadedRun, done: Done[Rows]) -> None:
        """Put the rows of hours that have passed into the wheel; no other row of them has come meanwhile."""
        rows = done.result()
        if self._reopened:
            self._leave()
            return
        if self._checkpointer.replay.offset != replay_offset:
            self._read(run.hours)
            return
        self._wheel.add_closed(rows)
        first, last = run.hours[0], run.hours[-1]
        log.info("hours_loaded first=%s last=%s rows=%d", hour_name(first), hour_name(last), len(rows))
        self._end(last, run.loaded)

    def _end(self, until: int, loaded: Sequence[LoadedHour]) -> None:
        self._load_until(until)
        self._leave(loaded)

    def _leave(self, loaded: Sequence[LoadedHour] = ()) -> None:
        self.running = self._reopened = False
        self._hours.loading = range(0)
        self._attached(loaded)
