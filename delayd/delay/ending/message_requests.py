"""Message requests: they end rows or ask about them; from their arrival to their answers (rules P1, C1, C2).

     check ──▶ room ──▶ look ──────────────────────▶ decide ──────────────▶ commit ──▶ answer
                        ledger, and the files for    when the group is      fsync
                        what is in no memory         closed; of GET at once
                          ▲                              │
                          └── other rows stand for the ──┤
                              messages by now            └── move: copy the rows first, beside the loop

Between the look and the decision rows may have gone elsewhere, or other rows may have taken their place: then the
request goes back to the look. Rows that are to be moved are copied a piece of the request at a time.

Invariant: a row is claimed before anything is logged, and whoever asked is answered when the log is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import ROWS_MAX, ColumnId, Int64s
from delayd.batch.sequences import Indices, Pile
from delayd.delay.ending.copies import COPY_ROWS, Copied, Rewrites, copy_rows
from delayd.delay.ending.requested import HOUR_ROWS, PIECE_ROWS, WAITS_MAX, ReceiptLeads, Requested, RequestWish, Whole
from delayd.delay.filing.schedule_log import Sources
from delayd.delay.intake import NOTHING_DECIDED, Decided, Intake, OpenGroup
from delayd.delay.keys.index import Named
from delayd.delay.ledger.ledger import NOT_CLAIMABLE, Ledger, RowPlace, States
from delayd.delay.ledger.wanted import Wanted, wanted_of
from delayd.delay.producers import Producers
from delayd.delay.reply import Reply
from delayd.delay.rows import filing_hours
from delayd.errors import BadRequest, DelaydError, SlowDown, Stopping
from delayd.log.control import Ended, Known, Tried, encode_known
from delayd.log.hour import ENDED, NO_ENDED, NO_TRIED, TRIED, EndedRows, TriedRows, tried_rows
from delayd.machine.executor import Done, Executor, Priority
from delayd.outcome import MessageState, Reason
from delayd.wire.asked import ANSWER, AnswerRows, Asked, MoveTry, Tries

COMMIT_ROWS_MAX = 2 * PIECE_ROWS  # A turn of the loop decides about so many rows of all requests, and
REQUEST_ROWS = 256  # each request takes as long as so many.
ROWS_UNDER_WAY_MAX = 1 << 20  # Rows of CANCEL, GET and RESCHEDULE without answer: some 100 bytes each.
ROWS_OWED_MAX = 1 << 21  # Ended rows whose outcomes are not written: while a disk is slow, callers wait.
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
        self._rows = 0  # All requests that are not answered have so many.
        self._commit: OpenCommit | None = None
        self._durable: list[OpenCommit] = []
        self._copies = 0  # Under way, or waiting for their commit.
        self._to_copy: deque[Requested] = deque()
        self._leads = ReceiptLeads()

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

    def take(self, whole: Whole) -> None:
        """Take a request; its reply is one answer a row, in its order, or an error: BadArgument when a message has
        another subject than the request names, and then nothing is done. Rows that leave have the state DRAINED in the
        answer; rows that an earlier try with the same number has moved are answered as that one was.

        Raises:
            PastHorizon, BadInstant, HourFull, ClockInDoubt, DiskReserve: an instant is refused, as that of a send is.
            SlowDown, Stopping, BadRequest: nothing of it is done.
        """
        if whole.leaver is None:
            if whole.wanted_at_ms is not None:
                _check_agree(whole.asked, whole.wanted_at_ms)
            self._check(whole.wanted_at_ms, whole.tries)
        with whole.reply.begins():
            wanted_of(whole.asked)  # A request that can't be read takes no room.
            self._take_room(whole.reply, len(whole.asked.sequences))
            self._begin(whole)

    def begin(
        self, reply: Reply[AnswerRows], rows: int, wanted_at_ms: Int64s | None, tries: Tries | None = None
    ) -> None:
        """Take room for a request by key, whose names are looked up first; raises as `take`."""
        self._check(wanted_at_ms, tries)
        self._take_room(reply, rows)

    def ask_named(
        self,
        wish: RequestWish,
        named: Named,
        wanted_at_ms: Int64s | None,
        reply: Reply[AnswerRows],
        tries: Tries | None = None,
        rewrites: Rewrites | None = None,
    ) -> None:
        """Take a request by key that `begin` has taken room for."""
        asked = named.rows()
        if wanted_at_ms is not None:
            _check_agree(asked, wanted_at_ms)
        tries = None if wish is RequestWish.GET else tries
        self._begin(Whole(wish, asked, reply, wanted_at_ms, named, rewrites=rewrites, tries=tries))

    def _check(self, wanted_at_ms: Int64s | None, tries: Tries | MoveTry | None) -> None:
        if tries is not None:
            self._producers.check_room()
        if wanted_at_ms is not None:
            self._intake.check_move(wanted_at_ms)

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
        if request.wish is RequestWish.MOVE:
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
        elif whole.is_begun and whole.wish is not RequestWish.GET:
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
            elif request.wish is RequestWish.GET:
                if not self._looks_anew(request, states):
                    self._answer(request, states.answers)
            elif request.wish is RequestWish.MOVE:
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
        reader = self._sources.reader()
        work: Callable[[], Copied] = partial(copy_rows, reader, self._worker, moves)
        if request.rewrites is not None:
            work = request.rewrites.work(reader, self._worker, moves)
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
        elif request.wish is RequestWish.CANCEL:
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

    def _moved(self, moved: MovedByCommit, decided_at_ms: int) -> None:
        """Go on with a request of which rows were moved."""
        request = moved.request
        if request.rewrites is not None and request.copied is not None:
            request.rewrites.is_durable(request.copied)
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


MOVED_ROWS_MAX = COPY_ROWS  # In one commit, and so are these.
MOVED_BYTES_MAX = 12 << 20


class MovedByCommit(NamedTuple):
    """A request of which rows are moved by a commit."""

    request: Requested
    base_sequence: int  # The first of the rows that take their place.


class OpenCommit:
    """The decisions of one group commit, and the answers that wait for it."""

    def __init__(self, group: OpenGroup, ledger: Ledger) -> None:
        self.decided_at_ms = group.appended_at_ms
        self.answers: list[tuple[Requested, AnswerRows]] = []
        self.moves: list[MovedByCommit] = []
        self._ledger = ledger
        self._next_sequence = group.next_sequence  # The next row that is moved gets it.
        self._parts: list[EndedRows] = []  # Each rises in sequence.
        self._rows: EndedRows = NO_ENDED  # All of them, once the commit is closed.
        self._moved_now = Pile()
        self._moved: list[Batch] = []
        self._moved_rows = self._moved_bytes = 0
        self._tried: list[TriedRows] = []

    def waits(self, request: Requested) -> bool:
        """Whether a request has to wait for the next commit."""
        copied = request.copied if request.leaver is None else None
        if copied is not None and copied.batch is not None and not self._has_room(copied.batch):
            return True
        if bool(self._moved_now.has(request.wanted.sequences).any()):
            # It follows the rows that are moved now, once they are durable.
            return True
        if request.waits < WAITS_MAX and request.meets_closing:
            # The row that takes the name now is the newest one when the commit is durable.
            request.waits += 1
            return True
        return False

    def _has_room(self, batch: Batch) -> bool:
        """Whether a batch of moved rows fits; the first one does."""
        rows, size_bytes = self._moved_rows + batch.count, self._moved_bytes + batch.total_bytes
        return not self._moved or (rows <= MOVED_ROWS_MAX and size_bytes <= MOVED_BYTES_MAX)

    def answer(self, request: Requested, states: AnswerRows) -> None:
        """Answer a request when the commit is durable."""
        self.answers.append((request, states))

    def cancel(self, request: Requested, states: States) -> None:
        """End the rows of a request that can be claimed."""
        chosen = np.flatnonzero(states.claimable != NOT_CLAIMABLE)
        if len(chosen):
            self._claim(request, chosen, states, Reason.CANCELLED)
            self._note_tries(request, chosen)
            states.answers["state"][chosen] = MessageState.CANCELLED
            states.answers["decided_at_ms"][chosen] = self.decided_at_ms
        self.answer(request, states.answers)

    def move(self, request: Requested, states: States) -> bool:
        """End the rows of a request that were copied, and take the copies; whether all of them can be claimed."""
        copied, leaver = request.copied, request.leaver
        if copied is None or bool((states.claimable.take(copied.rows) == NOT_CLAIMABLE).any()):
            return False
        batch = copied.batch
        assert batch is not None, "rows were copied"
        rising = np.argsort(copied.rows)
        chosen = copied.rows.take(rising)
        ended = self._claim(request, chosen, states, Reason.MOVED if leaver is None else Reason.DRAINED)
        self.moves.append(MovedByCommit(request, self._next_sequence))
        if leaver is None:
            self._end_new(copied, batch)
            ended["other"] = np.uint64(self._next_sequence) + rising.astype(np.uint64)
            ended["other_at_ms"] = batch.int64s(ColumnId.DELIVER_AT_MS).take(rising)
            self._moved.append(batch)
            self._next_sequence += batch.count
            self._moved_rows += batch.count
            self._moved_bytes += batch.total_bytes
        else:
            ended["other"], ended["other_at_ms"], ended["place"] = leaver.to, batch.producer.producer_id, rising
        self._moved_now.add(ended["sequence"].copy())
        # A move by receipt notes the first row of the batch: the others come after it.
        self._note_tries(request, copied.rows[:1] if isinstance(request.tries, MoveTry) else chosen)
        return True

    def _end_new(self, copied: Copied, batch: Batch) -> None:
        """End the new rows of a batch that are kept for the books alone."""
        if not len(copied.ended):
            return
        due_ms = batch.int64s(ColumnId.DELIVER_AT_MS).take(copied.ended)
        sequences = np.uint64(self._next_sequence) + copied.ended.astype(np.uint64)
        new = Wanted(sequences, due_ms, filing_hours(due_ms, self.decided_at_ms))
        self._ledger.claim(new, np.full(len(new), RowPlace.NOWHERE, np.uint8))
        self._parts.append(_ended(new, Reason.CANCELLED, self.decided_at_ms))

    def _claim(self, request: Requested, chosen: Indices, states: States, reason: Reason) -> EndedRows:
        wanted = request.wanted.take(chosen)
        self._ledger.claim(wanted, states.claimable.take(chosen))
        ended = _ended(wanted, reason, self.decided_at_ms)
        self._parts.append(ended)
        return ended

    def _note_tries(self, request: Requested, chosen: Indices) -> None:
        """Note the numbers of the tries that end some wanted rows."""
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
        self._tried.append(tried)

    def close(self, by_sends: EndedRows) -> Decided | None:
        """What is to be logged, with the rows that keyed sends of the commit have ended; None when nothing has."""
        parts = [*self._parts, by_sends] if len(by_sends) else self._parts
        if not parts:
            return None
        joined = np.concatenate(parts)
        self._rows = joined.take(np.argsort(joined["sequence"], kind="stable"))
        cuts = range(0, len(self._rows), ROWS_MAX)
        records: list[Known] = [Ended(self._rows[begin : begin + ROWS_MAX].tobytes()) for begin in cuts]
        if self._tried:
            records.append(Tried(np.concatenate(self._tried).tobytes()))
        with_rows = bool(self._moved or len(by_sends))
        return Decided(encode_known(records), with_rows=with_rows, moved=self._moved)

    def committed(self, producers: Producers) -> None:
        """The record is durable: the decisions take effect."""
        for request, _ in self.moves:
            if request.leaver is not None and request.copied is not None:
                assert request.copied.batch is not None, "rows were copied"
                request.leaver.goes(request.copied.batch)
        self._ledger.end(self._rows)
        for each in tried_rows(self._rows, np.concatenate([NO_TRIED, *self._tried])):
            producers.tried(*each)

    def requests(self) -> list[Requested]:
        """All requests that it has decided about."""
        return [request for request, _ in self.answers] + [moved.request for moved in self.moves]


def _ended(wanted: Wanted, reason: Reason, decided_at_ms: int) -> EndedRows:
    rows = np.zeros(len(wanted), ENDED)
    rows["decided_at_ms"] = decided_at_ms
    rows["sequence"], rows["deliver_at_ms"] = wanted.sequences, wanted.deliver_at_ms
    rows["hour"], rows["reason"] = wanted.hours, reason
    return rows
