"""Outcome: what may become of a message, each outcome declared once, with all that follows from it.

Invariant: nothing else lists outcomes. Dispatch logs, what askers are told, the audit and its tables, the words of
commands, traces and Spark take theirs from here, and docs/formats/dispatch.md is compared with it ("Adding an
outcome"). Two other places name some outcomes, because they have a fixed room for each: the seal of an hour counts the
first five (docs/formats/seal.md), and `delayd.reading.findings.HourSummary` has a figure for each.

An example. Row 7 expired. Its dispatch log has the number 4, `delayd get` says `expired`, the audit counts it in
``expired`` and holds its claim against its expiry, and `delayd dispatch show --outcome expired` lists it.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Self


class MessageState(IntEnum):
    """What became of a message so far."""

    UNKNOWN = 0
    PENDING = 1
    IN_FLIGHT = 2
    DISPATCHED = 3
    DEAD = 4
    EXPIRED = 5
    IN_DOUBT = 6
    CANCELLED = 7
    MOVED = 8
    REPLACED = 9
    REJECTED = 10
    KEPT = 11
    DRAINED = 12  # It is at another delay server: ``target_log_id``, ``other`` and ``target_appended_at_ms`` say where.


class Proof(Enum):
    """What shows that an outcome was wished; the audit calls one without its proof a mismatch."""

    NONE = "none"  # Servers or operators decide it.
    REASON = "reason"  # Its part has a `Reason`, and the message log may have the decision.
    CLAIM = "claim"  # The row was claimed when it was due, not before the expiry of its message (rule S8).


class Outcome(IntEnum):
    """What became of a message (rule S2); the number is that of dispatch logs."""

    state: MessageState  # What askers are told, unless a `Reason` says more.
    proof: Proof

    def __new__(cls, number: int, state: MessageState = MessageState.UNKNOWN, proof: Proof = Proof.NONE) -> Self:
        """A number that says what follows from it."""
        outcome = int.__new__(cls, number)
        outcome._value_, outcome.state, outcome.proof = number, state, proof
        return outcome

    @property
    def word(self) -> str:
        """As people and columns name it, such as ``in_doubt``."""
        return self.name.lower()

    DISPATCHED = 1, MessageState.DISPATCHED
    CANCELLED = 2, MessageState.CANCELLED, Proof.REASON
    DEAD = 3, MessageState.DEAD
    EXPIRED = 4, MessageState.EXPIRED, Proof.CLAIM
    IN_DOUBT = 5, MessageState.IN_DOUBT


class Reason(IntEnum):
    """Why a message was CANCELLED (docs/keys.md); 0 stands in parts of all other outcomes."""

    state: MessageState
    took_key: bool  # False: a row with a key that ended for this reason never took it.

    def __new__(cls, number: int, state: MessageState = MessageState.UNKNOWN, took_key: bool = True) -> Self:
        """A number that says what follows from it."""
        reason = int.__new__(cls, number)
        reason._value_, reason.state, reason.took_key = number, state, took_key
        return reason

    CANCELLED = 1, MessageState.CANCELLED  # A caller asked for it.
    MOVED = 3, MessageState.MOVED
    REPLACED = 4, MessageState.REPLACED
    REJECTED = 5, MessageState.REJECTED, False
    KEPT = 6, MessageState.KEPT, False
    IN_FLIGHT = 7, MessageState.REJECTED, False
    DRAINED = 8, MessageState.DRAINED  # It lives on at another delay server (docs/drain.md).


LIVE_ON = (Reason.MOVED, Reason.DRAINED)
"""Why a message is cancelled that goes on as another row, at this delay server or at another one."""
TOOK_NO_KEY = tuple(reason for reason in Reason if not reason.took_key)
_REASON_NAMES = {reason.value: reason.name.lower() for reason in Reason}


def reason_name(reason: int) -> str:
    """The reason as people read it; a number that this version does not know stays a number."""
    return _REASON_NAMES.get(reason, str(reason))
