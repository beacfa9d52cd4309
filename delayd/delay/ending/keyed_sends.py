"""Keyed sends: batches with keys, from their arrival to the verdicts about their rows (rules P1, C1, C3; docs/keys.md).

Invariant: of the rows with one name, one at most is pending. Batches are decided in the order of their arrival.

     batch ──▶ look up names ──▶ look up the rows ──▶ queue ──▶ compare, decide ──▶ fsync ──▶ the index, answers
               (worker thread)   that they met        (loop)    when the group is closed
                                 (worker thread)

One round of look-ups is under way at a time; batches that come meanwhile make the next one. A look-up sees the index as
it was when the round began. When the group is closed, it is compared with the names that were taken since.

A batch that meets a row in flight is set aside until that row is decided, for FLIGHT_MS at most: a consumer may have
the message before this server hears that its target has taken it, and often sends the next one under the same key.
Batches that name one of its keys wait behind it. Then they are looked up anew. An example, with row 3 at its target:

    1. A sends under key k, and meets 3, which is in flight: A is set aside.
    2. B sends under key k: B is set aside, because it is behind A. C sends under key l and is decided.
    3. The target's answer comes: 3 is DISPATCHED, A takes the key, and B meets A.

Say the rows 7, 8 and 9 of a commit have one name, and row 3, which is pending, has it, too:

    7 keep       met 3: KEPT
    8 replace    3 is REPLACED by 8
    9 reject     met 8: REJECTED

A *record* (docs/once.md) stands in its batch before the row that it says was sent, and is decided before all rows that
are none. Say row 11 is on the record subject, row 12 is behind it, and row 5 is pending with the name of 11:

    11 record    met 5: KEPT
    12           met 5, too: REJECTED, whether or not it has a key

When no row has the name of 11, it takes the name, and row 12 is decided like any other. If 12 is REJECTED then, or
meets a row in flight, so does 11: there is no record of a send that was not done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import RECORD_FLAG, ColumnId, Int64s
from delayd.batch.content import Names, slots_of_names
from delayd.batch.sequences import NO_INDICES, Indices, Sequences
from delayd.delay.intake import Intake, OpenGroup
from delayd.delay.keys.index import TakenNames, View, Watch
from delayd.delay.keys.owned_slots import OwnedSlots, Slots
from delayd.delay.keys.run import ROW, AskedNames, Entries, Newest, Rows
from delayd.delay.ledger.ledger import NOT_CLAIMABLE, Ledger, Look, RowPlace, RowPlaces
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.rows import Stored, filing_hours
from delayd.errors import DamagedData, DelaydError, Shortage, SlowDown
from delayd.log.hour import ENDED, NO_ENDED, EndedRows, note_hours_of_others
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site
from delayd.outcome import MessageState, Reason
from delayd.wire.meta import NO_SLOTS, SlotSet, slot_set

REJECT, KEEP, REPLACE, RECORD = 0, 1, 2, RECORD_FLAG  # Values of column row_flags.
ROUND_ROWS_MAX = 131_072  # Rows of one round, as of one commit.
FLIGHT_MS = (
    5_000  # A target that is well answers within milliseconds, and a restarted server is greeted within seconds.
)
LOOK_AGAIN_MS = 250  # A row may come back from its target without an outcome, and then nobody says so.
ASIDE_ROWS_MAX = 65_536  # Names of batches that are set aside; more are decided at once, as if they had waited.
NO_WANTED = Wanted(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint32))
NOT_LOOKED = Look(NO_WANTED, np.zeros(0, np.uint8), np.zeros(0, np.bool_))

Bools = NDArray[np.bool_]


class _Names(NamedTuple):
    """The rows of a batch that have keys, and the entries that their names had."""

    rows: Int64s
    asked: AskedNames
    found: Rows
    slots: Slots


@dataclass(slots=True)
class _Round:
    """What one round has looked up of the rows that were met."""

    watch: Watch
    left: int  # Batches that are not decided about yet.
    look: Look
    slots: SlotSet  # Those of the batches.


class _LookedUp(NamedTuple):
    """A batch whose names were looked up."""

    names: _Names
    round: _Round


class _Aside(NamedTuple):
    """A batch that waits until rows that it met are decided."""

    batch: Batch
    hashes: list[int]  # One for each of its names.
    met: Rows  # Rows that are in flight; none when it waits for another batch only.
    until_ms: int  # Monotonic: then it is decided in any case.


class KeyedSends:
    """All batches with keys; belongs to the loop."""

    def __init__(
        self,
        site: Site,
        taken: TakenNames,
        owned: OwnedSlots,
        ledger: Ledger,
        intake: Intake,
    ) -> None:
        self._owned = owned
        self._worker = site.worker
        self._clock = site.clock
        self._aside: list[_Aside] = []  # In the order of their arrival.
        self._aside_hashes: set[int] = set()  # One for each of their names.
        self._awaited: set[int] = set()  # Rows in flight that they have met.
        # By producer and number, of batches that are looked up again: until when they may be set aside.
        self._waits_until: dict[tuple[int, int], int] = {}
        self._look_again = site.alarms.alarm(self._look_at_aside)
        self._taken = taken
        self._ledger = ledger
        self._intake = intake
        self._arrived: deque[Batch] = deque()
        self._under_way: _Round | None = None
        self._queued: dict[tuple[int, int], _LookedUp] = {}  # By producer and number.

    @property
    def waiting(self) -> bool:
        """Whether a group commit has batches to decide about."""
        return bool(self._queued)

    def check(self) -> None:
        """Raise SlowDown while keys can't be looked up."""
        self._taken.check()

    def take(self, batch: Batch) -> None:
        """Look the keys of a batch up, then queue it; or refuse it."""
        self._arrived.append(batch)
        self._look()

    # Rows in flight.

    def _look_at_aside(self) -> None:
        """Look again whether rows that batches wait for are decided, or came back."""
        now_ms = self._clock.monotonic_ms()
        met = _wanted(np.concatenate([each.met for each in self._aside]))
        overdue = self._intake.closed or min(each.until_ms for each in self._aside) <= now_ms
        if overdue or bool((self._ledger.places(met) != RowPlace.IN_FLIGHT).any()):
            self._take_up()
        else:
            self._look_again.after(LOOK_AGAIN_MS)

    def _recorded(self, sequences: Sequences) -> None:
        """Some rows have outcomes now."""
        if not self._awaited.isdisjoint(sequences.tolist()):
            self._take_up()

    def _take_up(self) -> None:
        """Look up anew what was set aside; what still meets a row in flight is set aside again."""
        aside, self._aside = self._aside, []
        self._aside_hashes.clear()
        self._awaited.clear()
        self._look_again.off()
        self._ledger.tell_outcomes(None)
        self._waits_until.update({each.batch.producer[:2]: each.until_ms for each in aside})
        self._arrived.extendleft(each.batch for each in reversed(aside))
        self._look()

    def _set_aside(self, round_: _Round, batches: Sequence[Batch], names: Sequence[_Names]) -> list[bool]:
        """Set batches aside that must wait for rows in flight; for each batch, whether it goes on."""
        now_ms = self._clock.monotonic_ms()
        flying = round_.look.wanted.sequences.compress(round_.look.places == RowPlace.IN_FLIGHT)
        if not len(flying) and not self._aside and not self._waits_until:
            return [True] * len(batches)
        goes_on: list[bool] = []
        for batch, each in zip(batches, names, strict=True):
            until_ms = self._waits_until.pop(batch.producer[:2], now_ms + FLIGHT_MS)
            met = each.found.compress(np.isin(each.found["sequence"], flying)) if len(flying) else each.found[:0]
            hashes = each.asked.hashes.tolist() if len(met) or self._aside else []
            waits = len(met) > 0 or not self._aside_hashes.isdisjoint(hashes)
            if waits and now_ms < until_ms and len(self._aside_hashes) < ASIDE_ROWS_MAX and not self._intake.closed:
                self._wait(_Aside(batch, hashes, met, until_ms), now_ms)
            goes_on.append(not self._aside or self._aside[-1].batch is not batch)
        return goes_on

    def _wait(self, aside: _Aside, now_ms: int) -> None:
        self._aside.append(aside)
        self._aside_hashes.update(aside.hashes)
        self._awaited.update(aside.met["sequence"].tolist())
        self._ledger.tell_outcomes(self._recorded)
        if self._look_again.at_ms is None:
            self._look_again.after(LOOK_AGAIN_MS)

    # Looking up.

    def _look(self) -> None:
        if self._under_way is not None or not self._arrived:
            return
        batches: list[Batch] = []
        rows = 0
        while self._arrived and (not batches or rows + self._arrived[0].count <= ROUND_ROWS_MAX):
            batches.append(self._arrived.popleft())
            rows += batches[-1].count
        watch, view = self._taken.begin()
        self._under_way = _Round(watch, len(batches), NOT_LOOKED, NO_SLOTS)
        work = partial(_find, view, batches, self._worker.give_way)
        self._worker.submit(work, partial(self._found, batches), Priority.DUE)

    def _found(self, batches: Sequence[Batch], done: Done[list[_Names]]) -> None:
        """Look up the rows that were met, where they are not in memory."""
        round_ = self._under_way
        assert round_ is not None, "a round is under way until its batches are queued"
        try:
            names = done.result()
        except (DamagedData, Shortage) as error:
            if isinstance(error, DamagedData):
                self._taken.damaged(error)
            self._under_way = None
            self._taken.end(round_.watch)
            for batch in batches:
                self._refuse(batch, SlowDown(f"keys can't be looked up now: {error}"))
            self._look()
            return
        batches, served = self._admitted(batches, names)
        if not batches:
            self._end_round(round_)
            return
        round_.slots = slot_set(np.concatenate([each.slots for each in served]))
        wanted = _wanted(np.concatenate([each.found for each in served]))
        self._ledger.when_sorted(self._worker, partial(self._look_up_rows, round_, wanted, batches, served))

    def _end_round(self, round_: _Round) -> None:
        """No batch of a round goes on."""
        self._under_way = None
        self._taken.end(round_.watch)
        self._look()

    def _look_up_rows(self, round_: _Round, wanted: Wanted, batches: Sequence[Batch], names: Sequence[_Names]) -> None:
        if len(wanted):
            round_.look = self._ledger.look(wanted)
        goes_on = self._set_aside(round_, batches, names)
        batches, looked_up = list(compress(batches, goes_on)), [_LookedUp(each, round_) for each in names]
        looked_up = list(compress(looked_up, goes_on))
        round_.left = len(batches)
        if not batches:
            self._end_round(round_)
        else:
            self._ledger.read(round_.look, partial(self._rows_found, batches, looked_up))

    def _admitted(self, batches: Sequence[Batch], names: Sequence[_Names]) -> tuple[Sequence[Batch], Sequence[_Names]]:
        """The batches whose keys this server owns; the others wait until meta has said who owns them (rule I4)."""
        kept = [self._owned.are_served(each.slots) for each in names]
        for batch, each, is_kept in zip(batches, names, kept, strict=True):
            if not is_kept:
                self._owned.admit(each.slots, partial(self._answered, batch))
        return list(compress(batches, kept)), list(compress(names, kept))

    def _answered(self, batch: Batch, error: DelaydError | None) -> None:
        """Meta has said who owns the keys of a batch."""
        if error is None:
            self.take(batch)
        else:
            self._refuse(batch, error)

    def _refuse(self, batch: Batch, error: DelaydError) -> None:
        self._waits_until.pop(batch.producer[:2], None)
        self._intake.refuse(batch, error)

    def takes(self, slots: SlotSet) -> bool:
        """Whether rows with keys of some slots are on their way to the disk."""
        rounds = [each.round for each in self._queued.values()]
        if self._under_way is not None:
            rounds.append(self._under_way)
        if any((each.slots & slots).any() for each in rounds):
            return True
        closing = self._taken.closing
        return closing is not None and bool(slots.take(slots_of_names(closing.names.packed())).any())

    def _rows_found(self, batches: Sequence[Batch], looked_up: Sequence[_LookedUp], error: DelaydError | None) -> None:
        """Queue the batches of a round, but for those that meet a row of which the files can't be read now."""
        round_ = self._under_way
        assert round_ is not None, "a round is under way until its batches are queued"
        look = round_.look
        if error is not None:
            for batch in batches:
                self._refuse(
                    batch, SlowDown(f"the files with earlier messages of these keys can't be read now: {error}")
                )
            self._end(looked_up)
            batches, looked_up = [], []
        elif look.found is not None and look.found.unread.any():
            unsure = look.found.unread & (self._ledger.states(look).answers["state"] == MessageState.IN_FLIGHT)
            batches, looked_up = self._without(look.wanted.sequences.compress(unsure), batches, looked_up)
        self._queue(batches, looked_up)

    def _without(
        self, unread: Sequences, batches: Sequence[Batch], looked_up: Sequence[_LookedUp]
    ) -> tuple[Sequence[Batch], Sequence[_LookedUp]]:
        """Refuse the batches that meet an unread row, and return the others: the row may have ended, so no verdict of
        such a batch would be true.
        """
        met = [np.isin(each.names.found["sequence"], unread).any() for each in looked_up]
        for batch in compress(batches, met):
            self._refuse(batch, SlowDown("the files with an earlier message of one of these keys can't be read now"))
        self._end(list(compress(looked_up, met)))
        kept = [not each for each in met]
        return list(compress(batches, kept)), list(compress(looked_up, kept))

    def _queue(self, batches: Sequence[Batch], looked_up: Sequence[_LookedUp]) -> None:
        self._under_way = None
        for batch, each in zip(batches, looked_up, strict=True):
            self._queued[batch.producer[:2]] = each
        self._intake.join(batches)
        self._look()

    # The group commit.

    def close(self, group: OpenGroup) -> EndedRows:
        """Decide about the rows with keys of a commit: the rows that end with it, by rising sequence."""
        assert self._taken.closing is None, "one commit is under way at a time"
        stored = [entry for entry in group.stored if ColumnId.KEY_END in entry.batch.offsets]
        if not stored:
            return NO_ENDED
        looked_up = [self._queued.pop(entry.batch.producer[:2]) for entry in stored]
        rows = _joined(stored, looked_up, group.appended_at_ms)
        rounds = {id(each.round): each.round for each in looked_up}
        self._taken.compare(
            min((each.watch for each in rounds.values()), key=lambda watch: watch.added), rows.asked, rows.found
        )
        self._end(looked_up)
        order, starts = _by_name(rows)
        if len(starts) == len(order) and not rows.found.known.any():
            # The common case: each key is new.
            self._taken.closing = rows.entries(order)
            return NO_ENDED
        behind = _Behind.of(rows, stored, group.appended_at_ms) if (rows.policy == RECORD).any() else None
        ended, took = self._decide(rows, order, starts, looked_up, behind)
        ended["decided_at_ms"] = group.appended_at_ms
        self._taken.closing = rows.entries(order.compress(took.take(order)))
        return ended

    def committed(self) -> None:
        """The rows of the commit are durable: they have taken their keys."""
        self._taken.committed()

    def refused(self) -> None:
        """The commit was not stored, and all queued batches are refused."""
        self._taken.closing = None
        self._end(list(self._queued.values()))
        self._queued.clear()

    def _end(self, looked_up: Sequence[_LookedUp]) -> None:
        """Batches are decided about, or refused."""
        for each in looked_up:
            each.round.left -= 1
            if not each.round.left:
                self._taken.end(each.round.watch)

    def _decide(
        self,
        rows: _CommitRows,
        order: Indices,
        starts: Indices,
        looked_up: Sequence[_LookedUp],
        behind: _Behind | None,
    ) -> tuple[EndedRows, Bools]:
        """The rows that end with the commit, and which of its rows take their keys.

        ``order`` puts rows of one name one behind the other, as they were sent; ``starts`` says where a name begins.
        ``behind`` are the rows behind records, if there are any.
        """
        # The row that has each name so far.
        holders = rows.found.rows.take(order.take(starts))
        wanted = _wanted(holders)
        held = np.flatnonzero(holders["sequence"] != 0)
        at = np.searchsorted(wanted.sequences, holders["sequence"][held])
        pending, in_flight = np.zeros((2, len(starts)), np.bool_)
        claimable: RowPlaces = np.zeros(0, np.uint8)
        if len(wanted):
            look = Look.of_several(wanted, {id(each.round): each.round.look for each in looked_up}.values())
            states = self._ledger.states(look)
            claimable = states.claimable
            pending[held] = (claimable != NOT_CLAIMABLE).take(at)
            # A row that its target has taken has left its key, and so has one that is cancelled with this commit,
            # though nobody may be told so yet.
            in_flight[held] = ((states.answers["state"] == MessageState.IN_FLIGHT) & ~states.ended).take(at)
        # By row, in this order: how its name stands, and which row it meets.
        n = len(order)
        place = np.arange(n)
        name_of = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, n)))
        policy = rows.policy.take(order)
        is_first = np.zeros(n, np.bool_)
        is_first[starts] = True
        taken, flying = pending.take(name_of), in_flight.take(name_of)
        took = ~flying & ((is_first & ~taken) | (policy == REPLACE))
        place_of = np.empty(n, np.intp)
        place_of[order] = place
        refused = NO_INDICES if behind is None else np.flatnonzero(~took.take(place_of.take(behind.records)))
        if behind is not None and len(refused):
            # The rows behind these records take nothing, so the next row of their names is the first one.
            live = np.ones(n, np.bool_)
            live[place_of.take(behind.keyed_rows(refused))] = False
            is_first[:] = False
            left = np.flatnonzero(live)
            is_first[left[np.diff(name_of.take(left), prepend=-1) != 0]] = True
            took = live & ~flying & ((is_first & ~taken) | (policy == REPLACE))
        last = np.maximum.accumulate(np.where(took, place, -1))
        before = np.append([-1], last[:-1])
        before[before < starts.take(name_of)] = -1
        met = rows.rows.take(order).take(before)
        of_earlier = before < 0
        met[of_earlier] = holders.take(name_of[of_earlier])
        meets = (~of_earlier) | taken | flying
        # Rows that take no key end at once; rows that are replaced end, too.
        mine = rows.rows.take(order)
        reason = np.where((policy == KEEP) | (policy == RECORD), Reason.KEPT, Reason.REJECTED)
        # Nobody can say of a row in flight that it stands for a new one: a consumer may have it already.
        reason[flying & (policy != REJECT)] = Reason.IN_FLIGHT
        replaces = took & meets
        keyless, keyless_met = rows.rows[:0], met[:0]
        if behind is not None:
            keyless, keyless_met = behind.settle(_Places(place_of, took, reason, met), refused)
        none = np.concatenate(
            (
                _none(mine[~took], reason[~took], met[~took]),
                _none(keyless, np.full(len(keyless), Reason.REJECTED), keyless_met),
            )
        )
        replaced = _ended(met[replaces], np.full(int(replaces.sum()), Reason.REPLACED), mine[replaces])
        self._claim(wanted, claimable, none, replaced)
        ended = np.concatenate((none, replaced))
        ended = ended.take(np.argsort(ended["sequence"], kind="stable"))
        takes = np.zeros(n, np.bool_)
        takes[order] = took
        return ended, takes

    def _claim(self, wanted: Wanted, claimable: RowPlaces, none: EndedRows, replaced: EndedRows) -> None:
        """Claim the rows that end: earlier ones where they are, and those of the commit before they come."""
        old = np.isin(wanted.sequences, replaced["sequence"]) if len(wanted) else np.zeros(0, np.bool_)
        chosen = np.flatnonzero(old)
        if len(chosen):
            self._ledger.claim(wanted.take(chosen), claimable.take(chosen))
        own = replaced.compress(~np.isin(replaced["sequence"], wanted.sequences))
        new = np.concatenate((none, own))
        if len(new):
            rows = _wanted(new)
            self._ledger.claim(rows, np.zeros(len(rows), np.uint8))


class _Places(NamedTuple):
    """What was decided about the rows with keys of a commit, by place; ``of`` has the place of each."""

    of: Indices
    took: Bools
    reason: NDArray[np.int64]
    met: Rows


class _Behind(NamedTuple):
    """The records of a commit, and the rows behind them: columns with one item for each record."""

    records: Indices  # By their numbers among the rows with keys.
    keyed: Indices  # The row behind, by its number there; -1 when it has no key, or when there is none.
    rows: Rows  # The row behind when it has no key; else its sequence is 0.

    @classmethod
    def of(cls, rows: _CommitRows, stored: Sequence[Stored], appended_at_ms: int) -> _Behind:
        """Find them."""
        sequences = rows.rows["sequence"]
        records = np.flatnonzero(rows.policy == RECORD)
        following = sequences.take(records) + np.uint64(1)
        bases = np.array([entry.base_sequence for entry in stored], np.uint64)
        ends = bases + np.array([entry.batch.count for entry in stored], np.uint64)
        of_batch = np.searchsorted(bases, following, "left") - 1
        # Behind the last row of a batch stands a row of another sender.
        has_row = following < ends.take(of_batch)
        keyed = np.searchsorted(sequences, following)
        keyed[keyed == len(sequences)] = 0
        has_key = sequences.take(keyed) == following
        # A record that another one follows stands alone.
        is_record = rows.policy.take(keyed) == RECORD
        keyed[~(has_row & has_key) | is_record] = -1
        plain = np.zeros(len(records), ROW)
        has_none = has_row & ~has_key
        for number in np.unique(of_batch.compress(has_none)).tolist():
            own = np.flatnonzero(has_none & (of_batch == number))
            due_ms = stored[number].batch.int64s(ColumnId.DELIVER_AT_MS)
            plain["sequence"][own] = following.take(own)
            plain["deliver_at_ms"][own] = due_ms.take((following.take(own) - bases[number]).astype(np.intp))
        plain["hour"] = filing_hours(plain["deliver_at_ms"], appended_at_ms)
        return cls(records, keyed, plain)

    def keyed_rows(self, refused: Indices) -> Indices:
        """The rows with keys behind some records."""
        keyed = self.keyed.take(refused)
        return keyed.compress(keyed >= 0)

    def settle(self, places: _Places, refused: Indices) -> tuple[Rows, Rows]:
        """Let a row behind a refused record meet what that has met, and a record whose row is not kept what its row
        has. Returns the refused rows without keys, and what each has met.
        """
        of_records = places.of.take(self.records)
        with_keys = self.keyed >= 0
        is_refused = np.zeros(len(self.records), np.bool_)
        is_refused[refused] = True
        rows = places.of.take(self.keyed.compress(with_keys & is_refused))
        records = of_records.compress(with_keys & is_refused)
        places.met[rows] = places.met[records]
        places.reason[rows] = Reason.REJECTED
        rows = places.of.take(self.keyed.compress(with_keys & ~is_refused))
        records = of_records.compress(with_keys & ~is_refused)
        undone = ~places.took.take(rows) & (places.reason.take(rows) != Reason.KEPT)
        rows, records = rows.compress(undone), records.compress(undone)
        places.took[records] = False
        places.met[records] = places.met[rows]
        places.reason[records] = Reason.REJECTED
        plain = is_refused & (self.rows["sequence"] != 0)
        return self.rows.compress(plain), places.met.take(of_records.compress(plain))


class _CommitRows(NamedTuple):
    """The rows with keys of a commit, in their order."""

    asked: AskedNames
    found: Newest
    rows: Rows
    policy: NDArray[np.uint16]

    def entries(self, order: Indices) -> Entries:
        """Some of them as entries; ``order`` rises by hash, and by sequence where hashes are the same."""
        return Entries(self.asked.hashes.take(order), self.rows.take(order), self.asked.names.take(order))


def _find(view: View, batches: Sequence[Batch], give_way: Callable[[], None]) -> list[_Names]:
    """The entries of the names of some batches; on the worker thread."""
    rows = [batch.keyed_rows() for batch in batches]
    names = [Names.of_batch(batch, own) for batch, own in zip(batches, rows, strict=True)]
    joined = Names.joined(names)
    asked = view.asked(joined)
    found = view.find(asked, give_way).rows
    cuts = np.cumsum([len(own) for own in rows])[:-1]
    hashes, parts = np.split(asked.hashes, cuts), np.split(found, cuts)
    slots = np.split(slots_of_names(joined), cuts)
    return [_Names(*each) for each in zip(rows, map(AskedNames, names, hashes), parts, slots, strict=True)]


def _joined(stored: Sequence[Stored], looked_up: Sequence[_LookedUp], appended_at_ms: int) -> _CommitRows:
    names = [each.names for each in looked_up]
    asked = AskedNames(
        Names.joined([each.asked.names for each in names]), np.concatenate([each.asked.hashes for each in names])
    )
    found = Newest(len(asked.hashes))
    found.rows = np.concatenate([each.found for each in names])
    rows = np.empty(len(asked.hashes), ROW)
    policy = np.zeros(len(asked.hashes), np.uint16)
    at = 0
    for entry, each in zip(stored, names, strict=True):
        own = slice(at, at + len(each.rows))
        at += len(each.rows)
        rows["sequence"][own] = each.rows.astype(np.uint64) + np.uint64(entry.base_sequence)
        rows["deliver_at_ms"][own] = entry.batch.int64s(ColumnId.DELIVER_AT_MS).take(each.rows)
        if ColumnId.ROW_FLAGS in entry.batch.offsets:
            policy[own] = entry.batch.column(ColumnId.ROW_FLAGS).take(each.rows)
    rows["hour"] = filing_hours(rows["deliver_at_ms"], appended_at_ms)
    return _CommitRows(asked, found, rows, policy)


def _by_name(rows: _CommitRows) -> tuple[Indices, Indices]:
    """An order in which rows of one name stand together, as they were sent, by rising hash; and where a name begins."""
    hashes = rows.asked.hashes
    order = np.argsort(hashes, kind="stable")
    sorted_ = hashes.take(order)
    twins = sorted_[1:] == sorted_[:-1]
    if not twins.any():
        return order, np.arange(len(order))
    same = np.zeros(len(order), np.bool_)
    at = np.flatnonzero(twins)
    names = rows.asked.names
    same[at + 1] = names.take(order.take(at)).equal(names.take(order.take(at + 1)))
    if not same[at + 1].all():
        _part(order, twins, names, same)
    return order, np.flatnonzero(~same)


def _part(order: Indices, twins: Bools, names: Names, same: Bools) -> None:
    """Put rows of one name together where two names share a hash; no more than a few rows ever do."""
    ends = np.flatnonzero(np.append(~twins, [True])) + 1
    start = 0
    for end in ends.tolist():
        if end - start > 1 and not same[start + 1 : end].all():
            group = order[start:end]
            texts = names.take(group).texts()
            first_of = {text: place for place, text in reversed(list(enumerate(texts)))}
            by_name = sorted(range(len(texts)), key=lambda place: (first_of[texts[place]], place))
            order[start:end] = group.take(by_name)
            same[start:end] = [place != first_of[texts[place]] for place in by_name]
        start = end


def _wanted(rows: Rows | EndedRows) -> Wanted:
    """Rows as they are looked for in memory, each once; those without a sequence are none."""
    rows = rows.compress(rows["sequence"] != 0)
    sequences, firsts = np.unique(rows["sequence"], return_index=True)
    return Wanted(sequences, rows["deliver_at_ms"].take(firsts), rows["hour"].take(firsts))


def _none(rows: Rows, reasons: NDArray[np.int64], met: Rows) -> EndedRows:
    """Rows of the commit that end at once, and what each of them has met."""
    ended = _ended(rows, reasons, met)
    note_hours_of_others(ended, met["hour"])
    return ended


def _ended(rows: Rows, reasons: NDArray[np.int64], others: Rows) -> EndedRows:
    ended = np.zeros(len(rows), ENDED)
    for name in ("sequence", "deliver_at_ms", "hour"):
        ended[name] = rows[name]
    ended["reason"] = reasons
    ended["other"], ended["other_at_ms"] = others["sequence"], others["deliver_at_ms"]
    return ended
