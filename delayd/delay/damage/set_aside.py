"""What is set aside while the server runs: rows that can't be read, values that do not check, files that go (rules
L5, L9, L10).

**Held rows** are due, and their bodies can't be read. Invariant: a held row is here and nowhere else. Rows of one
stored batch are held together, because they are read together.

**Lost values** of the state are about a subject's target or a producer. An operator gives such a value up. Then it is
replaced or removed, durably: otherwise the next start would wait for a decision again.

**Files that go.** The server has no schedule log open, and no file of a sealed hour. Without a look, it would notice a
missing file only when the file's hour is loaded, or in an audit. Invariant: a look asks the system for the sizes of a
few files, and reads the header of a file that it did not see before. A finding counts only if the hour's files are
still counted as they were when the look began.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.sequences import message_log_offset
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.filing.hour_table import HourFile, HourTable, OutcomeEnd
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.handoff.window import lowest_offset, split_off
from delayd.delay.producers import Producers
from delayd.delay.quarantine import OnWord, Quarantine, SetAsideEntry, SetAsideKind
from delayd.delay.rows import Rows, due_at_ms
from delayd.delay.state_values import TARGET_PREFIX
from delayd.errors import DamagedData, DamagedValue, DataError, DiskFull, NewerFormat, Shortage, read_error
from delayd.hours import hour_from_name, hour_name
from delayd.log.hour import NewPart, dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, UnfinishedFile, open_segment
from delayd.machine.alarms import DAMAGED_AGAIN_MS, Alarms
from delayd.machine.disk import Disk, open_named
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.machine.open_files import REMOVED
from delayd.outcome import Outcome

log = logging.getLogger(__name__)

READS_MAX = 64  # Batches read in one try, so that the loop is not held for long.
MESSAGE_LOG = "message"


class HeldRows:
    """Rows by the file that holds their bodies; for the loop alone."""

    def __init__(
        self,
        alarms: Alarms,
        sources: Sources,
        outcomes: OutcomeLog,
        quarantine: Quarantine,
        put_back: Callable[[Rows], None],
    ) -> None:
        self._clock = alarms.clock
        self._sources = sources
        self._outcomes = outcomes
        self._quarantine = quarantine
        self._put_back = put_back
        self._held: dict[str, list[Rows]] = {}
        self._again = alarms.alarm(self._try_again)

    def __len__(self) -> int:
        return sum(map(len, self.waiting()))

    def hold(self, rows: Rows, error: DamagedData) -> None:
        """Take rows of one stored batch that can't be read, at least one row."""
        name = _name(rows)
        if not self._held:
            self._again.after(DAMAGED_AGAIN_MS)
        self._held.setdefault(name, []).append(rows)
        sequences = rows["sequence"][:10].tolist()
        log.critical("rows_quarantined rows=%d sequences=%s reason=%r", len(rows), sequences, str(error))
        self._tell(name, error)

    def _try_again(self) -> None:
        """Try what is held: rows that can be read go back to the dispatcher."""
        if self._held:
            self._again.after(DAMAGED_AGAIN_MS)
            for name in list(self._held):
                self._retry(name)

    def obey(self, entry: SetAsideEntry, drop: bool, done: OnWord) -> None:
        """Try the rows of an entry now, or declare them DEAD; ``done`` hears what came of it, once that is durable."""
        if not drop:
            before, error, left = self._count(entry.name), self._retry(entry.name), self._count(entry.name)
            done(not left, f"{before - left} messages can be read" + (f"; {left} can't: {error}" if left else ""))
            return
        count = self._count(entry.name)
        for rows in self._held.pop(entry.name, ()):
            part = NewPart(rows["sequence"].copy(), due_at_ms(rows), Outcome.DEAD, self._clock.now_ms())
            self._outcomes.record(int(rows["hour"][0]), part, _nothing)
        self._quarantine.lift(SetAsideKind.ROWS, entry.name)
        told = f"{count} messages are given up: they have the outcome DEAD"
        later = "; it is stored when there is space, and if the server ends before, give them up again"
        self._outcomes.when_durable(partial(done, True, told), lambda why: done(False, f"{told}, but {why}{later}"))
        self._outcomes.commit()

    def _count(self, name: str) -> int:
        return sum(len(rows) for rows in self._held.get(name, ()))

    def waiting(self) -> list[Rows]:
        """View all rows that are held, in several arrays."""
        return [rows for parts in self._held.values() for rows in parts]

    def take_out(self, sequences: NDArray[np.uint64], arrays: Collection[int]) -> list[Rows]:
        """Take rows: they have ended; returns them, in several arrays. ``sequences`` rise, and ``arrays`` are the ids
        of the arrays in which the rows stand.
        """
        found: list[Rows] = []
        for name, parts in list(self._held.items()):
            kept, taken = split_off(parts, sequences, arrays)
            if not taken:
                continue
            found += taken
            self._held[name] = kept
            if not kept:
                del self._held[name]
                self._quarantine.lift(SetAsideKind.ROWS, name)
        return found

    def lowest_message_log_offset(self) -> int | None:
        """Lowest message log offset that a held row refers to (rule P6)."""
        return lowest_offset(self.waiting())

    def _retry(self, name: str) -> str:
        """Put rows back up to the first batch that can't be read; return why it can't."""
        parts = self._held.pop(name, [])
        if parts and name != MESSAGE_LOG:
            # A copy may have been put in the file's place by a rename, which an open descriptor does not see.
            self._sources.forget_hour(int(parts[0]["hour"][0]))
        for index, rows in enumerate(parts):
            if index == READS_MAX:
                # The other rows are as likely to be readable: the next turn goes on with them.
                self._held[name] = parts[index:]
                self._again.soon()
                return "not tried yet"
            try:
                self._sources.batch(int(rows["hour"][0]), int(rows["location"][0]))
            except (DamagedData, Shortage) as error:
                # The rows behind the unreadable batch may be readable, so the next try begins with them.
                self._held[name] = [*parts[index + 1 :], rows]
                if isinstance(error, DamagedData):
                    self._tell(name, error)
                return str(error)
            self._put_back(rows)
        self._quarantine.lift(SetAsideKind.ROWS, name)
        return ""

    def _tell(self, name: str, error: DamagedData) -> None:
        parts = self._held[name]
        hour = None if name == MESSAGE_LOG else int(parts[0]["hour"][0])
        self._quarantine.put(SetAsideKind.ROWS, name, error, sum(map(len, parts)), hour=hour)


def _name(rows: Rows) -> str:
    if message_log_offset(int(rows["location"][0])) is not None:
        return MESSAGE_LOG
    return hour_name(int(rows["hour"][0]))


def _nothing() -> None:
    """Nobody waits for a dead row."""


class LostValues:
    """Carries out operators' decisions about lost values; for the loop alone."""

    def __init__(self, site: Site, quarantine: Quarantine, dispatcher: Dispatcher, producers: Producers) -> None:
        self._site = site
        self._quarantine = quarantine
        self._dispatcher = dispatcher
        self._producers = producers

    def found(self, producers: dict[int, DamagedValue], targets: dict[bytes, DamagedValue]) -> None:
        """Quarantine the lost values that a start found."""
        for producer_id, error in producers.items():
            self._quarantine.put(SetAsideKind.PRODUCER, f"{producer_id:016x}", error)
        for subject, error in targets.items():
            name = subject.decode("ascii")
            self._quarantine.put(SetAsideKind.TARGET, name, error, subject=name)

    def release_target(self, entry: SetAsideEntry, drop: bool, done: OnWord) -> None:
        """Let a subject go to the target that meta names."""
        subject = entry.name.encode("ascii")
        ask = partial(self._dispatcher.ask_meta, subject)
        self._give_up(entry, (TARGET_PREFIX + subject, None), ask, f"meta is asked where {entry.name} goes", done)

    def release_producer(self, entry: SetAsideEntry, drop: bool, done: OnWord) -> None:
        """Take a producer's batches again."""
        producer_id = int(entry.name, 16)
        pair, go_on = self._producers.kept_of(producer_id), partial(self._producers.find_again, producer_id)
        self._give_up(entry, pair, go_on, "its batches are taken again", done)

    def _give_up(
        self,
        entry: SetAsideEntry,
        pair: tuple[bytes, bytes | None],
        go_on: Callable[[], None],
        told: str,
        done: OnWord,
    ) -> None:
        if self._quarantine.find(entry.id) is None:
            done(True, "it was released already")
            return

        def stored(ended: Done[None]) -> None:
            try:
                ended.result()
            except DiskFull as error:
                done(False, f"nothing was stored: {error.message}")
                return
            if self._quarantine.lift(entry.kind, entry.name):
                go_on()
            done(True, told)

        key, value = pair
        puts, removes = ([], [key]) if value is None else ([(key, value)], [])
        self._site.worker.submit(partial(self._site.state.commit, puts, removes), stored)


HOURS_A_LOOK = 1_024  # Two files each, some microseconds: the hours of two years are looked at within ten minutes.


class SeenFiles(NamedTuple):
    """The identities of an hour's files whose headers were read and were right; None: not known."""

    schedule: int | None = None
    dispatch: int | None = None


NOT_SEEN = SeenFiles()


class HourToLookAt(NamedTuple):
    """An hour to look at: its schedule log as it is counted, and the length of its dispatch log, as far as known."""

    hour: int
    file: HourFile
    dispatch_length: int


Looked = list[tuple[int, HourFile, DamagedData | None, SeenFiles]]
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
        self._worker = site.worker
        self._hours = hours
        self._written_ends = written_ends  # Ends of dispatch logs that were written in this life.
        self._sealed_ends = sealed_ends  # Ends of dispatch logs that were sealed before it.
        self._quarantine = quarantine
        self._damaged = damaged
        site.alarms.look(self._look_again)
        self._behind = -1  # The hour that was looked at last.
        self._seen: dict[int, SeenFiles] = {}
        self._looking = False

    def _look_again(self) -> None:
        if not self._looking:
            self.look()

    def obey(self, entry: SetAsideEntry, drop: bool, done: OnWord) -> None:
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
        aside = [hour_from_name(entry.name) for entry in self._quarantine if entry.kind is SetAsideKind.SEALED]
        # The loop copies the hours here, because the worker must not read the table.
        hours = dict.fromkeys([*aside, *part])
        wanted = [HourToLookAt(hour, self._hours.get(hour), self._end_of(hour).length) for hour in hours]
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
                self._quarantine.lift(SetAsideKind.SEALED, name)
            elif file.sealed:
                self._quarantine.put(SetAsideKind.SEALED, name, damage)
            elif self._quarantine.get(SetAsideKind.SCHEDULE, name) is None:
                self._damaged(hour, damage)


def _look(
    disk: Disk,
    folder: str,
    log_id: int,
    wanted: list[HourToLookAt],
    all_seen: dict[int, SeenFiles],
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
        found.append((hour, file, damage, SeenFiles(schedule, dispatch)))
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
