"""What a realtime server and its consumers say of groups: positions, stale handles, listings (docs/protocol.md).

A *position* is where a group of consumers begins, or is moved to, as PULL, SUBSCRIBE and MOVE_GROUP name it. A *stale*
handle is one that the server no longer holds; the answers to ACK, NACK, RETRY, REJECT and EXTEND name it, and say why.

SUBJECTS and GROUPS list what there is, row by row. Invariant: a listing is written and read here only; `take_rows` cuts
it so that an answer fits one head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum
from typing import NamedTuple

from delayd.errors import BadRequest
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    HANDLE_MOST,
    INT_MAX,
    as_head,
    need_instant,
    need_int,
    need_list,
    need_rows,
    read_page,
    take_rows,
)


class End(Enum):
    """One of the two ends of what is kept of a subject."""

    EARLIEST = "earliest"  # The first message that is kept.
    LATEST = "latest"  # Behind the last one.


class AtInstant(NamedTuple):
    """The first message that a delay server handed over at this instant or later."""

    instant_ms: int


class AtSequence(NamedTuple):
    """The message with this consume sequence."""

    sequence: int


Position = End | AtInstant | AtSequence


def position_value(position: Position) -> HeadValue:
    """A position as the field of a head."""
    return position.value if isinstance(position, End) else dict(position._asdict())


def read_position(head: Head, name: str) -> Position:
    """The position in a field.

    Raises:
        BadRequest: it is none.
    """
    value = head.get(name)
    for end in End:
        if value == end.value:
            return end
    if isinstance(value, dict) and len(value) == 1:
        inner = as_head(value, name)
        if "instant_ms" in inner:
            return AtInstant(need_instant(inner, "instant_ms"))
        if "sequence" in inner:
            return AtSequence(need_int(inner, "sequence", 0, INT_MAX))
    known = "earliest, latest, {instant_ms} or {sequence}"
    raise BadRequest(f"{name} is {value!r:.100}, and must be {known}", field=name)


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


class SubjectInfo(NamedTuple):
    """A subject at a realtime server: its kept consume sequences [first, end), and how many groups it has."""

    name: str
    messages: int  # How many are kept.
    first: int  # Where the kept ones begin, a consume sequence.
    end: int  # Just behind the last one.
    quarantined: int  # How many can't be read.
    groups: int  # How many groups it has.
    oldest_ms_ago: int | None = None  # The age of the first kept message; nil when there is none, or nobody can tell.


class GroupInfo(NamedTuple):
    """How far a group of consumers is in its subject, in consume sequences and counts of messages."""

    subject: str
    group: str
    end: int  # Where the subject ends, a consume sequence.
    next: int  # Where the messages begin that were not pulled yet.
    outstanding: int  # Held by consumers: pulled and not yet acknowledged.
    redelivering: int  # Given back, or with a lease that ended: they are offered again.
    quarantined: int  # How many can't be read.
    oldest_unacked: int  # Its first message that is not acknowledged.
    group_id: int  # Its number in the pull log.
    leaving: int  # To come again later, or dead letters, and their delay server has not taken them yet.
    paused: bool  # An operator lets nobody pull its messages.
    ephemeral: bool  # It ends when it has no consumers any more.
    filter: str  # The tags that it wants, in words; empty: it gets all messages.
    ordered: bool  # It gets the messages of each ordering key one after the other.
    exclusive: bool  # One of its consumers leads, and gets all messages.
    standbys: int  # How many PULLs of others wait to take over.
    in_flight_max: int  # How many messages its consumers may hold; 0: any number.
    oldest_ms_ago: int | None = None  # How long ago the oldest one was handed over, also one that came again; or nil.


def subjects_head(subjects: Iterable[SubjectInfo], limit: int) -> Head:
    """The answer to SUBJECTS: at most `limit` rows, as many as a head holds, and whether there are more."""
    return _page("subjects", subjects, limit)


def read_subjects(head: Head) -> tuple[list[SubjectInfo], bool]:
    """The rows of an answer to SUBJECTS, and whether there are more."""
    return read_page(SubjectInfo, head, "subjects")


def groups_head(groups: Iterable[GroupInfo], limit: int) -> Head:
    """The answer to GROUPS: at most `limit` rows, as many as a head holds, and whether there are more."""
    return _page("groups", groups, limit)


def read_groups(head: Head) -> tuple[list[GroupInfo], bool]:
    """The rows of an answer to GROUPS, and whether there are more."""
    return read_page(GroupInfo, head, "groups")


def _page(name: str, rows: Iterable[SubjectInfo] | Iterable[GroupInfo], limit: int) -> Head:
    taken, more = take_rows((row._asdict() for row in rows), limit)
    return {name: taken, "more": more}
