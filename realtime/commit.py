"""Group commit of the message log: what arrives while the disk is busy becomes the next group.

One append and one fsync are under way at a time; durable groups are handed on in the order of the log. After a failed
append no frame is refused by name (rule H6): on a full disk the append is tried again, and any other failure stops the
server.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from delayd.batch import Batch, DispatchPart, padded
from delayd.clock import Clock
from delayd.errors import DataError, DiskFull, ServerStopped
from delayd.executor import Done, Executor
from delayd.log.control import HelloHeard, Known, encode_known
from delayd.log.group import BATCHES_MAX, GroupKind, NewGroup, content_position
from delayd.log.log import Log

from .handoff import Hello, Origin
from .peer import Peer

COMMIT_BYTES = 32 << 20  # Above this a commit takes no further frame, so that the first one does not wait too long.
GROUP_BYTES = 64 << 20  # Bytes of the batches in one group; its header and table fit the rest of the limit.
RETRY_MS = 1_000  # Pause between tries on a full disk.

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
    """One append and its fsync; ``end`` and ``crc32c`` are those of the log behind it."""

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


class Written(NamedTuple):
    """The result of the executor's work: offsets of the groups, and the end of the log behind them."""

    offsets: list[int]
    end: int
    crc32c: int


class GroupCommit:
    """The one writer of the message log; belongs to the loop."""

    def __init__(
        self,
        message_log: Log,
        executor: Executor,
        clock: Clock,
        epoch: int,
        next_sequence: int,
        appended_at_ms: int,
    ) -> None:
        self.on_commit: Callable[[Commit], None] = lambda commit: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.retry_at_ms: int | None = None
        self._full = False
        self._log = message_log
        self._executor = executor
        self._clock = clock
        self._epoch = epoch
        self._next_sequence = next_sequence
        self._appended_at_ms = appended_at_ms
        self._queue: deque[DispatchFrame | Greeting | Note] = deque()
        self._under_way: Commit | None = None
        self._done: deque[Commit] = deque()
        self._handing_on = False

    @property
    def settled(self) -> bool:
        """Whether nothing more becomes durable without another try; frames that wait for space were never
        acknowledged.
        """
        return self.retry_at_ms is not None or (self._under_way is None and not self._queue and not self._done)

    @property
    def queued_bytes(self) -> int:
        """Bytes of frames that wait for the disk."""
        return sum(item.size_bytes for item in self._queue if isinstance(item, DispatchFrame))

    def put(self, item: DispatchFrame | Greeting | Note) -> None:
        """Queue something that is to become durable."""
        self._queue.append(item)
        self._begin()

    def drop(self, origin: Origin) -> list[DispatchFrame | Greeting]:
        """Take a delay server's queued frames and greetings out; they will never be appended. The commit under way is
        finished.
        """
        dropped = [item for item in self._queue if item.origin is origin and not isinstance(item, Note)]
        self._queue = deque(item for item in self._queue if item.origin is not origin or isinstance(item, Note))
        return dropped

    def retry(self) -> None:
        """Try again the append that found the disk full."""
        self.retry_at_ms = None
        if self._under_way is not None:
            self._submit(self._under_way)

    def _begin(self) -> None:
        if self._under_way is not None or not self._queue:
            return
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
        self._appended_at_ms = max(self._clock.stamp_ms(), self._appended_at_ms)
        groups: list[NewGroup] = []
        if records:
            batch = encode_known(records)
            groups.append(NewGroup(GroupKind.CONTROL, [batch], self._epoch, self._appended_at_ms))
        members = _split(frames)
        for batches in members:
            rows = sum(batch.count for batch in batches)
            buffers = [batch.buffer for batch in batches]
            stamp = (self._epoch, self._appended_at_ms, self._next_sequence, rows)
            groups.append(NewGroup(GroupKind.DATA, buffers, *stamp))
            self._next_sequence += rows
        stamps = (self._appended_at_ms, self._next_sequence)
        self._under_way = Commit(greetings, frames, groups, members, *stamps, notes)
        self._submit(self._under_way)

    def _submit(self, commit: Commit) -> None:
        work = partial(_write, self._log, commit.groups, commit.appended_at_ms)
        self._executor.submit(work, partial(self._finished, commit))

    def _finished(self, commit: Commit, done: Done[Written]) -> None:
        try:
            written = done.result()
        except DiskFull as error:
            # Nothing of the commit is in the file, and it may still get there: the frames wait, neither taken nor
            # refused (rule L8).
            if not self._full:
                self._full = True
                log.warning("message_log_full reason=%r retry_ms=%d", error.message, RETRY_MS)
            self.retry_at_ms = self._clock.monotonic_ms() + RETRY_MS
            return
        except ServerStopped as error:
            self.on_failure(error)
            return
        except (OSError, DataError) as error:
            self.on_failure(ServerStopped(f"the message log can't be written ({error}); check the disk, then restart"))
            return
        self._under_way, self._full = None, False
        commit.end, commit.crc32c = written.end, written.crc32c
        commit.landed = _landed(commit, written.offsets)
        self._done.append(commit)
        # The disk gets the next commit before this one is answered; answers still keep the order of the log.
        self._begin()
        if not self._handing_on:
            self._handing_on = True
            while self._done:
                self.on_commit(self._done.popleft())
            self._handing_on = False


def hello_of_record(record: HelloHeard) -> Hello:
    """The hello that a control record notes."""
    return Hello(record.log_id, record.epoch, record.instance, record.session, (record.w[0], record.w[1]))


def _record(hello: Hello) -> HelloHeard:
    return HelloHeard(hello.log_id, hello.epoch, hello.instance, hello.session, list(hello.w))


def _write(message_log: Log, groups: Sequence[NewGroup], now_ms: int) -> Written:
    offsets = message_log.append(groups, now_ms)
    message_log.flush()
    return Written(offsets, message_log.end, message_log.crc32c)


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
