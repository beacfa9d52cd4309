"""Writer: the frames that one connection has written and not yet sent.

Invariant: frames leave in the order in which they were written, and a frame that is still here can be taken back. Small
ones of one turn of the loop leave in one write; while the transport is full they stay here instead of in its buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from delayd.batch.columns import Buffer

WRITE_BUFFER_BYTES_MAX = 1 << 20  # Enough to keep a socket busy for a turn of the loop; above it the peer is slow.
# Frames of this size are worth a system call: the peer begins with them while more are being made.
WRITE_NOW_BYTES = 64 << 10


class Writer:
    """Gathers the frames of one turn of the loop; used by one Connection."""

    __slots__ = ("_flush_due", "_loop", "_pending", "_pending_bytes", "_transport", "_waiting", "flushes", "writable")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.writable = True
        self.flushes = 0  # A frame written while this was n has been given to the socket when it is above n.
        self._loop = loop
        self._transport: asyncio.WriteTransport | None = None
        self._pending: list[list[Buffer]] = []
        self._pending_bytes = 0  # Bytes of the pending frames, including frames that were taken back.
        self._flush_due = False
        self._waiting: list[Callable[[], None]] = []

    @property
    def buffered_bytes(self) -> int:
        """Bytes written that have not left this process."""
        held = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return held + sum(len(piece) for pieces in self._pending for piece in pieces)

    @property
    def held_bytes(self) -> int:
        """As `buffered_bytes`, plus frames that were taken back since the last flush, but in constant time."""
        return self._pending_bytes + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def attach(self, transport: asyncio.WriteTransport) -> None:
        """Take the transport for the bytes."""
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._transport = transport

    def detach(self) -> None:
        """The transport is gone, and with it everything that was not sent."""
        self._transport = None
        self._pending.clear()
        self._waiting.clear()

    def write(self, pieces: list[Buffer], *, now: bool = False) -> None:
        """Send one frame at the end of this turn; emptying `pieces` before it left takes it back.

        With ``now`` it leaves at once, with all frames before it, because no further frame is expected in this turn.
        """
        self._pending.append(pieces)
        self._pending_bytes += sum(map(len, pieces))
        if self.writable and (now or self._pending_bytes > WRITE_NOW_BYTES):
            # The flush also lets the transport say in this very turn that it is full, before more requests are
            # answered.
            self.flush()
            return
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call back once: at the next turn of the loop, or when the peer takes bytes again; never after the end."""
        if self.writable:
            self._loop.call_soon(callback)
        else:
            self._waiting.append(callback)

    def pause(self) -> None:
        """The transport is full."""
        self.writable = False

    def resume(self) -> None:
        """The transport has room again."""
        self.writable = True
        self.flush()
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self._loop.call_soon(callback)

    def flush(self) -> None:
        """Give everything to the transport, full or not."""
        # A transport that is closing takes bytes and drops them; then nobody could say "nothing was sent" for sure.
        if self._transport is None or not self._pending or self._transport.is_closing():
            return
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self.flushes += 1
        self._transport.writelines([piece for pieces in pending for piece in pieces])

    def _flush(self) -> None:
        self._flush_due = False
        if self.writable:
            self.flush()
