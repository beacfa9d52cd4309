"""Pieces: an archived hour, some rows at a time, from files that are what their notes name, and from realtime logs.

Importing it needs pyarrow.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from delayd.batch.columns import Int64s
from delayd.errors import DamagedData
from delayd.log.hour import NO_OUTCOMES, OutcomeRows, Seal, SealFacts
from delayd.machine.disk import RealDisk
from delayd.reading.archive.carried import wrong_bodies
from delayd.reading.archive.notes import ArchivedKey, Note, decode_note, file_sha256
from delayd.reading.archive.rows import NO_ITEMS, FiledRows, file_facts, join_pieces, join_targets, read_message
from delayd.reading.archive.store import ArchiveStore
from delayd.reading.audit import AuditTerms, FiledByLog, audit_hour
from delayd.reading.files.row_arrays import (
    BATCH,
    RowCollector,
    ScheduleRows,
    Sorter,
    Sparse,
    Target,
    TargetRows,
)
from delayd.reading.files.target_index import TargetIndex, read_target_rows
from delayd.reading.findings import Findings, HourSummary
from delayd.reading.seals import SealCheck
from delayd.reading.tables import SealedRows


def fetch_checked(store: ArchiveStore, note: Note, folder: Path) -> Path:
    """A local path of the file of a note; DamagedData when it is gone, or another one than the note names."""
    name = f"{store.uri}/{note.key.file}"
    try:
        path = store.fetch(note.key.file, folder)
    except FileNotFoundError:
        raise DamagedData(name, 0, f"the file is gone, and {store.uri}/{note.key.note} names it") from None
    if path.stat().st_size != note.size or file_sha256(path) != note.sha256:
        raise DamagedData(name, 0, f"it is another file than {store.uri}/{note.key.note} names")
    if file_facts(name, path) != (note.rows, note.start_offset, note.items):
        what = f"{store.uri}/{note.key.note} says otherwise how many rows or columns it has, or where the log began"
        raise DamagedData(name, 0, what)
    return path


def fetch_note(store: ArchiveStore, key: ArchivedKey, folder: Path) -> Note:
    """The note of a file. Raises FileNotFoundError, DamagedData, NewerFormat."""
    return decode_note(f"{store.uri}/{key.note}", key, store.fetch(key.note, folder).read_bytes())


def seal_of(note: Note) -> Seal:
    """The seal in the note of a schedule."""
    if note.seal is None:
        raise AssertionError("a note of a schedule has its seal")
    return note.seal


@dataclass(frozen=True, slots=True)
class ArchivedRows:
    """Rows of an archived hour, as tables and audits want them."""

    log_id: int
    hour: int
    terms: AuditTerms
    sealed: FiledRows
    held: TargetRows

    def schedule(self) -> ScheduleRows:
        return self.sealed.schedule

    def outcomes(self) -> OutcomeRows:
        return self.sealed.outcomes

    def realtime(self) -> TargetRows:
        return self.held

    def accepted(self) -> FiledByLog:
        """No message log is archived."""
        return FiledByLog(RowCollector().rows(), 0, 0, 0)


# Stands for a schedule that nobody asks for.
NOT_SEALED = FiledRows(SealedRows(RowCollector().rows(), NO_OUTCOMES, Sparse()), NO_ITEMS)


class HeldRows:
    """The rows of one realtime server, taken from the front; only some pieces of its file are in memory."""

    def __init__(self, target: Target, pieces: Iterator[TargetRows]) -> None:
        none = np.empty(0, np.int64)
        ids = none.view(np.uint64)
        self.pieces, self.target = pieces, target
        self._rest = TargetRows(ids, none, none, np.empty(0, BATCH), (target,), (), ids)

    def below(self, until: int | None) -> TargetRows:
        """The next rows, with sequences below this; None: all that are left."""
        taken = [self._rest]
        while until is None or not len(taken[-1].sequence) or int(taken[-1].sequence[-1]) < until:
            piece = next(self.pieces, None)
            if piece is None:
                break
            taken.append(piece)
        last = taken[-1]
        end = len(last.sequence) if until is None else int(np.searchsorted(last.sequence, np.uint64(until)))
        self._rest, taken[-1] = last.take(slice(end, len(last.sequence))), last.take(slice(0, end))
        return join_pieces(taken)


def held_rows(store: ArchiveStore, note: Note, folder: Path) -> HeldRows:
    """What an archive says that a realtime server holds of an hour. Raises DamagedData as `fetch_checked`."""
    key, name = note.key, f"{store.uri}/{note.key.file}"
    rows: Iterator[TargetRows] = iter(())
    if note.sha256:
        rows = read_message(name, key, fetch_checked(store, note, folder))
    return HeldRows(Target(name, key.log_id, note.start_offset), rows)


def live_rows(live: TargetIndex) -> Iterator[HeldRows]:
    """What each target of an index holds, whose batches are all of one hour and delay server."""
    disk = RealDisk()
    for number, target in enumerate(live.targets):
        own = live.batches[live.batches["target"] == number]
        found = [read_target_rows(disk, live, own)] if len(own) else []
        yield HeldRows(target, (replace(Sorter().stored(each), targets=(target,)) for each in found))


def live_beside(archived: Container[int], index: TargetIndex, places: Int64s) -> TargetIndex:
    """The targets of an index of which no archive has a file of an hour, with those of its batches that they hold.

    ``archived`` are the targets by log_id of which one has, ``places`` those of the hour's batches.
    """
    batches = index.at(places)
    numbers = [number for number, target in enumerate(index.targets) if target.log_id not in archived]
    own = batches[np.isin(batches["target"], numbers)]
    own["target"] = np.searchsorted(numbers, own["target"])
    return TargetIndex(tuple(index.targets[number] for number in numbers), own, index.subjects if len(own) else (), ())


def with_bounds(pieces: Iterator[FiledRows]) -> Iterator[tuple[FiledRows, int | None]]:
    """Each piece with the first sequence of the next one; None behind the last."""
    before: FiledRows | None = None
    for piece in pieces:
        if before is not None:
            yield before, int(piece.schedule.sequence[0])
        before = piece
    if before is not None:
        yield before, None


class ArchivedCheck:
    """Compares the rows of an archived hour with its seal, and their bodies with their content hashes."""

    def __init__(self, facts: SealFacts) -> None:
        self._seal = SealCheck(facts)
        self._wrong: list[int] = []

    def add(self, rows: FiledRows) -> None:
        """Add rows that were read with the columns of PROVED."""
        self._seal.add(rows.schedule, rows.outcomes)
        self._wrong += wrong_bodies(rows.schedule, rows.carried)

    def differences(self) -> list[str]:
        """Where they differ, for people."""
        found = self._seal.differences()
        if self._wrong:
            more = f" and those of {len(self._wrong) - 1:,} others" if len(self._wrong) > 1 else ""
            found.append(f"the body of message {self._wrong[0]}{more} is not the one of its content hash")
        return found


def audit_pieces(
    key: ArchivedKey,
    pieces: Iterator[tuple[FiledRows, int | None]],
    held: Sequence[HeldRows],
    terms: AuditTerms,
    check: ArchivedCheck,
) -> Iterator[tuple[Findings, HourSummary]]:
    """Audit an archived hour piece by piece; ``check`` compares its rows with its seal."""
    for rows, until in pieces:
        check.add(rows)
        realtime = join_targets([each.below(until) for each in held])
        yield audit_hour(key.origin, key.hour, rows.schedule, rows.outcomes, realtime, terms)
