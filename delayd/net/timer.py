"""Times of the loop: a timer that fires within a fraction of a millisecond, and ticks that come together.

Invariant: a timer never fires early, and at most once for each time that it is set.

uvloop counts its own timers in whole milliseconds, which costs half of one on average; a timerfd wakes the loop when
the kernel's clock says so. The time is CLOCK_MONOTONIC: a step of the wall clock does not move it, and it stands still
while the machine is suspended, so a caller that waits for a wall time must cap the wait (rule T1).

Each wake-up of an idle process costs some 50 us, whatever it does then. So all that a process does again and again is
done at multiples of its period. With periods of 50, 100 and 1,000 ms the loop wakes up twenty times a second, and not
31 times.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
from collections.abc import Callable

DELAY_MS_MAX = 86_400_000.0  # A day; a later time must be set again, so that every field below stays in range.

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_LOOP_TICK_MS = 1  # uvloop counts a wait from the last whole millisecond, so a wait that is not longer may end early.
_COUNT_BYTES = 8  # A read of a timerfd returns this many bytes: how often it expired.


def next_tick_s(now_s: float, every_s: float) -> float:
    """The first multiple of a period after a time of the loop."""
    return (math.floor(now_s / every_s) + 1) * every_s


class Ticks:
    """Calls `callback` on the loop at each multiple of ``every_s``, by the loop's clock, until it is closed; those that
    passed while the loop stood still are left out.
    """

    __slots__ = ("_callback", "_every_s", "_handle", "_loop", "due_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, every_s: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._every_s = every_s
        self._callback = callback
        self.due_s = 0.0  # When it calls next.
        self._plan(loop.time())

    def close(self) -> None:
        """Call no more."""
        self._handle.cancel()

    def _plan(self, after_s: float) -> None:
        self.due_s = next_tick_s(after_s, self._every_s)
        self._handle = self._loop.call_at(self.due_s, self._tick)

    def _tick(self) -> None:
        # The loop counts whole milliseconds, so it may call a moment early.
        self._plan(max(self.due_s + self._every_s / 2, self._loop.time()))
        self._callback()


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Timer:
    """Calls `callback` on the loop when the time that was set last has come; setting it again replaces that time.

    Where the system has no timerfd, the loop's own timer is used, and a firing may be two milliseconds late.
    """

    __slots__ = ("_callback", "_descriptor", "_handle", "_libc", "_loop", "_spec", "_spec_reference", "is_set")

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self.is_set = False  # Whether it will fire.
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        # The timer is set a thousand times a second; for a call of one microsecond PyDLL keeps the interpreter's lock.
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._spec = _TimerSpec()
        self._spec_reference = ctypes.byref(self._spec)
        self._descriptor = -1
        if hasattr(self._libc, "timerfd_create"):
            self._descriptor = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
            if self._descriptor < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create failed")
            loop.add_reader(self._descriptor, self._expired)

    def set_after_ms(self, delay_ms: float) -> None:
        """Fire once, `delay_ms` from now; at once, though never inside this call, when it is 0 or less."""
        delay_ms = min(max(delay_ms, 0.0), DELAY_MS_MAX)
        if self._descriptor < 0:
            self.cancel()
            whole_ms = math.ceil(delay_ms) + _LOOP_TICK_MS if delay_ms else 0
            self._handle = self._loop.call_later(whole_ms / 1000, self._fire)
        else:
            # A time of 0 disarms a timerfd, so the shortest wait is a nanosecond.
            self._arm(max(math.ceil(delay_ms * 1_000_000), 1))
        self.is_set = True

    def cancel(self) -> None:
        """Do not fire."""
        self.is_set = False
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._descriptor >= 0:
            self._arm(0)

    def close(self) -> None:
        """Give the descriptor back; the timer can't be set again."""
        self.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _arm(self, nanoseconds: int) -> None:
        value = self._spec.value
        value.seconds, value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        if self._libc.timerfd_settime(self._descriptor, 0, self._spec_reference, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def _expired(self) -> None:
        try:
            os.read(self._descriptor, _COUNT_BYTES)
        except BlockingIOError:
            # The timer was set or cancelled again between its expiry and this turn of the loop, which withdraws the
            # expiry.
            return
        self._fire()

    def _fire(self) -> None:
        self.is_set = False
        self._callback()
