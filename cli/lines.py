"""Lines: what several processes write to one terminal or file, line by line.

Invariant: a line leaves in one write, whole and in the order in which it was given; and to give one never waits for a
reader that stands still.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

LINE_BYTES_MAX = 1 << 20  # A longer line is handed on in pieces, so that a process that writes none fills no memory.
CHUNK_BYTES = 1 << 16
WAITING_BYTES_MAX = 4 << 20  # What waits for a slow reader; then the processes that write wait as well.


class LineWriter:
    """Writes lines to a descriptor on a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._waiters: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"lines-{descriptor}", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Give a line, which ends with a line feed."""
        with self._changed:
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify()

    async def room(self) -> None:
        """Wait while as much waits for the reader as may."""
        while self._waiting_bytes > WAITING_BYTES_MAX:
            room = asyncio.Event()
            tell = partial(asyncio.get_running_loop().call_soon_threadsafe, room.set)
            with self._changed:
                if self._waiting_bytes > WAITING_BYTES_MAX:
                    self._waiters.append(tell)
                else:
                    room.set()
            await room.wait()

    def close(self, limit_s: float) -> None:
        """Write what is left, for as long as the reader takes it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line = self._lines.popleft()
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                # Nobody reads any more, or the disk under the file is full: what runs goes on without its lines.
                pass
            with self._changed:
                self._waiting_bytes -= len(line)
                waiters: list[Callable[[], object]] = []
                if self._waiting_bytes <= WAITING_BYTES_MAX:
                    waiters, self._waiters = self._waiters, waiters
            for tell in waiters:
                tell()


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each line of a stream, without its line feed; what it ends with counts as a line, too."""
    rest = b""
    while chunk := await stream.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_BYTES_MAX:
            yield rest
            rest = b""
    if rest:
        yield rest
