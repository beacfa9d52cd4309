"""Rescheduled: what a producer is told about messages that it wanted moved to other instants (docs/keys.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delayd.client.instants import utc
from delayd.client.sending.receipt import Receipt, ReceiptColumns
from delayd.log_id import LogId
from delayd.wire.ending import AnswerRows, RescheduleAnswer


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The answer to the wish to move one message to another instant.

    Example::

        moved = producer.reschedule("orders.cancel", receipt=receipt, delay=timedelta(hours=2))
        if moved.answer is delayd.RescheduleAnswer.MOVED:
            receipt = moved.receipt

    Fields:
        answer: a `RescheduleAnswer`.
        receipt: of the message as it stands now: with MOVED it has the new instant. None when nothing is known of it.
            Earlier receipts of the message go on to stand for it.
    """

    answer: RescheduleAnswer
    receipt: Receipt | None

    def __str__(self) -> str:
        due = "" if self.receipt is None else f", due at {utc(self.receipt.deliver_at_ms).isoformat()}"
        return f"{self.answer.name.lower()}{due}"


@dataclass(frozen=True, eq=False)
class RescheduledBatch(ReceiptColumns):
    """The answers to the wish to move many messages: columns with one item for each, in the order of the request.

    `cancel_batch`, `get_batch` and `reschedule_batch` take it as they take the receipt of a `send_batch`.

    Fields, beside those of `ReceiptColumns`, which are of the messages as they stand now:
        answers: uint8[n], a `RescheduleAnswer` each.
    """

    answers: NDArray[np.uint8]


def rescheduled_of(log_id: int, answer: np.void) -> Rescheduled:
    """One answer as a caller reads it."""
    told = RescheduleAnswer(int(answer["answer"]))
    if told is RescheduleAnswer.UNKNOWN:
        return Rescheduled(told, None)
    due_ms, accepted_at_ms = int(answer["deliver_at_ms"]), int(answer["accepted_at_ms"])
    sequence, was_due = int(answer["sequence"]), due_ms <= accepted_at_ms
    return Rescheduled(told, Receipt(LogId(log_id), sequence, due_ms, accepted_at_ms, was_due, False))


def rescheduled_batch_of(log_ids: NDArray[np.uint64], answers: AnswerRows) -> RescheduledBatch:
    """Many answers as a caller reads them."""
    sequences, due_ms, accepted_ms = (answers[name].copy() for name in ("sequence", "deliver_at_ms", "accepted_at_ms"))
    return RescheduledBatch(log_ids, sequences, due_ms, accepted_ms, answers["answer"].copy())
