"""Pending keys: how many rows with keys of some slots are pending, before the slots get another owner (rule I4).

index of keys ──▶ rows of the slots ──▶ what became of them, a piece at a time ──▶ how many are pending
(worker thread)                         (as for GET)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from delayd.batch import ROWS_MAX
from delayd.delay.ending.message_requests import MessageRequests, Wish
from delayd.delay.keys.entries import Rows
from delayd.delay.keys.index import KeyIndex
from delayd.delay.reply import Reply
from delayd.errors import DamagedData, DelaydError, SlowDown
from delayd.executor import Done, Executor
from delayd.hours import HOUR_MS
from delayd.wire.ending import AnswerRows, Asked, MessageState
from delayd.wire.slots import SlotSet

Told = Callable[[int | DelaydError], None]
PENDING = (MessageState.PENDING, MessageState.IN_FLIGHT)


@dataclass(slots=True)
class _Count:
    """One count under way: the rows that are not asked about yet, and how many of the others are pending."""

    rows: Rows
    reply: Reply[int]
    pending: int = 0


class PendingKeys:
    """Counts; belongs to the loop."""

    def __init__(
        self, index: KeyIndex, requests: MessageRequests, worker: Executor, takes: Callable[[SlotSet], bool]
    ) -> None:
        """``takes`` says whether rows with keys of some slots are on their way to the disk."""
        self._index = index
        self._requests = requests
        self._worker = worker
        self._takes = takes

    def count(self, slots: SlotSet, told: Told) -> None:
        """Call ``told`` with the number of pending rows, or with SlowDown."""
        if not self._index.whole or self._takes(slots):
            told(SlowDown("this server can't tell at this moment which keys are pending; say it again"))
            return
        work = partial(self._index.view().rows_of_slots, slots, self._worker.give_way)
        self._worker.submit(work, partial(self._listed, Reply(told)))

    def _listed(self, reply: Reply[int], done: Done[Rows]) -> None:
        with reply.goes_on():
            try:
                rows = done.result()
            except DamagedData as damage:
                self._index.damaged(damage)
                raise
            self._ask(_Count(rows, reply))

    def _ask(self, count: _Count) -> None:
        """Ask about the next piece."""
        piece, count.rows = count.rows[:ROWS_MAX], count.rows[ROWS_MAX:]
        if not len(piece):
            count.reply.end(count.pending)
            return
        # A row is filed in the hour of its due instant, or of its acceptance when that is later.
        accepted_at_ms = piece["hour"].astype(np.int64) * HOUR_MS
        asked = Asked(piece["sequence"].copy(), piece["deliver_at_ms"].copy(), accepted_at_ms)
        self._requests.ask(Wish.GET, asked, partial(self._answered, count))

    def _answered(self, count: _Count, answers: AnswerRows | DelaydError) -> None:
        with count.reply.goes_on():
            if isinstance(answers, DelaydError):
                raise answers
            count.pending += int(np.count_nonzero(np.isin(answers["state"], PENDING)))
            self._ask(count)
