"""Overlaps: whether a message of a recurring schedule is unacknowledged, before another one is sent (docs/recurring.md,
One at a time).

A message goes from this server to a target, and back when it is to come again, so a look at each could miss it on its
way. Hence a look has an order:

     walk        what is due of the subject, and what is to come to a group again: once in a life of this server
       │         ◀── note: each message of a schedule that comes to this server from the first look on, without a file
     (1) get     which of the noted rows are pending or in flight: busy
       │
     (2) ask     the targets: unfinished there, busy. Groups to which messages come again are walked if they were not,
       │         and the look begins anew
     (3) answers what was noted since (1): busy, wherever it is by now

An example: row 7 is held by a consumer at the target.

     1. It is DISPATCHED here, so it is not busy.
        The consumer gives it back, and the target sends it: row 9 of the retry subject, which is noted. It is due at
        once, and handed over again.
     2. The target was asked before row 9 came to it, and behind the end of row 7 there: it knows of none.
     3. Row 9 came since (1): busy.

Invariant: nothing is said of a schedule whose subject's target has not answered, and what is said holds until the next
message of the schedule is noted: only a decision about the schedule makes one from nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.batch.labels import dead_letters, occurrences_in
from delayd.delay.ending.finder import FAR_MS, RETRIES, Finder
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.ending.requested import RequestWish, Whole
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.handoff.link import Link, Phase
from delayd.delay.reply import Reply
from delayd.delay.rows import Stored
from delayd.errors import BadRequest, DelaydError, NotReady, SlowDown
from delayd.hours import INSTANT_MS_MAX
from delayd.machine.alarms import DAMAGED_AGAIN_MS, NEVER_MS
from delayd.machine.identity import Site
from delayd.machine.operating import LogLimit
from delayd.outcome import MessageState
from delayd.wire.asked import AnswerRows, Asked, AskedWindow, Content, Piece
from delayd.wire.frame import Frame
from delayd.wire.recurring import AskedSchedule, Unfinished, read_unfinished, schedules_head
from delayd.wire.requests import RequestType

log = logging.getLogger(__name__)
limited = LogLimit(log)

LATE_MS = 500  # What is not known for so long is logged.
PIECE_ROWS = 2_048  # The loop looks through the headers of so many rows in some 10 ms.
PRUNE_FROM = 16_384  # Noted rows of which those that have ended are forgotten; then when there are twice as many.
NOTED_MAX = 131_072  # Rows that are remembered, some 200 bytes each; with more, all are forgotten and read again.
_NO_TARGET = NotReady("no realtime server has its subject yet")
_BUSY = (MessageState.PENDING, MessageState.IN_FLIGHT)

Answers = Mapping[AskedSchedule, bool]
"""Whether each schedule has a message that is unacknowledged; of one that is not in it nothing is known."""


class _Noted(NamedTuple):
    """A row with a message of a schedule, as requests name it."""

    sequence: int
    deliver_at_ms: int
    accepted_at_ms: int


@dataclass(slots=True, eq=False)
class _Look:
    """A look under way."""

    asked: list[AskedSchedule]  # By subject.
    done: Callable[[int], None]
    busy: set[str] = field(default_factory=set)  # Names.
    unknown: dict[AskedSchedule, str] = field(default_factory=dict)  # Why.
    heads: dict[int, Unfinished | DelaydError] = field(default_factory=dict)  # What targets have told.
    left: int = 0  # Targets that have not.

    def answers(self) -> list[Unfinished]:
        """What the targets that could tell have told."""
        return [told for told in self.heads.values() if isinstance(told, Unfinished)]

    @property
    def has_again(self) -> bool:
        """Whether messages come again to groups of these targets."""
        return any(told.again for told in self.answers())


class Overlaps:
    """Belongs to the loop; one look at a time."""

    dispatcher: Dispatcher  # Set once.

    def __init__(self, site: Site, finder: Finder, requests: MessageRequests) -> None:
        self._clock = site.clock
        self._finder = finder
        self._requests = requests
        self._look: _Look | None = None
        self._answers: dict[AskedSchedule, bool] = {}
        # Subjects of which all rows of schedules are noted, each until an instant, monotonic; `RETRIES` is one, too.
        self._walked: dict[bytes, int] = {}
        self._noted: dict[str, list[_Noted]] = {}  # By name of the schedule.
        self._rows = 0  # That are noted.
        self._prune_at = PRUNE_FROM  # With so many, those that have ended are forgotten.
        self._watches = False  # Whether there was a look, so that rows are noted.
        self._untold_since: dict[str, int] = {}  # Subjects whose target can't be asked, by monotonic time.

    @property
    def is_looking(self) -> bool:
        """Whether a look is under way."""
        return self._look is not None

    @property
    def known(self) -> Answers:
        """What is known at this moment."""
        return self._answers

    def take(self) -> Answers:
        """The same, for a decision that is made now; the next one asks again."""
        answers, self._answers = self._answers, {}
        return answers

    def untold(self, ms: int) -> set[str]:
        """The subjects of which nobody could tell anything for so long."""
        before_ms = self._clock.monotonic_ms() - ms
        return {subject for subject, since_ms in self._untold_since.items() if since_ms <= before_ms}

    def note(self, stored: Stored, appended_at_ms: int) -> None:
        """Rows that this server or another one has made are durable here."""
        if not self._watches:
            return
        due_ms = stored.batch.int64s(ColumnId.DELIVER_AT_MS)
        names: set[str] = set()
        for row, name in _to_be_done(stored.batch, appended_at_ms):
            names.add(name)
            self._note(name, _Noted(stored.base_sequence + row, int(due_ms[row]), appended_at_ms))
        if names:
            self._answers.update(dict.fromkeys([each for each in self._answers if each.name in names], True))
            if self._look is not None:
                self._look.busy |= names

    def _note(self, name: str, row: _Noted) -> None:
        if self._rows >= NOTED_MAX:
            self._walked.clear()
            self._noted.clear()
            self._rows = 0
            if self._look is not None:
                self._end(self._look, SlowDown(f"more than {NOTED_MAX} messages of schedules wait at the delay server"))
        self._noted.setdefault(name, []).append(row)
        self._rows += 1

    def _get(self, names: Iterable[str], got: Callable[[DelaydError | None], None]) -> None:
        """Forget the noted rows of some schedules that are neither pending nor in flight, and call back."""
        rows = [(name, row) for name in names for row in self._noted.get(name, ())]
        if not rows:
            got(None)
            return
        sequences, deliver_at_ms, accepted_at_ms = zip(*(row for _, row in rows), strict=True)
        asked = Asked(
            np.array(sequences, np.uint64), np.array(deliver_at_ms, np.int64), np.array(accepted_at_ms, np.int64)
        )

        def told(what: AnswerRows | DelaydError) -> None:
            if isinstance(what, DelaydError):
                got(what)
                return
            are_busy = np.isin(what["state"], _BUSY).tolist()
            self._drop({each for each, is_busy in zip(rows, are_busy, strict=True) if not is_busy})
            got(None)

        try:
            self._requests.take(Whole(RequestWish.GET, asked, Reply(told)))
        except DelaydError as error:
            got(error)

    def _drop(self, ended: set[tuple[str, _Noted]]) -> None:
        for name in {name for name, _ in ended}:
            kept = [row for row in self._noted.pop(name, ()) if (name, row) not in ended]
            if kept:
                self._noted[name] = kept
        self._rows = sum(map(len, self._noted.values()))

    # A look.

    def look(self, asked: Iterable[AskedSchedule], done: Callable[[int], None]) -> None:
        """Learn which schedules are busy, at most `SCHEDULES_ASKED_MAX`, and call back with how many are not known."""
        assert self._look is None, "one look is under way at a time"
        self._watches = True
        self._look = look = _Look(sorted(asked), done)
        self._walk(look)

    def _walk(self, look: _Look) -> None:
        """Walk the subjects that were not walked yet."""
        if self._rows >= self._prune_at:
            # Most of them are of schedules that nobody asks about.
            self._prune_at = NOTED_MAX
            self._get(list(self._noted), partial(self._pruned, look))
            return
        now_ms = self._clock.now_ms()
        due = self._not_walked({subject.encode() for subject, _ in look.asked})
        again = self._not_walked({RETRIES} if look.has_again else ())
        if due or again:
            to_ms = now_ms + FAR_MS if due else INSTANT_MS_MAX
            window = AskedWindow(b"", 0, to_ms, rows_max=PIECE_ROWS, content=Content.WHOLE, subjects=due or again)
            self._find(look, window, unread=0)
        else:
            look.busy.clear()
            self._get({schedule.name for schedule in look.asked}, partial(self._got, look))

    def _pruned(self, look: _Look, error: DelaydError | None) -> None:
        self._prune_at = max(PRUNE_FROM, 2 * self._rows)
        if self._look is look:
            self._walk(look)

    def _not_walked(self, subjects: Iterable[bytes]) -> frozenset[bytes]:
        now_ms = self._clock.monotonic_ms()
        return frozenset(subject for subject in subjects if self._walked.get(subject, -1) < now_ms)

    def _find(self, look: _Look, window: AskedWindow, unread: int) -> None:
        try:
            self._finder.find(window, partial(self._found, look, window, unread))
        except DelaydError as error:
            self._end(look, error)

    def _found(self, look: _Look, window: AskedWindow, unread: int, piece: Piece | DelaydError) -> None:
        if self._look is not look:
            return
        if isinstance(piece, DelaydError):
            self._end(look, piece)
            return
        if piece.batch is not None:
            rows = piece.rows
            for row, name in _to_be_done(piece.batch, self._clock.now_ms()):
                columns = (rows["sequence"], rows["deliver_at_ms"], rows["accepted_at_ms"])
                self._note(name, _Noted(*(int(column[row]) for column in columns)))
            if self._look is not look:
                return
        unread += piece.unread
        if piece.place is not None:
            self._find(look, window._replace(place=piece.place, until_sequence=piece.until_sequence), unread)
            return
        # What can't be read runs nowhere; it may be put back.
        until_ms = self._clock.monotonic_ms() + DAMAGED_AGAIN_MS if unread else NEVER_MS
        self._walked.update(dict.fromkeys(window.subjects, until_ms))
        self._walk(look)

    def _got(self, look: _Look, error: DelaydError | None) -> None:
        """(1) What is still noted is pending or in flight here, or has come since."""
        if self._look is not look:
            return
        if error is not None:
            self._end(look, error)
            return
        look.busy.update(schedule.name for schedule in look.asked if schedule.name in self._noted)
        self._ask(look)

    def _ask(self, look: _Look) -> None:
        """(2) Ask the targets of the subjects, and all others that can be asked: the subject may have been there."""
        links = {id(link): link for link in self.dispatcher.links.values() if link.phase is Phase.READY}
        for subject in dict.fromkeys(schedule.subject for schedule in look.asked):
            link = self.dispatcher.link_of(subject.encode())
            if link is not None:
                links[id(link)] = link
        look.heads.clear()
        look.left = len(links)
        if not links:
            self._answered(look)
        for link in links.values():
            link.ask(RequestType.UNFINISHED, schedules_head(look.asked), partial(self._told, look, link))

    def _told(self, look: _Look, link: Link, told: Frame | DelaydError) -> None:
        if self._look is not look:
            return
        try:
            look.heads[link.target] = (
                told if isinstance(told, DelaydError) else read_unfinished(told.head, len(look.asked))
            )
        except BadRequest as error:
            look.heads[link.target] = error
        look.left -= 1
        if not look.left:
            self._answered(look)

    def _answered(self, look: _Look) -> None:
        if look.has_again and self._not_walked((RETRIES,)):
            self._walk(look)
            return
        unfinished = {place for told in look.answers() for place in told.unfinished}
        unknown = {place for told in look.answers() for place in told.unknown}
        for place, schedule in enumerate(look.asked):
            link = self.dispatcher.link_of(schedule.subject.encode())
            told = _NO_TARGET if link is None else look.heads.get(link.target, _NO_TARGET)
            # Where the subject was before it moved, groups may have ended since.
            is_kept = isinstance(told, Unfinished) and place in told.ungrouped
            if place in unfinished or is_kept or schedule.name in look.busy:
                self._answers[schedule] = True
            elif isinstance(told, DelaydError):
                look.unknown[schedule] = told.message
            elif place in unknown:
                look.unknown[schedule] = "a realtime server has more to search than it does at a time"
            else:
                self._answers[schedule] = False
        self._end(look)

    def _end(self, look: _Look, error: DelaydError | None = None) -> None:
        """(3) The look has ended; what is noted from now on changes its answers."""
        if error is not None:
            look.unknown = dict.fromkeys(look.asked, error.message)
        self._look = None
        now_ms = self._clock.monotonic_ms()
        untold = {schedule.subject for schedule in look.unknown}
        for subject in {schedule.subject for schedule in look.asked} - untold:
            self._untold_since.pop(subject, None)
        if not untold:
            self._untold_since.clear()  # Others may have been deleted since.
        for subject in untold:
            self._untold_since.setdefault(subject, now_ms)
        # The first look at a subject may only learn which target it has.
        late = self.untold(LATE_MS)
        whys = {schedule.name: why for schedule, why in look.unknown.items() if schedule.subject in late}
        if whys:
            name, why = next(iter(whys.items()))
            limited.warning(
                "overlap_not_known", "overlap_not_known schedules=%d first=%r reason=%r", len(whys), name, why
            )
        look.done(len(look.unknown))


def _to_be_done(batch: Batch, now_ms: int) -> Iterator[tuple[int, str]]:
    """The rows with messages of schedules that somebody is to work on, each with the name of its schedule.

    Of those that are far ahead only what comes again is: a caller has moved the others, or they are dead letters.
    """
    far = batch.int64s(ColumnId.DELIVER_AT_MS) > now_ms + FAR_MS
    subject_of = batch.uint32s(ColumnId.SUBJECT) if ColumnId.SUBJECT in batch else np.zeros(batch.count, np.uint32)
    waits = np.array([not name.startswith(RETRIES) for name in batch.subjects()], np.bool_).take(subject_of)
    waits[dead_letters(batch)] = True
    return ((row, name) for row, name in occurrences_in(batch) if not (far[row] and waits[row]))
