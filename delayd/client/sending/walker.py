"""Walker: goes through the pending messages of a subject and a window, on all delay servers, a piece at a time.

Invariant: a message counts as cancelled or moved only when its server has said so.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sized
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from delayd.client.instants import instant_ms
from delayd.client.limits import check_subject, need_bool, need_callable, need_text, need_timedelta
from delayd.client.sending.message_asker import AskedOne, AskedRows, MessageAsker, NewInstants
from delayd.client.sending.pending import WHOLE_ROWS_FIRST, PageOf, Pages, PendingPage, page_of
from delayd.errors import BadArgument, DelaydError
from delayd.hours import INSTANT_MS_MAX, INSTANT_MS_MIN
from delayd.log_id import LogId
from delayd.tags import encode_tags
from delayd.wire.ending import CancelAnswer, RescheduleAnswer
from delayd.wire.finding import Content, Piece, Place, Window

Page = TypeVar("Page", bound=Sized)

_MS = timedelta(milliseconds=1)
_PAIR = "[0-9a-f]{16}-[0-9]{1,19}"
_TOKEN = f"{_PAIR}(?:,{_PAIR})*"


class Walked(NamedTuple):
    """What a walk through pending messages has come to so far.

    Fields:
        found: pending messages of the subject and the window.
        done: how many of them were cancelled or moved; 0 in a dry run.
        in_flight: messages that were being handed over: nothing was done about them.
        ended: messages that were handed over or ended between being found and being asked about.
        unread: hours of which a server could not read something: messages of them may be missing. `delayd status` says
            what is damaged.
        resume: of a walk that moves messages and is not at its end: another call goes on with it.
    """

    found: int = 0
    done: int = 0
    in_flight: int = 0
    ended: int = 0
    unread: int = 0
    resume: str = ""


Bounds = Mapping[int, int]  # By log_id: the sequence below which a walk finds messages there.
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
    from_ms = 0 if due_from is None else instant_ms(due_from, "due_from")
    to_ms = INSTANT_MS_MAX if due_before is None else instant_ms(due_before, "due_before")
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


def check_walk(dry_run: bool, progress: Progress | None) -> None:
    """BadSetting or BadArgument for a walk of which nobody can tell whether it is meant, or that tells nobody."""
    need_bool("dry_run", dry_run)
    if progress is not None:
        need_callable("progress", progress)


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

    def pending(self, window: Window, key: AskedOne | None, *, whole: bool) -> Pages[PendingPage]:
        """The pending messages of a window, or the one with a key; ``whole``: with headers and bodies."""
        content = Content.WHOLE if whole else Content.LABELS
        return self.pages(window, content, partial(page_of, whole=whole), None if key is None else key.rows())

    def pages(
        self, window: Window, content: Content, page_of: PageOf[Page], key: AskedRows | None = None
    ) -> Pages[Page]:
        """Pages of what a window has."""
        rows_max = WHOLE_ROWS_FIRST if content is Content.WHOLE else window.rows_max
        return Pages(self._messages, window._replace(content=content, rows_max=rows_max), page_of, key)

    async def cancel(self, window: Window, *, dry_run: bool, progress: Progress | None) -> Walked:
        """Cancel what is pending in a window, or only count it."""

        async def act(rows: AskedRows, _: Piece) -> _Counts:
            counts = Counter((await self._messages.cancel(rows))["answer"].tolist())
            done, in_flight = counts[CancelAnswer.CANCELLED], counts[CancelAnswer.IN_FLIGHT]
            return _Counts(done, in_flight, rows.row_count - done - in_flight)

        return await _Walk(self._messages, window, None if dry_run else act, progress).run()

    async def reschedule(
        self, window: Window, shift_ms: int, bounds: Bounds, *, dry_run: bool, progress: Progress | None
    ) -> Walked:
        """Move what is pending in a window, or only count it; ``bounds``: of the walk that this one resumes."""

        async def act(rows: AskedRows, piece: Piece) -> _Counts:
            instants = np.clip(piece.rows["deliver_at_ms"] + shift_ms, INSTANT_MS_MIN, INSTANT_MS_MAX)
            _, answers = await self._messages.reschedule(rows, NewInstants(instants, False))
            counts = Counter(answers["answer"].tolist())
            done, in_flight = counts[RescheduleAnswer.MOVED], counts[RescheduleAnswer.IN_FLIGHT]
            return _Counts(done, in_flight, rows.row_count - done - in_flight)

        return await _Walk(self._messages, window, None if dry_run else act, progress, dict(bounds)).run()


class _Walk:
    """One walk, at all servers at the same time."""

    def __init__(
        self,
        messages: MessageAsker,
        window: Window,
        act: _Act | None,
        progress: Progress | None,
        bounds: dict[int, int] | None = None,
    ) -> None:
        """``bounds`` is kept up to date, and told, when it is given."""
        self._messages = messages
        self._window = window
        self._act = act
        self._progress = progress
        self._bounds = bounds
        self._walked = Walked()
        self._failed: dict[int, DelaydError] = {}  # By log_id: the servers where the walk did not come to its end.

    async def run(self) -> Walked:
        """Go through all servers.

        A server that fails keeps nobody from the others: its error is raised when all are through, with the account in
        its details. When ``progress`` raises, the walk stops everywhere.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for log_id in await self._messages.servers():
                    tasks.create_task(self._at(log_id))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        for error in self._failed.values():
            names = " ".join(str(LogId(log_id)) for log_id in sorted(self._failed))
            walked = self._walked
            error.details |= {"servers": names, "found": walked.found, "done": walked.done, "resume": walked.resume}
            raise error
        return self._walked._replace(resume="")

    async def _at(self, log_id: int) -> None:
        place: Place | None = Place()
        until = (self._bounds or {}).get(log_id, 0)
        while place is not None:
            window = self._window._replace(place=place, until_sequence=until)
            try:
                piece = await self._messages.find(log_id, window)
            except DelaydError as error:
                self._failed[log_id] = error
                return
            place, until = piece.place, piece.until_sequence
            if self._bounds is not None and self._act is not None and self._bounds.get(log_id) != until:
                # It is told before anything is moved: a caller that is interrupted then can go on, too.
                self._bounds[log_id] = until
                self._tell()
            row_count, counts = len(piece.rows), _Counts()
            if row_count and self._act is not None:
                log_ids = np.full(row_count, log_id, np.uint64)
                try:
                    counts = await self._act(AskedRows(log_ids, piece.asked(), row_count, self._window.subject), piece)
                except DelaydError as error:
                    self._failed[log_id] = error
                    return
            self._add(piece, counts)

    def _add(self, piece: Piece, counts: _Counts) -> None:
        walked = self._walked
        self._walked = Walked(
            walked.found + len(piece.rows),
            walked.done + counts.done,
            walked.in_flight + piece.in_flight + counts.in_flight,
            walked.ended + counts.ended,
            walked.unread + piece.unread,
        )
        self._tell()

    def _tell(self) -> None:
        if self._bounds:
            self._walked = self._walked._replace(resume=_token_of(self._bounds))
        if self._progress is not None:
            self._progress(self._walked)


def bounds_of(token: str | None) -> Bounds:
    """The bounds in the ``resume`` of an earlier walk; BadArgument when it is none."""
    if token is None or not need_text("resume", token):
        return {}
    found = re.fullmatch(_TOKEN, token)
    if found is None:
        raise BadArgument(f"resume is what an earlier walk told as `Walked.resume`, not {token[:80]!r}")
    pairs = [pair.split("-") for pair in token.split(",")]
    return {int(log_id, 16): int(until) for log_id, until in pairs}


def _token_of(bounds: Bounds) -> str:
    return ",".join(f"{log_id:016x}-{until}" for log_id, until in sorted(bounds.items()))
