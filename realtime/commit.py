"""The writers of the message log and of the pull log, as `delayd.log.committer` explains.

The message log has two ends (rule L2). Consumers are offered what is written; whatever is told as done waits until both
logs are durable up to what is written. After a failed append to the message log no frame is refused by name (rule H6):
on a full disk the append is tried again, and any other failure stops the server.

An entry of the pull log is in the file before the answer that it allows leaves, and no pull waits for a disk: an append
of some hundred bytes goes to the page cache, even while an fsync for acknowledgements is under way on the executor. A
caller that needs an entry to be durable waits for an fsync that began after its append (rule Q1), and for the message
log. Each group of the pull log names how far the message log was durable by then, so that a start can tell a torn tail
from a lost one.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from delayd.batch.batch import Batch
from delayd.batch.columns import DispatchPart, padded
from delayd.errors import DataError, DiskFull, DiskReserve, ServerStopped
from delayd.log.committer import Committer
from delayd.log.control import HelloHeard, Known, encode_known
from delayd.log.group import BATCHES_MAX, GroupKind, NewGroup, content_position
from delayd.log.log import Log, LogWrite, Written
from delayd.log.pull import PullEntry, encode_entries
from delayd.machine.alarms import FULL_AGAIN_MS, Alarms
from delayd.machine.clock import Clock
from delayd.machine.executor import Executor

from .handoff import Hello, Origin, Peer

if TYPE_CHECKING:
    from .recovery import Recovered

COMMIT_BYTES = 32 << 20  # Above this a commit takes no further frame, so that the first one does not wait too long.
GROUP_BYTES = 64 << 20  # Bytes of the batches in one group; its header and table fit the rest of the limit.

log = logging.getLogger(__name__)


class DispatchFrame(NamedTuple):
    """One frame of a delay server: batches that are taken together."""

    peer: Peer
    request_id: int
    origin: Origin
    batches: list[Batch]
    parts: list[DispatchPart]
    size_bytes: int


class Greeting(NamedTuple):
    """A hello whose record is to become durable behind everything before it."""

    peer: Peer
    request_id: int
    origin: Origin
    hello: Hello


class Note(NamedTuple):
    """An operator's decision about a delay server; its record is to become durable behind everything before it."""

    origin: Origin
    record: Known
    durable: Callable[[], None]


class Landed(NamedTuple):
    """A frame with the offsets of its batches, and of the groups that they are in."""

    frame: DispatchFrame
    offsets: list[int]
    group_offsets: list[int]


@dataclass(slots=True)
class Commit:
    """One append and its fsync; ``end`` and ``crc32c`` are those of the log behind it, once it is written."""

    greetings: list[Greeting]
    frames: list[DispatchFrame]
    groups: list[NewGroup]
    members: list[list[Batch]]  # Batches of each data group.
    appended_at_ms: int
    next_sequence: int
    notes: list[Note] = field(default_factory=list)
    landed: list[Landed] = field(default_factory=list)
    end: int = 0
    crc32c: int = 0


class GroupCommit(Committer[Commit, Written]):
    """The one writer of the message log; belongs to the loop. ``end`` is the written end, as far as the loop knows it,
    and ``durable`` the durable one. With ``ahead`` a commit is told as written before its fsync, else behind it.
    """

    def __init__(self, recovered: "Recovered", executor: Executor, alarms: Alarms, *, ahead: bool) -> None:
        message_log = recovered.message_log
        super().__init__("message log", executor, alarms.clock)
        self._again = alarms.alarm(self.retry)
        self.on_written: Callable[[Commit], None] = lambda commit: None
        self.on_durable: Callable[[Commit], None] = lambda commit: None
        self._ahead = ahead
        self.end = self.durable = message_log.end
        self._log, self._epoch = message_log, recovered.identity.epoch
        self._next_sequence, self._appended_at_ms = recovered.next_sequence, recovered.appended_at_ms
        self._queue: deque[DispatchFrame | Greeting | Note] = deque()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()  # By the end that is to be durable.

    @property
    def settled(self) -> bool:
        """Whether nothing more becomes durable without another try; frames that wait for space were never
        acknowledged.
        """
        return self._again.at_ms is not None or (self.idle and not self._queue)

    @property
    def queued_bytes(self) -> int:
        """Bytes of frames that wait for the disk."""
        return sum(item.size_bytes for item in self._queue if isinstance(item, DispatchFrame))

    def put(self, item: DispatchFrame | Greeting | Note) -> None:
        """Queue something that is to become durable."""
        self._queue.append(item)
        self.commit()

    def when_durable(self, end: int, callback: Callable[[], None]) -> None:
        """Call back when the log is durable up to an end that is written; ends never fall from call to call."""
        if end <= self.durable:
            callback()
        else:
            self._waiting.append((end, callback))

    def drop(self, origin: Origin) -> list[DispatchFrame | Greeting]:
        """Take a delay server's queued frames and greetings out; they will never be appended. The commit under way is
        finished.
        """
        dropped = [item for item in self._queue if item.origin is origin and not isinstance(item, Note)]
        self._queue = deque(item for item in self._queue if item.origin is not origin or isinstance(item, Note))
        return dropped

    def _close(self) -> Commit | None:
        greetings: list[Greeting] = []
        frames: list[DispatchFrame] = []
        notes: list[Note] = []
        records: list[Known] = []
        size = 0
        while self._queue and size < COMMIT_BYTES:
            item = self._queue.popleft()
            if isinstance(item, Greeting):
                greetings.append(item)
                records.append(_record(item.hello))
            elif isinstance(item, Note):
                notes.append(item)
                records.append(item.record)
            else:
                frames.append(item)
                size += item.size_bytes
        if self._queue:
            self.commit()
        if not (records or frames):
            return None  # What had come was dropped.
        self._appended_at_ms = max(self._clock.stamp_ms(), self._appended_at_ms)
        groups: list[NewGroup] = []
        if records:
            batch = encode_known(records)
            groups.append(NewGroup(GroupKind.CONTROL, [batch], self._epoch, self._appended_at_ms))
        members = _split(frames)
        for batches in members:
            rows = sum([batch.count for batch in batches])
            buffers = [batch.buffer for batch in batches]
            stamp = (self._epoch, self._appended_at_ms, self._next_sequence, rows)
            groups.append(NewGroup(GroupKind.DATA, buffers, *stamp))
            self._next_sequence += rows
        stamps = (self._appended_at_ms, self._next_sequence)
        return Commit(greetings, frames, groups, members, *stamps, notes)

    def _jobs(self, group: Commit) -> tuple[LogWrite, LogWrite]:
        write = LogWrite(self._log, group.groups, group.appended_at_ms, sync=False)
        return write, LogWrite(self._log, (), group.appended_at_ms, sync=True, behind=write)

    def _no_space(self, group: Commit, error: DiskFull) -> Commit:
        # The frames wait, neither taken nor refused.
        if not self._full:
            log.warning("message_log_full reason=%r retry_ms=%d", error.message, FULL_AGAIN_MS)
        self._again.after(FULL_AGAIN_MS)
        return group

    def _written(self, group: Commit, written: Written) -> None:
        group.end, group.crc32c = written.end, written.crc32c
        group.landed = _landed(group, written.offsets)
        if self._ahead:
            self._tell_written(group)

    def _tell_written(self, group: Commit) -> None:
        self.end = group.end
        self.on_written(group)

    def _durable(self, group: Commit, written: Written) -> None:
        if not self._ahead:
            self._tell_written(group)
        self.durable = group.end
        self.on_durable(group)
        while self._waiting and self._waiting[0][0] <= self.durable:
            self._waiting.popleft()[1]()


class PullCommit(Committer[list[tuple[int, Callable[[], None]]], Written]):
    """The one writer of the pull log; belongs to the loop, which appends: only the fsync runs beside it."""

    def __init__(self, executor: Executor, clock: Clock, epoch: int, messages: GroupCommit) -> None:
        super().__init__("pull log", executor, clock)
        self._messages = messages
        self._log: Log  # Nothing is pulled before `begin`.
        self._epoch = epoch
        self._appended_at_ms = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # With the end that the message log had.

    def begin(self, pull_log: Log, appended_at_ms: int) -> None:
        """Append to this log from now on; ``appended_at_ms`` is the latest stamp in it."""
        self._log, self._appended_at_ms = pull_log, appended_at_ms

    @property
    def end(self) -> int:
        """Offset where the next entry goes."""
        return self._log.end

    @property
    def crc32c(self) -> int:
        """The checksum of the last group."""
        return self._log.crc32c

    def append(self, entries: Sequence[PullEntry], records: Sequence[Known] = ()) -> None:
        """Write entries or control records, not durable yet, all of them or none.

        Raises:
            DiskReserve: the disk is full; nothing was written.
        """
        self._appended_at_ms = max(self._clock.stamp_ms(), self._appended_at_ms)
        kind = GroupKind.CONTROL if records else GroupKind.DATA
        batches = [encode_known(records)] if records else encode_entries(entries)
        stamps = (self._epoch, self._appended_at_ms, self._messages.durable)
        group = NewGroup(kind, batches, *stamps, len(entries))
        try:
            self._log.append([group], self._appended_at_ms)
        except DiskFull as error:
            raise DiskReserve(f"the pull log can't grow: {error.message}") from error
        except (OSError, DataError) as error:
            raise ServerStopped(f"the pull log can't be written ({error}); check the disk, then restart") from error

    def append_record(self, *records: Known) -> None:
        """Write control records; as `append` does."""
        self.append((), records)

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call back when everything that was appended up to now is fsynced, here and in the message log (rule L2)."""
        self._waiting.append((self._messages.end, callback))
        self.commit()

    def _close(self) -> list[tuple[int, Callable[[], None]]] | None:
        waiting, self._waiting = self._waiting, []
        return waiting or None

    def _jobs(self, group: list[tuple[int, Callable[[], None]]]) -> tuple[LogWrite, None]:
        return LogWrite(self._log, (), self._appended_at_ms, sync=True), None

    def _durable(self, group: list[tuple[int, Callable[[], None]]], written: Written) -> None:
        for end, callback in group:
            self._messages.when_durable(end, callback)


def hello_of_record(record: HelloHeard) -> Hello:
    """The hello that a control record notes."""
    return Hello(record.log_id, record.epoch, record.instance, record.session, (record.w[0], record.w[1]))


def _record(hello: Hello) -> HelloHeard:
    return HelloHeard(hello.log_id, hello.epoch, hello.instance, hello.session, list(hello.w))


def _split(frames: Sequence[DispatchFrame]) -> list[list[Batch]]:
    groups: list[list[Batch]] = []
    size = GROUP_BYTES
    for frame in frames:
        for batch in frame.batches:
            if size + batch.total_bytes > GROUP_BYTES or len(groups[-1]) == BATCHES_MAX:
                groups.append([])
                size = 0
            groups[-1].append(batch)
            size += batch.total_bytes
    return groups


def _landed(commit: Commit, offsets: Sequence[int]) -> list[Landed]:
    batch_offsets: list[int] = []
    group_offsets: list[int] = []
    for group_offset, batches in zip(offsets[len(offsets) - len(commit.members) :], commit.members, strict=True):
        offset = group_offset + content_position(len(batches))
        for batch in batches:
            batch_offsets.append(offset)
            group_offsets.append(group_offset)
            offset += padded(batch.total_bytes)
    landed: list[Landed] = []
    at = 0
    for frame in commit.frames:
        until = at + len(frame.batches)
        landed.append(Landed(frame, batch_offsets[at:until], group_offsets[at:until]))
        at = until
    return landed
