"""The ledger: a row that has ended passes no gate, whatever happens to its hour meanwhile (rules C1, H4, S1, P7)."""

from __future__ import annotations

import numpy as np

from delayd.delay.ledger.ledger import Ledger
from delayd.delay.rows import Rows
from delayd.log.hour import NO_ENDED
from tests.unit.delay.ledger.bare import HOUR, array, bare_ledger, of, rows_of

ROWS = 1_000_000
UNCLAIMED = np.zeros(9, np.uint8)


def passed(rows: Rows) -> list[int]:
    found: list[int] = rows["sequence"].tolist()
    return found


def book(*decided: int) -> Ledger:
    return bare_ledger({HOUR: array(*decided)} if decided else {})[0]


def claim(ledger: Ledger, *sequences: int, hour: int = HOUR) -> None:
    ledger.claim(of(*sequences, hour=hour), UNCLAIMED[: len(sequences)])


def decide(ledger: Ledger, *sequences: int, hour: int = HOUR) -> None:
    claim(ledger, *sequences, hour=hour)
    ledger.settle(NO_ENDED)


def test_what_a_dispatch_log_a_window_or_a_decision_names_passes_no_gate() -> None:
    ledger = book(1)
    ledger.name(HOUR, array(2))
    ledger.drop_named()
    decide(ledger, 3)
    assert passed(ledger.may_leave(rows_of(2, 3, 4))) == [4]
    assert ledger.ended_in(range(HOUR - 1, HOUR + 1))[HOUR].tolist() == [1, 2, 3], "a load leaves them out"
    assert passed(ledger.may_leave(rows_of(3, hour=HOUR + 1))) == [3], "a row of another hour is another row"


def test_a_row_that_a_commit_under_way_ends_is_held_back_and_an_undo_gives_it_back() -> None:
    ledger = book()
    decide(ledger, 1)
    claim(ledger, 3, 5)
    assert ledger.ended_in(range(HOUR, HOUR + 1))[HOUR].tolist() == [1], "an undo must find it in the wheel"
    assert passed(ledger.may_leave(rows_of(1, 3, 4))) == [4]
    ledger.undo()
    assert [passed(rows) for rows in ledger.hours.wheel.parts()] == [[3]], "what fell due meanwhile is due again"
    assert passed(ledger.may_leave(rows_of(1, 3, 5))) == [3, 5]


def test_a_row_of_an_hour_that_is_withheld_stays_ended() -> None:
    ledger = book()
    decide(ledger, 3)
    ledger.hours.withheld.add(HOUR)
    for _ in range(3):  # Ticks.
        ledger.forget(answers_may_come=False)
    assert passed(ledger.may_leave(rows_of(3, 4))) == [4]
    ledger.hours.withheld.clear()
    ledger.forget(answers_may_come=False)
    assert passed(ledger.may_leave(rows_of(3, 4))) == [3, 4], "nothing of the hour is delivered any more"


def test_a_row_that_stands_in_the_wheel_stays_ended_until_its_hour_has_left() -> None:
    ledger = book()
    ledger.hours.wheel.add_hour(HOUR)
    decide(ledger, 3)
    ledger.forget(answers_may_come=False)
    assert passed(ledger.may_leave(rows_of(3, 4))) == [4]
    ledger.hours.wheel.drop_hour(HOUR)
    ledger.forget(answers_may_come=True)
    assert not ledger.without_outcome(HOUR, array(3)).any(), "a target may name it once more"
    ledger.forget(answers_may_come=False)
    assert passed(ledger.may_leave(rows_of(3, 4))) == [3, 4]


def test_a_row_of_an_hour_to_come_stays_ended_until_the_hour_is_loaded() -> None:
    ledger = book()
    far = HOUR + 100
    decide(ledger, 3, hour=far)
    ledger.forget(answers_may_come=False)
    assert ledger.ended_in(range(far, far + 1))[far].tolist() == [3]
    ledger.hours.loaded, ledger.hours.loading = range(HOUR, far), range(far, far + 1)
    ledger.forget(answers_may_come=False)
    assert passed(ledger.may_leave(rows_of(3, 4, hour=far))) == [4], "the load may be over before it knows of the row"


def test_a_commit_is_undone_though_its_hour_was_loaded_and_forgotten_meanwhile() -> None:
    ledger = book()
    claim(ledger, 3)
    ledger.forget(answers_may_come=False)
    assert ledger.ending_hours() == {HOUR}, "its load waits"
    assert passed(ledger.may_leave(rows_of(3, 4))) == [4]
    ledger.undo()
    assert passed(ledger.may_leave(rows_of(3, 4))) == [3, 4]


def test_rows_of_answers_count_as_ended_beside_those_of_the_dispatch_log() -> None:
    ledger, handoff = bare_ledger({HOUR: np.arange(0, 2 * ROWS, 2, dtype=np.uint64)})
    asked = np.array([6, 7, 9, 2 * ROWS], np.uint64)
    assert ledger.without_outcome(HOUR, asked).tolist() == [False, True, True, True]
    ledger.name(HOUR, array(9))
    ledger.name(HOUR, array(2 * ROWS))
    assert ledger.without_outcome(HOUR, asked).tolist() == [False, True, False, False]
    ledger.drop_named()
    ledger.drop_named()
    assert [found.tolist() for found in handoff.dropped] == [[9, 2 * ROWS]], "one pass for all batches of an answer"
    both = ledger.ended_in(range(HOUR, HOUR + 1))[HOUR]
    assert len(both) == ROWS + 2 and bool((both[1:] > both[:-1]).all())
    assert ledger.without_outcome(HOUR, asked).tolist() == [False, True, False, False]


def test_rule_H4_rows_of_an_hour_that_is_not_known_count_as_ended_until_an_answer_names_some() -> None:
    ledger = book()
    assert not ledger.without_outcome(HOUR + 1, array(1, 2)).any()
    ledger.name(HOUR + 1, array(2))
    assert ledger.without_outcome(HOUR + 1, array(1, 2)).tolist() == [True, False]
