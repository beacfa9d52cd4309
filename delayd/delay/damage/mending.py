"""Mending: files that are set aside are looked at again; once one is whole, the server begins anew in place (rule L10).

Only a start reads the directory into memory. So what is set aside stays so for the rest of this life. An operator's
decision is a *word* in the state, which is durable before the server begins anew. A start that finds the word goes on,
until all is done that the word says.

     set aside ──every 30 s, or an operator's word──▶ does it check? ──yes──▶ begin anew ──▶ the start takes it back
         ▲                                                  │
         └── told again ◀──no───────────────────────────────┴──no, but given up──▶ word ──▶ begin anew

What a start does with files that were set aside in an earlier life; each step may be repeated, because a start that
dies leaves what the next one needs:

1. A schedule log that is whole again: the groups of the file beside it are appended to it, as they are.
2. A schedule log that an operator gave up, and that is still damaged: its groups that check are written to a new file
   first. The damaged one is kept aside.
3. A dispatch log that is whole again: the outcomes of the files beside it are appended to it.
4. A dispatch log that an operator gave up: those of its files that don't check are kept aside. Each row that may have
   been handed over without anybody knowing becomes IN_DOUBT, so that it is never sent twice.

An example of 4: rows 1 to 6 are filed. The server sent 1, 2 and 3, and the log with their outcomes was damaged. It sent
4 then, whose outcome is in the file beside it; 5 and 6 are in the wheel when an operator gives the log up. The word
says: below 7, pending 5 and 6. The start finds the outcome of 4, loads 5 and 6, and puts 1, 2 and 3 in doubt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import ROWS_MAX
from delayd.batch.sequences import NO_SEQUENCES, among
from delayd.delay.books.outcomes import (
    OutcomeLog,
    open_dispatch_log,
    outcomes_beside,
    quarantine_path,
    read_outcomes,
    reopen_dispatch_log,
)
from delayd.delay.books.retention import Retention
from delayd.delay.filing.hour_table import (
    BESIDE_PREFIX,
    GIVEN_UP_PREFIX,
    SALVAGE_PREFIX,
    GivenUp,
    HourFile,
    HourPart,
    OutcomeEnd,
    hour_key,
    hour_put,
    outcome_put,
)
from delayd.delay.filing.schedule_log import scan_groups
from delayd.delay.intake import Intake
from delayd.delay.kept_state import KeptState
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.quarantine import OnWord, Quarantine, SetAsideEntry, SetAsideKind
from delayd.delay.rows import Rows, due_at_ms
from delayd.delay.state_values import DROPPED_KEY, encode_dropped
from delayd.errors import DamagedData, DataError, DiskFull
from delayd.hours import hour_name
from delayd.log.group import CommitGroup, GroupKind, NewGroup
from delayd.log.hour import NewPart, OutcomeRows, dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, create_segment, open_segment
from delayd.machine.alarms import DAMAGED_AGAIN_MS
from delayd.machine.executor import Done
from delayd.machine.identity import Site
from delayd.outcome import Outcome

log = logging.getLogger(__name__)

SEALS = "log"  # Names the entry of the quarantine: there is one seal log.


class Try(NamedTuple):
    """A thing to be looked at; with ``drops`` it is given up if it is still damaged. ``done`` is called with the
    result.
    """

    entry: SetAsideEntry
    drops: bool
    done: OnWord


@dataclass(frozen=True, slots=True)
class SetAside:
    """What the start has set aside, and what becomes so."""

    quarantine: Quarantine
    damaged: dict[int, DamagedData]  # By hour: dispatch logs that are damaged and not appended to.
    known_ends: dict[int, OutcomeEnd]  # By hour: the counted ends of dispatch logs that were damaged at the start.
    below: int  # Rows of these hours with lower sequences may have been handed over by an earlier life.


class Mending:
    """Looks at what is set aside, one thing at a time; for the loop alone. ``begin_anew`` has the server begin anew in
    place.
    """

    def __init__(
        self,
        site: Site,
        ledger: Ledger,
        outcomes: OutcomeLog,
        aside: SetAside,
        intake: Intake,
        begin_anew: Callable[[str], None],
    ) -> None:
        self._site = site
        self._ledger, self._hours = ledger, ledger.hours
        self._outcomes = outcomes
        self._quarantine = aside.quarantine
        self._damaged = aside.damaged
        self._found_damaged = frozenset(aside.damaged)
        self._known_ends = aside.known_ends
        self._below = aside.below
        self._intake = intake
        self.sealing: Retention | None = None  # It seals hours.
        self._begin_anew = begin_anew
        site.alarms.every(DAMAGED_AGAIN_MS, self._look_at_aside)
        self._waiting: list[Try] = []
        self._running = False
        self._why = ""  # Why the server is to begin anew.
        self._begun = False  # Whether it was told to.

    def damaged_hours(self) -> set[int]:
        """Hours whose schedule log can't be appended to: their rows go to the file beside it."""
        aside = {
            entry.hour for entry in self._quarantine if entry.kind is SetAsideKind.SCHEDULE and entry.hour is not None
        }
        return aside | set(self._hours.beside.rows["hour"].tolist())

    def schedule_damaged(self, hour: int, error: DamagedData, unread: int | None = None) -> None:
        """Set an hour's schedule log aside, of which so many rows can't be read; None: it counts as a whole."""
        rows = self._hours.filed.get(hour).rows if unread is None else unread
        self._quarantine.put(SetAsideKind.SCHEDULE, hour_name(hour), error, rows, hour=hour)

    def dispatch_damaged(self, hour: int, error: DamagedData) -> None:
        """Set an hour's dispatch log aside: its outcomes go to the file beside it."""
        self._damaged[hour] = error
        self._quarantine.put(SetAsideKind.DISPATCH, hour_name(hour), error, self._hours.filed.get(hour).rows, hour=hour)

    def file_damaged(self, hour: int, error: DamagedData) -> None:
        """Set aside the file of an hour that an error names; all rows of the hour have left the wheel."""
        if error.path == dispatch_path(self._site.folder, hour):
            self.dispatch_damaged(hour, error)
        else:
            self.schedule_damaged(hour, error)

    def seals_damaged(self, error: DamagedData) -> None:
        """Set the seal log aside: nothing is sealed, and an hour that is not sealed is not deleted."""
        assert self.sealing is not None, "it is made before its log is read"
        self.sealing.set_seals_aside()
        self._quarantine.put(SetAsideKind.SEAL, SEALS, error)

    def doubt(self, hour: int, rows: Rows, word: GivenUp, *, lacks_rows: bool) -> None:
        """Rows of a given up dispatch log may have been handed over without anybody knowing: they get an outcome, and
        are never sent. The word is done when that is durable, unless the hour lacks rows.
        """
        if len(rows):
            log.critical("rows_in_doubt hour=%s rows=%d", hour_name(hour), len(rows))
        for start in range(0, len(rows), ROWS_MAX):
            piece = rows[start : start + ROWS_MAX]
            part = NewPart(piece["sequence"].copy(), due_at_ms(piece), Outcome.IN_DOUBT, self._site.clock.now_ms())
            self._outcomes.record(hour, part, _nothing)
        if not lacks_rows:
            puts = [(hour_key(hour, GIVEN_UP_PREFIX), word._replace(done=True).encode())]
            commit = partial(self._site.worker.submit, partial(self._site.state.commit, puts, []), _finished)
            self._outcomes.when_durable(commit)

    def obey(self, entry: SetAsideEntry, drop: bool, done: OnWord) -> None:
        """Look at a thing now, by an operator's word; with ``drop`` it is given up if it is still damaged."""
        if self._begun:
            done(False, "the server is about to begin anew; say it again in a moment")
            return
        self._waiting.insert(0, Try(entry, drop, done))
        self._next()

    def _look_at_aside(self) -> None:
        """Look at all that is set aside, one thing after the other."""
        known = {each.entry.id for each in self._waiting}
        ours = (SetAsideKind.SCHEDULE, SetAsideKind.DISPATCH, SetAsideKind.SEAL)
        aside = [entry for entry in self._quarantine if entry.kind in ours and entry.id not in known]
        self._waiting += [Try(entry, False, _nobody) for entry in aside]
        self._next()

    def _look(self, each: Try) -> None:
        hour = each.entry.hour
        looked = partial(self._looked, each)
        if each.entry.kind is SetAsideKind.SEAL:
            assert self.sealing is not None, "it has set its log aside"
            self._site.worker.submit(self.sealing.try_seals, looked)
            return
        assert hour is not None, "a log of an hour is quarantined with its hour"
        site = self._site
        if each.entry.kind is SetAsideKind.SCHEDULE:
            site.worker.submit(partial(check_schedule, site, self._hours.files.parts(hour)), looked)
        else:
            end = self._outcomes.ends.get(hour) or self._known_ends.get(hour, OutcomeEnd())
            self._outcomes.without(hour, partial(_check_outcomes, site, hour, end.length), looked)

    def _looked(self, each: Try, done: Done[None]) -> None:
        entry = each.entry
        needed = next((other.id for other in self._quarantine if other.kind is SetAsideKind.LOG), None)
        try:
            done.result()
            if needed is not None:
                # The next start would be held, and this life goes on without that file.
                self._end(each, False, f"it is whole again; the server takes it back when {needed} is whole, too")
                return
        except DataError as error:
            if isinstance(error, DamagedData):
                self._quarantine.put(entry.kind, entry.name, error, entry.rows, hour=entry.hour)
                if each.drops and needed is None:
                    self._give_up(each)
                    return
            else:
                log.warning("mending_put_off id=%s reason=%r", entry.id, str(error))
            self._end(each, False, str(error))
            return
        self._end(each, True, "it is whole again, and the server begins anew to take it back")

    def _give_up(self, each: Try) -> None:
        """Store the word durably; the start that follows does the rest."""
        hour, now_ms = each.entry.hour, self._site.clock.now_ms()
        assert hour is not None, "only logs of hours are given up"
        if each.entry.kind is SetAsideKind.SCHEDULE:
            puts = [(hour_key(hour, SALVAGE_PREFIX), msgpack.packb(now_ms))]
        else:
            # None of its rows is counted any more.
            word = self._word(hour, now_ms)
            puts = [(hour_key(hour, GIVEN_UP_PREFIX), word.encode()), outcome_put(hour, OutcomeEnd())]
        self._site.worker.submit(partial(self._site.state.commit, puts, []), partial(self._stored, each))

    def _word(self, hour: int, now_ms: int) -> GivenUp:
        """Which rows of an hour may have been handed over without anybody knowing: all that this life doesn't know to
        be pending.
        """
        if hour in self._found_damaged:
            return GivenUp(now_ms, False, self._below, NO_SEQUENCES)
        pending = self._hours.pending.of_hour(hour)["sequence"]
        known = np.unique(np.concatenate((self._ledger.undecided_of(hour), pending)))
        return GivenUp(now_ms, False, self._intake.next_sequence, known)

    def _stored(self, each: Try, done: Done[None]) -> None:
        try:
            done.result()
        except DiskFull as error:
            self._end(each, False, f"nothing was stored: {error}")
            return
        self._end(each, True, "it is given up, and the server begins anew without it")

    def _end(self, each: Try, well: bool, message: str) -> None:
        """Tell the result, and go on; what else waits is looked at before the server begins anew."""
        self._running = False
        if well:
            self._why = self._why or f"{each.entry.id}: {message}"
        each.done(well, message)
        self._next()

    def _next(self) -> None:
        if self._running or self._begun:
            return
        if self._waiting:
            self._running = True
            self._look(self._waiting.pop(0))
        elif self._why:
            self._begun = True
            self._begin_anew(self._why)


def _check_outcomes(site: Site, hour: int, known: int) -> None:
    """Open a dispatch log that was damaged and append what stands beside it, on the thread that writes outcomes."""
    opened = open_dispatch_log(site, hour, known)
    if opened is not None:
        opened[0].close()


def _nothing() -> None:
    """Nobody waits for a row that was given up."""


def _finished(done: Done[None]) -> None:
    try:
        done.result()
    except DiskFull as error:
        log.warning("word_not_finished reason=%r", str(error))  # The next start does it once more.


def _nobody(done: bool, message: str) -> None:
    """Nobody waits for a look that was due by itself."""


# Schedule logs.


def check_schedule(site: Site, parts: Sequence[HourPart]) -> None:
    """Read an hour's schedule log and the file beside it, on the worker thread.

    Raises:
        DamagedData, Shortage: one of them does not check or can't be read.
        DiskFull: there is no space to append the one to the other.
    """
    for part in parts:
        for _ in _groups(site, part):
            site.worker.give_way()
        if part.is_beside and site.disk.free_bytes(site.folder) < 2 * part.counted.length:
            raise DiskFull(schedule_path(site.folder, part.hour))


def take_back_schedules(site: Site, kept: KeptState) -> dict[int, DamagedData]:
    """Join the schedule logs that are whole again, or given up, with the files beside them; return the damage of the
    other hours that have such a file or word.
    """
    damaged: dict[int, DamagedData] = {}
    for hour in sorted({*kept.beside.rows["hour"].tolist(), *kept.salvage}):
        try:
            _join(site, hour, kept)
        except DamagedData as damage:
            damaged[hour] = damage
        except DiskFull as full:
            damaged[hour] = DamagedData(full.path, 0, f"{full.message}; rows beside it wait for that")
    return damaged


def _groups(site: Site, part: HourPart) -> Iterator[CommitGroup]:
    return scan_groups(site.disk, part.path(site.folder), site.log_id, part.hour, part.counted)


def _join(site: Site, hour: int, kept: KeptState) -> None:
    file, dropped, puts = kept.hours.get(hour), kept.dropped, list[tuple[bytes, bytes]]()
    parts = kept.files.parts(hour)
    for part in parts:
        try:
            for _ in _groups(site, part):
                pass
        except DamagedData:
            if hour not in kept.salvage or part.is_beside:
                raise
            file = _salvage(site, hour, part.counted)
            lost = part.counted.rows - file.rows
            dropped = dropped | {hour: dropped.get(hour, 0) + lost}
            puts.append((DROPPED_KEY, msgpack.packb(encode_dropped(dropped))))
            log.critical("rows_lost hour=%s rows=%d", hour_name(hour), lost)
    beside = next((part for part in parts if part.is_beside), None)
    if beside is not None:
        file = _append(site, hour, file, _groups(site, beside)).with_flags(beside.counted.flags)
    removes = [hour_key(hour, BESIDE_PREFIX), hour_key(hour, SALVAGE_PREFIX)]
    if file.length:
        site.state.commit([hour_put(hour, file), *puts], removes)
        kept.hours.set(hour, file)
    else:
        site.state.commit(puts, [hour_key(hour), *removes])
        kept.hours.remove([hour])
    kept.beside.remove([hour])
    kept.dropped = dropped
    if beside is not None:
        site.disk.remove(beside.path(site.folder))
        site.disk.sync_folder(f"{site.folder}/quarantine")
    log.info("schedule_log_taken_back hour=%s rows=%d", hour_name(hour), file.rows)


def _salvage(site: Site, hour: int, file: HourFile) -> HourFile:
    """Put the groups of a damaged schedule log that still check in its place; the damaged file is kept aside."""
    path = schedule_path(site.folder, hour)
    kept = HourFile(flags=file.flags)
    try:
        for group in scan_groups(site.disk, path, site.log_id, hour, file):
            kept = HourFile(group.end, kept.rows + group.header.row_count, group.header.header_crc32c, file.flags)
    except DamagedData as error:
        # Damage to the file's header makes all of the file unusable.
        if error.position <= FILE_HEADER_BYTES:
            kept = HourFile()
    aside = _keep_aside(site, path, f"{hour_name(hour)}.schedule.dropped")
    if not kept.length:
        return HourFile()
    groups = scan_groups(site.disk, aside, site.log_id, hour, kept)
    return _append(site, hour, HourFile(flags=file.flags), groups)


def _append(site: Site, hour: int, file: HourFile, groups: Iterator[CommitGroup]) -> HourFile:
    """Append groups as they are to an hour's schedule log, behind the bytes that ``file`` counts; durable on return."""
    path, disk = schedule_path(site.folder, hour), site.disk
    if file.length:
        segment = open_segment(disk, path, FileKind.SCHEDULE, site.log_id, write=True)
        segment.end = segment.durable = file.length
        segment.crc32c = file.last_crc32c
        segment.file.truncate(segment.position(file.length))
    else:
        disk.make_folder(path.rpartition("/")[0])
        if disk.exists(path):
            disk.remove(path)
        header = FileHeader(FileKind.SCHEDULE, site.log_id, 0, hour, site.clock.now_ms())
        segment = create_segment(disk, path, header)
    rows = file.rows
    try:
        for group in groups:
            batches = [batch.buffer for _, batch in group.batches()]
            count, at_ms = group.header.row_count, group.header.appended_at_ms
            segment.append([NewGroup(GroupKind.DATA, batches, site.epoch, at_ms, 0, count)])
            rows += count
        segment.flush()
    finally:
        segment.close()
    return HourFile(segment.end, rows, segment.crc32c, file.flags)


# Dispatch logs.


def give_up_outcomes(site: Site, hour: int) -> tuple[Segment, OutcomeRows]:
    """Open an hour's dispatch log that was given up: those of its files that don't check are kept aside."""
    path = dispatch_path(site.folder, hour)
    if not _checks(site, path, hour):
        _keep_aside(site, path, f"{hour_name(hour)}.dispatch.dropped")
    for number in outcomes_beside(site.disk, site.folder).get(hour, []):
        beside = quarantine_path(site.folder, hour, number)
        if not _checks(site, beside, hour):
            _keep_aside(site, beside, f"{hour_name(hour)}.{number}.dispatch.dropped")
    if not site.disk.exists(path):
        site.disk.make_folder(path.rpartition("/")[0])
        header = FileHeader(FileKind.DISPATCH, site.log_id, 0, hour, site.clock.now_ms())
        create_segment(site.disk, path, header).close()
    opened = open_dispatch_log(site, hour, 0)
    assert opened is not None, "it has its header"
    return opened


def _checks(site: Site, path: str, hour: int) -> bool:
    try:
        segment = reopen_dispatch_log(site.disk, path, site.log_id, 0, hour)
        if segment is None:
            return False  # A crash while the file was made left no header; opening removed it.
        try:
            read_outcomes(segment)
        finally:
            segment.close()
    except DamagedData:
        return False
    return True


def doubtful(rows: Rows, word: GivenUp) -> NDArray[np.bool_]:
    """Which rows without an outcome may have been handed over without anybody knowing."""
    return (rows["sequence"] < np.uint64(word.below)) & ~among(rows["sequence"], word.pending)


def _keep_aside(site: Site, path: str, name: str) -> str:
    """Put a file that an operator gave up aside, in case somebody can read it after all; return where it is."""
    target = f"{site.folder}/quarantine/{name}"
    if site.disk.exists(path):
        site.disk.make_folder(f"{site.folder}/quarantine")
        site.disk.rename(path, target)
        for each in (path, target):
            site.disk.sync_folder(each.rpartition("/")[0])
    return target
