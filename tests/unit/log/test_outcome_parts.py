"""Parts of outcomes that are written again in another file: each row keeps its reason, and the row that it names."""

from __future__ import annotations

import numpy as np

from delayd.batch import parse
from delayd.delay.quarantine import missing_parts
from delayd.log.dispatch import NewPart, Outcome, OutcomeRows, Reason, decode_outcomes, encode_outcomes

HOUR = 500_000


def part(reason: Reason, base: int, count: int, other: int) -> NewPart:
    sequences = np.arange(base, base + count, dtype=np.uint64)
    return NewPart(sequences, sequences.astype(np.int64), Outcome.CANCELLED, batch_id=other, reason=reason)


def rows_of(parts: list[NewPart]) -> OutcomeRows:
    return decode_outcomes([parse(encode_outcomes(HOUR, parts))] if parts else [])


def facts(rows: OutcomeRows) -> list[tuple[int, int, int]]:
    """Sequence, reason, and the row that is named."""
    others = rows.others(np.arange(len(rows.sequences)))
    reasons = rows.parts["reason"][rows.part_of]
    return list(zip(rows.sequences.tolist(), reasons.tolist(), others.tolist(), strict=True))


def test_outcomes_that_another_file_lacks_keep_their_reasons_and_the_rows_that_they_name() -> None:
    every = rows_of([part(Reason.MOVED, 1, 5, 101), part(Reason.CANCELLED, 10, 3, 0)])
    known = rows_of([part(Reason.MOVED, 3, 1, 103), part(Reason.CANCELLED, 11, 1, 0)])
    assert facts(rows_of(missing_parts(every, known))) == [
        (1, Reason.MOVED, 101),
        (2, Reason.MOVED, 102),
        (4, Reason.MOVED, 104),
        (5, Reason.MOVED, 105),
        (10, Reason.CANCELLED, 0),
        (12, Reason.CANCELLED, 0),
    ]


def test_some_rows_of_a_part_are_as_few_parts_as_can_be() -> None:
    moved, cancelled = part(Reason.MOVED, 1, 5, 101), part(Reason.CANCELLED, 1, 5, 0)
    chosen = np.array([True, True, False, True, False])
    assert [(each.sequences.tolist(), each.batch_id) for each in moved.only(chosen)] == [([1, 2], 101), ([4], 104)]
    assert [each.sequences.tolist() for each in cancelled.only(chosen)] == [[1, 2, 4]]
    assert moved.only(~chosen & chosen) == []
