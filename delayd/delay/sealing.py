"""Sealing: what an hour's two logs say, row by row, and whether they agree (rules S1, S4; docs/formats/seal.md).

Sets of sequences are compared, never counters; the digests are over rows in order of sequence. Runs on the worker
thread, in pieces whose time is spent in numpy and hashlib, which release the GIL.
"""

import hashlib
import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Batch, ColumnId
from delayd.log.dispatch import Outcome, OutcomeRows
from delayd.log.seal import OUTCOME_ROW, SCHEDULE_ROW, SealFacts

PIECE_ROWS = 8_192  # 576 KiB of outcome rows: one piece takes some 2 ms.
U32 = struct.Struct("<I")
COPIED = (  # What a row's part says of it.
    *("claimed_at_ms", "target_log_id", "epoch", "batch_id"),
    *("target_appended_at_ms", "target_offset", "outcome", "attempt"),
)


def compare(hour: int, batches: Iterable[Batch], outcomes: OutcomeRows) -> SealFacts | None:
    """Read the schedule side of an hour and hold its outcomes against it.

    Args:
        hour: hours since the epoch.
        batches: SCHEDULE batches, whose rows rise in sequence; each is let go when the next one is asked for.
        outcomes: every outcome of the hour, in any order.

    Returns:
        What a seal says, or None when not each scheduled sequence has exactly one outcome.
    """
    side = _ScheduleSide()
    for batch in batches:
        side.add(batch)
    scheduled = side.sequences()
    order = np.argsort(outcomes.sequences, kind="stable")
    rises = bool((scheduled[1:] > scheduled[:-1]).all())
    if not len(scheduled) or not rises or not np.array_equal(scheduled, outcomes.sequences.take(order)):
        return None
    kinds = np.bincount(outcomes.parts["outcome"], outcomes.parts["count"], max(Outcome) + 1)
    return SealFacts(
        hour=hour,
        rows=len(scheduled),
        body_bytes=side.body_bytes,
        dispatched=int(kinds[Outcome.DISPATCHED]),
        cancelled=int(kinds[Outcome.CANCELLED]),
        dead=int(kinds[Outcome.DEAD]),
        expired=int(kinds[Outcome.EXPIRED]),
        in_doubt=int(kinds[Outcome.IN_DOUBT]),
        due_min_ms=side.due_min_ms,
        due_max_ms=side.due_max_ms,
        schedule_sha256=side.sha256(),
        outcomes_sha256=_outcomes_sha256(outcomes, order),
    )


class _ScheduleSide:
    """The digest and figures of schedule batches, taken as they come."""

    def __init__(self) -> None:
        self.body_bytes = 0
        self.due_min_ms = np.iinfo(np.int64).max
        self.due_max_ms = np.iinfo(np.int64).min
        self._digest = hashlib.sha256()
        self._numbers: dict[bytes, int] = {}  # Subjects in the order of their first row.
        self._sequences: list[NDArray[np.uint64]] = []

    def add(self, batch: Batch) -> None:
        rows = np.empty(batch.count, SCHEDULE_ROW)
        sequences, due = batch.uint64s(ColumnId.SEQUENCE), batch.int64s(ColumnId.DELIVER_AT_MS)
        lengths = batch.body_bytes()
        rows["sequence"], rows["deliver_at_ms"], rows["body_bytes"] = sequences, due, lengths
        rows["subject"] = self._subjects(batch)
        self._digest.update(rows.view(np.uint8).data)
        # A view would keep the bodies in memory.
        self._sequences.append(sequences.copy())
        self.body_bytes += int(lengths.sum())
        self.due_min_ms = min(self.due_min_ms, int(due.min()))
        self.due_max_ms = max(self.due_max_ms, int(due.max()))

    def sequences(self) -> NDArray[np.uint64]:
        return np.concatenate(self._sequences) if self._sequences else np.empty(0, np.uint64)

    def sha256(self) -> bytes:
        for name in self._numbers:
            self._digest.update(U32.pack(len(name)) + name)
        return self._digest.digest()

    def _subjects(self, batch: Batch) -> NDArray[np.uint32] | int:
        names = batch.subjects()
        if ColumnId.SUBJECT not in batch:
            return self._number(names[0])
        column = batch.uint32s(ColumnId.SUBJECT)
        used, first = np.unique(column, return_index=True)
        numbers = np.zeros(len(names), np.uint32)
        for local in used[np.argsort(first)].tolist():
            numbers[local] = self._number(names[local])
        return numbers.take(column)

    def _number(self, name: bytes) -> int:
        return self._numbers.setdefault(name, len(self._numbers))


def _outcomes_sha256(outcomes: OutcomeRows, order: NDArray[np.intp]) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, len(order), PIECE_ROWS):
        piece = order[start : start + PIECE_ROWS]
        parts = outcomes.parts.take(outcomes.part_of.take(piece))
        rows = np.zeros(len(piece), OUTCOME_ROW)
        rows["sequence"], rows["deliver_at_ms"] = outcomes.sequences.take(piece), outcomes.deliver_at_ms.take(piece)
        for name in COPIED:
            rows[name] = parts[name]
        digest.update(rows.view(np.uint8).data)
    return digest.digest()
