"""Verifies a data directory by docs/formats alone: `python examples/reference_reader.py DATA`; delayd is not used.

Read it beside the pages. It is slow and holds a directory in memory; `delayd audit` and `delayd log verify` are for
large ones. Give it a stopped server's directory or a copy. It needs crc32c and msgpack. It exits with 3 when something
is wrong, and has a line for each.
"""

import hashlib
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from crc32c import crc32c

MESSAGE, SCHEDULE_LOG, DISPATCH_LOG, REALTIME, CONSUME, PULL_LOG, _, SEAL_LOG = range(1, 9)  # Files (segment.md).
PRODUCER, SCHEDULE, DISPATCH, OUTCOME, CONTROL, PULL, SEAL = range(1, 8)  # Batches (batch.md).
HOLDS = {MESSAGE: PRODUCER, SCHEDULE_LOG: SCHEDULE, DISPATCH_LOG: OUTCOME, REALTIME: DISPATCH, PULL_LOG: PULL, 8: SEAL}
DATA_GROUP, CONTROL_GROUP = 1, 2
DUE, SEQUENCE, BLOOM, SUBJECT, KEY_END, TAGS_END, HEADERS_END, BODY_END = 1, 2, 4, 5, 6, 7, 8, 9
ACCEPTED, ORIGIN, FLAGS, ORDERING, EXPIRES, ENTRY, SEAL_ROW, LEFT_OUT, HASH = 10, 11, 13, 14, 15, 16, 17, 18, 19
CODES = {
    1: "q",
    2: "Q",
    4: "Q",
    5: "I",
    6: "I",
    7: "I",
    8: "I",
    9: "I",
    10: "q",
    11: "Q",
    13: "H",
    16: "48s",
    17: "200s",
}
CODES |= {14: "Q", 15: "q", 18: "I", 19: "Q"}
OPTIONAL = {KEY_END, TAGS_END, BLOOM, HEADERS_END, ORDERING, EXPIRES}  # What a row may have in each of its batches.
KINDS = {  # Bytes of the kind part, columns that a kind has, and those that it may have.
    PRODUCER: (24, {DUE, BODY_END}, {SUBJECT, FLAGS, ORIGIN, *OPTIONAL}),
    SCHEDULE: (24, {DUE, SEQUENCE, BODY_END, HASH}, {SUBJECT, FLAGS, ORIGIN, ACCEPTED, LEFT_OUT, *OPTIONAL}),
    DISPATCH: (56, {DUE, SEQUENCE, BODY_END}, {HASH, ACCEPTED, *OPTIONAL}),
    OUTCOME: (8, {DUE, SEQUENCE, HASH}, set()),
    CONTROL: (0, {BODY_END}, set()),
    PULL: (0, {ENTRY}, set()),
    SEAL: (0, {SEAL_ROW}, set()),
}
OUTCOMES = {1: "dispatched", 2: "cancelled", 3: "dead", 4: "expired", 5: "in_doubt"}
PART = struct.Struct("<QQQqqQIBBHQ")
DISPATCHED, CANCELLED, EXPIRED, IN_DOUBT, SEALED, REMOVED, HOUR_MS = 1, 2, 4, 5, 1, 4, 3_600_000
BITS, FACTOR, KEYS = (1 << 64) - 1, 0xD6E8FEB86659FD93, list[int]()


class Wrong(Exception):
    """The bytes differ from what the pages say."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def padded(size: int) -> int:
    return (size + 7) & ~7


def mix(n: int) -> int:
    for _ in range(2):
        n ^= n >> 32
        n = n * FACTOR & BITS
    return n ^ n >> 32


def value(item: bytes) -> int:
    halves = struct.unpack(f"<{padded(len(item)) // 4}I", item + bytes(-len(item) % 8))
    while len(KEYS) <= len(halves):
        KEYS.append(mix((len(KEYS) + 1) * 0x9E3779B97F4A7C15 & BITS) | 1)
    return int(sum(map(mul, halves, islice(KEYS, 1, None)), len(item) * KEYS[0])) & BITS


def content_hash(subject: bytes, headers: bytes, body: bytes) -> int:  # Of a message (content.md).
    return mix(mix(value(subject)) + value(headers) & BITS) + value(body) & BITS or 1


def bloom(tags: list[str]) -> int:
    bits = 0
    for number in (crc32c(tag.encode()) >> shift & 63 for tag in tags for shift in (0, 6, 12)):
        bits |= 1 << number
    return bits


class Batch:
    """A whole batch; checks every checksum, and all that each program that parses a batch checks (batch.md)."""

    def __init__(self, data: bytes) -> None:
        need(len(data) >= 40, "a batch is shorter than its header")
        magic, version, self.kind, flags, total, self.count, heap_at, *rest = struct.unpack_from("<IBBHIIIHHIIII", data)
        columns, kind_bytes, names, *crcs = rest
        need((magic, version, flags, total) == (0x48435442, 1, 0, len(data)), "what a batch begins with")
        part_bytes, must, may = KINDS.get(self.kind, (-1, set(), set()))
        need(part_bytes == kind_bytes and 0 < self.count <= 65_536 and columns <= 32, "the counts of a batch")
        directory, place = 40 + kind_bytes, 40 + kind_bytes + 8 * columns
        need(place <= heap_at <= total and heap_at % 8 == total % 8 == 0, "where a batch's heap begins")
        self.part, self.heap = data[40:directory], data[heap_at:]
        found = [crc32c(data[directory:heap_at]), crc32c(self.heap), crc32c(self.part, crc32c(data[:36]))]
        need(found == crcs, "a checksum of a batch")
        self.columns, before = dict[int, tuple[Any, ...]](), 0
        for number, width, offset in struct.iter_unpack("<HHI", data[directory:place]):
            end = place + width * self.count
            need(before < number and offset == place and padded(end) <= heap_at, "the directory of a batch")
            need(not any(data[end : padded(end)]) and (number in CODES or number >= 0x4000), f"column {number}")
            if number in CODES:
                need(width == struct.calcsize(f"<{CODES[number]}"), f"the width of column {number}")
                cells = struct.iter_unpack(f"<{CODES[number]}", data[place:end])
                self.columns[number] = tuple(cell for (cell,) in cells)
            before, place = number, padded(end)
        need(place == heap_at and must <= self.columns.keys() <= must | may, f"columns of a batch of kind {self.kind}")
        self.items = ([b""] * self.count, [b""] * self.count, [b""] * self.count)  # Subject, headers, body of each row.
        self.labels = ([b""] * self.count, [b""] * self.count)  # Key and tags of each row.
        if self.kind != OUTCOME:  # Its heap is an array of parts.
            self.read_heap(names)

    def column(self, number: int) -> tuple[Any, ...]:
        return self.columns[number] if number in self.columns else (0,) * self.count

    def read_heap(self, names: int) -> None:
        heap, begin, start = self.heap, padded(4 * names), 0
        need(begin <= len(heap), "a subject table")
        subjects = list[bytes]()
        for end in struct.unpack_from(f"<{names}I", heap):
            need(start < end <= len(heap) - begin and end - start <= 255, "the length of a subject")
            subjects.append(heap[begin + start : begin + end])
            start = end
        place = padded(begin + start)
        need(not any(heap[4 * names : begin]) and not any(heap[begin + start : place]), "zeros of a subject table")
        if self.kind == SCHEDULE:
            need(crc32c(heap[:place]) == struct.unpack("<I", self.part[20:])[0], "the checksum of a subject table")
        used = set(self.column(SUBJECT)) == set(range(names)) and len(set(subjects)) == names
        need(used or self.kind > OUTCOME, "rows and their subject table")
        self.items[0][:] = [subjects[index] for index in self.column(SUBJECT)] if names else self.items[0]
        regions = zip((KEY_END, TAGS_END, HEADERS_END, BODY_END), (*self.labels, *self.items[1:]), strict=True)
        for number, items in regions:
            for row, end in enumerate(self.columns.get(number, ())):
                need(place <= end <= len(heap) and not any(heap[end : padded(end)]), "an end in the heap")
                items[row], place = heap[place:end], padded(end)
        need(place == len(heap), "bytes behind the last item of a heap")
        try:
            for key, packed, flags, bits in zip(*self.labels, self.column(FLAGS), self.column(BLOOM), strict=True):
                need(len(key) <= 200 and flags <= (2 if key.decode() else 0), "a key or its row_flags")
                tags = msgpack.unpackb(packed) if packed else []
                need(all(0 < len(tag.encode()) <= 64 for tag in tags) and bloom(tags) == bits, "tags or their bloom")
                need(len(set(tags)) == len(tags) <= 16 and bool(tags) == bool(packed), "the number of tags")
        except (ValueError, TypeError, AttributeError) as error:
            raise Wrong(f"a key or tags that are no text: {error}") from error


class Segment:
    """A file of a log, its header checked (segment.md)."""

    def __init__(self, path: Path, kind: int, log_id: int | None) -> None:
        self.data = path.read_bytes()
        need(len(self.data) >= 64, "the file is shorter than its header")
        fields = struct.unpack_from("<8sHHIQQQqIIII", self.data)
        *facts, self.log_id, self.base, self.number, _, self.previous_crc, zero, also, crc = fields
        need((*facts, zero, also) == (b"delaydlg", 1, kind, 0, 0, 0), "the file header")
        need(crc32c(self.data[:60]) == crc and log_id in (None, self.log_id), "checksum or log_id of the file header")

    def front(self, position: int) -> tuple[Any, ...]:
        """The fields of a group's header, and the lengths of its batches (group.md)."""
        need(len(self.data) >= position + 80, "the header of a group is cut short")
        fields = struct.unpack_from("<IBBBBIIQQQQqQIIII", self.data, position)
        # No checksum covers the zeros behind the table.
        table = self.data[position + 80 : position + 80 + 4 * fields[6]]
        found = crc32c(table, crc32c(self.data[position : position + 76]))
        need((fields[0], fields[-1]) == (0x50555247, found), "magic or header_crc32c of a group")
        need(fields[1] == 1 and fields[2] in (1, 2, 3) and not (fields[3] or fields[4]), "version or kind of a group")
        need(fields[7:9] == (self.log_id, self.base + position - 64), "a group of another log or offset")
        return *fields[2:], struct.unpack(f"<{fields[6]}I", table)

    def durable_behind(self, position: int) -> int:
        """The highest durable_offset that a valid header names from here on (segment.md, Recovery)."""
        highest = 0
        for at in range(position, len(self.data) - 79, 8):
            with suppress(Wrong):
                highest = max(highest, self.front(at)[10] if self.data[at : at + 4] == b"GRUP" else 0)
        return highest


class Group:  # With its batches, each with its offset in the log.
    def __init__(self, segment: Segment, position: int, previous_crc: int, kind: int) -> None:
        self.kind, _, _, total, count, _, self.offset, _, *facts, sizes = segment.front(position)
        self.base_sequence, self.appended_ms, _, previous, rows, content_crc, self.crc = facts
        self.end, self.batches = self.offset + total, list[tuple[int, Batch]]()
        need(previous == previous_crc, "a group does not follow the one before it")
        place, stop = position + padded(80 + 4 * count), position + total
        need(place + sum(sizes) == stop <= len(segment.data), "the lengths of a group")
        need(crc32c(segment.data[place:stop]) == content_crc, "content_crc32c")
        for size in sizes:
            self.batches.append((self.offset + place - position, Batch(segment.data[place : place + size])))
            place += size
        decides = (kind, self.kind) == (MESSAGE, DATA_GROUP) and self.batches[0][1].kind == CONTROL  # About rows.
        held = CONTROL if self.kind == CONTROL_GROUP else HOLDS[kind]
        kinds = {batch.kind for _, batch in self.batches[decides:]} - {held}
        counted = sum(batch.count for _, batch in self.batches if batch.kind != CONTROL)
        need(not kinds and rows == counted, "the kinds of a group's batches, or its row_count")
        bodies = [body for _, batch in self.batches if batch.kind == CONTROL for body in batch.items[2]]
        self.records: list[dict[str, Any]] = list(map(msgpack.unpackb, bodies))
        self.batches = self.batches[decides:]


def hour_path(folder: Path, hour: int) -> Path:
    name = datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y%m%d%H")
    return folder / name[:8] / f"{name}.log"


class Server:
    """One server's directory: its files, read and verified."""

    def __init__(self, path: Path, message_kind: int) -> None:
        self.path, self.wrong = path, list[str]()
        self.log_id = Segment(min((path / "message").glob("*.log")), message_kind, None).log_id
        self.published = self.read_checkpoint(path / "checkpoint")

    def check(self, holds: object, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def read_checkpoint(self, path: Path) -> dict[str, Any]:
        """The valid slot with the higher generation (checkpoint.md)."""
        data = path.read_bytes() if path.exists() else b""
        found: list[tuple[int, dict[str, Any]]] = [(0, {})]
        for at in (0, 4 << 20):
            if len(data) >= at + 64:
                *head, size, log_id, generation, _, crc, header_crc = struct.unpack_from("<8sHHIQQq16xII", data, at)
                payload = data[at + 64 : at + 64 + size]
                if (crc32c(data[at : at + 60]), crc32c(payload)) == (header_crc, crc):
                    self.check((*head, log_id) == (b"delaydcp", 1, 7, self.log_id), f"DAMAGE {path}: another's slot")
                    found.append((generation, msgpack.unpackb(payload)))
        self.check(len(found) > 1 or len(data) <= 4 << 20, f"DAMAGE {path}: no slot checks")
        return max(found, key=lambda each: each[0])[1]

    def groups(self, path: Path, kind: int, durable: int, last: bool = True, crc: int | None = None) -> Iterator[Group]:
        """The groups of a file. One that does not check is damage below ``durable``, or if a later group proves it."""
        try:
            segment = Segment(path, kind, self.log_id)
            names = (f"{segment.base:020}", hour_path(path, segment.number).stem)
            named = path.stem == names[kind in (SCHEDULE_LOG, DISPATCH_LOG)]
            need(named and crc in (None, segment.previous_crc), "its name, or the file that it follows")
            previous, end = segment.previous_crc, segment.base
            while (position := end - segment.base + 64) < len(segment.data):
                try:
                    group = Group(segment, position, previous, kind)
                except Wrong as error:
                    proved = max(durable, segment.durable_behind(position + 8))
                    need(last and end >= proved, f"at byte {position}: {error}")
                    print(f"{path}: a torn tail from byte {position}, which the next start cuts: {error}")
                    break
                yield group
                end, previous = group.end, group.crc
            need(end >= durable, f"it ends at offset {end}, and {durable} was durable")
        except Wrong as error:
            self.check(False, f"DAMAGE {path}: {error}")
        except FileNotFoundError:
            self.check(not durable, f"DAMAGE {path}: it is gone, and the checkpoint counts {durable} bytes in it")

    def log(self, folder: str, kind: int, durable: int) -> Iterator[Group]:
        paths = sorted((self.path / folder).glob("*.log"))
        crc, end, instant = None, None, 0
        kept = folder != "message" or int(paths[0].stem) <= self.published.get("keep_from", 0)
        self.check(kept, f"DAMAGE {self.path / folder}: it begins behind keep_from")
        for path in paths:
            self.check(end in (None, int(path.stem)), f"DAMAGE {path}: the segment before it ends at {end}")
            for group in self.groups(path, kind, durable if path == paths[-1] else 0, path == paths[-1], crc):
                crc, end = group.crc, group.end
                falls = group.appended_ms < instant and kind == MESSAGE
                set_back = falls and any(record["type"] == "log_time" for record in group.records)
                self.check(not falls or set_back, f"DAMAGE {path}: the instant of the group at {group.offset} falls")
                instant = group.appended_ms
                yield group
        self.check((end or 0) >= durable, f"DAMAGE {self.path / folder}: the checkpoint counts up to offset {durable}")


class Row(NamedTuple):
    """What one log says of a message. A hash of 0 is not stated."""

    due_ms: int
    hash: int
    subject: bytes = b""
    body_bytes: int = 0
    handoff: tuple[int, ...] = ()  # Target, epoch, batch id, claimed, appended at the target, offset there.
    outcome: int = 0
    facts: tuple[int, ...] = ()  # Reason and attempt.
    labels: tuple[bytes, ...] = (b"", b"")  # Key and tags.
    expires_ms: int = 0  # 0: never.


Rows = defaultdict[tuple[int, ...], list[Row]]  # By hour and sequence; at a realtime server by origin before these.


class DelayServer(Server):
    """Schedule logs, dispatch logs, the message log and the seals."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MESSAGE)
        self.hours = {row[0]: row[1:] for row in struct.iter_unpack("<IIQQQ", self.published.get("hours", b""))}
        self.replay, self.scheduled, self.told = self.published.get("replay_offset", 0), Rows(list), Rows(list)
        self.first, self.ended = 0, dict[int, int]()  # The first message that the message log keeps; reasons.
        self.kept = {hour for hour, row in self.hours.items() if not row[3] & REMOVED}
        for hour in sorted(self.hours):
            if hour in self.kept or hour_path(path / "schedule", hour).exists():
                self.read_schedule(hour_path(path / "schedule", hour), hour, *self.hours[hour][:3])
        ends = {hour: length for hour, _, length in struct.iter_unpack("<IIQ", self.published.get("outcomes", b""))}
        names = {file.stem for file in (path / "dispatch").glob("*/*.log")}
        files = {int(datetime.strptime(name + "+0000", "%Y%m%d%H%z").timestamp()) // 3600 for name in names}
        for hour in sorted(files | (ends.keys() - (self.hours.keys() - self.kept))):
            self.read_dispatch(hour_path(path / "dispatch", hour), hour, ends.get(hour, 0))
        self.read_messages()
        self.sealed = self.read_seals()

    def read_schedule(self, path: Path, hour: int, crc: int, length: int, rows: int) -> None:
        count, last_crc, before = 0, 0, dict[int, tuple[int, int]]()  # The last one of each checkpoint's rows.
        for group in self.groups(path, SCHEDULE_LOG, length) if length else ():
            if group.end > length:
                break  # A checkpoint that did not finish left it.
            last_crc = group.crc
            for _, batch in group.batches:
                start, end, of_hour, _ = struct.unpack("<QQII", batch.part)
                self.check(of_hour == hour and end <= self.replay, f"DAMAGE {path}: a batch of another hour or range")
                columns = zip(*map(batch.column, (SEQUENCE, DUE, ACCEPTED, EXPIRES, LEFT_OUT, HASH)), strict=True)
                labels = zip(*batch.labels, strict=True)
                rows_of = zip(columns, labels, *batch.items, strict=True)
                for (sequence, due, accepted, expires, left, stated), label, *items in rows_of:
                    key = (max(due, hour * HOUR_MS), sequence)
                    filed = key > before.get(start, (0, 0)) and max(due, accepted) // HOUR_MS == hour
                    self.check(filed, f"DAMAGE {path}: sequence {sequence} is out of order, or of another hour")
                    # A row that was handed over before it was filed has neither body nor headers here.
                    same = stated == content_hash(*items) or not stated or left or not any(items[1:])
                    self.check(same, f"CONTENT {path}: sequence {sequence} has other bytes than its hash says")
                    row = Row(due, stated, items[0], len(items[2]) + left, labels=label, expires_ms=expires)
                    self.scheduled[hour, sequence].append(row)
                    before[start] = key
                count += batch.count
        self.check((last_crc, count) == (crc, rows), f"DAMAGE {path}: last_crc32c, or {count} rows instead of {rows}")

    def read_dispatch(self, path: Path, hour: int, durable: int) -> None:
        for group in self.groups(path, DISPATCH_LOG, durable):
            for _, batch in group.batches:
                # The rows of a part with another reason than 1 name rows that follow one another.
                parts = [
                    (*part[:2], part[2] + (nth if part[8] > 1 else 0), *part[3:])
                    for part in PART.iter_unpack(batch.heap)
                    for nth in range(part[6])
                ]
                sound = (*struct.unpack("<II", batch.part), len(parts)) == (hour, 0, batch.count)
                sound = sound and not any((part[8] and part[7] != CANCELLED) or part[10] for part in parts)
                self.check(sound, f"DAMAGE {path}: a batch's parts")
                columns = map(batch.column, (SEQUENCE, DUE, HASH))
                for sequence, due, stated, part in zip(*columns, parts, strict=False):
                    self.told[hour, sequence].append(Row(due, stated, b"", 0, part[:6], part[7], part[8:10]))

    def read_messages(self) -> None:
        """Rows behind the replay offset count as scheduled; rows before it are compared with the schedule logs."""
        expected, place = 0, f"{self.path}/message"
        filed = {sequence: rows[0] for (_, sequence), rows in self.scheduled.items()}
        for group in self.log("message", MESSAGE, self.replay):
            same = group.end != self.replay or group.crc == self.published.get("replay_crc32c", group.crc)
            self.check(same, f"DAMAGE {place}: replay_crc32c is not that of the group before the replay offset")
            sequence = group.base_sequence if group.kind == DATA_GROUP else expected
            self.first = self.first or (sequence if group.kind == DATA_GROUP else 0)
            for rows in (record["rows"] for record in group.records if record["type"] == "ended"):
                self.ended |= {row[0]: row[6] for row in struct.iter_unpack("<QqQqqIBBH", rows)}
            self.check(sequence >= expected, f"DAMAGE {place}: sequence {sequence} was given before")
            for _, batch in group.batches if group.kind == DATA_GROUP else ():
                columns = batch.column(DUE), batch.column(EXPIRES)
                for due, expires, key, tags, *items in zip(*columns, *batch.labels, *batch.items, strict=True):
                    hour, told = max(due, group.appended_ms) // HOUR_MS, filed.get(sequence)
                    row = Row(due, content_hash(*items), items[0], len(items[2]), (), 0, (), (key, tags), expires)
                    if group.offset >= self.replay:
                        self.scheduled[hour, sequence].append(row)
                    elif told:
                        same = row == told._replace(hash=told.hash or row.hash)
                        self.check(same, f"MISMATCH {place}: sequence {sequence} was sent otherwise than it is filed")
                    else:
                        self.check(hour not in self.kept, f"LOST {place}: sequence {sequence} is filed nowhere")
                    sequence += 1
            expected = sequence

    def read_seals(self) -> set[int]:
        sealed, digests = dict[int, int](), [bytes(32)]
        for group in self.log("seal", SEAL_LOG, 0):
            for row in group.batches[0][1].column(SEAL_ROW):
                log_id, hour, number, rows = struct.unpack_from("<QIIQ", row)
                follows = (log_id, number, row[168:]) == (self.log_id, len(sealed), digests[-1]) and hour not in sealed
                self.check(follows, f"BROKEN {self.path}: seal {number} does not follow the one before it")
                same = hour not in self.kept or not self.hours[hour][3] & SEALED or self.seal_of(hour) == row[16:168]
                self.check(same, f"BROKEN {self.path}: the seal of {hour_path(Path(), hour).stem} is of other rows")
                digests.append(hashlib.sha256(row).digest())
                sealed[hour] = rows
        for hour in {hour for hour, row in self.hours.items() if row[3] & SEALED} - sealed.keys():
            self.check(False, f"BROKEN {self.path}: {hour_path(Path(), hour).stem} is called sealed and has no seal")
        count, digest = self.published.get("seals") or (0, digests[0])
        self.check(digests[count : count + 1] == [digest], f"CONSERVATION {self.path}: seal {count - 1} is another one")
        filed = sum(row[2] for row in self.hours.values())  # And deleted, left unused, given up, beside damaged files.
        filed += sum(rows for hour, rows in sealed.items() if hour not in self.hours)
        filed += sum(count for name in ("skipped", "dropped") for _, count in self.published.get(name, ()))
        filed += sum(rows for *_, rows, _ in struct.iter_unpack("<IIQQQ", self.published.get("beside", b"")))
        given = self.published.get("next_sequence", 1) - 1
        self.check(filed == given, f"CONSERVATION {self.path}: {given} sequences were given, {filed} are filed")
        return set(sealed)

    def seal_of(self, hour: int) -> bytes:
        rows, told = (sorted((k[1], v[0]) for k, v in x.items() if k[0] == hour) for x in (self.scheduled, self.told))
        schedule, outcomes, numbers = hashlib.sha256(), hashlib.sha256(), dict[bytes, int]()
        for sequence, row in rows:
            number = numbers.setdefault(row.subject, len(numbers))
            schedule.update(struct.pack("<QqIIQ", sequence, row.due_ms, number, row.body_bytes, row.hash))
        schedule.update(b"".join(struct.pack("<I", len(name)) + name for name in numbers))
        for sequence, row in told:
            target, epoch, batch, claimed, *place = row.handoff
            figures = (row.due_ms, claimed, target, epoch, batch, *place, row.outcome, *row.facts, 0, row.hash)
            outcomes.update(struct.pack("<QqqQQQqQBBHIQ", sequence, *figures))
        given = [(sequence, row.due_ms, row.hash) for sequence, row in told if row.outcome == DISPATCHED]
        sums = [sum(mix(mix(mix(mix(n) + a & BITS) + b & BITS) + c & BITS) for a, b, c in given) & BITS for n in (1, 2)]
        due = [row.due_ms for _, row in rows] or [0]
        kinds = Counter(row.outcome for _, row in told)
        counts = (len(rows), sum(row.body_bytes for _, row in rows), *(kinds[kind] for kind in OUTCOMES))
        return struct.pack("<QQQQQQQqqQQ", *counts, min(due), max(due), *sums) + schedule.digest() + outcomes.digest()


class RealtimeServer(Server):
    """The message log, what each watermark covers, and the consumers' logs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, REALTIME)
        self.stored, self.watermark = Rows(list), defaultdict[int, tuple[int, ...]](tuple)
        self.start = int(min((path / "message").glob("*.log")).stem)
        self.rows_at, expected = dict[int, tuple[bytes, int]](), None  # By offset, subject and rows of a batch.
        for group in self.log("message", REALTIME, self.published.get("indexed_offset", 0)):
            for record in (record for record in group.records if record["type"] == "hello"):
                self.watermark[record["log_id"]] = max(self.watermark[record["log_id"]], tuple(record["w"]))
            if group.kind != DATA_GROUP:
                continue
            what = f"DAMAGE {path}/message: the group at {group.offset} does not go on where the sequences ended"
            self.check(expected in (None, group.base_sequence), what)
            expected = group.base_sequence + sum(batch.count for _, batch in group.batches)
            counted = self.published.get("next_sequence", 0) if group.end == self.published.get("indexed_offset") else 0
            self.check(counted in (0, expected), f"CONSERVATION {path}: the checkpoint counts up to message {counted}")
            for offset, batch in group.batches:
                origin, epoch, number, *w, claimed, hour, _ = struct.unpack("<QQQQQqII", batch.part)
                self.watermark[origin] = max(self.watermark[origin], tuple(w))
                self.rows_at[offset] = (subject := batch.items[0][0], batch.count)
                handoff = (self.log_id, epoch, number, claimed, group.appended_ms, offset)
                columns = zip(*map(batch.column, (SEQUENCE, DUE, HASH)), batch.labels[1], *batch.items, strict=True)
                for sequence, due, stated, tags, *items in columns:
                    same = not stated or stated == content_hash(*items)
                    self.check(same, f"CONTENT {path}: sequence {sequence} has other bytes than its hash says")
                    row = Row(due, stated, subject, handoff=handoff, labels=(b"", tags))
                    self.stored[origin, hour, sequence].append(row)
        for file in sorted((path / "consume").glob("*/*.log")):
            self.read_consume(file)
        for group in self.log("pull", PULL_LOG, self.published.get("pull_offset", 0)):
            for entry in (row for _, batch in group.batches for row in batch.column(ENTRY) if batch.kind == PULL):
                op, zero, *_, consume_first, count, lease_ms, _ = struct.unpack("<BBHIQQQIIq", entry)
                sound = 1 <= op <= 5 and not zero and count and (op == 1 or not (consume_first or lease_ms))
                self.check(sound, f"DAMAGE {path}/pull: an entry")

    def read_consume(self, path: Path) -> None:
        try:
            segment = Segment(path, CONSUME, self.log_id)
            before, subjects = 0, set[bytes]()
            for at in range(64, len(segment.data) - 4103, 4104):
                place = struct.pack("<QQQ", self.log_id, segment.number, segment.base + (at - 64) // 4104 * 512)
                page = segment.data[at : at + 4104]
                sound = struct.unpack_from("<I", page, 4096)[0] == crc32c(page[:4096], crc32c(place)) or not any(page)
                need(sound, f"the page at {at}")
                for entry in filter(None, struct.unpack_from("<512Q", page)):
                    subject, rows = self.rows_at.get(entry >> 16, (b"", 1 << 16))
                    there = subject != b"" or entry >> 16 < self.start
                    need(before < entry and there and entry & 0xFFFF < rows, f"an entry of the page at {at}")
                    before, subjects = entry, subjects | {subject} - {b""}
            need(len(subjects) <= 1, "entries of several subjects")
        except Wrong as error:
            self.check(False, f"DAMAGE {path}: {error}")


def compare(delay: DelayServer, targets: dict[int, RealtimeServer]) -> Counter[str]:
    """Compare what was scheduled with what became of it: the figures, and a line for each thing that is wrong."""
    figures, stored = Counter[str](), Rows(list)
    for server in targets.values():
        for (origin, hour, sequence), rows in server.stored.items():
            # When retention has removed an hour, only its seal is left to compare.
            if origin == delay.log_id and (hour not in delay.sealed or hour in delay.kept):
                stored[hour, sequence] += rows
    for key in sorted(delay.scheduled.keys() | delay.told.keys() | stored.keys()):
        name = f"{hour_path(Path(), key[0]).stem} sequence {key[1]}"
        scheduled, told, at = delay.scheduled.get(key, []), delay.told.get(key, []), stored.get(key, [])
        figures["scheduled"] += len(scheduled)
        delay.check(scheduled, f"ORPHAN {name}: nothing was scheduled")
        delay.check(max(map(len, (scheduled, told, at))) < 2, f"DUPLICATE {name}")
        if not scheduled or not told:
            figures["without outcome"] += len(scheduled)
            passed = any(row.handoff[1:3] <= targets[row.handoff[0]].watermark[delay.log_id] for row in at)
            delay.check(not scheduled or not passed, f"ORPHAN {name}: at a target, decided, without an outcome")
            continue
        row, said = scheduled[0], told[0]
        handed_over, target = said.outcome == DISPATCHED, targets.get(said.handoff[0])
        figures[OUTCOMES.get(said.outcome, "?")] += 1
        if handed_over and not at:
            unproven = target is None or said.handoff[5] < target.start
            figures["unproven"] += unproven
            delay.check(unproven, f"LOST {name}: not where the dispatch log says")
        if said.outcome == EXPIRED:
            delay.check(0 < row.expires_ms <= said.handoff[3], f"MISMATCH {name}: EXPIRED before its time")
        if said.outcome == CANCELLED:  # A decision stands behind its message in the message log.
            decided = delay.ended.get(key[1], 0 if 0 < delay.first <= key[1] else said.facts[0])
            same = 0 < decided == said.facts[0]
            delay.check(same, f"MISMATCH {name}: CANCELLED, and nobody decided it, or for another reason")
        content = {(each.due_ms, each.subject, each.labels[1]) for each in at} <= {
            (row.due_ms, row.subject, row.labels[1])
        }
        same = said.due_ms == row.due_ms and content
        hashes = {each.hash for each in (row, said, *at)} - {0}
        delay.check(same and len(hashes) < 2, f"MISMATCH {name}: due instant, tags or content")
        claimed = [each.handoff[3] for each in (*at, said) if each is not said or handed_over]
        delay.check(min(claimed, default=row.due_ms) >= row.due_ms, f"EARLY {name}")
        delay.check(not (at and handed_over) or at[0].handoff == said.handoff, f"MISMATCH {name}: the handoff")
        delay.check(not at or said.outcome in (DISPATCHED, IN_DOUBT), f"MISMATCH {name}: at a target all the same")
    return figures


def verify(data: Path) -> tuple[Counter[str], list[str]]:
    """The figures of a directory, and a line for each thing that is wrong."""
    paths = sorted(path for path in data.iterdir() if any((path / "message").glob("*.log")))
    targets = [RealtimeServer(path) for path in paths if path.name.startswith("realtime")]
    delays = [DelayServer(path) for path in paths if path.name.startswith("delay")]
    figures = sum((compare(delay, {each.log_id: each for each in targets}) for delay in delays), Counter[str]())
    return figures, [line for server in (*targets, *delays) for line in server.wrong]


def main() -> int:
    try:
        figures, wrong = verify(Path(sys.argv[1]))
    except Wrong as error:  # A first segment does not say whose it is.
        figures, wrong = Counter[str](), [f"DAMAGE: {error}"]
    print(*wrong, *(f"{name}: {count}" for name, count in figures.items()), f"{len(wrong)} things are wrong", sep="\n")
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
