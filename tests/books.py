"""Writes the books of a delay and a realtime server with the real writers, and plants faults in them.

Invariant: without a planted fault everything is written as the servers write it, so the audit must find nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import numpy as np

from delayd.batch.batch import encode, encode_subject_table, lay_out, parse
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, DispatchPart, ProducerPart, SchedulePart
from delayd.batch.content import content_hash
from delayd.batch.gather import Pick, compose, gather
from delayd.batch.labels import DEAD_KEPT_MS, bloom_of, encode_tags
from delayd.delay.books.outcomes import read_outcomes
from delayd.delay.books.sealing import compare
from delayd.hours import hour_name, hour_of_ms
from delayd.log.checkpoint import CheckpointFile, Payload, Value
from delayd.log.control import Ended, Record, encode_known, encode_records
from delayd.log.group import GroupKind, NewGroup, content_position
from delayd.log.hour import (
    ENDED,
    HOUR_ROW,
    NO_SEAL,
    REMOVED,
    SEALED,
    NewPart,
    Seal,
    dispatch_path,
    encode_outcomes,
    encode_seal,
    schedule_path,
    seal_place,
)
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.pull import PullEntry, encode_entries
from delayd.log.segment import FileHeader, FileKind, Segment, create_segment
from delayd.machine.disk import Disk, RealDisk
from delayd.outcome import Outcome, Reason

DELAY_ID = 0xDE1A
REALTIME_ID = 0x4EA1
HOUR = hour_of_ms(1_795_190_400_000)  # 2026-11-20 16:00 UTC
HOUR_MS = 3_600_000
START_MS = HOUR * HOUR_MS
GROUP_HEADER_BYTES = content_position(1)  # A group of one batch has such a header.


@dataclass(frozen=True)
class Row:
    """A message as it was scheduled."""

    sequence: int
    deliver_at_ms: int
    appended_at_ms: int
    subject: str
    headers: bytes = b""

    @property
    def hour(self) -> int:
        return hour_of_ms(max(self.deliver_at_ms, self.appended_at_ms))

    @property
    def body(self) -> bytes:
        return b"body %d" % self.sequence

    @property
    def content_hash(self) -> int:
        return content_hash(self.subject.encode(), self.headers, self.body)


@dataclass
class Books:
    """A data directory that grows as a test says; rows are known by their sequence."""

    root: str
    disk: Disk = field(default_factory=RealDisk)
    segment_bytes: int = 256 << 20
    delay_id: int = DELAY_ID
    realtime_id: int = REALTIME_ID

    def __post_init__(self) -> None:
        self.delay = f"{self.root}/delay"
        self.realtime = f"{self.root}/realtime"
        self.messages = self._log(self.delay, FileKind.MESSAGE, self.delay_id)
        self.target = self._log(self.realtime, FileKind.REALTIME, self.realtime_id)
        self.rows: dict[int, Row] = {}
        self.bodies: dict[int, bytes] = {}
        self.replay_offset = 0
        self.batch_id = 0
        self.stored = 0  # Rows at the target.
        self.hours: dict[int, tuple[int, int, int]] = {}  # Hour to checksum, length and rows.
        self.sealed: set[int] = set()
        self.removed: set[int] = set()
        self.settled_ms = 0
        self.appended_at_ms = 0  # When the message log's last group came.
        self.below = (0, 0, 1)  # What is below the replay offset ends with this checksum, append and next sequence.
        self.waits: dict[int, tuple[int, str]] = {}  # By target, what its delay server says of it otherwise.
        self.seals: list[Seal] = []
        self.files: dict[str, Segment] = {}
        self.gaps: list[Value] = []  # Of the delay server: what it did, from and until when.

    def send(
        self,
        due_ms: Sequence[int],
        *,
        at_ms: int = START_MS - 1000,
        subjects: Sequence[str] = ("orders",),
        keys: Sequence[str] = (),
        tags: Sequence[Sequence[str]] = (),
        headers: Sequence[Mapping[str, str | bytes]] = (),
        expires: Sequence[int] = (),
    ) -> list[int]:
        """Append one batch to the message log; row i has subject i modulo their number. Returns the sequences.

        ``keys``, ``tags``, ``headers`` and ``expires`` are those of each row, or empty.
        """
        at_ms = max(at_ms, self.appended_at_ms)  # It never falls (rule P5).
        base = len(self.rows) + 1
        count = len(due_ms)
        packed = [msgpack.packb(own) if own else b"" for own in headers] or [b""] * count
        rows = [Row(base + row, due_ms[row], at_ms, subjects[row % len(subjects)], packed[row]) for row in range(count)]
        bodies = [row.body for row in rows]
        table = encode_subject_table([name.encode() for name in subjects])
        names = np.arange(count, dtype=np.uint32) % len(subjects)
        columns: dict[ColumnId, ColumnArray] = {
            ColumnId.DELIVER_AT_MS: np.array(due_ms, np.int64),
            ColumnId.SUBJECT: names,
        }
        if expires:
            columns[ColumnId.EXPIRES_AT_MS] = np.array(expires, np.int64)
        regions: dict[ColumnId, Sequence[bytes]] = {}
        if keys:
            regions[ColumnId.KEY_END] = [key.encode() for key in keys]
            columns[ColumnId.ROW_FLAGS] = np.zeros(count, np.uint16)
        if tags:
            regions[ColumnId.TAGS_END] = [encode_tags(own) for own in tags]
            columns[ColumnId.TAG_BLOOM] = np.array([bloom_of(own) for own in tags], np.uint64)
        if headers:
            regions[ColumnId.HEADERS_END] = packed
        regions[ColumnId.BODY_END] = bodies
        heap = table
        for column, items in regions.items():
            ends, placed = lay_out(items, len(heap))
            columns[column] = ends.astype(np.uint32)
            heap += placed + bytes(-len(placed) & 7)
        part = ProducerPart(1, base, 0)
        batch = encode(BatchKind.PRODUCER, part, count, sorted(columns.items()), [heap], len(subjects))
        self._append(self.messages, GroupKind.DATA, [batch], at_ms, base, count)
        for row in rows:
            self.rows[row.sequence] = row
            self.bodies[row.sequence] = row.body
        return list(range(base, base + count))

    def tick(self, at_ms: int) -> None:
        """Move the message log's clock."""
        self._append(self.messages, GroupKind.TICK, [], max(at_ms, self.appended_at_ms))

    def see_all(self, at_ms: int) -> None:
        """Both servers were up at that instant, and nothing that was due waited."""
        self.settle(at_ms)
        self.see_realtime(at_ms)

    def settle(self, at_ms: int) -> None:
        """The delay server says that it holds nothing more that was due before that instant."""
        self.tick(at_ms)
        self.settled_ms = at_ms
        self.publish(at_ms)

    def see_realtime(self, at_ms: int, gaps: Sequence[Value] = ()) -> None:
        """The realtime server was up at that instant: its checkpoint says so, and when it did nothing."""
        file = CheckpointFile(self.disk, self.realtime, self.realtime_id)
        clock: list[Value] = ["boot", 0, at_ms]
        file.publish({"indexed_offset": self.target.durable, "clock": clock, "gaps": list(gaps)}, at_ms)
        file.close()

    def checkpoint(self, *, publish: bool = True) -> None:
        """File everything that was sent since the last one; unpublished it is one that died before its end."""
        source = (self.replay_offset, self.messages.end)
        filed: dict[int, list[bytes]] = {}
        for group in self.messages.scan(*source):
            sequence = group.header.base_sequence
            for _, batch in group.batches() if group.header.kind == GroupKind.DATA else ():
                rows = [self.rows[sequence + row] for row in range(batch.count)]
                sequence += batch.count
                for hour in sorted({row.hour for row in rows}):
                    indices = [index for index, row in enumerate(rows) if row.hour == hour]
                    picked = np.array(sorted(indices, key=lambda index: rows[index].deliver_at_ms), np.int64)
                    filed.setdefault(hour, []).append(self._schedule_batch(Pick(batch, picked), rows, hour, source))
        lengths = dict(self.hours)
        for hour, batches in filed.items():
            segment = self._file(schedule_path(self.delay, hour), FileKind.SCHEDULE, hour)
            count = sum(parse(batch).count for batch in batches)
            segment.append([NewGroup(GroupKind.DATA, batches, 1, START_MS, 0, count)])
            segment.flush()
            lengths[hour] = (segment.crc32c, segment.end, lengths.get(hour, (0, 0, 0))[2] + count)
        if publish:
            self.pass_all(lengths)
            self.publish()

    def pass_all(self, hours: dict[int, tuple[int, int, int]]) -> None:
        """The replay offset is the end of the message log: all below it is filed."""
        self.replay_offset = self.messages.end
        self.below = self.messages.crc32c, self.appended_at_ms, len(self.rows) + 1
        self.hours = hours

    def publish(self, wall_ms: int = 0, outcomes: bytes = b"") -> None:
        """Publish the checkpoint as it stands."""
        flags = {hour: SEALED * (hour in self.sealed) | REMOVED * (hour in self.removed) for hour in self.hours}
        rows = [(hour, *facts, flags[hour]) for hour, facts in sorted(self.hours.items())]
        table = np.array(rows, HOUR_ROW)
        crc, appended_at_ms, next_sequence = self.below if self.replay_offset else (0, 0, 1)
        links: list[Value] = [[self.realtime_id, self.settled_ms, ""]]
        links = [[target, *said] for target, said in self.waits.items()] or links
        clock: list[Value] = ["boot", 0, wall_ms]
        payload: Payload = {
            "replay_offset": self.replay_offset,
            "replay_crc32c": crc,
            "next_sequence": next_sequence,
            "epoch": 1,
            "appended_at_ms": appended_at_ms,
            "hours": table.tobytes(),
            "beside": b"",
            "outcomes": outcomes,
            "clock": clock,
            "seals": [len(self.seals), self.seals[-1].sha256 if self.seals else NO_SEAL],
            "skipped": [],
            "dropped": [],
            "keep_from": self.messages.start,
            "settled_ms": self.settled_ms,
            "waits": "",
            "links": links,
            "gaps": self.gaps,
        }
        file = CheckpointFile(self.disk, self.delay, self.delay_id)
        file.publish(payload, START_MS)
        file.close()

    def seal(self, hour: int = HOUR) -> Seal:
        """Seal an hour whose rows all have an outcome, and publish it as sealed."""
        schedule, dispatch = (self.files[path(self.delay, hour)] for path in (schedule_path, dispatch_path))
        batches = [batch for group in schedule.scan(0, 0) for _, batch in group.batches()]
        facts = compare(hour, batches, read_outcomes(dispatch))
        assert facts is not None, "each row has exactly one outcome"
        previous = self.seals[-1].sha256 if self.seals else NO_SEAL
        # Only an hour that is over, and that the checkpoint has passed, is sealed (rule P5).
        if self.appended_at_ms < (hour + 1) * HOUR_MS:
            self.tick((hour + 1) * HOUR_MS)
            self.checkpoint()
        self.seals.append(Seal(self.delay_id, len(self.seals), facts, previous))
        self.write_seals(self.seals)
        self.sealed.add(hour)
        self.publish()
        return self.seals[-1]

    def write_seals(self, seals: Sequence[Seal]) -> None:
        """Write the seal log anew, with these seals, whether they are true or not."""
        place = seal_place(self.delay, self.delay_id)
        for name in self.disk.list_folder(place.folder):
            self.disk.remove(f"{place.folder}/{name}")
        log = open_log(self.disk, place, START_MS)
        for seal in seals:
            log.append([NewGroup(GroupKind.DATA, [encode_seal(seal)], 1, START_MS, 0, 1)], START_MS)
            log.flush()
        log.close()

    def hand_over(
        self,
        sequences: Iterable[int],
        *,
        claimed_ms: int | None = None,
        delay_ms: int = 5,
        watermark: int | None = None,
        record: bool = True,
        due_ms: int | None = None,
    ) -> list[tuple[int, NewPart]]:
        """Store rows at the target as its server does, a batch for each subject and hour, and record it.

        Returns what was or, without ``record``, would be recorded: hour and part.
        """
        batches: dict[tuple[str, int], list[Row]] = {}
        for sequence in sequences:
            row = self.rows[sequence]
            batches.setdefault((row.subject, row.hour), []).append(row)
        recorded: list[tuple[int, NewPart]] = []
        for (subject, hour), rows in batches.items():
            due = max(max(row.deliver_at_ms, row.appended_at_ms) for row in rows)
            claimed = due if claimed_ms is None else claimed_ms
            recorded.append(self.store(rows, subject, hour, claimed, claimed + delay_ms, watermark, due_ms))
            if record:
                self.record([recorded[-1]])
        return recorded

    def store(
        self,
        rows: Sequence[Row],
        subject: str,
        hour: int,
        claimed_ms: int,
        appended_ms: int,
        watermark: int | None = None,
        due_ms: int | None = None,
    ) -> tuple[int, NewPart]:
        """Append one batch to the target's log; the watermark covers all batches before it unless given."""
        covered = self.batch_id if watermark is None else watermark
        self.batch_id += 1
        sequences = np.array([row.sequence for row in rows], np.uint64)
        due = np.array([row.deliver_at_ms if due_ms is None else due_ms for row in rows], np.int64)
        table = encode_subject_table([subject.encode()])
        bodies = [self.bodies.get(row.sequence, b"?") for row in rows]
        ends, heap = lay_out(bodies, len(table))
        contents = zip(rows, bodies, strict=True)
        hashes = np.array([content_hash(subject.encode(), row.headers, body) for row, body in contents], np.uint64)
        columns: list[tuple[ColumnId, ColumnArray]] = [
            (ColumnId.DELIVER_AT_MS, due),
            (ColumnId.SEQUENCE, sequences),
            (ColumnId.BODY_END, ends.astype(np.uint32)),
            (ColumnId.CONTENT_HASH, hashes),
        ]
        heap += bytes(-len(heap) & 7)
        part = DispatchPart(self.delay_id, 1, self.batch_id, 1 if covered else 0, covered, claimed_ms, hour)
        batch = encode(BatchKind.DISPATCH, part, len(rows), columns, [table, heap], 1)
        base = self.stored + 1
        self.stored += len(rows)
        offset = self._append(self.target, GroupKind.DATA, [batch], appended_ms, base, len(rows)) + GROUP_HEADER_BYTES
        new = NewPart(
            sequences=sequences,
            deliver_at_ms=due,
            outcome=Outcome.DISPATCHED,
            claimed_at_ms=claimed_ms,
            target_log_id=self.realtime_id,
            epoch=1,
            batch_id=self.batch_id,
            target_appended_at_ms=appended_ms,
            target_offset=offset,
            hashes=hashes,
        )
        return hour, new

    def record(self, parts: Iterable[tuple[int, NewPart]]) -> None:
        """Append outcomes to their hours' dispatch logs."""
        for hour, part in parts:
            segment = self._file(dispatch_path(self.delay, hour), FileKind.DISPATCH, hour)
            outcomes = encode_outcomes(hour, [part])
            segment.append([NewGroup(GroupKind.DATA, [outcomes], 1, START_MS, 0, len(part.sequences))])
            segment.flush()

    def part(self, sequences: Sequence[int], claimed_at_ms: int = 0, target_offset: int = 0) -> NewPart:
        """A word of the dispatch log that rows were handed over, whether it is true or not."""
        rows = [self.rows[sequence] for sequence in sequences]
        columns = np.array(sequences, np.uint64), np.array([row.deliver_at_ms for row in rows], np.int64)
        hashes = np.array([row.content_hash for row in rows], np.uint64)
        part = NewPart(*columns, Outcome.DISPATCHED, claimed_at_ms, self.realtime_id, target_offset=target_offset)
        return part._replace(hashes=hashes)

    def decide(
        self,
        sequences: Sequence[int],
        outcome: Outcome,
        reason: int = 0,
        other: int = 0,
        claimed_at_ms: int = 0,
        logged: int | None = None,
        other_due_ms: int = 0,
    ) -> None:
        """Record rows that were not handed over; those of an hour are one part.

        ``other`` is the row that took the first one's place, the next one is that of the second; all due at
        ``other_due_ms``.
        ``logged`` is the reason of the decision in the message log, 0 for no decision; None: as in the dispatch log.
        """
        logged = reason if logged is None else logged
        rows = [self.rows[sequence] for sequence in sequences]
        for place, row in enumerate(rows if logged else ()):
            ended = np.zeros(1, ENDED)
            ended["sequence"], ended["deliver_at_ms"], ended["hour"] = row.sequence, row.deliver_at_ms, row.hour
            ended["reason"], ended["decided_at_ms"] = logged, claimed_at_ms
            ended["other"], ended["other_at_ms"] = other + place if other else 0, other_due_ms
            record = encode_known([Ended(ended.tobytes())])
            self._append(self.messages, GroupKind.CONTROL, [record], self.appended_at_ms)
        for hour in dict.fromkeys(row.hour for row in rows):
            places = [place for place, row in enumerate(rows) if row.hour == hour]
            numbers = np.array([sequences[place] for place in places], np.uint64)
            due_ms = np.array([rows[place].deliver_at_ms for place in places], np.int64)
            part = NewPart(
                numbers, due_ms, outcome, claimed_at_ms, reason=reason, batch_id=other + places[0] if other else 0
            )
            self.record([(hour, part._replace(target_appended_at_ms=other_due_ms))])

    def redrive(self, sequences: Sequence[int]) -> None:
        """Move rows to the instants at which they would have died, were they dead letters."""
        for sequence in sequences:
            due_ms = self.rows[sequence].deliver_at_ms - DEAD_KEPT_MS
            self.decide([sequence], Outcome.CANCELLED, Reason.MOVED, other=1, other_due_ms=due_ms)

    def hello(self, watermark: int, at_ms: int = START_MS, epoch: int = 1) -> None:
        """What a new session of the delay server leaves in the target's log."""
        record: Record = {
            "type": "hello",
            "log_id": self.delay_id,
            "epoch": epoch,
            "instance": 1,
            "session": 1,
            "w": [1, watermark],
        }
        self._append(self.target, GroupKind.CONTROL, [encode_records([record])], at_ms)

    def consume(self, subject: str, group: str, entries: Sequence[PullEntry], group_id: int = 1) -> None:
        """Append a group of consumers to the pull log, and what it was given and said."""
        record: Record = {"type": "group", "group_id": group_id, "subject": subject, "group": group}
        log = self._own_log("pull", FileKind.PULL)
        self._append(log, GroupKind.CONTROL, [encode_records([record])], START_MS)
        self._append(log, GroupKind.DATA, encode_entries(entries), START_MS, 0, len(entries))
        log.close()

    def close(self) -> None:
        """Close every file, as a stopped server has."""
        self.messages.close()
        self.target.close()
        for segment in self.files.values():
            segment.close()

    def path_of(self, log: str, hour: int = HOUR) -> Path:
        """The file of an hour's schedule or dispatch log."""
        name = hour_name(hour)
        return Path(f"{self.delay}/{log}/{name[:8]}/{name}.log")

    def _schedule_batch(self, pick: Pick, rows: list[Row], hour: int, source: tuple[int, int]) -> bytes:
        picked = [rows[int(index)] for index in pick.rows]
        subjects = sorted({row.subject for row in picked})
        past_due = any(row.appended_at_ms >= row.deliver_at_ms for row in picked)
        others: dict[ColumnId, ColumnArray] = {}
        if len(subjects) > 1:
            others[ColumnId.SUBJECT] = np.array([subjects.index(row.subject) for row in picked], np.uint32)
        if past_due:
            others[ColumnId.ACCEPTED_AT_MS] = np.array([row.appended_at_ms for row in picked], np.int64)
        # A batch has the regions in which one of its own rows has an item.
        carried = [column for column in pick.batch.layout.regions if _any_item(pick, column)]
        return compose(
            BatchKind.SCHEDULE,
            SchedulePart(*source, hour),
            gather([pick], carried, self._kept(pick, carried)),
            np.array([row.sequence for row in picked], np.uint64),
            [subject.encode() for subject in subjects],
            others,
        ).joined()

    @staticmethod
    def _kept(pick: Pick, carried: Sequence[ColumnId]) -> list[ColumnId]:
        """The columns beside the regions that some of the rows say anything in."""
        kept = [ColumnId.TAG_BLOOM] if ColumnId.TAGS_END in carried else []
        if ColumnId.EXPIRES_AT_MS in pick.batch and pick.batch.int64s(ColumnId.EXPIRES_AT_MS)[pick.rows].any():
            kept.append(ColumnId.EXPIRES_AT_MS)
        return kept

    def _log(self, folder: str, kind: FileKind, log_id: int) -> Log:
        return open_log(self.disk, LogPlace(f"{folder}/message", kind, log_id, self.segment_bytes), START_MS)

    def _own_log(self, name: str, kind: FileKind) -> Log:
        folder = f"{self.realtime}/{name}"
        self.disk.make_folder(folder)
        return open_log(self.disk, LogPlace(folder, kind, self.realtime_id, self.segment_bytes), START_MS)

    def _append(
        self, log: Log, kind: GroupKind, batches: list[bytes], at_ms: int, base: int = 0, count: int = 0
    ) -> int:
        if log is self.messages:
            self.appended_at_ms = at_ms
        (offset,) = log.append([NewGroup(kind, batches, 1, at_ms, base, count)], START_MS)
        log.flush()
        return offset

    def _file(self, path: str, kind: FileKind, hour: int) -> Segment:
        if path not in self.files:
            self.disk.make_folder(path.rpartition("/")[0])
            log_id = self.delay_id
            self.files[path] = create_segment(self.disk, path, FileHeader(kind, log_id, 0, hour, START_MS))
        return self.files[path]


def _any_item(pick: Pick, column: ColumnId) -> bool:
    starts, ends = pick.batch.region(column)
    return column == ColumnId.BODY_END or bool((ends > starts)[pick.rows].any())
