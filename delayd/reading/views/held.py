"""Held: what realtime servers hold of an hour, as far as their logs and archives still have it.

Invariant: each realtime server is read once, from the archive that has its file of the hour, else from its log. An
archive got its file after the hour was sealed, so it lacks nothing that the log has.

An example. Delay server D handed 100 messages of an hour over to realtime server R, and all of this was archived. Then
R's retention removed 60 of them. D's directory still has the schedule and the outcomes, so these are read there; and
the 100 rows that R held are read from the archive, or 60 messages would be unproven.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from delayd.errors import DamagedData
from delayd.reading.archive.notes import ArchivedKey
from delayd.reading.archive.pieces import HeldRows, fetch_note, held_rows
from delayd.reading.archive.rows import join_pieces
from delayd.reading.archive.store import open_store
from delayd.reading.files.row_arrays import TargetRows, rows_of_part
from delayd.reading.files.target_index import read_target_rows
from delayd.reading.plan import HourBooks


class PlacedFile(NamedTuple):
    """A file of an archive, by the URI of the archive."""

    uri: str
    key: ArchivedKey


def fetch_held(file: PlacedFile, folder: Path) -> HeldRows:
    """What an archive says that a realtime server holds of an hour. Raises DamagedData when the files do not check."""
    store = open_store(file.uri)
    try:
        note = fetch_note(store, file.key, folder)
    except FileNotFoundError:
        raise DamagedData(f"{file.uri}/{file.key.note}", 0, "the note is gone") from None
    return held_rows(store, note, folder)


@dataclass(frozen=True, slots=True)
class ArchivedAtTargets(HourBooks):
    """An hour of a directory whose rows at targets are read from archives, as far as these have files of it."""

    files: Sequence[PlacedFile] = ()

    @classmethod
    def of(cls, books: HourBooks, files: Sequence[PlacedFile]) -> "ArchivedAtTargets":
        return cls(**{each.name: getattr(books, each.name) for each in fields(books)}, files=files)

    def realtime(self) -> TargetRows:
        """See HourBooks."""
        targets = list(self.index.targets)
        numbers = {target.log_id: number for number, target in enumerate(targets)}
        archived = [number for file in self.files if (number := numbers.get(file.key.log_id)) is not None]
        own = self.batches[~np.isin(self.batches["target"], archived)]
        parts = [read_target_rows(self.disk, self.index, own, self.part)]
        with TemporaryDirectory() as folder:
            for file in self.files:
                held = fetch_held(file, Path(folder))
                number = numbers.setdefault(file.key.log_id, len(targets))
                targets[number : number + 1] = [held.target]
                parts += self._archived(held, number)
        return replace(join_pieces(parts), targets=tuple(targets))

    def _archived(self, held: HeldRows, number: int) -> Iterator[TargetRows]:
        """The rows of an archived file that are asked for, with their target numbered as the others are."""
        for piece in held.pieces:
            batches = piece.batches.copy()
            batches["target"] = number
            rows = slice(0, len(piece.sequence))
            if self.part is not None:
                # The rows of a file rise by sequence.
                found = rows_of_part(piece.sequence, self.part)
                rows = slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)
            yield replace(piece, batches=batches).take(rows)
