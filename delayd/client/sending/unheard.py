"""Unheard: sends that have failed and whose outcome nobody has asked for, so that a close can say that they are lost.

Invariant: a failure is told once: by its future, or by the one warning of the close.
"""

from __future__ import annotations

import asyncio
import logging

from delayd.client.sending.receipt import Receipt
from delayd.client.sending.send_future import SendFuture
from delayd.errors import DelaydError

SWEPT_AT = 1_000  # As many failures are kept before those that somebody has heard of are forgotten.
KEPT_MAX = 100_000  # A producer that fails for days, and whose caller asks for nothing, keeps no more: 40 MB.

log = logging.getLogger(__name__)

SendWaiter = SendFuture | asyncio.Future[Receipt]
"""The caller of a single send, who waits for its outcome in a thread or on a loop."""


class Unheard:
    """Of one producer, on its loop."""

    def __init__(self) -> None:
        self._failed: list[SendWaiter] = []
        self._sweep_at = SWEPT_AT
        self._forgotten = 0  # Unheard failures that there was no room to keep.

    def add(self, failed: object) -> None:
        """Note the future of a send that has failed just now: its caller may ask for the outcome later."""
        if isinstance(failed, SendFuture | asyncio.Future):
            self._failed.append(failed)
        if len(self._failed) >= self._sweep_at:
            self._failed = [each for each in self._failed if is_unheard(each)]
            if len(self._failed) >= KEPT_MAX:
                self._forget(KEPT_MAX // 2)
            self._sweep_at = max(SWEPT_AT, 2 * len(self._failed))

    def tell(self) -> None:
        """Log how many messages are lost without anybody's knowledge, and why the first of them is."""
        errors = [failed.exception() for failed in self._failed if is_unheard(failed)]
        count = len(errors) + self._forgotten
        self._failed.clear()
        self._forgotten = 0
        if errors:
            first = errors[0]
            code = first.code if isinstance(first, DelaydError) else type(first).__name__
            log.warning("sends_failed messages=%d code=%s reason=%r", count, code, str(first))

    def _forget(self, count: int) -> None:
        for oldest in self._failed[:count]:
            oldest.exception()  # So asyncio does not log it, too.
        del self._failed[:count]
        self._forgotten += count


def is_unheard(failed: SendWaiter) -> bool:
    """Whether a send has failed and nobody has asked for its outcome."""
    if isinstance(failed, SendFuture):
        return failed.is_unheard
    # asyncio keeps this mark to log, when the future is gone, an exception that nobody has fetched.
    return failed._log_traceback
