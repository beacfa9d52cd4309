"""File watch: it notices when someone removes, cuts or replaces schedule logs, or files of sealed hours, while the
server runs.

The server has none of these files open. Without a look, it would notice a missing file only when the file's hour is
loaded, or in an audit. Invariant: a look asks the system for the sizes of a few files, and reads the header of a file
that it did not see before. A finding counts only if the hour's files are still counted as they were when the look
began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.delay.filing.hour_table import HourFile, HourTable, OutcomeEnd
from delayd.delay.quarantine import Decided, Entry, Kind, Quarantine
from delayd.errors import DamagedData, DataError, NewerFormat, read_error
from delayd.hours import hour_from_name, hour_name
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, UnfinishedFile, open_segment
from delayd.machine.disk import REMOVED, Disk, open_named
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site

LOOK_MS = 30_000
HOURS_A_LOOK = 1_024  # Two files each, some microseconds: the hours of two years are looked at within ten minutes.


class Seen(NamedTuple):
    """The identities of an hour's files whose headers were read and were right; None: not known."""

    schedule: int | None = None
    dispatch: int | None = None


NOT_SEEN = Seen()


class Wanted(NamedTuple):
    """An hour to look at: its schedule log as it is counted, and the length of its dispatch log, as far as known."""

    hour: int
    file: HourFile
    dispatch_length: int


Looked = list[tuple[int, HourFile, DamagedData | None, Seen]]
"""For each hour: its number, its schedule log as it was counted, the damage that was found, and the files'
identities.
"""


class FileWatch:
    """Looks at some hours now and then; for the loop alone. ``damaged`` sets an hour's schedule log aside."""

    def __init__(
        self,
        site: Site,
        hours: HourTable,
        written_ends: Mapping[int, OutcomeEnd],
        sealed_ends: Mapping[int, OutcomeEnd],
        quarantine: Quarantine,
        damaged: Callable[[int, DamagedData], None],
    ) -> None:
        self._disk = site.disk
        self._folder = site.folder
        self._log_id = site.log_id
        self._clock = site.clock
        self._worker = site.worker
        self._hours = hours
        self._written_ends = written_ends  # Ends of dispatch logs that were written in this life.
        self._sealed_ends = sealed_ends  # Ends of dispatch logs that were sealed before it.
        self._quarantine = quarantine
        self._damaged = damaged
        self._due_ms = self._clock.monotonic_ms() + LOOK_MS
        self._behind = -1  # The hour that was looked at last.
        self._seen: dict[int, Seen] = {}
        self._looking = False

    def step(self) -> None:
        """Look at the next hours when it is time."""
        if self._clock.monotonic_ms() >= self._due_ms and not self._looking:
            self._due_ms = self._clock.monotonic_ms() + LOOK_MS
            self.look()

    def stood_still(self, ms: int) -> None:
        """No file could change for so long: the next look comes so much later."""
        self._due_ms += ms

    def decide(self, entry: Entry, drop: bool, done: Decided) -> None:
        """Look at the next hours and at those that are set aside, by an operator's word."""
        self.look()
        done(True, "its files are looked at")

    def look(self) -> None:
        """Look at the next hours, and at the hours that are set aside."""
        numbers = self._hours.rows["hour"]
        if self._behind < 0:
            for gone in self._seen.keys() - set(numbers.tolist()):
                del self._seen[gone]
        begin = int(np.searchsorted(numbers, self._behind, side="right"))
        part: list[int] = numbers[begin : begin + HOURS_A_LOOK].tolist()
        self._behind = part[-1] if len(part) == HOURS_A_LOOK else -1
        aside = [hour_from_name(entry.name) for entry in self._quarantine if entry.kind is Kind.SEALED]
        # The loop copies the hours here, because the worker must not read the table.
        hours = dict.fromkeys([*aside, *part])
        wanted = [Wanted(hour, self._hours.get(hour), self._end_of(hour).length) for hour in hours]
        self._looking = True
        seen = {hour: self._seen[hour] for hour in hours if hour in self._seen}
        work = partial(_look, self._disk, self._folder, self._log_id, wanted, seen, self._worker.give_way)
        self._worker.submit(work, self._looked, Priority.SPARE)

    def _end_of(self, hour: int) -> OutcomeEnd:
        return self._written_ends.get(hour) or self._sealed_ends.get(hour, OutcomeEnd())

    def _looked(self, done: Done[Looked]) -> None:
        self._looking = False
        try:
            found = done.result()
        except DataError:
            return  # The process can't tell now; the next look may.
        for hour, file, damage, seen in found:
            name = hour_name(hour)
            self._seen[hour] = seen
            if self._hours.get(hour) != file or damage is None or file.removed:
                self._quarantine.lift(Kind.SEALED, name)
            elif file.sealed:
                self._quarantine.put(Kind.SEALED, name, damage)
            elif self._quarantine.get(Kind.SCHEDULE, name) is None:
                self._damaged(hour, damage)


def _look(
    disk: Disk,
    folder: str,
    log_id: int,
    wanted: list[Wanted],
    all_seen: dict[int, Seen],
    give_way: Callable[[], None],
) -> Looked:
    found: Looked = []
    for hour, file, dispatch_length in wanted:
        give_way()
        seen = all_seen.get(hour, NOT_SEEN)
        damage, schedule, dispatch = None, None, None
        if file.length and not file.removed:
            size, path = FILE_HEADER_BYTES + file.length, schedule_path(folder, hour)
            damage, schedule = _look_at(disk, path, FileKind.SCHEDULE, log_id, hour, size, seen.schedule)
            if damage is None and file.sealed:
                size, path = FILE_HEADER_BYTES + dispatch_length, dispatch_path(folder, hour)
                damage, dispatch = _look_at(disk, path, FileKind.DISPATCH, log_id, hour, size, seen.dispatch)
        found.append((hour, file, damage, Seen(schedule, dispatch)))
    return found


def _look_at(
    disk: Disk, path: str, kind: FileKind, log_id: int, hour: int, size: int, seen: int | None
) -> tuple[DamagedData | None, int | None]:
    """Check a file that should have at least this many bytes; return its damage, or, if there is none, its identity."""
    try:
        file = open_named(disk, path)
    except FileNotFoundError:
        return DamagedData(path, 0, REMOVED), None
    except DamagedData as error:
        return error, None
    try:
        if (missing := size - file.size()) > 0:
            return DamagedData(path, file.size(), f"it is {missing} bytes shorter than it was"), None
    finally:
        file.close()
    try:
        which = disk.file_id(path)
        if which is None or which != seen:
            _check_header(disk, path, kind, log_id, hour)
    except FileNotFoundError:
        return DamagedData(path, 0, REMOVED), None
    except UnfinishedFile:
        return DamagedData(path, 0, "the checksum of the file header differs"), None
    except DamagedData as error:
        return error, None
    except NewerFormat as error:
        return DamagedData(path, 0, error.message), None
    except OSError as error:
        raise read_error(path, 0, error) from error
    return None, which


def _check_header(disk: Disk, path: str, kind: FileKind, log_id: int, hour: int) -> None:
    segment = open_segment(disk, path, kind, log_id, write=False)
    segment.close()
    if segment.header.number != hour:
        raise DamagedData(path, 0, f"its header says that it is of hour {hour_name(segment.header.number)}")
