"""Send future: the outcome of one send, for threads.

Invariant: it is set once, by the loop's thread; each waiting thread and each callback is told once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from delayd.client.limits import is_number, need_callable
from delayd.client.sending.receipt import Receipt
from delayd.errors import BadArgument, DelaydError

# Held for a few assignments at a time, so all futures can share it: a `concurrent.futures.Future` has a condition of
# its own, a dozen objects, and with 100,000 of them alive the garbage collector takes longer than everything else
# together. Reentrant, because `concurrent.futures.wait` takes the conditions of all its futures at once.
_LOCK = threading.RLock()

_SECOND = timedelta(seconds=1)

log = logging.getLogger(__name__)

Timeout = float | timedelta


class SendFuture(Future[Receipt]):
    """The outcome of one `send_nowait`, now or later.

    It is a `concurrent.futures.Future`, so `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` take it.
    A send can't be cancelled.

    Example::

        future = producer.send_nowait("orders.cancel", b"42", delay=timedelta(minutes=30))
        future.add_done_callback(lambda future: print(future.exception() or "kept"))
        receipt = future.result(timeout=10)
    """

    # What `concurrent.futures` reads and the base class would make for each future: its condition, its state, and those
    # who wait.
    _condition = threading.Condition(_LOCK)

    __slots__ = ("_callbacks", "_done", "_error", "_heard", "_receipt", "_waiting")

    def __init__(self) -> None:  # The base class would make what is shared here.
        self._done = False
        self._receipt: Receipt | None = None
        self._error: DelaydError | None = None
        self._heard = False  # Somebody waits for the outcome, or has asked for it.
        self._waiting: list[Any] | None = None
        self._callbacks: list[Callable[[SendFuture], object]] | None = None

    def __repr__(self) -> str:
        return f"SendFuture({'no outcome yet' if not self._done else self._error or self._receipt!r})"

    def done(self) -> bool:
        """Whether the send has an outcome."""
        return self._done

    def running(self) -> bool:
        """Whether the send has no outcome yet: it began when it was called."""
        return not self._done

    def cancel(self) -> bool:
        """Do nothing, and return False: a send can't be taken back. `Producer.cancel` ends a message that is kept."""
        return False

    def cancelled(self) -> bool:
        """False; see `cancel`."""
        return False

    def result(self, timeout: Timeout | None = None) -> Receipt:
        """Wait for the outcome, and return the receipt or raise the error of the send.

        Args:
            timeout: how long to wait, in seconds or as a timedelta; None waits until there is an outcome.

        Raises:
            TimeoutError: there was no outcome within ``timeout``; the send goes on.
        """
        return self.receipt(_seconds(timeout))

    def exception(self, timeout: Timeout | None = None) -> DelaydError | None:
        """Wait for the outcome, and return the error of the send; None when the message is kept.

        Args:
            timeout: how long to wait, in seconds or as a timedelta; None waits until there is an outcome.

        Raises:
            TimeoutError: there was no outcome within ``timeout``; the send goes on.
        """
        wait_s = _seconds(timeout)
        if not self._done:
            self._wait(wait_s)
        self._heard = True
        return self._error

    def add_done_callback(self, callback: Callable[[SendFuture], object]) -> None:
        """Have a function called with this future once there is an outcome; at once when there is one already.

        Args:
            callback: is called on the producer's thread, so it must return soon: all sends wait meanwhile.
        """
        need_callable("callback", callback)
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
            self._heard = True
            raise self._error
        assert self._receipt is not None, "a send ends with a receipt or an error"
        return self._receipt

    @property
    def is_unheard(self) -> bool:
        """Whether the send has failed and nobody has asked for its outcome."""
        return self._error is not None and not self._heard

    def set_result(self, receipt: Receipt) -> None:
        """Note that the message is accepted; for the producer."""
        self._receipt = receipt
        self._end()

    def set_exception(self, error: BaseException | None) -> None:
        """Note that the send failed; for the producer."""
        assert isinstance(error, DelaydError), "a send fails with an error of delayd"
        self._error = error
        self._end()

    # Read by `concurrent.futures`, with the lock held. Type checkers know them as attributes of the base class.
    if not TYPE_CHECKING:

        @property
        def _state(self) -> str:
            return "FINISHED" if self._done else "RUNNING"

        @property
        def _waiters(self) -> list[Any]:
            if self._waiting is None:
                self._waiting = []
            return self._waiting

    def _end(self) -> None:
        with _LOCK:
            self._done = True
            self._heard = bool(self._waiting)
            callbacks = self._callbacks
            for waiter in self._waiting or ():
                (waiter.add_result if self._error is None else waiter.add_exception)(self)
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
            waiter = _Waiter()
            waiting = self._waiting
            if waiting is None:
                waiting = self._waiting = []
            waiting.append(waiter)
        if not waiter.woken.acquire(timeout=-1 if wait_s is None else wait_s):
            with _LOCK:
                waiting.remove(waiter)
            raise TimeoutError(f"a send had no outcome within the timeout of {wait_s} s; it goes on")


class _Waiter:
    """One thread that waits, as `concurrent.futures` tells its own."""

    __slots__ = ("woken",)

    def __init__(self) -> None:
        self.woken = threading.Lock()
        self.woken.acquire()

    def add_result(self, _: SendFuture) -> None:
        self.woken.release()

    add_exception = add_result


def _seconds(timeout: Timeout | None) -> float | None:
    """The time limit in seconds that a lock takes."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        timeout = timeout / _SECOND
    if not is_number(timeout) or timeout != timeout:
        raise BadArgument(f"timeout is a number of seconds or a timedelta, not {timeout!r:.100}")
    return float(min(max(timeout, 0), threading.TIMEOUT_MAX))
