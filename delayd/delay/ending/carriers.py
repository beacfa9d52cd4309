"""Carriers: the rows that stand for recurring schedules, from the instant at which one is due, or a caller asks about
it, to the durable decision (docs/recurring.md; rules P1, I4).

     the wheel ──▶ the dispatcher, which hands it to nobody ──▶ due
                                                                 ├──▶ a move whose new rows are computed ──▶ durable
     a caller ──▶ by its name, as by every key ─────────────────▶╯        in one group with occurrences and skips
                  no such row, and it is to be made ──▶ a keyed send of this server's own

Invariant: one request decides what is due, over all carriers at once; callers' requests meet it as they meet any move.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgpack
import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import Int64s, ProducerPart
from delayd.batch.names import RECURRING_SUBJECT
from delayd.batch.sequences import Sequences
from delayd.delay.ending.copies import Rewrites
from delayd.delay.ending.message_requests import Answer, MessageRequests
from delayd.delay.ending.occurrences import (
    ENDS,
    LEAD_MS,
    RECURRING,
    Asks,
    Recurs,
    Rewriting,
    batch_of_rows,
    carrier_of,
    check_version,
    first_record,
)
from delayd.delay.ending.overlaps import Overlaps
from delayd.delay.ending.own_rows import OwnRows, OwnWish
from delayd.delay.ending.requested import RequestWish, Whole
from delayd.delay.intake import Intake
from delayd.delay.keys.owned_slots import OwnedSlots
from delayd.delay.producers import AcceptedBatch
from delayd.delay.reply import Reply
from delayd.delay.state_values import RESTORED_KEY
from delayd.errors import ClockInDoubt, DamagedValue, DelaydError, NoRecurring, SlowDown, key_text
from delayd.machine.executor import Priority
from delayd.machine.identity import Site
from delayd.machine.operating import Fence
from delayd.outcome import MessageState
from delayd.recurrence.deciding import ON_TIME_MS
from delayd.wire.asked import AnswerRows, Asked, AskedKeys, RescheduleAnswer, Tries, encode_asked_keys, read_asked_keys
from delayd.wire.recurring import (
    SCHEDULES_ASKED_MAX,
    AskedSchedule,
    RecurringRecord,
    RecurringRequest,
    RecurringWish,
)

log = logging.getLogger(__name__)

AGAIN_MS = 1_000  # What no target tells is asked again so soon.
AGAIN_MS_MAX = 8_000  # After twice as long each time: each try reads the carriers.
MAKE_TRIES = 3  # A schedule that is made and deleted again and again by others.


class AskByKey(Protocol):
    """Takes a request about a row by its key, as `delayd.delay.ending.endings.KeyedRequests.ask` does."""

    def __call__(
        self,
        wish: RequestWish,
        batch: Batch,
        answer: Answer,
        wanted_at_ms: Int64s | None = None,
        tries: Tries | None = None,
        rewrites: Rewrites | None = None,
    ) -> None:
        """Raises SlowDown, Stopping, DiskReserve: nothing of it is done."""


OnRecord = Callable[[RecurringRecord | DelaydError], None]
_OVER = (MessageState.PENDING, MessageState.IN_FLIGHT)


class Carriers:
    """All recurring schedules of this server; belongs to the loop."""

    overlaps: Overlaps  # Set once.

    def __init__(
        self,
        site: Site,
        fence: Fence,
        intake: Intake,
        owned: OwnedSlots,
        requests: MessageRequests,
        by_key: AskByKey,
    ) -> None:
        self._owned = owned
        self._clock = site.clock
        self._fence = fence
        self._intake = intake
        self._ask_by_key = by_key
        self._unanswered: set[AskedSchedule] = set()  # Schedules that wait because nothing is known of their messages.
        self._found: list[set[AskedSchedule]] = []  # Those that the decision under way finds; the worker fills them.
        self._untold_ms = AGAIN_MS  # How long until what no target has told is asked again.
        self.draw: Callable[[], int] = lambda: 0  # A random number of 64 bits.
        self._producer_id = 0  # Of this life's batches with new carriers, once there is one.
        self._sends = 0  # Batches with new carriers.
        # Those that can't be read or decided about now, or that another server gets, are set aside.
        wish = OwnWish(RECURRING_SUBJECT, Priority.DUE, self._wish, RescheduleAnswer.MOVED, self._decided)
        self.rows = OwnRows(site, fence, intake, requests, wish)
        self._unserved: set[int] = set()  # Slots of carriers that this server does not serve.
        self._restored_ms = _read_restored(site)
        self.occurrences = Counter(dict.fromkeys(ENDS, 0))  # Decided durably since the start, by what became of them.

    # What is due.

    def _wish(self, asked: Asked, reply: Reply[AnswerRows]) -> Whole:
        """The request that decides about carriers which are due."""
        wanted_at_ms = np.full(len(asked.sequences), self._clock.now_ms(), np.int64)
        rewrites = Rewriting(self._recurs_ahead, self.occurrences.update)
        return Whole(RequestWish.MOVE, asked, reply, wanted_at_ms, rewrites=rewrites)

    def _recurs_ahead(self) -> Recurs:
        now_ms = self._clock.now_ms()
        served = self._owned.owned & ~self._owned.leaving
        recurs = Recurs(
            now_ms,
            now_ms + LEAD_MS,
            self._restored_ms,
            self.overlaps.take(),
            served=served,
            unserved=self._unserved,
        )
        self._found.append(recurs.unanswered)
        return recurs

    def restored(self, at_ms: int) -> None:
        """An operator lets this server go on though its directory was put back from an older copy: what recurred up to
        that instant may have been sent.
        """
        self._restored_ms = at_ms

    def _decided(self, stayed: Sequences) -> None:
        self._unanswered.update(*self._found)
        self._found.clear()
        if len(stayed):
            self._ask_for_slots()
            self._look_for_overlaps()

    def _look_for_overlaps(self) -> None:
        """Ask whether messages of some schedules are unacknowledged."""
        if self._unanswered and not self.overlaps.is_looking:
            asked = sorted(self._unanswered)[:SCHEDULES_ASKED_MAX]
            self._unanswered.difference_update(asked)
            self.overlaps.look(asked, self._looked)

    def _looked(self, unknown: int) -> None:
        if unknown:
            self.rows.try_again(self._untold_ms)
            self._untold_ms = min(2 * self._untold_ms, AGAIN_MS_MAX)
        else:
            self._untold_ms = AGAIN_MS
        if self.overlaps.known:
            self.rows.try_again()
        self._look_for_overlaps()

    def targets_changed(self) -> None:
        """A target can be asked that could not be asked before, or a subject has one."""
        if self._untold_ms > AGAIN_MS:
            self.rows.try_again()

    def _ask_for_slots(self) -> None:
        """Ask meta about slots of schedules that came from another delay server."""
        slots = np.array(sorted(self._unserved), np.uint16)
        self._unserved.clear()
        slots = slots.compress(~self._owned.leaving.take(slots))
        if len(slots):
            self._owned.admit(slots, self._heard_of_slots)

    def _heard_of_slots(self, error: DelaydError | None) -> None:
        if error is None:
            self.rows.try_again()

    # What callers ask.

    def ask(self, request: RecurringRequest, answer: OnRecord) -> None:
        """Do what a caller wants of a schedule; ``answer`` is called with its record afterwards, once that is durable.

        Raises:
            ServerFenced, ClockInDoubt, SlowDown, Stopping, DiskReserve: nothing is done.
        """
        self._fence.check()
        reply: Reply[RecurringRecord] = Reply(answer)
        with reply.begins():
            self._ask(request, reply, MAKE_TRIES)

    def _ask(self, request: RecurringRequest, reply: Reply[RecurringRecord], tries: int) -> None:
        if not self._clock.confirmed:
            raise ClockInDoubt("this server's clock is in doubt, so nothing recurs; see `delayd clock`, or ask later")
        asks: list[Asks] = []

        def change() -> Asks:
            now_ms = self._clock.now_ms()
            overlaps = self.overlaps
            recurs = Recurs(now_ms, now_ms, self._restored_ms, overlaps.known, overlaps.untold(ON_TIME_MS))
            asks[:] = [Asks(request, recurs)]
            return asks[0]

        names = read_asked_keys(encode_asked_keys(AskedKeys(RECURRING, [request.name])))
        assert names is not None, "it is asked by key"
        wanted_at_ms = np.array([self._clock.now_ms()], np.int64)
        self._ask_by_key(
            RequestWish.MOVE,
            names,
            partial(self._asked, request, reply, tries, asks),
            wanted_at_ms,
            rewrites=Rewriting(change, self.occurrences.update),
        )

    def _asked(
        self,
        request: RecurringRequest,
        reply: Reply[RecurringRecord],
        tries: int,
        asks: list[Asks],
        told: AnswerRows | DelaydError,
    ) -> None:
        with reply.goes_on():
            if isinstance(told, DelaydError):
                raise told
            (row,) = told
            record = asks[0].told if asks else None
            is_pending = row["state"] == MessageState.PENDING
            if is_pending and record is not None and (asks[0].is_done or row["answer"] == RescheduleAnswer.MOVED):
                reply.end(record)
            elif row["state"] in _OVER:
                raise SlowDown(f"the schedule {request.name.decode()!r} is being changed at this moment; ask again")
            elif request.wish is RecurringWish.PUT and tries:
                check_version(request, None)
                self._make(request, reply, tries - 1)
            else:
                raise NoRecurring(f"there is no recurring schedule {request.name.decode()!r}")

    def _make(self, request: RecurringRequest, reply: Reply[RecurringRecord], tries: int) -> None:
        now_ms = self._clock.now_ms()
        record = first_record(request, now_ms)
        self._producer_id = self._producer_id or self.draw() >> 1 | 1
        self._sends += 1
        part = ProducerPart(self._producer_id, self._sends, self._sends)
        batch = batch_of_rows([carrier_of(request.name, record, now_ms)], part)

        def sent(what: AcceptedBatch | DelaydError, _: bool) -> None:
            with reply.goes_on():
                if isinstance(what, DelaydError):
                    raise what
                if not what.decided:
                    reply.end(record)
                elif tries:
                    # Somebody else has made it in the meantime.
                    self._ask(request, reply, tries)
                else:
                    raise SlowDown(f"the schedule {request.name.decode()!r} is being changed at this moment; ask again")

        self._intake.send(batch, sent, own=True)


def _read_restored(site: Site) -> int:
    try:
        value = site.state.get(RESTORED_KEY)
    except DamagedValue as error:
        # Nobody knows any more when that was: until now is late enough.
        log.warning("value_rebuilt key=%s source=clock", key_text(error.key))
        return site.clock.now_ms()
    return 0 if value is None else int(msgpack.unpackb(value))
