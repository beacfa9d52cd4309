"""Requested rows: which row stands for each message that a request names, and what the caller is told of it.

A receipt or a key names a message, and a message may have many rows, one after the other: it was moved, or another
message took its key. An example, with a cancel of the message that was sent as row 5:

    asked      row 5                       what the receipt says
    follow     5 was moved: row 8          what the ledger says that 5 ended as
    follow     8 was moved: row 9          and so on, up to STEPS_MAX rows
    told       9 is PENDING, and claimed   the answer names row 9

Invariant: what this server has said itself is true (``told``); whatever else a receipt says may be made up.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s, ProducerPart
from delayd.batch.sequences import Indices, Locations
from delayd.delay.ending.copies import Copied, Leave, Rewrites, ToMove
from delayd.delay.keys.index import Named
from delayd.delay.ledger.ledger import NOT_CLAIMABLE, Look, RowPlaces
from delayd.delay.ledger.wanted import OfSubject, Wanted, wanted_newest
from delayd.delay.producers import Producers
from delayd.delay.reply import Reply
from delayd.delay.rows import filing_hours
from delayd.delay.subjects import Subjects
from delayd.errors import BadArgument
from delayd.hours import HOUR_MS
from delayd.log.hour import ENDED, decode_ended
from delayd.outcome import MessageState
from delayd.wire.asked import ANSWER, AnswerRows, Asked, CancelAnswer, MoveTry, RescheduleAnswer, Tries
from delayd.wire.meta import SlotSet

PIECE_ROWS = 16_384  # One turn of the loop works on so many rows of a request, in some 10 ms. The rest comes later.
HOUR_ROWS = 64  # Each hour in which rows are filed takes as long as so many rows.
NEVER = (1 << 64) - 1  # No row has this sequence.
STEPS_MAX = 100  # Moves that one request follows; then it is told how far it came, and to ask again from there.
WAITS_MAX = 8  # So many commits does a request by key wait for rows that take its keys.
LEADS_MAX = 65_536  # Some 300 bytes each.
LEADS_ROWS_MAX = 1_024  # Requests with more rows are looked up as they are: following each row would hold the loop.


def _answers_by_state(kind: type[CancelAnswer] | type[RescheduleAnswer]) -> NDArray[np.uint8]:
    """What a caller is told of a row in each state."""
    table = np.full(max(MessageState) + 1, kind.ALREADY_DISPATCHED, np.uint8)
    table[[MessageState.UNKNOWN, MessageState.REJECTED, MessageState.KEPT]] = kind.UNKNOWN
    table[[MessageState.PENDING, MessageState.IN_FLIGHT, MessageState.MOVED, MessageState.DRAINED]] = kind.IN_FLIGHT
    table[[MessageState.CANCELLED, MessageState.REPLACED]] = kind.CANCELLED
    return table


assert int(CancelAnswer.CHANGED) == int(RescheduleAnswer.CHANGED), "both are told alike"
_ANSWERS, _MOVE_ANSWERS = _answers_by_state(CancelAnswer), _answers_by_state(RescheduleAnswer)
_COLUMN_OF = {"sequences": "sequence", "deliver_at_ms": "deliver_at_ms", "accepted_at_ms": "accepted_at_ms"}

Bools = NDArray[np.bool_]
Lead = tuple[int, int, int]  # Sequence, due instant and instant of acceptance: what a receipt says.


class RequestWish(Enum):
    """What a request wants of its rows."""

    CANCEL = "cancel"
    GET = "get"
    MOVE = "move"


class Leaver(NamedTuple):
    """Where the rows of a request go that leave this server."""

    to: int  # The log_id of a delay server.
    slots: SlotSet | None
    draw: Callable[[], int]  # A number for each batch that no other batch has.
    goes: Callable[[Batch], None]  # Called with each batch when the decision about its rows is durable.

    def of_copy(self) -> Leave:
        """What a copy of some rows is made for."""
        return Leave(ProducerPart(self.draw() >> 1 | 1, 1, 1), self.slots)


@dataclass(slots=True)
class Whole:
    """A request as it came; a large one is done in pieces, one after the other."""

    wish: RequestWish
    asked: Asked
    reply: Reply[AnswerRows]
    wanted_at_ms: Int64s | None = None  # Where its rows are to be moved.
    named: Named | None = None
    leaver: Leaver | None = None
    rewrites: Rewrites | None = None  # What takes the place of its rows; without it copies of them.
    subject: bytes = b""
    # The numbers of a request by key that wants a change, or the one of a move by receipt.
    tries: Tries | MoveTry | None = None
    exact: bool = False  # It is about the rows that it names, and not about those in their place.
    left: deque[Indices] = field(default_factory=deque)  # The rows of the pieces that are not answered.
    is_begun: bool = False  # Whether one was answered.
    answers: AnswerRows = field(init=False)

    def __post_init__(self) -> None:
        self.answers = np.zeros(len(self.asked.sequences), ANSWER)

    def cut(self) -> list[Indices]:
        """The rows of its pieces: those of one hour stand together, as far as they fit."""
        count = len(self.asked.sequences)
        if count * HOUR_ROWS <= PIECE_ROWS:
            return [np.arange(count)]
        hours = filing_hours(self.asked.deliver_at_ms, self.asked.accepted_at_ms)
        order = np.argsort(hours, kind="stable")
        hours = hours.take(order)
        begins = np.concatenate((np.ones(1, np.bool_), hours[1:] != hours[:-1]))
        number = np.cumsum(1 + HOUR_ROWS * begins) // PIECE_ROWS
        return np.split(order, np.flatnonzero(number[1:] != number[:-1]) + 1)

    def piece(self, rows: Indices, reply: Reply[AnswerRows]) -> Whole:
        """Some of its rows as a request of its own."""
        return Whole(
            self.wish,
            Asked._make(column.take(rows) for column in self.asked),
            reply,
            None if self.wanted_at_ms is None else self.wanted_at_ms.take(rows),
            None if self.named is None else self.named.take(rows),
            self.leaver,
            self.rewrites,
            self.subject,
            None if self.tries is None else self.tries.take(rows),
            self.exact,
        )

    def ask_again(self) -> AnswerRows:
        """The answers so far; rows of pieces that were not done are to be asked for again."""
        for rows in self.left:
            told = np.zeros(len(rows), ANSWER)
            for name, column in self.asked._asdict().items():
                told[_COLUMN_OF[name]] = column.take(rows)
            told["state"], told["answer"] = MessageState.IN_FLIGHT, CancelAnswer.IN_FLIGHT
            self.answers[rows] = told
        return self.answers


class Requested:
    """The rows of a request, or of a piece of one."""

    wanted: Wanted  # Set by `rows`, as is ``order``: for each row of the request, its place in ``wanted``.
    order: Indices
    look: Look

    def __init__(self, whole: Whole, subjects: Subjects) -> None:
        count = len(whole.asked.sequences)
        self.wish, self.reply, self.named, self.tries = whole.wish, whole.reply, whole.named, whole.tries
        self.asked = whole.asked  # A moved message has the newest row that is known so far.
        self.told, self.done, self.stay, self._pinned = np.zeros((4, count), np.bool_)
        # ``told``: rows that this server has followed. ``done``: rows that were moved, or stay for now. ``stay``: the
        # latter, which can't be read or are not among those that leave. ``_pinned``: an earlier try has ended a row, so
        # the request is about that row, whoever has the key now.
        self.exact = whole.exact
        self.moves_to_ms, self.leaver, self.rewrites = whole.wanted_at_ms, whole.leaver, whole.rewrites
        self.copied: Copied | None = None
        self.has_copy = False  # Whether a copy is being made or waits for its commit.
        self.copies = 0  # Times that rows were copied anew.
        self.steps = 0  # Moves that were followed.
        self.looks = 0  # Times that rows were looked for anew.
        self.waits = 0  # Commits that had a row which took a name of the request.
        self._of_subject = OfSubject(whole.subject, subjects) if whole.subject else None

    @property
    def is_overdue(self) -> bool:
        """Whether it has waited long enough for rows that take its keys, and can be decided before them."""
        return self.waits == WAITS_MAX and self.wish is RequestWish.CANCEL

    @property
    def meets_closing(self) -> bool:
        """Whether a row of the commit that is being closed takes one of its names."""
        return self.named is not None and self.named.closing()

    def check_subject(self) -> None:
        """Raise BadArgument when a request names a message of another subject: no row of it was claimed."""
        if self._of_subject is not None and self._of_subject.strangers:
            subject = self._of_subject.name.decode()
            raise BadArgument(
                f"a receipt is that of a message of another subject than {subject}; nothing was done. Name the subject"
                " to which the message was sent",
                subject=subject,
            )

    # Which rows it is about.

    def rows(self, leads: ReceiptLeads, producers: Producers) -> Wanted:
        """The rows that it is about now, to be looked for."""
        # A move that is asked for again looks at each row on the way: where a receipt leads now says nothing of it.
        if self.steps == 0 and self.leaver is None and not self.exact and not self._moves_since(producers):
            followed = leads.follow(self.asked)
            self._take(followed.sequences != self.asked.sequences, followed)
        self.wanted, self.order = wanted_newest(self.asked, self.told)
        self.wanted.of_subject = self._of_subject
        return self.wanted

    def is_about_others(self, states: AnswerRows, leads: ReceiptLeads, producers: Producers) -> bool:
        """Whether other rows stand for its messages by now, which are to be looked for."""
        return self.pin(producers) or self._renew() or self._follow(states, leads, producers)

    def pin(self, producers: Producers) -> bool:
        """Take up the rows that earlier tries of a request have ended; whether there are any that are new to it.

        Such a try is done: it is answered about the row that it ended, and a moved message by the row that took its
        place then.
        """
        tries = self.tries
        if not isinstance(tries, Tries) or self._pinned.all() or not producers.knows(tries.asker):
            return False
        known = [producers.row_of_try(tries.asker, number) for number in tries.numbers.tolist()]
        new = np.array([bool(row) for row in known], np.bool_) & ~self._pinned
        if not new.any():
            return False
        self._pinned |= new
        rows = np.zeros(len(known), ENDED)
        rows[new] = np.frombuffer(
            b"".join(row for row, is_new in zip(known, new.tolist(), strict=True) if is_new), ENDED
        )
        # An instant of the filing hour serves as that of the acceptance.
        begins = rows["hour"].astype(np.int64) * HOUR_MS
        columns = (rows["sequence"], rows["deliver_at_ms"], np.where(rows["deliver_at_ms"] < begins, begins, 0))
        if self.wish is RequestWish.MOVE:
            columns = (rows["other"], rows["other_at_ms"], rows["decided_at_ms"])
        self._take(new, Asked._make(columns))
        if self.wish is RequestWish.MOVE:
            self.done |= new
        return True

    def _renew(self) -> bool:
        """Go on with the rows that have taken its names since, if there are any."""
        if self.named is None or self.steps == STEPS_MAX or not self.named.newer():
            return False
        newest = self.named.rows()
        newer = (newest.sequences > self.asked.sequences) & ~self._pinned
        return self._step(newer, newest)

    def _follow(self, states: AnswerRows, leads: ReceiptLeads, producers: Producers) -> bool:
        """Go on with the rows that took the place of moved ones, if there are any and it was not done too often.

        A move by receipt goes no further than to a row that one of its tries has made, and is done there. Say row 5 is
        to be due at ten, try 1 moved it to row 8, and somebody else moved that to row 9, due at noon. Try 2 knows that
        try 1 made its first row as 8. It meets 8, which is due at ten and was made since then: it is answered with 8,
        and 9 stays. Should somebody else have made 8, the message was due at ten all the same while the move was being
        asked for, so there was nothing left to do.

        An exact request goes to such a row of its own tries, and to no other one.
        """
        if self.steps == STEPS_MAX or self.leaver is not None:
            return False
        told = states.take(self.order)
        newer = (told["state"] == MessageState.MOVED) & ~self.done
        asked, newest = self.asked, Asked(told["other"], told["other_at_ms"], told["decided_at_ms"])
        since = self._moves_since(producers) if newer.any() else 0
        own = newer & (newest.sequences >= np.uint64(since or NEVER)) & (newest.deliver_at_ms == self.moves_to_ms)
        if self.exact:
            newer = own
        if not self._step(newer, newest):
            return False
        self.done |= own
        leads.note(asked, self.asked, newer)
        return True

    def _step(self, newer: Bools, newest: Asked) -> bool:
        self.steps += bool((newer & ~self.done).any())
        return self._take(newer, newest)

    def _take(self, newer: Bools, newest: Asked) -> bool:
        """Take other rows in the place of some that are not done; whether there are any."""
        newer = newer & ~self.done
        if not newer.any():
            return False
        self.told |= newer
        self.asked = Asked._make(np.where(newer, *columns) for columns in zip(newest, self.asked, strict=True))
        return True

    def _moves_since(self, producers: Producers) -> int:
        """The first row that a move by receipt has made, in this try or an earlier one; 0 when it has made none."""
        if not isinstance(self.tries, MoveTry):
            return 0
        row = producers.row_of_try(self.tries.asker, self.tries.number)
        return int(decode_ended(row)["other"][0]) if row else 0

    # Moves.

    def to_move(self, claimable: RowPlaces, locations: Locations) -> ToMove:
        """The rows that can be claimed now and are due at another instant than they should be."""
        assert self.moves_to_ms is not None, "it moves rows"
        # Several receipts may stand for one message: their wishes are done one after the other.
        order = self.order.compress(~self.done)
        wanted_at_ms = np.zeros(len(self.wanted), np.int64)
        wanted_at_ms[order] = self.moves_to_ms.compress(~self.done)
        chosen = np.zeros(len(self.wanted), np.bool_)
        chosen[order] = True
        chosen &= claimable != NOT_CLAIMABLE
        if self.leaver is None and self.rewrites is None:
            chosen &= wanted_at_ms != self.wanted.deliver_at_ms
        rows = np.flatnonzero(chosen)
        rows = rows.take(np.argsort(self.wanted.hours.take(rows), kind="stable"))
        return ToMove(
            rows,
            self.wanted.hours.take(rows),
            self.wanted.sequences.take(rows),
            locations.take(rows),
            wanted_at_ms.take(rows),
            None if self.leaver is None else self.leaver.of_copy(),
        )

    def stays(self, rows: Indices) -> None:
        """Some wanted rows stay for now."""
        stay = np.isin(self.order, rows)
        self.done |= stay
        self.stay |= stay

    def was_moved(self, base_sequence: int, decided_at_ms: int, leads: ReceiptLeads) -> bool:
        """Its copied rows stand for their messages now; whether all of its rows are done."""
        assert self.copied is not None and self.copied.batch is not None, "rows were copied"
        number = np.full(len(self.wanted), -1, np.int64)
        number[self.copied.rows] = np.arange(len(self.copied.rows))
        of_row = number.take(self.order)
        own = (of_row >= 0) & ~self.done
        if self.leaver is None:
            asked = self.asked
            due = self.copied.batch.int64s(ColumnId.DELIVER_AT_MS).take(of_row)
            if self.rewrites is None:
                own &= due == self.moves_to_ms
            self.asked = Asked(
                np.where(own, np.uint64(base_sequence) + of_row.astype(np.uint64), asked.sequences),
                np.where(own, due, asked.deliver_at_ms),
                np.where(own, np.int64(decided_at_ms), asked.accepted_at_ms),
            )
            leads.note(asked, self.asked, own)
        self.done |= own
        return bool((self.done if self.leaver is not None else self.done & ~self.stay).all())

    # The answer.

    def answers(self, states: AnswerRows) -> AnswerRows:
        """What the caller is told, row by row, when ``states`` says what became of the wanted rows."""
        told = states.take(self.order)
        asked = self.asked
        told["sequence"], told["accepted_at_ms"] = asked.sequences, asked.accepted_at_ms
        if self.wish is RequestWish.CANCEL:
            told["answer"] = _ANSWERS.take(told["state"])
        elif self.wish is RequestWish.MOVE:
            moved = self.done & ~self.stay
            told[moved] = 0
            told["state"][moved] = MessageState.PENDING if self.leaver is None else MessageState.DRAINED
            for name, column in asked._asdict().items():
                told[_COLUMN_OF[name]][moved] = column.compress(moved)
            told["answer"] = _MOVE_ANSWERS.take(told["state"])
            if self.rewrites is None:
                moved |= (told["state"] == MessageState.PENDING) & (asked.deliver_at_ms == self.moves_to_ms)
            told["answer"][moved] = RescheduleAnswer.MOVED
        if self.exact:
            told["answer"][told["state"] == MessageState.MOVED] = CancelAnswer.CHANGED
        return told

    def in_flight(self) -> AnswerRows:
        """States that say of each wanted row to ask again."""
        states = np.zeros(len(self.wanted), ANSWER)
        states["state"], states["deliver_at_ms"] = MessageState.IN_FLIGHT, self.wanted.deliver_at_ms
        return states

    def so_far(self) -> AnswerRows | None:
        """What a request that can't go on is told when some of its rows were moved: the others are to be asked for
        again.
        """
        return self.answers(self.in_flight()) if (self.done & ~self.stay).any() else None


class ReceiptLeads:
    """Receipts of earlier rows, each with that of a newer row, so that the next request need not read the outcome of
    each row between; belongs to the loop. All of it may be forgotten: the outcomes say it again.
    """

    def __init__(self) -> None:
        self._newer: OrderedDict[Lead, Lead] = OrderedDict()

    def note(self, earlier: Asked, newer: Asked, which: Bools) -> None:
        """Remember that some rows were moved: each receipt was found to be true, and what it leads to is durable."""
        if len(which) > LEADS_ROWS_MAX:
            return
        rows = np.flatnonzero(which).tolist()
        for before, after in zip(_leads(earlier.take(rows)), _leads(newer.take(rows)), strict=True):
            self._newer[before] = after
        while len(self._newer) > LEADS_MAX:
            self._newer.popitem(last=False)

    def follow(self, asked: Asked) -> Asked:
        """The newest rows that are known here, in place of those of a request."""
        if not self._newer or not 0 < len(asked.sequences) <= LEADS_ROWS_MAX:
            return asked
        sequences, deliver_at_ms, accepted_at_ms = zip(*map(self._newest, _leads(asked)), strict=True)
        return Asked(
            np.array(sequences, np.uint64), np.array(deliver_at_ms, np.int64), np.array(accepted_at_ms, np.int64)
        )

    def _newest(self, lead: Lead) -> Lead:
        passed: list[Lead] = []
        while (newer := self._newer.get(lead)) is not None:
            passed.append(lead)
            lead = newer
        # The next time each of them leads there at once.
        for each in passed:
            self._newer[each] = lead
            self._newer.move_to_end(each)
        return lead


def _leads(asked: Asked) -> zip[Lead]:
    return zip(asked.sequences.tolist(), asked.deliver_at_ms.tolist(), asked.accepted_at_ms.tolist(), strict=True)
