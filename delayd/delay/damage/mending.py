"""Mending: it tries hours whose files are set aside again until they are whole, or an operator gives them up (rule
L10).

Invariant: a row enters the wheel once. For an hour that is set aside, this life knows which rows it has loaded. When
the hour's files are whole again, the other rows are loaded, except those that have an outcome. No checkpoint and no
other load runs meanwhile. When an operator gives a dispatch log up, a note of that (its *word*) is durable in the state
before any file moves. A start that finds the word goes on, until each row whose outcome may have been in that log is
IN_DOUBT.

     set aside ──every 30 s, or an operator's word──▶ dispatch log ──▶ schedule log, joined with the file beside it
         ▲                                            (its thread)     (worker thread)
         └── still damaged: told again ◀──────────────────┴──────────────────┤
                                                                             ▼
                                             rows that are not loaded yet ──▶ wheel
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgpack
import numpy as np

from delayd.batch import ROWS_MAX
from delayd.delay.books.dispatch_logs import open_dispatch_log, read_outcomes
from delayd.delay.books.outcomes import OutcomeLog, reopen_dispatch_log
from delayd.delay.filing.hour_table import (
    BESIDE_PREFIX,
    HourFile,
    OutcomeEnd,
    given_up_key,
    hour_key,
    hour_put,
    outcome_put,
)
from delayd.delay.filing.schedule_log import scan_groups
from delayd.delay.filing.sources import Sources
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.quarantine import Entry, Kind, Quarantine, outcomes_beside, quarantine_path, schedule_beside_path
from delayd.delay.rows import Rows, due_at_ms, without
from delayd.delay.state_values import DROPPED_KEY, encode_dropped
from delayd.delay.timers.loader import LoadedHour, load_hour
from delayd.errors import DamagedData, DataError, DiskFull
from delayd.executor import Done
from delayd.hours import hour_name
from delayd.log.dispatch import NO_OUTCOMES, NewPart, Outcome, OutcomeRows
from delayd.log.group import CommitGroup, GroupKind, NewGroup
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, create_segment, open_segment
from delayd.sequences import NO_SEQUENCES, Sequences, among
from delayd.site import Site

log = logging.getLogger(__name__)

RETRY_MS = 30_000  # How long after a failed try the next one begins; a try reads the whole file.
SEQUENCE_MAX = (1 << 64) - 1

Ended = Callable[[bool, str], None]
"""Called with whether an hour is whole again, and a sentence that says so or why not."""


@dataclass(slots=True)
class Unloaded:
    """The rows of an hour's files that are not in the wheel: sequences below ``below`` that are not ``loaded``
    (sorted).

    Rows below ``doubted`` may have been handed over by an earlier life whose dispatch log is not known.
    """

    below: int
    loaded: Sequences
    doubted: int = 0


class Asked(NamedTuple):
    """A caller that waits for the result of a try, with the kind of file that it asked for."""

    kind: Kind
    ended: Ended


class Joined(NamedTuple):
    """An hour's schedule log that is whole again: its file now, and the offset at which the rows begin that stood
    beside it.
    """

    file: HourFile
    offset: int
    lost_rows: int


@dataclass(frozen=True, slots=True)
class SetAside:
    """What is set aside at the start, and what becomes so; by hour."""

    quarantine: Quarantine
    damaged: dict[int, DamagedData]  # Hours whose dispatch log is damaged and not appended to.
    known_ends: dict[int, OutcomeEnd]  # The counted ends of dispatch logs that were damaged at the start.
    dropped: dict[int, int]  # Filed rows that operators gave up; the audit's count allows for them (rule S5).
    # Hours whose dispatch logs were given up, and whether each row that they may have named is IN_DOUBT. The offsets
    # that they named at targets stay unknown, so these hours are remembered until they are deleted (rule H8).
    given_up: dict[int, bool]


@dataclass(frozen=True, slots=True)
class MendingCalls:
    """What mending asks of the other parts of the server, and tells them."""

    next_sequence: Callable[[], int]
    may_begin: Callable[[], bool]
    ended: Callable[[bool], None]  # Called behind each try, with whether the hour is whole now.
    restored: Callable[[int, OutcomeRows], None]  # Called with the outcomes of a dispatch log that is whole again.


class Mending:
    """Tries hours that are set aside again, one at a time; for the loop alone."""

    def __init__(
        self,
        site: Site,
        ledger: Ledger,
        outcomes: OutcomeLog,
        sources: Sources,
        aside: SetAside,
        calls: MendingCalls,
    ) -> None:
        hours = ledger.hours
        self.dropped = aside.dropped
        self.running: int | None = None  # The hour that is being tried.
        self._disk = site.disk
        self._state = site.state
        self._folder = site.folder
        self._log_id = site.log_id
        self._epoch = site.epoch
        self._clock = site.clock
        self._worker = site.worker
        self._hours = hours.filed
        self._beside = hours.beside
        self._outcomes = outcomes
        self._sources = sources
        self._wheel = hours.wheel
        self._subjects = hours.subjects
        self._pending = hours.pending
        self._ledger, self._places = ledger, hours
        self._withheld = hours.withheld
        self._quarantine = aside.quarantine
        self._damaged = aside.damaged
        self._known_ends = aside.known_ends
        self._calls = calls
        self._unloaded: dict[int, Unloaded] = {}
        self._asked: dict[int, list[Asked]] = {}  # By hour, for the next try.
        self._drops: dict[int, set[Kind]] = {}  # By hour: files that the next try gives up if they are still damaged.
        # Callers of the try under way; ``_dropping``: the kinds of files that it gives up.
        self._heard: list[Asked] = []
        self._dropping: set[Kind] = set()
        self._given_up = aside.given_up
        # Two kinds of hours are tried at once: hours that an earlier life set aside, so that they are listed if they
        # are still damaged, and hours that an operator gave up in an earlier life.
        at_once = len(self._beside) > 0 or False in self._given_up.values()
        self._due_ms = self._clock.monotonic_ms() + (0 if at_once else RETRY_MS)
        self._round: list[int] = []

    def damaged_hours(self) -> set[int]:
        """Hours whose schedule log can't be appended to, or not before the file beside it has joined it: their rows go
        to that file, so that they stay in filing order.
        """
        damaged = {entry.hour for entry in self._quarantine if entry.kind is Kind.SCHEDULE and entry.hour is not None}
        return damaged | set(self._beside.rows["hour"].tolist())

    def schedule_damaged(self, hour: int, error: DamagedData, unloaded: Unloaded | None = None) -> None:
        """Set an hour's schedule log aside; ``unloaded`` when the wheel lacks rows of the hour."""
        if unloaded is not None:
            self._unloaded[hour] = unloaded
        rows = self._hours.get(hour).rows - (len(unloaded.loaded) if unloaded else 0)
        self._quarantine.put(Kind.SCHEDULE, hour_name(hour), error, max(0, rows), hour=hour)

    def dispatch_damaged(self, hour: int, error: DamagedData, unloaded: Unloaded | None = None) -> None:
        """Set an hour's dispatch log aside: its outcomes go to the file beside it."""
        if unloaded is not None:
            self._unloaded[hour] = unloaded
        self._damaged[hour] = error
        self._quarantine.put(Kind.DISPATCH, hour_name(hour), error, self._hours.get(hour).rows, hour=hour)

    def file_damaged(self, hour: int, error: DamagedData) -> None:
        """Set aside the file of an hour that an error names; all rows of the hour have left the wheel."""
        if error.path == dispatch_path(self._folder, hour):
            self.dispatch_damaged(hour, error)
        else:
            self.schedule_damaged(hour, error)

    def decide(self, entry: Entry, drop: bool, done: Ended) -> None:
        """Do what an operator says of an hour's file."""
        assert entry.hour is not None, "a log of an hour is quarantined with its hour"
        self.try_now(entry.hour, entry.kind, done, drop=drop)

    def try_now(self, hour: int, kind: Kind, ended: Ended, *, drop: bool = False) -> None:
        """Try an hour as soon as possible; with ``drop`` its file of this kind is given up if it is still damaged."""
        self._asked.setdefault(hour, []).append(Asked(kind, ended))
        if drop:
            self._drops.setdefault(hour, set()).add(kind)
        self._round.insert(0, hour)
        self.step()

    def step(self) -> None:
        """Begin the next try, when it is time and nothing prevents it."""
        now = self._clock.monotonic_ms()
        if now >= self._due_ms:
            self._due_ms = now + RETRY_MS
            self._round += sorted({entry.hour for entry in self._quarantine if entry.hour is not None})
            self._round += [hour for hour in self._leftover() if hour not in self._round]
        if self.running is None and self._round and self._calls.may_begin():
            hour = self.running = self._round.pop(0)
            # A caller that asks from now on gets another try.
            self._heard, self._dropping = self._asked.pop(hour, []), self._drops.pop(hour, set())
            if hour in self._damaged:
                self._dispatch_log()
            else:
                self._schedule_log()

    def _leftover(self) -> Iterator[int]:
        """Hours whose schedule log was restored while the server was down: the rows beside it are to be appended to
        it.
        """
        return iter(self._beside.rows["hour"].tolist())

    # The dispatch log.

    def _dispatch_log(self) -> None:
        hour = self.running
        assert hour is not None, "a try is under way"
        end = self._outcomes.ends.get(hour) or self._known_ends.get(hour, OutcomeEnd())
        work = partial(self._open_outcomes, hour, end.length, self._is_given_up(hour))
        self._outcomes.exchange(hour, work, self._told)

    def _give_up_outcomes(self, hour: int) -> None:
        """Store durably that the dispatch log is given up, and that none of its rows is counted any more."""
        puts = [self._word(hour, done=False), outcome_put(hour, OutcomeEnd())]
        self._worker.submit(partial(self._state.commit, puts, []), self._said)

    def _said(self, done: Done[None]) -> None:
        hour = self.running
        assert hour is not None, "a try is under way"
        try:
            done.result()
        except DiskFull as error:
            self._end(False, f"nothing was stored: {error}")
            return
        self._given_up[hour] = False
        self._known_ends.pop(hour, None)
        self._outcomes.ends.pop(hour, None)
        self._dispatch_log()

    def _open_outcomes(self, hour: int, known: int, given_up: bool) -> tuple[Segment, OutcomeRows]:
        """Open the restored dispatch log, on the thread that writes outcomes."""
        now_ms = self._clock.now_ms()
        beside = outcomes_beside(self._disk, self._folder).get(hour, [])
        if given_up:
            known, beside = 0, self._put_damaged_aside(hour, beside, now_ms)
        opened = open_dispatch_log(
            self._disk,
            self._folder,
            self._log_id,
            self._epoch,
            hour,
            known=known,
            beside=beside,
            now_ms=now_ms,
        )
        return opened if opened is not None else (self._new_dispatch_log(hour, now_ms), NO_OUTCOMES)

    def _put_damaged_aside(self, hour: int, beside: list[int], now_ms: int) -> list[int]:
        """Put an hour's dispatch log and the files beside it aside as far as they don't check; return the numbers of
        those that do.
        """
        path, kept = dispatch_path(self._folder, hour), list[int]()
        if not self._checks(path, hour):
            self._give_up(path, f"{hour_name(hour)}.dispatch.dropped")
            self._new_dispatch_log(hour, now_ms).close()
        for number in beside:
            path = quarantine_path(self._folder, hour, number)
            if self._checks(path, hour):
                kept.append(number)
            else:
                self._give_up(path, f"{hour_name(hour)}.{number}.dispatch.dropped")
        return kept

    def _checks(self, path: str, hour: int) -> bool:
        try:
            segment = reopen_dispatch_log(self._disk, path, self._log_id, 0, hour)
            if segment is None:
                return False  # A crash while the file was made left no header; opening removed it.
            try:
                read_outcomes(segment)
            finally:
                segment.close()
        except DamagedData:
            return False
        return True

    def _new_dispatch_log(self, hour: int, now_ms: int) -> Segment:
        path = dispatch_path(self._folder, hour)
        self._disk.make_folder(path.rpartition("/")[0])
        header = FileHeader(FileKind.DISPATCH, self._log_id, 0, hour, now_ms)
        return create_segment(self._disk, path, header).remember_file()

    def _told(self, done: Done[OutcomeRows]) -> None:
        hour = self.running
        assert hour is not None, "a try is under way"
        try:
            outcomes = done.result()
        except DataError as error:
            gives_up = Kind.DISPATCH in self._dropping and not self._is_given_up(hour)
            if gives_up and isinstance(error, DamagedData):
                self._give_up_outcomes(hour)
            else:
                self._still(hour, Kind.DISPATCH, error)
            return
        segment = self._outcomes.segment_of(hour)
        assert segment is not None, "it was opened"
        if self._is_given_up(hour):
            self._note_unknown(hour)
        self._calls.restored(hour, outcomes)
        self._outcomes.leave_out(hour, np.sort(outcomes.sequences, kind="stable"))
        del self._damaged[hour]
        self._known_ends.pop(hour, None)
        self._outcomes.restored(hour, OutcomeEnd(segment.durable, len(outcomes.sequences)))
        self._quarantine.lift(Kind.DISPATCH, hour_name(hour))
        self._schedule_log()

    def _note_unknown(self, hour: int) -> None:
        """Note that each row of an hour may have been handed over if it has no known outcome and was not loaded in this
        life.
        """
        unloaded = self._unloaded.get(hour)
        if unloaded is not None and unloaded.below == SEQUENCE_MAX:
            return  # None of its rows was loaded.
        below = self._calls.next_sequence()
        self._unloaded[hour] = Unloaded(below, self._ledger.undecided_of(hour), below)

    # The schedule log.

    def _schedule_log(self) -> None:
        hour = self.running
        assert hour is not None, "a try is under way"
        entry = self._quarantine.get(Kind.SCHEDULE, hour_name(hour))
        beside = self._beside.get(hour)
        if entry is None and not beside.length:
            self._load()
            return
        drop = Kind.SCHEDULE in self._dropping
        work = partial(self._join, hour, self._hours.get(hour), beside, drop, self._clock.now_ms())
        self._worker.submit(work, self._joined)

    def _join(self, hour: int, file: HourFile, beside: HourFile, drop: bool, now_ms: int) -> Joined:
        """Verify the schedule log, append the rows from the file beside it, and count them; on the worker thread."""
        path, lost = schedule_path(self._folder, hour), 0
        if file.length:
            try:
                for _ in scan_groups(self._disk, path, self._log_id, hour, file):
                    self._worker.give_way()
            except DamagedData:
                if not drop:
                    raise
                kept = self._salvage(hour, file, now_ms)
                file, lost = kept, file.rows - kept.rows
        given_up = [(DROPPED_KEY, msgpack.packb(encode_dropped(self._dropped_with(hour, lost))))] if lost else []
        joined = file
        if beside.length:
            groups = scan_groups(self._disk, schedule_beside_path(self._folder, hour), self._log_id, hour, beside)
            joined = self._append(hour, file, groups, now_ms)
        if joined.length:
            self._state.commit([hour_put(hour, joined), *given_up], [hour_key(hour, BESIDE_PREFIX)])
        else:
            self._state.commit(given_up, [hour_key(hour), hour_key(hour, BESIDE_PREFIX)])
        if beside.length:
            self._disk.remove(schedule_beside_path(self._folder, hour))
            self._disk.sync_folder(f"{self._folder}/quarantine")
        return Joined(joined, file.length, lost)

    def _dropped_with(self, hour: int, rows: int) -> dict[int, int]:
        return self.dropped | {hour: self.dropped.get(hour, 0) + rows}

    def _salvage(self, hour: int, file: HourFile, now_ms: int) -> HourFile:
        """Put the groups of a damaged schedule log that still check in its place; the damaged file is kept aside."""
        path = schedule_path(self._folder, hour)
        kept = HourFile(flags=file.flags)
        try:
            for group in scan_groups(self._disk, path, self._log_id, hour, file):
                self._worker.give_way()
                kept = HourFile(group.end, kept.rows + group.header.row_count, group.header.header_crc32c, file.flags)
        except DamagedData as error:
            # Damage to the file's header makes all of the file unusable.
            if error.position <= FILE_HEADER_BYTES:
                kept = HourFile()
        aside = self._give_up(path, f"{hour_name(hour)}.schedule.dropped")
        if not kept.length:
            return HourFile()
        groups = scan_groups(self._disk, aside, self._log_id, hour, kept)
        return self._append(hour, HourFile(flags=file.flags), groups, now_ms)

    def _append(self, hour: int, file: HourFile, groups: Iterator[CommitGroup], now_ms: int) -> HourFile:
        """Append groups as they are to an hour's schedule log, behind the bytes that ``file`` counts; durable on
        return.
        """
        path = schedule_path(self._folder, hour)
        if file.length:
            segment = open_segment(self._disk, path, FileKind.SCHEDULE, self._log_id, write=True)
            segment.end = segment.durable = file.length
            segment.crc32c = file.last_crc32c
            segment.file.truncate(segment.position(file.length))
        else:
            self._disk.make_folder(path.rpartition("/")[0])
            if self._disk.exists(path):
                self._disk.remove(path)
            segment = create_segment(self._disk, path, FileHeader(FileKind.SCHEDULE, self._log_id, 0, hour, now_ms))
        rows = file.rows
        try:
            for group in groups:
                batches = [batch.buffer for _, batch in group.batches()]
                count, at_ms = group.header.row_count, group.header.appended_at_ms
                segment.append([NewGroup(GroupKind.DATA, batches, self._epoch, at_ms, 0, count)])
                rows += count
                self._worker.give_way()
            segment.flush()
        finally:
            segment.close()
        return HourFile(segment.end, rows, segment.crc32c, file.flags)

    def _joined(self, done: Done[Joined]) -> None:
        hour = self.running
        assert hour is not None, "a try is under way"
        try:
            joined = done.result()
        except DataError as error:
            self._still(hour, Kind.SCHEDULE, error)
            return
        if joined.file.length:
            self._hours.set(hour, joined.file)
        else:
            self._hours.remove([hour])
        self._beside.remove([hour])
        self._sources.joined(hour, joined.offset, loaded=hour <= self._places.loaded_until)
        if joined.lost_rows:
            self.dropped = self._dropped_with(hour, joined.lost_rows)
            log.critical("rows_lost hour=%s rows=%d", hour_name(hour), joined.lost_rows)
        self._quarantine.lift(Kind.SCHEDULE, hour_name(hour))
        self._load()

    # The rows.

    def _load(self) -> None:
        hour = self.running
        assert hour is not None, "a try is under way"
        if hour not in self._unloaded:
            self._end(True, "it is whole again")
            return
        decided = self._ledger.ended_in(range(hour, hour + 1)).get(hour, NO_SEQUENCES)
        end = self._outcomes.ends.get(hour, OutcomeEnd())
        work = partial(self._read, hour, self._hours.get(hour), decided, end)
        self._worker.submit(work, self._read_done)

    def _read(self, hour: int, file: HourFile, decided: Sequences, end: OutcomeEnd) -> tuple[LoadedHour, Sequences]:
        """Load an hour's rows from its schedule log, without those that have an outcome; runs on the worker.

        Args:
            hour: the hour whose files are whole again.
            file: how much of its schedule log counts.
            decided: sequences of rows with an outcome from an earlier life, sorted.
            end: how much of its dispatch log counts; the outcomes in it are decided too.

        Returns:
            The rows, and the sequences of all rows with an outcome, sorted.
        """
        if end.length:
            segment = open_segment(
                self._disk, dispatch_path(self._folder, hour), FileKind.DISPATCH, self._log_id, write=False
            )
            try:
                told = read_outcomes(segment, end.length, self._worker.give_way).sequences
            finally:
                segment.close()
            decided = np.unique(np.concatenate((decided, told)))
        return load_hour(self._disk, self._folder, self._log_id, hour, file, decided), decided

    def _read_done(self, done: Done[tuple[LoadedHour, Sequences]]) -> None:
        hour = self.running
        assert hour is not None, "a try is under way"
        try:
            loaded, decided = done.result()
        except DataError as error:
            self._still(hour, Kind.SCHEDULE, error)
            return
        if loaded.damage is not None:
            self._still(hour, Kind.SCHEDULE, loaded.damage)
            return
        unloaded = self._unloaded.pop(hour)
        self._withheld.discard(hour)
        rows = loaded.prepared.rows
        if len(rows):
            rows["subject"] = self._subjects.numbers(loaded.names).take(rows["subject"])
        below = rows["sequence"] < np.uint64(min(unloaded.below, SEQUENCE_MAX))
        rows = rows.take(np.flatnonzero(below & ~among(rows["sequence"], unloaded.loaded)))
        if unloaded.below == SEQUENCE_MAX:
            # No row of the hour went to the wheel in this life, so its rows in the message log are among the kept rows.
            kept = without(self._pending.of_hour(hour), decided)
            rows = np.concatenate((rows, kept)) if len(kept) else rows
        # Callers may have ended rows while the files were read.
        rows = self._ledger.may_enter(rows)
        if self._is_given_up(hour):
            rows = self._doubt(hour, rows, unloaded)
            self._outcomes.when_durable(partial(self._finish_word, hour))
        if hour > self._places.loaded_until:
            # Callers end rows long before their hour, so an hour that is far has a dispatch log, too. Its load is to
            # come, and takes all rows without an outcome.
            self._end(True, "it is whole again")
            return
        if not self._wheel.has_hour(hour):
            self._wheel.add_hour(hour)
        self._wheel.insert(rows)
        self._end(True, f"it is whole again, and {len(rows)} of its messages are loaded")

    def _doubt(self, hour: int, rows: Rows, unloaded: Unloaded) -> Rows:
        """Give rows up that may have been handed over without anybody knowing; return the others."""
        doubted = rows["sequence"] < np.uint64(unloaded.doubted)
        lost, rows = rows.take(np.flatnonzero(doubted)), rows.take(np.flatnonzero(~doubted))
        if len(lost):
            log.critical("rows_in_doubt hour=%s rows=%d", hour_name(hour), len(lost))
        for start in range(0, len(lost), ROWS_MAX):
            piece = lost[start : start + ROWS_MAX]
            part = NewPart(piece["sequence"].copy(), due_at_ms(piece), Outcome.IN_DOUBT, self._clock.now_ms())
            self._outcomes.record(hour, part, _nothing)
        # Answers of targets don't decide on these rows again.
        self._ledger.learn(hour, lost["sequence"])
        self._given_up[hour] = True
        return rows

    def _is_given_up(self, hour: int) -> bool:
        """Whether an operator has given an hour's dispatch log up, and that is not completed yet."""
        return self._given_up.get(hour) is False

    def _word(self, hour: int, *, done: bool) -> tuple[bytes, bytes]:
        return given_up_key(hour), msgpack.packb([self._clock.now_ms(), done])

    def _finish_word(self, hour: int) -> None:
        """Each row that a given up dispatch log may have named is in doubt, durably: store that."""
        if self._given_up[hour]:
            self._worker.submit(partial(self._state.commit, [self._word(hour, done=True)], []), _finished)

    # The end of a try.

    def _still(self, hour: int, kind: Kind, error: DataError) -> None:
        if isinstance(error, DamagedData):
            (self.schedule_damaged if kind is Kind.SCHEDULE else self.dispatch_damaged)(hour, error)
        else:
            log.warning("mending_put_off hour=%s reason=%r", hour_name(hour), str(error))
        self._end(False, str(error), None if hour in self._damaged else Kind.DISPATCH)

    def _end(self, done: bool, message: str, also: Kind | None = None) -> None:
        """Tell the callers of a try; ``also`` is a kind of file that is whole although another one of the hour is
        not.
        """
        heard, self._heard, self.running = self._heard, [], None
        for asked in heard:
            told = f"it is mended, and its hour waits for another file: {message}" if asked.kind is also else message
            asked.ended(done or asked.kind is also, told)
        self._calls.ended(done)
        self.step()

    # Files.

    def _give_up(self, path: str, name: str) -> str:
        """Put a file that an operator gave up aside, in case somebody can read it after all; return where it is."""
        target = f"{self._folder}/quarantine/{name}"
        if self._disk.exists(path):
            self._disk.make_folder(f"{self._folder}/quarantine")
            self._disk.rename(path, target)
            self._sync_folders(path, target)
        return target

    def _sync_folders(self, *paths: str) -> None:
        for path in paths:
            self._disk.sync_folder(path.rpartition("/")[0])


def _nothing() -> None:
    """Nobody waits for a row that was given up."""


def _finished(done: Done[None]) -> None:
    try:
        done.result()
    except DiskFull as error:
        log.warning("word_not_finished reason=%r", str(error))  # The next start does it once more.
