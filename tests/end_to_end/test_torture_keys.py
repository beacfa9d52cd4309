"""The ledger of a torture notices each untrue answer about a message with a key, and no true one."""

from collections.abc import Callable
from typing import Self

import numpy as np
import pytest

from delayd import CancelAnswer, MessageState, RescheduleAnswer, SendVerdict
from delayd.wire.asked import ANSWER, AnswerRows

from .torture_key_books import KeyBooks, check_keys
from .torture_key_books import Row as FiledRow
from .torture_keys import Accepted, KeyLedger, Row
from .torture_ledger import Delivered, Ledger, body_of

SUBJECT, GROUP, LOG = "keys", ("keys", "billing"), 1
DUE_MS, LATER_MS = 1_800_000_000_000, 1_800_000_060_000
MOVED = (LOG, 50)  # The name of a row that took a message's place.
BEFORE_MS, AFTER_MS = DUE_MS - 1, DUE_MS
CONFLICT = {SendVerdict.REJECTED: "reject", SendVerdict.KEPT: "keep", SendVerdict.IN_FLIGHT: "replace"}


class Told:
    """A ledger, and the answers that somebody is told."""

    def __init__(self) -> None:
        self.ledger = Ledger((GROUP,))
        self.keys = KeyLedger(self.ledger, SUBJECT)

    @property
    def violations(self) -> list[str]:
        return self.ledger.violations

    def send(self, conflict: str = "reject") -> int:
        number, _ = self.keys.send("k", conflict, DUE_MS, 10)
        return number

    def accepted(self, conflict: str = "reject", *, now_ms: int = BEFORE_MS) -> int:
        number = self.send(conflict)
        self.keys.accepted(number, Accepted(row(number), BEFORE_MS), now_ms)
        return number

    def replaced(self, other: int, due_ms: int = DUE_MS) -> int:
        number = self.send("replace")
        self.keys.replaced(number, Accepted(row(number), BEFORE_MS), Row(row(other), due_ms))
        return number

    def met(self, verdict: SendVerdict, other: int, due_ms: int = DUE_MS) -> int:
        number = self.send(CONFLICT[verdict])
        self.keys.met(number, verdict, Accepted(row(number), BEFORE_MS), Row(row(other), due_ms))
        return number

    def cancel(self, number: int | None, answer: CancelAnswer, *, now_ms: int = BEFORE_MS) -> Self:
        self.keys.cancelling(number)
        self.keys.cancel_answered(number, answer, now_ms)
        return self

    def move(
        self, number: int | None, answer: RescheduleAnswer, due_ms: int = LATER_MS, *, now_ms: int = BEFORE_MS
    ) -> Self:
        self.keys.moving(number, LATER_MS)
        self.keys.move_answered(number, answer, LATER_MS, Row(MOVED, due_ms), now_ms)
        return self

    def get(
        self, number: int | None, state: MessageState, due_ms: int = DUE_MS, *, now_ms: int = BEFORE_MS
    ) -> AnswerRows:
        answer: AnswerRows = np.zeros(1, ANSWER)
        answer["state"], answer["deliver_at_ms"], answer["sequence"] = state, due_ms, MOVED[1]
        delivered = number is not None and self.ledger.was_delivered(number)
        self.keys.state_answered(number, answer[0], now_ms, delivered=delivered)
        told: AnswerRows = answer[0]
        return told

    def deliver(self, number: int, *, name: tuple[int, int] | None = None, due_ms: int = DUE_MS) -> Self:
        delivered = Delivered(body_of(number, DUE_MS, 10), SUBJECT, name or row(number), due_ms)
        self.ledger.deliver(GROUP, delivered, now_ms=LATER_MS, now=0.0, lease_ends=60.0)
        return self


def row(number: int) -> tuple[int, int]:
    """The name of a message's first row."""
    return LOG, number + 1


@pytest.fixture
def told() -> Told:
    return Told()


Lie = Callable[[Told, int], object]
UNTRUE: dict[str, tuple[Lie, str]] = {
    "a replaced message is delivered, too": (
        lambda told, n: (told.replaced(n), told.deliver(n)),
        "cancelled but there",
    ),
    "a moved message leaves its old row": (
        lambda told, n: (told.move(n, RescheduleAnswer.MOVED), told.deliver(n)),
        "changed on the way",
    ),
    "a moved message is delivered as another row": (
        lambda told, n: (told.move(n, RescheduleAnswer.MOVED), told.deliver(n, name=(LOG, 51), due_ms=LATER_MS)),
        "kept twice",
    ),
    "a cancelled message is delivered": (
        lambda told, n: (told.cancel(n, CancelAnswer.CANCELLED), told.deliver(n)),
        "cancelled but there",
    ),
    "a message that met another is delivered": (
        lambda told, n: told.deliver(told.met(SendVerdict.REJECTED, n)),
        "refused but there",
    ),
    "a key is free before its message is due": (lambda told, n: told.accepted(), "is due only at"),
    "a key is never free": (
        lambda told, n: (told.cancel(n, CancelAnswer.CANCELLED), told.met(SendVerdict.REJECTED, n)),
        "because of an earlier message, which is cancelled",
    ),
    "another row is met": (lambda told, n: told.met(SendVerdict.KEPT, n + 7), "the newest row of its key is"),
    "a row with another instant is replaced": (
        lambda told, n: told.replaced(n, LATER_MS),
        "the newest row of its key is",
    ),
    "a cancelled message is replaced": (
        lambda told, n: (told.cancel(n, CancelAnswer.CANCELLED), told.replaced(n)),
        "REPLACED a message that is cancelled",
    ),
    "a delivered message is replaced": (
        lambda told, n: (told.deliver(n), told.replaced(n)),
        "cancelled after it was delivered",
    ),
    "a delivered message is cancelled": (
        lambda told, n: (told.deliver(n), told.cancel(n, CancelAnswer.CANCELLED)),
        "cancelled after it was delivered",
    ),
    "a send to be rejected is kept": (
        lambda told, n: told.keys.met(told.send("reject"), SendVerdict.KEPT, None, Row(row(n), DUE_MS)),
        "was sent with reject",
    ),
    "a cancel says that it left before it was due": (
        lambda told, n: told.cancel(n, CancelAnswer.ALREADY_DISPATCHED),
        "is due only at",
    ),
    "a cancel knows nothing of it": (lambda told, n: told.cancel(n, CancelAnswer.UNKNOWN), "says UNKNOWN"),
    "a cancel knows a key that nobody has sent": (
        lambda told, n: told.cancel(None, CancelAnswer.CANCELLED),
        "that nobody has sent",
    ),
    "it is moved to another instant than was wished": (
        lambda told, n: told.move(n, RescheduleAnswer.MOVED, DUE_MS),
        "moved to",
    ),
    "a cancelled message is moved": (
        lambda told, n: (told.cancel(n, CancelAnswer.CANCELLED), told.move(n, RescheduleAnswer.MOVED)),
        "moved, and it is cancelled",
    ),
    "a pending message is cancelled when it is to be moved": (
        lambda told, n: told.move(n, RescheduleAnswer.CANCELLED),
        "a reschedule says CANCELLED",
    ),
    "a cancelled message is pending": (
        lambda told, n: (told.cancel(n, CancelAnswer.CANCELLED), told.get(n, MessageState.PENDING)),
        "heard PENDING",
    ),
    "a delivered message is pending": (
        lambda told, n: (told.deliver(n), told.get(n, MessageState.PENDING)),
        "heard PENDING",
    ),
    "nobody has cancelled it": (lambda told, n: told.get(n, MessageState.CANCELLED), "heard CANCELLED"),
    "it is due at an instant that nobody has wished": (
        lambda told, n: told.get(n, MessageState.PENDING, LATER_MS),
        f"due at {LATER_MS}",
    ),
    "a rejected message is kept": (
        lambda told, n: told.get(told.met(SendVerdict.REJECTED, n), MessageState.KEPT),
        "heard KEPT",
    ),
}


@pytest.mark.parametrize("lie", UNTRUE)
def test_an_untrue_answer_is_noticed(told: Told, lie: str) -> None:
    tell, notice = UNTRUE[lie]
    number = told.accepted()
    assert told.violations == []
    tell(told, number)
    assert any(notice in violation for violation in told.violations), told.violations


def check(told: Told, *rows: FiledRow, found: dict[int, tuple[int, int]] | None = None) -> list[str]:
    """Compare stopped books of rows 1, 2, 3... with the ledger."""
    books = KeyBooks(dict(enumerate(rows, 1)))
    check_keys(books, told.keys, told.ledger, found or {}, stopped=True)
    return told.violations


PENDING = FiledRow(DUE_MS, "pending", 0)
DISPATCHED = FiledRow(DUE_MS, "dispatched", 0)


@pytest.mark.parametrize(
    ("rows", "found", "notice"),
    [
        ([], {}, "no schedule log has row 1"),
        ([FiledRow(DUE_MS, "cancelled", 0)], {}, "is cancelled by the dispatch log"),
        ([FiledRow(LATER_MS, "pending", 0)], {}, "is due at"),
        ([PENDING], {0: (1, 1)}, "in the realtime log: True"),
        ([DISPATCHED], {}, "in the realtime log: False"),
        ([DISPATCHED], {0: (1, 2)}, "the realtime log has"),
        ([FiledRow(DUE_MS, "moved", 9)], {}, "no schedule log has row 9"),
        ([FiledRow(DUE_MS, "moved", 1)], {}, "or two messages have it"),
        ([PENDING, FiledRow(DUE_MS, "rejected", 1)], {}, "rows that no receipt names"),
    ],
)
def test_untrue_books_are_noticed(
    told: Told, rows: list[FiledRow], found: dict[int, tuple[int, int]], notice: str
) -> None:
    told.accepted()
    violations = check(told, *rows, found=found)
    assert any(notice in violation for violation in violations), violations
