"""Bugs to plant in the delay server: each takes one rule out and leaves all else as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from delayd.delay import recovery
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.ending.keyed_sends import KeyedSends
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.handoff.link import Link, Phase
from delayd.delay.handoff.sender import Sender
from delayd.delay.handoff.window import SentBatch
from delayd.delay.handoff.wire import Wire
from delayd.delay.intake import Decided, OpenGroup
from delayd.delay.ledger.ledger import Ledger, RowPlaces
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.rows import Rows
from delayd.delay.timers.loading import Loading
from delayd.log.hour import NO_ENDED, EndedRows, NewPart
from delayd.outcome import Outcome
from tests.worlds import port_bugs
from tests.worlds.patches import Bugs, Patch, changed


def _decide_when_acknowledged(self: Sender, sent: SentBatch, offset: int, appended_at_ms: int) -> None:
    self.window.decide(sent.batch_id)
    part = NewPart(
        sent.rows["sequence"],
        sent.deliver_at_ms,
        Outcome.DISPATCHED,
        sent.claimed_at_ms,
        self._target,
        self._origin.epoch,
        sent.batch_id,
        appended_at_ms,
        offset,
    )
    self._outcomes.record(sent.hour, part, int)


def _say_durable_at_once(
    self: OutcomeLog, durable: Callable[[], None], full: Callable[[str], None] | None = None
) -> None:
    durable()


def _forget_outcomes(*arguments: object) -> recovery.FoundOutcomes:
    return recovery.FoundOutcomes()


def _ignore_this_epoch(
    self: Link, facts: list[int], *columns: *tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]]
) -> None:
    if facts[0] != self._origin.epoch:
        _arrived(self, facts, *columns)


def _send_at_once(self: Link, session: int, wire: Wire) -> None:
    _connected(self, session, wire)
    if session == self._session:
        self.phase = Phase.READY


def _answer_when_decided(self: MessageRequests, group: OpenGroup, ended: EndedRows = NO_ENDED) -> Decided:
    decided = _close(self, group, ended)
    if self._commit is not None:
        answers, self._commit.answers = self._commit.answers, []
        for request, states in answers:
            self._answer(request, states)
    return decided


def _claim_nothing(self: Ledger, wanted: Wanted, claimable: RowPlaces) -> None:
    pass


def _replace_without_a_claim(self: KeyedSends, *arguments: object) -> None:
    pass


def _owe_nothing(*arguments: object) -> EndedRows:
    return NO_ENDED


def _undo_nothing(self: Ledger) -> None:
    self.end(NO_ENDED)


def _nothing_has_left(self: Dispatcher, rows: Rows) -> NDArray[np.bool_]:
    return np.zeros(len(rows), np.bool_)


_close = MessageRequests.close
_arrived = Link._arrived
_connected = Link._connected

SEAL_WITHOUT_A_SYNC = port_bugs.unsynced("/seal/")
PLANTED: Bugs = {
    "L2: a send is answered and its log is not synced": port_bugs.unsynced("/delay/message/"),
    "H1: W passes a batch whose outcome is not durable": [Patch(Sender, "acknowledge", _decide_when_acknowledged)],
    "H4: a session sends before the answered rows are durable": [
        Patch(OutcomeLog, "when_durable", _say_durable_at_once)
    ],
    "H4: a session sends before the window is answered": [Patch(Link, "_connected", _send_at_once)],
    "P2: a checkpoint counts schedule logs that are not durable": port_bugs.NO_CHECKPOINT_IS_SYNCED,
    "P4: recovery ignores the dispatch logs": [Patch(recovery, "_recover_outcomes", _forget_outcomes)],
    "H6: rows are taken back though the window names them": [Patch(Link, "_arrived", _ignore_this_epoch)],
    "H5: a checkpoint passes a note and does not keep it": [port_bugs.forgotten(b"target/")],
    "I1: a checkpoint passes batches and forgets their numbers": [port_bugs.forgotten(b"producer/")],
}
# These show only in lives in which an operator believes a clock that is wrong.
PLANTED_IN_CLOCKS: Bugs = {
    "T4: hours that the log was stamped in are not loaded once it is set back": [
        Patch(Loading, "step", changed(Loading.step, ", reach) + 1", ", 0) + 1"))
    ],
}
# These show only in lives in which somebody cancels messages, or sends with keys.
PLANTED_IN_CANCELS: Bugs = {
    "C1: a cancel is answered before its decision is durable": [Patch(MessageRequests, "close", _answer_when_decided)],
    "C1: rows are not claimed": [Patch(Ledger, "claim", _claim_nothing)],
    "C1: rows of a loaded hour are claimed for its load": [
        Patch(Ledger, "places", changed(Ledger.places, "self.hours.are_far(wanted.hours)", "wanted.hours > 0"))
    ],
    "C1: rows that are replaced by key are not claimed": [Patch(KeyedSends, "_claim", _replace_without_a_claim)],
    "C1: a claimed row that falls due is handed out": [
        Patch(Ledger, "may_leave", changed(Ledger.may_leave, "self._marked or self._open", "False"))
    ],
    "C1: rows of a durable decision are not noted": [
        Patch(
            Ledger,
            "end",
            changed(Ledger.end, "self._note(hour, pile.in_one())", "self._note(hour, NO_SEQUENCES)"),
        )
    ],
    "C1: a row that an earlier life may have sent is claimed": [Patch(Dispatcher, "may_have_left", _nothing_has_left)],
    "C1: a decision that the disk refused leaves its claims": [Patch(Ledger, "undo", _undo_nothing)],
    "C2: a checkpoint passes a decision and does not name its rows": [port_bugs.forgotten(b"ended")],
    "P1: a start does not read the decisions": [Patch(recovery, "_owe", _owe_nothing)],
}
# Each makes an answer about a message untrue, whatever becomes of the deliveries.
PLANTED_IN_ANSWERS: Bugs = {
    "C1: a row that a target has counts as waiting": [
        Patch(Ledger, "_look_outside", changed(Ledger._look_outside, "RowPlace.IN_FLIGHT", "RowPlace.OUT"))
    ],
    "H5: a row that an earlier life may have sent counts as waiting": [
        Patch(Ledger, "_place", changed(Ledger._place, "self.handoff.may_have_left(rows)", "rows['hour'] == 0"))
    ],
}
