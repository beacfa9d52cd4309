"""Rebuild: it makes the index of keys anew from the schedule logs, after a run was found damaged (rule L9).

Invariant: the index is whole again only when each counted row with a key has been read. Rows that are not counted yet
stand in memory, where the index keeps them until then.

A row that was REJECTED, KEPT or answered IN_FLIGHT took no key: its outcome says so, or a decision whose outcome is not
durable yet. The outcome IN_DOUBT says of a row that nobody knows. Such a row has ended, so it needs no entry either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.columns import ColumnId
from delayd.batch.content import Hasher
from delayd.batch.sequences import Sequences, among
from delayd.delay.books.outcomes import read_outcomes
from delayd.delay.filing.hour_table import FiledHours, HourPart, OutcomeEnd
from delayd.delay.filing.schedule_log import scan_fronts, scan_groups
from delayd.delay.keys.index import MEMORY_ENTRIES, KeyIndex, open_written
from delayd.delay.keys.run import Entries, KeyedRows, OpenRun, filed_rows, merge, new_entries, write_run
from delayd.errors import DamagedData, DataError
from delayd.log.hour import EndedRows, dispatch_path
from delayd.log.segment import FileHeader, FileKind, open_segment
from delayd.machine.alarms import DAMAGED_AGAIN_MS
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.outcome import TOOK_NO_KEY, Outcome

log = logging.getLogger(__name__)


class FiledHour(NamedTuple):
    """The files of an hour, as far as they are counted."""

    hour: int
    parts: tuple[HourPart, ...]
    outcomes_end: int | None  # None: all of the dispatch log.


class HourUnread(Exception):
    """A file of an hour can't be read now."""

    def __init__(self, hour: int, error: Exception) -> None:
        super().__init__(str(error))
        self.hour = hour


@dataclass(frozen=True, slots=True)
class LogsOfHours:
    """What the rebuild reads; for the loop alone."""

    filed: FiledHours
    outcome_ends: Callable[[], dict[int, OutcomeEnd]]
    owed: Callable[[], EndedRows]


class Rebuild:
    """Makes the index again on the worker thread, at spare priority; after a crash the next start begins anew."""

    def __init__(self, site: Site, index: KeyIndex, logs: LogsOfHours) -> None:
        self._site = site
        self._index = index
        self._logs = logs
        # Nobody can send with keys until the index is made anew, so this begins as soon as a run is found damaged. What
        # is damaged is not found so again before it was made anew.
        self._again = site.alarms.alarm(self._begin)
        index.on_damage = self._again.soon
        if not index.whole:
            self._again.soon()
        self._first: int | None = None  # The hour that could not be read: it is tried before all others.
        self._told = ""

    def _begin(self) -> None:
        hours = sorted(self._hours(), key=lambda hour: hour.hour != self._first)
        rows = sum(part.counted.rows for each in hours for part in each.parts)
        numbers = self._index.rebuild_numbers(rows // MEMORY_ENTRIES + 1)
        work = partial(_make_runs, self._site, self._index.hasher, hours, self._logs.owed(), numbers)
        self._site.worker.submit(work, self._made, Priority.SPARE)

    def _hours(self) -> list[FiledHour]:
        filed = self._logs.filed
        ends = self._logs.outcome_ends()
        found: list[FiledHour] = []
        for hour in filed.all().tolist():
            file = filed.get(hour)
            if file.removed:
                continue
            end = None if file.sealed else ends.get(hour, OutcomeEnd()).length
            found.append(FiledHour(hour, filed.parts(hour), end))
        return found

    def _made(self, done: Done[list[OpenRun]]) -> None:
        try:
            runs = done.result()
        except (HourUnread, OSError, DataError) as error:
            self._first = error.hour if isinstance(error, HourUnread) else None
            self._again.after(DAMAGED_AGAIN_MS)
            if self._told != str(error):
                self._told = str(error)
                log.warning("keys_not_rebuilt reason=%r", self._told)
            return
        self._first, self._told = None, ""
        self._index.rebuilt(runs)
        log.info("keys_rebuilt entries=%d", sum(map(len, runs)))


def _make_runs(site: Site, hasher: Hasher, hours: list[FiledHour], owed: EndedRows, numbers: range) -> list[OpenRun]:
    """Write runs with the newest entry of each name in it; on the worker thread."""
    made = _Making(site, hasher, iter(numbers))
    without = owed["sequence"].compress(np.isin(owed["reason"], TOOK_NO_KEY)).copy()
    try:
        for hour in hours:
            try:
                for rows in keyed_rows_of_hour(site, hour, without):
                    made.add(new_entries(hasher, *rows))
            except (FileNotFoundError, DamagedData) as error:
                raise HourUnread(hour.hour, error) from error
        made.write()
    except BaseException:
        made.abandon()
        raise
    return made.runs


@dataclass(slots=True)
class _Making:
    """Runs that are being made, and the entries that do not fill one yet."""

    site: Site
    hasher: Hasher
    numbers: Iterator[int]
    runs: list[OpenRun] = field(default_factory=list)
    parts: list[Entries] = field(default_factory=list)

    def add(self, entries: Entries) -> None:
        self.parts.append(entries)
        if sum(map(len, self.parts)) >= MEMORY_ENTRIES:
            self.write()

    def write(self) -> None:
        entries, self.parts = merge(self.parts), []
        if not len(entries):
            return
        site = self.site
        header = FileHeader(FileKind.KEYS, site.log_id, 0, next(self.numbers), site.clock.now_ms())
        name = write_run(site.disk, site.folder, header, self.hasher.seed, entries, site.worker.give_way)
        self.runs.append(open_written(site, self.hasher.seed, name))

    def abandon(self) -> None:
        for run in self.runs:
            run.close()
            self.site.disk.remove(run.path)


def keyed_rows_of_hour(site: Site, hour: FiledHour, without: Sequences) -> Iterator[KeyedRows]:
    """The counted rows of an hour that took their keys; ``without`` names rows that did not, and rises.

    Raises:
        DamagedData, FileNotFoundError, Shortage: a file can't be read.
    """
    took_none: Sequences | None = None
    for part in hour.parts:
        if not _has_keys(site, part):
            continue
        if took_none is None:
            took_none = np.sort(np.concatenate((without, _without_key(site, hour))))
        for group in scan_groups(site.disk, part.path(site.folder), site.log_id, part.hour, part.counted):
            for _, batch in group.batches():
                if ColumnId.KEY_END in batch.offsets:
                    rows = filed_rows(batch, hour.hour)
                    yield rows.kept(~among(rows.sequences, took_none))
            site.worker.give_way()


def _has_keys(site: Site, part: HourPart) -> bool:
    """Whether a row of a file has a key; no body is read for that."""
    for stored in scan_fronts(site.disk, site.folder, site.log_id, part):
        if ColumnId.KEY_END in stored.batch.offsets:
            return True
        site.worker.give_way()
    return False


def _without_key(site: Site, hour: FiledHour) -> Sequences:
    """Rows that took no key, or may have taken none, by the hour's dispatch log."""
    path = dispatch_path(site.folder, hour.hour)
    if hour.outcomes_end == 0 or (hour.outcomes_end is None and not site.disk.exists(path)):
        return np.empty(0, np.uint64)
    with closing(open_segment(site.disk, path, FileKind.DISPATCH, site.log_id, write=False)) as segment:
        outcomes = read_outcomes(segment, hour.outcomes_end, site.worker.give_way)
    parts = outcomes.parts
    without = (parts["outcome"] == Outcome.CANCELLED) & np.isin(parts["reason"], TOOK_NO_KEY)
    without |= parts["outcome"] == Outcome.IN_DOUBT
    return outcomes.sequences.compress(without.take(outcomes.part_of))
