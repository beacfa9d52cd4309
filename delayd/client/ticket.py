"""Who waits on a thread for one send.

Invariant: an outcome is set once, by the loop's thread, and read after that by the thread that waits.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from delayd.client.receipt import Receipt
from delayd.errors import DelaydError, InternalError


class Ticket:
    """A future for exactly one waiting thread, at a tenth of the cost of `concurrent.futures.Future`."""

    __slots__ = ("_error", "_lock", "_receipt")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._receipt: Receipt | None = None
        self._error: DelaydError | None = None

    def done(self) -> bool:
        """Nobody stops waiting for it."""
        return False

    def set_result(self, receipt: Receipt) -> None:
        """It is accepted."""
        self._receipt = receipt
        self._lock.release()

    def set_exception(self, error: DelaydError) -> None:
        """It failed."""
        self._error = error
        self._lock.release()

    def wait(self, limit_s: float) -> Receipt:
        """The receipt, or the error raised; the limit is there for bugs alone, as every send ends by itself."""
        if not self._lock.acquire(timeout=limit_s):
            raise InternalError(f"a send had no outcome after {limit_s:g} s, far above its own time limit")
        if self._error is not None:
            raise self._error
        assert self._receipt is not None, "a ticket ends with a receipt or an error"
        return self._receipt


class SendFuture(Future[Receipt]):
    """What `send_nowait` returns; what was handed over can't be taken back, so it can't be cancelled."""

    def cancel(self) -> bool:
        """Always False."""
        return False
