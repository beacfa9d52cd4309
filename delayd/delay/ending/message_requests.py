"""Message requests: they end rows or ask about them; from their arrival to their answers (rules P1, C1, C2).

Invariant: a row is claimed before anything is logged, and CANCELLED is answered when the log is durable.

     request ──▶ look in memory ──▶ look up in files ──▶ queue ──▶ decide when the group is closed ──▶ fsync ──▶ answer
                 (loop)             (worker thread)      (loop)    (loop)

The files say what became of rows that are nowhere in memory; other rows need no look-up. Between the look-up and the
decision a row may have been handed over, or an hour loaded. Then the request is told to ask again.

A row that was moved leads to the row that took its place, which is looked for in the same way, and so on to the newest.
Rows that are to be moved are copied beside the loop before they are decided, a piece of the request at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import ROWS_MAX, Batch, ColumnId, Int64s, ProducerPart
from delayd.delay.ending.leads import Leads
from delayd.delay.ending.moving import COPY_ROWS, Copied, Leave, ToMove, copy_rows
from delayd.delay.ending.taken_names import Named
from delayd.delay.filing.sources import Sources
from delayd.delay.intake import NOTHING_DECIDED, Decided, Intake, OpenGroup
from delayd.delay.ledger.ledger import NOT_CLAIMABLE, Ledger, Look, RowPlaces
from delayd.delay.ledger.wanted import OfSubject, Wanted, wanted_newest, wanted_of
from delayd.delay.producers import Producers
from delayd.delay.reply import Reply
from delayd.delay.rows import filing_hours
from delayd.errors import BadArgument, BadRequest, DelaydError, SlowDown, Stopping
from delayd.executor import Done, Executor, Priority
from delayd.hours import HOUR_MS
from delayd.log.control import Ended, Known, Tried, encode_known
from delayd.log.dispatch import Reason
from delayd.log.ended import ENDED, NO_ENDED, NO_TRIED, TRIED, EndedRows, TriedRows, decode_ended, tried_rows
from delayd.sequences import Indices, Pile
from delayd.wire.ending import (
    ANSWER,
    AnswerRows,
    Asked,
    CancelAnswer,
    MessageState,
    MoveTry,
    RescheduleAnswer,
    Tries,
)
from delayd.wire.slots import SlotSet

PIECE_ROWS = 16_384  # One turn of the loop works on so many rows of a request, in some 10 ms. The rest comes later.
COMMIT_ROWS_MAX = 2 * PIECE_ROWS  # It decides about so many rows of all requests.
HOUR_ROWS = 64  # Each hour in which rows are filed takes as long as so many rows, and
REQUEST_ROWS = 256  # each request as so many.
ROWS_UNDER_WAY_MAX = 1 << 20  # Rows of requests that are not answered: some 100 bytes each.
ROWS_OWED_MAX = 1 << 21  # Rows whose outcomes are not written: while a disk is slow, callers wait.

_ANSWERS = np.full(max(MessageState) + 1, CancelAnswer.ALREADY_DISPATCHED, np.uint8)
_ANSWERS[[MessageState.UNKNOWN, MessageState.REJECTED, MessageState.KEPT]] = CancelAnswer.UNKNOWN
_ANSWERS[[MessageState.PENDING, MessageState.IN_FLIGHT, MessageState.MOVED]] = CancelAnswer.IN_FLIGHT
_ANSWERS[MessageState.DRAINED] = CancelAnswer.IN_FLIGHT
_ANSWERS[[MessageState.CANCELLED, MessageState.REPLACED]] = CancelAnswer.CANCELLED

_MOVE_ANSWERS = np.full(max(MessageState) + 1, RescheduleAnswer.ALREADY_DISPATCHED, np.uint8)
_MOVE_ANSWERS[[MessageState.UNKNOWN, MessageState.REJECTED, MessageState.KEPT]] = RescheduleAnswer.UNKNOWN
_MOVE_ANSWERS[[MessageState.PENDING, MessageState.IN_FLIGHT, MessageState.MOVED]] = RescheduleAnswer.IN_FLIGHT
_MOVE_ANSWERS[MessageState.DRAINED] = RescheduleAnswer.IN_FLIGHT
_MOVE_ANSWERS[[MessageState.CANCELLED, MessageState.REPLACED]] = RescheduleAnswer.CANCELLED

STEPS_MAX = 100  # Moves that one request follows; then it is told how far it came, and to ask again from there.
WAITS_MAX = 8  # So many commits does a request by key wait for rows that take its keys.
LOOKS_MAX = 4  # So often does a request look anew for rows that went to another place meanwhile.
TRIES_MAX = 8  # So often are rows copied anew because one of them could not be claimed any more.
COPIES_MAX = 8  # Copies of rows under way: 5 MB each.
MOVED_ROWS_MAX = COPY_ROWS  # In one commit, and so are these.
MOVED_BYTES_MAX = 12 << 20

_COLUMN_OF = {"sequences": "sequence", "deliver_at_ms": "deliver_at_ms", "accepted_at_ms": "accepted_at_ms"}

Answer = Callable[[AnswerRows | DelaydError], None]


class Wish(Enum):
    """What a request wants of its rows."""

    CANCEL = "cancel"
    GET = "get"
    MOVE = "move"


@dataclass(slots=True)
class _Request:
    wish: Wish
    asked: Asked  # Its rows; of a moved message the newest row that is known so far.
    reply: Reply[AnswerRows]
    told: NDArray[np.bool_]  # Which rows of the request this server has followed: what stands in `asked` is true.
    wanted: Wanted = field(init=False)
    order: Indices = field(init=False)  # For each row of the request, its place in ``wanted``.
    look: Look = field(init=False)
    steps: int = 0  # Moves that were followed.
    looks: int = 0  # Times that rows were looked for anew.
    waits: int = 0  # Commits that had a row which took a name of the request.
    move: _Move | None = None
    named: Named | None = None  # The names of a request by key.
    of_subject: OfSubject | None = None  # What the messages of a request by receipt must have.
    # The numbers of a request by key that wants a change, or the one of a move by receipt.
    tries: Tries | MoveTry | None = None
    # Rows of the request whose tries have ended a row before: the request is about that row, whoever has the key now.
    pinned: NDArray[np.bool_] | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether it has waited long enough for rows that take its keys, and can be decided before them."""
        return self.waits == WAITS_MAX and self.wish is Wish.CANCEL


@dataclass(slots=True)
class _Move:
    """What a request that moves rows knows besides."""

    wanted_at_ms: Int64s  # For each row of the request.
    done: NDArray[np.bool_]  # Rows of the request that were moved, or stay for now.
    stay: NDArray[np.bool_]  # The latter: they can't be read, or are not among those that leave.
    copied: Copied | None = None
    has_copy: bool = False  # Whether a copy is being made or waits for its commit.
    tries: int = 0
    leave: Leaver | None = None


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
class _Whole:
    """A request that is done in pieces, one after the other."""

    wish: Wish
    asked: Asked
    reply: Reply[AnswerRows]
    wanted_at_ms: Int64s | None
    named: Named | None
    leave: Leaver | None = None
    subject: bytes = b""
    tries: Tries | MoveTry | None = None
    left: deque[Indices] = field(default_factory=deque)  # The rows of the pieces that are not answered.
    is_begun: bool = False  # Whether one was answered.
    answers: AnswerRows = field(init=False)

    def __post_init__(self) -> None:
        self.answers = np.zeros(len(self.asked.sequences), ANSWER)


class _Commit:
    """The decisions of one group commit, and the answers that wait for it."""

    def __init__(self, group: OpenGroup) -> None:
        self.decided_at_ms = group.appended_at_ms
        self.next_sequence = group.next_sequence  # Of the next row that is moved.
        self.rows: EndedRows = NO_ENDED  # All of them by rising sequence, once the commit is closed.
        self.parts: list[EndedRows] = []
        self.moved_now = Pile()
        self.answers: list[tuple[_Request, AnswerRows]] = []
        self.moved: list[Batch] = []
        self.moves: list[_Moved] = []
        self.tried: list[TriedRows] = []
        self._moved_rows, self._moved_bytes = 0, 0

    def has_room(self, batch: Batch) -> bool:
        """Whether a batch of moved rows fits; the first one does."""
        rows, size_bytes = self._moved_rows + batch.count, self._moved_bytes + batch.total_bytes
        return not self.moved or (rows <= MOVED_ROWS_MAX and size_bytes <= MOVED_BYTES_MAX)

    def add(self, ended: EndedRows) -> None:
        """Take rows that end with it; they rise in sequence."""
        self.parts.append(ended)

    def add_moved(self, batch: Batch) -> None:
        """Take the batch of rows that are moved by it; rows that leave this server have none."""
        self.moved.append(batch)
        self.next_sequence += batch.count
        self._moved_rows += batch.count
        self._moved_bytes += batch.total_bytes


class _Moved(NamedTuple):
    """Rows of one request that are moved by a commit."""

    request: _Request
    rows: Indices  # Their places among the wanted rows; in the order of the batch.
    base_sequence: int


class MessageRequests:
    """All requests about rows by receipt; belongs to the loop."""

    def __init__(
        self, worker: Executor, ledger: Ledger, intake: Intake, sources: Sources, producers: Producers
    ) -> None:
        self._producers = producers  # They remember tries, too.
        self._ledger = ledger
        self._intake = intake
        self._sources = sources
        self._worker = worker
        self._queue: deque[_Request] = deque()
        self._overdue: deque[_Request] = deque()  # Requests that come before the keyed sends of the next commit.
        self._rows = 0  # Of all requests that are not answered.
        self._commit: _Commit | None = None
        self._durable: list[_Commit] = []
        self._copies = 0  # Under way, or waiting for their commit.
        self._to_copy: deque[_Request] = deque()
        self._leads = Leads()

    @property
    def waiting(self) -> bool:
        """Whether a group commit has something to decide."""
        return bool(self._queue or self._overdue)

    @property
    def rows_under_way(self) -> int:
        """The rows of all requests that are not answered."""
        return self._rows

    @property
    def copies_under_way(self) -> int:
        """Copies of rows that are being made, or wait for their commit."""
        return self._copies

    def ask(self, wish: Wish, asked: Asked, answer: Answer, subject: bytes = b"") -> None:
        """Take a request; ``answer`` is called with one answer a row, in its order, or with an error: BadArgument when
        a message has another ``subject`` than this, and then nothing is done.

        Raises:
            SlowDown, Stopping, BadRequest: nothing of it is done.
        """
        self._take(_Whole(wish, asked, Reply(answer), None, None, subject=subject))

    def move(
        self,
        asked: Asked,
        wanted_at_ms: Int64s,
        answer: Answer,
        subject: bytes = b"",
        moved_by: MoveTry | None = None,
    ) -> None:
        """Take a request that moves rows to other instants; each row is answered by itself. ``subject`` as in `ask`.
        Rows that an earlier try with the number of ``moved_by`` has moved are answered as that one was.

        Raises:
            PastHorizon, BadInstant, HourFull, ClockInDoubt, DiskReserve: an instant is refused, as that of a send is.
            SlowDown, Stopping, BadRequest: nothing of it is done.
        """
        _check_agree(asked, wanted_at_ms)
        if moved_by is not None:
            self._producers.check_room()
        self._intake.check_move(wanted_at_ms)
        self._take(_Whole(Wish.MOVE, asked, Reply(answer), wanted_at_ms, None, subject=subject, tries=moved_by))

    def leave(self, asked: Asked, leaver: Leaver, answer: Answer) -> None:
        """Take a request whose rows go to another delay server, as many as may; those have the state DRAINED in the
        answer.

        Raises:
            SlowDown, Stopping, BadRequest: nothing of it is done.
        """
        self._take(_Whole(Wish.MOVE, asked, Reply(answer), asked.deliver_at_ms, None, leaver))

    def begin(
        self, reply: Reply[AnswerRows], rows: int, wanted_at_ms: Int64s | None, tries: Tries | None = None
    ) -> None:
        """Take room for a request by key, whose names are looked up first; raises as `move` and `ask`."""
        if tries is not None:
            self._producers.check_room()
        if wanted_at_ms is not None:
            self._intake.check_move(wanted_at_ms)
        self._take_room(reply, rows)

    def ask_named(
        self,
        wish: Wish,
        named: Named,
        wanted_at_ms: Int64s | None,
        reply: Reply[AnswerRows],
        tries: Tries | None = None,
    ) -> None:
        """Take a request by key that `begin` has taken room for."""
        asked = named.rows()
        if wanted_at_ms is not None:
            _check_agree(asked, wanted_at_ms)
        self._begin(_Whole(wish, asked, reply, wanted_at_ms, named, tries=None if wish is Wish.GET else tries))

    def _take(self, whole: _Whole) -> None:
        with whole.reply.begins():
            wanted_of(whole.asked)  # A request that can't be read takes no room.
            self._take_room(whole.reply, len(whole.asked.sequences))
            self._begin(whole)

    def _begin(self, whole: _Whole) -> None:
        pieces = _cut(whole.asked)
        if len(pieces) == 1:
            request = _new_piece(whole, whole.asked, whole.reply, whole.wanted_at_ms, whole.named)
            self._prepare(request, whole.subject, whole.tries)
            self._look(request)
            return
        whole.left.extend(pieces)
        self._go_on_soon(whole)

    def _prepare(self, request: _Request, subject: bytes, tries: Tries | MoveTry | None) -> None:
        if request.move is not None:
            request.reply.tells(partial(self._done_so_far, request))
        request.of_subject = self._of_subject(subject)
        request.tries = tries
        if isinstance(tries, Tries):
            request.pinned = np.zeros(len(request.told), np.bool_)
            self._pin(request)

    def _go_on_soon(self, whole: _Whole) -> None:
        """Begin the next piece in another turn of the loop."""
        self._worker.submit(_nothing, partial(self._begin_piece, whole), Priority.DUE)

    def _begin_piece(self, whole: _Whole, done: Done[None]) -> None:
        done.result()
        rows = whole.left[0]
        wanted_at_ms = None if whole.wanted_at_ms is None else whole.wanted_at_ms.take(rows)
        named = None if whole.named is None else whole.named.take(rows)
        asked = Asked._make(column.take(rows) for column in whole.asked)
        reply: Reply[AnswerRows] = Reply(partial(self._piece_told, whole))
        with reply.goes_on():
            request = _new_piece(whole, asked, reply, wanted_at_ms, named)
            self._prepare(request, whole.subject, None if whole.tries is None else whole.tries.take(rows))
            self._look(request)

    def _piece_told(self, whole: _Whole, what: AnswerRows | DelaydError) -> None:
        """Take the answer to a piece."""
        if not isinstance(what, DelaydError):
            whole.answers[whole.left.popleft()] = what
            whole.is_begun = True
            if whole.left:
                self._go_on_soon(whole)
            else:
                whole.reply.end(whole.answers)
        elif whole.is_begun and whole.wish is not Wish.GET:
            # Rows of earlier pieces have ended, so the request can't be refused: the others are to be asked for again.
            for rows in whole.left:
                whole.answers[rows] = _to_ask_again(whole.asked, rows)
            whole.reply.end(whole.answers)
        else:
            whole.reply.end(what)

    def _take_room(self, reply: Reply[AnswerRows], rows: int) -> None:
        if self._intake.closed:
            raise _stopping()
        if self._rows + rows > ROWS_UNDER_WAY_MAX or len(self._ledger.owed) > ROWS_OWED_MAX:
            raise SlowDown("this server has as many requests about messages as it can answer now; ask again later")
        self._rows += rows
        reply.holds(partial(self._give_room_back, rows))

    def _give_room_back(self, rows: int) -> None:
        self._rows -= rows

    def _look(self, request: _Request) -> None:
        """Look for the rows of a request, in memory and then in files; then it is ready."""
        # A move that is asked for again looks at each row on the way: where a receipt leads now says nothing of it.
        if request.steps == 0 and not _leaves(request) and not self._moves_since(request):
            followed = self._leads.follow(request.asked)
            newer = followed.sequences != request.asked.sequences
            if request.move is not None:
                newer &= ~request.move.done
            request.told |= newer
            request.asked = Asked._make(np.where(newer, *pair) for pair in zip(followed, request.asked, strict=True))
        request.wanted, request.order = wanted_newest(request.asked, request.told)
        request.wanted.of_subject = request.of_subject
        self._ledger.when_sorted(self._worker, partial(self._look_sorted, request))

    def _look_sorted(self, request: _Request) -> None:
        with request.reply.goes_on():
            request.look = self._ledger.look(request.wanted)
            self._ledger.read(request.look, partial(self._read, request))

    def _read(self, request: _Request, error: DelaydError | None) -> None:
        with request.reply.goes_on():
            if error is not None:
                raise error
            self._ready(request)

    def _ready(self, request: _Request) -> None:
        self._check_subject(request)
        if self._renew(request):
            return
        states = self._ledger.states(request.look)
        if self._follow(request, states.answers):
            return
        if request.wish is Wish.GET:
            if not self._lost(request, states.moved):
                self._answer(request, states.answers)
            return
        if request.move is not None and request.move.copied is None:
            self._to_copy.append(request)
            self._copy_next()
            return
        self._decide(request)

    def _decide(self, request: _Request) -> None:
        """Have a request decided with the next group commit."""
        if self._intake.closed:
            # The last checkpoint may be under way, and nothing is logged behind it.
            raise _stopping()
        (self._overdue if request.is_overdue else self._queue).append(request)
        self._intake.decide()

    def _of_subject(self, subject: bytes) -> OfSubject | None:
        return OfSubject(subject, self._ledger.hours.subjects) if subject else None

    def _check_subject(self, request: _Request) -> None:
        """Raise BadArgument when a request names a message of another subject: no row of it was claimed."""
        of_subject = request.of_subject
        if of_subject is not None and of_subject.strangers:
            subject = of_subject.name.decode()
            raise BadArgument(
                f"a receipt is that of a message of another subject than {subject}; nothing was done. Name the subject"
                " to which the message was sent",
                subject=subject,
            )

    def _lost(self, request: _Request, moved: NDArray[np.bool_]) -> bool:
        """Look anew for rows that have gone from memory to a file, or the other way, since they were looked for."""
        if request.looks == LOOKS_MAX or not moved.any():
            return False
        request.looks += 1
        self._look(request)
        return True

    def _renew(self, request: _Request) -> bool:
        """Go on with the rows that have taken the names of a request since, if there are any."""
        named = request.named
        if self._pin(request):
            self._look(request)
            return True
        if named is None or request.steps == STEPS_MAX or not named.newer():
            return False
        asked, newest = request.asked, named.rows()
        newer = newest.sequences > asked.sequences
        if request.pinned is not None:
            newer &= ~request.pinned
        if request.move is not None:
            newer &= ~request.move.done
        if not newer.any():
            return False
        request.steps += 1
        request.told |= newer
        request.asked = Asked._make(np.where(newer, *columns) for columns in zip(newest, asked, strict=True))
        self._look(request)
        return True

    def _pin(self, request: _Request) -> bool:
        """Take up the rows that earlier tries of a request have ended; whether there are any that are new to it.

        Such a try is done: it is answered about the row that it ended, and a moved message by the row that took its
        place then.
        """
        tries, pinned = request.tries, request.pinned
        if not isinstance(tries, Tries) or pinned is None or pinned.all() or not self._producers.knows(tries.asker):
            return False
        known = [self._producers.row_of_try(tries.asker, number) for number in tries.numbers.tolist()]
        new = np.array([bool(row) for row in known], np.bool_) & ~pinned
        if not new.any():
            return False
        pinned |= new
        request.told |= new
        rows = np.zeros(len(known), ENDED)
        rows[new] = np.frombuffer(
            b"".join(row for row, is_new in zip(known, new.tolist(), strict=True) if is_new), ENDED
        )
        # An instant of the filing hour serves as that of the acceptance.
        begins = rows["hour"].astype(np.int64) * HOUR_MS
        columns = (rows["sequence"], rows["deliver_at_ms"], np.where(rows["deliver_at_ms"] < begins, begins, 0))
        if request.move is not None:
            request.move.done |= new
            columns = (rows["other"], rows["other_at_ms"], rows["decided_at_ms"])
        request.asked = Asked._make(np.where(new, *pair) for pair in zip(columns, request.asked, strict=True))
        return True

    def _moves_since(self, request: _Request) -> int:
        """The first row that a move by receipt has made, in this try or an earlier one; 0 when it has made none."""
        tries = request.tries
        if not isinstance(tries, MoveTry):
            return 0
        row = self._producers.row_of_try(tries.asker, tries.number)
        return int(decode_ended(row)["other"][0]) if row else 0

    def _follow(self, request: _Request, states: AnswerRows) -> bool:
        """Go on with the rows that took the place of moved ones, if there are any and it was not done too often.

        A move by receipt goes no further than to a row that one of its tries has made, and is done there. Say row 5 is
        to be due at ten, try 1 moved it to row 8, and somebody else moved that to row 9, due at noon. Try 2 knows that
        try 1 made its first row as 8. It meets 8, which is due at ten and was made since then: it is answered with 8,
        and 9 stays. Should somebody else have made 8, the message was due at ten all the same while the move was being
        asked for, so there was nothing left to do.
        """
        if request.steps == STEPS_MAX or _leaves(request):
            return False
        told = states.take(request.order)
        leads, rows_of, due_at_ms = told["state"] == MessageState.MOVED, told["other"], told["other_at_ms"]
        if request.move is not None:
            leads &= ~request.move.done
        if not leads.any():
            return False
        since = self._moves_since(request)
        if request.move is not None and since:
            request.move.done |= leads & (rows_of >= np.uint64(since)) & (due_at_ms == request.move.wanted_at_ms)
        request.steps += 1
        asked = request.asked
        request.asked = Asked(
            np.where(leads, rows_of, asked.sequences),
            np.where(leads, due_at_ms, asked.deliver_at_ms),
            np.where(leads, told["decided_at_ms"], asked.accepted_at_ms),
        )
        request.told |= leads
        self._leads.note(asked, request.asked, leads)
        self._look(request)
        return True

    # Copies of rows that are to be moved.

    def _copy_next(self) -> None:
        while self._to_copy and self._copies < COPIES_MAX:
            request = self._to_copy.popleft()
            with request.reply.goes_on():
                self._copy(request)

    def _copy(self, request: _Request) -> None:
        moves = self._to_move(request)
        if not len(moves.rows):
            self._decide(request)
            return
        assert request.move is not None, "it moves rows"
        self._copies += 1
        request.move.has_copy = True
        request.reply.holds(partial(self._give_up_copy, request))
        work = partial(copy_rows, self._sources.reader(), self._worker, moves)
        self._worker.submit(work, partial(self._copied, request), Priority.DUE)

    def _to_move(self, request: _Request) -> ToMove:
        """The rows that can be claimed now and are due at another instant than they should be."""
        move, wanted = request.move, request.wanted
        assert move is not None, "it moves rows"
        locations = np.zeros(len(wanted), np.uint64)
        claimable = self._ledger.states(request.look, locations).claimable
        # Several receipts may stand for one message: their wishes are done one after the other.
        left = ~move.done
        wanted_at_ms = _of_wanted(move.wanted_at_ms.compress(left), len(wanted), request.order.compress(left))
        done = np.ones(len(wanted), np.bool_)
        done[request.order.compress(left)] = False
        chosen = (claimable != NOT_CLAIMABLE) & ~done
        if move.leave is None:
            chosen &= wanted_at_ms != wanted.deliver_at_ms
        rows = np.flatnonzero(chosen)
        rows = rows.take(np.argsort(wanted.hours.take(rows), kind="stable"))
        return ToMove(
            rows,
            wanted.hours.take(rows),
            wanted.sequences.take(rows),
            locations.take(rows),
            wanted_at_ms.take(rows),
            None if move.leave is None else move.leave.of_copy(),
        )

    def _copied(self, request: _Request, done: Done[Copied]) -> None:
        with request.reply.goes_on():
            move, copied = request.move, done.result()
            assert move is not None, "it moves rows"
            stay = np.isin(request.order, copied.stay)
            move.done |= stay
            move.stay |= stay
            if copied.batch is not None:
                move.copied = copied
            else:
                self._give_up_copy(request)
            self._decide(request)

    def _give_up_copy(self, request: _Request) -> None:
        if request.move is not None and request.move.has_copy:
            request.move.copied, request.move.has_copy = None, False
            self._copies -= 1
            self._copy_next()

    # The group commit.

    def open(self, group: OpenGroup) -> None:
        """Begin the decisions of a commit, with the cancels by key that have waited long enough: they are about the row
        that has the key before the keyed sends of the commit are decided about.

        Each commit may have a row that takes a busy key, and such a cancel would wait for ever.
        """
        assert self._commit is None, "one commit is under way at a time"
        self._commit = _Commit(group)
        # One that goes on with a row which took its key meanwhile comes back into this queue, and is decided, too.
        self._overdue = self._decide_all(self._commit, self._overdue)

    def close(self, group: OpenGroup, by_sends: EndedRows = NO_ENDED) -> Decided:
        """Decide what is left; ``by_sends``: the rows that keyed sends of the commit have ended."""
        if self._commit is None:
            self.open(group)
        commit = self._commit
        assert commit is not None, "it is open"
        if len(by_sends):
            commit.add(by_sends)
        waiting, self._queue = self._queue, deque()
        self._queue = self._decide_all(commit, waiting) + self._queue
        if not commit.parts:
            self._commit = None
            for request, states in commit.answers:
                self._answer(request, states)
            return NOTHING_DECIDED
        joined = np.concatenate(commit.parts)
        commit.rows = joined.take(np.argsort(joined["sequence"], kind="stable"))
        cuts = range(0, len(commit.rows), ROWS_MAX)
        records: list[Known] = [Ended(commit.rows[begin : begin + ROWS_MAX].tobytes()) for begin in cuts]
        if commit.tried:
            records.append(Tried(np.concatenate(commit.tried).tobytes()))
        record = encode_known(records)
        return Decided(record, with_rows=bool(commit.moved or len(by_sends)), moved=commit.moved)

    def _decide_all(self, commit: _Commit, waiting: deque[_Request]) -> deque[_Request]:
        """Decide requests in the order of their arrival; those that are left are returned. A request that has to wait
        for the next commit holds up no other one.
        """
        later: deque[_Request] = deque()
        rows = 0
        while waiting and rows < COMMIT_ROWS_MAX:
            request = waiting.popleft()
            rows += REQUEST_ROWS + len(request.wanted) + HOUR_ROWS * len(np.unique(request.wanted.hours))
            if self._waits(request, commit):
                (self._overdue if request.is_overdue else later).append(request)
                continue
            with request.reply.goes_on():
                self._decide_one(request, commit)
        return later + waiting

    def _waits(self, request: _Request, commit: _Commit) -> bool:
        """Whether a request has to wait for the next commit."""
        copied = request.move.copied if request.move is not None and not _leaves(request) else None
        if copied is not None and copied.batch is not None and not commit.has_room(copied.batch):
            return True
        if bool(commit.moved_now.has(request.wanted.sequences).any()):
            # It follows the rows that are moved now, once they are durable.
            return True
        if request.waits < WAITS_MAX and request.named is not None and request.named.closing():
            # The row that takes the name now is the newest one when the commit is durable.
            request.waits += 1
            return True
        return False

    def _decide_one(self, request: _Request, commit: _Commit) -> None:
        if request.named is not None and request.named.closing():
            # It wants to move a row whose key another one takes now, and has waited long enough: it is to ask again.
            commit.answers.append((request, _in_flight(request.wanted)))
            return
        if self._renew(request):
            self._give_up_copy(request)
            return
        states, claimable, _, moved = self._ledger.states(request.look)
        if self._follow(request, states):
            self._give_up_copy(request)
            return
        self._check_subject(request)
        # Rows that an earlier request of this commit has claimed are answered when they are durable.
        again = self._ledger.are_ending(request.wanted)
        states["state"][again] = MessageState.CANCELLED
        states["decided_at_ms"][again] = commit.decided_at_ms
        if self._lost(request, moved):
            self._give_up_copy(request)
        elif request.move is not None:
            self._move(request, claimable, states, commit)
        else:
            chosen = np.flatnonzero(claimable != NOT_CLAIMABLE)
            if len(chosen):
                self._ledger.claim(request.wanted.take(chosen), claimable.take(chosen))
                commit.add(_ended(request.wanted.take(chosen), Reason.CANCELLED, commit.decided_at_ms))
                _note_tries(request, chosen, commit)
                states["state"][chosen] = MessageState.CANCELLED
                states["decided_at_ms"][chosen] = commit.decided_at_ms
            commit.answers.append((request, states))

    def _move(self, request: _Request, claimable: RowPlaces, states: AnswerRows, commit: _Commit) -> None:
        """Claim the rows that were copied, and end them as moved; or copy rows first, or answer that none is to be
        moved.
        """
        move, wanted = request.move, request.wanted
        assert move is not None, "it moves rows"
        copied = move.copied
        if copied is None or bool((claimable.take(copied.rows) == NOT_CLAIMABLE).any()):
            self._give_up_copy(request)
            # A row that could be claimed when it was copied may have been handed over, loaded or filed: it is looked
            # for anew. Without a copy there was none to be moved; there may be one now.
            if move.tries == TRIES_MAX or (copied is None and not len(self._to_move(request).rows)):
                commit.answers.append((request, states))
                return
            move.tries += 1
            self._look(request)
            return
        batch, rows = copied.batch, copied.rows
        assert batch is not None, "rows were copied"
        rising = np.argsort(rows)
        chosen = rows.take(rising)
        self._ledger.claim(wanted.take(chosen), claimable.take(chosen))
        commit.moves.append(_Moved(request, rows, commit.next_sequence))
        leave = move.leave
        reason = Reason.MOVED if leave is None else Reason.DRAINED
        ended = _ended(wanted.take(chosen), reason, commit.decided_at_ms)
        if leave is None:
            ended["other"] = np.uint64(commit.next_sequence) + rising.astype(np.uint64)
            ended["other_at_ms"] = batch.int64s(ColumnId.DELIVER_AT_MS).take(rising)
            commit.add_moved(batch)
        else:
            ended["other"], ended["other_at_ms"], ended["place"] = leave.to, batch.producer.producer_id, rising
        commit.add(ended)
        commit.moved_now.add(ended["sequence"].copy())
        # Of a move by receipt the first row of the batch is noted: the others come after it.
        _note_tries(request, rows[:1] if isinstance(request.tries, MoveTry) else chosen, commit)

    def committed(self) -> None:
        """The decisions are durable: they take effect before anything else of the commit does."""
        commit, self._commit = self._commit, None
        if commit is not None:
            for request, _, _ in commit.moves:
                move = request.move
                if move is not None and move.leave is not None and move.copied is not None:
                    assert move.copied.batch is not None, "rows were copied"
                    move.leave.goes(move.copied.batch)
            self._ledger.settle(commit.rows)
            for each in tried_rows(commit.rows, np.concatenate([NO_TRIED, *commit.tried])):
                self._producers.tried(*each)
            self._durable.append(commit)

    def answer(self) -> None:
        """Answer the requests whose decisions are durable."""
        durable, self._durable = self._durable, []
        for commit in durable:
            for request, states in commit.answers:
                self._answer(request, states)
            for moved in commit.moves:
                self._moved(moved, commit.decided_at_ms)

    def _moved(self, moved: _Moved, decided_at_ms: int) -> None:
        """Go on with a request of which rows were moved: they stand for their messages now."""
        request, rows, base_sequence = moved
        move = request.move
        assert move is not None, "it moves rows"
        assert move.copied is not None and move.copied.batch is not None, "rows were copied"
        number = np.full(len(request.wanted), -1, np.int64)
        number[rows] = np.arange(len(rows))
        of_row = number.take(request.order)
        own = (of_row >= 0) & ~move.done
        if move.leave is None:
            asked = request.asked
            due = move.copied.batch.int64s(ColumnId.DELIVER_AT_MS).take(of_row)
            own &= due == move.wanted_at_ms
            request.asked = Asked(
                np.where(own, np.uint64(base_sequence) + of_row.astype(np.uint64), asked.sequences),
                np.where(own, due, asked.deliver_at_ms),
                np.where(own, np.int64(decided_at_ms), asked.accepted_at_ms),
            )
            self._leads.note(asked, request.asked, own)
        move.done |= own
        self._give_up_copy(request)
        told = move.done if move.leave is not None else move.done & ~move.stay
        if told.all():
            self._answer(request, np.zeros(len(request.wanted), ANSWER))
        elif self._intake.closed:
            request.reply.end(_stopping())
        else:
            with request.reply.goes_on():
                self._look(request)

    def refused(self, error: DelaydError) -> None:
        """The decisions could not be stored: nothing has changed, and everybody is told so."""
        commit, self._commit = self._commit, None
        waiting = [*self._queue, *self._overdue]
        self._queue, self._overdue = deque(), deque()
        if commit is not None:
            self._ledger.undo()
        decided: list[_Request] = []
        if commit is not None:
            decided = [request for request, _ in commit.answers] + [moved.request for moved in commit.moves]
        for request in (*decided, *waiting):
            request.reply.end(error)

    def _done_so_far(self, request: _Request) -> AnswerRows | None:
        """What a request that can't go on is told when some of its rows were moved: the others are to be asked for
        again.
        """
        move = request.move
        assert move is not None, "it moves rows"
        return self._told(request, _in_flight(request.wanted)) if (move.done & ~move.stay).any() else None

    def _answer(self, request: _Request, states: AnswerRows) -> None:
        request.reply.end(self._told(request, states))

    def _told(self, request: _Request, states: AnswerRows) -> AnswerRows:
        told = states.take(request.order)
        asked, move = request.asked, request.move
        told["sequence"], told["accepted_at_ms"] = asked.sequences, asked.accepted_at_ms
        if request.wish is Wish.CANCEL:
            told["answer"] = _ANSWERS.take(told["state"])
        elif move is not None:
            moved = move.done & ~move.stay
            told[moved] = 0
            told["state"][moved] = MessageState.PENDING if move.leave is None else MessageState.DRAINED
            for name, column in asked._asdict().items():
                told[_COLUMN_OF[name]][moved] = column.compress(moved)
            told["answer"] = _MOVE_ANSWERS.take(told["state"])
            moved |= (told["state"] == MessageState.PENDING) & (asked.deliver_at_ms == move.wanted_at_ms)
            told["answer"][moved] = RescheduleAnswer.MOVED
        return told


def _note_tries(request: _Request, chosen: Indices, commit: _Commit) -> None:
    """Note the numbers of the tries that end some wanted rows with a commit."""
    tries = request.tries
    if tries is None:
        return
    if isinstance(tries, Tries):
        of_row = np.flatnonzero(np.isin(request.order, chosen))
        numbers, chosen = tries.numbers.take(of_row), request.order.take(of_row)
    else:
        numbers = np.full(len(chosen), tries.number, np.uint64)
    tried = np.zeros(len(chosen), TRIED)
    tried["asker"], tried["low_water"], tried["number"] = tries.asker, tries.low_water, numbers
    tried["sequence"] = request.wanted.sequences.take(chosen)
    commit.tried.append(tried)


def _new_piece(
    whole: _Whole,
    asked: Asked,
    reply: Reply[AnswerRows],
    wanted_at_ms: Int64s | None = None,
    named: Named | None = None,
) -> _Request:
    marks = np.zeros((3, len(asked.sequences)), np.bool_)
    move = None if wanted_at_ms is None else _Move(wanted_at_ms, marks[1], marks[2], leave=whole.leave)
    return _Request(whole.wish, asked, reply, marks[0], move=move, named=named)


def _cut(asked: Asked) -> list[Indices]:
    """The rows of the pieces of a request: those of one hour stand together, as far as they fit."""
    count = len(asked.sequences)
    if count * HOUR_ROWS <= PIECE_ROWS:
        return [np.arange(count)]
    hours = filing_hours(asked.deliver_at_ms, asked.accepted_at_ms)
    order = np.argsort(hours, kind="stable")
    hours = hours.take(order)
    begins = np.concatenate((np.ones(1, np.bool_), hours[1:] != hours[:-1]))
    number = np.cumsum(1 + HOUR_ROWS * begins) // PIECE_ROWS
    return np.split(order, np.flatnonzero(number[1:] != number[:-1]) + 1)


def _to_ask_again(asked: Asked, rows: Indices) -> AnswerRows:
    told = np.zeros(len(rows), ANSWER)
    for name, column in asked._asdict().items():
        told[_COLUMN_OF[name]] = column.take(rows)
    told["state"], told["answer"] = MessageState.IN_FLIGHT, CancelAnswer.IN_FLIGHT
    return told


def _in_flight(wanted: Wanted) -> AnswerRows:
    states = np.zeros(len(wanted), ANSWER)
    states["state"], states["deliver_at_ms"] = MessageState.IN_FLIGHT, wanted.deliver_at_ms
    return states


def _stopping() -> Stopping:
    return Stopping("this server is stopping; ask again when it is back")


def _nothing() -> None:
    """Another turn of the loop goes on after it."""


def _leaves(request: _Request) -> bool:
    """Whether the rows of a request go to another delay server."""
    return request.move is not None and request.move.leave is not None


def _of_wanted(column: Int64s, count: int, order: Indices) -> Int64s:
    """A column of a request's rows as one of its ``count`` wanted rows."""
    found = np.zeros(count, np.int64)
    found[order] = column
    return found


def _check_agree(asked: Asked, wanted_at_ms: Int64s) -> None:
    """Raise BadRequest unless each row that is named twice is wanted at one instant."""
    known = np.flatnonzero(asked.sequences)
    if not len(known):
        return  # Names that no row has taken.
    wanted_at_ms = wanted_at_ms.take(known)
    wanted, order = wanted_of(Asked._make(column.take(known) for column in asked))
    if (wanted_at_ms != _of_wanted(wanted_at_ms, len(wanted), order).take(order)).any():
        raise BadRequest("it wants one message at different instants", field="wanted_at_ms")


def _ended(wanted: Wanted, reason: Reason, decided_at_ms: int) -> EndedRows:
    rows = np.zeros(len(wanted), ENDED)
    rows["decided_at_ms"] = decided_at_ms
    rows["sequence"], rows["deliver_at_ms"] = wanted.sequences, wanted.deliver_at_ms
    rows["hour"], rows["reason"] = wanted.hours, reason
    return rows
