"""Index: the subjects, and from a message's consume sequence to the stored batch that holds it.

Messages above the checkpoint are in memory, as runs of whole batches; messages below it are in the consume logs. The
index has what is written; a checkpoint waits until that is durable (rule L2). The newest stored batches are kept in
memory, older ones are read from the message log and checked.
"""

import bisect
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BYTES_MAX, HEADER, HEADER_BYTES, MAGIC, PARTS, BatchKind, ColumnId, DispatchPart
from delayd.batch.sequences import ROW_BITS, ROW_MASK
from delayd.errors import (
    BatchMalformed,
    DamagedData,
    DataError,
    NotReady,
    Rebuilding,
    Shortage,
    SlowDown,
    Unreadable,
    read_error,
)
from delayd.log.consume import (
    ConsumePlace,
    ConsumeTail,
    Entries,
    consume_place,
    read_entries,
    segment_base,
    segment_bases,
)
from delayd.log.log import Log
from delayd.machine.disk import Disk

SUBJECTS_MAX = 262_144  # Subjects that have had messages: 0.8 KB of memory each, and a folder on disk.
READ_ENTRIES = 4_096  # One read of a consume log serves this many messages: 32 KiB.
SHORTAGE_RETRY_MS = 1_000  # The hint to a client that asked while this process had no memory or descriptors left.

T = TypeVar("T")
AHEAD_BYTES = 64 << 10  # A backlog is read in pieces of this size.
AHEAD_BYTES_MIN = 4 << 10  # With fewer bytes than this ahead a batch is likely to be cut, so the log is read anew.
DISPATCH_PART = PARTS[BatchKind.DISPATCH][0]
READ_BATCHES = 16  # Read batches are kept, so that a large batch that goes out in parts is read once.


class Run(NamedTuple):
    """Neighbouring messages in one stored batch: its offset, the first row, how many; a ``size_bytes`` of 0 means
    unknown.
    """

    offset: int
    row: int
    rows: int
    size_bytes: int


class Subject:
    """One subject: ``end`` is the next consume sequence; ``tail`` says how far its consume log is valid, by the
    checkpoint.
    """

    __slots__ = (
        "_changed",
        "_page",
        "_page_ends",
        "_page_first",
        "damage",
        "end",
        "firsts",
        "kept_from",
        "name",
        "offsets",
        "oldest",
        "sizes",
        "subject_id",
        "tail",
    )

    def __init__(self, name: str, changed: dict["Subject", None] | None = None) -> None:
        self.name = name
        # The index's own set of subjects that a checkpoint has to look at.
        self._changed = {} if changed is None else changed
        self.subject_id = -1  # Given with its first message.
        self.end = 0
        self.tail = ConsumeTail()
        self.damage: DamagedData | None = None  # What is wrong with its consume log, until the log is rebuilt.
        self.firsts = array("q")  # Runs in memory, as columns: first consume sequence, batch offset, bytes.
        self.offsets = array("Q")
        self.sizes = array("q")
        self.kept_from = (0, 0)  # The last answer of `first`: (start of the log, first kept consume sequence).
        # The last answer for its listing: (consume sequence, claimed_at_ms) of the first kept message.
        self.oldest = (-1, 0)
        self._page: Entries | None = None
        self._page_first = 0
        self._page_ends: list[int] = []  # Where the runs of the page end.

    def add(self, offset: int, rows: int, size_bytes: int) -> None:
        """Append a stored batch."""
        self._changed[self] = None
        self.firsts.append(self.end)
        self.offsets.append(offset)
        self.sizes.append(size_bytes)
        self.end += rows

    def in_memory(self, sequence: int) -> Run | None:
        """Find a message among the runs in memory."""
        at = bisect.bisect_right(self.firsts, sequence) - 1
        if at < 0:
            return None
        end = self.firsts[at + 1] if at + 1 < len(self.firsts) else self.end
        row = sequence - self.firsts[at]
        return Run(self.offsets[at], row, end - sequence, self.sizes[at])

    def on_disk(self, disk: Disk, place: ConsumePlace, sequence: int) -> Run:
        """Find a message in the consume log; DamagedData when the log has no entry for it."""
        page = self._page
        at = sequence - self._page_first
        if page is None or not 0 <= at < len(page):
            if not self.tail.first <= sequence < self.tail.end:
                has = f"it has entries from {self.tail.first} to {self.tail.end}"
                raise DamagedData(place.folder, 0, f"{has}, and none of the consume sequence {sequence}")
            count = min(READ_ENTRIES, self.tail.end - sequence)
            page = self._page = _read(disk, place, sequence, count, self.tail)
            # Rows of one batch stand next to each other, so their entries count up.
            self._page_ends = [*(np.flatnonzero(np.diff(page) != 1) + 1).tolist(), len(page)]
            self._page_first, at = sequence, 0
        entry = int(page[at])
        end = self._page_ends[bisect.bisect_right(self._page_ends, at)]
        return Run(entry >> ROW_BITS, entry & ROW_MASK, end - at, 0)

    def first_in_memory(self, offset: int) -> int:
        """The consume sequence of the first message whose batch is at or above an offset; those must be in memory."""
        at = bisect.bisect_left(self.offsets, offset)
        return self.firsts[at] if at < len(self.firsts) else self.end

    def rebuilt(self, tail: ConsumeTail) -> None:
        """Take over a rebuilt consume log, up to its tail; forget everything that was read from the old one."""
        self.tail = tail
        self.damage = self._page = None
        self.kept_from = (0, 0)
        self.oldest = (-1, 0)

    def forget_below(self, offset: int) -> None:
        """Drop runs of batches below an offset; the consume log must hold them."""
        # A checkpoint takes whole runs, so the tail's end is the beginning of a run, or the end of all.
        runs = min(bisect.bisect_left(self.offsets, offset), bisect.bisect_left(self.firsts, self.tail.end))
        del self.firsts[:runs], self.offsets[:runs], self.sizes[:runs]


class Index:
    """All subjects of one realtime server."""

    def __init__(self, disk: Disk, folder: str, log: Log) -> None:
        self.on_damage: Callable[[Subject], None] = lambda subject: None
        self.on_subject: Callable[[Subject], None] = lambda subject: None  # Called with its first message.
        self.by_name: dict[str, Subject] = {}
        self.fresh: dict[Subject, None] = {}  # Changed since a checkpoint looked at them last.
        self.leaving_below = 0  # Retention is removing the log below this offset: no group begins there any more.
        self._by_table: dict[bytes, Subject] = {}
        self._disk = disk
        self._folder = folder
        self._log = log
        self._next_id = 0
        self._names: list[str] = []

    def subject(self, name: str) -> Subject:
        """The subject with this name; one without messages has no id yet."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = Subject(name, self.fresh)
        return found

    def blank(self) -> "Index":
        """An index of the same log that knows no subject yet; it may be used beside the loop."""
        return Index(self._disk, self._folder, self._log)

    def forget_empty(self, name: str) -> None:
        """Forget a subject without messages, whose last group is gone."""
        found = self.by_name.get(name)
        if found is not None and found.subject_id < 0:
            del self.by_name[name]
            self.fresh.pop(found, None)

    def take_fresh(self) -> list[Subject]:
        """Take the subjects that have changed since the last call."""
        found = list(self.fresh)
        self.fresh.clear()
        return found

    def changed(self, subject: Subject) -> None:
        """Let the next checkpoint write this subject."""
        self.fresh[subject] = None

    def subject_of(self, batch: Batch) -> Subject:
        """The subject of a stored batch, by the bytes of its subject table; it gets its id with its first batch."""
        table = batch.subject_table
        found = self._by_table.get(table)
        if found is None:
            found = self._by_table[table] = self.subject(batch.subjects()[0].decode())
            if found.subject_id < 0:
                self.number(found, self._next_id)
                self.on_subject(found)
        return found

    def check_room(self, batches: Sequence[Batch]) -> None:
        """Refuse batches that would bring too many subjects, with SlowDown."""
        if len(self) + len(batches) <= SUBJECTS_MAX:
            return
        unknown = {batch.subject_table for batch in batches if not self._numbered(batch)}
        if len(self) + len(unknown) > SUBJECTS_MAX:
            raise SlowDown(f"this server has {len(self)} subjects and takes no more", retry_after_ms=SHORTAGE_RETRY_MS)

    def _numbered(self, batch: Batch) -> bool:
        found = self.by_name.get(batch.subjects()[0].decode())
        return found is not None and found.subject_id >= 0

    def number(self, subject: Subject, subject_id: int) -> None:
        """Give a subject its id for good."""
        subject.subject_id = subject_id
        self._next_id = max(self._next_id, subject_id + 1)
        bisect.insort(self._names, subject.name)

    def place(self, subject: Subject) -> ConsumePlace:
        """Where the consume log of a subject is."""
        return consume_place(self._folder, self._log.place.log_id, subject.subject_id)

    def locate(self, subject: Subject, sequence: int) -> Run:
        """Find the stored batch of a message that is kept.

        Raises:
            Rebuilding: the consume log is damaged; `on_damage` was called.
            SlowDown: the log can't be read now, and is not damaged.
        """
        found = subject.in_memory(sequence)
        if found is not None:
            return found
        return self._sound(subject, lambda: subject.on_disk(self._disk, self.place(subject), sequence))

    def damaged(self, subject: Subject, damage: DamagedData) -> Rebuilding:
        """Note that a consume log is damaged; return the error for the request."""
        if subject.damage is None:
            subject.damage = damage
            self.on_damage(subject)
        return Rebuilding(f"the consume log of {subject.name} is being rebuilt: {damage.message}")

    def first(self, subject: Subject) -> int:
        """The lowest consume sequence whose message is kept; ``end`` when none is. Raises as `locate` does."""
        start = max(self._log.start, self.leaving_below)
        if start != subject.kept_from[0]:
            subject.kept_from = (start, self._sound(subject, lambda: self._first_from(subject, start)))
        return subject.kept_from[1]

    def first_from(self, subject: Subject, offset: int) -> int:
        """The consume sequence of the first message at or above an offset that is kept, or of the next one. Raises as
        `locate` does.
        """
        return self._sound(subject, lambda: self._first_from(subject, offset))

    def listed(self, prefix: str, after: str) -> Iterator[Subject]:
        """Subjects that have had messages, by name, from behind ``after``."""
        at = bisect.bisect_right(self._names, after) if after >= prefix else bisect.bisect_left(self._names, prefix)
        while at < len(self._names) and self._names[at].startswith(prefix):
            yield self.by_name[self._names[at]]
            at += 1

    def __len__(self) -> int:
        """How many subjects have had messages."""
        return len(self._names)

    def __iter__(self) -> Iterator[Subject]:
        """Subjects that have had messages, by name."""
        return (self.by_name[name] for name in self._names)

    def _sound(self, subject: Subject, read: Callable[[], T]) -> T:
        """Read a consume log; raise errors in the form that this class's callers know."""
        while True:
            try:
                self._check_sound(subject)
                return read()
            except Shortage as error:
                raise SlowDown(error.message, retry_after_ms=SHORTAGE_RETRY_MS) from error
            except DamagedData as error:
                rebuilding = self.damaged(subject, error)
                # A log that was short may have been rebuilt meanwhile.
                if subject.damage is not None:
                    raise rebuilding from error

    def _check_sound(self, subject: Subject) -> None:
        if subject.damage is not None:
            raise subject.damage

    def _first_from(self, subject: Subject, start: int) -> int:
        if subject.tail.count:
            self._check_sound(subject)
            place = self.place(subject)
            kept = segment_bases(self._disk, place)
            low = max(kept[0] if kept else segment_base(subject.tail.base), subject.tail.first)
            found = low + bisect.bisect_left(
                range(low, subject.tail.end),
                start,
                key=lambda sequence: int(_read(self._disk, place, sequence, 1, subject.tail)[0]) >> ROW_BITS,
            )
            if found < subject.tail.end:
                return found
        in_memory = subject.firsts[0] if subject.firsts else subject.end
        if in_memory > subject.tail.end:
            what = f"it ends at {subject.tail.end}, and what is in memory begins at {in_memory}"
            raise DamagedData(self.place(subject).folder, 0, what)
        return subject.first_in_memory(start)


def _read(disk: Disk, place: ConsumePlace, sequence: int, count: int, tail: ConsumeTail) -> Entries:
    try:
        return read_entries(disk, place, sequence, count, tail)
    except OSError as error:
        raise read_error(place.folder, 0, error) from error


class StoredBatches:
    """Reads batches of the message log; belongs to the loop."""

    def __init__(self, log: Log, memory_bytes: int) -> None:
        self._log = log
        self._memory_bytes_max = memory_bytes
        self._memory_bytes = 0
        self._newest: dict[int, Batch] = {}
        self._order: deque[int] = deque()
        self._read: OrderedDict[int, Batch] = OrderedDict()
        self._ahead = (0, memoryview(b""))

    @property
    def memory_start(self) -> int:
        """Offset from which on batches are in memory; the end of the log when none is."""
        return self._order[0] if self._order else self._log.end

    def add(self, offset: int, batch: Batch) -> None:
        """Keep a batch that is written, and let the oldest go."""
        self._newest[offset] = batch
        self._order.append(offset)
        self._memory_bytes += batch.total_bytes
        while self._memory_bytes > self._memory_bytes_max:
            self._memory_bytes -= self._newest.pop(self._order.popleft()).total_bytes

    def fetch(self, offset: int) -> Batch:
        """The batch at ``offset``.

        Raises:
            DamagedData: no batch that checks is there, or the disk can't read it.
        """
        found = self._newest.get(offset)
        if found is not None:
            return found
        found = self._read.get(offset)
        if found is None:
            found = self._read[offset] = self._read_batch(offset)
            if len(self._read) > READ_BATCHES:
                self._read.popitem(last=False)
        return found

    def forget_read(self) -> None:
        """Forget batches that were read, because their files may have been restored."""
        self._read.clear()
        self._ahead = (0, memoryview(b""))

    def claimed_at_ms(self, offset: int) -> int:
        """When the delay server handed a batch over, by its head alone; raises as `fetch` does."""
        found = self._newest.get(offset)
        if found is not None:
            return found.dispatch.claimed_at_ms
        try:
            head = self._log.read(offset, HEADER_BYTES + DISPATCH_PART.size)
        except OSError as error:
            raise read_error(*self._log.file_position(offset), error) from error
        return DispatchPart(*DISPATCH_PART.unpack_from(head, HEADER_BYTES)).claimed_at_ms

    def holds(self, offset: int, origin_log_id: int) -> bool:
        """Whether a batch of a delay server begins at ``offset``; True for offsets that retention has removed.

        Raises:
            NotReady: the system can't read it now, so nobody knows what is there.
        """
        if offset < self._log.start:
            return True
        return self._dispatched_at(offset, origin_log_id) is not None

    def may_be_of(self, hours: Container[int], offset: int, origin_log_id: int) -> bool:
        """Whether a delay server's batch at ``offset`` is of one of these hours; True for offsets that retention has
        removed, because they may be.

        Raises NotReady as `holds` does.
        """
        if offset < self._log.start:
            return True
        part = self._dispatched_at(offset, origin_log_id)
        return part is not None and part.hour in hours

    def _dispatched_at(self, offset: int, origin_log_id: int) -> DispatchPart | None:
        if offset >= self._log.durable:
            return None
        try:
            head = self._log.read_some(offset, HEADER_BYTES + DISPATCH_PART.size)
        except (OSError, Unreadable, Shortage) as error:
            raise NotReady(f"the batch at offset {offset} can't be read now ({error}); ask again") from error
        except DamagedData:
            return None
        if len(head) < HEADER_BYTES + DISPATCH_PART.size:
            return None
        magic, _, kind = HEADER.unpack_from(head)[:3]
        part = DispatchPart(*DISPATCH_PART.unpack_from(head, HEADER_BYTES))
        found = (magic, kind, part.origin_log_id) == (MAGIC, BatchKind.DISPATCH, origin_log_id)
        return part if found else None

    def sequences_of(self, offset: int) -> list[int]:
        """The sequences of a batch that `fetch` could not read; empty when they can't be trusted either."""
        try:
            batch = parse(self._bytes_of(offset))
        except (BatchMalformed, DataError):
            return []
        # Most of the time only the heap is damaged: the columns have a checksum of their own.
        columns = batch.buffer[HEADER_BYTES + batch.kind_bytes : batch.heap_offset]
        whole = crc32c(columns) == batch.columns_crc32c and ColumnId.SEQUENCE in batch
        return batch.uint64s(ColumnId.SEQUENCE).tolist() if whole else []

    def _read_batch(self, offset: int) -> Batch:
        try:
            return self._verified(offset)
        except BatchMalformed:
            # The batch may have been read ahead, and its file restored since.
            self._ahead = (0, memoryview(b""))
        try:
            return self._verified(offset)
        except BatchMalformed as error:
            raise DamagedData(*self._log.file_position(offset), f"the batch there: {error.message}") from error

    def _verified(self, offset: int) -> Batch:
        batch = parse(self._bytes_of(offset))
        # The batch's group was verified when it was written or recovered; the disk may have changed it since (rule L5).
        batch.verify()
        return batch

    def _bytes_of(self, offset: int) -> memoryview:
        """The bytes of a batch, as long as its header says."""
        try:
            data = self._read_ahead(offset)
            if len(data) < HEADER.size:
                data = memoryview(self._log.read(offset, HEADER.size))
            size = HEADER.unpack_from(data)[4]
            return data if size <= len(data) else memoryview(self._log.read(offset, min(size, BYTES_MAX)))
        except OSError as error:
            raise read_error(*self._log.file_position(offset), error) from error

    def _read_ahead(self, offset: int) -> memoryview:
        """Read bytes from ``offset`` on: small batches of a backlog stand close together, so one read serves many."""
        start, data = self._ahead
        if not start <= offset <= start + len(data) - AHEAD_BYTES_MIN:
            # Behind the written end bytes may still change; bytes that are kept here must not.
            size = min(AHEAD_BYTES, self._log.end - offset)
            try:
                start, data = offset, memoryview(self._log.read_some(offset, size))
            except OSError:
                # A sector further on can't be read; this batch may lie before it, so it is read alone.
                return memoryview(b"")
            self._ahead = start, data
        return data[offset - start :]
