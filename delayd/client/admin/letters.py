"""Letters: dead letters of a group, and messages that are to come to it again, which delay servers keep as pending
messages of its retry subject (docs/consuming.md, Dead letters).

Invariant: all of it is found, ended and moved as every pending message is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from delayd.client.admin.groups import GroupAt
from delayd.client.instants import utc
from delayd.client.sending.pending import PendingMessage, page_of
from delayd.client.sending.receipt import Receipt
from delayd.client.sending.walker import Progress, Walked, Walker, shift_ms_of, window_of
from delayd.headers import Headers
from delayd.life import (
    ATTEMPT,
    DEAD_AT_MS,
    DEAD_KEPT_MS,
    DEAD_TAG,
    ERROR,
    FIRST_DUE_MS,
    KEY,
    LIFE_PREFIX,
    ORIGIN,
    REASON,
)
from delayd.wire.finding import Piece, Window

KEPT = timedelta(milliseconds=DEAD_KEPT_MS)


class Letter(NamedTuple):
    """A message that a group gave back: a dead letter, or one that waits to come again.

    Fields:
        receipt: of the message as it is kept now; its due instant is when it comes again, or when a dead letter ends.
        dead_at: since when it is a dead letter; None when it waits to come again.
        attempts: how often handlers of the group got it.
        reason: why it is a dead letter; empty when it is none.
        error: what its last handler said.
        origin: the sequence of the message as it was sent, at the same delay server.
        first_due: when it was due the first time.
        key: the one that it was sent with, which is free by now; None without one.
        tags: those that it was sent with.
        headers: those that it was sent with.
        body: what it was sent with.
    """

    receipt: Receipt
    dead_at: datetime | None
    attempts: int
    reason: str
    error: str
    origin: int
    first_due: datetime | None
    key: str | None
    tags: tuple[str, ...]
    headers: Headers
    body: bytes


class DeadGroup(NamedTuple):
    """A group that has dead letters, and how many."""

    subject: str
    group: str
    letters: int


def letters_window(place: GroupAt, since: datetime | None, before: datetime | None) -> Window:
    """The dead letters of a group that died in a window; BadArgument, NaiveDatetime when it is none."""
    return window_of(place.kept_as, _due(since), _due(before), DEAD_TAG)


def retries_window(place: GroupAt, due_from: datetime | None, due_before: datetime | None) -> Window:
    """Whatever a group gave back and that is due in a window."""
    return window_of(place.kept_as, due_from, due_before, None)


def letters_of(log_id: int, piece: Piece, *, dead: bool) -> list[Letter]:
    """The dead letters of a piece of a walk, or what waits to come again."""
    found = map(_letter, page_of(log_id, piece, whole=True))
    return [letter for letter in found if (letter.dead_at is not None) == dead]


async def count_letters(walker: Walker, place: GroupAt) -> int:
    """How many dead letters a group has."""
    return (await walker.cancel(letters_window(place, None, None), dry_run=True, progress=None)).found


async def redrive(walker: Walker, window: Window, *, dry_run: bool, progress: Progress | None) -> Walked:
    """Send dead letters to their group again at once, as the first attempt."""
    return await walker.reschedule(window, shift_ms_of(-KEPT), {}, dry_run=dry_run, progress=progress)


async def purge(walker: Walker, window: Window, *, dry_run: bool, progress: Progress | None) -> Walked:
    """End dead letters for good."""
    return await walker.cancel(window, dry_run=dry_run, progress=progress)


def page_of_letters(*, dead: bool) -> Callable[[int, Piece], list[Letter]]:
    """What makes a page of letters."""
    return partial(letters_of, dead=dead)


def _due(died: datetime | None) -> datetime | None:
    """When a letter that died at an instant is due."""
    return None if died is None else died + KEPT


def _letter(message: PendingMessage) -> Letter:
    headers = message.headers or {}
    died_ms, first_due_ms = _number(headers, DEAD_AT_MS), _number(headers, FIRST_DUE_MS)
    is_dead = DEAD_TAG in message.tags
    return Letter(
        message.receipt,
        utc(died_ms) if is_dead else None,
        _number(headers, ATTEMPT),
        _text(headers, REASON),
        _text(headers, ERROR),
        _number(headers, ORIGIN),
        utc(first_due_ms) if first_due_ms else None,
        _text(headers, KEY) or None,
        tuple(tag for tag in message.tags if tag != DEAD_TAG),
        {name: value for name, value in headers.items() if not name.startswith(LIFE_PREFIX)},
        message.body or b"",
    )


def _text(headers: Headers, name: str) -> str:
    value = headers.get(name, "")
    return value if isinstance(value, str) else ""


def _number(headers: Headers, name: str) -> int:
    text = _text(headers, name)
    return int(text) if text.isdecimal() else 0
