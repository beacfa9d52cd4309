"""Index: the subjects, and from a message's consume sequence to the stored batch that holds it.

Messages above the checkpoint are in memory, as runs of whole batches; messages below it are in the consume logs. Only
durable batches are in the index (rule L2).
"""

import bisect
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.sequences import ROW_BITS, ROW_MASK
from delayd.errors import DamagedData, Rebuilding, Shortage, SlowDown, read_error
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
