"""Stale handles: what the answers to ACK, NACK, RETRY, REJECT and EXTEND say of them (docs/protocol.md)."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from delayd.wire.heads import (
    HANDLE_MOST,
    need_list,
    need_rows,
)

from .frame import Head

StaleRow = list[int]
"""Incarnation, first pull sequence, count and why."""


class Why(IntEnum):
    """Why a server no longer holds messages for the consumer that names them."""

    UNKNOWN = 0  # Their pull was lost in a crash, or is older than what the server remembers.
    LEASE_ENDED = 1
    GIVEN_BACK = 2  # By the consumer itself, with another word than the one that was refused.
    ANOTHER_HOLDS = 3  # The handle belongs to another connection.
    FENCED = 4  # Another consumer leads the exclusive group now.
    ACKNOWLEDGED = 5  # By the consumer itself, so another word can change nothing.


class Said(NamedTuple):
    """One way to call a reason: a word for programs, and one for people."""

    word: str
    text: str


SAID = {
    Why.UNKNOWN: Said("unknown", "of a pull that the server does not know"),
    Why.LEASE_ENDED: Said("lease_ended", "past the lease"),
    Why.GIVEN_BACK: Said("given_back", "given back before"),
    Why.ANOTHER_HOLDS: Said("another_holds", "held for another consumer"),
    Why.FENCED: Said("fenced", "of a consumer that another one has replaced"),
    Why.ACKNOWLEDGED: Said("acknowledged", "acknowledged before"),
}


def stale_head(stale: Iterable[Sequence[int]], wanted: int) -> Head:
    """The head of an answer."""
    rows = [*stale]
    return {"stale": [[*row[:3]] for row in rows], "why": [int(row[3]) for row in rows], "wanted": wanted}


def read_stale(head: Head) -> list[StaleRow]:
    """The stale handles of an answer; a server that names no reason, or one that is newer, gives UNKNOWN.

    Raises:
        BadRequest: the answer is malformed.
    """
    rows = need_rows(head, "stale", 3, HANDLE_MOST)
    why = need_list(head, "why") if "why" in head else []
    known = [each if type(each) is int and each in SAID else int(Why.UNKNOWN) for each in why[: len(rows)]]
    known += [int(Why.UNKNOWN)] * (len(rows) - len(known))
    return [[*row, reason] for row, reason in zip(rows, known, strict=True)]
