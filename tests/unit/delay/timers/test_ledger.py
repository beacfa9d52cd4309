"""The ledger: a row that has ended passes no gate, whatever happens to its hour meanwhile (rules C1, S1, P7)."""

from __future__ import annotations

import numpy as np

from delayd.delay.filing.hour_table import HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.delay.rows import Rows, new_rows
from delayd.delay.timers.earlier import EarlierOutcomes
from delayd.delay.timers.ledger import Ledger
from delayd.sequences import Sequences

HOUR = 500_000


def rows_of(*sequences: int, hour: int = HOUR) -> Rows:
    rows = new_rows(len(sequences))
    rows["sequence"], rows["hour"] = sequences, hour
    return rows


def array(*sequences: int) -> Sequences:
    return np.array(sequences, np.uint64)


def passed(rows: Rows) -> list[int]:
    found: list[int] = rows["sequence"].tolist()
    return found


def ledger(*decided: int) -> Ledger:
    """A ledger that a start made: the dispatch log of HOUR names some rows."""
    known = {HOUR: array(*decided)} if decided else {}
    return Ledger(EarlierOutcomes(known, {}, HourTable(), PendingRows(), lambda sequences: None))


def test_what_a_dispatch_log_a_window_or_a_decision_names_enters_no_wheel() -> None:
    book = ledger(1)
    book.settle(array(2))
    book.end(HOUR, array(3))
    book.committed()
    assert passed(book.may_enter(rows_of(1, 3, 4))) == [4]
    assert passed(book.may_leave(rows_of(2, 3, 4))) == [4]
    assert passed(book.may_enter(rows_of(1, 3, hour=HOUR + 1))) == [1, 3], "a row of another hour is another row"


def test_a_row_that_a_commit_under_way_ends_is_held_back_and_an_undo_gives_it_back() -> None:
    book = ledger()
    book.end(HOUR, array(3))
    assert passed(book.may_enter(rows_of(3, 4))) == [3, 4], "an undo must find it in the wheel"
    assert passed(book.may_leave(rows_of(3, 4))) == [4]
    undone = book.undo()
    assert undone is not None and passed(undone) == [3]
    assert passed(book.may_leave(rows_of(3))) == passed(book.may_enter(rows_of(3))) == [3]


def test_a_row_of_an_hour_that_is_set_aside_stays_ended_while_the_hour_is_mended() -> None:
    book = ledger()
    book.end(HOUR, array(3))
    book.committed()
    for _ in range(3):  # Ticks.
        book.forget(HOUR + 1, [], [HOUR], answers_may_come=False)
    assert passed(book.may_enter(rows_of(3, 4))) == [4]
    book.forget(HOUR + 1, [], [], answers_may_come=False)
    assert passed(book.may_enter(rows_of(3, 4))) == [3, 4], "nothing of the hour is delivered any more"


def test_a_row_that_stands_in_the_wheel_stays_ended_until_its_hour_has_left() -> None:
    book = ledger()
    book.end(HOUR, array(3))
    book.committed()
    book.forget(HOUR + 1, [HOUR], [], answers_may_come=False)
    assert passed(book.may_leave(rows_of(3, 4))) == [4]
    assert book.have_ended(np.full(2, HOUR, np.uint32), array(3, 4)).tolist() == [True, False]


def test_a_commit_is_undone_though_its_hour_was_loaded_and_forgotten_meanwhile() -> None:
    book = ledger()
    book.end(HOUR, array(3))
    book.forget(HOUR + 1, [HOUR], [], answers_may_come=False)
    assert passed(book.may_leave(rows_of(3, 4))) == [4]
    undone = book.undo()
    assert undone is not None and passed(undone) == [3]
    assert not book.have_ended(np.full(2, HOUR, np.uint32), array(3, 4)).any()
