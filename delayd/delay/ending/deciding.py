"""Deciding: what one group commit decides about rows that callers want to end (rules P1, C1).

Invariant: a row is claimed before anything is logged, and whoever asked is answered when the log is durable.

     states of the rows ──▶ claim ──▶ rows that end ──▶ one record in the group ──▶ fsync ──▶ outcomes are owed, answers
     (ledger)               (ledger)  (by sequence)                                           (ledger)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import ROWS_MAX, ColumnId
from delayd.batch.sequences import Indices, Pile
from delayd.delay.ending.copies import COPY_ROWS
from delayd.delay.ending.requested import WAITS_MAX, Requested
from delayd.delay.intake import Decided, OpenGroup
from delayd.delay.ledger.ledger import NOT_CLAIMABLE, Ledger, States
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.producers import Producers
from delayd.log.control import Ended, Known, Tried, encode_known
from delayd.log.hour import ENDED, NO_ENDED, NO_TRIED, TRIED, EndedRows, Reason, TriedRows, tried_rows
from delayd.wire.asked import AnswerRows, MessageState, MoveTry, Tries

MOVED_ROWS_MAX = COPY_ROWS  # In one commit, and so are these.
MOVED_BYTES_MAX = 12 << 20


class Moved(NamedTuple):
    """A request of which rows are moved by a commit."""

    request: Requested
    base_sequence: int  # Of the rows that take their place.


class OpenCommit:
    """The decisions of one group commit, and the answers that wait for it."""

    def __init__(self, group: OpenGroup, ledger: Ledger) -> None:
        self.decided_at_ms = group.appended_at_ms
        self.answers: list[tuple[Requested, AnswerRows]] = []
        self.moves: list[Moved] = []
        self._ledger = ledger
        self._next_sequence = group.next_sequence  # Of the next row that is moved.
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
        self.moves.append(Moved(request, self._next_sequence))
        if leaver is None:
            ended["other"] = np.uint64(self._next_sequence) + rising.astype(np.uint64)
            ended["other_at_ms"] = batch.int64s(ColumnId.DELIVER_AT_MS).take(rising)
            self._moved.append(batch)
            self._next_sequence += batch.count
            self._moved_rows += batch.count
            self._moved_bytes += batch.total_bytes
        else:
            ended["other"], ended["other_at_ms"], ended["place"] = leaver.to, batch.producer.producer_id, rising
        self._moved_now.add(ended["sequence"].copy())
        # Of a move by receipt the first row of the batch is noted: the others come after it.
        self._note_tries(request, copied.rows[:1] if isinstance(request.tries, MoveTry) else chosen)
        return True

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
        self._ledger.settle(self._rows)
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
