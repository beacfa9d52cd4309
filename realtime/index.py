"""Index: the subjects, and from consume sequence to the stored batch that holds it.

Above the checkpoint it is in memory, as runs of whole batches; below it is in the consume logs. Only durable batches
are in it (rule L2).
"""

import bisect
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from delayd.batch import Batch
from delayd.disk import Disk
from delayd.log.consume import (
    ROW_BITS,
    ROW_MASK,
    ConsumePlace,
    ConsumeTail,
    Entries,
    consume_place,
    read_entries,
    segment_base,
    segment_bases,
)
from delayd.log.log import Log

PAGE_ENTRIES = 4_096  # One read of a consume log serves this many messages: 32 KiB.


class Run(NamedTuple):
    """Neighbouring messages in one stored batch: its offset, the first row, how many; ``size_bytes`` 0: not known."""

    offset: int
    row: int
    rows: int
    size_bytes: int


class Subject:
    """One subject: ``end`` is the next consume sequence; ``tail`` is what the checkpoint knows of its consume log."""

    __slots__ = (
        "_page",
        "_page_ends",
        "_page_first",
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

    def __init__(self, name: str) -> None:
        self.name = name
        self.subject_id = -1  # Until its first message.
        self.end = 0
        self.tail = ConsumeTail()
        self.firsts = array("q")  # Of the runs in memory: first consume sequence, batch offset, bytes of the batch.
        self.offsets = array("Q")
        self.sizes = array("q")
        self.kept_from = (0, 0)  # (start of the log, first kept consume sequence) when last asked.
        self.oldest = (-1, 0)  # (consume sequence, claimed_at_ms) of the first kept message when last asked.
        self._page: Entries | None = None
        self._page_first = 0
        self._page_ends: list[int] = []  # Where the runs of the page end.

    def add(self, offset: int, rows: int, size_bytes: int) -> None:
        """Append a stored batch."""
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
        """Find a message in the consume log."""
        page = self._page
        at = sequence - self._page_first
        if page is None or not 0 <= at < len(page):
            page = self._page = read_entries(disk, place, sequence, min(PAGE_ENTRIES, self.tail.end - sequence))
            # Rows of one batch stand next to each other, so their entries count up.
            self._page_ends = [*(np.flatnonzero(np.diff(page) != 1) + 1).tolist(), len(page)]
            self._page_first, at = sequence, 0
        entry = int(page[at])
        end = self._page_ends[bisect.bisect_right(self._page_ends, at)]
        return Run(entry >> ROW_BITS, entry & ROW_MASK, end - at, 0)

    def forget_below(self, offset: int) -> None:
        """Drop runs of batches below an offset; the consume log must hold them."""
        # A checkpoint takes whole runs, so the tail's end is the first of a run, or the end.
        runs = min(bisect.bisect_left(self.offsets, offset), bisect.bisect_left(self.firsts, self.tail.end))
        del self.firsts[:runs], self.offsets[:runs], self.sizes[:runs]


class Index:
    """All subjects of one realtime server."""

    def __init__(self, disk: Disk, folder: str, log: Log) -> None:
        self.by_name: dict[str, Subject] = {}
        self.leaving_below = 0  # Retention has decided on what lies below this offset: no group begins there any more.
        self._by_table: dict[bytes, Subject] = {}
        self._disk = disk
        self._folder = folder
        self._log = log
        self._next_id = 0
        self._names: list[str] = []

    def subject(self, name: str) -> Subject:
        """The subject of a name; one without messages has no id yet."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = Subject(name)
        return found

    def subject_of(self, batch: Batch) -> Subject:
        """The subject of a stored batch, by the bytes of its subject table; numbered when it is its first."""
        table = batch.subject_table
        found = self._by_table.get(table)
        if found is None:
            found = self._by_table[table] = self.subject(batch.subjects()[0].decode())
            if found.subject_id < 0:
                self.number(found, self._next_id)
        return found

    def number(self, subject: Subject, subject_id: int) -> None:
        """Give a subject the id that it keeps."""
        subject.subject_id = subject_id
        self._next_id = max(self._next_id, subject_id + 1)
        bisect.insort(self._names, subject.name)

    def place(self, subject: Subject) -> ConsumePlace:
        """Where the consume log of a subject is."""
        return consume_place(self._folder, self._log.place.log_id, subject.subject_id)

    def locate(self, subject: Subject, sequence: int) -> Run:
        """Find the stored batch of a message that is kept; DamagedData when its consume log is not what it was."""
        found = subject.in_memory(sequence)
        return subject.on_disk(self._disk, self.place(subject), sequence) if found is None else found

    def first(self, subject: Subject) -> int:
        """The lowest consume sequence whose message is kept; ``end`` when none is."""
        start = max(self._log.start, self.leaving_below)
        if start != subject.kept_from[0]:
            subject.kept_from = (start, self._first_from(subject, start))
        return subject.kept_from[1]

    def listed(self, prefix: str, after: str) -> Iterator[Subject]:
        """Subjects that have had messages, by name, from behind ``after``."""
        at = bisect.bisect_right(self._names, after) if after >= prefix else bisect.bisect_left(self._names, prefix)
        while at < len(self._names) and self._names[at].startswith(prefix):
            yield self.by_name[self._names[at]]
            at += 1

    def __iter__(self) -> Iterator[Subject]:
        """Subjects that have had messages, by name."""
        return (self.by_name[name] for name in self._names)

    def _first_from(self, subject: Subject, start: int) -> int:
        if subject.tail.count:
            place = self.place(subject)
            kept = segment_bases(self._disk, place)
            low = kept[0] if kept else segment_base(subject.tail.base)
            found = low + bisect.bisect_left(
                range(low, subject.tail.end),
                start,
                key=lambda sequence: int(read_entries(self._disk, place, sequence, 1)[0]) >> ROW_BITS,
            )
            if found < subject.tail.end:
                return found
        at = bisect.bisect_left(subject.offsets, start)
        return subject.firsts[at] if at < len(subject.firsts) else subject.end
