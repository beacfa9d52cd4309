"""Copies: what rows hold, gathered into one batch from the batches that have them: for an answer, for a move to another
instant, or for another delay server.

     rows, in the order of the answer           by source batch          one batch
     h1 s5 │ h1 s6 │ h1 s9 │ h2 s7           ─▶ [s5 s7] [s6 s9]       ─▶ s5 s6 s9 s7

Runs on the worker thread. Invariant: every byte of a copied message was verified when it was read. Rows that fit no
more are left to the next copy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import (
    BYTES_MAX,
    KIND_COLUMNS,
    MOVED_PRODUCER_ID,
    ROWS_MAX,
    BatchKind,
    ColumnArray,
    ColumnId,
    Int64s,
    ProducerPart,
    SchedulePart,
)
from delayd.batch.content import NOT_STATED, Names, slots_of_names
from delayd.batch.gather import Gathered, GatheredItems, Pick, compose, compose_new, gather, reorder, row_bytes
from delayd.batch.sequences import NO_INDICES, ROW_BITS, ROW_MASK, SCHEDULE_BIT, Indices, Locations, Sequences
from delayd.delay.filing.schedule_log import Sources
from delayd.errors import DamagedData, Shortage
from delayd.hours import HOUR_MS
from delayd.machine.executor import Executor
from delayd.wire.asked import FOUND, AskedWindow, Content
from delayd.wire.asked import Place as WalkPlace
from delayd.wire.meta import SlotSet

log = logging.getLogger(__name__)

COPY_ROWS = 8_192  # Rows of one batch that the server makes.
COPY_BYTES = 4 << 20  # Their bodies and headers; one message of the largest size may come on top.
LEAVE_ROWS = 32_768  # Rows of one batch that goes to another delay server, and their bodies and headers.
LEAVE_BYTES = 8 << 20
READ_BYTES = 32 << 20  # Batches that are read for it; the last one may come on top.
MOVED_PART = ProducerPart(MOVED_PRODUCER_ID, 0, 0)
NO_COUNTS: Mapping[str, int] = MappingProxyType({})
CONTENT_BYTES_MAX = 4 << 20  # 16 walks hold as much as one answer may have, and one message always fits.
CACHE_BYTES = 64 << 20  # Batches of 65,536 rows that were sent in batches of 500; one piece is read at a time.
LABEL_COLUMNS_BYTES = 64  # All columns of one row of a batch without bodies.

# ``in_wheel``: the row stood in the wheel when the piece began.
_OWN = [("location", "<u8"), ("in_wheel", "?")]
LOCATED = np.dtype([*((name, FOUND[name]) for name in FOUND.names or ()), *_OWN])
LocatedRows = NDArray[np.void]  # Its dtype is LOCATED.

_KIND = KIND_COLUMNS[BatchKind.PRODUCER]
# What the sender of a key wanted was decided when the message was accepted.
_COLUMNS = tuple(column for column in _KIND.kept if column != ColumnId.ROW_FLAGS)
_SCHEDULE = KIND_COLUMNS[BatchKind.SCHEDULE]
_LABELS = (ColumnId.KEY_END, ColumnId.TAGS_END)


def by_batch(hours: NDArray[np.integer], locations: Locations, rows_max: int = sys.maxsize) -> list[Indices]:
    """The first ``rows_max`` rows, in an array for each source batch, in the order of the logs."""
    # A location in the message log names the batch alone, one in a schedule log together with the hour.
    logs = np.where(locations < np.uint64(SCHEDULE_BIT), 0, hours)
    order = np.lexsort((locations, logs))[:rows_max]
    batches, logs = locations.take(order) >> np.uint64(ROW_BITS), logs.take(order)
    ends = np.flatnonzero((batches[1:] != batches[:-1]) | (logs[1:] != logs[:-1])) + 1
    return np.split(order, ends) if len(order) else []


def batch_of(
    reader: Sources, hours: NDArray[np.integer], locations: Locations, rows: Indices, *, moves: bool = False
) -> Batch | None:
    """The batch of some rows that share one; None when it can't be read. ``moves``: they are not only looked at."""
    hour = int(hours[rows[0]])
    try:
        return reader.batch(hour, int(locations[rows[0]]))
    except (DamagedData, Shortage, FileNotFoundError) as error:
        if moves:
            log.warning("rows_not_moved rows=%d reason=%r", len(rows), str(error))
        else:
            log.warning("rows_not_found hour=%d reason=%r", hour, str(error))
        return None


def numbers_of(locations: Locations) -> Int64s:
    """The numbers of rows in their batches."""
    return (locations & np.uint64(ROW_MASK)).astype(np.int64)


class Leave(NamedTuple):
    """Rows go to another delay server (docs/drain.md): those without a key, those whose keys fall into ``slots``, or
    ``every`` row.
    """

    part: ProducerPart  # The batch in which they go has it.
    slots: SlotSet | None = None
    every: bool = False

    def are_chosen(self, batch: Batch, rows: Int64s) -> NDArray[np.bool_]:
        """Which of some rows of a batch go."""
        if self.every:
            return np.ones(len(rows), np.bool_)
        keyed = batch.keyed_rows() if ColumnId.KEY_END in batch.offsets else NO_INDICES
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
    """A batch of moved rows, and rows that stay for now: they can't be read, or are not among those that leave.

    Behind the moved rows the batch may have new ones, of which some end with the decision (docs/recurring.md).
    """

    rows: Indices  # The places of the moved rows, in the batch's order.
    batch: Batch | None
    stay: Indices
    ended: Indices = NO_INDICES  # Rows of the batch that end with the decision that begins them.
    occurrences: Mapping[str, int] = NO_COUNTS  # How many the new rows stand for, by what became of them.


class Rewrites(Protocol):
    """Makes the rows that take the place of others, when these are more than copies with another instant."""

    def work(self, reader: Sources, worker: Executor, moves: ToMove) -> Callable[[], Copied]:
        """The job of the worker thread, which closes the reader; called on the loop."""

    def is_durable(self, copied: Copied) -> None:
        """What a job has made has taken the place of rows, durably."""


class Contents(NamedTuple):
    """The rows that a piece has, with their batch; ``place``: where the next piece begins when some did not fit.

    ``unread`` counts source batches that could not be read; their rows are missing.
    """

    rows: LocatedRows
    batch: Batch | None = None
    unread: int = 0
    place: WalkPlace | None = None


def copy_rows(reader: Sources, worker: Executor, moves: ToMove) -> Copied:
    """Copy rows into one new batch, as many as fit; the others are left for the next time. Closes ``reader``."""
    leave = moves.leave
    rows_max, room, read_max = COPY_ROWS, COPY_BYTES, READ_BYTES
    if leave is not None:
        # A batch that is made again is as large as it was, wherever its rows stand by now.
        rows_max, room = (ROWS_MAX, BYTES_MAX) if leave.every else (LEAVE_ROWS, LEAVE_BYTES)
        read_max = sys.maxsize if leave.every else READ_BYTES
    picks: list[Pick] = []
    taken: list[Indices] = []
    stay: list[Indices] = [NO_INDICES]
    read_bytes = 0
    try:
        for of_batch in by_batch(moves.hours, moves.locations, rows_max):
            batch = batch_of(reader, moves.hours, moves.locations, of_batch, moves=True)
            if batch is None:
                stay.append(of_batch)
                continue
            numbers = numbers_of(moves.locations.take(of_batch))
            if leave is not None:
                chosen = leave.are_chosen(batch, numbers)
                stay.append(of_batch.compress(~chosen))
                of_batch, numbers = of_batch.compress(chosen), numbers.compress(chosen)
                if not len(numbers):
                    continue
            ends = np.cumsum(_sizes(batch, numbers, _KIND.regions))
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
        return Copied(NO_INDICES, None, left)
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
    others: dict[ColumnId, ColumnArray] = dict(gathered.kept)
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


def _sizes(batch: Batch, rows: Int64s, regions: Sequence[ColumnId]) -> Int64s:
    """The bytes that each of some rows has in these regions of its batch."""
    sizes = np.zeros(len(rows), np.int64)
    for column in regions:
        if column in batch:
            starts, ends = batch.region(column)
            sizes += ends.take(rows) - starts.take(rows) + 7 & ~7
    return sizes


def read_contents(rows: LocatedRows, window: AskedWindow, reader: Sources, worker: Executor) -> Contents:
    """Read what found rows hold, in their order: CONTENT_BYTES_MAX at most, or one message. It closes the reader.

    Neighbours of the answer may lie anywhere: of messages over two years that came in batches of 500, no two of one
    batch stand side by side. So each batch is read once for all rows that it has, first for their sizes, and then for
    those rows that fit; the reader keeps what it read in between.
    """
    hours = rows["accepted_at_ms"] // HOUR_MS
    try:
        sizes, unread = np.zeros(len(rows), np.int64), 0
        for own in by_batch(hours, rows["location"]):
            batch = batch_of(reader, hours, rows["location"], own)
            if batch is None:
                unread += 1
            else:
                sizes[own] = _content_sizes(batch, numbers_of(rows["location"].take(own)), window.content)
            worker.give_way()
        ends = np.cumsum(sizes)
        fitting = int(np.searchsorted(ends, CONTENT_BYTES_MAX, side="right"))
        # A message may be as large as a whole piece: the first one is taken in any case.
        fitting = max(fitting, int(np.searchsorted(ends, 0, side="right")) + 1)
        place = None
        if fitting < len(rows):
            place = WalkPlace(int(hours[fitting - 1]), int(rows[fitting - 1]["sequence"]))
        kept = np.flatnonzero(sizes[:fitting] > 0)
        chosen, hours = rows.take(kept), hours.take(kept)
        picks: list[Pick] = []
        picked: list[Indices] = []
        for own in by_batch(hours, chosen["location"]):
            batch = batch_of(reader, hours, chosen["location"], own)
            if batch is None:
                # It was there a moment ago, when its sizes were read.
                unread += 1
                continue
            picks.append(Pick(batch, numbers_of(chosen["location"].take(own))))
            picked.append(own)
            worker.give_way()
        if not picks:
            return Contents(chosen[:0], None, unread, place)
        kept = np.sort(np.concatenate(picked))
        chosen = chosen.take(kept)
        batch = _composed(picks, chosen, np.searchsorted(kept, np.concatenate(picked)), window)
        return Contents(chosen, batch, unread, place)
    finally:
        reader.close()


def _content_sizes(batch: Batch, numbers: Int64s, content: Content) -> Int64s:
    """How many bytes each row takes in an answer."""
    if content is Content.WHOLE:
        low, high = int(numbers.min()), int(numbers.max())
        return row_bytes(batch, low, high - low + 1).take(numbers - low)
    return LABEL_COLUMNS_BYTES + _sizes(batch, numbers, _LABELS)


def _composed(picks: list[Pick], rows: LocatedRows, order: NDArray[np.intp], window: AskedWindow) -> Batch:
    """One batch of ``rows``; pick by pick the rows are ``rows[order]``."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    left_out = _left_out(picks)
    others: dict[ColumnId, ColumnArray] = {}
    if window.content is Content.LABELS:
        gathered = gather(picks, _LABELS, _SCHEDULE.kept)
        none = GatheredItems(np.zeros(len(rows), np.int64), [])
        gathered = Gathered(gathered.deliver_at_ms, {**gathered.regions, ColumnId.BODY_END: none}, None, gathered.kept)
        left_out = np.concatenate([batch.body_bytes().take(numbers) for batch, numbers in picks])
        # The hash of what is left out can't be made here, and a source need not state one.
        others[ColumnId.CONTENT_HASH] = np.full(len(rows), NOT_STATED, np.uint64)
    else:
        gathered = gather(picks, _SCHEDULE.regions, _SCHEDULE.kept)
    if left_out.any():
        others[ColumnId.BODY_LEFT_OUT] = left_out.take(place).astype(np.uint32)
    part = SchedulePart(0, 0, int(rows[0]["accepted_at_ms"]) // HOUR_MS)
    made = compose(
        BatchKind.SCHEDULE, part, reorder(gathered, place), rows["sequence"].copy(), [window.subject], others
    )
    return parse(made.joined())


def _left_out(picks: list[Pick]) -> Int64s:
    """How long the bodies are that the sources leave out."""
    column = ColumnId.BODY_LEFT_OUT
    parts = [
        batch.uint32s(column).take(rows).astype(np.int64) if column in batch else np.zeros(len(rows), np.int64)
        for batch, rows in picks
    ]
    return np.concatenate(parts)
