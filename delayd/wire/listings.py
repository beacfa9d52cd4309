"""Subjects and groups of a realtime server, as SUBJECTS and GROUPS list them (docs/protocol.md, Realtime server).

Invariant: a listing is written and read here only, row by row; `take_rows` cuts it so that an answer fits one head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_bool,
    need_int,
    need_page,
    need_str,
)
from delayd.wire.room import take_rows


class SubjectInfo(NamedTuple):
    """A subject at a realtime server: its kept consume sequences [first, end), and how many groups it has."""

    name: str
    messages: int
    first: int
    end: int
    quarantined: int
    groups: int
    oldest_ms_ago: int | None  # The age of the first kept message; None when there is none, or nobody can tell.


class GroupInfo(NamedTuple):
    """How far a group of consumers is in its subject, in consume sequences and counts of messages."""

    subject: str
    group: str
    end: int  # Where the subject ends.
    next: int  # Where the messages begin that were not pulled yet.
    outstanding: int  # Pulled and not yet acknowledged.
    redelivering: int  # Given back, or with a lease that ended: they are offered again.
    quarantined: int
    oldest_unacked: int
    group_id: int
    leaving: int  # To come again later, or dead letters, and their delay server has not taken them yet.
    paused: bool  # An operator lets nobody pull its messages.
    ephemeral: bool  # It ends when it has no consumers any more.
    filter: str  # The tags that it wants, in words; empty: it gets all messages.
    ordered: bool  # It gets the messages of each ordering key one after the other.
    exclusive: bool  # One of its consumers leads, and gets all messages.
    standbys: int  # How many PULLs of others wait to take over.
    in_flight_max: int  # How many messages its consumers may hold; 0: any number.
    oldest_ms_ago: int | None  # How long ago its oldest unacknowledged message was handed over; None: not asked, none.


def subjects_head(subjects: Iterable[SubjectInfo], limit: int) -> Head:
    """The answer to SUBJECTS: at most `limit` rows, as many as a head holds, and whether there are more."""
    return _page("subjects", subjects, limit)


def read_subjects(head: Head) -> tuple[list[SubjectInfo], bool]:
    """The rows of an answer to SUBJECTS, and whether there are more."""
    return need_page(head, "subjects", _subject)


def groups_head(groups: Iterable[GroupInfo], limit: int) -> Head:
    """The answer to GROUPS: at most `limit` rows, as many as a head holds, and whether there are more."""
    return _page("groups", groups, limit)


def read_groups(head: Head) -> tuple[list[GroupInfo], bool]:
    """The rows of an answer to GROUPS, and whether there are more."""
    return need_page(head, "groups", _group)


def _page(name: str, rows: Iterable[SubjectInfo] | Iterable[GroupInfo], limit: int) -> Head:
    taken, more = take_rows((row._asdict() for row in rows), limit)
    return {name: taken, "more": more}


def _subject(head: Head) -> SubjectInfo:
    return SubjectInfo(
        name=need_str(head, "name"),
        messages=need_int(head, "messages"),
        first=need_int(head, "first"),
        end=need_int(head, "end"),
        quarantined=need_int(head, "quarantined"),
        groups=need_int(head, "groups"),
        oldest_ms_ago=None if head.get("oldest_ms_ago") is None else need_int(head, "oldest_ms_ago"),
    )


def _group(head: Head) -> GroupInfo:
    return GroupInfo(
        subject=need_str(head, "subject"),
        group=need_str(head, "group"),
        end=need_int(head, "end"),
        next=need_int(head, "next"),
        outstanding=need_int(head, "outstanding"),
        redelivering=need_int(head, "redelivering"),
        quarantined=need_int(head, "quarantined"),
        oldest_unacked=need_int(head, "oldest_unacked"),
        group_id=need_int(head, "group_id"),
        leaving=need_int(head, "leaving"),
        paused=need_bool(head, "paused"),
        ephemeral=need_bool(head, "ephemeral"),
        filter=need_str(head, "filter"),
        ordered=need_bool(head, "ordered"),
        exclusive=need_bool(head, "exclusive"),
        standbys=need_int(head, "standbys"),
        in_flight_max=need_int(head, "in_flight_max"),
        oldest_ms_ago=None if head.get("oldest_ms_ago") is None else need_int(head, "oldest_ms_ago"),
    )
