"""Cut: fixes what a server's files hold at one moment, so that a backup copies a running server as a crash at that
moment would have left it (docs/backup.md).

A cut is taken on the loop, in one turn of it:

1. The checkpoint file is read. It is never ahead of the state: a server publishes it after the state's transaction.
2. A read transaction of the state begins, which sees this moment however long it is copied for (rule L6: only the
   server itself opens its state).
3. The sizes of the logs' files are noted. Logs only grow, so their first bytes stay as they are now.

Threads may write meanwhile; then a file is longer than the state knows, as after a crash. Nothing on the loop happens
between the three steps, so no outcome, answer or removal that follows from a later state is in the files.

Invariant: a cut belongs to the connection that asked for it, and its files and its hold end with that connection.

A `Hold` keeps what a delay server would tell other servers back meanwhile. Invariant: calls leave in their order, and
none is lost: they leave when the hold ends, by a word or by itself.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgpack
from crc32c import crc32c

from delayd.errors import DamagedData, DelaydError, NotReady, NotWritable
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.machine.disk import Disk
from delayd.machine.executor import Done, Executor
from delayd.machine.state import LMDB_FILE, StateCopy
from delayd.net.machine import WatchedState
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.heads import (
    need_instant,
    need_int,
    need_u64,
)
from delayd.wire.requests import RequestType

FOLDER = "backup"  # In a server's folder, while a backup copies it.
SIZES = "sizes"  # The sizes of the logs' files, as this module writes them.
# Logs whose files are copied up to the size of this moment. Schedule logs are copied up to what the state counts, and
# consume logs as they are: the state says how much of them is valid, and what is behind that is cut off at a start.
CUT_LOGS = ("message", "dispatch", "seal", "quarantine", "pull")
HOLD_MS_MAX = 5_000
BUSY_MS = 1_000  # When to ask again while another backup is copied.

log = logging.getLogger(__name__)


class CutPeer(Protocol):
    """The connection that asked."""

    def answer(self, request_id: int, head: Mapping[str, HeadValue]) -> None:
        """Answer a request."""

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """Answer a request with an error."""


@dataclass(slots=True)
class _Cut:
    number: int
    peer: CutPeer
    moment_ms: int  # When all servers of the cluster were cut; 0 when not all were.
    ready: bool = False
    failed: DelaydError | None = None
    waiting: list[tuple[CutPeer, int]] = field(default_factory=list)  # Requests that wait until the files are written.
    held: bool = True  # Whether the hold has never ended before it was asked to end.


class Cuts:
    """The cuts of one server; all methods belong to the loop's thread."""

    def __init__(
        self,
        folder: str,
        log_id: int,
        state: WatchedState,
        worker: Executor,
        hold: Callable[[int], None] = lambda hold_ms: None,
        release: Callable[[], bool] = lambda: True,
    ) -> None:
        """``hold`` keeps the server from sending anything to other servers for some ms; ``release`` ends that, and says
        whether it lasted until now.
        """
        self._folder = folder
        self._log_id = log_id
        self._state = state
        self._worker = worker
        self._hold = hold
        self._release = release
        self._cut: _Cut | None = None
        self._numbers = 0
        self._writing = False

    @property
    def handlers(self) -> dict[int, Callable[[CutPeer, Frame], None]]:
        """What serves CUT and CUT_READY; NotReady is raised while another backup is copied."""
        return {RequestType.CUT: self._take, RequestType.CUT_READY: self._tell}

    def disconnected(self, peer: CutPeer) -> None:
        """End the cut of a connection that has ended."""
        if self._cut is not None and self._cut.peer is peer:
            self._cut = None
            self._release()
            if not self._writing:
                self._worker.submit(self._remove, _done)

    def _take(self, peer: CutPeer, frame: Frame) -> None:
        hold_ms = need_int(frame.head, "hold_ms", 0, HOLD_MS_MAX)
        moment_ms = need_instant(frame.head, "moment_ms") if "moment_ms" in frame.head else 0
        if self._writing or (self._cut is not None and self._cut.peer is not peer):
            raise NotReady("another backup of this server is being copied", retry_after_ms=BUSY_MS)
        self._numbers += 1
        cut = self._cut = _Cut(self._numbers, peer, moment_ms)
        checkpoint = _bytes_of(f"{self._folder}/{CHECKPOINT}")
        copy = self._state.begin_copy()
        self._hold(hold_ms)
        sizes = sizes_of(self._folder)
        self._writing = True
        self._worker.submit(lambda: self._write(copy, checkpoint, sizes), lambda done: self._written(cut, done))
        peer.answer(
            frame.request_id,
            {"log_id": self._log_id, "cut": cut.number, "folder": os.path.abspath(self._folder)},
        )

    def _tell(self, peer: CutPeer, frame: Frame) -> None:
        number, cut = need_u64(frame.head, "cut"), self._cut
        if not number:
            if cut is None or not cut.moment_ms:
                raise NotReady("no `delayd cut` holds this server at a moment", retry_after_ms=BUSY_MS)
        elif cut is None or cut.peer is not peer or cut.number != number:
            raise NotReady(f"cut {number} has ended; begin the backup again", retry_after_ms=BUSY_MS)
        else:
            # The connection that asks has cut all other servers.
            cut.held = self._release() and cut.held
        cut.waiting.append((peer, frame.request_id))
        self._answer(cut)

    def _answer(self, cut: _Cut) -> None:
        if not cut.ready and cut.failed is None:
            return
        told: Head = {"log_id": self._log_id, "cut": cut.number, "held": cut.held, "moment_ms": cut.moment_ms}
        for peer, request_id in cut.waiting:
            if cut.failed is not None:
                peer.answer_error(request_id, cut.failed)
            else:
                peer.answer(request_id, told)
        cut.waiting = []

    def _written(self, cut: _Cut, done: Done[None]) -> None:
        self._writing = False
        try:
            done.result()
            cut.ready = True
        except DelaydError as error:
            log.warning("backup_not_prepared reason=%r", str(error))
            cut.failed = error
        if self._cut is cut:
            self._answer(cut)
        else:
            self._worker.submit(self._remove, _done)

    # In the worker's thread.

    def _write(self, copy: StateCopy, checkpoint: bytes, sizes: dict[str, int]) -> None:
        folder = f"{self._folder}/{FOLDER}"
        try:
            self._remove()
            os.mkdir(folder, 0o700)
            for name, data in ((CHECKPOINT, checkpoint), (SIZES, pack_sizes(sizes))):
                if not data:
                    continue  # Meta has no checkpoint file, nor has a server that was never checkpointed.
                with open(f"{folder}/{name}", "wb") as file:
                    file.write(data)
            copy.write(f"{folder}/{LMDB_FILE}")
        except OSError as error:
            raise NotWritable(folder, error.strerror or str(error)) from error
        finally:
            copy.close()

    def _remove(self) -> None:
        folder = f"{self._folder}/{FOLDER}"
        try:
            for name in os.listdir(folder):
                os.remove(f"{folder}/{name}")
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("backup_not_removed path=%s reason=%r", folder, error.strerror)


def remove_left(disk: Disk, folder: str) -> None:
    """Remove what a life that ended while it was cut has left in a server's folder."""
    left = f"{folder}/{FOLDER}"
    for name in disk.list_folder(left):
        disk.remove(f"{left}/{name}")
    if disk.exists(left):
        disk.remove(left)


def sizes_of(folder: str) -> dict[str, int]:
    """The files of the logs that a cut bounds, by path below the folder, and how long each is."""
    found: dict[str, int] = {}
    for name in CUT_LOGS:
        _add_sizes(folder, name, found)
    return found


def pack_sizes(sizes: Mapping[str, int]) -> bytes:
    """Encode sizes, with a checksum behind them."""
    data: bytes = msgpack.packb(dict(sizes))
    return data + crc32c(data).to_bytes(4, "little")


def read_sizes(path: str, data: bytes) -> dict[str, int]:
    """Decode sizes. Raises DamagedData when they do not check."""
    payload = data[:-4]
    sizes: object = None
    if len(data) > 4 and crc32c(payload).to_bytes(4, "little") == data[-4:]:
        sizes = msgpack.unpackb(payload)
    if not isinstance(sizes, dict):
        raise DamagedData(path, 0, "its checksum differs")
    return {str(name): int(size) for name, size in sizes.items()}


def _add_sizes(folder: str, inner: str, found: dict[str, int]) -> None:
    try:
        entries = list(os.scandir(f"{folder}/{inner}"))
    except FileNotFoundError:
        return
    for entry in entries:
        path = f"{inner}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            _add_sizes(folder, path, found)
        else:
            try:
                found[path] = entry.stat().st_size
            except FileNotFoundError:
                continue  # Retention has removed it in between.


def _bytes_of(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _done(done: Done[None]) -> None:
    done.result()


class PutOffCall(Protocol):
    """A call that was put off."""

    def cancel(self) -> None:
        """Do not call."""


class Hold:
    """One hold at a time; belongs to the loop. ``later`` calls back after some seconds."""

    def __init__(self, later: Callable[[float, Callable[[], None]], PutOffCall]) -> None:
        self.held = False  # Read for each frame that would leave.
        self._later = later
        self._timer: PutOffCall | None = None
        self._calls: deque[Callable[[], object]] = deque()

    def begin(self, hold_ms: int) -> None:
        """Hold calls for so long at most; 0 holds nothing. A hold that is under way lasts as long as the new one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if hold_ms:
            self.held = True
            self._timer = self._later(hold_ms / 1000, self._end)
        else:
            self._end()

    def end(self) -> bool:
        """Let everything leave; returns whether the hold had lasted until now."""
        lasted = self.held
        self._end()
        return lasted

    def leave(self, call: Callable[[], object]) -> None:
        """Call at once, or when the hold ends."""
        if self.held:
            self._calls.append(call)
        else:
            call()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # What a call has leave goes behind those that have waited.
        while self._calls:
            self._calls.popleft()()
        self.held = False
