"""Moving: it copies pending messages, with all that their senders gave, into a batch with other due instants, or into
one for another delay server.

Runs on the worker thread. Invariant: every byte of a moved message was verified when it was read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import (
    BYTES_MAX,
    KIND_COLUMNS,
    MOVED_PRODUCER_ID,
    ROWS_MAX,
    Batch,
    BatchKind,
    ColumnId,
    Columns,
    Int64s,
    ProducerPart,
    parse,
)
from delayd.delay.filing.sources import Sources
from delayd.errors import DamagedData, Shortage
from delayd.executor import Executor
from delayd.gather import Pick, compose_new, gather, reorder
from delayd.location import ROW_BITS, ROW_MASK, SCHEDULE_BIT, Locations
from delayd.names import Names, slots_of_names
from delayd.sequences import Indices, Sequences
from delayd.wire.slots import SlotSet

log = logging.getLogger(__name__)

COPY_ROWS = 8_192  # Rows of one batch that the server makes.
COPY_BYTES = 4 << 20  # Their bodies and headers; one message of the largest size may come on top.
LEAVE_ROWS = 32_768  # Rows of one batch that goes to another delay server, and their bodies and headers.
LEAVE_BYTES = 8 << 20
READ_BYTES = 32 << 20  # Batches that are read for it; the last one may come on top.
MOVED_PART = ProducerPart(MOVED_PRODUCER_ID, 0, 0)
NO_ROWS: Indices = np.empty(0, np.intp)

_KIND = KIND_COLUMNS[BatchKind.PRODUCER]
# What the sender of a key wanted was decided when the message was accepted.
_COLUMNS = tuple(column for column in _KIND.kept if column != ColumnId.ROW_FLAGS)


class Leave(NamedTuple):
    """Rows go to another delay server (docs/drain.md): those without a key, those whose keys fall into ``slots``, or
    ``every`` row.
    """

    part: ProducerPart  # Of the batch in which they go.
    slots: SlotSet | None = None
    every: bool = False

    def are_chosen(self, batch: Batch, rows: Int64s) -> NDArray[np.bool_]:
        """Which of some rows of a batch go."""
        if self.every:
            return np.ones(len(rows), np.bool_)
        keyed = batch.keyed_rows() if ColumnId.KEY_END in batch.offsets else NO_ROWS
        chosen = np.full(batch.count, self.slots is None)
        if self.slots is None:
            chosen[keyed] = False
        elif len(keyed):
            chosen[keyed] = self.slots.take(slots_of_names(Names.of_batch(batch, keyed)))
        return chosen.take(rows)


class ToMove(NamedTuple):
    """Rows that are to be moved, by hour and then by sequence: columns of equal length."""

    rows: Indices  # Their places among the wanted rows of the request.
    hours: NDArray[np.uint32]
    sequences: Sequences
    locations: Locations
    wanted_at_ms: Int64s
    leave: Leave | None = None


class Copied(NamedTuple):
    """A batch of moved rows, and rows that stay for now: they can't be read, or are not among those that leave."""

    rows: Indices  # The places of the batch's rows, in its order.
    batch: Batch | None
    stay: Indices


def copy_rows(reader: Sources, worker: Executor, moves: ToMove) -> Copied:
    """Copy rows into one new batch, as many as fit; the others are left for the next time. Closes ``reader``."""
    leave = moves.leave
    rows_max, room, read_max = COPY_ROWS, COPY_BYTES, READ_BYTES
    if leave is not None:
        # A batch that is made again is as large as it was, wherever its rows stand by now.
        rows_max, room = (ROWS_MAX, BYTES_MAX) if leave.every else (LEAVE_ROWS, LEAVE_BYTES)
        read_max = sys.maxsize if leave.every else READ_BYTES
    hours = np.where(moves.locations < np.uint64(SCHEDULE_BIT), 0, moves.hours)
    order = np.lexsort((moves.locations, hours))[:rows_max]
    batches, hours = moves.locations.take(order) >> np.uint64(ROW_BITS), hours.take(order)
    changes = np.flatnonzero((batches[1:] != batches[:-1]) | (hours[1:] != hours[:-1])) + 1
    picks: list[Pick] = []
    taken: list[Indices] = []
    stay: list[Indices] = [np.empty(0, np.intp)]
    read_bytes = 0
    try:
        for low, high in pairwise([0, *changes.tolist(), len(order)]):
            of_batch = order[low:high]
            locations = moves.locations.take(of_batch)
            try:
                batch = reader.batch(int(moves.hours[of_batch[0]]), int(locations[0]))
            except (DamagedData, Shortage, FileNotFoundError) as error:
                log.warning("rows_not_moved rows=%d reason=%r", len(of_batch), str(error))
                stay.append(of_batch)
                continue
            numbers = (locations & np.uint64(ROW_MASK)).astype(np.int64)
            if leave is not None:
                chosen = leave.are_chosen(batch, numbers)
                stay.append(of_batch.compress(~chosen))
                of_batch, numbers = of_batch.compress(chosen), numbers.compress(chosen)
                if not len(numbers):
                    continue
            ends = np.cumsum(_sizes(batch, numbers))
            count = max(int(np.searchsorted(ends, room, "right")), 0 if picks else 1)
            if count:
                picks.append(Pick(batch, numbers[:count]))
                taken.append(of_batch[:count])
                room -= int(ends[count - 1])
            read_bytes += batch.total_bytes
            if count < len(of_batch) or read_bytes > read_max:
                break
            worker.give_way()
    finally:
        reader.close()
    left = moves.rows.take(np.concatenate(stay))
    if not picks:
        return Copied(np.empty(0, np.intp), None, left)
    picked = np.concatenate(taken)
    return Copied(moves.rows.take(np.sort(picked)), _moved_batch(picks, picked, moves), left)


def _moved_batch(picks: Sequence[Pick], chosen: Indices, moves: ToMove) -> Batch:
    """The batch of the picked rows, in the order of ``moves``; ``chosen`` says which of these the picks are."""
    back = np.argsort(chosen)
    rows = chosen.take(back)
    gathered = reorder(gather(picks, _KIND.regions, _COLUMNS), back)
    subjects, subject_of = _subjects(picks)
    sequences = moves.sequences.take(rows)
    origins = gathered.kept.get(ColumnId.ORIGIN_SEQUENCE, np.zeros(len(rows), np.uint64))
    others: dict[ColumnId, Columns] = dict(gathered.kept)
    others[ColumnId.DELIVER_AT_MS] = moves.wanted_at_ms.take(rows)
    # The first row of a message has no origin; each later one has the first one's sequence.
    others[ColumnId.ORIGIN_SEQUENCE] = np.where(origins == 0, sequences, origins)
    if len(subjects) > 1:
        others[ColumnId.SUBJECT] = subject_of.take(back)
    part = MOVED_PART if moves.leave is None else moves.leave.part
    batch = parse(compose_new(BatchKind.PRODUCER, part, gathered, subjects, others))
    batch.verified = True
    return batch


def _subjects(picks: Sequence[Pick]) -> tuple[list[bytes], NDArray[np.uint32]]:
    """The subjects of picked rows, and for each row which one it has."""
    numbers: dict[bytes, int] = {}
    columns: list[NDArray[np.uint32]] = []
    for batch, rows in picks:
        names = batch.subjects()
        of_row = np.zeros(len(rows), np.uint32)
        if ColumnId.SUBJECT in batch.offsets:
            of_row = batch.uint32s(ColumnId.SUBJECT).take(rows)
        used, places = np.unique(of_row, return_inverse=True)
        own = [numbers.setdefault(names[each], len(numbers)) for each in used.tolist()]
        columns.append(np.array(own, np.uint32).take(places))
    return list(numbers), np.concatenate(columns)


def _sizes(batch: Batch, rows: Int64s) -> Int64s:
    """The bytes that each of some rows has in the regions of its batch."""
    sizes = np.zeros(len(rows), np.int64)
    for column in _KIND.regions:
        if column in batch.offsets:
            starts, ends = batch.region(column)
            sizes += ends.take(rows) - starts.take(rows) + 7 & ~7
    return sizes
