"""Lane: what the loop asks of a thread, and what has ended there; the thread may do system calls without the
interpreter's lock (docs/kernel.md).

Invariant: calls are done in the order in which they were added, and everything is told in the order in which it ended.
Behind calls that failed none is begun until the loop has heard of all that were added.

A call is a write at a position, an fdatasync, or the one behind the other. Its outcome is a number:

    0            both are done
    errno        the write failed, or was not begun (ECANCELED): some bytes may be written, and nothing is synced
    - errno      all is written, and the fdatasync failed
"""

from __future__ import annotations

import errno
import os
from _queue import SimpleQueue  # As in `delayd.machine.executor`.
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from delayd.kernel import choose

if TYPE_CHECKING:
    from delayd.machine.disk import Buffer

Ended = Callable[[], object]
"""What `Lane.end` was given."""

BUFFERS_MAX = 1024  # IOV_MAX of Linux: more buffers in one pwritev are refused.


class Call(NamedTuple):
    """System calls on a descriptor that stays open until they have ended: a write of all buffers, and a sync or not.

    ``sync`` is called on the thread with the errno of a sync that failed; None: nothing is synced.
    """

    descriptor: int
    buffers: list[Buffer]
    position: int
    sync: Callable[[int], object] | None


class Lane:
    """The twin of the compiled lane, which holds the interpreter's lock between its calls.

    `wait` belongs to the thread, `end` to whoever does a job there, and everything else to the loop.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Call | None] = SimpleQueue()
        self._ended: deque[int | Ended] = deque()
        self._calls = 0  # Calls that were added, and whose outcome the loop has not heard.
        self._failed = False
        self._stopped = False
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """A descriptor that is readable while something has ended."""
        return self._event

    def add(self, descriptor: int, buffers: list[Buffer], position: int, sync: Callable[[int], object] | None) -> None:
        """Queue a `Call`; the buffers must not change until it has ended."""
        self._calls += 1
        self._asked.put(Call(descriptor, buffers, position, sync))

    def signal(self) -> None:
        """Have one `wait` return."""
        self._asked.put(None)

    def stop(self) -> None:
        """Have `wait` return once the call under way has ended; no other call is begun."""
        self._stopped = True
        self._asked.put(None)

    def wait(self) -> bool:
        """Do calls until there is a signal; False: the lane was stopped."""
        while True:
            call = self._asked.get()
            if self._stopped:
                return False
            if call is None:
                return True
            outcome = errno.ECANCELED if self._failed else _outcome(call)
            self._failed |= outcome != 0
            self._tell(outcome)

    def end(self, ended: Ended) -> None:
        """Hand something to the loop, on the thread."""
        self._tell(ended)

    def ended(self) -> list[int | Ended]:
        """Take what has ended: the outcome of each call, and what `end` was given."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass  # The event came, and what it told of was taken before.
        taken = [self._ended.popleft() for _ in range(len(self._ended))]
        self._calls -= sum([isinstance(each, int) for each in taken])
        if not self._calls:
            self._failed = False
        return taken

    def close(self) -> None:
        """Give the descriptor back; the thread has ended."""
        if self._event >= 0:
            os.close(self._event)
        self._event = -1

    def _tell(self, ended: int | Ended) -> None:
        self._ended.append(ended)
        os.eventfd_write(self._event, 1)


def write_all(descriptor: int, buffers: Sequence[Buffer], position: int) -> None:
    """Write all buffers one after the other, also if the system takes only some bytes at a time; raises OSError."""
    for start in range(0, len(buffers), BUFFERS_MAX):
        part = buffers[start : start + BUFFERS_MAX]
        total = sum([_size(buffer) for buffer in part])
        written = 0
        while written < total:
            count = os.pwritev(descriptor, _rest(part, written) if written else part, position + written)
            if count == 0:
                raise OSError(errno.EIO, "a write made no progress")
            written += count
        position += total


def _outcome(call: Call) -> int:
    try:
        write_all(call.descriptor, call.buffers, call.position)
    except OSError as error:
        return error.errno or errno.EIO
    if call.sync is not None:
        try:
            os.fdatasync(call.descriptor)
        except OSError as error:
            # No other sync counts from now on, whenever the loop hears of this one.
            number = error.errno or errno.EIO
            call.sync(number)
            return -number
    return 0


def _size(buffer: Buffer) -> int:
    # The length of a view counts items, not bytes; for plain bytes making a view would cost more than asking their
    # length.
    return len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes


def _rest(buffers: Sequence[Buffer], skip: int) -> list[Buffer]:
    rest: list[Buffer] = []
    for buffer in buffers:
        size = _size(buffer)
        if skip < size:
            # Copied, because a view of wider items can't be cut at any byte; a partial write is rare.
            rest.append(memoryview(buffer).tobytes()[skip:] if skip else buffer)
        skip = max(0, skip - size)
    return rest


lane = choose("lane", Lane)
"""Makes a lane; both have the methods of `Lane`."""
