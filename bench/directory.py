"""Writes a data directory of a given size with the encoders of the formats, without a server, to time audits on it.

Invariant: it is what honest servers leave, so an audit of it finds nothing. An hour is written and forgotten before the
next one, so a large directory needs no more memory than its largest hour.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import encode, encode_subject_table
from delayd.batch.columns import BatchKind, ColumnId, DispatchPart, ProducerPart, SchedulePart
from delayd.batch.content import Region, hash_items, subject_states
from delayd.delay.books.outcomes import read_outcomes
from delayd.delay.books.sealing import compare
from delayd.hours import hour_of_ms
from delayd.log.checkpoint import CheckpointFile, Payload, Value
from delayd.log.group import GroupKind, NewGroup, content_position
from delayd.log.hour import (
    END_ROW,
    HOUR_ROW,
    NO_SEAL,
    SEALED,
    NewPart,
    Seal,
    dispatch_path,
    encode_outcomes,
    encode_seal,
    schedule_path,
    seal_place,
)
from delayd.log.log import Log, LogPlace, open_log, segment_name
from delayd.log.segment import FileHeader, FileKind, Segment, create_segment
from delayd.machine.disk import Disk, RealDisk
from delayd.outcome import Outcome
from delayd.reading.files.stored_groups import segment_bases

DELAY_ID, REALTIME_ID = 0xDE1A, 0x4EA1
FIRST_HOUR = hour_of_ms(1_795_190_400_000)  # 2026-11-20 16:00 UTC
HOUR_MS = 3_600_000
SENT_MS = FIRST_HOUR * HOUR_MS - 60_000
BODY_BYTES = 200
SEND_ROWS = 500  # A producer's batch.
FILED_ROWS = 4_000  # A batch of a schedule log, of at most 1 MiB.
INSTANT_ROWS = 4_000  # Rows that are due together: about 1 MiB, which is one commit at the target.
DISPATCH_DELAY_MS = 5

Rows = NDArray[np.uint64]


@dataclass(frozen=True)
class Shape:
    """How many messages, and how they lie: of ``subjects`` subjects, handed over in batches of ``batch_rows``."""

    messages: int
    hours: int = 1
    batch_rows: int = 20
    subjects: int = 1
    sealed: bool = True
    segment_bytes: int = 256 << 20
    all_kept: bool = True  # Else the message log begins with its last segment, as retention leaves it.
    body_bytes: int = BODY_BYTES  # A multiple of 8.
    number: int = 0  # Tells the servers of one directory from those of another.


class DirectoryWriter:
    """Writes one directory; `write` does all of it."""

    def __init__(self, root: str, shape: Shape, disk: Disk | None = None) -> None:
        self._disk = disk or RealDisk()
        self._shape = shape
        self._delay, self._realtime = f"{root}/delay", f"{root}/realtime"
        self._own, self._taker = DELAY_ID + shape.number, REALTIME_ID + shape.number  # The servers' log_ids.
        self._messages = self._log(self._delay, FileKind.MESSAGE, self._own)
        self._target = self._log(self._realtime, FileKind.REALTIME, self._taker)
        self._seals = open_log(self._disk, seal_place(self._delay, self._own), SENT_MS) if shape.sealed else None
        self._previous = NO_SEAL
        self._names = [b"subject-%d" % number for number in range(shape.subjects)]
        self._states = subject_states(self._names)
        self._tables = [encode_subject_table([name]) for name in self._names]
        self._hours: list[tuple[int, int, int, int, int]] = []
        self._ends: list[tuple[int, int, int]] = []
        self._batch_id = self._stored = self._sealed = self._keep_from = 0

    def write(self) -> None:
        """Write all logs and publish the checkpoints."""
        shape, random = self._shape, np.random.default_rng(1)
        dealt = [part.size for part in np.array_split(np.arange(shape.messages), shape.hours)]
        due = []
        for number, count in enumerate(dealt):
            instants = min(HOUR_MS // 1000, max(1, count // INSTANT_ROWS))
            due.append((FIRST_HOUR + number) * HOUR_MS + 1000 * random.integers(0, instants, count, dtype=np.int64))
        first = 1
        for each in due:
            self._send(first, each)
            first += len(each)
        stop = self._messages.end
        end_ms = (FIRST_HOUR + shape.hours) * HOUR_MS + 60_000
        first = 1
        for number, each in enumerate(due):
            self._hand_out(FIRST_HOUR + number, first, each, (0, stop))
            first += len(each)
        for log in (self._messages, self._target):
            log.append([NewGroup(GroupKind.TICK, [], 1, end_ms)], end_ms)
            log.flush()
        if not shape.all_kept:
            self._remove_filed()
        # The last checkpoint is behind the tick, by which all hours are over.
        self._publish(self._messages.end, self._messages.crc32c, shape.messages + 1, end_ms)
        for closed in (self._messages, self._target, self._seals):
            if closed is not None:
                closed.close()

    def _remove_filed(self) -> None:
        """Remove the segments of the message log that are filed as a whole."""
        place = self._messages.place
        *filed, self._keep_from = segment_bases(self._disk, place)
        for base in filed:
            self._disk.remove(f"{place.folder}/{segment_name(base)}")

    def _send(self, first: int, due: NDArray[np.int64]) -> None:
        groups: list[NewGroup] = []
        for start in range(0, len(due), SEND_ROWS):
            piece = due[start : start + SEND_ROWS]
            sequences = np.arange(first + start, first + start + len(piece), dtype=np.uint64)
            batch = self._batch(BatchKind.PRODUCER, ProducerPart(1, first + start, 0), sequences, piece, all_names=True)
            groups.append(NewGroup(GroupKind.DATA, [batch], 1, SENT_MS, first + start, len(piece)))
        self._append(self._messages, groups)

    def _hand_out(self, hour: int, first: int, due: NDArray[np.int64], source: tuple[int, int]) -> None:
        order = np.argsort(due, kind="stable")
        sequences, due = (order + first).astype(np.uint64), due[order]
        schedule = self._file(schedule_path(self._delay, hour), FileKind.SCHEDULE, hour)
        batches = [
            self._batch(
                BatchKind.SCHEDULE,
                SchedulePart(*source, hour),
                sequences[start : start + FILED_ROWS],
                due[start : start + FILED_ROWS],
                all_names=True,
            )
            for start in range(0, len(due), FILED_ROWS)
        ]
        for start in range(0, len(batches), 32):
            rows = min(len(due), (start + 32) * FILED_ROWS) - start * FILED_ROWS
            schedule.append([NewGroup(GroupKind.DATA, batches[start : start + 32], 1, SENT_MS, 0, rows)])
        schedule.flush()
        batches.clear()
        dispatch = self._file(dispatch_path(self._delay, hour), FileKind.DISPATCH, hour)
        for parts in self._store(hour, sequences, due):
            batch = encode_outcomes(hour, parts)
            rows = sum(len(part.sequences) for part in parts)
            dispatch.append([NewGroup(GroupKind.DATA, [batch], 1, parts[-1].target_appended_at_ms, 0, rows)])
        dispatch.flush()
        self._ends.append((hour, 0, dispatch.end))
        flags = SEALED if self._seals else 0
        self._hours.append((hour, schedule.crc32c, schedule.end, len(due), flags))
        if self._seals is not None:
            filed = (batch for group in schedule.scan(0, 0) for _, batch in group.batches())
            facts = compare(hour, filed, read_outcomes(dispatch))
            if facts is None:
                raise AssertionError("an hour that was written whole must balance")
            seal = Seal(self._own, len(self._hours) - 1, facts, self._previous)
            self._previous, self._sealed = seal.sha256, self._sealed + 1
            over_ms = (hour + 1) * HOUR_MS + 60_000
            self._seals.append([NewGroup(GroupKind.DATA, [encode_seal(seal)], 1, over_ms, 0, 1)], over_ms)
            self._seals.flush()
        schedule.close()
        dispatch.close()

    def _store(self, hour: int, sequences: Rows, due: NDArray[np.int64]) -> Iterator[list[NewPart]]:
        """Append an hour's rows to the target's log by batches; yields for each commit what the dispatch log gets."""
        subjects, rows = self._shape.subjects, self._shape.batch_rows
        for instant in np.split(np.arange(len(due)), np.flatnonzero(np.diff(due)) + 1):
            of = sequences[instant] % np.uint64(subjects)
            # Rows that are due together go out by subject, as a server's frames do.
            grouped = np.argsort(of, kind="stable")
            commit: list[tuple[bytes, NewPart]] = []
            for same in np.split(grouped, np.flatnonzero(np.diff(of[grouped])) + 1):
                for start in range(0, len(same), rows):
                    chosen = instant[same[start : start + rows]]
                    commit.append(self._dispatch_batch(hour, sequences[chosen], due[chosen]))
            yield self._commit(commit)

    def _dispatch_batch(self, hour: int, sequences: Rows, due: NDArray[np.int64]) -> tuple[bytes, NewPart]:
        self._batch_id += 1
        claimed, number = int(due[0]), self._batch_id
        part = DispatchPart(self._own, 1, number, 1, number - 1, claimed, hour)
        subject = int(sequences[0]) % self._shape.subjects
        batch = self._batch(BatchKind.DISPATCH, part, sequences, due, subject=subject)
        new = NewPart(sequences, due, Outcome.DISPATCHED, claimed, self._taker, 1, number)
        return batch, new._replace(hashes=self._hashes(sequences))

    def _commit(self, commit: list[tuple[bytes, NewPart]]) -> list[NewPart]:
        batches = [batch for batch, _ in commit]
        appended = commit[0][1].claimed_at_ms + DISPATCH_DELAY_MS
        rows = sum(len(part.sequences) for _, part in commit)
        (offset,) = self._target.append(
            [NewGroup(GroupKind.DATA, batches, 1, appended, self._stored + 1, rows)], appended
        )
        self._stored += rows
        self._target.flush()
        offset += content_position(len(batches))
        parts: list[NewPart] = []
        for batch, part in commit:
            parts.append(part._replace(target_appended_at_ms=appended, target_offset=offset))
            offset += len(batch)
        return parts

    def _batch(
        self,
        kind: BatchKind,
        part: ProducerPart | SchedulePart | DispatchPart,
        sequences: Rows,
        due: NDArray[np.int64],
        *,
        all_names: bool = False,
        subject: int = 0,
    ) -> bytes:
        count = len(due)
        table = encode_subject_table(self._names) if all_names else self._tables[subject]
        body_bytes = self._shape.body_bytes
        ends = len(table) + body_bytes * np.arange(1, count + 1)
        body = np.repeat(sequences, body_bytes // 8).tobytes()
        columns: list[tuple[ColumnId, NDArray[np.generic]]] = [(ColumnId.DELIVER_AT_MS, due)]
        if kind is not BatchKind.PRODUCER:
            columns.append((ColumnId.SEQUENCE, sequences))
        if all_names and len(self._names) > 1:
            columns.append((ColumnId.SUBJECT, (sequences % np.uint64(len(self._names))).astype(np.uint32)))
        columns.append((ColumnId.BODY_END, ends.astype(np.uint32)))
        if kind is not BatchKind.PRODUCER:
            columns.append((ColumnId.CONTENT_HASH, self._hashes(sequences)))
        names = len(self._names) if all_names else 1
        return encode(kind, part, count, columns, [table, body], names)

    def _hashes(self, sequences: Rows) -> Rows:
        """The content hash of each row: its body repeats its sequence."""
        states = self._states.take(sequences % np.uint64(len(self._names)))
        body_bytes = self._shape.body_bytes
        bodies = Region(np.repeat(sequences, body_bytes // 8), np.full(len(sequences), body_bytes))
        return hash_items(states, None, bodies)

    def _append(self, log: Log, groups: list[NewGroup]) -> None:
        for start in range(0, len(groups), 64):
            log.append(groups[start : start + 64], SENT_MS)
            log.flush()

    def _publish(self, stop: int, crc: int, next_sequence: int, end_ms: int) -> None:
        hours, ends = np.array(self._hours, HOUR_ROW), np.array(self._ends, END_ROW)
        file = CheckpointFile(self._disk, self._delay, self._own)
        clock: list[Value] = ["boot", 0, end_ms]
        mark: Payload = {"replay_offset": stop, "replay_crc32c": crc, "next_sequence": next_sequence, "epoch": 1}
        tables: Payload = {"hours": hours.tobytes(), "beside": b"", "outcomes": ends.tobytes()}
        counted: Payload = {"seals": [self._sealed, self._previous], "skipped": [], "dropped": []}
        counted["keep_from"] = self._keep_from
        links: list[Value] = [[self._taker, end_ms, ""]]
        times: Payload = {"appended_at_ms": end_ms, "clock": clock, "settled_ms": end_ms, "waits": "", "links": links}
        file.publish({**mark, **tables, **counted, **times}, end_ms)
        file.close()
        file = CheckpointFile(self._disk, self._realtime, self._taker)
        file.publish({"indexed_offset": self._target.durable, "clock": clock}, end_ms)
        file.close()

    def _log(self, folder: str, kind: FileKind, log_id: int) -> Log:
        return open_log(self._disk, LogPlace(f"{folder}/message", kind, log_id, self._shape.segment_bytes), SENT_MS)

    def _file(self, path: str, kind: FileKind, hour: int) -> Segment:
        self._disk.make_folder(path.rpartition("/")[0])
        return create_segment(self._disk, path, FileHeader(kind, self._own, 0, hour, SENT_MS))
