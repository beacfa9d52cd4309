"""Message requests: they end rows or ask about them; from their arrival to their answers (rules P1, C1, C2).

     check ──▶ room ──▶ look ──────────────────────▶ decide ──────────────▶ commit ──▶ answer
                        ledger, and the files for    when the group is      fsync
                        what is in no memory         closed; of GET at once
                          ▲                              │
                          └── other rows stand for the ──┤
                              messages by now            └── move: copy the rows first, beside the loop

Between the look and the decision rows may have gone elsewhere, or other rows may have taken their place: then the
request goes back to the look. Rows that are to be moved are copied a piece of the request at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from delayd.batch.columns import Int64s
from delayd.delay.ending.copies import Copied, copy_rows
from delayd.delay.ending.deciding import Moved, OpenCommit
from delayd.delay.ending.requested import HOUR_ROWS, PIECE_ROWS, Leads, Leaver, Requested, Whole, Wish
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.intake import NOTHING_DECIDED, Decided, Intake, OpenGroup
from delayd.delay.keys.taken_names import Named
from delayd.delay.ledger.ledger import Ledger, States
from delayd.delay.ledger.wanted import wanted_of
from delayd.delay.producers import Producers
from delayd.delay.reply import Reply
from delayd.errors import BadRequest, DelaydError, SlowDown, Stopping
from delayd.log.hour import NO_ENDED, EndedRows
from delayd.machine.executor import Done, Executor, Priority
from delayd.wire.asked import ANSWER, AnswerRows, Asked, MessageState, MoveTry, Tries

COMMIT_ROWS_MAX = 2 * PIECE_ROWS  # A turn of the loop decides about so many rows of all requests, and
REQUEST_ROWS = 256  # each request takes as long as so many.
ROWS_UNDER_WAY_MAX = 1 << 20  # Rows of requests that are not answered: some 100 bytes each.
ROWS_OWED_MAX = 1 << 21  # Rows whose outcomes are not written: while a disk is slow, callers wait.
LOOKS_MAX = 4  # So often does a request look anew for rows that went to another place meanwhile.
TRIES_MAX = 8  # So often are rows copied anew because one of them could not be claimed any more.
COPIES_MAX = 8  # Copies of rows under way: 5 MB each.

Answer = Callable[[AnswerRows | DelaydError], None]


class MessageRequests:
    """All requests about rows; belongs to the loop."""

    def __init__(
        self, worker: Executor, ledger: Ledger, intake: Intake, sources: Sources, producers: Producers
    ) -> None:
        self._producers = producers  # They remember tries, too.
        self._ledger = ledger
        self._intake = intake
        self._sources = sources
        self._worker = worker
        self._queue: deque[Requested] = deque()
        self._overdue: deque[Requested] = deque()  # Requests that come before the keyed sends of the next commit.
        self._rows = 0  # Of all requests that are not answered.
        self._commit: OpenCommit | None = None
        self._durable: list[OpenCommit] = []
        self._copies = 0  # Under way, or waiting for their commit.
        self._to_copy: deque[Requested] = deque()
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

    # A request comes.

    def ask(self, wish: Wish, asked: Asked, answer: Answer, subject: bytes = b"") -> None:
        """Take a request; ``answer`` is called with one answer a row, in its order, or with an error: BadArgument when
        a message has another ``subject`` than this, and then nothing is done.

        Raises:
            SlowDown, Stopping, BadRequest: nothing of it is done.
        """
        self._take(Whole(wish, asked, Reply(answer), subject=subject))

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
        self._check(wanted_at_ms, moved_by)
        self._take(Whole(Wish.MOVE, asked, Reply(answer), wanted_at_ms, subject=subject, tries=moved_by))

    def leave(self, asked: Asked, leaver: Leaver, answer: Answer) -> None:
        """Take a request whose rows go to another delay server, as many as may; those have the state DRAINED in the
        answer.

        Raises:
            SlowDown, Stopping, BadRequest: nothing of it is done.
        """
        self._take(Whole(Wish.MOVE, asked, Reply(answer), asked.deliver_at_ms, leaver=leaver))

    def begin(
        self, reply: Reply[AnswerRows], rows: int, wanted_at_ms: Int64s | None, tries: Tries | None = None
    ) -> None:
        """Take room for a request by key, whose names are looked up first; raises as `move` and `ask`."""
        self._check(wanted_at_ms, tries)
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
        self._begin(Whole(wish, asked, reply, wanted_at_ms, named, tries=None if wish is Wish.GET else tries))

    def _check(self, wanted_at_ms: Int64s | None, tries: Tries | MoveTry | None) -> None:
        if tries is not None:
            self._producers.check_room()
        if wanted_at_ms is not None:
            self._intake.check_move(wanted_at_ms)

    def _take(self, whole: Whole) -> None:
        with whole.reply.begins():
            wanted_of(whole.asked)  # A request that can't be read takes no room.
            self._take_room(whole.reply, len(whole.asked.sequences))
            self._begin(whole)

    def _take_room(self, reply: Reply[AnswerRows], rows: int) -> None:
        if self._intake.closed:
            raise _stopping()
        if self._rows + rows > ROWS_UNDER_WAY_MAX or len(self._ledger.owed) > ROWS_OWED_MAX:
            raise SlowDown("this server has as many requests about messages as it can answer now; ask again later")
        self._rows += rows
        reply.holds(partial(self._give_room_back, rows))

    def _give_room_back(self, rows: int) -> None:
        self._rows -= rows

    # It is done, in one piece or in several.

    def _begin(self, whole: Whole) -> None:
        pieces = whole.cut()
        if len(pieces) == 1:
            self._begin_one(whole)
            return
        whole.left.extend(pieces)
        self._begin_next_soon(whole)

    def _begin_next_soon(self, whole: Whole) -> None:
        """Begin the next piece in another turn of the loop."""
        self._worker.submit(_nothing, partial(self._begin_next, whole), Priority.DUE)

    def _begin_next(self, whole: Whole, done: Done[None]) -> None:
        done.result()
        reply: Reply[AnswerRows] = Reply(partial(self._piece_told, whole))
        with reply.goes_on():
            self._begin_one(whole.piece(whole.left[0], reply))

    def _begin_one(self, piece: Whole) -> None:
        request = Requested(piece, self._ledger.hours.subjects)
        if request.wish is Wish.MOVE:
            request.reply.tells(request.so_far)
        request.pin(self._producers)
        self._look(request)

    def _piece_told(self, whole: Whole, what: AnswerRows | DelaydError) -> None:
        """Take the answer to a piece."""
        if not isinstance(what, DelaydError):
            whole.answers[whole.left.popleft()] = what
            whole.is_begun = True
            if whole.left:
                self._begin_next_soon(whole)
            else:
                whole.reply.end(whole.answers)
        elif whole.is_begun and whole.wish is not Wish.GET:
            # Rows of earlier pieces have ended, so the request can't be refused.
            whole.reply.end(whole.ask_again())
        else:
            whole.reply.end(what)

    # Its rows are looked for.

    def _look(self, request: Requested) -> None:
        """Look for the rows of a request, in memory and then in files; then it is ready."""
        request.rows(self._leads, self._producers)
        self._ledger.when_sorted(self._worker, partial(self._look_sorted, request))

    def _look_sorted(self, request: Requested) -> None:
        with request.reply.goes_on():
            request.look = self._ledger.look(request.wanted)
            self._ledger.read(request.look, partial(self._ready, request))

    def _ready(self, request: Requested, error: DelaydError | None) -> None:
        with request.reply.goes_on():
            if error is not None:
                raise error
            request.check_subject()
            states = self._ledger.states(request.look)
            if request.is_about_others(states.answers, self._leads, self._producers):
                self._look(request)
            elif request.wish is Wish.GET:
                if not self._looks_anew(request, states):
                    self._answer(request, states.answers)
            elif request.wish is Wish.MOVE:
                self._to_copy.append(request)
                self._copy_next()
            else:
                self._wait_for_commit(request)

    def _looks_anew(self, request: Requested, states: States) -> bool:
        """Look anew for rows that have gone from memory to a file, or the other way, since they were looked for."""
        if request.looks == LOOKS_MAX or not states.moved.any():
            return False
        request.looks += 1
        self._look(request)
        return True

    def _wait_for_commit(self, request: Requested) -> None:
        """Have a request decided with the next group commit."""
        if self._intake.closed:
            # The last checkpoint may be under way, and nothing is logged behind it.
            raise _stopping()
        (self._overdue if request.is_overdue else self._queue).append(request)
        self._intake.decide()

    # Rows that are to be moved are copied.

    def _copy_next(self) -> None:
        while self._to_copy and self._copies < COPIES_MAX:
            request = self._to_copy.popleft()
            with request.reply.goes_on():
                self._copy(request)

    def _copy(self, request: Requested) -> None:
        locations = np.zeros(len(request.wanted), np.uint64)
        moves = request.to_move(self._ledger.states(request.look, locations).claimable, locations)
        if not len(moves.rows):
            self._wait_for_commit(request)
            return
        self._copies += 1
        request.has_copy = True
        request.reply.holds(partial(self._give_up_copy, request))
        work = partial(copy_rows, self._sources.reader(), self._worker, moves)
        self._worker.submit(work, partial(self._copied, request), Priority.DUE)

    def _copied(self, request: Requested, done: Done[Copied]) -> None:
        with request.reply.goes_on():
            copied = done.result()
            request.stays(copied.stay)
            if copied.batch is not None:
                request.copied = copied
            else:
                self._give_up_copy(request)
            self._wait_for_commit(request)

    def _give_up_copy(self, request: Requested) -> None:
        if request.has_copy:
            request.copied, request.has_copy = None, False
            self._copies -= 1
            self._copy_next()

    # It is decided with a group commit.

    def open(self, group: OpenGroup) -> None:
        """Begin the decisions of a commit, with the cancels by key that have waited long enough: they are about the row
        that has the key before the keyed sends of the commit are decided about.

        Each commit may have a row that takes a busy key, and such a cancel would wait for ever.
        """
        assert self._commit is None, "one commit is under way at a time"
        self._commit = OpenCommit(group, self._ledger)
        # One that goes on with a row which took its key meanwhile comes back into this queue, and is decided, too.
        self._overdue = self._decide_all(self._commit, self._overdue)

    def close(self, group: OpenGroup, by_sends: EndedRows = NO_ENDED) -> Decided:
        """Decide what is left; ``by_sends``: the rows that keyed sends of the commit have ended."""
        if self._commit is None:
            self.open(group)
        commit = self._commit
        assert commit is not None, "it is open"
        waiting, self._queue = self._queue, deque()
        self._queue = self._decide_all(commit, waiting) + self._queue
        decided = commit.close(by_sends)
        if decided is None:
            self._commit = None
            for request, states in commit.answers:
                self._answer(request, states)
            return NOTHING_DECIDED
        return decided

    def _decide_all(self, commit: OpenCommit, waiting: deque[Requested]) -> deque[Requested]:
        """Decide requests in the order of their arrival; those that are left are returned. A request that has to wait
        for the next commit holds up no other one.
        """
        later: deque[Requested] = deque()
        rows = 0
        while waiting and rows < COMMIT_ROWS_MAX:
            request = waiting.popleft()
            rows += REQUEST_ROWS + len(request.wanted) + HOUR_ROWS * len(np.unique(request.wanted.hours))
            if commit.waits(request):
                (self._overdue if request.is_overdue else later).append(request)
                continue
            with request.reply.goes_on():
                self._decide(request, commit)
        return later + waiting

    def _decide(self, request: Requested, commit: OpenCommit) -> None:
        if request.meets_closing:
            # It wants to move a row whose key another one takes now, and has waited long enough: it is to ask again.
            commit.answer(request, request.in_flight())
            return
        states = self._ledger.states(request.look)
        if request.is_about_others(states.answers, self._leads, self._producers):
            self._give_up_copy(request)
            self._look(request)
            return
        request.check_subject()
        # Rows that an earlier request of this commit has claimed are answered when they are durable.
        again = self._ledger.are_ending(request.wanted)
        states.answers["state"][again] = MessageState.CANCELLED
        states.answers["decided_at_ms"][again] = commit.decided_at_ms
        if self._looks_anew(request, states):
            self._give_up_copy(request)
        elif request.wish is Wish.CANCEL:
            commit.cancel(request, states)
        elif not commit.move(request, states):
            self._copy_again(request, states, commit)

    def _copy_again(self, request: Requested, states: States, commit: OpenCommit) -> None:
        """A row that could be claimed when it was copied may have been handed over, loaded or filed: it is looked for
        anew. Without a copy there was none to be moved; there may be one now.
        """
        had_copy = request.copied is not None
        self._give_up_copy(request)
        moves = request.to_move(states.claimable, np.zeros(len(request.wanted), np.uint64))
        if request.copies == TRIES_MAX or (not had_copy and not len(moves.rows)):
            commit.answer(request, states.answers)
            return
        request.copies += 1
        self._look(request)

    def committed(self) -> None:
        """The decisions are durable: they take effect before anything else of the commit does."""
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.committed(self._producers)
            self._durable.append(commit)

    def refused(self, error: DelaydError) -> None:
        """The decisions could not be stored: nothing has changed, and everybody is told so."""
        commit, self._commit = self._commit, None
        waiting = [*self._queue, *self._overdue]
        self._queue, self._overdue = deque(), deque()
        decided: list[Requested] = []
        if commit is not None:
            self._ledger.undo()
            decided = commit.requests()
        for request in (*decided, *waiting):
            request.reply.end(error)

    # It is answered.

    def answer(self) -> None:
        """Answer the requests whose decisions are durable."""
        durable, self._durable = self._durable, []
        for commit in durable:
            for request, states in commit.answers:
                self._answer(request, states)
            for moved in commit.moves:
                self._moved(moved, commit.decided_at_ms)

    def _moved(self, moved: Moved, decided_at_ms: int) -> None:
        """Go on with a request of which rows were moved."""
        request = moved.request
        is_done = request.was_moved(moved.base_sequence, decided_at_ms, self._leads)
        self._give_up_copy(request)
        if is_done:
            self._answer(request, np.zeros(len(request.wanted), ANSWER))
        elif self._intake.closed:
            request.reply.end(_stopping())
        else:
            with request.reply.goes_on():
                self._look(request)

    def _answer(self, request: Requested, states: AnswerRows) -> None:
        request.reply.end(request.answers(states))


def _stopping() -> Stopping:
    return Stopping("this server is stopping; ask again when it is back")


def _nothing() -> None:
    """Another turn of the loop goes on after it."""


def _check_agree(asked: Asked, wanted_at_ms: Int64s) -> None:
    """Raise BadRequest unless each row that is named twice is wanted at one instant."""
    known = np.flatnonzero(asked.sequences)
    if not len(known):
        return  # Names that no row has taken.
    wanted_at_ms = wanted_at_ms.take(known)
    wanted, order = wanted_of(Asked._make(column.take(known) for column in asked))
    of_wanted = np.zeros(len(wanted), np.int64)
    of_wanted[order] = wanted_at_ms
    if (wanted_at_ms != of_wanted.take(order)).any():
        raise BadRequest("it wants one message at different instants", field="wanted_at_ms")
