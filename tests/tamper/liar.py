"""The liar: it changes files of a copied directory and makes every checksum, chain and count fit again.

Invariant: what it writes, the writers of delayd could have written: `delayd log verify` finds no damage in a rewritten
file as such.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from delayd.batch.batch import Batch, parse
from delayd.log.checkpoint import CheckpointFile, Payload, read_checkpoint
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import (
    END_ROW,
    HOUR_ROW,
    NO_SEAL,
    NewPart,
    Seal,
    decode_outcomes,
    decode_seals,
    dispatch_path,
    encode_outcomes,
    encode_seal,
    missing_parts,
    schedule_path,
)
from delayd.log.segment import FileHeader, Segment, create_segment
from delayd.reading.files.directory import open_any
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import Folder
from tests.simulation.audit import BOOKS, copy_tree
from tests.tamper.honest import DELAY
from tests.tamper.rows import Row, batch_of, rows_of

RowsChange = Callable[[list[Row]], list[Row]]


@dataclass(frozen=True)
class Written:
    """One group: what its header says besides its place, and its batches."""

    kind: GroupKind
    epoch: int
    appended_at_ms: int
    base_sequence: int
    row_count: int
    batches: tuple[bytes, ...]

    @property
    def parsed(self) -> list[Batch]:
        """Its batches, to be read."""
        return [parse(data) for data in self.batches]

    def with_batches(self, *batches: bytes) -> Written:
        """The same with other batches; the header counts their rows."""
        rows = sum(parse(data).count for data in batches) if self.row_count else 0
        return replace(self, batches=batches, row_count=rows)


class Liar:
    """A copy of a directory, and what may be done to it."""

    def __init__(self, honest: MemoryDisk) -> None:
        self.disk = MemoryDisk()
        copy_tree(honest, BOOKS, self.disk, BOOKS)

    def paths(self, folder: str = BOOKS) -> list[str]:
        """All files of a folder and of the folders in it."""
        found: list[str] = []
        for path in (f"{folder}/{name}" for name in self.disk.list_folder(folder)):
            found += self.paths(path) if isinstance(self.disk._find(path), Folder) else [path]
        return found

    def copy_file(self, source: str, path: str) -> None:
        """Put a copy of a file in the place of another one."""
        self.write_file(path, self.read_file(source))

    def read_file(self, path: str) -> bytes:
        """All bytes of a file."""
        file = self.disk.open(path)
        data = file.pread(file.size(), 0)
        file.close()
        return data

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file anew, byte by byte."""
        if self.disk.exists(path):
            self.disk.remove(path)
        written = self.disk.open(path, write=True, create=True)
        written.pwritev([data], 0)
        written.sync()
        written.close()

    # Files of groups.

    def groups(self, path: str) -> list[Written]:
        """All groups of a file."""
        segment = open_any(self.disk, path)
        found = [
            Written(
                GroupKind(group.header.kind),
                group.header.epoch,
                group.header.appended_at_ms,
                group.header.base_sequence,
                group.header.row_count,
                tuple(bytes(batch.buffer) for _, batch in group.batches()),
            )
            for group in segment.scan(segment.base_offset)
        ]
        segment.close()
        return found

    def header(self, path: str) -> FileHeader:
        """The header of a file."""
        segment = open_any(self.disk, path)
        segment.close()
        return segment.header

    def write(self, path: str, groups: list[Written], **header_fields: int) -> Segment:
        """Write a file anew, with other fields in its header: the segment, closed."""
        segment = open_any(self.disk, path)
        header: FileHeader = segment.header._replace(**header_fields)
        segment.close()
        self.disk.remove(path)
        written = create_segment(self.disk, path, header)
        for group in groups:
            new = NewGroup(group.kind, list(group.batches), group.epoch, group.appended_at_ms)
            written.append([new._replace(base_sequence=group.base_sequence, row_count=group.row_count)])
            written.flush()
        written.close()
        return written

    def edit(self, path: str, change: Callable[[list[Written]], list[Written]]) -> Segment:
        """Write a file anew with changed groups."""
        return self.write(path, change(self.groups(path)))

    def edit_batches(self, path: str, change: Callable[[Batch], bytes | None]) -> Segment:
        """Write a file anew with each batch changed; None takes it out, and its group when nothing is left."""

        def changed(groups: list[Written]) -> list[Written]:
            found = []
            for group in groups:
                if group.kind is not GroupKind.DATA:
                    found.append(group)
                    continue
                batches = [data for batch in group.parsed if (data := change(batch)) is not None]
                if batches:
                    found.append(group.with_batches(*batches))
            return found

        return self.edit(path, changed)

    # The checkpoint.

    def checkpoint(self, folder: str = DELAY) -> Payload:
        """What the newest checkpoint says."""
        payload = read_checkpoint(self.disk, folder)
        assert payload is not None
        return payload

    def publish(self, folder: str = DELAY, /, **fields: object) -> None:
        """Publish the newest checkpoint with other fields."""
        payload = self.checkpoint(folder)
        log_id = cast(int, payload.pop("log_id"))
        file = CheckpointFile(self.disk, folder, log_id)
        file.publish({**payload, **cast(Payload, fields)}, 0)
        file.close()

    @property
    def hours(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The hour table, to be changed and given to `set_hours`."""
        return np.frombuffer(cast(bytes, self.checkpoint()["hours"]), HOUR_ROW).copy()

    def set_hours(self, rows: np.ndarray[tuple[int], np.dtype[np.void]], **fields: object) -> None:
        """Publish another hour table."""
        self.publish(hours=rows.tobytes(), **fields)

    def set_hour(self, hour: int, **fields: int) -> None:
        """Publish other figures of one hour."""
        rows = self.hours
        for name, value in fields.items():
            rows[name][rows["hour"] == hour] = value
        self.set_hours(rows)

    # The delay server's logs.

    @property
    def message_log(self) -> str:
        """The last segment of the delay server's message log."""
        return f"{DELAY}/message/{self.disk.list_folder(f'{DELAY}/message')[-1]}"

    def target_log(self, number: int = 0) -> str:
        """The first segment of a realtime server's message log."""
        folder = f"{BOOKS}/realtime-{number}/message"
        return f"{folder}/{self.disk.list_folder(folder)[0]}"

    def last_target_log(self, number: int = 0) -> str:
        """The last segment of a realtime server's message log."""
        folder = f"{BOOKS}/realtime-{number}/message"
        return f"{folder}/{self.disk.list_folder(folder)[-1]}"

    def edit_rows(self, path: str, change: RowsChange) -> Segment:
        """Change the rows of each batch of a file; a batch without rows goes."""

        def changed(batch: Batch) -> bytes | None:
            rows = change(rows_of(batch))
            return batch_of(batch, rows) if rows else None

        return self.edit_batches(path, changed)

    def edit_schedule(self, hour: int, change: RowsChange) -> None:
        """Change the rows of an hour's schedule log, and what the table says of it."""
        segment = self.edit_rows(schedule_path(DELAY, hour), change)
        rows = sum(group.row_count for group in self.groups(schedule_path(DELAY, hour)))
        self.set_hour(hour, length=segment.end, rows=rows, last_crc32c=segment.crc32c)

    def edit_outcomes(self, hour: int, change: Callable[[NewPart], NewPart | None]) -> None:
        """Change the parts of an hour's dispatch log, and the published end of it."""
        path = dispatch_path(DELAY, hour)
        batches = [batch for group in self.groups(path) for batch in group.parsed]
        parts = missing_parts(decode_outcomes(batches), decode_outcomes([]))
        found = [new for part in parts if (new := change(part)) is not None]
        group = self.groups(path)[0]
        segment = self.write(path, [group.with_batches(encode_outcomes(hour, found))] if found else [])
        ends = np.frombuffer(cast(bytes, self.checkpoint()["outcomes"]), END_ROW).copy()
        ends["length"][ends["hour"] == hour] = segment.end
        self.publish(outcomes=ends.tobytes())

    @property
    def seals(self) -> list[Seal]:
        """All seals."""
        return [seal for group in self.groups(self.seal_log) for batch in group.parsed for seal in decode_seals(batch)]

    @property
    def seal_log(self) -> str:
        """The file of the seals."""
        return f"{DELAY}/seal/{self.disk.list_folder(f'{DELAY}/seal')[0]}"

    def write_seals(self, seals: list[Seal], *, chained: bool = False) -> None:
        """Write the seal log anew; ``chained``: with numbers and digests that follow each other."""
        group = self.groups(self.seal_log)[0]
        before, written = NO_SEAL, []
        for number, seal in enumerate(seals):
            new = seal._replace(number=number, previous_sha256=before) if chained else seal
            before = new.sha256
            written.append(group.with_batches(encode_seal(new)))
        self.write(self.seal_log, written)
