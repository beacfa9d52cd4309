"""Signals: the first SIGTERM or SIGINT has a worker drain, the second one ends the process at once.

Invariant: from the first signal on the process is gone within the drain and GRACE_S, whatever the handlers do: also
when a coroutine blocks the event loop, on which the drain itself would run.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from _queue import Empty, SimpleQueue  # As in `delayd.machine.executor`.
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

GRACE_S = 10.0  # Longer than it takes to cancel coroutines and to tell the server what became of messages.
EXIT_OVERDUE = 1
EXIT_AT_ONCE = 130  # As `delayd up`, and what a shell reports for a program that Ctrl-C ended.
SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger(__name__)


class Signals:
    """Takes both signals while it is entered. ``stop`` begins the drain; it is called in the signal's handler."""

    def __init__(self, stop: Callable[[], None], drain_s: float) -> None:
        self._stop = stop
        self._limit_s = drain_s + GRACE_S
        # Putting into this queue is safe in a handler of a signal, which may interrupt any code of the main thread.
        self._begun: SimpleQueue[bool] = SimpleQueue()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int] = {}

    def __enter__(self) -> Self:
        # Python calls handlers of signals on the main thread only; elsewhere the program itself calls `stop`.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None stands for a handler that Python did not install, and can't put back.
                self._before[number] = signal.signal(number, self._on_signal) or signal.SIG_DFL
            threading.Thread(target=self._end_in_time, name="delayd-worker-stop", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._begun.put(False)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for other in SIGNALS:
            signal.signal(other, _end_at_once)
        self._begun.put(True)
        self._stop()

    def _end_in_time(self) -> None:
        if not self._begun.get():
            return
        try:
            self._begun.get(timeout=self._limit_s)
        except Empty:
            log.critical("drain_overdue limit_s=%g", self._limit_s)
            os._exit(EXIT_OVERDUE)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_AT_ONCE)
