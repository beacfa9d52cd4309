"""Own rows: those about which this server decides itself, from the instant at which they are due. They are carriers of
recurring schedules (docs/recurring.md), and records of sends that are to happen once (docs/once.md).

     the wheel ──▶ the dispatcher, which hands them to nobody ──▶ due ──▶ a request of this server's own ──▶ durable

Invariant: a row that is due is decided about until it is gone, and no try follows a failed one without a pause. Rows
about which nothing can be decided now hold up no others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.sequences import NO_SEQUENCES, Sequences
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.ending.requested import Whole
from delayd.delay.intake import Intake
from delayd.delay.reply import Reply
from delayd.delay.rows import NO_ROWS, Rows, due_at_ms, join_rows, without
from delayd.errors import DelaydError
from delayd.hours import HOUR_MS
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.machine.operating import Fence
from delayd.wire.asked import AnswerRows, Asked, CancelAnswer, RescheduleAnswer

log = logging.getLogger(__name__)

AGAIN_MS = 1_000  # After a decision that could not be stored, or while nothing may be decided.
ASIDE_MS = 5_000  # After a row could not be decided about, which a drain or an operator ends.
AT_ONCE = 65_536  # Rows of one request.


class OwnWish(NamedTuple):
    """What is to become of rows of one subject that are due.

    Fields:
        subject: they are on it.
        priority: of the turn of the loop in which it begins.
        ask: makes the request.
        done: the answer of a row that is gone.
        heard: called after each try, with the rows that were set aside.
    """

    subject: str
    priority: Priority
    ask: Callable[[Asked, Reply[AnswerRows]], Whole]
    done: CancelAnswer | RescheduleAnswer
    heard: Callable[[Sequences], None] = lambda stayed: None


class OwnRows:
    """The due rows of one subject; belongs to the loop."""

    due: Callable[[], list[Rows]]  # They, in several arrays; set once.

    def __init__(self, site: Site, fence: Fence, intake: Intake, requests: MessageRequests, wish: OwnWish) -> None:
        self._clock = site.clock
        self._worker = site.worker
        self._fence = fence
        self._intake = intake
        self._requests = requests
        self._wish = wish
        self._running = False  # Whether a decision is under way, or about to begin.
        self._again = site.alarms.alarm(self.come)
        self._aside = NO_SEQUENCES  # Rows about which nothing can be decided now, sorted.
        self._take_up = site.alarms.alarm(self.try_again)

    def come(self) -> None:
        """Rows have fallen due: they are decided about in another turn of the loop.

        Those of a decision that failed come back at once, and wait for their alarm.
        """
        if not self._running and self._again.at_ms is None:
            self._running = True
            self._worker.submit(_nothing, self._decide, self._wish.priority)

    def try_again(self, after_ms: int = 0) -> None:
        """Decide about rows that were set aside, now or later."""
        if after_ms:
            self._take_up.after(after_ms)
            return
        self._aside = NO_SEQUENCES
        self.come()

    def _decide(self, done: Done[None]) -> None:
        done.result()
        self._running = False
        rows = without(join_rows([NO_ROWS, *self.due()]), self._aside)[:AT_ONCE]
        if not len(rows):
            return
        if self._fence.is_up or self._intake.closed or not self._clock.confirmed:
            self._again.after(AGAIN_MS)
            return
        # A row is filed in the hour of its due instant, or of its acceptance when that is later.
        asked = Asked(rows["sequence"].copy(), due_at_ms(rows), rows["hour"].astype(np.int64) * HOUR_MS)
        self._running = True
        decided = partial(self._decided, asked.sequences)
        try:
            self._requests.take(self._wish.ask(asked, Reply(decided)))
        except DelaydError as error:
            decided(error)

    def _decided(self, asked: Sequences, told: AnswerRows | DelaydError) -> None:
        self._running = False
        if isinstance(told, DelaydError):
            log.warning("own_rows_not_decided subject=%s reason=%r", self._wish.subject, told.message)
            self._again.after(AGAIN_MS)
            self._wish.heard(NO_SEQUENCES)
            return
        stayed = asked.compress(told["answer"] != self._wish.done)
        if len(stayed):
            self._aside = np.sort(np.concatenate((self._aside, stayed)))
            self.try_again(ASIDE_MS)
        self._wish.heard(stayed)
        # Others may have fallen due meanwhile.
        self.come()


def _nothing() -> None:
    """Another turn of the loop goes on after it."""
