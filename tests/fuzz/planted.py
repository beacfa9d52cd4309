"""Bugs in the delay server's answers, and in what it holds for requests, which the fuzzer of cores must see."""

from __future__ import annotations

from delayd.delay.ending import requested
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.ending.requested import Requested
from delayd.delay.keys.index import TakenNames
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.ledger.wanted import wanted_of
from realtime.pulls import Pulls
from tests.worlds.patches import Bugs, Patch


def _believe_made_up_receipts(self, look, locations=None):  # type: ignore[no-untyped-def]
    told = _states(self, look, locations)
    told.answers["state"][told.answers["state"] == 0] = 1
    return told


def _tell_another_instant(self, states):  # type: ignore[no-untyped-def]
    states["decided_at_ms"] += self.looks + (self.look.found is not None)
    return _told(self, states)


_states = Ledger.states
_told = Requested.answers

PLANTED: Bugs = {
    "C1: a request that is sent again is not told what its earlier try has ended": [
        Patch(Requested, "pin", lambda self, producers: False)
    ],
    "I1: a move by receipt that is sent again undoes what came between": [
        Patch(Requested, "_moves_since", lambda self, producers: 0)
    ],
    "C1: an answer tells another instant of the decision": [Patch(Requested, "answers", _tell_another_instant)],
    "C1: a receipt that somebody made up is believed": [Patch(Ledger, "states", _believe_made_up_receipts)],
    "C1: what is cancelled is not claimed": [Patch(Ledger, "claim", lambda self, wanted, claimable: None)],
    "C1: two receipts that lead to one row are taken as they were asked": [
        Patch(requested, "wanted_newest", lambda asked, told: wanted_of(asked))
    ],
    "B2: the room of an answered request stays taken": [
        Patch(MessageRequests, "_give_room_back", lambda self, rows: None)
    ],
    "B2: what a look-up remembers stays when it has ended": [Patch(TakenNames, "end", lambda self, watch: None)],
}
PLANTED_IN_REALTIME: Bugs = {
    "B1: waiting pulls outlive their connections": [
        Patch(Pulls, "disconnected", lambda self, peer: None),
        Patch(Pulls, "wake", lambda self: None),
    ],
}
