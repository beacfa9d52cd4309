"""Pieces: an archived hour, some rows at a time, from files that are what their notes name.

Importing it needs pyarrow.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from delayd.errors import DamagedData
from delayd.log.hour import Seal
from delayd.reading.archive.notes import Note, file_sha256
from delayd.reading.archive.rows import join_pieces
from delayd.reading.archive.store import ArchiveStore
from delayd.reading.files.row_arrays import BATCH, Target, TargetRows
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


def seal_of(note: Note) -> Seal:
    """The seal in the note of a schedule."""
    if note.seal is None:
        raise AssertionError("a note of a schedule has its seal")
    return note.seal


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
