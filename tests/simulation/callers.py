"""Callers who ask about messages by receipts and keys, and what must be true of the answers (docs/keys.md; C1, C3, P1).

Invariant: what an answer says is held against the files, and against what other callers were told; never against a
server's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import Int64s
from delayd.errors import CallerError, DelaydError, RetryLater
from delayd.hours import hour_of_ms
from delayd.outcome import MessageState, Reason
from delayd.wire.asked import (
    AnswerRows,
    Asked,
    AskedKeys,
    CancelAnswer,
    RescheduleAnswer,
    encode_asked_keys,
    read_asked_keys,
)
from tests.simulation.books import EXPIRED, NO_TARGET
from tests.worlds.delay_adapter import RequestWish
from tests.worlds.key_books import RECORDS, KeyBooks, Name

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

UNDECIDED = (MessageState.PENDING, MessageState.IN_FLIGHT)
STATE_OF_REASON = {
    Reason.CANCELLED: MessageState.CANCELLED,
    Reason.MOVED: MessageState.MOVED,
    Reason.REPLACED: MessageState.REPLACED,
    Reason.REJECTED: MessageState.REJECTED,
    Reason.KEPT: MessageState.KEPT,
    Reason.IN_FLIGHT: MessageState.REJECTED,
}
ENDED = frozenset(STATE_OF_REASON.values())
NO_ROW = 0


class _Question(NamedTuple):
    """One row of a request: its receipt, or its name with the newest row that was known to have the name then."""

    sequence: int
    name: Name | None
    wanted_at_ms: int


class Callers:
    """All of them, over all lives of the delay server."""

    def __init__(self, cluster: Cluster) -> None:
        self.keys = KeyBooks(cluster.hidden_hours)
        self._cluster = cluster
        self._asked: set[int] = set()  # Rows that somebody wanted cancelled by their receipts.
        self._asked_names: set[Name] = set()  # Names of which somebody wanted the newest row cancelled.
        self._dispatched: dict[int, tuple[int, int]] = {}  # Target and offset, as answers named them.
        self._expired: set[int] = set()  # Rows that were answered EXPIRED.
        self._led: set[tuple[int, int]] = set()  # From the row of a receipt to the one that an answer told of.
        self._named: set[tuple[Name, int]] = set()  # Rows that answers told of under a name.

    def look(self) -> None:
        """Take notice of keyed sends that were accepted."""
        if self.keys.has_new(self._cluster.world.outside):
            self._cluster.checks.read_logs()
            self.keys.look(self._cluster.world.outside)

    def cancelled_by_receipt(self, asked: Asked) -> None:
        """Somebody wants rows cancelled."""
        self._asked.update(asked.sequences.tolist())

    def ask(self, wish: RequestWish, asked: Asked, wanted_at_ms: Int64s | None = None) -> None:
        """Ask about rows by their receipts; the answer is checked when it comes."""
        server, outside = self._cluster.world.server, self._cluster.world.outside
        wanted = [0] * len(asked.sequences) if wanted_at_ms is None else wanted_at_ms.tolist()
        questions = [_Question(row, None, at) for row, at in zip(asked.sequences.tolist(), wanted, strict=True)]
        answer = partial(self._heard, wish, questions)
        with suppress(CallerError, RetryLater):
            if wish is RequestWish.CANCEL:
                self.cancelled_by_receipt(asked)
                outside.cancel_asked.update(asked.sequences.tolist())
                server.cancel(asked, answer)
            elif wanted_at_ms is not None:
                server.reschedule(asked, wanted_at_ms, answer)
            else:
                server.get(asked, answer)

    def ask_by_key(self, wish: RequestWish, names: list[Name], wanted_at_ms: Int64s | None = None) -> None:
        """Ask about the newest rows of names of one subject."""
        if wish is RequestWish.CANCEL:
            self._asked_names.update(names)
        wanted = [0] * len(names) if wanted_at_ms is None else wanted_at_ms.tolist()
        newest = [self.keys.newest(self._cluster.world.outside, name)[0] for name in names]
        questions = [_Question(*each) for each in zip(newest, names, wanted, strict=True)]
        with suppress(CallerError, RetryLater):
            self._cluster.world.server.ask_by_key(
                wish, _asked(names, wanted_at_ms), partial(self._heard, wish, questions), wanted_at_ms
            )

    def check(self) -> None:
        """What was told is what the files say, once all is quiet; and so is what is told now."""
        cluster = self._cluster
        outside = cluster.world.outside
        held = {
            sequence: (log_id, kept.offset)
            for log_id, target in outside.targets.items()
            for kept in target.log
            for sequence in kept.sequences
        }
        wrong = {row: place for row, place in self._dispatched.items() if held.get(row) != place}
        assert not wrong, f"answered DISPATCHED, and not there: {wrong}"
        unexpired = self._expired - cluster.world.expired().keys()
        assert not unexpired, f"answered EXPIRED, and without that outcome: {sorted(unexpired)}"
        for asked, told in self._led:
            assert told in outside.followers(asked), f"the receipt of {asked} was answered with {told}"
        told_of = cluster.world.told()
        cancelled_at = {
            row: at_ms
            for row, (_, target, reason, at_ms) in told_of.items()
            if target == NO_TARGET and reason == Reason.CANCELLED
        }
        self.keys.check(outside, cancelled_at)
        for name, row in self._named:
            assert row in self.keys.rows_of(outside, name), f"the name {name} was answered with row {row}"
        asked_rows = {row for asked in self._asked for row in outside.followers(asked)}
        asked_rows |= {row for name in self._asked_names for row in self.keys.rows_of(outside, name)}
        asked_rows |= self._records_over(cancelled_at)
        strange = cancelled_at.keys() - asked_rows
        assert not strange, f"cancelled, and nobody asked for it: {sorted(strange)}"
        self._ask_about_everything()

    def _records_over(self, cancelled_at: Mapping[int, int]) -> set[int]:
        """The records of sends that were cancelled when they were due or later: the server itself ends those."""
        outside = self._cluster.world.outside
        records = [row for name in self.keys.names() if name[0] == RECORDS for row in self.keys.takers(name)]
        ends = [outside.newest(*record)[:2] for record in records]
        return {row for row, due_ms in ends if due_ms <= cancelled_at.get(row, 0)}

    def _ask_about_everything(self) -> None:
        """All receipts and all names are answered, with what the files say."""
        cluster = self._cluster
        world = cluster.world
        rows: list[int] = []
        heard: list[list[AnswerRows | DelaydError]] = []
        receipts = world.all_receipts()
        if receipts is not None:
            heard.append([])
            world.server.get(receipts, heard[-1].append)
            rows += [world.outside.newest(row, 0)[0] for row in receipts.sequences.tolist()]
        of_subject: dict[bytes, list[Name]] = {}
        for name in self.keys.names():
            of_subject.setdefault(name[0], []).append(name)
        for own in of_subject.values():
            heard.append([])
            world.server.ask_by_key(RequestWish.GET, _asked(own), heard[-1].append)
            rows += [self.keys.newest(world.outside, name)[0] for name in own]
        cluster.calm(1)
        answers: list[tuple[int, int]] = []
        for (what,) in heard:
            assert not isinstance(what, DelaydError), f"all is quiet, and a question is refused: {what}"
            answers.extend(zip(what["sequence"].tolist(), what["state"].tolist(), strict=True))
        told_of, hours = world.told(), cluster.delay_hours()
        for row, (sequence, state) in zip(rows, answers, strict=True):
            # A receipt leads no further than to a row whose logs are deleted.
            known = told_of.get(sequence if sequence != NO_ROW else row)
            # Nobody has read the books of an hour that was sealed and deleted between two checks.
            gone = known is None or known[0] not in hours or hours.get(known[0]).removed
            if state == MessageState.UNKNOWN and gone:
                continue
            _, target, reason, _ = told_of[row]
            if target != NO_TARGET:
                wanted = MessageState.DISPATCHED
            else:
                wanted = MessageState.EXPIRED if reason == EXPIRED else STATE_OF_REASON[Reason(reason)]
            assert (sequence, state) == (row, wanted), (
                f"row {row} is {wanted.name}, and {MessageState(state).name} of row {sequence} is answered"
            )

    def _heard(self, wish: RequestWish, questions: list[_Question], what: AnswerRows | DelaydError) -> None:
        outside = self._cluster.world.outside
        if isinstance(what, DelaydError):
            outside.refused.append((0, what))
            return
        for question, row in zip(questions, what, strict=True):
            sequence, state = int(row["sequence"]), MessageState(row["state"])
            if question.name is None:
                self._led.add((question.sequence, sequence))
            elif sequence != NO_ROW:
                self._named.add((question.name, sequence))
                assert sequence >= question.sequence, f"{question.name} is that of {question}, {sequence} is told"
            if wish is RequestWish.MOVE and row["answer"] == RescheduleAnswer.MOVED:
                assert row["deliver_at_ms"] == question.wanted_at_ms, f"{question} is moved to {row['deliver_at_ms']}"
                if question.name is None and sequence != question.sequence:
                    outside.cancelled.add(question.sequence)
                continue
            if wish is RequestWish.CANCEL and row["answer"] == CancelAnswer.CANCELLED:
                outside.cancelled.add(sequence)
                continue
            self._is_true(wish, question, row, state)

    def _is_true(self, wish: RequestWish, question: _Question, row: np.void, state: MessageState) -> None:
        sequence = int(row["sequence"])
        outside = self._cluster.world.outside
        what = f"{question} is answered {state.name} of row {sequence}"
        if state is MessageState.DISPATCHED:
            self._dispatched[sequence] = int(row["target_log_id"]), int(row["target_offset"])
        elif state is MessageState.EXPIRED:
            self._expired.add(sequence)
        elif state in ENDED:
            outside.cancelled.add(sequence)
        elif state is MessageState.PENDING and wish is RequestWish.GET:
            assert sequence not in outside.cancelled, f"{what}, which has ended"
            assert sequence not in self._held(), f"{what}, which was delivered"
        elif state is MessageState.UNKNOWN:
            self._is_forgotten(question, row, what)
        else:
            assert state in UNDECIDED, f"{what}, and nobody gave it up"
            hidden = hour_of_ms(_filed_ms(row)) in self._cluster.hidden_hours()
            assert sequence not in outside.cancelled or hidden, f"{what}, which has ended"

    def _is_forgotten(self, question: _Question, row: np.void, what: str) -> None:
        """A message is unknown when its hour was sealed, and its logs are deleted."""
        cluster = self._cluster
        filed_ms = _filed_ms(row)
        if question.name is not None and row["sequence"] == NO_ROW:
            known, _, filed_ms = self.keys.newest(cluster.world.outside, question.name)
            if question.sequence == NO_ROW or known > question.sequence:
                return
        assert cluster.delay_books is not None, "a delay server has been there"
        hour = hour_of_ms(filed_ms)
        sealed = hour in cluster.delay_books.sealed or cluster.delay_hours().get(hour).removed
        assert sealed, f"{what}, and its hour is not sealed"

    def _held(self) -> set[int]:
        """The rows that targets hold."""
        self._cluster.checks.read_logs()
        targets = self._cluster.world.outside.targets.values()
        return {sequence for target in targets for kept in target.log for sequence in kept.sequences}


def _filed_ms(row: np.void) -> int:
    """The instant that says in which hour a row is filed."""
    return int(max(row["deliver_at_ms"], row["accepted_at_ms"]))


def _asked(names: list[Name], wanted_at_ms: Int64s | None = None) -> Batch:
    """The names of a request, which are of one subject."""
    batch = read_asked_keys(encode_asked_keys(AskedKeys(names[0][0], [key for _, key in names]), wanted_at_ms))
    assert batch is not None, "it names keys"
    return batch
