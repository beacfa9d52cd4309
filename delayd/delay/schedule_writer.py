"""Schedule writer: a range of the message log, filed into the schedule logs of its hours.

It only appends: until a checkpoint counts what it wrote, no reader takes it, and the next writer cuts it off (rule P4).
Runs on the worker thread, in calls that release the GIL or are short.
"""

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from delayd.batch import BatchKind, Int64s, SchedulePart
from delayd.delay.hour_table import HourFile, HourTable
from delayd.delay.rows import Rows
from delayd.delay.table import Stored, Table, tabulate
from delayd.disk import Disk
from delayd.errors import DamagedData, DiskFull
from delayd.gather import SUBJECT_NONE, Gathered, compose, copy_words
from delayd.log.group import Group, GroupKind, NewGroup
from delayd.log.log import Log
from delayd.log.schedule import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, open_segment

WINDOW_BYTES = 128 << 20  # Of the message log in memory at a time; each window makes a group an hour, or several.
BATCH_ROWS = 8_000  # A batch is read and verified whole for any of its rows, and decodes well from here on.
BATCH_BYTES = 1 << 20
GROUP_BYTES = 32 << 20  # A group ends behind the batch that reaches it; the format's limit is twice that.
FILES_A_SYNC = 512  # One syncfs makes so many files durable; more of them would hold up group commits.
BYTES_A_SYNC = 32 << 20


class ScheduleWriter:
    """Writes one checkpoint's rows; used once."""

    def __init__(
        self, disk: Disk, folder: str, log: Log, epoch: int, hours: HourTable, now_ms: int, rest: Callable[[], None]
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._log = log
        self._epoch = epoch
        self._hours = hours
        self._now_ms = now_ms
        self._rest = rest
        self._open: list[Segment] = []
        self._dirty_bytes = 0
        self.written: dict[int, HourFile] = {}

    def write(self, start: int, stop: int, previous_crc32c: int, rows: Rows, names: list[bytes]) -> None:
        """File the message log's range ``start`` to ``stop``, whose rows are ``rows``; durable on return.

        Raises:
            DiskFull: some hours were written; nothing counts them.
            DamagedData: a group or a schedule log does not check.
        """
        at = 0
        try:
            for window in _windows(self._log.scan(start, stop, previous_crc32c)):
                stored = _stored(window)
                if stored:
                    table = tabulate(stored)
                    count = len(table.sequences)
                    self._write_window(window, stored, table, rows[at : at + count], names, (start, stop))
                    at += count
        except (DiskFull, DamagedData):
            # Or each try would leave its files open.
            self._sync()
            raise
        assert at == len(rows), f"the range holds {at} rows, {len(rows)} are pending"
        self._sync()

    def _write_window(
        self,
        window: list[Group],
        stored: list[Stored],
        table: Table,
        rows: Rows,
        names: list[bytes],
        source: tuple[int, int],
    ) -> None:
        assert bool((table.sequences == rows["sequence"]).all()), "pending rows stand in the order of the log"
        hours = rows["hour"]
        order = np.argsort((hours - hours.min()).astype(np.uint16), kind="stable")
        words, heap_at = _words(window, stored)
        base = heap_at.take(table.batch_of)
        bodies, body_ends = _in_order(words, base, table.body_starts, table.body_lengths, order)
        headers: tuple[NDArray[np.uint64], Int64s] | None = None
        if table.headers is not None:
            headers = _in_order(words, base, *table.headers, order)
        hours = hours.take(order)
        cuts = _cuts(hours, body_ends if headers is None else body_ends + headers[1])
        deliver_at_ms, sequences = table.deliver_at_ms.take(order), table.sequences.take(order)
        numbers = rows["subject"].take(order)
        body_lengths = table.body_lengths.take(order)
        headers_lengths = None if table.headers is None else table.headers[1].take(order)
        accepted_at_ms = _accepted(window, table).take(order)
        pieces = [(int(hours[low]), low, high) for low, high in pairwise(cuts)]
        for hour, parts in groupby(pieces, key=lambda piece: piece[0]):
            batches: list[bytes] = []
            count = size = 0
            for _, low, high in parts:
                part = slice(low, high)
                used, subject_of = np.unique(numbers[part], return_inverse=True)
                gathered = Gathered(
                    deliver_at_ms[part],
                    None if headers_lengths is None else headers_lengths[part],
                    [] if headers is None else [_slice(headers, low, high)],
                    body_lengths[part],
                    [_slice((bodies, body_ends), low, high)],
                )
                was_due = bool((gathered.deliver_at_ms < accepted_at_ms[part]).any())
                batches.append(
                    compose(
                        BatchKind.SCHEDULE,
                        SchedulePart(*source, hour),
                        gathered,
                        sequences[part],
                        [names[number] for number in used.tolist()],
                        subject_of.astype(np.uint32) if len(used) > 1 else SUBJECT_NONE,
                        accepted_at_ms[part] if was_due else None,
                    )
                )
                count += high - low
                size += len(batches[-1])
                if size >= GROUP_BYTES:
                    self._append(hour, batches, count)
                    batches = []
                    count = size = 0
            if batches:
                self._append(hour, batches, count)

    def _append(self, hour: int, batches: list[bytes], count: int) -> None:
        known = self.written.get(hour) or self._hours.get(hour)
        segment = self._segment(hour, known)
        segment.append([NewGroup(GroupKind.DATA, batches, self._epoch, self._now_ms, 0, count)])
        self.written[hour] = HourFile(segment.end, known.rows + count, segment.crc32c, known.flags)
        self._dirty_bytes += segment.end - known.length
        if len(self._open) >= FILES_A_SYNC or self._dirty_bytes >= BYTES_A_SYNC:
            self._sync()
            self._rest()

    def _segment(self, hour: int, known: HourFile) -> Segment:
        path = schedule_path(self._folder, hour)
        if not known.length:
            if self._disk.exists(path):
                self._disk.remove(path)
            folder = path.rpartition("/")[0]
            self._disk.make_folder(folder)
            header = FileHeader(FileKind.SCHEDULE, self._log.place.log_id, 0, hour, self._now_ms)
            segment = Segment(self._disk, path, self._disk.open(path, write=True, create=True), header)
            self._open.append(segment)
            segment.file.pwritev([header.encode()], 0)
            return segment
        segment = open_segment(self._disk, path, FileKind.SCHEDULE, self._log.place.log_id, write=True)
        self._open.append(segment)
        cut_to_checkpoint(segment, known)
        return segment

    def _sync(self) -> None:
        """Make what was appended durable; no descriptor with unsynced writes is closed before (rule L4)."""
        if self._open and self._disk.reports_sync_errors:
            self._disk.sync_filesystem(self._folder)
        for segment in self._open:
            if not self._disk.reports_sync_errors:
                segment.file.sync()
                self._disk.sync_folder(segment.path.rpartition("/")[0])
            segment.close()
        self._open.clear()
        self._dirty_bytes = 0


def cut_to_checkpoint(segment: Segment, known: HourFile) -> None:
    """Cut a schedule log to what the checkpoint counts (rule P4); DamagedData when it is shorter."""
    size = segment.file.size()
    valid = FILE_HEADER_BYTES + known.length
    if size < valid:
        raise DamagedData(segment.path, size, f"the file ends {valid - size} bytes before its checkpointed length")
    if size > valid:
        segment.file.truncate(valid)
    segment.end = segment.durable = known.length
    segment.crc32c = known.last_crc32c


def _windows(groups: Iterator[Group]) -> Iterator[list[Group]]:
    window: list[Group] = []
    size = 0
    for group in groups:
        if group.header.kind != GroupKind.DATA:
            continue
        if window and size + group.header.total_bytes > WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(group)
        size += group.header.total_bytes
    if window:
        yield window


def _stored(window: list[Group]) -> list[Stored]:
    stored: list[Stored] = []
    for group in window:
        sequence = group.header.base_sequence
        for offset, batch in group.batches():
            stored.append(Stored(offset, sequence, batch))
            sequence += batch.count
    return stored


def _words(window: list[Group], stored: list[Stored]) -> tuple[NDArray[np.uint64], Int64s]:
    """The window's bytes as words, and where the heap of each batch begins in them, in bytes."""
    sizes = [group.header.total_bytes for group in window]
    words = np.empty(sum(sizes) >> 3, np.uint64)
    heaps: list[int] = []
    at, index = 0, 0
    for group, size in zip(window, sizes, strict=True):
        words[at >> 3 : (at + size) >> 3] = np.frombuffer(group.buffer, np.uint64)
        for entry in stored[index : index + group.header.batch_count]:
            heaps.append(at + entry.offset - group.header.offset + entry.batch.heap_offset)
        index += group.header.batch_count
        at += size
    return words, np.array(heaps, np.int64)


def _in_order(
    words: NDArray[np.uint64], base: Int64s, starts: Int64s, lengths: Int64s, order: NDArray[np.intp]
) -> tuple[NDArray[np.uint64], Int64s]:
    """Copy items into ``order``: their words, and the word behind each."""
    first = ((base + starts) >> 3).take(order)
    count = ((lengths + 7) >> 3).take(order)
    return copy_words(words, first, count), np.cumsum(count)


def _slice(items: tuple[NDArray[np.uint64], Int64s], low: int, high: int) -> memoryview:
    words, ends = items
    return words[(ends[low - 1] if low else 0) : ends[high - 1]].data.cast("B")


def _cuts(hours: NDArray[np.uint32], word_ends: Int64s) -> list[int]:
    """Where batches begin: at each new hour, and within one where a batch has its rows or bytes."""
    bounds = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(hours)]
    cuts: list[int] = []
    for low, high in pairwise(bounds):
        while low < high:
            cuts.append(low)
            begin = int(word_ends[low - 1]) if low else 0
            fits = int(np.searchsorted(word_ends[low : low + BATCH_ROWS], begin + (BATCH_BYTES >> 3), "right"))
            low = min(high, low + max(1, fits))
    return [*cuts, len(hours)]


def _accepted(window: list[Group], table: Table) -> Int64s:
    per_batch = [group.header.appended_at_ms for group in window for _ in range(group.header.batch_count)]
    return np.array(per_batch, np.int64).take(table.batch_of)
