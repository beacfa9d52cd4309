"""What bugs are made of that stand at a port: a disk that leaves out syncs, a clock that lies, a state that forgets.

Invariant: only fakes are changed, so a bug fits whatever stands behind the port. A bug at a disk or a state is what a
server that leaves the call out would see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from delayd.errors import SyncFailed
from delayd.machine.disk import Buffer
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk, MemoryFile
from delayd.testing.state import MemoryState
from delayd.wire.frame import Frame
from delayd.wire.requests import RequestType
from tests.worlds.patches import Patch
from tests.worlds.realtime_adapter import Peer, RealtimeAdapter

# The disk.


def unsynced(part: str) -> list[Patch]:
    """Syncs of files with this in their paths are counted, and do nothing."""

    def sync(self: MemoryFile) -> None:
        if part not in self._path:
            _sync(self)
        else:
            self._check(writing=False)
            self._disk.latch.check(self._path)
            self._disk.count_sync(f"sync {self._path}", self._path, self._inode)

    def close(self: MemoryFile) -> None:
        # The server believes that all is durable, so it closes no file too early.
        if part in self._path:
            self._closed = True
        _close(self)

    return [Patch(MemoryFile, "sync", sync), Patch(MemoryFile, "close", close)]


def unsynced_names(folder: str) -> list[Patch]:
    """Syncs of folders that end so are counted, and do nothing."""

    def sync_folder(self: MemoryDisk, path: str) -> None:
        if not path.endswith(folder):
            _sync_folder(self, path)
        else:
            self.before_each()
            self.check_alive()
            self.latch.check(path)
            self.count_sync(f"sync_folder {path}", path, None)

    return [Patch(MemoryDisk, "sync_folder", sync_folder)]


def _sync_no_file_system(self: MemoryDisk, path: str) -> None:
    self.before_each()
    self.check_alive()
    self.latch.check(path)
    self.count_sync(f"sync_filesystem {path}", path, None)


def _sync_and_never_mind(self: MemoryFile) -> None:
    try:
        _sync(self)
    except SyncFailed:
        """It is said to be done."""


def _note_what_is_new(self: MemoryFile, buffers: Sequence[Buffer], position: int) -> None:
    data = b"".join(memoryview(buffer).tobytes() for buffer in buffers)
    if data != self._inode.cached[position : position + len(data)]:
        vars(self)["wrote"] = True
    _pwritev(self, buffers, position)


def _sync_what_is_new(self: MemoryFile) -> None:
    """What an earlier life left in the page cache stays there."""
    if vars(self).pop("wrote", False):
        _sync(self)
    else:
        self._disk.count_sync(f"sync {self._path}", self._path, self._inode)


def _close_what_is_new(self: MemoryFile) -> None:
    if "wrote" not in vars(self):
        self._closed = True
    _close(self)


# The state.


def forgotten(*prefixes: bytes) -> Patch:
    """What is put under keys that begin so is gone, and so is what was there before."""

    def commit(self: MemoryState, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        pairs = dict(puts)
        gone = [key for key in pairs if key.startswith(prefixes)]
        _commit(self, [(key, value) for key, value in pairs.items() if key not in gone], [*removes, *gone])

    return Patch(MemoryState, "commit", commit)


def kept_as_first(*keys: bytes) -> Patch:
    """A second value of these keys does not take the place of the first one."""

    def commit(self: MemoryState, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        there = {key for key in keys if self.get(key) is not None}
        _commit(self, [(key, value) for key, value in puts if key not in there], removes)

    return Patch(MemoryState, "commit", commit)


# The clock.


def ahead(ms: int) -> Patch:
    """The clock is ahead."""

    def now_ms(self: SimClock) -> int:
        return _now_ms(self) + ms

    return Patch(SimClock, "now_ms", now_ms)


def _as_the_wall_has_it(self: SimClock) -> int:
    _now_ms(self)
    return self.machine.wall_ms


# The wire.


def at_arrival(change: Callable[[RealtimeAdapter, Frame], Frame]) -> Patch:
    """Requests of a realtime server are other ones when they arrive."""

    def received(self: RealtimeAdapter, peer: Peer, frame: Frame) -> None:
        _received(self, peer, change(self, frame))

    return Patch(RealtimeAdapter, "received", received)


def _meant_for_it(self: RealtimeAdapter, frame: Frame) -> Frame:
    if frame.type != RequestType.HELLO:
        return frame
    # The offset that a hello names would tell a part of them, so that goes too.
    return frame._replace(head=frame.head | {"target": self.log_id, "named_offset": 0})


_sync, _close, _pwritev = MemoryFile.sync, MemoryFile.close, MemoryFile.pwritev
_sync_folder, _commit = MemoryDisk.sync_folder, MemoryState.commit
_now_ms, _received = SimClock.now_ms, RealtimeAdapter.received

NO_CHECKPOINT_IS_SYNCED = [*unsynced("/schedule/"), Patch(MemoryDisk, "sync_filesystem", _sync_no_file_system)]
FAILED_SYNCS_COUNT = [Patch(MemoryFile, "sync", _sync_and_never_mind)]
FOUND_IS_NOT_SYNCED = [
    Patch(MemoryFile, "pwritev", _note_what_is_new),
    Patch(MemoryFile, "sync", _sync_what_is_new),
    Patch(MemoryFile, "close", _close_what_is_new),
]
JUMPS_ARE_BELIEVED = [Patch(SimClock, "now_ms", _as_the_wall_has_it)]
NOTHING_IS_DOUBTED = [Patch(SimClock, "confirmed", property(lambda self: True))]
STAMPS_ARE_NOT_JUDGED = [Patch(SimClock, "stamp_ms", SimClock.now_ms)]
HELLOS_ARE_FOR_ANYBODY = [at_arrival(_meant_for_it)]
