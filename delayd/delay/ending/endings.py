"""Endings: everything that callers ask about messages, put together from this folder's parts.

Each request is refused while a fence is up: this server may be a copy, and the right one knows better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import ROWS_MAX, ColumnId, Int64s
from delayd.batch.content import Names, slots_of_names
from delayd.batch.names import RECORD_SUBJECT
from delayd.delay.ending.carriers import Carriers, OnRecord
from delayd.delay.ending.copies import Rewrites
from delayd.delay.ending.drain import Drain, OnProgress
from delayd.delay.ending.finder import Answer as OnFound
from delayd.delay.ending.finder import Finder
from delayd.delay.ending.keyed_sends import KeyedSends
from delayd.delay.ending.message_requests import Answer, MessageRequests
from delayd.delay.ending.overlaps import Overlaps
from delayd.delay.ending.own_rows import OwnRows, OwnWish
from delayd.delay.ending.requested import RequestWish, Whole
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.intake import Decided, Intake, OpenGroup
from delayd.delay.keys.index import KeyIndex, Named, TakenNames, View, Watch
from delayd.delay.keys.owned_slots import AskSlots, OwnedSlots
from delayd.delay.keys.run import AskedNames, Newest, Rows
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.producers import Producers
from delayd.delay.reply import Reply
from delayd.errors import DamagedData, DelaydError, SlowDown
from delayd.hours import HOUR_MS
from delayd.log.hour import decided_about
from delayd.machine.executor import Done, Executor, Priority
from delayd.machine.identity import Site
from delayd.machine.operating import Fence
from delayd.outcome import MessageState
from delayd.wire.asked import AnswerRows, Asked, AskedWindow, CancelAnswer, DrainOrder, DrainProgress, MoveTry, Tries
from delayd.wire.meta import SlotSet
from delayd.wire.recurring import RecurringRequest


@dataclass(frozen=True, slots=True)
class Books:
    """What endings decide about, and where their decisions go."""

    fence: Fence
    intake: Intake
    ledger: Ledger
    sources: Sources
    keys: KeyIndex
    producers: Producers


class Endings:
    """The requests about messages, and the decider of keyed sends; belongs to the loop."""

    def __init__(self, site: Site, books: Books, ask_slots: AskSlots) -> None:
        self._fence = books.fence
        intake, worker, ledger = books.intake, site.worker, books.ledger
        self.requests = MessageRequests(worker, ledger, intake, books.sources, books.producers)
        self.taken_names = TakenNames(books.keys)
        self._pending_keys = PendingKeys(books.keys, self.requests, worker, lambda slots: self.keyed_sends.takes(slots))
        self.owned_slots = OwnedSlots(site, ask_slots, self._pending_keys.count)
        self._keyed_requests = KeyedRequests(worker, self.taken_names, self.owned_slots, self.requests)
        self.keyed_sends = KeyedSends(site, self.taken_names, self.owned_slots, ledger, intake)
        self._finder = Finder(site, ledger, books.sources, lambda: intake.durable_sequence)
        self.carriers = Carriers(site, books.fence, intake, self.owned_slots, self.requests, self._keyed_requests.ask)
        self.carriers.overlaps = self.overlaps = Overlaps(site, self._finder, self.requests)
        # Records of sends have done their work when they are due: they end then (docs/once.md).
        end = partial(Whole, RequestWish.CANCEL)
        over = OwnWish(RECORD_SUBJECT, Priority.NORMAL, end, CancelAnswer.CANCELLED)
        self.records = OwnRows(site, books.fence, intake, self.requests, over)
        self.drain = Drain(site, ledger, books.sources, self._finder, self.requests)
        intake.keyed = self.keyed_sends
        intake.decider = Deciding(self.keyed_sends, self.requests)

    def cancel(self, asked: Asked, answer: Answer, subject: bytes = b"", *, exact: bool = False) -> None:
        """End pending messages; ``answer`` is called with one answer a row, once they are durable (rule C1). With a
        subject, it is called with BadArgument when a message has another one. An ``exact`` request is about the rows
        themselves: those that were moved since stay, and are CHANGED.

        Raises ServerFenced, SlowDown, Stopping, BadRequest: nothing is done.
        """
        self._fence.check()
        self.requests.take(Whole(RequestWish.CANCEL, asked, Reply(answer), subject=subject, exact=exact))

    def get(self, asked: Asked, answer: Answer, subject: bytes = b"") -> None:
        """Call back with what became of messages; raises as `cancel`."""
        self._fence.check()
        self.requests.take(Whole(RequestWish.GET, asked, Reply(answer), subject=subject))

    def reschedule(
        self,
        asked: Asked,
        wanted_at_ms: Int64s,
        answer: Answer,
        subject: bytes = b"",
        moved_by: MoveTry | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """Move pending messages to other instants; ``answer`` is called with one answer a row, once they are durable.
        With ``moved_by``, each is moved once however often that is asked for under its number (rule I1). ``exact`` is
        that of `cancel`.

        Raises PastHorizon, BadInstant, HourFull, ClockInDoubt, DiskReserve, and as `cancel`: nothing is done.
        """
        self._fence.check()
        reply: Reply[AnswerRows] = Reply(answer)
        self.requests.take(
            Whole(RequestWish.MOVE, asked, reply, wanted_at_ms, subject=subject, tries=moved_by, exact=exact)
        )

    def find(self, window: AskedWindow, answer: OnFound) -> None:
        """Call back with the next pending messages of a subject and a window; raises as `cancel`."""
        self._fence.check()
        self._finder.find(window, answer)

    def let_leave(self, order: DrainOrder, answer: OnProgress) -> None:
        """Let the next pending messages of a walk go to another delay server; raises as `cancel`, and BadArgument.

        Messages with keys go when their slots are served here no more: then nobody meets such a message while it is on
        its way.
        """
        self._fence.check()
        if not order.to or order.slots is None:
            self.drain.piece(order, answer)
            return

        slots = order.slots

        def counted(piece: DrainProgress, count: int | DelaydError) -> None:
            answer(count if isinstance(count, DelaydError) else piece._replace(left=count))

        def told(piece: DrainProgress | DelaydError) -> None:
            if isinstance(piece, DelaydError) or piece.place is not None:
                answer(piece)
            else:
                self._pending_keys.count(slots, partial(counted, piece))

        def left(error: DelaydError | None) -> None:
            if error is None:
                try:
                    self.drain.piece(order, told)
                except DelaydError as refused:
                    error = refused
            if error is not None:
                answer(error)

        self.owned_slots.leave(slots, order.to, left)

    def ask_by_key(
        self,
        wish: RequestWish,
        names: Batch,
        answer: Answer,
        wanted_at_ms: Int64s | None = None,
        tries: Tries | None = None,
    ) -> None:
        """Do the same as `cancel`, `get` or `reschedule` for messages that an ASKED batch names by their keys. With
        ``tries``, a change is made once however often it is asked for under its number (rule I1).

        Raises as those do; SlowDown, too, while the index of keys is made again.
        """
        self._fence.check()
        self._keyed_requests.ask(wish, names, answer, wanted_at_ms, tries)

    def ask_recurring(self, request: RecurringRequest, answer: OnRecord) -> None:
        """Do what a caller wants of a recurring schedule; see `Carriers.ask`."""
        self.carriers.ask(request, answer)

    def held(self) -> dict[str, int]:
        """What requests that are not answered hold, for STATUS; everything is 0 when each of them is answered."""
        return {
            "asked_rows": self.requests.rows_under_way,
            "asked_copies": self.requests.copies_under_way,
            "key_look_ups": len(self.taken_names),
            "find_pieces": len(self._finder),
        }


class Deciding:
    """The one decider of a delay server: keyed sends of a commit first, then requests about messages. Before both come
    the cancels by key that have waited for such sends long enough.
    """

    def __init__(self, sends: KeyedSends, requests: MessageRequests) -> None:
        self._sends = sends
        self._requests = requests

    @property
    def waiting(self) -> bool:
        """Whether there is something to decide."""
        return self._sends.waiting or self._requests.waiting

    def close(self, group: OpenGroup) -> Decided:
        """Decide what waits."""
        self._requests.open(group)
        ended = self._sends.close(group)
        decided = self._requests.close(group, ended)
        keyed = [entry for entry in group.stored if ColumnId.KEY_END in entry.batch.offsets]
        if not keyed:
            return decided
        verdicts: dict[int, bytes] = {}
        for _, base_sequence, batch in keyed if len(ended) else ():
            told = decided_about(ended, base_sequence, batch.count)
            if len(told):
                verdicts[base_sequence] = told.tobytes()
        return decided._replace(verdicts=verdicts, keyed=True)

    def committed(self) -> None:
        """What was decided is durable, and takes effect."""
        self._sends.committed()
        self._requests.committed()

    def answer(self) -> None:
        """Tell those who asked; senders are told when their rows are indexed."""
        self._requests.answer()

    def refused(self, error: DelaydError) -> None:
        """Nothing could be stored."""
        self._sends.refused()
        self._requests.refused(error)


Told = Callable[[int | DelaydError], None]
PENDING = (MessageState.PENDING, MessageState.IN_FLIGHT)


class _AskedBatch(NamedTuple):
    """What a request wants."""

    wish: RequestWish
    batch: Batch
    at_ms: Int64s | None
    tries: Tries | None
    rewrites: Rewrites | None


class KeyedRequests:
    """All requests by key; belongs to the loop."""

    def __init__(self, worker: Executor, taken: TakenNames, owned: OwnedSlots, requests: MessageRequests) -> None:
        self._owned = owned
        self._worker = worker
        self._taken = taken
        self._requests = requests

    def ask(
        self,
        wish: RequestWish,
        batch: Batch,
        answer: Answer,
        wanted_at_ms: Int64s | None = None,
        tries: Tries | None = None,
        rewrites: Rewrites | None = None,
    ) -> None:
        """Take a request whose names are those of an ASKED batch; ``answer`` is called with one answer a row, or with
        an error. ``wanted_at_ms`` are the instants to which rows are to be moved.

        Raises:
            SlowDown, Stopping, and as `MessageRequests.take`: nothing of it is done.
        """
        reply: Reply[AnswerRows] = Reply(answer)
        with reply.begins():
            self._requests.begin(reply, batch.count, wanted_at_ms, tries)
            self._look_up(_AskedBatch(wish, batch, wanted_at_ms, tries, rewrites), reply)

    def _look_up(self, wanted: _AskedBatch, reply: Reply[AnswerRows]) -> None:
        self._taken.check()
        watch, view = self._taken.begin()
        reply.holds(partial(self._taken.end, watch))
        work = partial(_find, view, wanted.batch)
        self._worker.submit(work, partial(self._found, wanted, watch, reply), Priority.DUE)

    def _found(
        self, wanted: _AskedBatch, watch: Watch, reply: Reply[AnswerRows], done: Done[tuple[AskedNames, Newest]]
    ) -> None:
        with reply.goes_on():
            try:
                names, found = done.result()
            except DamagedData as error:
                self._taken.damaged(error)
                raise
            slots = slots_of_names(names.names)
            if self._owned.are_served(slots):
                named = Named(self._taken, watch, names, found)
                self._requests.ask_named(wanted.wish, named, wanted.at_ms, reply, wanted.tries, wanted.rewrites)
            else:
                # What the look-up found may be old when meta has answered: then the names are looked up anew.
                self._taken.end(watch)
                self._owned.admit(slots, partial(self._admitted, wanted, reply))

    def _admitted(self, wanted: _AskedBatch, reply: Reply[AnswerRows], error: DelaydError | None) -> None:
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
        asked = Asked(piece["sequence"].copy(), piece["deliver_at_ms"].copy(), accepted_at_ms)
        self._requests.take(Whole(RequestWish.GET, asked, Reply(partial(self._answered, count))))

    def _answered(self, count: _Count, answers: AnswerRows | DelaydError) -> None:
        with count.reply.goes_on():
            if isinstance(answers, DelaydError):
                raise answers
            count.pending += int(np.count_nonzero(np.isin(answers["state"], PENDING)))
            self._ask(count)


def _find(view: View, batch: Batch) -> tuple[AskedNames, Newest]:
    asked = view.asked(Names.of_batch(batch, batch.keyed_rows()))
    return asked, view.find(asked, _nothing)


def _nothing() -> None:
    """A request looks up few names: it does not give way."""
