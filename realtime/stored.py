"""Stored batches by their offset in the message log: the newest from memory, the others by ``pread`` (rule L6).

Only durable batches are here, and each has the bytes that arrived, unchanged.
"""

from collections import OrderedDict, deque
from collections.abc import Container

from crc32c import crc32c

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BYTES_MAX, HEADER, HEADER_BYTES, MAGIC, PARTS, BatchKind, ColumnId, DispatchPart
from delayd.errors import BatchMalformed, DamagedData, DataError, NotReady, Shortage, Unreadable, read_error
from delayd.log.log import Log

AHEAD_BYTES = 64 << 10  # A backlog is read in pieces of this size.
AHEAD_BYTES_MIN = 4 << 10  # With fewer bytes than this ahead a batch is likely to be cut, so the log is read anew.
DISPATCH_PART = PARTS[BatchKind.DISPATCH][0]
READ_BATCHES = 16  # Read batches are kept, so that a large batch that goes out in parts is read once.


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
        """Keep a batch that has become durable, and let the oldest go."""
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
            # Behind the durable end bytes may still change; bytes that are kept here must not.
            size = min(AHEAD_BYTES, self._log.durable - offset)
            try:
                start, data = offset, memoryview(self._log.read_some(offset, size))
            except OSError:
                # A sector further on can't be read; this batch may lie before it, so it is read alone.
                return memoryview(b"")
            self._ahead = start, data
        return data[offset - start :]
