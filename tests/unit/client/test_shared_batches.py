"""Calls that share batches: each is told of its own rows, whatever a server answers and however batches are split."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd import BatchFailed, BatchReceipt, OutcomeUnknown, SendHandle, SendVerdict
from delayd.batch.columns import Int64s
from delayd.client.sending import outbox as outbox_module
from delayd.client.sending.batch_sender import BatchSender, Parcel, Split, UnsentRows
from delayd.client.sending.outbox import Outbox, Progress, Recorded, RecordedSend, RecordMet
from delayd.client.sending.receipts import Accepted, Unheard
from delayd.client.sending.send_options import NO_LABEL, Columns, Label, Labels
from delayd.errors import DelaydError, HourFull, InFlight, KeyPending, QuotaReached, SlowDown
from delayd.log.hour import ENDED
from delayd.outcome import Reason
from tests.property.packed import LOG_ID, PART, known_clock, unpacked
from tests.unit.client.world import PAST_MS


class Carrier:
    """In place of a `BatchSender`: a server whose answers are drawn, and that remembers what it has kept."""

    def __init__(self, draw: random.Random) -> None:
        self.groups = [LOG_ID]
        self.kept: dict[int, bytes] = {}  # Bodies by sequence.
        self.answers: dict[int, Accepted] = {}  # Of batches whose outcome the client does not know.
        self.refused: dict[bytes, str] = {}  # Why, by body.
        self.batches = 0
        self._draw = draw

    def parcel(self, rows: UnsentRows) -> Parcel:
        return Parcel(rows, asyncio.get_running_loop().time() + 60)

    def carry(self, parcel: Parcel, ended: Callable[[Parcel, Split], None]) -> None:
        asyncio.get_running_loop().call_soon(self._answer, parcel, ended)

    def _answer(self, parcel: Parcel, ended: Callable[[Parcel, Split], None]) -> None:
        split: Split = []
        try:
            split = self._judge(parcel)
        finally:
            ended(parcel, split)  # So that nobody waits for ever after a bug; rows without an outcome show it.

    def _judge(self, parcel: Parcel) -> Split:
        self.batches += 1
        rows, number = parcel.rows, self.batches
        sent = unpacked(rows.encode(PART, known_clock(), 1))
        keyed = [at for at, row in enumerate(sent) if row[4].key]
        assert list(rows.keyed_rows().rows) == keyed and len(keyed) in (0, len(sent)), "keys have batches of their own"
        fault = self._draw.choice(["none", "none", "rows", "later", "all", "unknown"])
        if fault in ("rows", "later") and len(sent) > 1:
            at_fault = self._draw.sample(range(len(sent)), self._draw.randint(1, len(sent) - 1))
            named, others = rows.split(sorted(at_fault))
            if fault == "later":
                return [(Parcel(part, parcel.deadline), 0.0) for part in (named, others)]
            self.refused |= {sent[row][1]: HourFull.code for row in at_fault}
            named.fail(HourFull("full"))
            return [(Parcel(others, parcel.deadline), 0.0)]
        if fault == "all":
            self.refused |= {row[1]: QuotaReached.code for row in sent}
            rows.fail(QuotaReached("too many"))
        else:
            first = len(self.kept) + 1
            self.kept |= {first + at: row[1] for at, row in enumerate(sent)}
            met = [row for row in keyed if self._draw.random() < 0.5]
            accepted = Accepted(LOG_ID, first, len(sent), PAST_MS, False, kept_for(first, met))
            if fault == "unknown":
                self.answers[number] = accepted
                rows.fail(OutcomeUnknown("lost", SendHandle(LOG_ID, PART.producer_id, number)))
            else:
                rows.accept(accepted)
        return []


def kept_for(first: int, rows: Sequence[int]) -> bytes:
    """Decisions that earlier messages stand for these rows; each names its own."""
    made = np.zeros(len(rows), ENDED)
    for at, row in enumerate(rows):
        made[at]["sequence"], made[at]["other"], made[at]["reason"] = first + row, 7_000 + first + row, Reason.KEPT
    return made.tobytes()


CALLS = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b"]),
        st.integers(1, 9),
        st.sampled_from(["plain", "headers", "keys"]),
        st.booleans(),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


def columns_of_call(number: int, subject: bytes, count: int, kind: str, relative: bool) -> Columns:
    """Rows whose bodies say which rows of which call they are."""
    bodies = [b"%d-%d" % (number, row) for row in range(count)]
    lengths: Int64s = np.array([len(body) for body in bodies])
    due: Int64s = np.arange(count) + (5_000_000 if relative else 1_000_000 * number)
    labels = Labels(bodies, [2] * count, [b""] * count, [0] * count, [0] * count, [0] * count)
    headers = [b"\x81\xa1a\xa1b"] * count if kind == "headers" else None
    return Columns(subject, bodies, lengths, lengths, due, relative, headers, labels if kind == "keys" else None)


def check_told(outcome: BatchReceipt | DelaydError, call: int, columns: Columns, carrier: Carrier) -> None:
    """Each row of a call has ended once, and what is said of it is what became of it."""
    receipt, failures = BatchReceipt(()), list[tuple[list[int], DelaydError]]()
    if isinstance(outcome, BatchReceipt):
        receipt = outcome
    elif isinstance(outcome, BatchFailed):
        receipt = outcome.receipt
        failures = [(failure.rows.tolist(), failure.error) for failure in outcome.failures]
    else:
        failures = [(list(range(len(columns.bodies))), outcome)]
    failed = [row for rows, _ in failures for row in rows]
    assert sorted([*receipt.rows.tolist(), *failed]) == list(range(len(columns.bodies)))
    told = zip(receipt.rows.tolist(), receipt.sequences.tolist(), receipt.verdicts, receipt.others, strict=True)
    for row, sequence, verdict, other in told:
        assert carrier.kept[sequence] == columns.bodies[row]
        assert other == (7_000 + sequence if verdict == SendVerdict.KEPT else 0)
    clock = known_clock()
    due = clock.latest_ms_column(columns.deliver) if columns.relative else columns.deliver
    assert receipt.deliver_at_ms.tolist() == due[receipt.rows].tolist()
    for rows, error in failures:
        bodies = [columns.bodies[row] for row in rows]
        if isinstance(error, OutcomeUnknown):
            handle = error.handle
            answer = carrier.answers[handle.producer_batch]
            own = answer.part(handle.first_row, handle.row_count) if handle.row_count else answer
            assert [carrier.kept[own.base_sequence + at] for at in range(own.row_count)] == bodies
        else:
            assert {carrier.refused[body] for body in bodies} == {error.code}
    if isinstance(outcome, BatchFailed) and not len(receipt):
        kinds = {error.code for _, error in failures}
        assert len(kinds) > 1 or kinds == {OutcomeUnknown.code}, "all failed alike, so this is the error"


@given(CALLS, st.integers(0, 2**32))
def test_rule_I1_each_call_is_told_of_exactly_its_rows_however_calls_share_batches(
    calls: list[tuple[bytes, int, str, bool, int]], seed: int
) -> None:
    async def scenario() -> None:
        carrier = Carrier(random.Random(seed))
        outbox = Outbox(cast(BatchSender, carrier), 5.0, 60_000, Unheard())
        loop, sent = asyncio.get_running_loop(), list[tuple[asyncio.Future[BatchReceipt], Columns]]()
        for number, (subject, count, kind, relative, turns) in enumerate(calls):
            columns = columns_of_call(number, subject, count, kind, relative)
            answered: asyncio.Future[BatchReceipt] = loop.create_future()
            sent.append((answered, columns))
            await outbox.add_batch(Progress(count, answered), columns)
            for _ in range(turns):
                await asyncio.sleep(0)
        await outbox.flush()
        assert not outbox.unsent
        for call, (answered, columns) in enumerate(sent):
            error = answered.exception()
            assert error is None or isinstance(error, DelaydError)
            check_told(answered.result() if error is None else error, call, columns, carrier)

    with patch.object(outbox_module, "JOINED_ROWS", 20), patch.object(outbox_module, "PIECES_UNDER_WAY", 2):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ((Reason.KEPT, Reason.REJECTED), RecordMet),
        # Nobody may say that a message without a key has met one: the record was met, and is about to end.
        ((Reason.IN_FLIGHT, Reason.REJECTED), SlowDown),
        ((Reason.REJECTED, Reason.REJECTED), KeyPending),
        ((Reason.REJECTED, Reason.IN_FLIGHT), InFlight),
    ],
)
def test_a_send_that_is_to_happen_once_is_told_what_its_record_or_its_message_met(
    reasons: tuple[Reason, Reason], expected: type
) -> None:
    waiter: Future[object] = Future()
    record = "%once", b"", 90_000_000_000, True, b"", Label(b"n", 3, b"")
    message = "orders", b"x", PAST_MS, False, b"", NO_LABEL
    rows = Recorded(RecordedSend(record, bytes(32), message, waiter))
    rows.encode(PART, known_clock(), LOG_ID)
    decided = np.zeros(2, ENDED)
    decided["sequence"], decided["other"], decided["other_at_ms"] = (7, 8), 3, PAST_MS
    decided["reason"] = reasons
    rows.accept(Accepted(LOG_ID, 7, 2, PAST_MS, False, decided.tobytes()))
    told = waiter.result() if expected is RecordMet else waiter.exception()
    assert type(told) is expected
