"""Keyed requests: CANCEL, GET and RESCHEDULE that name messages by their keys (docs/keys.md).

Invariant: a key names the newest row that took it, at the moment of the decision. Rows that take a key while a request
is under way are followed; when the commit that is being closed has such a row, the request waits for the next one.

     request ──▶ look up names ──▶ as a request by receipt; what took a name since is looked at before each decision
                 (worker thread)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import ROWS_MAX, Int64s
from delayd.batch.content import Names, slots_of_names
from delayd.delay.ending.message_requests import Answer, MessageRequests
from delayd.delay.ending.requested import Wish
from delayd.delay.keys.entries import Asked, Found, Rows
from delayd.delay.keys.index import KeyIndex, View
from delayd.delay.keys.owned_slots import OwnedSlots
from delayd.delay.keys.taken_names import Named, TakenNames, Watch
from delayd.delay.reply import Reply
from delayd.errors import DamagedData, DelaydError, SlowDown
from delayd.hours import HOUR_MS
from delayd.machine.executor import Done, Executor, Priority
from delayd.wire.asked import AnswerRows, MessageState, Tries
from delayd.wire.asked import Asked as AskedRows
from delayd.wire.meta import SlotSet

Told = Callable[[int | DelaydError], None]
PENDING = (MessageState.PENDING, MessageState.IN_FLIGHT)


class _Wanted(NamedTuple):
    """What a request wants."""

    wish: Wish
    batch: Batch
    at_ms: Int64s | None
    tries: Tries | None


class KeyedRequests:
    """All requests by key; belongs to the loop."""

    def __init__(self, worker: Executor, taken: TakenNames, owned: OwnedSlots, requests: MessageRequests) -> None:
        self._owned = owned
        self._worker = worker
        self._taken = taken
        self._requests = requests

    def ask(
        self,
        wish: Wish,
        batch: Batch,
        answer: Answer,
        wanted_at_ms: Int64s | None = None,
        tries: Tries | None = None,
    ) -> None:
        """Take a request whose names are those of an ASKED batch; ``answer`` is called with one answer a row, or with
        an error. ``wanted_at_ms`` are the instants to which rows are to be moved.

        Raises:
            SlowDown, Stopping, and as `MessageRequests.move`: nothing of it is done.
        """
        reply: Reply[AnswerRows] = Reply(answer)
        with reply.begins():
            self._requests.begin(reply, batch.count, wanted_at_ms, tries)
            self._look_up(_Wanted(wish, batch, wanted_at_ms, tries), reply)

    def _look_up(self, wanted: _Wanted, reply: Reply[AnswerRows]) -> None:
        self._taken.check()
        watch, view = self._taken.begin()
        reply.holds(partial(self._taken.end, watch))
        work = partial(_find, view, wanted.batch)
        self._worker.submit(work, partial(self._found, wanted, watch, reply), Priority.DUE)

    def _found(self, wanted: _Wanted, watch: Watch, reply: Reply[AnswerRows], done: Done[tuple[Asked, Found]]) -> None:
        with reply.goes_on():
            try:
                names, found = done.result()
            except DamagedData as error:
                self._taken.damaged(error)
                raise
            slots = slots_of_names(names.names)
            if self._owned.are_served(slots):
                named = Named(self._taken, watch, names, found)
                self._requests.ask_named(wanted.wish, named, wanted.at_ms, reply, wanted.tries)
            else:
                # What the look-up found may be old when meta has answered: then the names are looked up anew.
                self._taken.end(watch)
                self._owned.admit(slots, partial(self._admitted, wanted, reply))

    def _admitted(self, wanted: _Wanted, reply: Reply[AnswerRows], error: DelaydError | None) -> None:
        """Meta has said who owns the keys (rule I4)."""
        with reply.goes_on():
            if error is not None:
                raise error
            self._look_up(wanted, reply)


@dataclass(slots=True)
class _Count:
    """One count under way: the rows that are not asked about yet, and how many of the others are pending."""

    rows: Rows
    reply: Reply[int]
    pending: int = 0


class PendingKeys:
    """How many rows with keys of some slots are pending, before the slots get another owner (rule I4): the index of
    keys lists them, and they are asked about as for GET, a piece at a time. Belongs to the loop.
    """

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
        asked = AskedRows(piece["sequence"].copy(), piece["deliver_at_ms"].copy(), accepted_at_ms)
        self._requests.ask(Wish.GET, asked, partial(self._answered, count))

    def _answered(self, count: _Count, answers: AnswerRows | DelaydError) -> None:
        with count.reply.goes_on():
            if isinstance(answers, DelaydError):
                raise answers
            count.pending += int(np.count_nonzero(np.isin(answers["state"], PENDING)))
            self._ask(count)


def _find(view: View, batch: Batch) -> tuple[Asked, Found]:
    asked = view.asked(Names.of_batch(batch, batch.keyed_rows()))
    return asked, view.find(asked, _nothing)


def _nothing() -> None:
    """A request looks up few names: it does not give way."""
