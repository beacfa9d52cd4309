"""Keyed requests: CANCEL, GET and RESCHEDULE that name messages by their keys (docs/keys.md).

Invariant: a key names the newest row that took it, at the moment of the decision. Rows that take a key while a request
is under way are followed; when the commit that is being closed has such a row, the request waits for the next one.

     request ──▶ look up names ──▶ as a request by receipt; what took a name since is looked at before each decision
                 (worker thread)
"""

from __future__ import annotations

from functools import partial

from delayd.batch import Batch, Int64s
from delayd.delay.ending.message_requests import Answer, MessageRequests, Wish
from delayd.delay.ending.taken_names import Named, TakenNames, Watch
from delayd.delay.keys.entries import Asked, Found
from delayd.delay.keys.index import View
from delayd.delay.keys.owned_slots import OwnedSlots
from delayd.errors import DamagedData, DelaydError, Shortage, SlowDown
from delayd.executor import Done, Executor, Priority
from delayd.names import Names, slots_of_names
from delayd.wire.ending import AnswerRows


class KeyedRequests:
    """All requests by key; belongs to the loop."""

    def __init__(self, worker: Executor, taken: TakenNames, owned: OwnedSlots, requests: MessageRequests) -> None:
        self._owned = owned
        self._worker = worker
        self._taken = taken
        self._requests = requests

    def ask(self, wish: Wish, batch: Batch, answer: Answer, wanted_at_ms: Int64s | None = None) -> None:
        """Take a request whose names are those of an ASKED batch; ``answer`` is called with one answer a row, or with
        an error. ``wanted_at_ms`` are the instants to which rows are to be moved.

        Raises:
            SlowDown, Stopping, and as `MessageRequests.move`: nothing of it is done.
        """
        self._taken.check()
        self._requests.begin(batch.count, wanted_at_ms)
        watch, view = self._taken.begin()
        work = partial(_find, view, batch)
        self._worker.submit(work, partial(self._found, wish, batch, wanted_at_ms, watch, answer), Priority.DUE)

    def _found(
        self,
        wish: Wish,
        batch: Batch,
        wanted_at_ms: Int64s | None,
        watch: Watch,
        answer: Answer,
        done: Done[tuple[Asked, Found]],
    ) -> None:
        try:
            names, found = done.result()
        except (DamagedData, Shortage) as error:
            if isinstance(error, DamagedData):
                self._taken.damaged(error)
            self._taken.end(watch)
            self._requests.give_up(batch.count)
            answer(SlowDown(f"keys can't be looked up now: {error}"))
            return
        slots = slots_of_names(names.names)
        if not self._owned.are_served(slots):
            self._taken.end(watch)
            self._requests.give_up(batch.count)
            self._owned.admit(slots, partial(self._admitted, wish, batch, wanted_at_ms, answer))
            return
        named = Named(self._taken, watch, names, found)

        def answered(what: AnswerRows | DelaydError) -> None:
            named.end()
            answer(what)

        self._requests.ask_named(wish, named, wanted_at_ms, answered)

    def _admitted(
        self, wish: Wish, batch: Batch, wanted_at_ms: Int64s | None, answer: Answer, error: DelaydError | None
    ) -> None:
        """Meta has said who owns the keys (rule I4)."""
        if error is not None:
            answer(error)
            return
        try:
            self.ask(wish, batch, answer, wanted_at_ms)
        except DelaydError as refused:
            answer(refused)


def _find(view: View, batch: Batch) -> tuple[Asked, Found]:
    asked = view.asked(Names.of_batch(batch, batch.keyed_rows()))
    return asked, view.find(asked, _nothing)


def _nothing() -> None:
    """A request looks up few names: it does not give way."""
