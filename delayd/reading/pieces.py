"""Pieces: the rows of an hour cut by sequence, small enough that the arrays of a piece stay in a processor's cache.

Invariant: each row of each log is in exactly one piece, and rows of one sequence are in the same; so the findings of
the pieces together are the findings of the hour.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from delayd.log.dispatch import OutcomeRows
from delayd.reading.audit import FiledByLog
from delayd.reading.columns import NO_UINT64S, ScheduleRows, UInt64s
from delayd.reading.dispatch import named_of, take_outcomes
from delayd.reading.join import Fields, Sorter
from delayd.reading.realtime import TargetRows

# A column of this many rows is half a MiB; a column of a whole hour would need new memory for each step.
PIECE_ROWS = 65_536
# Some work for each subject name is done in each piece, so a piece has at least this many rows for each name.
ROWS_A_NAME = 8


class Piece(NamedTuple):
    """The rows of each log within a range of sequences, by rising sequence."""

    schedule: ScheduleRows
    outcomes: OutcomeRows
    realtime: TargetRows
    accepted: FiledByLog
    parts: Fields  # The outcomes' parts and the realtime rows' batches, as fields; pieces share them where they can.
    batches: Fields


def cut(
    schedule: ScheduleRows,
    outcomes: OutcomeRows,
    realtime: TargetRows,
    accepted: FiledByLog,
    rows_max: int = PIECE_ROWS,
) -> Iterator[Piece]:
    """Cut an hour, or a part of one, whose rows rise in sequence; only the last piece has the part's
    ``accepted.before``.
    """
    names = len(schedule.subjects) + len(realtime.subjects) + len(accepted.rows.subjects)
    rows_max = max(rows_max, ROWS_A_NAME * names)
    # The rows that operators gave up are compared with a number for the whole hour, so that hour is not cut.
    if len(schedule) <= rows_max or accepted.dropped:
        yield Piece(schedule, outcomes, realtime, accepted, Fields(outcomes.parts), Fields(realtime.batches))
        return
    parts, batches = Fields(outcomes.parts), Fields(realtime.batches)
    bounds = np.unique(schedule.sequence[rows_max::rows_max])
    columns = schedule.sequence, outcomes.sequences, realtime.sequence, accepted.rows.sequence
    left_out = np.sort(schedule.left_out)
    places = [_places(column, bounds) for column in (*columns, accepted.ended["sequence"], left_out)]
    before = accepted.before
    for number in range(len(bounds) + 1):
        filed, decided, stored, taken, over, bare = (slice(at[number], at[number + 1]) for at in places)
        piece = schedule.take(filed)
        last = number == len(bounds)
        rows, ended = accepted.rows.take(taken), accepted.ended[over]
        said = accepted._replace(rows=rows, ended=ended, before=before if last else None)
        before = None if before is None else before + piece.filed_count()
        yield Piece(
            replace(piece, left_out=left_out[bare]),
            own := take_outcomes(outcomes, decided),
            held := _stored_of(realtime, stored),
            said,
            parts if own.parts is outcomes.parts else Fields(own.parts),
            batches if held.batches is realtime.batches else Fields(held.batches),
        )


def by_sequence(outcomes: OutcomeRows, sorter: Sorter | None = None) -> OutcomeRows:
    """The outcomes by rising sequence, those of one sequence in their order; they are used up."""
    if _rises(outcomes.sequences):
        return outcomes
    shared = {"deliver_at_ms": outcomes.deliver_at_ms, "content_hash": outcomes.content_hash}
    sequences, (due, hashes), (part_of,) = (sorter or Sorter()).sort(outcomes.sequences, shared, [outcomes.part_of])
    return OutcomeRows(sequences, due, outcomes.parts, part_of, hashes)


def stored_by_sequence(rows: TargetRows, sorter: Sorter) -> TargetRows:
    """The rows of targets by rising sequence, those of one sequence in their order; they are used up."""
    if _rises(rows.sequence):
        return rows
    shared = {"deliver_at_ms": rows.deliver_at_ms, "content_hash": rows.hashes()}
    sequence, (due, hashes), (batch_of,) = sorter.sort(rows.sequence, shared, [rows.batch_of])
    return TargetRows(sequence, due, batch_of, rows.batches, rows.targets, rows.subjects, hashes)


def _rises(sequences: UInt64s) -> bool:
    return bool((sequences[1:] >= sequences[:-1]).all())


def _places(sequences: UInt64s, bounds: UInt64s) -> list[int]:
    """Where the pieces begin in a column, and where the last one ends."""
    return [0, *np.searchsorted(sequences, bounds).tolist(), len(sequences)]


def _stored_of(stored: TargetRows, rows: slice) -> TargetRows:
    batches, batch_of = named_of(stored.batches, stored.batch_of[rows])
    hashes = NO_UINT64S if stored.content_hash is None else stored.content_hash[rows]
    columns = stored.sequence[rows], stored.deliver_at_ms[rows], batch_of
    return TargetRows(*columns, batches, stored.targets, stored.subjects, hashes)
