"""Ledger: the one part that knows whether a row has ended, and whether a target may have it (rules C1, P7, H5, S1).

Invariant: a row that has ended passes no gate, a row that a target may have is never claimed, and nobody is told of an
end that is not durable. The package's docstring draws where a row is from its send to its seal.

A row ends in one of three ways, and each is noted here by the row's filing hour:

    a dispatch log names it                a start tells the ledger what the files say
    a target's window names it             `name`: an earlier life had handed it over
    a decision of this life ends it        `claim`: the decision is not durable yet, and may be undone

Rows pass a gate twice: when they enter the wheel, by a load (`ended_in`), and when they leave it, before a frame is
made of them (`may_leave`). A note of an hour is forgotten when no row of the hour can pass a gate any more, and no
target may still name one: from then on the hour's dispatch log says it.

A request looks where its rows are in memory (`look`), has the files asked about rows that are nowhere in it (`read`),
and learns what became of each row as of now (`states`). Between the two a row may have gone from memory to a file, or
the other way: then it is to be looked for anew. An example, with a cancel of row 7, whose hour is not loaded:

    look      7 stands in no memory                       a file must be asked
    read      the hour's schedule log has row 7           on the worker thread; meanwhile the hour may be loaded
    states    7 is still in no memory, and its hour is still not loaded: PENDING, and it may be claimed
    claim     7 is noted among the rows that the commit under way ends: the load waits for the commit
    end       the decision is durable: 7 is noted under its hour, and owed its outcome; the load leaves it out
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.batch.sequences import NO_SEQUENCES, Indices, Locations, Pile, Sequences, among
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.filing.hour_table import OutcomeEnd
from delayd.delay.ledger.files import HourPlace, HourReader, LookedUp
from delayd.delay.ledger.owed import Owed
from delayd.delay.ledger.wanted import Outside, SortedRows, Wanted, sort_rows
from delayd.delay.quarantine import Quarantine, SetAsideKind
from delayd.delay.rows import Rows, hour_span, join_rows, new_rows, without
from delayd.delay.timers.loading import Hours
from delayd.errors import DelaydError
from delayd.log.hour import EndedRows
from delayd.machine.executor import Done, Executor, Priority
from delayd.outcome import MessageState, Reason
from delayd.wire.asked import ANSWER, AnswerRows

Bools = NDArray[np.bool_]
OnRead = Callable[[DelaydError | None], None]


class RowPlace(IntEnum):
    """Where a wanted row is."""

    NOWHERE = 0  # In no memory of rows to be delivered: it has ended, it is filed, or it never was.
    WHEEL = 1
    COLUMNS = 2  # Among the pending rows, of an hour that is not loaded.
    OUT = 3  # It has left the wheel, and no target can hold it.
    IN_FLIGHT = 4  # A target may hold it, or nobody can tell at this moment.
    ENDED = 5  # Its end is durable: a file or a decision says what it ended as. It may still stand where it stood.
    ENDING = 6  # It has ended, and that is not durable yet.


RowPlaces = NDArray[np.uint8]
NOT_CLAIMABLE = 0xFF  # Stands instead of a `RowPlace` for a row that can't be claimed.
_PENDING = (RowPlace.WHEEL, RowPlace.COLUMNS, RowPlace.OUT)
_TOLD_BY_FILES = (RowPlace.NOWHERE, RowPlace.ENDED)
# A row leaves these places by an outcome only; one that no checkpoint had filed leaves its place to a file, too.
_LEFT_WHEN_ENDED = (RowPlace.WHEEL, RowPlace.OUT, RowPlace.ENDED, RowPlace.ENDING)


class Holder(Protocol):
    """A part of the server with rows that have left the wheel."""

    def waiting(self) -> list[Rows]:
        """View the rows that are at no target, in several arrays."""

    def take_out(self, sequences: Sequences, arrays: Collection[int]) -> list[Rows]:
        """Take rows that have ended out of where they wait. ``sequences`` rise, and ``arrays`` are the ids of the
        arrays in which they stand.
        """


class HandedOut(Holder, Protocol):
    """The part that hands rows over to targets."""

    def in_flight(self) -> Iterator[Rows]:
        """View the rows that this life has handed over and that are not decided, in several arrays."""

    def may_have_left(self, rows: Rows) -> Bools:
        """Which rows an earlier life may have handed over, to a target that has not answered since (rule H5)."""

    def drop(self, ended: Sequences) -> None:
        """Drop rows that targets have named, wherever they wait; ``ended`` are all of them, sorted."""


@dataclass(slots=True, eq=False)
class Look:
    """Wanted rows, where they were when they were looked for, and what the files say of those that were nowhere."""

    wanted: Wanted
    places: RowPlaces
    unknown: Bools  # Rows that only files can tell of.
    found: LookedUp | None = None
    turn: int = -1  # While nothing else can have happened: how many claims there had been, and
    states: States | None = None  # what was said then.

    @classmethod
    def of_several(cls, wanted: Wanted, looks: Iterable[Look]) -> Look:
        """What several looks say of rows each of which is in one of them at least."""
        places = np.full(len(wanted), NOT_CLAIMABLE, np.uint8)
        joined = cls(wanted, places, np.zeros(len(wanted), np.bool_))
        for look in looks:
            at = np.searchsorted(wanted.sequences, look.wanted.sequences)
            at[at == len(wanted)] = 0
            own = wanted.sequences.take(at) == look.wanted.sequences
            joined.places[at.compress(own)] = look.places.compress(own)
            joined.unknown[at.compress(own)] = look.unknown.compress(own)
            if look.found is None:
                continue
            if joined.found is None:
                joined.found = LookedUp._make(np.zeros(len(wanted), column.dtype) for column in look.found)
            mine = np.flatnonzero(own & look.unknown)
            for column, of_look in zip(joined.found, look.found, strict=True):
                column[at.take(mine)] = of_look.take(mine)
        return joined


class States(NamedTuple):
    """What is known of each row of a look, as of now."""

    answers: AnswerRows
    claimable: RowPlaces  # Where a row can be claimed; else NOT_CLAIMABLE.
    ended: Bools  # Rows that have ended, though nobody can say yet what as.
    moved: Bools  # Rows that have gone from memory to a file, or the other way: they are to be looked for anew.


class Ledger:
    """The rows that have ended, and the gates; belongs to the loop."""

    handoff: HandedOut  # Both are set once, before anybody asks.
    held: Holder

    def __init__(
        self,
        hours: Hours,
        ended: dict[int, Sequences],
        outcomes: OutcomeLog,
        files: HourReader,
        quarantine: Quarantine,
    ) -> None:
        """``ended``: the rows of each hour that a start found ended, sorted."""
        self.owed = Owed(outcomes)
        self.hours = hours
        self._ended = {hour: Pile(found) for hour, found in ended.items()}
        self._marked: set[int] = set()  # Hours of which rows have ended in this life, so that some may be in the wheel.
        self._named = NO_SEQUENCES  # Rows that windows have named, in any hour; sorted.
        self._naming: list[Sequences] = []  # Those of the answer that is being read.
        self._open: dict[int, Pile] = {}  # What the commit that is under way ends.
        self._held_back: list[Rows] = []  # Rows of it that waited, or fell due since.
        self._claims = 0  # How often rows were claimed.
        self._filed = hours.files
        self._outcomes = outcomes
        self._files = files
        self._quarantine = quarantine
        self._outside = Outside()  # Over rows that wait for targets, or for a route, or to be readable.
        self._to_sort: list[Callable[[], None]] = []  # What goes on when waiting rows are sorted.

    # The gates.

    def may_leave(self, rows: Rows) -> Rows:
        """Those of some due rows that may be handed over. While nothing has ended, this costs three looks at flags."""
        if len(self._named):
            rows = without(rows, self._named)
        if (self._marked or self._open) and len(rows):
            first, last = hour_span(rows)
            for hour in _within(self._open, first, last):
                rows, held_back = _split(rows, hour, self._open[hour])
                if len(held_back):
                    self._held_back.append(held_back)
            for hour in _within(self._marked, first, last):
                rows, _ = _split(rows, hour, self._ended[hour])
        return rows

    def ended_in(self, hours: range) -> dict[int, Sequences]:
        """The rows of each of these hours that a load leaves out, sorted."""
        some = hours if len(hours) < len(self._ended) else self._ended
        return {hour: self._ended[hour].in_one() for hour in some if hour in hours and hour in self._ended}

    def ending_hours(self) -> set[int]:
        """Hours of which the commit that is under way ends rows: their loads wait for it."""
        return set(self._open)

    # What targets and dispatch logs say.

    def without_outcome(self, hour: int, sequences: Sequences) -> Bools:
        """Which rows that a target names have no outcome; no row of an hour that is sealed, or deleted and so not
        known, counts as such (rule H4).
        """
        if hour not in self._ended:
            known = hour in self._filed or self.hours.pending.has_hour(hour)
            if not known or self._filed.get(hour).sealed:
                return np.zeros(len(sequences), np.bool_)
        return ~self._ended.get(hour, Pile()).has(sequences)

    def name(self, hour: int, sequences: Sequences) -> None:
        """Note rows without an outcome that the window of a target names: they have one now."""
        sequences = np.sort(sequences)
        self._naming.append(sequences)
        self._note(hour, sequences)

    def drop_named(self) -> None:
        """An answer has ended: drop its rows wherever they wait, in one pass for all of its batches."""
        if self._naming:
            self._named = np.sort(np.concatenate((self._named, *self._naming)), kind="stable")
            self._naming = []
            self.handoff.drop(self._named)

    def forget(self, *, answers_may_come: bool) -> None:
        """Forget hours of which no row may pass a gate any more. ``answers_may_come``: targets may still name rows of
        earlier lives, which are compared with what is known.
        """
        hours = self.hours
        kept = {*hours.withheld, *hours.loading, *self._open}
        until = hours.loaded_until
        standing = {*kept, *hours.wheel.hours()}
        self._marked = {hour for hour in self._marked if hour > until or hour in standing}
        if not answers_may_come:
            kept |= self._marked
            self._ended = {hour: pile for hour, pile in self._ended.items() if hour > until or hour in kept}

    def _note(self, hour: int, sequences: Sequences) -> None:
        self._ended.setdefault(hour, Pile()).add(sequences)

    # Decisions.

    def claim(self, wanted: Wanted, claimable: RowPlaces) -> None:
        """Note rows that the commit under way ends: from now on no gate lets them pass. They are claimable, or new rows
        of the commit itself.
        """
        self._claims += 1
        for rows, hour in _by_hour(wanted):
            self._open.setdefault(hour, Pile()).add(wanted.sequences.take(rows))
        out = np.flatnonzero(claimable == RowPlace.OUT)
        if len(out):
            taken = wanted.take(out)
            arrays = {id(found.array) for found in self._outside.find(taken, self._waiting())}
            holders: tuple[Holder, Holder] = (self.handoff, self.held)
            for holder in holders:
                self._held_back += holder.take_out(taken.sequences, arrays)

    def are_ending(self, wanted: Wanted) -> Bools:
        """Which rows the commit that is under way ends."""
        return self._have(self._open, wanted.hours, wanted.sequences)

    def end(self, rows: EndedRows) -> None:
        """The commit is durable: ``rows``, by rising sequence, are those that it has ended."""
        for hour, pile in self._open.items():
            self._note(hour, pile.in_one())
            self._marked.add(hour)
        self._open, self._held_back = {}, []
        self.owed.take(rows)

    def undo(self) -> None:
        """The commit was not stored: its rows are pending again."""
        self._open, held_back, self._held_back = {}, self._held_back, []
        if held_back:
            self.hours.put_back(join_rows(held_back))

    def tell_outcomes(self, heard: Callable[[Sequences], None] | None) -> None:
        """Call ``heard`` with the rows of each outcome that is recorded from now on; None: nobody waits for any."""
        self._outcomes.on_recorded = heard

    # Questions.

    def when_sorted(self, worker: Executor, go_on: Callable[[], None]) -> None:
        """Call back when rows that wait for their targets can be looked for: at once, unless many of them came since
        they were sorted last (rule B2).
        """
        arrays = self._outside.unsorted(self._waiting())
        if not arrays and not self._to_sort:
            go_on()
            return
        self._to_sort.append(go_on)
        if len(self._to_sort) == 1:
            worker.submit(partial(sort_rows, arrays), self._sorted, Priority.DUE)

    def _sorted(self, done: Done[list[SortedRows]]) -> None:
        self._outside.take(done.result())
        waiting, self._to_sort = self._to_sort, []
        for go_on in waiting:
            go_on()

    def look(self, wanted: Wanted) -> Look:
        """Look where rows are in memory; `read` asks the files about the others."""
        places = self.places(wanted)
        # An end that is not durable yet may be so when the file is read.
        unknown = np.isin(places, (*_TOLD_BY_FILES, RowPlace.ENDING))
        unknown[self.owed.find(wanted)[0]] = False
        return Look(wanted, places, unknown)

    def read(self, look: Look, go_on: OnRead) -> None:
        """Ask the files about the rows of a look that are unknown, and call back, with an error when that could not be
        done; at once if what is remembered of the files is enough.
        """
        if look.unknown.any():
            asked = self._hour_places(look.wanted, np.flatnonzero(look.unknown))
            look.found = self._files.at_hand(look.wanted, asked)
            if look.found is None:
                self._files.look_up(look.wanted, asked, partial(_read, look, go_on))
                return
        look.turn = self._claims
        go_on(None)
        look.turn = -1

    def states(self, look: Look, locations: Locations | None = None) -> States:
        """What is known of each row of a look now; ``locations`` is filled in for claimable rows."""
        wanted, found = look.wanted, look.found
        is_fresh = look.turn == self._claims and locations is None
        if is_fresh and look.states is not None:
            return look.states
        places = look.places if is_fresh else self.places(wanted, locations)
        answers = np.zeros(len(wanted), ANSWER)
        answers["deliver_at_ms"] = wanted.deliver_at_ms
        state = np.full(len(wanted), MessageState.IN_FLIGHT, np.uint8)
        here = np.isin(places, _PENDING)
        unread = np.zeros(len(wanted), np.bool_)
        if found is not None:
            unread = found.unread
            # A row that was nowhere all the time never was, unless its file is being looked after.
            gone = look.unknown & (look.places == RowPlace.NOWHERE) & (places == RowPlace.NOWHERE) & ~unread
            filed = gone & found.filed & self.hours.are_far(wanted.hours)
            state[gone & ~found.filed] = MessageState.UNKNOWN
            here |= filed
            if locations is not None:
                np.copyto(locations, found.locations, where=filed)
            known = np.flatnonzero(found.answers["state"] != MessageState.UNKNOWN)
            answers[known] = found.answers.take(known)
            state[known] = found.answers["state"].take(known)
            here[known] = False
        state[here] = MessageState.PENDING
        owed, rows = self.owed.find(wanted)
        _tell(answers, state, owed, rows)
        here[owed] = False
        answers["state"] = state
        unsure = state == MessageState.IN_FLIGHT
        told_by_files = np.isin(places, _TOLD_BY_FILES)
        told_by_files[owed] = False
        # It stands nowhere any more once its outcome is durable, though the file may have been asked before that.
        left = (places == RowPlace.NOWHERE) & np.isin(look.places, _LEFT_WHEN_ENDED)
        ended = unsure & (np.isin(places, (RowPlace.ENDED, RowPlace.ENDING)) | left)
        claimable = np.where(here, places, NOT_CLAIMABLE).astype(np.uint8)
        states = States(answers, claimable, ended, unsure & told_by_files & ~unread)
        if is_fresh:
            look.states = states
        return states

    def places(self, wanted: Wanted, locations: Locations | None = None) -> RowPlaces:
        """Where each wanted row is now; ``locations`` is filled in for rows of WHEEL, COLUMNS and OUT."""
        places = np.zeros(len(wanted), np.uint8)
        if locations is None:
            locations = np.zeros(len(wanted), np.uint64)
        wheel = self.hours.wheel
        for hour in wheel.hours():
            own = wanted.of_hour(hour)
            if len(own):
                of_hour = wanted.take(own)
                for rows in wheel.find(hour, of_hour.due_ms, of_hour.are):
                    at, found = of_hour.find(rows)
                    taken = rows.take(at)
                    places[own.take(found)] = self._place(taken, RowPlace.WHEEL)
                    locations[own.take(found)] = taken["location"]
        # Until a checkpoint passes them, the pending rows also have those of hours that were loaded since: such a row
        # is in the wheel, or has left it.
        far = self.hours.are_far(wanted.hours)
        for rows in self.hours.pending.between(int(wanted.sequences[0]), int(wanted.sequences[-1])):
            at, found = wanted.find_rising(rows)
            at, found = at.compress(far.take(found)), found.compress(far.take(found))
            places[found] = RowPlace.COLUMNS
            locations[found] = rows.take(at)["location"]
        self._note_ended(wanted, places)
        left = np.flatnonzero(places == RowPlace.NOWHERE)
        if len(left):
            places[left], locations[left] = self._look_outside(wanted.take(left))
        # A row stays in its target's window until its outcome is durable.
        left_wheel = np.isin(places, (*_TOLD_BY_FILES, RowPlace.IN_FLIGHT))
        unwritten = list(self._outcomes.unwritten()) if left_wheel.any() else []
        if unwritten:
            at = wanted.places_of(np.concatenate(unwritten))
            places[at.compress(left_wheel.take(at))] = RowPlace.ENDING
        self._set_aside(wanted, places)
        return places

    def are_pending(self, wanted: Wanted, stood: Indices, subject: int) -> tuple[Bools, Bools]:
        """Which rows of a walk are pending now, and which may be at a target.

        Rows that ``stood`` in the wheel, all of one ``subject``, are not searched for as long as nothing has left their
        slots; no hour may have left the wheel since.
        """
        places, left = np.zeros(len(wanted), np.uint8), np.ones(len(wanted), np.bool_)
        some, wheel = wanted.take(stood), self.hours.wheel
        still = np.zeros(len(some), np.bool_)
        for hour in wheel.hours():
            still |= (some.hours == np.uint32(hour)) & (some.due_ms >= wheel.closed_from_ms(hour))
        stood = stood.compress(still)
        if len(stood):
            places[stood] = self._places_standing(wanted.take(stood), subject)
            left[stood] = False
        others = np.flatnonzero(left)
        if len(others):
            places[others] = self.places(wanted.take(others))
        pending = np.isin(places, _PENDING) | (self.hours.are_far(wanted.hours) & (places == RowPlace.NOWHERE))
        return pending, places == RowPlace.IN_FLIGHT

    def _places_standing(self, wanted: Wanted, subject: int) -> RowPlaces:
        rows = new_rows(len(wanted))
        rows["subject"], rows["sequence"] = subject, wanted.sequences
        rows["hour"], rows["due_ms"] = wanted.hours, wanted.due_ms
        places = self._place(rows, RowPlace.WHEEL)
        self._note_ended(wanted, places)
        self._set_aside(wanted, places)
        return places

    def outside(self) -> list[Rows]:
        """View all rows that have left the wheel and are not decided, in several arrays."""
        return [*self._waiting(), *self.handoff.in_flight()]

    def undecided_of(self, hour: int) -> Sequences:
        """The rows of an hour that are loaded and have no durable outcome, sorted."""
        parts = [*self.hours.wheel.parts(hour, hour), *self.outside()]
        rows = [part["sequence"][part["hour"] == np.uint32(hour)] for part in parts]
        waiting = np.concatenate([NO_SEQUENCES, *rows])
        if hour in self._ended:
            # The wheel keeps the copy of a cancelled row until its turn comes.
            waiting = waiting.compress(~self._ended[hour].has(waiting))
        return np.sort(np.concatenate([waiting, *self._outcomes.unwritten_of(hour)]))

    def _waiting(self) -> list[Rows]:
        return [*self.handoff.waiting(), *self.held.waiting()]

    def _note_ended(self, wanted: Wanted, places: RowPlaces) -> None:
        places[self._have(self._ended, wanted.hours, wanted.sequences)] = RowPlace.ENDED
        places[self.are_ending(wanted)] = RowPlace.ENDING

    def _have(self, piles: dict[int, Pile], hours: NDArray[np.uint32], sequences: Sequences) -> Bools:
        """Which rows, each of the hour beside it, are in the pile of their hour."""
        found = np.zeros(len(sequences), np.bool_)
        for hour in np.unique(hours).tolist() if piles else ():
            if hour in piles:
                own = np.flatnonzero(hours == np.uint32(hour))
                found[own] = piles[hour].has(sequences.take(own))
        return found

    def _place(self, rows: Rows, free: RowPlace) -> RowPlaces:
        """Where rows count as being that a holder has, whether or not a target may hold them."""
        places = np.full(len(rows), free, np.uint8)
        places[self.handoff.may_have_left(rows)] = RowPlace.IN_FLIGHT
        places[among(rows["sequence"], self._named)] = RowPlace.ENDED
        return places

    def _look_outside(self, wanted: Wanted) -> tuple[RowPlaces, Locations]:
        """Where rows are that are neither in the wheel nor kept for a load, and their locations."""
        places, locations = np.zeros(len(wanted), np.uint8), np.zeros(len(wanted), np.uint64)
        for rows in self.handoff.in_flight():
            places[wanted.find(rows)[1]] = RowPlace.IN_FLIGHT
        for rows, at, found in self._outside.find(wanted, self._waiting()):
            taken = rows.take(at)
            places[found] = self._place(taken, RowPlace.OUT)
            locations[found] = taken["location"]
        return places, locations

    def _set_aside(self, wanted: Wanted, places: RowPlaces) -> None:
        """Nobody can tell now what became of rows of some hours: they are asked about again later."""
        entries = [(entry.kind, entry.hour) for entry in self._quarantine if entry.hour is not None]
        unknown = {hour for kind, hour in entries if kind is SetAsideKind.DISPATCH}
        unknown.update(self.hours.loading)
        if unknown:
            has_ended = np.isin(places, (RowPlace.ENDED, RowPlace.ENDING))
            places[_is_of(wanted, unknown) & ~has_ended] = RowPlace.IN_FLIGHT
        # Rows of which only the bodies can't be read are held, and so in memory: what is nowhere is not among them.
        damaged = {hour for kind, hour in entries if kind is SetAsideKind.SCHEDULE}
        if damaged:
            places[_is_of(wanted, damaged) & (places == RowPlace.NOWHERE)] = RowPlace.IN_FLIGHT

    def _hour_places(self, wanted: Wanted, rows: Indices) -> list[HourPlace]:
        """What is to be read of the hours of some rows."""
        places: list[HourPlace] = []
        for own, hour in _by_hour(wanted, rows):
            file = self._filed.get(hour)
            filed = () if self.hours.is_loaded(hour) else self._filed.parts(hour)
            end: int | None = self._outcomes.ends.get(hour, OutcomeEnd()).length
            if not end and file.rows and file.sealed and not file.removed:
                end = None  # A start does not open it: all of it was durable when the hour was sealed.
            if end != 0 or filed is not None:
                places.append(HourPlace(hour, own, filed, end))
        return places


def _read(look: Look, go_on: OnRead, done: Done[LookedUp]) -> None:
    error: DelaydError | None = None
    try:
        look.found = done.result()
    except DelaydError as failed:
        error = failed
    go_on(error)


def _split(rows: Rows, hour: int, ended: Pile) -> tuple[Rows, Rows]:
    """Rows without those of an hour that have ended, and these; the given rows when there are none."""
    found = ended.has(rows["sequence"]) & (rows["hour"] == np.uint32(hour))
    if not found.any():
        return rows, rows[:0]
    return rows.take(np.flatnonzero(~found)), rows.take(np.flatnonzero(found))


def _within(hours: Collection[int], first: int, last: int) -> list[int]:
    """Those of some hours that lie between two, both included. Mostly the two are one hour, and the others are many."""
    if first == last:
        return [first] if first in hours else []
    return [hour for hour in hours if first <= hour <= last]


def _tell(answers: AnswerRows, state: NDArray[np.uint8], found: Indices, ended: EndedRows) -> None:
    """Tell what some rows were ended as. Rows that are on their way to another delay server are IN_FLIGHT: where they
    are is known when that server has taken them.
    """
    for reason in Reason:
        state[found.compress(ended["reason"] == reason)] = reason.state
    leaves = ended["reason"] == Reason.DRAINED
    state[found.compress(leaves)] = MessageState.IN_FLIGHT
    stays = found.compress(~leaves)
    answers["other"][stays], answers["other_at_ms"][stays] = ended["other"][~leaves], ended["other_at_ms"][~leaves]
    answers["decided_at_ms"][stays] = ended["decided_at_ms"][~leaves]


def _is_of(wanted: Wanted, hours: Collection[int]) -> Bools:
    return np.isin(wanted.hours, np.array(sorted(hours), np.uint32))


def _by_hour(wanted: Wanted, rows: Indices | None = None) -> Iterator[tuple[Indices, int]]:
    """The wanted rows, or some of them, hour by hour; the rows of each hour rise in sequence."""
    if rows is None:
        rows = np.arange(len(wanted))
    rows = rows.take(np.argsort(wanted.hours.take(rows), kind="stable"))
    hours = wanted.hours.take(rows)
    cuts = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(rows)]
    for low, high in pairwise(cuts if len(rows) else ()):
        yield rows[low:high], int(hours[low])
