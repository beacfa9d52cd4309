"""The parts of requests about messages: rows that are compared, notes that are undone, outcomes that are owed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from delayd.batch.batch import encode
from delayd.batch.columns import ROWS_MAX, BatchKind, ColumnId
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.ledger.owed import HOURS_AT_ONCE, PARTS_AT_ONCE, Owed, in_one
from delayd.delay.ledger.wanted import Wanted, wanted_of
from delayd.delay.rows import Rows, new_rows
from delayd.errors import BadRequest, BatchMalformed
from delayd.hours import HOUR_MS
from delayd.log.hour import ENDED, EndedRows, NewPart
from delayd.outcome import Reason
from delayd.testing.clock import START_MS
from delayd.wire.asked import Asked, decode_answers, encode_asked, read_asked

HOUR = START_MS // HOUR_MS


def rows_of(*sequences: int, hour: int = HOUR, due_ms: int = 5) -> Rows:
    rows = new_rows(len(sequences))
    rows["sequence"], rows["hour"], rows["due_ms"] = sequences, hour, due_ms
    return rows


def asked(*sequences: int, due_ms: int = 5) -> Asked:
    count = len(sequences)
    return Asked(np.array(sequences, np.uint64), np.full(count, HOUR * HOUR_MS + due_ms), np.zeros(count, np.int64))


def of(*sequences: int, due_ms: int = 5) -> Wanted:
    return wanted_of(asked(*sequences, due_ms=due_ms))[0]


def array(*sequences: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(sequences, np.uint64)


@pytest.mark.parametrize("find", [Wanted.find, Wanted.find_rising])
def test_a_row_is_the_wanted_one_only_with_its_hour_and_its_instant(
    find: Callable[[Wanted, Rows], tuple[np.ndarray[tuple[int], np.dtype[np.intp]], ...]],
) -> None:
    rows = rows_of(1, 2, 4, 7)
    at, found = find(of(2, 3, 7), rows)
    assert (at.tolist(), found.tolist()) == ([1, 3], [0, 2])
    for other in (of(2, 7, due_ms=6), of(1, due_ms=-1)):
        assert not len(find(other, rows)[0])
    assert not len(find(of(2), rows_of(2, hour=HOUR + 1))[0])


def test_answers_stand_where_their_rows_were_asked() -> None:
    found, order = wanted_of(asked(9, 3, 9, 5))
    assert found.sequences.tolist() == [3, 5, 9]
    assert order.tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", BatchMalformed),
        (bytes(64), BatchMalformed),
        (encode(BatchKind.SEAL, None, 1, [(ColumnId.SEAL, np.zeros(1, "V200"))], []), BatchMalformed),
        (encode_asked(asked(1))[:-8], BatchMalformed),
        (encode_asked(Asked(array(1), np.array([-1]), np.array([0]))), BadRequest),
        (encode_asked(Asked(array(1), np.array([0]), np.array([1 << 62]))), BadRequest),
    ],
)
def test_rule_E1_a_body_that_asks_for_no_rows_is_refused_by_name(body: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_asked(body)
    with pytest.raises(BadRequest):
        decode_answers(bytes(63))


class Recorder(OutcomeLog):
    """Keeps what is recorded until a test calls it durable."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, NewPart, Callable[[], object]]] = []

    def record(self, hour: int, part: NewPart, on_durable: Callable[[], object]) -> None:
        self.recorded.append((hour, part, on_durable))


def ended(hours: list[int], reason: int = Reason.CANCELLED, decided_at_ms: int = 7) -> EndedRows:
    rows = np.zeros(len(hours), ENDED)
    rows["decided_at_ms"] = decided_at_ms
    rows["sequence"], rows["hour"], rows["reason"] = np.arange(len(hours)) + 1, hours, reason
    rows["other"] = 0 if reason == Reason.CANCELLED else 77
    return rows


def test_outcomes_of_many_hours_are_written_some_hours_at_a_time_the_nearest_first() -> None:
    recorder = Recorder()
    owed = Owed(recorder)
    hours = [*range(3 * HOURS_AT_ONCE, 0, -1)]
    owed.take(ended(hours))
    assert [hour for hour, *_ in recorder.recorded] == [*range(1, HOURS_AT_ONCE + 1)]
    assert len(owed.all()) == len(owed) == len(hours), "a checkpoint names all of them"
    while recorder.recorded:
        _, part, durable = recorder.recorded.pop(0)
        assert (part.claimed_at_ms, part.reason, part.batch_id) == (7, Reason.CANCELLED, 0)
        durable()
        assert len(recorder.recorded) <= HOURS_AT_ONCE
    assert owed.idle and not len(owed) and owed.lowest_ms() is None


def test_rows_of_one_hour_share_a_part_and_a_row_that_names_another_stands_alone() -> None:
    recorder = Recorder()
    owed = Owed(recorder)
    owed.take(ended([5, 5, 5]))
    owed.take(ended([6, 6], Reason.KEPT))
    parts = [(hour, part.sequences.tolist(), part.batch_id) for hour, part, _ in recorder.recorded]
    assert parts == [(5, [1, 2, 3], 0), (6, [1], 77), (6, [2], 77)]
    for hour, reason in ((5, Reason.CANCELLED), (6, Reason.KEPT)):
        wanted = Wanted(array(2, 4), np.zeros(2, np.int64), np.full(2, hour, np.uint32))
        found, rows = owed.find(wanted)
        assert (found.tolist(), rows["reason"].tolist()) == ([0], [reason]), "a row of another hour is another row"


def test_rows_that_name_rows_which_follow_one_another_share_a_part() -> None:
    recorder = Recorder()
    owed = Owed(recorder)
    rows = ended([5] * 6, Reason.MOVED)
    rows["other"] = [10, 11, 12, 14, 15, 16]
    rows["other_at_ms"] = [90, 90, 90, 90, 90, 91]
    rows["decided_at_ms"][4:] = 8
    owed.take(rows)
    parts = [(part.sequences.tolist(), part.batch_id, part.target_appended_at_ms) for _, part, _ in recorder.recorded]
    assert parts == [([1, 2, 3], 10, 90), ([4], 14, 90), ([5], 15, 90), ([6], 16, 91)]
    assert [part.claimed_at_ms for _, part, _ in recorder.recorded] == [7, 7, 8, 8]


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.KEPT])
def test_rule_B2_a_decision_is_taken_up_in_pieces_however_many_hours_and_parts_it_has(reason: int) -> None:
    recorder = Recorder()
    owed = Owed(recorder)
    hours = [number % 9_000 for number in range(ROWS_MAX)] if reason == Reason.CANCELLED else [5] * ROWS_MAX
    owed.take(ended(hours, reason))
    rows = 0
    while recorder.recorded:
        assert len(recorder.recorded) <= PARTS_AT_ONCE
        assert len({hour for hour, *_ in recorder.recorded}) <= HOURS_AT_ONCE
        recorded, recorder.recorded = recorder.recorded, []
        for _, part, durable in recorded:
            rows += len(part.sequences)
            durable()
    assert rows == ROWS_MAX and owed.idle and not len(owed) and not owed.parts()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_owed_is_found_until_its_outcomes_are_durable(seed: int) -> None:
    random, recorder = Random(seed), Recorder()
    owed = Owed(recorder)
    decisions: list[EndedRows] = []
    for number in range(30):
        rows = ended([random.randrange(4) for _ in range(random.choice([1, 1, 3, 40]))])
        rows["sequence"] = np.sort(random.sample(range(number * 1_000 + 1, number * 1_000 + 999), len(rows)))
        decisions.append(rows)
        owed.take(rows)
    model = {int(row["sequence"]): int(row["hour"]) for rows in decisions for row in rows}
    while recorder.recorded:
        asked = np.array(sorted(random.sample(sorted(model), 20)), np.uint64)
        hours = np.array([model[sequence] for sequence in asked.tolist()], np.uint32)
        hours[0] += 4  # A made-up receipt.
        found, rows = owed.find(Wanted(asked, np.zeros(20, np.int64), hours))
        left = {int(sequence) for _, part, _ in recorder.recorded for sequence in part.sequences}
        assert set(rows["sequence"].tolist()) == set(asked.take(found).tolist())
        assert {*asked[1:].tolist()} & left <= set(rows["sequence"].tolist()), "none is missed"
        assert int(asked[0]) not in rows["sequence"].tolist()
        named = in_one(owed.parts())["sequence"]
        assert left <= set(named.tolist()) and (named[1:] > named[:-1]).all()
        recorder.recorded.pop(random.randrange(len(recorder.recorded)))[2]()
    assert not len(owed) and not owed.parts()
