"""Finder: lists the pending rows of a subject and a window, a piece at a time (docs/keys.md, In bulk).

     loop: rows in memory, and how far   worker: those of the window,    loop: which of them are
     files count, in one moment       ─▶ and rows of schedule logs    ─▶ pending now, in parts  ─▶ answer
                                                                              │
                                         worker: what these rows hold    ◀────┘
                                         (copies.py)  , if the walk asks ─────────────────────────▶ answer

The loop lists arrays of rows and never looks into them, however many rows wait. It asks about LOOK_ROWS found rows a
turn. A window that names one row is asked of the ledger in place of that, which remembers what it has read of an hour.

Invariant: a row that is pending from the beginning of a walk to its end, and stays in its hour, is found once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.labels import dead_letters, may_have_tags, rows_with_tags
from delayd.batch.names import RETRY_PREFIX
from delayd.batch.sequences import NO_INDICES, Locations, pack_locations
from delayd.delay.ending.copies import (
    CACHE_BYTES,
    LOCATED,
    Contents,
    LocatedRows,
    batch_of,
    by_batch,
    numbers_of,
    read_contents,
)
from delayd.delay.filing.hour_table import HourPart
from delayd.delay.filing.schedule_log import Sources, scan_fronts
from delayd.delay.ledger.ledger import NOT_CLAIMABLE, Ledger, Look
from delayd.delay.ledger.wanted import OfSubject, Wanted
from delayd.delay.reply import Reply
from delayd.delay.rows import COARSE_FROM_MS, Rows, due_at_ms, join_rows
from delayd.errors import DataError, DelaydError, SlowDown
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.machine.executor import Done, Executor, Priority
from delayd.machine.identity import Site
from delayd.outcome import MessageState
from delayd.recurrence.recurrence import JITTER_MAX
from delayd.wire.asked import FOUND, AskedWindow, Content, FoundRows, Piece
from delayd.wire.asked import Place as WalkPlace

log = logging.getLogger(__name__)

HOURS_MAX = 1_024  # Files that one piece reads.
PIECES_UNDER_WAY_MAX = 16
REMEMBERED_ROWS_MAX = 2 << 20  # 33 bytes each.
LOOK_ROWS = 8_192  # The loop asks about so many found rows in 1 to 2 ms.
SCAN_ROWS = 65_536  # After so many rows in memory the worker gives way.
SHORT_ROWS = 4_096
# A message of a schedule that is due later was moved there, or is a dead letter: no occurrence is due so long after its
# decision.
FAR_MS = JITTER_MAX // timedelta(milliseconds=1) + 1
RETRIES = RETRY_PREFIX.encode()  # Stands for all subjects that begin with it.

Answer = Callable[[Piece | DelaydError], None]


class _Chosen(NamedTuple):
    """Which rows a piece is about."""

    window: AskedWindow
    numbers: NDArray[np.uint32] | None  # Its subjects in memory; None: every one.
    first: int  # The hours, both included.
    last: int
    until_sequence: int

    def of(self, parts: Iterable[Rows], worker: Executor, *, in_wheel: bool) -> LocatedRows:
        """The chosen ones of some rows; on the worker thread."""
        found = [np.empty(0, LOCATED)]
        numbers = self.numbers
        for rows in _slices(parts) if numbers is None or len(numbers) else ():
            chosen: NDArray[np.bool_] = (rows["hour"] >= self.first) & (rows["hour"] <= self.last)
            if numbers is not None:
                chosen &= rows["subject"] == numbers[0] if len(numbers) == 1 else np.isin(rows["subject"], numbers)
            # So long before its hour the column counts seconds, and the row's own instant is not known here.
            chosen &= (rows["sequence"] < np.uint64(self.until_sequence)) & (rows["due_ms"] >= -COARSE_FROM_MS)
            # Rows of earlier pieces; `first` is the hour of the place, or a later one.
            place = self.window.place
            chosen &= (rows["hour"] > place.hour) | (rows["sequence"] > np.uint64(place.sequence))
            places = np.flatnonzero(chosen)
            if len(places):
                found.append(_within(self.window, *_columns(rows.take(places)), in_wheel=in_wheel))
            worker.give_way()
        return np.concatenate(found)


class _Snapshot(NamedTuple):
    """Everything that may hold rows, at one moment."""

    chosen: _Chosen
    filed: NDArray[np.uint32]  # Rising: hours that are filed, HOURS_MAX at most.
    more: bool  # Whether there are filed hours behind these.
    files: list[HourPart]  # Those of them whose hours are not loaded.
    wheel: list[Rows]  # Arrays that nobody writes into any more, as those of `others`: other threads may read them.
    others: list[Rows]  # The pending rows, and those that have left the wheel.
    hours_dropped: int  # How many hours had left the wheel.
    reader: Sources | None  # For a window that wants a tag, or later lives of one message.


class _Read(NamedTuple):
    """The rows of a piece, in memory and in files, whether or not they are pending now."""

    rows: LocatedRows
    place: WalkPlace | None
    unread: int


class _Ordered(NamedTuple):
    """Some found rows, and the same by rising sequence: ``wanted`` number i is row ``order[i]``."""

    rows: LocatedRows
    order: NDArray[np.intp]
    wanted: Wanted


@dataclass(slots=True)
class _Looking:
    """A piece whose rows the loop asks about, part by part."""

    window: AskedWindow
    until_sequence: int
    reply: Reply[Piece]
    read: _Read
    pending: list[LocatedRows]
    in_flight: int = 0


class _Remembered(NamedTuple):
    """The rows that a walk finds in a file: the next piece need not read them again."""

    walk: tuple[tuple[bytes, frozenset[bytes], str, int], int, int, int, HourPart]
    rows: LocatedRows


class Finder:
    """Belongs to the loop; the files are read on the worker thread."""

    def __init__(
        self,
        site: Site,
        ledger: Ledger,
        sources: Sources,
        until: Callable[[], int],
    ) -> None:
        """``until`` tells the sequence below which all rows are durable."""
        self._site = site
        self._sources = sources
        self._ledger, self._hours = ledger, ledger.hours
        self._until = until
        self._under_way = 0
        self._remembered: _Remembered | None = None  # For the worker thread alone.

    def __len__(self) -> int:
        return self._under_way

    def find(self, window: AskedWindow, answer: Answer) -> None:
        """Call ``answer`` with the next piece of a walk.

        Raises SlowDown: as many pieces are under way as may be.
        """
        if self._under_way >= PIECES_UNDER_WAY_MAX:
            raise SlowDown("this server looks for as many messages as it can at a time; ask again later")
        reply: Reply[Piece] = Reply(answer)
        with reply.begins():
            self._under_way += 1
            reply.holds(self._ended)
            if _names_one(window):
                wanted = Wanted(
                    np.array([window.place.sequence + 1], np.uint64),
                    np.array([window.from_ms], np.int64),
                    np.array([window.place.hour], np.uint32),
                    OfSubject(window.subject, self._hours.subjects),
                )
                self._ledger.when_sorted(self._site.worker, partial(self._look_for_one, window, wanted, reply))
                return
            snapshot = self._snapshot(window)
            done = partial(self._found, snapshot, reply)
            self._site.worker.submit(partial(self._read, snapshot), done, Priority.NORMAL)

    def _ended(self) -> None:
        self._under_way -= 1

    # One row.

    def _look_for_one(self, window: AskedWindow, wanted: Wanted, reply: Reply[Piece]) -> None:
        with reply.goes_on():
            look = self._ledger.look(wanted)
            self._ledger.read(look, partial(self._one_looked_up, window, look, reply))

    def _one_looked_up(self, window: AskedWindow, look: Look, reply: Reply[Piece], error: DelaydError | None) -> None:
        with reply.goes_on():
            if error is not None:
                raise error
            locations = np.zeros(1, np.uint64)
            states = self._ledger.states(look, locations)
            row = np.zeros(1, LOCATED)
            row["sequence"], row["deliver_at_ms"] = look.wanted.sequences, look.wanted.deliver_at_ms
            row["accepted_at_ms"], row["location"] = look.wanted.hours.astype(np.int64) * HOUR_MS, locations
            row = row.compress(states.claimable != NOT_CLAIMABLE)
            unread = 0 if look.found is None else int(look.found.unread.sum())
            in_flight = int((states.answers["state"] == MessageState.IN_FLIGHT).sum()) - unread
            read = _Read(row, None, unread)
            self._read_contents(_Looking(window, window.until_sequence, reply, read, [row], in_flight))

    # Rows of a window.

    def _snapshot(self, window: AskedWindow) -> _Snapshot:
        wheel, numbers = self._hours.wheel, self._numbers(window)
        first, last = max(window.place.hour, hour_of_ms(window.from_ms)), self._last_hour(window)
        chosen = _Chosen(window, numbers, first, last, window.until_sequence or self._until())
        filed = self._hours.files.all().astype(np.uint32)
        filed = filed[(filed >= first) & (filed <= last)]
        hours = filed[:HOURS_MAX]
        files = [
            file for hour in hours.tolist() if not self._hours.is_loaded(hour) for file in self._hours.files.parts(hour)
        ]
        in_wheel = list(wheel.parts(first, last))
        others = [*self._hours.pending.views(0), *self._ledger.outside()]
        reader = self._sources.reader() if window.tag or window.origin else None
        more = len(filed) > len(hours)
        return _Snapshot(chosen, hours, more, files, in_wheel, others, wheel.hours_dropped, reader)

    def _numbers(self, window: AskedWindow) -> NDArray[np.uint32] | None:
        """The numbers of a window's subjects in memory; None: of every one."""
        subjects = self._hours.subjects
        names = list(window.subjects) or ([window.subject] if window.subject else [])
        if not names:
            return None
        if RETRIES in names:
            names = [name for name in subjects.names if _is_among(name, window.subjects)]
        found = [number for name in names if (number := subjects.find(name)) is not None]
        return np.array(found, np.uint32)

    def _last_hour(self, window: AskedWindow) -> int:
        """A row is filed in the hour of its due instant, or later if it was due when it came."""
        latest = max(window.to_ms - 1, self._site.clock.now_ms() + HOUR_MS)
        return max(hour_of_ms(latest), max(self._hours.wheel.hours(), default=0))

    def _read(self, snapshot: _Snapshot) -> _Read:
        """On the worker thread."""
        if snapshot.reader is None:
            return self._read_rows(snapshot)
        try:
            read = self._read_rows(snapshot)
            rows, unread = _wanted(read.rows, snapshot.chosen.window, snapshot.reader, self._site.worker)
        finally:
            snapshot.reader.close()
        return read._replace(rows=rows, unread=read.unread + unread)

    def _read_rows(self, snapshot: _Snapshot) -> _Read:
        window, chosen, worker = snapshot.chosen.window, snapshot.chosen, self._site.worker
        in_wheel = chosen.of(snapshot.wheel, worker, in_wheel=True)
        memory = np.concatenate((in_wheel, chosen.of(snapshot.others, worker, in_wheel=False)))
        every = np.union1d(snapshot.filed, memory["accepted_at_ms"] // HOUR_MS)
        hours = every[:HOURS_MAX].tolist()
        parts: list[LocatedRows] = []
        count = unread = read = last = 0
        files = iter(snapshot.files)
        file = next(files, None)
        for last in hours:
            while file is not None and file.hour == last:
                try:
                    rows = _behind(self._rows_of_file(snapshot, file), window.place)
                    parts.append(rows)
                    count += len(rows)
                except (DataError, FileNotFoundError) as error:
                    # Whoever looks after the file finds the same damage, and its rows wait there.
                    log.warning("rows_not_found hour=%d reason=%r", last, str(error))
                    unread += 1
                file = next(files, None)
            read += 1
            if count >= window.rows_max:
                break
        memory = memory.compress(memory["accepted_at_ms"] < (last + 1) * HOUR_MS)
        # An hour may have millions of rows: they are put in order here, and not on the loop.
        rows = _first_in_order(_behind(np.concatenate((memory, *parts)), window.place), window.rows_max + 1)
        if len(rows) > window.rows_max:
            rows = rows[: window.rows_max]
            place = WalkPlace(int(rows[-1]["accepted_at_ms"]) // HOUR_MS, int(rows[-1]["sequence"]))
            return _Read(rows, place, unread)
        self._remembered = None
        more = snapshot.more or read < len(every)
        return _Read(rows, WalkPlace(last + 1, 0) if more else None, unread)

    def _rows_of_file(self, snapshot: _Snapshot, file: HourPart) -> LocatedRows:
        """The rows of the subject and the window in a file, as far as they may be wanted. Its counted bytes never
        change, so they are read once.
        """
        window, site, until = snapshot.chosen.window, self._site, snapshot.chosen.until_sequence
        about = (window.subject, window.subjects, window.tag, window.origin)
        walk = (about, window.from_ms, window.to_ms, until, file)
        if self._remembered is not None and self._remembered.walk == walk:
            return self._remembered.rows
        parts = [np.empty(0, LOCATED)]
        for stored in scan_fronts(site.disk, site.folder, site.log_id, file):
            batch = stored.batch
            if window.subjects:
                rows = _rows_to_be_done(batch, window.subjects, site.clock.now_ms() + FAR_MS)
            else:
                rows = _rows_of(batch, window.subject)
            if rows is not None and window.tag:
                rows = rows.compress(may_have_tags(batch, [window.tag]).take(rows))
            if rows is not None and window.origin:
                rows = rows.compress(_of_origin(batch, window.origin).take(rows))
            if rows is not None and len(rows):
                rows = rows.compress(batch.uint64s(ColumnId.SEQUENCE).take(rows) < np.uint64(until))
                sequences = batch.uint64s(ColumnId.SEQUENCE).take(rows)
                due = batch.int64s(ColumnId.DELIVER_AT_MS).take(rows)
                hours = np.full(len(rows), file.hour, np.uint32)
                locations = pack_locations(True, stored.offset, rows.astype(np.uint16))
                parts.append(_within(window, sequences, due, hours, locations, in_wheel=False))
            site.worker.give_way()
        found = np.concatenate(parts)
        if len(found) <= REMEMBERED_ROWS_MAX:
            self._remembered = _Remembered(walk, found)
        return found

    def _found(self, snapshot: _Snapshot, reply: Reply[Piece], done: Done[_Read]) -> None:
        with reply.goes_on():
            chosen = snapshot.chosen
            looking = _Looking(chosen.window, chosen.until_sequence, reply, done.result(), [])
            self._look_from(looking, snapshot, 0)

    def _look_from(self, looking: _Looking, snapshot: _Snapshot, first: int) -> None:
        """Ask about the rows from number ``first`` on, when the loop has turned."""
        work = partial(_ordered, looking.read.rows[first : first + LOOK_ROWS])
        self._site.worker.submit(work, partial(self._look, looking, snapshot, first + LOOK_ROWS), Priority.DUE)

    def _look(self, looking: _Looking, snapshot: _Snapshot, next_first: int, done: Done[_Ordered]) -> None:
        with looking.reply.goes_on():
            ordered = done.result()
            pending, in_flight = self._states(snapshot, ordered)
            listed = pending | in_flight if looking.window.subjects else pending
            looking.pending.append(ordered.rows.compress(listed))
            looking.in_flight += int(np.count_nonzero(in_flight))
            if next_first < len(looking.read.rows):
                self._look_from(looking, snapshot, next_first)
                return
            self._read_contents(looking)

    def _read_contents(self, looking: _Looking) -> None:
        """Read what the rows of a piece hold, if that is asked for."""
        rows, window = np.concatenate(looking.pending), looking.window
        if not len(rows) or window.content is Content.NONE:
            self._answer(looking, Contents(rows))
            return
        work = partial(read_contents, rows, window, self._sources.reader(CACHE_BYTES), self._site.worker)
        self._site.worker.submit(work, lambda done: self._read_whole(looking, done), Priority.NORMAL)

    def _read_whole(self, looking: _Looking, done: Done[Contents]) -> None:
        with looking.reply.goes_on():
            self._answer(looking, done.result())

    def _answer(self, looking: _Looking, contents: Contents) -> None:
        read, until = looking.read, looking.until_sequence
        unread, place = read.unread + contents.unread, contents.place or read.place
        rows = _found_rows(contents.rows)
        looking.reply.end(Piece(rows, looking.in_flight, unread, until, place, contents.batch))

    def _states(self, snapshot: _Snapshot, ordered: _Ordered) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which rows are pending now, and which may be at a target."""
        rows, wanted = ordered.rows, ordered.wanted
        if not len(rows):
            return np.zeros(0, np.bool_), np.zeros(0, np.bool_)
        numbers, stood = snapshot.chosen.numbers, NO_INDICES
        subject = int(numbers[0]) if numbers is not None and len(numbers) == 1 else None
        if subject is not None and snapshot.hours_dropped == self._hours.wheel.hours_dropped:
            stood = np.flatnonzero(rows["in_wheel"].take(ordered.order))
        is_pending, is_in_flight = self._ledger.are_pending(wanted, stood, subject or 0)
        pending, in_flight = np.empty(len(rows), np.bool_), np.empty(len(rows), np.bool_)
        pending[ordered.order], in_flight[ordered.order] = is_pending, is_in_flight
        return pending, in_flight


def _names_one(window: AskedWindow) -> bool:
    """Whether the instants and sequences of a window leave one row."""
    is_one = window.until_sequence == window.place.sequence + 2 and window.to_ms == window.from_ms + 1
    return is_one and bool(window.subject) and not window.tag and not window.origin


def _ordered(rows: LocatedRows) -> _Ordered:
    """On the worker thread."""
    order = np.argsort(rows["sequence"], kind="stable")
    hours = (rows["accepted_at_ms"].take(order) // HOUR_MS).astype(np.uint32)
    return _Ordered(rows, order, Wanted(rows["sequence"].take(order), rows["deliver_at_ms"].take(order), hours))


def _slices(parts: Iterable[Rows]) -> Iterator[Rows]:
    """The same rows, in arrays of up to SCAN_ROWS; short arrays are joined, since each costs as much as some thousand
    rows.
    """
    short: list[Rows] = []
    short_rows = 0
    for rows in parts:
        if len(rows) >= SHORT_ROWS:
            for first in range(0, len(rows), SCAN_ROWS):
                yield rows[first : first + SCAN_ROWS]
            continue
        short.append(rows)
        short_rows += len(rows)
        if short_rows >= SHORT_ROWS:
            yield join_rows(short)
            short, short_rows = [], 0
    if short_rows:
        yield join_rows(short)


def _rows_of(batch: Batch, subject: bytes) -> NDArray[np.intp] | None:
    """The rows of one subject in a SCHEDULE batch, or of every one; None when it has none."""
    names = batch.subjects()
    if not subject:
        return np.arange(batch.count)
    if subject not in names:
        return None
    if ColumnId.SUBJECT not in batch.offsets:
        return np.arange(batch.count)
    return np.flatnonzero(batch.uint32s(ColumnId.SUBJECT) == np.uint32(names.index(subject)))


def _rows_to_be_done(batch: Batch, subjects: frozenset[bytes], far_ms: int) -> NDArray[np.intp] | None:
    """The rows of several subjects in a SCHEDULE batch, without dead letters; None when it has none. One that was sent
    again is due before ``far_ms``.
    """
    wanted = np.array([_is_among(name, subjects) for name in batch.subjects()], np.bool_)
    if not wanted.any():
        return None
    of_row = batch.uint32s(ColumnId.SUBJECT) if ColumnId.SUBJECT in batch.offsets else np.zeros(batch.count, np.uint32)
    chosen: NDArray[np.bool_] = wanted.take(of_row)
    letters = dead_letters(batch)
    chosen[letters] &= batch.int64s(ColumnId.DELIVER_AT_MS).take(letters) < far_ms
    return np.flatnonzero(chosen)


def _is_among(name: bytes, subjects: frozenset[bytes]) -> bool:
    return name in subjects or (RETRIES in subjects and name.startswith(RETRIES))


def _of_origin(batch: Batch, origin: int) -> NDArray[np.bool_]:
    """Which rows are later lives of the message with this sequence."""
    if ColumnId.ORIGIN_SEQUENCE not in batch:
        return np.zeros(batch.count, np.bool_)
    found: NDArray[np.bool_] = batch.uint64s(ColumnId.ORIGIN_SEQUENCE) == np.uint64(origin)
    return found


def _wanted(rows: LocatedRows, window: AskedWindow, reader: Sources, worker: Executor) -> tuple[LocatedRows, int]:
    """The rows that have the window's tag and origin, and the number of batches that could not be read."""
    hours = rows["accepted_at_ms"] // HOUR_MS
    kept, unread = np.zeros(len(rows), np.bool_), 0
    for own in by_batch(hours, rows["location"]):
        batch = batch_of(reader, hours, rows["location"], own)
        if batch is None:
            unread += 1
            continue
        numbers = numbers_of(rows["location"].take(own))
        among = np.zeros(batch.count, np.bool_)
        among[numbers] = True
        if window.origin:
            among &= _of_origin(batch, window.origin)
        if window.tag:
            among = rows_with_tags(batch, [window.tag], among)
        kept[own] = among.take(numbers)
        worker.give_way()
    return rows.compress(kept), unread


def _found_rows(rows: LocatedRows) -> FoundRows:
    found = np.empty(len(rows), FOUND)
    for name in FOUND.names or ():
        found[name] = rows[name]
    return found


def _columns(rows: Rows) -> tuple[NDArray[np.uint64], Int64s, NDArray[np.uint32], Locations]:
    return rows["sequence"].copy(), due_at_ms(rows), rows["hour"].copy(), rows["location"].copy()


def _within(
    window: AskedWindow,
    sequences: NDArray[np.uint64],
    deliver_at_ms: Int64s,
    hours: NDArray[np.uint32],
    locations: Locations,
    *,
    in_wheel: bool,
) -> LocatedRows:
    """The rows that are due in the window."""
    chosen = np.flatnonzero((deliver_at_ms >= window.from_ms) & (deliver_at_ms < window.to_ms))
    found = np.empty(len(chosen), LOCATED)
    found["location"], found["in_wheel"] = locations.take(chosen), in_wheel
    found["sequence"], found["deliver_at_ms"] = sequences.take(chosen), deliver_at_ms.take(chosen)
    found["accepted_at_ms"] = hours.take(chosen).astype(np.int64) * HOUR_MS
    return found


def _behind(rows: LocatedRows, place: WalkPlace) -> LocatedRows:
    hours = rows["accepted_at_ms"] // HOUR_MS
    return rows.compress(
        (hours > place.hour) | ((hours == place.hour) & (rows["sequence"] > np.uint64(place.sequence)))
    )


def _first_in_order(rows: LocatedRows, count: int) -> LocatedRows:
    """The first ``count`` rows by hour and sequence, and perhaps more: most of a million rows are not sorted."""
    if len(rows) > 2 * count:
        hours, sequences = rows["accepted_at_ms"].copy(), rows["sequence"].copy()
        last = np.partition(hours, 2 * count)[2 * count]
        before, of_last = hours < last, hours == last
        of_last_sequences = sequences.compress(of_last)
        wanted = 2 * count - int(np.count_nonzero(before))
        chosen = before | (of_last & (sequences <= np.partition(of_last_sequences, wanted)[wanted]))
        ordered = _in_order(rows.compress(chosen))
        # Rows that stood twice, in memory and in a file, are one.
        if len(ordered) >= count:
            return ordered
    return _in_order(rows)


def _in_order(rows: LocatedRows) -> LocatedRows:
    """The rows by hour and sequence, each once."""
    rows = rows.take(np.lexsort((rows["sequence"], rows["accepted_at_ms"])))
    if len(rows) > 1:
        once = np.concatenate(([True], rows["sequence"][1:] != rows["sequence"][:-1]))
        rows = rows.compress(once)
    return rows
