"""Retiring: whether a delay server holds nothing any more, so that it may leave the cluster for good (docs/drain.md).

Invariant: a server that has said so takes nothing new until an operator takes it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from delayd.delay.ending.endings import Endings
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.intake import Intake
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.quarantine import Quarantine
from delayd.errors import BadArgument, DelaydError, ServerInUse
from delayd.hours import hour_name, hour_of_ms
from delayd.wire.asked import DrainOrder, DrainProgress

log = logging.getLogger(__name__)

RETRY_AFTER_MS = 1_000
OnRetired = Callable[[str | DelaydError], None]


@dataclass(frozen=True, slots=True)
class Retiring:
    """Looks at everything that may hold a message; belongs to the loop."""

    intake: Intake
    endings: Endings
    ledger: Ledger
    dispatcher: Dispatcher
    quarantine: Quarantine
    now_ms: Callable[[], int]

    def retire(self, done: OnRetired) -> None:
        """Call back when this server holds nothing, or with ServerInUse, which says what it holds.

        Raises:
            BadArgument: it is not cordoned, so it may get new messages.
        """
        if not self.intake.cordoned:
            raise BadArgument("this server takes new messages; cordon and drain it first, see `delayd server drain`")
        self._count(DrainOrder(0, None), 0, done)

    def _count(self, order: DrainOrder, found: int, done: OnRetired) -> None:
        self.endings.drain.piece(order, partial(self._counted, found, done))

    def _counted(self, found: int, done: OnRetired, piece: DrainProgress | DelaydError) -> None:
        if isinstance(piece, DelaydError):
            done(piece)
            return
        found += piece.found + piece.in_flight
        if piece.unread:
            done(_in_use(f"{piece.unread} schedule logs can't be read; see `delayd mend list`"))
        elif piece.place is not None:
            try:
                self._count(DrainOrder(0, None, piece.place, piece.until_sequence), found, done)
            except DelaydError as error:
                done(error)
        elif (held := self._held(found)) is not None:
            done(_in_use(held))
        else:
            log.warning("operator action=retire next_sequence=%d", self.intake.next_sequence)
            done(f"it holds nothing any more; its last message had the sequence {self.intake.next_sequence - 1}")

    def _held(self, pending: int) -> str | None:
        """What the server still holds; None: nothing."""
        links = self.dispatcher.links.values()
        undecided = sum(len(link.sender.window) for link in links)
        unsealed = self._unsealed()
        if pending:
            return f"{pending:,} messages are pending; drain it, or wait for those that are due soon"
        if self.endings.drain.rows:
            return f"{self.endings.drain.rows:,} messages are on their way to other servers"
        if undecided or self.dispatcher.unrouted_rows:
            return f"{undecided} batches are undecided at realtime servers; see `delayd target list`"
        if self.endings.owned_slots.owned.any():
            return "it owns slots of keys; drain it, which moves them"
        if len(self.ledger.owed) or not self.intake.idle:
            return "outcomes of its messages are being written"
        if len(self.quarantine):
            return "something of it is quarantined; see `delayd mend list`"
        if unsealed is not None:
            return f"hour {hour_name(unsealed)} has ended and is not sealed yet; it will be within a minute"
        return None

    def _unsealed(self) -> int | None:
        """The first hour that has ended, has messages and is not sealed."""
        filed = self.ledger.hours.filed
        this_hour = hour_of_ms(self.now_ms())
        ended = sorted(hour for hour in filed.rows["hour"].tolist() if hour < this_hour)
        return next((hour for hour in ended if not filed.get(hour).sealed), None)


def _in_use(what: str) -> ServerInUse:
    return ServerInUse(what, retry_after_ms=RETRY_AFTER_MS)
