"""Send future: the outcome of one send, for threads.

Invariant: it is set once, by the loop's thread; each waiting thread and each callback is told once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

from delayd.client.limits import need_timedelta
from delayd.client.sending.receipt import Receipt
from delayd.errors import DelaydError

# Held for a few assignments at a time, so all futures can share it: `concurrent.futures.Future` has a condition each,
# a dozen objects, and with 100,000 of them alive the garbage collector takes longer than everything else together.
_LOCK = threading.Lock()

_SECOND = timedelta(seconds=1)

log = logging.getLogger(__name__)


class SendFuture:
    """The outcome of one `send_nowait`, now or later.

    It works as a `concurrent.futures.Future` does, with two differences: a send can't be cancelled, and timeouts are
    timedeltas.

    Example::

        future = producer.send_nowait("orders.cancel", b"42", delay=timedelta(minutes=30))
        future.add_done_callback(lambda future: print(future.exception() or "kept"))
        receipt = future.result(timeout=timedelta(seconds=10))
    """

    __slots__ = ("_callbacks", "_done", "_error", "_receipt", "_waiting")

    def __init__(self) -> None:
        self._done = False
        self._receipt: Receipt | None = None
        self._error: DelaydError | None = None
        self._waiting: list[threading.Lock] | None = None
        self._callbacks: list[Callable[[SendFuture], None]] | None = None

    def done(self) -> bool:
        """Whether the send has an outcome."""
        return self._done

    def result(self, timeout: timedelta | None = None) -> Receipt:
        """Wait for the outcome, and return the receipt or raise the error of the send.

        Args:
            timeout: how long to wait; None waits until there is an outcome.

        Raises:
            TimeoutError: there was no outcome within ``timeout``; the send goes on.
        """
        return self.receipt(_seconds(timeout))

    def exception(self, timeout: timedelta | None = None) -> DelaydError | None:
        """Wait for the outcome, and return the error of the send; None when the message is kept.

        Args:
            timeout: how long to wait; None waits until there is an outcome.

        Raises:
            TimeoutError: there was no outcome within ``timeout``; the send goes on.
        """
        wait_s = _seconds(timeout)
        if not self._done:
            self._wait(wait_s)
        return self._error

    def add_done_callback(self, callback: Callable[[SendFuture], None]) -> None:
        """Have a function called with this future once there is an outcome; at once when there is one already.

        Args:
            callback: is called on the producer's thread, so it must return soon: all sends wait meanwhile.
        """
        with _LOCK:
            if not self._done:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback(self)

    def receipt(self, wait_s: float | None) -> Receipt:
        """As `result`, without a check of the time limit; for the producer.

        Args:
            wait_s: how many seconds to wait; None waits until there is an outcome.
        """
        if not self._done:
            self._wait(wait_s)
        if self._error is not None:
            raise self._error
        assert self._receipt is not None, "a send ends with a receipt or an error"
        return self._receipt

    def set_result(self, receipt: Receipt) -> None:
        """Note that the message is accepted; for the producer."""
        self._receipt = receipt
        self._end()

    def set_exception(self, error: DelaydError) -> None:
        """Note that the send failed; for the producer."""
        self._error = error
        self._end()

    def _end(self) -> None:
        with _LOCK:
            self._done = True
            waiting, callbacks = self._waiting, self._callbacks
        for lock in waiting or ():
            lock.release()
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:
                # One caller's bug must not keep the other callers of its batch from their outcomes.
                log.exception("callback_failed callback=%r", callback)

    def _wait(self, wait_s: float | None) -> None:
        with _LOCK:
            if self._done:
                return
            woken = threading.Lock()
            woken.acquire()
            self._waiting = [*(self._waiting or ()), woken]
        if not woken.acquire(timeout=-1 if wait_s is None else max(wait_s, 0)):
            raise TimeoutError(f"a send had no outcome within {wait_s} s; it goes on")


def _seconds(timeout: timedelta | None) -> float | None:
    return None if timeout is None else need_timedelta("timeout", timeout) / _SECOND
