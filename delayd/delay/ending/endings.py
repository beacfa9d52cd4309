"""Endings: everything that callers ask about messages, put together from this folder's parts.

Each request is refused while a fence is up: this server may be a copy, and the right one knows better.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.delay.ending.drain import Drain, OnProgress
from delayd.delay.ending.finder import Answer as OnFound
from delayd.delay.ending.finder import Finder
from delayd.delay.ending.keyed_requests import KeyedRequests, PendingKeys
from delayd.delay.ending.keyed_sends import KeyedSends
from delayd.delay.ending.message_requests import Answer, MessageRequests
from delayd.delay.ending.requested import Wish
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.intake import Decided, Intake, OpenGroup
from delayd.delay.keys.index import KeyIndex
from delayd.delay.keys.owned_slots import AskSlots, OwnedSlots
from delayd.delay.keys.taken_names import TakenNames
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.producers import Producers
from delayd.errors import DelaydError
from delayd.log.hour import decided_about
from delayd.machine.identity import Site
from delayd.machine.operating import Fence
from delayd.wire.asked import Asked, DrainOrder, DrainProgress, MoveTry, Tries, Window


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
        self.drain = Drain(site, ledger, books.sources, self._finder, self.requests)
        intake.keyed = self.keyed_sends
        intake.decider = Deciding(self.keyed_sends, self.requests)

    def cancel(self, asked: Asked, answer: Answer, subject: bytes = b"") -> None:
        """End pending messages; ``answer`` is called with one answer a row, once they are durable (rule C1). With a
        subject, it is called with BadArgument when a message has another one.

        Raises ServerFenced, SlowDown, Stopping, BadRequest: nothing is done.
        """
        self._fence.check()
        self.requests.ask(Wish.CANCEL, asked, answer, subject)

    def get(self, asked: Asked, answer: Answer, subject: bytes = b"") -> None:
        """Call back with what became of messages; raises as `cancel`."""
        self._fence.check()
        self.requests.ask(Wish.GET, asked, answer, subject)

    def reschedule(
        self,
        asked: Asked,
        wanted_at_ms: Int64s,
        answer: Answer,
        subject: bytes = b"",
        moved_by: MoveTry | None = None,
    ) -> None:
        """Move pending messages to other instants; ``answer`` is called with one answer a row, once they are durable.
        With ``moved_by``, each is moved once however often that is asked for under its number (rule I1).

        Raises PastHorizon, BadInstant, HourFull, ClockInDoubt, DiskReserve, and as `cancel`: nothing is done.
        """
        self._fence.check()
        self.requests.move(asked, wanted_at_ms, answer, subject, moved_by)

    def find(self, window: Window, answer: OnFound) -> None:
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
        wish: Wish,
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
