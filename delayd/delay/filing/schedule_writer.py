"""Schedule writer: a range of the message log, filed into the schedule logs of its hours.

It only appends. Until a checkpoint counts the rows that it wrote, no reader takes them, and the next writer cuts them
off (rule P4). Runs on the worker thread, in calls that release the GIL or are short.
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, Int64s, SchedulePart
from delayd.batch.content import NOT_STATED, UInt64s, hash_items, subject_states
from delayd.batch.gather import Composed, Gathered, compose
from delayd.delay.filing.hour_table import FiledHours, HourFile, HourTable
from delayd.delay.filing.log_range import HandedOver, LogRange, Rising
from delayd.errors import DamagedData, DiskFull, NotWritable, Shortage, Unreadable
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import hour_flags, open_schedule_log, schedule_beside_path, schedule_path
from delayd.log.log import Log
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment
from delayd.machine.disk import File
from delayd.machine.executor import Abandoned
from delayd.machine.identity import Site
from delayd.machine.open_files import UNSYNCED_FILES_MAX, unsynced_files_max

PART_BYTES = 512 << 20  # Rows in memory at a time; the message log is read once more for each such part.
# To read one row, its whole batch is read and verified; from this size on a batch is also decoded efficiently.
BATCH_ROWS = 8_000
BATCH_BYTES = 1 << 20
GROUP_BYTES = 32 << 20  # A group ends behind the batch that reaches this size; the format's limit is twice as much.
# One syncfs makes this many files durable, fewer where the process may have fewer files open.
FILES_A_SYNC = UNSYNCED_FILES_MAX
BYTES_A_SYNC = 32 << 20


class ScheduleWriter:
    """Writes one checkpoint's rows; used once."""

    def __init__(
        self,
        site: Site,
        log: Log,
        filed: FiledHours,
        now_ms: int,
        rest: Callable[[], None],
        damaged: Iterable[int] = (),
    ) -> None:
        self._disk = site.disk
        self._folder = site.folder
        self._log = log
        self._epoch = site.epoch
        self._hours = filed.hours
        self._beside = filed.beside
        self._now_ms = now_ms
        self._rest = rest  # Called where nothing is unsynced: leaves the disk to others for a moment.
        self._give_way = site.worker.give_way  # Called between pieces, so that more urgent jobs can run.
        self._open: list[Segment] = []
        self._files_max = unsynced_files_max()
        self._dirty_bytes = 0
        self._made = ""  # The day's folder in which the last file was created; hours come in order.
        # Hours whose schedule log can't be appended to: their rows go to the file beside it.
        self._damaged = set(damaged)
        self.damage: dict[int, DamagedData] = {}  # By hour, of schedule logs that were found damaged.
        self.written = HourTable()
        self.written_beside = HourTable()

    def write(self, start: int, stop: int, previous_crc32c: int, rows: int, handed_over: HandedOver) -> None:
        """File the message log's range ``start`` to ``stop``, which has ``rows`` rows; durable on return.

        The body and headers of rows among ``handed_over``, which is by rising sequence, are left out.

        Raises:
            DiskFull, Shortage, Abandoned: some hours were written; nothing counts them.
            DamagedData: a group of the message log does not check.
        """
        if not rows:
            return
        try:
            source = LogRange(self._log, start, stop, previous_crc32c, rows, self._give_way)
            source.leave_out(*handed_over)
            for part in _parts(source):
                self._write_part(source, part, (start, stop))
        except (DiskFull, DamagedData, Shortage):
            # Otherwise each try would leave its files open.
            self._sync()
            raise
        except Abandoned:
            # This process writes nothing to these files any more, so no later sync could hide that one of this failed.
            self._close()
            raise
        self._sync()

    def _write_part(self, source: LogRange, part: Rising, source_range: tuple[int, int]) -> None:
        rows = _FilingOrder(source, part, self._give_way)
        pieces = ((int(rows.hours[low]), low, high) for low, high in pairwise(rows.cuts()))
        for hour, bounds in groupby(pieces, key=lambda piece: piece[0]):
            batches: list[Sequence[bytes]] = []
            count = size = flags = 0
            for _, low, high in bounds:
                flags |= rows.flags(low, high)
                made = rows.batch(low, high, SchedulePart(*source_range, hour))
                batches.append((made.front, made.heap))
                count += high - low
                size += len(made.front) + len(made.heap)
                if size >= GROUP_BYTES:
                    self._append(hour, batches, count, flags)
                    batches = []
                    count = size = 0
            if batches:
                self._append(hour, batches, count, flags)

    def _append(self, hour: int, batches: Sequence[Sequence[bytes]], count: int, flags: int) -> None:
        """Append ``count`` rows to an hour's file, which gets more flags; each batch comes in pieces, and no body is
        copied to join them.
        """
        segment, known, written = self._segment(hour)
        pieces, sizes = list(chain(*batches)), [sum(map(len, batch)) for batch in batches]
        segment.append([NewGroup(GroupKind.DATA, pieces, self._epoch, self._now_ms, 0, count, sizes)])
        written.set(hour, HourFile(segment.end, known.rows + count, segment.crc32c, known.flags | flags))
        self._dirty_bytes += segment.end - known.length
        self._give_way()
        if len(self._open) >= self._files_max or self._dirty_bytes >= BYTES_A_SYNC:
            self._sync()
            self._rest()

    def _segment(self, hour: int) -> tuple[Segment, HourFile, HourTable]:
        """The open file that takes an hour's rows; how much of it was known; and the table in which its new length is
        noted.
        """
        if hour not in self._damaged:
            known = (self.written if hour in self.written else self._hours).get(hour)
            try:
                return self._open_at(schedule_path(self._folder, hour), hour, known), known, self.written
            except DamagedData as error:
                # The checkpoint must pass these rows of the message log all the same, or one file would stop all
                # checkpoints.
                self.damage[hour] = error
                self._damaged.add(hour)
        known = (self.written_beside if hour in self.written_beside else self._beside).get(hour)
        segment = self._open_at(schedule_beside_path(self._folder, hour), hour, known)
        return segment, known, self.written_beside

    def _open_at(self, path: str, hour: int, known: HourFile) -> Segment:
        if not known.length:
            header = FileHeader(FileKind.SCHEDULE, self._log.place.log_id, 0, hour, self._now_ms)
            segment = Segment(self._disk, path, self._create(path), header, bare=True)
            self._open.append(segment)
            return segment
        try:
            segment = open_schedule_log(self._disk, path, self._log.place.log_id, hour, write=True)
        except NotWritable as error:
            raise Unreadable(path, 0, errno.EACCES) from error
        self._open.append(segment)
        cut_to_checkpoint(segment, known)
        return segment

    def _create(self, path: str) -> File:
        folder = path.rpartition("/")[0]
        if folder != self._made:
            # Nothing counts the folder before `_sync`, and a sync of the file system covers it. Two years have 730
            # of them, and on a busy disk a sync of its own for each takes longer than all the rows.
            self._disk.make_folder(folder, durable=not self._disk.reports_sync_errors)
            self._made = folder
            self._give_way()
        try:
            return self._disk.open(path, write=True, create=True)
        except FileExistsError:
            # A checkpoint that did not finish left the file. To look first would cost a call for each of 17,568 files.
            self._disk.remove(path)
            return self._disk.open(path, write=True, create=True)

    def _sync(self) -> None:
        """Make appended rows durable; no descriptor with unsynced writes is closed before that (rule L4)."""
        if self._open and self._disk.reports_sync_errors:
            self._disk.sync_filesystem(self._folder)
        for segment in self._open:
            if not self._disk.reports_sync_errors:
                segment.file.sync()
                self._disk.sync_folder(segment.path.rpartition("/")[0])
        self._close()

    def _close(self) -> None:
        for segment in self._open:
            segment.close()
        self._open.clear()
        self._dirty_bytes = 0


class _FilingOrder:
    """The rows of a part as they are filed: columns and regions in filing order, cut into batches."""

    def __init__(self, source: LogRange, part: Rising, give_way: Callable[[], None]) -> None:
        # Each of these calls goes over all rows of the part.
        order = source.filing_order(part)
        give_way()
        self._regions = source.copy(part, order)
        chosen = part.take(order)
        self.hours = source.hours.take(chosen)
        self._deliver_at_ms, self._sequences = source.deliver_at_ms.take(chosen), source.sequences.take(chosen)
        self._subject_of, self._accepted_at_ms = source.subject_of.take(chosen), source.accepted_at_ms.take(chosen)
        self._left_out = None if source.left_out is None else source.left_out.take(chosen)
        self._known = None if source.hashes is None else source.hashes.take(chosen)
        self._kept = {column: values.take(chosen) for column, values in source.kept.items()}
        self._names, self._states = source.names, subject_states(source.names)

    def cuts(self) -> list[int]:
        """Where batches begin, and the end of the last one."""
        return _cuts(self.hours, np.sum([items.ends for items in self._regions.values()], axis=0))

    def batch(self, low: int, high: int, part: SchedulePart) -> Composed:
        """The batch of the rows from ``low`` to ``high``."""
        of = slice(low, high)
        used, subject_of = _subjects(self._subject_of[of])
        # A batch has the regions in which one of its own rows has an item.
        items = {
            column: copied.gathered(low, high)
            for column, copied in self._regions.items()
            if column == ColumnId.BODY_END or copied.any(low, high)
        }
        gathered = Gathered(self._deliver_at_ms[of], items)
        others: dict[ColumnId, ColumnArray] = {ColumnId.CONTENT_HASH: self._hashes(low, high, used)}
        if len(used) > 1:
            others[ColumnId.SUBJECT] = subject_of
        if bool((gathered.deliver_at_ms < self._accepted_at_ms[of]).any()):
            others[ColumnId.ACCEPTED_AT_MS] = self._accepted_at_ms[of]
        if self._left_out is not None and self._left_out[of].any():
            others[ColumnId.BODY_LEFT_OUT] = self._left_out[of]
        others |= {column: values[of] for column, values in self._kept.items() if values[of].any()}
        names = [self._names[number] for number in used]
        return compose(BatchKind.SCHEDULE, part, gathered, self._sequences[of], names, others)

    def flags(self, low: int, high: int) -> int:
        """What the rows from ``low`` to ``high`` make of the flags of their hour."""
        blooms = self._kept.get(ColumnId.TAG_BLOOM)
        return 0 if blooms is None else hour_flags(blooms[low:high].astype(np.uint64, copy=False))

    def _hashes(self, low: int, high: int, used: list[int]) -> UInt64s:
        """The content hash of each row: the one that its outcome states, or one that is made from its bytes."""
        headers, of = self._regions.get(ColumnId.HEADERS_END), slice(low, high)
        made = hash_items(
            int(self._states[used[0]]) if len(used) == 1 else self._states.take(self._subject_of[of]),
            None if headers is None else headers.hashed(low, high),
            self._regions[ColumnId.BODY_END].hashed(low, high),
        )
        return made if self._known is None else np.where(self._known[of] == NOT_STATED, made, self._known[of])


def cut_to_checkpoint(segment: Segment, known: HourFile) -> None:
    """Cut a schedule log to the length that the checkpoint counts (rule P4); DamagedData when it is shorter."""
    size = segment.file.size()
    valid = FILE_HEADER_BYTES + known.length
    if size < valid:
        raise DamagedData(segment.path, size, f"the file ends {valid - size} bytes before its checkpointed length")
    if size > valid:
        segment.file.truncate(valid)
    segment.end = segment.durable = known.length
    segment.crc32c = known.last_crc32c


def _parts(source: LogRange) -> list[Rising]:
    """Numbers of rows, rising, that are written together: rows of neighbouring hours, whole hours where they fit."""
    hours, size_bytes = source.hours, source.size_bytes()
    base = int(hours.min())
    ends = np.cumsum(np.bincount(hours - np.uint32(base), weights=size_bytes))
    parts: list[Rising] = []
    low = 0
    while low < len(ends):
        before = float(ends[low - 1]) if low else 0.0
        high = max(low + 1, int(np.searchsorted(ends, before + PART_BYTES, "right")))
        chosen = np.flatnonzero((hours >= base + low) & (hours < base + high))
        if ends[high - 1] - before > PART_BYTES:
            # One hour is larger than a part: it is cut where its filing order reaches the size, because that order must
            # hold across the parts.
            ordered = chosen.take(source.filing_order(chosen))
            number = (np.cumsum(size_bytes.take(ordered)) - 1) // PART_BYTES
            cuts = np.flatnonzero(number[1:] != number[:-1]) + 1
            parts.extend(np.sort(piece) for piece in np.split(ordered, cuts))
        elif len(chosen):
            parts.append(chosen)
        low = high
    return parts


def _subjects(numbers: NDArray[np.uint32]) -> tuple[list[int], NDArray[np.uint32]]:
    """The subjects of a batch, and for each row the place of its subject among them."""
    if bool((numbers == numbers[0]).all()):
        return [int(numbers[0])], np.zeros(len(numbers), np.uint32)
    used, subject_of = np.unique(numbers, return_inverse=True)
    return used.tolist(), subject_of.astype(np.uint32)


def _cuts(hours: NDArray[np.uint32], word_ends: Int64s) -> list[int]:
    """Where batches begin: at each new hour, and within an hour wherever a batch has enough rows or bytes.

    An example: of 20,000 small rows the first 18,000 are of one hour. Batches begin at the rows 0, 8,000, 16,000 and
    18,000, and the last one ends at 20,000.
    """
    bounds = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(hours)]
    cuts: list[int] = []
    for low, high in pairwise(bounds):
        while low < high:
            cuts.append(low)
            begin = int(word_ends[low - 1]) if low else 0
            fits = int(np.searchsorted(word_ends[low : low + BATCH_ROWS], begin + (BATCH_BYTES >> 3), "right"))
            low = min(high, low + max(1, fits))
    return [*cuts, len(hours)]
