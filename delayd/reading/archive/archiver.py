"""Archiver: puts the sealed hours of a data directory into an archive, and proves each by its seal (docs/archive.md).

Invariant: a file is compared with its seal before it is put, and what is in the archive afterwards is read back. What
is there already is read instead, and counts as archived if it has the same rows. So an archiver may die anywhere, and
several may work at once. Hours follow each other by the numbers of their seals.

The order for each hour: its schedule, then what realtime servers hold of it. A delay server seals an hour only when
each of its rows has an outcome, and a row that was handed over is durable at its target by then. So a realtime log that
is read after the seal has all of the hour's rows that its retention has left.

Importing it needs pyarrow.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_name
from delayd.log.hour import Seal, SealFacts, schedule_path
from delayd.machine.disk import Disk, RealDisk
from delayd.reading.archive.carried import PROVED
from delayd.reading.archive.notes import (
    CONSUMPTION,
    MESSAGE,
    NOTES,
    SCHEDULE,
    ArchivedKey,
    Note,
    decode_note,
    file_sha256,
    key_of_note,
)
from delayd.reading.archive.pieces import ArchivedCheck, fetch_note
from delayd.reading.archive.rows import (
    file_facts,
    join_pieces,
    read_groups,
    read_message,
    read_schedule,
    write_consumption,
    write_message,
    write_schedule,
)
from delayd.reading.archive.store import ArchiveStore
from delayd.reading.consumption import GroupBooks, PullBooks, hour_runs, pull_log_start, read_whole_log
from delayd.reading.files.directory import Directory, Role, ScheduleSnapshot, find_directories, take_snapshot
from delayd.reading.files.items import ITEMS, read_items
from delayd.reading.files.origins import NO_HOURS, part_hour, read_hour, read_outcomes
from delayd.reading.files.row_arrays import RowCollector, Sorter, Sparse, TargetRows
from delayd.reading.files.stored_groups import LogMoved, TornTail, until_still
from delayd.reading.files.target_index import NO_INDEX, TargetIndex, TargetIndexer, read_target_rows
from delayd.reading.plan import PART_ROWS_MAX
from delayd.reading.seals import SealBook, SealState
from delayd.reading.tables import SealedRows

Progress = Callable[[int, int], None]  # Files done, files in all.


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """The result of an archiver's run."""

    written: tuple[Note, ...] = ()  # What it has put into the archive.
    found: tuple[Note, ...] = ()  # What another archiver had put there, without a note: it has the same rows.
    removed: tuple[ArchivedKey, ...] = ()  # Hours that retention had removed; the archive has their seals.
    archived_before: int = 0  # Files that had their notes already.
    not_sealed: int = 0  # Hours that have messages and no seal yet.
    # Hours at realtime servers without files of the table ``consumption``: groups have not ended with them; and this
    # run has found that the logs will never tell, because their beginning is gone.
    not_consumed: int = 0
    not_told: int = 0
    faults: tuple[str, ...] = ()  # Why files were not archived, by name.


def archive_directory(
    data: str,
    store: ArchiveStore,
    *,
    items: Sequence[str] = (),
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> ArchiveReport:
    """Put each sealed hour of a data directory into an archive, unless it is there; servers may run or not.

    Example::

        report = archive_directory("/var/lib/delayd", open_store("s3://books/delayd"))
        print(len(report.written), report.faults)

    Args:
        data: the directory that `delayd up --data` was given, or one server's.
        store: where the archive is.
        items: which of "key", "tags", "headers" and "body" schedules that are written now have as columns, too.
        progress: called with the files done and all files that are known to be missing.
        disk: where ``data`` is.

    Raises:
        BadArgument: there is nothing to archive, or an item has another name.
        DamagedData, NewerFormat: a checkpoint, a seal log or a realtime log can't be read, or a note of the archive.
        NotWritable, DiskFull, BadSetting, ServerUnavailable: the archive can't be written; what is there stays.
    """
    disk = disk or RealDisk()
    for item in items:
        if item not in ITEMS:
            raise BadArgument(f"{item!r} is not one of {', '.join(ITEMS)}")
    chosen = tuple(item for item in ITEMS if item in items)
    directories = find_directories(disk, data)
    noted = {key for name in store.names(NOTES) if (key := key_of_note(name)) is not None}
    with store.scratch() as folder:
        run = _Run(disk, store, folder, progress, noted, chosen)
        for directory in directories:
            if directory.role is Role.DELAY:
                run.archive_schedules(directory)
        for directory in directories:
            if directory.role is Role.REALTIME:
                run.archive_messages(directory)
    return run.report()


@dataclass(slots=True)
class _Run:
    disk: Disk
    store: ArchiveStore
    folder: Path  # Where files are made.
    progress: Progress | None
    noted: set[ArchivedKey]  # Those of which a note is in the archive.
    items: tuple[str, ...]
    _done: int = 0
    _total: int = 0
    _before: int = 0
    _not_sealed: int = 0
    _not_consumed: int = 0
    _not_told: int = 0
    _written: list[Note] = field(default_factory=list)
    _found: list[Note] = field(default_factory=list)
    _removed: list[ArchivedKey] = field(default_factory=list)
    _faults: list[str] = field(default_factory=list)

    def report(self) -> ArchiveReport:
        notes = tuple(self._written), tuple(self._found)
        counts = self._before, self._not_sealed, self._not_consumed, self._not_told
        return ArchiveReport(*notes, tuple(self._removed), *counts, tuple(self._faults))

    def archive_schedules(self, directory: Directory) -> None:
        """Archive the sealed hours of a delay server, or note that retention had removed them."""
        snapshot = take_snapshot(self.disk, directory)
        book = SealBook(self.disk, snapshot)
        sealed = {seal.facts.hour: seal for seal in book.seals}
        self._not_sealed += sum(filed.rows > 0 and hour not in sealed for hour, filed in snapshot.hours.items())
        broken = [each for each in book.reports() if each.state is SealState.BROKEN]
        for report in broken:
            self._faults.append(f"hour {hour_name(report.hour)} of {directory.path}: {report.differs}")
        # What was sealed after the published table is left to the next run: the table says which rows are its.
        ready = {*book.standing(), *(seal.facts.hour for seal in book.deleted())} - {each.hour for each in broken}
        keys = {hour: _schedule_key(sealed[hour]) for hour in sealed if hour in ready}
        wanted = [hour for hour, key in keys.items() if key not in self.noted]
        self._before += len(keys) - len(wanted)
        self._total += len(wanted)
        for hour in wanted:
            snapshot = self._archive_schedule(snapshot, sealed[hour])
            self._step()

    def archive_messages(self, directory: Directory) -> None:
        """Archive what a realtime server holds of the hours whose schedules are in the archive, and then what groups
        have done with them.
        """
        hours = sorted((key.hour, key.origin) for key in self.noted if key.table == SCHEDULE)
        keys = [ArchivedKey(MESSAGE, hour, directory.log_id, origin) for hour, origin in hours]
        wanted = [key for key in keys if key not in self.noted]
        groups = [key._replace(table=CONSUMPTION) for key in keys]
        left = [key for key in groups if key not in self.noted]
        self._before += len(keys) - len(wanted) + len(groups) - len(left)

        start = pull_log_start(self.disk, directory) if left else None
        damage: list[str] = []

        def read() -> tuple[PullBooks | None, TargetIndex]:
            # The pull log is read first, so that each message that a group was given is found.
            pulls = None
            damage.clear()
            try:
                pulls = read_whole_log(self.disk, directory) if start == 0 else None
            except DamagedData as error:
                damage.append(error.message)
            return pulls, self._index(directory) if wanted or pulls is not None else NO_INDEX

        pulls, index = until_still(directory.path, read)
        self._faults += damage
        self._total += len(wanted)
        for key in wanted:
            self._archive_message(directory, index, key)
            self._step()
        left = [key for key in left if key._replace(table=MESSAGE) in self.noted]
        if pulls is not None:
            self._archive_consumption(directory, pulls, index, left)
        elif start:
            self._never_told(left)

    def _step(self) -> None:
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self._total)

    def _index(self, directory: Directory) -> TargetIndex:
        torn: list[TornTail] = []
        indexer = TargetIndexer(self.disk, [directory], torn)
        indexer.scan(newer=False)
        return indexer.index()

    def _archive_schedule(self, snapshot: ScheduleSnapshot, seal: Seal) -> ScheduleSnapshot:
        """Archive a sealed hour, and return the snapshot by which it was read: a newer one if retention went on."""
        key, facts, directory = _schedule_key(seal), seal.facts, snapshot.directory
        source, path = schedule_path(directory.path, facts.hour), self.folder / "schedule"
        note = Note(key, facts.rows, seal=seal)

        def look_again() -> None:
            nonlocal snapshot
            snapshot = take_snapshot(self.disk, directory)

        try:
            is_there = until_still(directory.path, lambda: self._write_schedule(snapshot, seal, path), look_again)
            differs = _differs(key, source, path, facts) if is_there else []
        except DamagedData as error:
            differs = [error.message]
        if differs:
            self._faults.append(f"{source} was not archived: {'; '.join(differs)}")
        elif is_there:
            self._put(note, path, partial(_differs, key, self._uri(key.file), facts=facts), source)
        else:
            self._note(note)
            self._removed.append(key)
        return snapshot

    def _write_schedule(self, snapshot: ScheduleSnapshot, seal: Seal, path: Path) -> bool:
        """Write a sealed hour into a local file; False when retention has removed it."""
        hour = seal.facts.hour
        if not self.disk.exists(schedule_path(snapshot.directory.path, hour)):
            filed = snapshot.hours.get(hour)
            if filed is None or filed.removed:
                return False
        parts: list[range] | list[None] = [None]
        if seal.facts.rows > PART_ROWS_MAX:
            parts = part_hour(self.disk, snapshot, NO_HOURS, hour, PART_ROWS_MAX)
        rows, read = (
            (self._rows(snapshot, hour, part) for part in parts),
            partial(read_items, self.disk, snapshot, hour),
        )
        write_schedule(path, _schedule_key(seal), rows, self.items, read)
        return True

    def _rows(self, snapshot: ScheduleSnapshot, hour: int, part: range | None) -> SealedRows:
        sorter = Sorter()
        found = read_outcomes(self.disk, snapshot.directory, hour, part=part)
        schedule = read_hour(self.disk, snapshot, NO_HOURS, hour, RowCollector(part), sorter)
        others = found.others(np.arange(len(found.sequences)))
        named = np.flatnonzero(others)
        sparse = Sparse(found.sequences[named], others[named].view(np.int64))
        outcomes = sorter.outcomes(found)
        if not np.array_equal(schedule.sequence, outcomes.sequences):
            path = schedule_path(snapshot.directory.path, hour)
            raise DamagedData(path, 0, "the hour is sealed, and not each of its rows has exactly one outcome")
        return SealedRows(schedule, outcomes, sparse)

    def _archive_message(self, directory: Directory, index: TargetIndex, key: ArchivedKey) -> None:
        batches = index.batches
        own = batches[(batches["hour"] == key.hour) & (batches["origin_log_id"] == np.uint64(key.origin))]
        if not len(own):
            self._note(Note(key, start_offset=index.targets[0].start))
            return
        path = self.folder / "message"
        try:
            rows = Sorter().stored(read_target_rows(self.disk, index, own))
        except LogMoved:
            return  # Retention took some of it just now; the next run sees what is left.
        except DamagedData as error:
            self._faults.append(f"{key.file} was not archived: {error.message}")
            return
        write_message(path, key, rows)
        there = partial(_other_rows, key, self._uri(key.file), own=rows)
        self._put(Note(key), path, there, f"{directory.path} of hour {hour_name(key.hour)}")

    def _archive_consumption(
        self, directory: Directory, pulls: PullBooks, index: TargetIndex, keys: Sequence[ArchivedKey]
    ) -> None:
        """Archive what groups have done with hours that all of them have ended with."""
        runs, rows = hour_runs(self.disk, directory, index), index.rows_by_hour()
        consumed = {} if runs is None else pulls.by_hour(runs)
        for key in keys:
            held, groups = rows.get((key.origin, key.hour), 0), consumed.get((key.origin, key.hour), [])
            if index.targets[0].start and (runs is None or not held or held < self._archived_rows(key)):
                self._never_told([key])  # Retention has removed messages of it.
            elif groups is None:
                self._not_consumed += 1
            elif not groups:
                self._note(Note(key))
            else:
                path = self.folder / "consumption"
                groups.sort(key=lambda books: (books.subject, books.group_id))
                write_consumption(path, key, groups)
                there = partial(_other_groups, key, self._uri(key.file), own=groups)
                self._put(Note(key), path, there, f"the pull log of {directory.path}")

    def _never_told(self, keys: Sequence[ArchivedKey]) -> None:
        """Note that nobody can tell any more what groups have done with hours."""
        for key in keys:
            self._note(Note(key))
        self._not_told += len(keys)

    def _archived_rows(self, key: ArchivedKey) -> int:
        return fetch_note(self.store, key._replace(table=MESSAGE), self.folder).rows

    def _put(self, note: Note, path: Path, differs: Callable[[Path], Iterable[str]], source: str) -> None:
        """Put a finished file and its note; ``differs`` says where a file of the archive has other rows."""
        key, sha256 = note.key, file_sha256(path)
        is_new = self.store.create(key.file, path)
        try:
            fetched = self.store.fetch(key.file, self.folder)
            found = file_sha256(fetched)
            what = [] if found == sha256 else list(differs(fetched))
        except FileNotFoundError:
            what = ["it is gone again"]
        except DamagedData as error:
            what = [error.what]
        if what:
            self._faults.append(f"{self._uri(key.file)} differs from {source}: {'; '.join(what)}")
            return
        facts = file_facts(self._uri(key.file), fetched)
        noted = Note(key, facts.rows, fetched.stat().st_size, found, facts.start_offset, note.seal, facts.items)
        if self._note(noted):
            (self._written if is_new else self._found).append(noted)

    def _note(self, note: Note) -> bool:
        """Write a note, or compare it with the one that another archiver has written; whether they agree."""
        key, path = note.key, self.folder / "note"
        path.write_bytes(note.encode())
        if not self.store.create(key.note, path):
            name = self._uri(key.note)
            try:
                there = decode_note(name, key, self.store.fetch(key.note, self.folder).read_bytes())
            except FileNotFoundError:
                there = None
            # Retention may have gone on between two looks at a realtime log.
            if there is None or (there.rows, there.sha256, there.seal) != (note.rows, note.sha256, note.seal):
                self._faults.append(f"{name} was written meanwhile, and says other than what {key.file} is")
                return False
        self.noted.add(key)
        return True

    def _uri(self, name: str) -> str:
        return f"{self.store.uri}/{name}"


def _schedule_key(seal: Seal) -> ArchivedKey:
    return ArchivedKey(SCHEDULE, seal.facts.hour, seal.log_id, seal.log_id)


def _differs(key: ArchivedKey, name: str, path: Path, facts: SealFacts) -> list[str]:
    """Where the rows of a file differ from the seal of their hour."""
    check = ArchivedCheck(facts)
    for rows in read_schedule(name, key, path, carried=PROVED):
        check.add(rows)
    return check.differences()


def _other_rows(key: ArchivedKey, name: str, path: Path, own: TargetRows) -> list[str]:
    """Where a file of the archive lacks rows of a realtime log, or has others; it may have older ones besides."""
    start = int(own.batches["offset"].min())
    there = join_pieces(list(read_message(name, key, path)))
    columns = (_told(each, start) for each in (there, own))
    if all(np.array_equal(*pair) for pair in zip(*columns, strict=True)):
        return []
    return [f"it has other rows from offset {start} on"]


def _other_groups(key: ArchivedKey, name: str, path: Path, own: Sequence[GroupBooks]) -> list[str]:
    return [] if read_groups(name, key, path) == list(own) else ["it says other things of its groups"]


def _told(rows: TargetRows, start: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    subjects = np.array(rows.subjects)[rows.batches["subject"]]
    names = ("offset", "epoch", "batch_id", "claimed_at_ms", "appended_at_ms")
    columns = [rows.sequence, rows.deliver_at_ms, rows.hashes(), subjects[rows.batch_of]]
    columns += [rows.batches[name][rows.batch_of] for name in names]
    kept = columns[4] >= np.uint64(start)
    return [column[kept] for column in columns]
