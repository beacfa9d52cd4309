"""Walker: goes through the pending messages of a subject and a window, on every delay server, a piece at a time.

Invariant: a message counts as cancelled or moved only when its server has said so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np

from delayd.client.instants import instant_ms
from delayd.client.limits import check_subject, need_timedelta
from delayd.client.sending.message_asker import AskedRows, MessageAsker, NewInstants
from delayd.errors import BadArgument
from delayd.hours import INSTANT_MS_MAX, INSTANT_MS_MIN
from delayd.tags import encode_tags
from delayd.wire.ending import CancelAnswer, RescheduleAnswer
from delayd.wire.finding import Piece, Place, Window

_MS = timedelta(milliseconds=1)


class Walked(NamedTuple):
    """What a walk through pending messages has come to so far.

    Fields:
        found: pending messages of the subject and the window.
        done: how many of them were cancelled or moved; 0 in a dry run.
        in_flight: messages that were being handed over: nothing was done about them.
        ended: messages that were handed over or ended between being found and being asked about.
        unread: hours of which a server could not read something: messages of them may be missing. `delayd status` says
            what is damaged.
    """

    found: int = 0
    done: int = 0
    in_flight: int = 0
    ended: int = 0
    unread: int = 0


Progress = Callable[[Walked], object]
"""Called with the counts so far, after each piece."""


def window_of(subject: str, due_from: datetime | None, due_before: datetime | None, tag: str | None) -> Window:
    """Check the arguments of a walk.

    Raises:
        BadSubject, BadTags, BadArgument, NaiveDatetime: they name no subject, no tag or no window.
    """
    check_subject(subject)
    if tag is not None:
        encode_tags([tag])
    from_ms = 0 if due_from is None else instant_ms(due_from)
    to_ms = INSTANT_MS_MAX if due_before is None else instant_ms(due_before)
    if from_ms >= to_ms:
        raise BadArgument("due_before is not later than due_from, so no message is due in between")
    return Window(subject.encode(), max(0, from_ms), min(to_ms, INSTANT_MS_MAX), tag=tag or "")


def shift_ms_of(shift: timedelta) -> int:
    """Check by how much messages are to be moved; in milliseconds, and negative when they are to be due earlier.

    Raises:
        BadArgument: it is no time at all.
    """
    shift_ms = need_timedelta("shift", shift) // _MS
    if not shift_ms:
        raise BadArgument("shift is less than a millisecond, so no message would move")
    return shift_ms


class _Counts(NamedTuple):
    """What came of the wish about the messages of a piece."""

    done: int = 0
    in_flight: int = 0
    ended: int = 0


_Act = Callable[[AskedRows, Piece], Awaitable[_Counts]]


class Walker:
    """Walks for one producer, on one loop."""

    def __init__(self, messages: MessageAsker) -> None:
        self._messages = messages

    async def cancel(self, window: Window, *, dry_run: bool, progress: Progress | None) -> Walked:
        """Cancel what is pending in a window, or only count it."""

        async def act(rows: AskedRows, _: Piece) -> _Counts:
            counts = Counter((await self._messages.cancel(rows))["answer"].tolist())
            done, in_flight = counts[CancelAnswer.CANCELLED], counts[CancelAnswer.IN_FLIGHT]
            return _Counts(done, in_flight, rows.row_count - done - in_flight)

        return await self._walk(window, None if dry_run else act, progress)

    async def reschedule(self, window: Window, shift_ms: int, *, dry_run: bool, progress: Progress | None) -> Walked:
        """Move what is pending in a window, or only count it."""

        async def act(rows: AskedRows, piece: Piece) -> _Counts:
            instants = np.clip(piece.rows["deliver_at_ms"] + shift_ms, INSTANT_MS_MIN, INSTANT_MS_MAX)
            _, answers = await self._messages.reschedule(rows, NewInstants(instants, False))
            counts = Counter(answers["answer"].tolist())
            done, in_flight = counts[RescheduleAnswer.MOVED], counts[RescheduleAnswer.IN_FLIGHT]
            return _Counts(done, in_flight, rows.row_count - done - in_flight)

        return await self._walk(window, None if dry_run else act, progress)

    async def _walk(self, window: Window, act: _Act | None, progress: Progress | None) -> Walked:
        walked = Walked()
        async for log_id, piece in self._pieces(window):
            row_count, counts = len(piece.rows), _Counts()
            if row_count and act is not None:
                log_ids = np.full(row_count, log_id, np.uint64)
                counts = await act(AskedRows(log_ids, piece.asked(), row_count), piece)
            walked = Walked(
                walked.found + row_count,
                walked.done + counts.done,
                walked.in_flight + piece.in_flight + counts.in_flight,
                walked.ended + counts.ended,
                walked.unread + piece.unread,
            )
            if progress is not None:
                progress(walked)
        return walked

    async def _pieces(self, window: Window) -> AsyncIterator[tuple[int, Piece]]:
        for log_id in await self._messages.servers():
            place: Place | None = Place()
            until = 0
            while place is not None:
                piece = await self._messages.find(log_id, window._replace(place=place, until_sequence=until))
                place, until = piece.place, piece.until_sequence
                yield log_id, piece
