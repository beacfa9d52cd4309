"""Records: the rows that say that a send was done, from the instant at which they are due (docs/once.md).

     the wheel ──▶ the dispatcher, which hands it to nobody ──▶ due ──▶ a cancel of this server's own ──▶ durable

Invariant: a record stays until it is due, and then it ends: the key of the send is free again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.ending.requested import RequestWish, Whole
from delayd.delay.intake import Intake
from delayd.delay.reply import Reply
from delayd.delay.rows import NO_ROWS, Rows, due_at_ms, join_rows
from delayd.errors import DelaydError
from delayd.hours import HOUR_MS
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.machine.operating import Fence
from delayd.wire.asked import AnswerRows, Asked, CancelAnswer

log = logging.getLogger(__name__)

AGAIN_MS = 1_000  # After an end that could not be stored, or while nothing may be decided.
AT_ONCE = 65_536  # Records that one cancel ends.


class OldRecords:
    """The records of this server that are due; belongs to the loop."""

    due: Callable[[], list[Rows]]  # Records that are due, in several arrays; set once.

    def __init__(self, site: Site, fence: Fence, intake: Intake, requests: MessageRequests) -> None:
        self._clock = site.clock
        self._worker = site.worker
        self._fence = fence
        self._intake = intake
        self._requests = requests
        self._running = False  # Whether a cancel is under way, or about to begin.
        self._again = site.alarms.alarm(self.come)

    def come(self) -> None:
        """Records have fallen due: they end in another turn of the loop.

        Those of an end that failed come back at once, and wait for their alarm.
        """
        if not self._running and self._again.at_ms is None:
            self._running = True
            self._worker.submit(_nothing, self._end, Priority.NORMAL)

    def _end(self, done: Done[None]) -> None:
        done.result()
        self._running = False
        rows = join_rows([NO_ROWS, *self.due()])[:AT_ONCE]
        if not len(rows):
            return
        if self._fence.is_up or self._intake.closed or not self._clock.confirmed:
            self._again.after(AGAIN_MS)
            return
        # A row is filed in the hour of its due instant, or of its acceptance when that is later.
        asked = Asked(rows["sequence"].copy(), due_at_ms(rows), rows["hour"].astype(np.int64) * HOUR_MS)
        self._running = True
        try:
            self._requests.take(Whole(RequestWish.CANCEL, asked, Reply(self._ended)))
        except DelaydError as error:
            self._ended(error)

    def _ended(self, told: AnswerRows | DelaydError) -> None:
        self._running = False
        if isinstance(told, DelaydError):
            log.warning("records_not_ended reason=%r", told.message)
            self._again.after(AGAIN_MS)
        elif (told["answer"] != CancelAnswer.CANCELLED).any():
            # Some are on their way to another delay server, or their hour is quarantined.
            self._again.after(AGAIN_MS)
        else:
            # Others may have fallen due meanwhile.
            self.come()


def _nothing() -> None:
    """Another turn of the loop goes on after it."""
