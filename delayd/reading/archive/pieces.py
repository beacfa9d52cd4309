"""Pieces: an archived hour, some rows at a time, from files that are what their notes name.

Importing it needs pyarrow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delayd.errors import DamagedData
from delayd.log.hour import NO_OUTCOMES, OutcomeRows, Seal
from delayd.reading.archive.notes import ArchivedKey, Note, decode_note, file_sha256
from delayd.reading.archive.rows import join_pieces, join_targets
from delayd.reading.archive.store import ArchiveStore
from delayd.reading.audit import AuditTerms, FiledByLog, audit_hour
from delayd.reading.files.row_arrays import BATCH, RowCollector, ScheduleRows, Sparse, Target, TargetRows
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
    sealed: SealedRows
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


NOT_SEALED = SealedRows(RowCollector().rows(), NO_OUTCOMES, Sparse())  # Stands for a schedule that nobody asks for.


class HeldRows:
    """The rows of one realtime server, taken from the front; only some pieces of its file are in memory."""

    def __init__(self, target: Target, pieces: Iterator[TargetRows]) -> None:
        none = np.empty(0, np.int64)
        ids = none.view(np.uint64)
        self.pieces = pieces
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


def with_bounds(pieces: Iterator[SealedRows]) -> Iterator[tuple[SealedRows, int | None]]:
    """Each piece with the first sequence of the next one; None behind the last."""
    before: SealedRows | None = None
    for piece in pieces:
        if before is not None:
            yield before, int(piece.schedule.sequence[0])
        before = piece
    if before is not None:
        yield before, None


def audit_pieces(
    key: ArchivedKey,
    pieces: Iterator[tuple[SealedRows, int | None]],
    held: Sequence[HeldRows],
    terms: AuditTerms,
    check: SealCheck,
) -> Iterator[tuple[Findings, HourSummary]]:
    """Audit an archived hour piece by piece; ``check`` compares its rows with its seal."""
    for rows, until in pieces:
        check.add(rows.schedule, rows.outcomes)
        realtime = join_targets([each.below(until) for each in held])
        yield audit_hour(key.origin, key.hour, rows.schedule, rows.outcomes, realtime, terms)
