"""Index of keys: which row was the newest to take each key (docs/keys.md).

It is derived from the message log and the schedule logs (rule L9). A wrong entry can't deliver anything wrongly, but it
could let two rows with one key be pending: so while a part of the index is missing, it is not `whole`, and nobody
decides by it.

1. `add` takes rows that are durable. They stand in memory, in sorted parts that double in size.
2. A checkpoint takes the parts up to its replay offset with `freeze`, writes them as one run on the worker thread, and
   names all runs in its transaction. Then `counted` puts the run in the place of the parts.
3. When the newest runs are together larger than half of the next older one, they are merged beside the loop. The next
   checkpoint names the merged run; then the old files are removed. An example: runs of 1,000, 100, 30 and 15 entries
   stay apart. With 25 in place of 15 the last one is larger than half of 30, and both together than half of 100, but
   these 155 are not larger than half of 1,000: the last three become one run.

While the index is not whole, nothing leaves memory: a checkpoint only notes in the state that the index must be made
again. `rebuild` makes new runs from the logs, and `rebuilt` takes them.

A look-up sees the index as it was when it began. Whoever decides by it asks `TakenNames` what came since.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.content import Hasher, Names, slots_of_names
from delayd.delay.keys.run import (
    NO_ENTRIES,
    PIECE_ENTRIES,
    AskedNames,
    Entries,
    Hours,
    Index,
    KeyedRows,
    Newest,
    OpenRun,
    Rows,
    merge,
    new_entries,
    open_run,
    write_pieces,
    write_run,
)
from delayd.errors import DamagedData, DataError, SlowDown
from delayd.hours import HOUR_MS
from delayd.log.key_run import BLOCK_ENTRIES, FOLDER, KnownRuns, RunName, run_path
from delayd.log.segment import FileHeader, FileKind
from delayd.machine.disk import Disk
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.wire.asked import Asked
from delayd.wire.meta import SlotSet

log = logging.getLogger(__name__)

LOOP_ENTRIES = 16 << 10  # Parts are merged on the loop up to this size: below 1 ms. Larger ones are merged beside it.
MEMORY_ENTRIES = 1 << 20  # Parts in memory are merged up to this size.
FIRST_NUMBER = 1

GiveWay = Callable[[], None]


class Opened(NamedTuple):
    """The index as a start found it; ``damage`` says why it is not whole."""

    known: KnownRuns
    runs: list[OpenRun]
    damage: DamagedData | None


class View(NamedTuple):
    """The index at one moment, for any thread."""

    hasher: Hasher
    parts: tuple[Entries, ...]
    runs: tuple[OpenRun, ...]

    def asked(self, names: Names) -> AskedNames:
        """Names to be looked up; they are packed."""
        return AskedNames(names, self.hasher.hashes(names))

    def find(self, wanted: AskedNames, give_way: GiveWay) -> Newest:
        """The newest entry of each name.

        Raises:
            DamagedData: a run does not check or can't be read. Shortage: this process can't read now.
        """
        found = Newest(len(wanted.hashes))
        # A search is faster for hashes that rise.
        order = np.argsort(wanted.hashes)
        asked = wanted.take(order)
        for run in self.runs:
            run.find(asked, found, give_way)
        for part in self.parts:
            part.find(asked, found)
        rows = found.rows.copy()
        found.rows[order] = rows
        return found

    def rows_of_slots(self, slots: SlotSet, give_way: GiveWay) -> Rows:
        """The rows of all entries whose keys fall into some slots; on the worker thread.

        Raises as `find`.
        """
        found = [_rows_of_slots(part, slots) for part in self.parts]
        blocks = PIECE_ENTRIES // BLOCK_ENTRIES
        for run in self.runs:
            for first in range(0, run.blocks, blocks):
                found.append(_rows_of_slots(run.read(first, blocks, self.hasher), slots))
                give_way()
        return np.concatenate([NO_ENTRIES.rows, *found])


@dataclass(frozen=True, slots=True)
class Frozen:
    """What a checkpoint writes: entries in memory, and the runs that count beside them."""

    parts: tuple[Entries, ...]
    known: KnownRuns
    number: int


class WrittenKeys(NamedTuple):
    """What a checkpoint wrote: the state's new value, and the run of the frozen parts, None when they were empty."""

    known: KnownRuns
    run: OpenRun | None


class KeyIndex:
    """The index; for the loop alone, except where a function says otherwise."""

    def __init__(self, site: Site, found: Opened, filed_hours: Callable[[], Hours]) -> None:
        self.damage = found.damage  # Why the index is not whole.
        self.on_damage: Callable[[], None] = lambda: None  # Called when it becomes so.
        self._site = site
        self._hasher = Hasher(found.known.seed)
        self._runs = found.runs
        self._filed_hours = filed_hours
        self._next_number = found.known.next_number
        self._named = {run.number for run in found.known.runs}  # Files that the state names.
        self._obsolete: list[OpenRun] = []  # Merged into others; their files stay while the state names them.
        self._frozen: tuple[Entries, ...] = ()
        self._parts: list[Entries] = []
        self._compacting = self._merging = False

    @property
    def whole(self) -> bool:
        """Whether each key that a row ever took is found."""
        return self.damage is None

    def add(self, rows: KeyedRows) -> None:
        """Take rows that have taken their keys, durably."""
        self.add_entries(self.entries(rows))

    def entries(self, rows: KeyedRows) -> Entries:
        """Rows as this index keeps them."""
        return new_entries(self._hasher, *rows)

    def add_entries(self, entries: Entries) -> None:
        """Do the same for entries."""
        if not len(entries):
            return
        self._parts.append(entries)
        while len(self._parts) > 1:
            last = len(self._parts[-1])
            before = len(self._parts[-2])
            if before > 2 * last or before + last > LOOP_ENTRIES:
                break
            self._parts[-2:] = [merge(self._parts[-2:])]
        self._compact()

    def view(self) -> View:
        """The index as it is now."""
        return View(self._hasher, (*self._frozen, *self._parts), tuple(self._runs))

    def freeze(self) -> Frozen:
        """Take what a checkpoint is to write: everything that was added so far."""
        if self.damage is not None:
            return Frozen((), KnownRuns(self._hasher.seed, self._next_number, (), whole=False), 0)
        self._frozen = (*self._frozen, *self._parts)
        self._parts = []
        number, self._next_number = self._next_number, self._next_number + 1
        runs = tuple(run.name for run in self._runs)
        return Frozen(self._frozen, KnownRuns(self._hasher.seed, self._next_number, runs), number)

    def write(self, frozen: Frozen) -> WrittenKeys:
        """Write what was frozen, durable on return; on the worker thread.

        Raises:
            DiskFull, OSError, DataError: nothing refers to what was written.
            SyncFailed: the server must stop.
        """
        entries = merge(frozen.parts)
        if not len(entries):
            return WrittenKeys(frozen.known, None)
        site = self._site
        header = FileHeader(FileKind.KEYS, site.log_id, 0, frozen.number, site.clock.now_ms())
        name = write_run(site.disk, site.folder, header, self._hasher.seed, entries, site.worker.give_way)
        run = open_written(site, self._hasher.seed, name)
        return WrittenKeys(frozen.known._replace(runs=(*frozen.known.runs, name)), run)

    def abandon(self, written: WrittenKeys) -> None:
        """Remove what a checkpoint wrote that the state does not name; on the worker thread."""
        if written.run is not None:
            _remove(self._site, [written.run])

    def counted(self, written: WrittenKeys) -> None:
        """The state names what a checkpoint wrote: the run takes the place of the frozen parts."""
        if written.run is not None and self.damage is None:
            self._frozen = ()
            self._runs.append(written.run)
        elif written.run is not None:
            # The index was found damaged meanwhile: its rows stay in memory until it is made again.
            self._obsolete.append(written.run)
        self._named = {run.number for run in written.known.runs}
        gone = [run for run in self._obsolete if run.name.number not in self._named]
        if gone:
            self._obsolete = [run for run in self._obsolete if run.name.number in self._named]
            # Nothing may remove them in the middle of a look-up, which gives way only to what is more urgent.
            self._site.worker.submit(partial(_remove, self._site, gone), Done.result, Priority.SPARE)
        self._merge()

    def damaged(self, damage: DamagedData) -> None:
        """Note that a run can't be read: the index is not whole from now on."""
        if self.damage is None:
            log.critical("keys_damaged reason=%r", str(damage))
            self.damage = damage
            self.on_damage()

    def rebuild_numbers(self, runs: int) -> range:
        """Give out the numbers of runs that are made anew."""
        first, self._next_number = self._next_number, self._next_number + runs
        return range(first, self._next_number)

    @property
    def hasher(self) -> Hasher:
        """How names are hashed here."""
        return self._hasher

    def rebuilt(self, runs: list[OpenRun]) -> None:
        """Take runs that were made anew; with the rows in memory they are the whole index."""
        self._obsolete += self._runs
        self._runs = runs
        self.damage = None

    def close(self) -> None:
        """Close the files."""
        for run in (*self._runs, *self._obsolete):
            run.close()

    def _compact(self) -> None:
        """Merge two neighbouring parts beside the loop, when the second has grown to half of the first."""
        if self._compacting:
            return
        for first, second in zip(self._parts, self._parts[1:], strict=False):
            if len(first) <= 2 * len(second) and len(first) + len(second) <= MEMORY_ENTRIES:
                self._compacting = True
                self._site.worker.submit(partial(merge, (first, second)), partial(self._compacted, first, second))
                return

    def _compacted(self, first: Entries, second: Entries, done: Done[Entries]) -> None:
        self._compacting = False
        merged = done.result()
        for place, part in enumerate(self._parts[:-1]):
            # A checkpoint may have taken the parts meanwhile.
            if part is first and self._parts[place + 1] is second:
                self._parts[place : place + 2] = [merged]
                break
        self._compact()

    def _merge(self) -> None:
        """Merge the newest runs when they are together larger than half of the next older one."""
        first = _first_to_merge([len(run) for run in self._runs])
        if self._merging or self.damage is not None or first is None:
            return
        self._merging = True
        runs = self._runs[first:]
        number, self._next_number = self._next_number, self._next_number + 1
        kept = self._filed_hours() if first == 0 else None
        job = partial(_merge_runs, self._site, self._hasher, runs, number, kept)
        self._site.worker.submit(job, partial(self._merged, runs), Priority.SPARE)

    def _merged(self, runs: list[OpenRun], done: Done[OpenRun]) -> None:
        self._merging = False
        try:
            merged = done.result()
        except DamagedData as damage:
            self.damaged(damage)
            return
        except (OSError, DataError) as error:
            # Nothing rests on the merge: the next checkpoint begins it again.
            log.warning("keys_not_merged reason=%r", str(error))
            return
        if runs[0] not in self._runs:
            # The index was made again meanwhile.
            self._obsolete.append(merged)
            return
        place = self._runs.index(runs[0])
        self._runs[place : place + len(runs)] = [merged]
        self._obsolete += runs
        self._merge()


def open_index(disk: Disk, folder: str, log_id: int, known: KnownRuns) -> Opened:
    """Open the runs that the state names, and remove all other files of runs.

    A run that is missing or does not check is damage, and the index is not whole without it. Then no run is kept.
    """
    opened = _open_runs(disk, folder, log_id, known)
    kept = {run.path for run in opened.runs}
    for name in disk.list_folder(f"{folder}/{FOLDER}"):
        path = f"{folder}/{FOLDER}/{name}"
        if path not in kept:
            disk.remove(path)
    return opened


def _open_runs(disk: Disk, folder: str, log_id: int, known: KnownRuns) -> Opened:
    if not known.whole:
        return Opened(known, [], DamagedData(f"{folder}/{FOLDER}", 0, "the index of keys was not made again yet"))
    runs: list[OpenRun] = []
    for name in known.runs:
        try:
            runs.append(open_run(disk, folder, log_id, known.seed, name))
        except (FileNotFoundError, DamagedData) as error:
            for run in runs:
                run.close()
            missing = DamagedData(run_path(folder, name.number), 0, "the file is missing")
            return Opened(known, [], error if isinstance(error, DamagedData) else missing)
    return Opened(known, runs, None)


def open_written(site: Site, seed: int, name: RunName) -> OpenRun:
    """Open a run that was just written; one that can't be opened is removed.

    Raises:
        DamagedData, Shortage: it does not check or can't be read.
    """
    try:
        return open_run(site.disk, site.folder, site.log_id, seed, name)
    except (OSError, DataError):
        site.disk.remove(run_path(site.folder, name.number))
        raise


def merged_pieces(runs: Sequence[OpenRun], hasher: Hasher, kept_hours: Hours | None) -> Iterator[Entries]:
    """The newest entry of each name out of runs, in pieces, sorted as a whole.

    With ``kept_hours`` entries of all other hours are left out: their logs are deleted. That is right only when no
    older run is left, or an older entry of the same name would count again.

    Raises:
        DamagedData: a run does not check or can't be read. Shortage: this process can't read now.
    """
    blocks = PIECE_ENTRIES // BLOCK_ENTRIES
    ahead = [NO_ENTRIES] * len(runs)
    next_block = [0] * len(runs)
    wanted = set(range(len(runs)))
    while True:
        for place in wanted:
            more = runs[place].read(next_block[place], blocks, hasher)
            next_block[place] += blocks
            ahead[place] = merge((ahead[place].packed(), more)) if len(ahead[place]) else more
        ends = {place: int(ahead[place].hashes[-1]) for place, run in enumerate(runs) if next_block[place] < run.blocks}
        if not ends:
            piece = merge(ahead)
        else:
            # Below the lowest last hash, no run can have an entry that was not read.
            bound = np.uint64(min(ends.values()))
            counts = [int(part.hashes.searchsorted(bound)) for part in ahead]
            piece = merge([part.take(np.arange(count)) for part, count in zip(ahead, counts, strict=True)])
            ahead = [part.take(np.arange(count, len(part))) for part, count in zip(ahead, counts, strict=True)]
            wanted = {place for place, end in ends.items() if end == bound}
        if kept_hours is not None:
            piece = piece.take(np.flatnonzero(np.isin(piece.rows["hour"], kept_hours)))
        if len(piece):
            yield piece
        if not ends:
            return


def _merge_runs(site: Site, hasher: Hasher, runs: Sequence[OpenRun], number: int, kept_hours: Hours | None) -> OpenRun:
    header = FileHeader(FileKind.KEYS, site.log_id, 0, number, site.clock.now_ms())
    entries_max = sum(map(len, runs))
    pieces = merged_pieces(runs, hasher, kept_hours)
    name = write_pieces(site.disk, site.folder, header, hasher.seed, entries_max, pieces, site.worker.give_way)
    return open_written(site, hasher.seed, name)


def _first_to_merge(sizes: list[int]) -> int | None:
    """From which run on all runs are merged; None: none."""
    first, total = len(sizes) - 1, sizes[-1] if sizes else 0
    while first > 0 and 2 * total > sizes[first - 1]:
        first -= 1
        total += sizes[first]
    return first if 0 <= first < len(sizes) - 1 else None


def _remove(site: Site, runs: list[OpenRun]) -> None:
    for run in runs:
        run.close()
        site.disk.remove(run.path)


def _rows_of_slots(entries: Entries, slots: SlotSet) -> Rows:
    return entries.rows.compress(slots.take(slots_of_names(entries.names.packed())))


@dataclass(slots=True, eq=False)
class Watch:
    """A look-up, from its beginning until what it found is decided by."""

    added: int  # How many parts had been added to the index when it began.


class TakenNames:
    """The index of keys, and what was added to it lately; belongs to the loop."""

    def __init__(self, index: KeyIndex) -> None:
        self._index = index
        self._watches: set[Watch] = set()
        # Entries that were added since the oldest of these look-ups began, each part with its number.
        self._since: deque[tuple[int, Entries]] = deque()
        self._added = 0
        self.closing: Entries | None = None  # What the commit that is under way adds.

    def __len__(self) -> int:
        return len(self._watches)

    def check(self) -> None:
        """Raise SlowDown while names can't be looked up."""
        if not self._index.whole:
            raise SlowDown("this server makes its index of keys again; ask again later")

    def damaged(self, damage: DamagedData) -> None:
        """A look-up found a file damaged: the index is made again."""
        self._index.damaged(damage)

    def begin(self) -> tuple[Watch, View]:
        """Begin a look-up; it ends with `end`."""
        watch = Watch(self._added)
        self._watches.add(watch)
        return watch, self._index.view()

    def end(self, watch: Watch) -> None:
        """What a look-up found is not needed any more."""
        self._watches.discard(watch)
        self._forget()

    def compare(self, watch: Watch, asked: AskedNames, found: Newest) -> None:
        """Note entries that came after a look-up had begun."""
        for number, part in self._since:
            if number > watch.added:
                part.find(asked, found)

    def add(self, rows: KeyedRows) -> None:
        """Take rows that have taken their keys durably."""
        self._add(self._index.entries(rows))

    def committed(self) -> None:
        """The commit that was under way is durable."""
        entries, self.closing = self.closing, None
        if entries is not None:
            self._add(entries)

    def _add(self, entries: Entries) -> None:
        self._index.add_entries(entries)
        self._added += 1
        self._since.append((self._added, entries))
        self._forget()

    def _forget(self) -> None:
        oldest = min((watch.added for watch in self._watches), default=self._added)
        while self._since and self._since[0][0] <= oldest:
            self._since.popleft()


class Named:
    """The rows that have taken the names of a request so far."""

    def __init__(self, taken: TakenNames, watch: Watch, names: AskedNames, found: Newest) -> None:
        self._taken = taken
        self._watch = watch
        self._names = names
        self._found = found

    def take(self, rows: Index) -> Named:
        """The same of some of the names."""
        found = Newest(len(rows))
        found.rows = self._found.rows.take(rows)
        return Named(self._taken, self._watch, self._names.take(rows), found)

    def rows(self) -> Asked:
        """The newest row of each name that is known so far; of a name without a row, one that never was."""
        rows = self._found.rows
        # An entry has the filing hour, and not when the row was accepted: the hour's start stands for that.
        begins = rows["hour"].astype(np.int64) * HOUR_MS
        accepted = np.where(rows["deliver_at_ms"] < begins, begins, 0)
        return Asked(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), accepted)

    def newer(self) -> bool:
        """Whether rows have taken some of the names since; then `rows` are others."""
        before = self._found.rows["sequence"].copy()
        self._taken.compare(self._watch, self._names, self._found)
        return bool((self._found.rows["sequence"] != before).any())

    def closing(self) -> bool:
        """Whether a row of the commit that is being closed takes one of the names."""
        entries = self._taken.closing
        if entries is None:
            return False
        found = Newest(len(self._names.hashes))
        entries.find(self._names, found)
        return bool(found.known.any())
