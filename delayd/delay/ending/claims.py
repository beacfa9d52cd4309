"""Claims: where a row is in memory, and how it is claimed there (rule C1; docs/keys.md, The decision).

Invariant: a claimed row is never sent, and a row that a target may hold is never claimed.

    the row is                                         is claimed by
    due, and at no target                              taking it out of where it waits
    anywhere else, or of the commit that is under way  a note in the ledger: it passes no gate
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.damage.held import HeldRows
from delayd.delay.ending.outside import Outside, Run
from delayd.delay.ending.wanted import Wanted
from delayd.delay.handoff.dispatcher import Dispatcher
from delayd.delay.quarantine import Kind, Quarantine
from delayd.delay.rows import Rows, join_rows, new_rows
from delayd.delay.subjects import Subjects
from delayd.delay.timers.hours import Hours
from delayd.delay.timers.loading import Loading
from delayd.location import Locations
from delayd.sequences import Indices, Sequences


class Place(IntEnum):
    """Where a wanted row is."""

    NOWHERE = 0  # In no memory of rows to be delivered: it has ended, it is filed, or it never was.
    WHEEL = 1
    COLUMNS = 2  # Among the pending rows, of an hour that is not loaded.
    OUT = 3  # It has left the wheel, and no target can hold it.
    IN_FLIGHT = 4  # A target may hold it, or nobody can tell at this moment.
    ENDED = 5  # It has ended, and may still stand where it stood.


Places = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Holders:
    """The parts of the server that hold rows."""

    hours: Hours
    loading: Loading
    dispatcher: Dispatcher
    held: HeldRows
    outcomes: OutcomeLog
    quarantine: Quarantine
    mending: Callable[[], int | None]  # The hour that is being mended.


class Claims:
    """Claims over all holders of rows; belongs to the loop."""

    def __init__(self, holders: Holders) -> None:
        self._hours = holders.hours
        self._loading = holders.loading
        self._dispatcher = holders.dispatcher
        self._held = holders.held
        self._outcomes = holders.outcomes
        self._quarantine = holders.quarantine
        self._mending = holders.mending
        self._ledger = holders.hours.ledger
        self._taken: list[Rows] = []  # Rows that the commit under way has taken out of where they waited.
        self._outside = Outside()  # Over rows that wait for targets, or for a route, or to be readable.

    @property
    def subjects(self) -> Subjects:
        """The subjects that rows in memory have."""
        return self._hours.subjects

    def tell_outcomes(self, heard: Callable[[Sequences], None] | None) -> None:
        """Call ``heard`` with the rows of each outcome that is recorded from now on; None: nobody waits for any."""
        self._outcomes.on_recorded = heard

    def is_loaded(self, hour: int) -> bool:
        """Whether the rows of an hour are in the wheel, or have left it."""
        return hour <= self._loading.until and hour not in self._hours.withheld

    def noted_hours(self) -> set[int]:
        """Hours of which the commit that is under way has claimed rows for their load: the load waits for it."""
        return self._ledger.open_hours

    def look(self, wanted: Wanted, locations: Locations | None = None) -> Places:
        """Where each wanted row is now; ``locations`` is filled in for rows of WHEEL, COLUMNS and OUT."""
        places = np.zeros(len(wanted), np.uint8)
        if locations is None:
            locations = np.zeros(len(wanted), np.uint64)
        wheel = self._hours.wheel
        for hour in wheel.hours():
            own = wanted.of_hour(hour)
            if len(own):
                of_hour = wanted.take(own)
                for rows in wheel.find(hour, of_hour.due_ms, of_hour.are):
                    at, found = of_hour.find(rows)
                    taken = rows.take(at)
                    places[own.take(found)] = self._place(taken, Place.WHEEL)
                    locations[own.take(found)] = taken["location"]
        # Until a checkpoint passes them, the pending rows also have those of hours that were loaded since: such a row
        # is in the wheel, or has left it.
        far = self._far(wanted)
        for rows in self._hours.pending.between(int(wanted.sequences[0]), int(wanted.sequences[-1])):
            at, found = wanted.find_rising(rows)
            at, found = at.compress(far.take(found)), found.compress(far.take(found))
            places[found] = Place.COLUMNS
            locations[found] = rows.take(at)["location"]
        places[self._ledger.have_ended(wanted.hours, wanted.sequences)] = Place.ENDED
        left = np.flatnonzero(places == Place.NOWHERE)
        if len(left):
            places[left], locations[left] = self._look_outside(wanted.take(left))
        self._set_aside(wanted, places)
        return places

    def stand_still(self, wanted: Wanted) -> NDArray[np.bool_]:
        """Which of some rows that stood in the wheel before are there for certain: nothing has left their slots. No
        hour may have left the wheel since.
        """
        found = np.zeros(len(wanted), np.bool_)
        for hour in self._hours.wheel.hours():
            found |= (wanted.hours == np.uint32(hour)) & (wanted.due_ms >= self._hours.wheel.closed_from_ms(hour))
        return found

    def look_at_standing(self, wanted: Wanted, subject: int) -> Places:
        """The same as `look` for rows of one subject that stand still in the wheel: it does not search for them."""
        rows = new_rows(len(wanted))
        rows["subject"], rows["sequence"] = subject, wanted.sequences
        rows["hour"], rows["due_ms"] = wanted.hours, wanted.due_ms
        places = self._place(rows, Place.WHEEL)
        places[self._ledger.have_ended(wanted.hours, wanted.sequences)] = Place.ENDED
        self._set_aside(wanted, places)
        return places

    def unsorted(self) -> list[Rows]:
        """Arrays of waiting rows that are to be sorted before rows are looked for (rule B2); mostly there are none."""
        return self._outside.unsorted(self._waiting())

    def take_sorted(self, runs: Sequence[Run]) -> None:
        """Take what `sort_rows` has made of them."""
        self._outside.take(runs)

    def _waiting(self) -> list[Rows]:
        """View the rows that have left the wheel and are at no target, in several arrays."""
        waiting = [rows for link in self._dispatcher.links.values() for rows in link.sender.waiting_parts()]
        return [*waiting, *self._dispatcher.unrouted(), *self._held.parts()]

    def outside(self) -> list[Rows]:
        """View all rows that have left the wheel and are not decided, in several arrays."""
        return [*self._dispatcher.parts(), *self._held.parts()]

    def claim(self, wanted: Wanted, places: Places) -> None:
        """Claim rows: of WHEEL, COLUMNS and OUT, and NOWHERE for rows that a schedule log holds whose hour is not
        loaded.
        """
        self._end(wanted, places != Place.OUT)
        out = np.flatnonzero(places == Place.OUT)
        if len(out):
            rows = wanted.take(out)
            arrays = {id(found.array) for found in self._outside.find(rows, self._waiting())}
            self._taken += self._dispatcher.take_out(rows.sequences, arrays)
            self._taken += self._held.take_out(rows.sequences, arrays)

    def claim_new(self, wanted: Wanted) -> None:
        """Claim rows of the commit that is under way: they are in no memory of rows yet."""
        self._end(wanted, np.ones(len(wanted), np.bool_))

    def settle(self) -> None:
        """The decisions about the claimed rows are durable."""
        self._ledger.committed()
        self._taken = []

    def undo(self) -> None:
        """The decisions were not stored: the rows are pending again."""
        taken, self._taken = self._taken, []
        rows = [part for part in (*taken, self._ledger.undo()) if part is not None and len(part)]
        if rows:
            self._loading.put_back(join_rows(rows))

    def _end(self, wanted: Wanted, chosen: NDArray[np.bool_]) -> None:
        for rows, hour in _by_hour(wanted, chosen):
            self._ledger.end(hour, wanted.sequences.take(rows))

    def _far(self, wanted: Wanted) -> NDArray[np.bool_]:
        """Which wanted rows are of hours that are not loaded."""
        found = wanted.hours > np.uint32(max(0, self._loading.until))
        if self._hours.withheld:
            found |= _is_of(wanted, self._hours.withheld)
        return found

    def _place(self, rows: Rows, free: Place) -> Places:
        """Where rows count as being that a holder has, whether or not a target may hold them."""
        places = np.full(len(rows), free, np.uint8)
        places[self._dispatcher.may_have_left(rows)] = Place.IN_FLIGHT
        places[self._ledger.are_settled(rows["sequence"])] = Place.ENDED
        return places

    def _look_outside(self, wanted: Wanted) -> tuple[Places, Locations]:
        """Where rows are that are neither in the wheel nor kept for a load, and their locations."""
        places, locations = np.zeros(len(wanted), np.uint8), np.zeros(len(wanted), np.uint64)
        for link in self._dispatcher.links.values():
            for rows in link.sender.window.rows():
                places[wanted.find(rows)[1]] = Place.IN_FLIGHT
        for rows, at, found in self._outside.find(wanted, self._waiting()):
            taken = rows.take(at)
            places[found] = self._place(taken, Place.OUT)
            locations[found] = taken["location"]
        for rows in self._taken:
            # The commit under way ends it: afterwards it is owed its outcome, or waits again.
            places[wanted.find(rows)[1]] = Place.ENDED
        unwritten = list(self._outcomes.unwritten())
        if unwritten:
            places[wanted.places_of(np.concatenate(unwritten))] = Place.ENDED
        return places, locations

    def _set_aside(self, wanted: Wanted, places: Places) -> None:
        """Nobody can tell now what became of rows of some hours: they are asked about again later."""
        entries = [(entry.kind, entry.hour) for entry in self._quarantine if entry.hour is not None]
        unknown = {hour for kind, hour in entries if kind is Kind.DISPATCH}
        mending = self._mending()
        if mending is not None:
            unknown.add(mending)
        unknown.update(self._loading.next_hours)
        if unknown:
            places[_is_of(wanted, unknown) & (places != Place.ENDED)] = Place.IN_FLIGHT
        # Rows of which only the bodies can't be read are held, and so in memory: what is nowhere is not among them.
        damaged = {hour for kind, hour in entries if kind is Kind.SCHEDULE}
        if damaged:
            places[_is_of(wanted, damaged) & (places == Place.NOWHERE)] = Place.IN_FLIGHT


def _is_of(wanted: Wanted, hours: Collection[int]) -> NDArray[np.bool_]:
    return np.isin(wanted.hours, np.array(sorted(hours), np.uint32))


def _by_hour(wanted: Wanted, chosen: NDArray[np.bool_]) -> Iterator[tuple[Indices, int]]:
    """The chosen rows, hour by hour; the rows of each hour rise in sequence."""
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return
    rows = rows.take(np.argsort(wanted.hours.take(rows), kind="stable"))
    hours = wanted.hours.take(rows)
    cuts = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(rows)]
    for low, high in pairwise(cuts):
        yield rows[low:high], int(hours[low])
