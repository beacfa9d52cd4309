"""Rebuild: it makes damaged consume logs again from the message log, beside the loop (rule L9).

First it counts a subject's messages in the kept log, up to an offset at which the subject's end is known. From end and
count follows the consume sequence of the first kept message. Then it writes their entries to new files, which replace
the old ones at the end. Nothing of a damaged file is read.

An example: the checkpoint says that the subject's end at offset 9,000 is 1,200, and retention has kept the log from
offset 3,000 on. The first pass counts 500 messages between 3,000 and 9,000, so the first of them is number 700. The
second pass writes the entries 700 to 1,199.

Invariant: a piece of either pass reads a bounded part of the log, and whatever fails is tried again after a while.
"""

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from delayd.batch.columns import HEADER, HEADER_BYTES, BatchKind, Buffer
from delayd.batch.names import SUBJECT_BYTES_MAX, check_subject
from delayd.errors import DamagedData, DelaydError, ServerStopped
from delayd.log.consume import (
    NEW_SUFFIX,
    ConsumePlace,
    ConsumeTail,
    append_entries,
    entries_of,
    remove_segments,
    segment_bases,
    tail_before,
)
from delayd.log.group import GroupKind, content_position
from delayd.log.log import Log
from delayd.machine.disk import Disk, File
from delayd.machine.executor import Done
from delayd.machine.identity import Site

from .subject_index import Index, Subject

if TYPE_CHECKING:
    from .checkpoint import Checkpointer

PIECE_BYTES = 16 << 20  # One job reads this much of the message log, some 10 ms, so that checkpoints wait for no more.
ROUND_SUBJECTS = 1_000  # Subjects that are rebuilt in one pass over the log.
RETRY_MS = 10_000
QUIET_MS = 1_000  # Pause between two rounds for one subject, if the first did not succeed for good.

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _RebuildWanted:
    """One subject of a round; ``rows`` counts its messages in the log below the round's stop."""

    subject: Subject
    name: bytes
    place: ConsumePlace
    end: int
    rows: int = 0
    tail: ConsumeTail = field(default_factory=ConsumeTail)
    now_ms: int = 0


@dataclass(slots=True)
class _RebuildRound:
    """One pass to count and one to write, over [start, stop) of the message log. Only the job under way uses it."""

    wanted: dict[bytes, _RebuildWanted]
    start: int
    stop: int
    at: int
    writing: bool = False


class Rebuilder:
    """Rebuilds the wanted consume logs, one round at a time; belongs to the loop."""

    def __init__(
        self, site: Site, index: Index, log_: Log, checkpoints: "Checkpointer", on_rebuilt: Callable[[Subject], None]
    ) -> None:
        self.counted = 0
        self._retry = site.alarms.alarm(self._start)
        self._disk, self._index, self._log = site.disk, index, log_
        self._checkpoints = checkpoints
        self._on_rebuilt = on_rebuilt
        self._executor, self._clock = site.worker, site.clock
        self._wanted: dict[Subject, None] = {}
        self._under_way = False
        self._quiet_until_ms: dict[Subject, int] = {}  # Subjects that were rebuilt just now.
        for subject in index:
            if subject.damage is not None:
                self.want(subject)

    @property
    def subjects(self) -> Sequence[Subject]:
        """Subjects whose consume log is damaged."""
        return list(self._wanted)

    def want(self, subject: Subject) -> None:
        """Rebuild the consume log of a subject; its ``damage`` says what is wrong."""
        assert subject.damage is not None, "only what does not check is rebuilt"
        if subject in self._wanted:
            return
        damage = subject.damage
        log.error(
            "consume_log_damaged subject=%s path=%s position=%d reason=%r then=rebuilt_from_the_message_log",
            *(subject.name, damage.path, damage.position, damage.what),
        )
        self._wanted[subject] = None
        if self._retry.at_ms is None:
            self._start()

    def _start(self) -> None:
        if self._under_way or not self._wanted:
            return
        now_ms = self._clock.monotonic_ms()
        quiet = self._quiet_until_ms = {each: end for each, end in self._quiet_until_ms.items() if now_ms < end}
        # A log that was rebuilt just now and does not check again has to wait: its disk may be failing.
        subjects = [each for each in self._wanted if each not in quiet][:ROUND_SUBJECTS]
        if not subjects:
            self._retry.at(min(quiet[each] for each in self._wanted))
            return
        self._under_way = True
        stop = self._checkpoints.last.indexed_offset  # Messages above it are in memory.
        found = [_wanted(self._index, subject, stop, self._clock.now_ms()) for subject in subjects]
        start = min(self._log.start, stop)
        self._go_on(_RebuildRound({each.name: each for each in found}, start, stop, start))

    def _go_on(self, round_: _RebuildRound) -> None:
        self._executor.submit(partial(_piece, self._disk, self._log, round_), partial(self._done, round_))

    def _done(self, round_: _RebuildRound, done: Done[bool]) -> None:
        try:
            finished = done.result()
        except ServerStopped:
            raise
        except (DelaydError, OSError) as error:
            log.warning(
                "consume_logs_not_rebuilt subjects=%d reason=%r retry_ms=%d",
                *(len(round_.wanted), str(error), RETRY_MS),
            )
            self._later()
            return
        if not finished:
            self._go_on(round_)
            return
        self._under_way = False
        quiet_until_ms = self._clock.monotonic_ms() + QUIET_MS
        if round_.start < self._log.start:
            # Retention has removed messages that were counted: the round is done once more.
            self._retry.at(quiet_until_ms)
            return
        for each in round_.wanted.values():
            del self._wanted[each.subject]
            each.subject.rebuilt(each.tail)
            self._index.changed(each.subject)
            self._quiet_until_ms[each.subject] = quiet_until_ms
            self.counted += 1
            log.info("consume_log_rebuilt subject=%s first=%d end=%d", each.subject.name, each.tail.first, each.end)
        self._start()
        for each in round_.wanted.values():
            self._on_rebuilt(each.subject)

    def _later(self) -> None:
        self._under_way = False
        self._retry.after(RETRY_MS)


def _wanted(index: Index, subject: Subject, stop: int, now_ms: int) -> _RebuildWanted:
    place = index.place(subject)
    return _RebuildWanted(subject, subject.name.encode(), place, subject.first_in_memory(stop), now_ms=now_ms)


def _piece(disk: Disk, message_log: Log, round_: _RebuildRound) -> bool:
    """Do one piece of a round; return whether it was the last one."""
    until = min(round_.at + PIECE_BYTES, round_.stop)
    found: dict[bytes, tuple[list[int], list[int]]] = {}
    while round_.at < until:
        round_.at = _read_group(message_log, round_.at, round_.wanted, found)
    if round_.writing:
        _write(disk, round_.wanted, found)
    else:
        for name, (_, counts) in found.items():
            round_.wanted[name].rows += sum(counts)
    if round_.at < round_.stop:
        return False
    if round_.writing:
        _replace(disk, round_.wanted.values())
        return True
    for each in round_.wanted.values():
        if each.rows > each.end:
            what = f"the log has {each.rows} messages of {each.subject.name}, which has had {each.end}"
            raise DamagedData(message_log.place.folder, 0, what)
        place = replace(each.place, suffix=NEW_SUFFIX)
        remove_segments(disk, place, segment_bases(disk, place))
        each.tail = tail_before(each.place, each.end - each.rows)
    round_.at, round_.writing = round_.start, True
    return False


def rows_of(message_log: Log, name: bytes, stop: int) -> tuple[list[int], list[int]]:
    """Offsets and rows of all batches of a subject that the log keeps below ``stop``; raises as a rebuild does."""
    found: dict[bytes, tuple[list[int], list[int]]] = {}
    at = message_log.start
    while at < stop:
        at = _read_group(message_log, at, (name,), found)
    return found.get(name, ([], []))


def _read_group(
    message_log: Log, at: int, wanted: Container[bytes], found: dict[bytes, tuple[list[int], list[int]]]
) -> int:
    """Note offset and rows of the batches of wanted subjects in the group at an offset; returns where it ends."""
    header, sizes = message_log.read_front(at)
    offset = at + content_position(header.batch_count)
    if header.kind == GroupKind.DATA:
        read = _reader(message_log, at, header.total_bytes)
        for size in sizes:
            name, rows = _read_batch(message_log, read, offset, size)
            if name in wanted:
                offsets, counts = found.setdefault(name, ([], []))
                offsets.append(offset)
                counts.append(rows)
            offset += size
    return at + header.total_bytes


def _reader(message_log: Log, at: int, size: int) -> Callable[[int, int], Buffer]:
    """A function that reads bytes of a group: from one read of it all, or piece by piece where a sector can't be
    read.
    """
    try:
        data = memoryview(message_log.read(at, size))
    except OSError:
        return message_log.read
    return lambda offset, length: data[offset - at : offset - at + length]


def _read_batch(message_log: Log, read: Callable[[int, int], Buffer], offset: int, size: int) -> tuple[bytes, int]:
    """Subject and rows of a batch, from its head and its subject table: the rows count even if bodies are damaged."""
    head = read(offset, HEADER_BYTES)
    fields = HEADER.unpack_from(head)
    kind, count, heap_offset, kind_bytes = fields[2], fields[5], fields[6], fields[8]
    part = read(offset + HEADER_BYTES, min(kind_bytes, size - HEADER_BYTES))
    position = message_log.file_position(offset)
    if crc32c(part, crc32c(head[: HEADER_BYTES - 4])) != fields[-1] or kind != BatchKind.DISPATCH:
        raise DamagedData(*position, "the header of the batch there does not check, so nobody can count its rows")
    table = bytes(read(offset + heap_offset, min(8 + SUBJECT_BYTES_MAX, size - heap_offset)))
    length = int.from_bytes(table[:4], "little")
    name = table[8 : 8 + length]
    try:
        check_subject(name)
    except DelaydError:
        raise DamagedData(*position, "the subject of the batch there can't be read") from None
    return name, count


def _write(disk: Disk, wanted: dict[bytes, _RebuildWanted], found: dict[bytes, tuple[list[int], list[int]]]) -> None:
    unsynced: list[File] = []
    try:
        for name, (offsets, counts) in found.items():
            each = wanted[name]
            entries = entries_of(np.array(offsets, np.uint64), np.array(counts, np.int64))
            place = replace(each.place, suffix=NEW_SUFFIX)
            each.tail = append_entries(disk, place, each.tail, entries, each.now_ms, unsynced)
            while unsynced:
                unsynced[-1].sync()
                unsynced.pop().close()
    finally:
        while unsynced:
            unsynced.pop().close()


def _replace(disk: Disk, wanted: Iterable[_RebuildWanted]) -> None:
    """Put the new files in the place of the old ones, durably."""
    for each in wanted:
        new = replace(each.place, suffix=NEW_SUFFIX)
        remove_segments(disk, each.place, segment_bases(disk, each.place))
        bases = segment_bases(disk, new)
        for base in bases:
            disk.rename(new.path(base), each.place.path(base))
        if bases:
            disk.sync_folder(each.place.folder)
