"""The pull log's writer: the loop appends, and only the fsync runs beside it.

An entry is in the file before the answer that it allows leaves, and no pull waits for a disk: an append of some hundred
bytes goes to the page cache, even while an fsync for acknowledgements is under way on the executor. A caller that needs
an entry to be durable waits for an fsync that began after its append (rule Q1).
"""

from collections.abc import Callable, Sequence

from delayd.clock import Clock
from delayd.errors import DataError, DiskFull, DiskReserve, ServerStopped
from delayd.executor import Done, Executor
from delayd.log.control import Known, encode_known
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log
from delayd.log.pull import PullEntry, encode_entries


class PullCommit:
    """Appends entries and tells when they are durable; belongs to the loop."""

    def __init__(self, executor: Executor, clock: Clock, epoch: int) -> None:
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self._opened: Log | None = None
        self._executor = executor
        self._clock = clock
        self._epoch = epoch
        self._appended_at_ms = 0
        self._waiting: list[Callable[[], None]] = []
        self._under_way: list[Callable[[], None]] | None = None

    def begin(self, pull_log: Log, appended_at_ms: int) -> None:
        """Append to this log from now on; ``appended_at_ms`` is the latest stamp in it."""
        self._opened, self._appended_at_ms = pull_log, appended_at_ms

    @property
    def _log(self) -> Log:
        assert self._opened is not None, "nothing is pulled before the pull log was read"
        return self._opened

    @property
    def end(self) -> int:
        """Offset where the next entry goes."""
        return self._log.end

    @property
    def crc32c(self) -> int:
        """The checksum of the last group."""
        return self._log.crc32c

    def append(self, entries: Sequence[PullEntry]) -> None:
        """Write entries, not durable yet.

        Raises:
            DiskReserve: the disk is full; nothing was written.
        """
        self._append(GroupKind.DATA, encode_entries(entries), len(entries))

    def append_record(self, *records: Known) -> None:
        """Write control records, not durable yet, all of them or none; raises as `append` does."""
        self._append(GroupKind.CONTROL, [encode_known(records)], 0)

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call back when everything that was appended up to now is fsynced."""
        self._waiting.append(callback)
        self._sync()

    def _append(self, kind: GroupKind, batches: Sequence[bytes], rows: int) -> None:
        self._appended_at_ms = max(self._clock.stamp_ms(), self._appended_at_ms)
        group = NewGroup(kind, batches, self._epoch, self._appended_at_ms, 0, rows)
        try:
            self._log.append([group], self._appended_at_ms)
        except DiskFull as error:
            raise DiskReserve(f"the pull log can't grow: {error.message}") from error
        except (OSError, DataError) as error:
            raise ServerStopped(f"the pull log can't be written ({error}); check the disk, then restart") from error

    def _sync(self) -> None:
        if self._under_way is None and self._waiting:
            self._under_way, self._waiting = self._waiting, []
            self._executor.submit(self._log.flush, self._synced)

    def _synced(self, done: Done[None]) -> None:
        try:
            done.result()
        except ServerStopped as error:
            self.on_failure(error)
            return
        callbacks, self._under_way = self._under_way or [], None
        self._sync()
        for callback in callbacks:
            callback()
