"""Outbox: messages that a producer was given and that have no outcome yet: sends are gathered, large calls of
`send_batch` are cut in pieces.

Invariant: at most two batches of single sends for each delay server and lane are under way, and at most 16 of
`send_batch`, so a slow server leads to fuller batches instead of more of them.

Single sends and small pieces of `send_batch` have lanes, in which they share batches. What has keys has lanes of its
own: a server looks keys up, and refuses them while it can't, and nothing else waits for that. A large piece is a batch
by itself, and waits for a slot only.

When a gathering leaves depends on how many rows wait and how many batches are under way:

1. Nothing is under way: it leaves at the end of the loop's turn, with all rows of that turn. So a lone send never
   waits. Nor does a call of `send_batch`, whatever is under way, as long as there is a slot: its linger is 0.
2. A crowd, CROWD_ROWS single sends or JOINED_ROWS others, leaves in the middle of the turn, if there is a slot.
3. One batch is under way, and fewer than COMPANY_ROWS sends wait: they leave when its acknowledgement comes, or when
   the linger is over. With COMPANY_ROWS or more they leave at the end of the turn.
4. All slots are taken: all wait until one of their batches ends.

Slots: places that a bounded number of batches take while they are under way.

Invariant: no more are taken than the limit at that moment allows, and the task that has waited longest gets the next
one.

Gathering: single sends, of any subjects, that share a batch.

Invariant: a send costs two appends and leaves no object that the garbage collector would visit again and again: a row
is a tuple of plain values, which the collector stops tracking. Columns are made once, when the batch is bound to a
server.

Block: pieces of calls of `send_batch` that share a batch, as columns, without a Python object for each message.

Invariant: each call is told of its own rows only. Errors and receipts name rows by their place in the caller's columns,
also when a block was split.

    call 1 has rows 0 to 499, call 2 rows 0 to 299 ──▶ rows 0 to 799 of batch 7 ──▶ accepted from sequence 4,000 on
    call 1: sequences from 4,000 on; call 2: from 4,500 on. Row 510 is refused: row 10 of call 2 fails, and all others
    go again, in another batch.

Packing: rows of a producer as one PRODUCER batch (docs/formats/batch.md).

Invariant: a batch that is packed here passes a delay server's intake: limits were checked before, layout and checksums
are made here. A row alone is made by `delayd.batch.batch.encode_single`.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import (
    PADS,
    PRODUCER_PART,
    encode_columns,
    encode_single,
    encode_subject_table,
    one_subject_table,
    with_front,
)
from delayd.batch.columns import (
    DTYPES,
    HEADER_BYTES,
    BatchKind,
    Buffer,
    ColumnArray,
    ColumnId,
    Int64s,
    ProducerPart,
)
from delayd.client.instants import ServerClock
from delayd.client.limits import lengths_of
from delayd.client.sending.batch_sender import (
    NO_KEYED_ROWS,
    BatchSender,
    Parcel,
    RowsWithKeys,
    Split,
    UnsentRows,
    Waiter,
)
from delayd.client.sending.receipts import (
    Accepted,
    BatchFailed,
    BatchReceipt,
    Failure,
    Receipt,
    ReceiptPart,
    Unheard,
    receipts,
)
from delayd.client.sending.send_options import NO_LABEL, Columns, Labels, SendItems, Single, joined
from delayd.errors import DelaydError, InFlight, OutcomeUnknown, QueueFull, SlowDown
from delayd.hours import hour_of_ms
from delayd.kernel import choose
from delayd.wire.once import KEPT_MS, SendRecord


class SendSlots:
    """Belongs to one loop; the limit may change, and counts from the next take or give on."""

    __slots__ = ("_limit", "_waiting", "taken")

    def __init__(self, limit: Callable[[], int]) -> None:
        self.taken = 0
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> bool:
        """Whether a take would not wait."""
        return not self._waiting and self.taken < self._limit()

    def take_free(self) -> bool:
        """Take one if that needs no waiting; False if it does."""
        free = self.free
        self.taken += free
        return free

    async def take(self, deadline: float) -> None:
        """Take one; TimeoutError when none is free before the deadline, which is on the loop's clock."""
        if self.take_free():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # The slot was handed over in the same moment.
                self.give()
            raise

    def give(self) -> None:
        """Give one back; the task that has waited longest gets it."""
        self.taken -= 1
        while self._waiting and self.taken < self._limit():
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)


# A batch of this many rows takes a few ms to make and to check: nobody else waits longer for a turn.
ROWS_TARGET = 8_192
BYTES_TARGET = 4 << 20  # One message of the largest size may come on top, so the limit of 16 MiB is never near.


def pack_rows(
    part: ProducerPart,
    subjects: Sequence[bytes],
    columns: Mapping[ColumnId, ColumnArray],
    regions: Mapping[ColumnId, SendItems],
) -> tuple[bytes, bytes]:
    """Make the batch in two pieces, because the second one holds the only copy that is made of a body.

    Args:
        part: the kind part.
        subjects: the subject table; when it has several names, ``columns`` says which row has which.
        columns: all columns that have no region.
        regions: bodies, and what else a row has.
    """
    table = one_subject_table(subjects[0]) if len(subjects) == 1 else encode_subject_table(subjects)
    ordered: list[tuple[ColumnId, ColumnArray | SendItems]] = [*regions.items()]
    for column, values in columns.items():
        dtype = DTYPES[column]
        ordered.append((column, values if values.dtype == dtype else values.astype(dtype)))
    ordered.sort(key=itemgetter(0))
    count = len(columns[ColumnId.DELIVER_AT_MS])
    kind_part = PRODUCER_PART.pack(*part)
    packed, heap = _pack_columns(HEADER_BYTES + len(kind_part), table, ordered)
    return with_front(BatchKind.PRODUCER, kind_part, count, packed, heap, len(subjects))


def pack_columns(
    begin: int, table: bytes, columns: Sequence[tuple[ColumnId, ColumnArray | SendItems]]
) -> tuple[bytes, bytes]:
    """The directory and the columns of a batch, which stand in it from ``begin`` on, and its heap, which begins with
    the subject table; the twin of a compiled piece.
    """
    heap: list[Buffer] = [table]
    end = len(table)
    arrays: list[tuple[ColumnId, ColumnArray]] = []
    for column, values in columns:
        if isinstance(values, SendItems):
            ends, end = _lay_out(*values, end, heap)
            arrays.append((column, ends))
        else:
            arrays.append((column, values))
    return encode_columns(begin, arrays), b"".join(heap)


_pack_columns = choose("pack_columns", pack_columns)


def split_rows(sizes: Int64s) -> list[tuple[range, int]]:
    """Cut rows of ``sizes`` bytes into runs within the targets, each with its bytes; a row above them is a run of its
    own.
    """
    ends = sizes.cumsum()
    if 0 < len(sizes) <= ROWS_TARGET and ends[-1] <= BYTES_TARGET:
        return [(range(len(sizes)), int(ends[-1]))]
    runs: list[tuple[range, int]] = []
    start, before = 0, 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, before + BYTES_TARGET, side="right"))
        stop = max(min(stop, start + ROWS_TARGET), start + 1)
        end = int(ends[stop - 1])
        runs.append((range(start, stop), end - before))
        start, before = stop, end
    return runs


def _lay_out(items: Sequence[bytes], lengths: Int64s, begin: int, heap: list[Buffer]) -> tuple[Int64s, int]:
    """Put items behind one another on the heap, each at a multiple of 8; return their ends, and where the next one
    begins.
    """
    pads = -lengths & 7
    ends = (lengths + pads).cumsum()
    ends += begin
    following = int(ends[-1])
    ends -= pads
    first = int(pads[0])
    # Messages of one length are common: then their pads need no look at each.
    same = bool((pads == first).all())
    if same and not first:
        heap += items
    else:
        pieces: list[Buffer] = [b""] * (2 * len(items))
        pieces[0::2] = items
        pieces[1::2] = [PADS[first]] * len(items) if same else [PADS[pad] for pad in pads.tolist()]
        heap += pieces
    return ends, following


LABEL_BYTES = 160  # A label holds this much besides the bytes of its key and tags.
ROW_BYTES = 168  # A waiting row holds this much besides its body: the tuple, its number, and two references.


class Gathering:
    """See UnsentRows; each row has a waiter of its own."""

    __slots__ = ("_deliver_at_ms", "_unheard", "held_bytes", "rows", "waiters")

    def __init__(self, unheard: Unheard | None = None) -> None:
        self._unheard = Unheard() if unheard is None else unheard
        self.rows: list[Single] = []
        self.waiters: list[Waiter[Receipt]] = []
        self.held_bytes = 0
        self._deliver_at_ms: list[int] | tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Rows gathered."""
        return len(self.waiters)

    @property
    def size_bytes(self) -> int:
        """See Gathered."""
        return self.held_bytes

    def add(self, row: Single, byte_count: int, waiter: Waiter[Receipt]) -> None:
        """Take one row, which holds ``byte_count`` bytes; the outbox does the same without this call."""
        self.rows.append(row)
        self.waiters.append(waiter)
        self.held_bytes += byte_count

    def encode(self, part: ProducerPart, clock: ServerClock, log_id: int = 0) -> Sequence[bytes]:
        """See UnsentRows."""
        rows = self.rows
        if len(rows) == 1 and not rows[0][4] and rows[0][5] is None:
            subject, body, when, is_relative, _, _ = rows[0]
            due = clock.latest_ms(when) if is_relative else when
            self._deliver_at_ms = (due,)
            return (encode_single(part, due, subject.encode("ascii"), body),)
        subjects, bodies, deliver, are_relative, headers, labels = zip(*rows, strict=True)
        deliver_at_ms = np.array(deliver, np.int64)
        self._deliver_at_ms = deliver
        if any(are_relative):
            relative = np.array(are_relative, np.bool_)
            deliver_at_ms[relative] = clock.latest_ms_column(deliver_at_ms[relative])
            self._deliver_at_ms = deliver_at_ms.tolist()
        columns: dict[ColumnId, ColumnArray] = {ColumnId.DELIVER_AT_MS: deliver_at_ms}
        names: Sequence[str] = subjects[:1]
        if subjects.count(names[0]) < len(subjects):
            index = {subject: at for at, subject in enumerate(dict.fromkeys(subjects))}
            names = list(index)
            columns[ColumnId.SUBJECT] = np.array([index[subject] for subject in subjects], np.uint32)
        regions = {ColumnId.BODY_END: SendItems(bodies, lengths_of(bodies))}
        if any(headers):
            regions[ColumnId.HEADERS_END] = SendItems(headers, lengths_of(headers))
        if any(labels):
            Labels(*zip(*(label or NO_LABEL for label in labels), strict=True)).add_to(columns, regions)
        return pack_rows(part, [name.encode("ascii") for name in names], columns, regions)

    def outcomes(self, accepted: Accepted) -> Iterable[Receipt | DelaydError]:
        """What became of each row, in their order; only after `encode`."""
        return receipts(accepted, self._deliver_at_ms)

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        given = receipts(accepted, self._deliver_at_ms)
        for waiter, row, receipt in zip(self.waiters, self.rows, given, strict=True):
            # A cancelled caller has stopped waiting; its message is kept all the same.
            if not waiter.done():
                if isinstance(receipt, DelaydError):
                    self._fail(waiter, _named(receipt, row))
                else:
                    waiter.set_result(receipt)

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        for waiter in self.waiters:
            if not waiter.done():
                self._fail(waiter, copy_of(error))

    def _fail(self, waiter: Waiter[Receipt], error: DelaydError) -> None:
        waiter.set_exception(error)
        self._unheard.add(waiter)

    def keyed_rows(self) -> RowsWithKeys:
        """See UnsentRows."""
        keyed = [(at, row[0].encode("ascii"), row[5].key) for at, row in enumerate(self.rows) if row[5] and row[5].key]
        return RowsWithKeys(*map(list, zip(*keyed, strict=True))) if keyed else NO_KEYED_ROWS

    def together(self, rows: list[int]) -> list[int]:
        """See UnsentRows; each row stands for itself."""
        return rows

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named, others = type(self)(self._unheard), type(self)(self._unheard)
        chosen = set(rows)
        for at, (row, waiter) in enumerate(zip(self.rows, self.waiters, strict=True)):
            (named if at in chosen else others).add(row, row_bytes(row), waiter)
        return named, others


def copy_of(error: DelaydError) -> DelaydError:
    """The same error for one of several callers: one that is raised in many places collects all of their tracebacks."""
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    return own


def _named(error: DelaydError, row: Single) -> DelaydError:
    """The error of a row that met another one by its key, with the key and the subject in its text."""
    key = "" if row[5] is None else row[5].key.decode()
    text = f"{row[0]}, key {key!r}: {error.message}"
    return type(error)(text, retry_after_ms=error.retry_after_ms, **error.details)


def row_bytes(row: Single) -> int:
    """How many bytes a row holds in memory while it waits."""
    label = row[5]
    labelled = 0 if label is None else len(label.key) + len(label.tags) + LABEL_BYTES
    return len(row[1]) + len(row[4]) + labelled + ROW_BYTES


class RecordMet(NamedTuple):
    """There was a record with the key of a send before, so nothing was sent."""

    record: Receipt  # The receipt of that record.


class RecordedSend(NamedTuple):
    """A send that is to happen once, or its record alone; see docs/once.md."""

    record: Single  # Its body is made when the batch is bound: then the instants of the record are known.
    digest: bytes  # The digest of the request that wants the send.
    row: Single | None  # The message; None when the record stands alone.
    waiter: Waiter[Receipt | RecordMet]


class Recorded:
    """See UnsentRows; each message stands behind its record, and both are kept or neither is."""

    __slots__ = ("_gathering", "_records", "_sends", "count", "size_bytes")

    def __init__(self, *sends: RecordedSend) -> None:
        self._sends = list(sends)
        self.count = sum([_rows_of(send) for send in sends])
        self.size_bytes = 0  # The size of what was added.
        self._gathering = Gathering()
        self._records: list[SendRecord] = []  # One for each send, once the batch is bound.

    @property
    def held_bytes(self) -> int:
        """See UnsentRows; 0, because the callers hold the bodies and wait with them."""
        return 0

    def add(self, send: RecordedSend) -> None:
        """Take one more send."""
        self._sends.append(send)
        self.count += _rows_of(send)
        self.size_bytes += row_bytes(send.record) + (0 if send.row is None else row_bytes(send.row))

    def encode(self, part: ProducerPart, clock: ServerClock, log_id: int) -> Sequence[bytes]:
        """See UnsentRows."""
        gathering = self._gathering = Gathering()
        self._records = []
        for send in self._sends:
            ends_ms, due_ms = clock.latest_ms(send.record[2]), 0
            if send.row is not None:
                subject, body, when, relative, headers, label = send.row
                due_ms = clock.latest_ms(when) if relative else when
            record = SendRecord(send.digest, log_id, due_ms, ends_ms - KEPT_MS)
            self._records.append(record)
            gathering.rows.append((send.record[0], record.encode(), ends_ms, False, *send.record[4:]))
            if send.row is not None:
                gathering.rows.append((subject, body, due_ms, False, headers, label))
        return gathering.encode(part, clock)

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        outcomes = iter(self._gathering.outcomes(accepted))
        for send, kept in zip(self._sends, self._records, strict=True):
            of_record = next(outcomes)
            told = of_record if send.row is None else next(outcomes)
            if send.waiter.done():
                continue
            if isinstance(of_record, Receipt) and of_record.kept:
                send.waiter.set_result(RecordMet(of_record))
            elif isinstance(of_record, InFlight):
                send.waiter.set_exception(SlowDown("nobody can say now whether this request was done; send it again"))
            elif isinstance(told, DelaydError):
                send.waiter.set_exception(_named(told, send.row or send.record))
            else:
                filed_hour = hour_of_ms(max(kept.deliver_at_ms, accepted.accepted_at_ms))
                send.waiter.set_result(accepted_at(told, kept.accepted_at_ms(filed_hour)))

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        for send in self._sends:
            if not send.waiter.done():
                send.waiter.set_exception(copy_of(error))

    def keyed_rows(self) -> RowsWithKeys:
        """See UnsentRows."""
        gathering = Gathering()
        for send in self._sends:
            gathering.rows += [send.record] if send.row is None else [send.record, send.row]
        return gathering.keyed_rows()

    def together(self, rows: list[int]) -> list[int]:
        """See UnsentRows."""
        chosen = set(rows)
        found: list[int] = []
        for _, own in self._placed():
            if not chosen.isdisjoint(own):
                found += own
        return found

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        chosen = set(rows)
        named, others = type(self)(), type(self)()
        for send, own in self._placed():
            (others if chosen.isdisjoint(own) else named).add(send)
        return named, others

    def _placed(self) -> Iterator[tuple[RecordedSend, range]]:
        """Each send with its rows in the batch."""
        first = 0
        for send in self._sends:
            yield send, range(first, first := first + _rows_of(send))


def accepted_at(receipt: Receipt, accepted_at_ms: int) -> Receipt:
    """The same receipt with another instant of acceptance, as far as it is one of its own message."""
    if receipt.kept:
        if receipt.accepted_at_ms > receipt.deliver_at_ms:
            return receipt  # The earlier message is filed later than it was due, and this says where.
        return receipt._replace(accepted_at_ms=min(receipt.deliver_at_ms, accepted_at_ms))
    return receipt._replace(accepted_at_ms=accepted_at_ms, was_due=receipt.deliver_at_ms <= accepted_at_ms)


def _rows_of(send: RecordedSend) -> int:
    return 1 if send.row is None else 2


class Progress:
    """The results so far of the rows of one `send_batch`."""

    __slots__ = ("_failures", "_parts", "_remaining", "_waiter")

    def __init__(self, count: int, waiter: Waiter[BatchReceipt]) -> None:
        self._remaining = count
        self._waiter = waiter
        self._parts: list[ReceiptPart] = []
        self._failures: list[Failure] = []

    def accept(self, part: ReceiptPart) -> None:
        """Note that these rows are kept."""
        self._parts.append(part)
        self._finish(len(part.rows))

    def fail(self, rows: Int64s, error: DelaydError) -> None:
        """Note that these rows failed."""
        self._failures.append(Failure(rows, error))
        self._finish(len(rows))

    def _finish(self, count: int) -> None:
        self._remaining -= count
        assert self._remaining >= 0, "a row ended twice"
        if self._remaining or self._waiter.done():
            return
        receipt = BatchReceipt(self._parts)
        if not self._failures:
            self._waiter.set_result(receipt)
        elif not self._parts and self._failed_alike:
            # The error is the same as that of a single send.
            self._waiter.set_exception(self._failures[0].error)
        else:
            self._waiter.set_exception(BatchFailed.of(receipt, self._failures))

    @property
    def _failed_alike(self) -> bool:
        """Whether all failures are one, or name the same reason; an unknown outcome has a handle of its own."""
        kinds = {failure.error.code for failure in self._failures}
        return len(self._failures) == 1 or (len(kinds) == 1 and OutcomeUnknown.code not in kinds)


class Piece(NamedTuple):
    """Rows of one `send_batch` that travel in one batch."""

    progress: Progress
    rows: Int64s  # Their numbers in the call.
    columns: Columns


class Block:
    """See UnsentRows; pieces of one call, or of several."""

    __slots__ = ("_deliver_at_ms", "_pieces", "count", "size_bytes")

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = list(pieces)
        self._deliver_at_ms: list[Int64s] = []  # Of each piece, once the batch is bound.
        self.count = sum([len(piece.rows) for piece in pieces])
        self.size_bytes = 0  # The size of what was added.

    @property
    def held_bytes(self) -> int:
        """See UnsentRows; 0, because the callers hold the bodies and wait with them."""
        return 0

    def add(self, piece: Piece, size_bytes: int) -> None:
        """Take the rows of one more call, which have so many bytes."""
        self._pieces.append(piece)
        self.count += len(piece.rows)
        self.size_bytes += size_bytes

    def encode(self, part: ProducerPart, clock: ServerClock, log_id: int = 0) -> Sequence[bytes]:
        """See UnsentRows."""
        each: list[Columns] = []
        self._deliver_at_ms = instants = []
        for piece in self._pieces:
            columns = piece.columns
            each.append(columns)
            instants.append(clock.latest_ms_column(columns.deliver) if columns.relative else columns.deliver)
        return pack_rows(part, *joined(each, instants[0] if len(each) == 1 else np.concatenate(instants)))

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        first = 0
        for piece, deliver_at_ms in zip(self._pieces, self._deliver_at_ms, strict=True):
            count = len(piece.rows)
            own = accepted if count == self.count else accepted.part(first, count)
            piece.progress.accept(ReceiptPart(piece.rows, deliver_at_ms, own))
            first += count

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        if len(self._pieces) == 1:
            self._pieces[0].progress.fail(self._pieces[0].rows, error)
            return
        first = 0
        for piece in self._pieces:
            own = copy_of(error)
            if isinstance(error, OutcomeUnknown):
                own = OutcomeUnknown(error.message, replace(error.handle, first_row=first, row_count=len(piece.rows)))
                own.__cause__ = error.__cause__
            piece.progress.fail(piece.rows, own)
            first += len(piece.rows)

    def keyed_rows(self) -> RowsWithKeys:
        """See UnsentRows."""
        rows: list[int] = []
        subjects: list[bytes] = []
        keys: list[bytes] = []
        first = 0
        for piece in self._pieces:
            labels = piece.columns.labels
            own = [] if labels is None else labels.keyed_rows()
            if labels is not None and own:
                rows += [first + row for row in own]
                subjects += [piece.columns.subject] * len(own)
                keys += [labels.keys[row] for row in own]
            first += len(piece.rows)
        return RowsWithKeys(rows, subjects, keys) if rows else NO_KEYED_ROWS

    def together(self, rows: list[int]) -> list[int]:
        """See UnsentRows; each row stands for itself."""
        return rows

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named = np.zeros(self.count, bool)
        named[np.array(rows, np.int64)] = True
        return self._pick(named), self._pick(~named)

    def _pick(self, chosen: NDArray[np.bool_]) -> Self:
        ends = np.cumsum([len(piece.rows) for piece in self._pieces])[:-1]
        picks = zip(self._pieces, map(np.flatnonzero, np.split(chosen, ends)), strict=True)
        return type(self)(
            *[Piece(piece.progress, piece.rows[rows], piece.columns.pick(rows)) for piece, rows in picks if len(rows)]
        )


SINGLES_UNDER_WAY = 2  # For each server: one batch is made durable while the next one travels.
# This many rows share the 0.3 ms that a batch costs both sides well enough; waiting for more is not worth it.
COMPANY_ROWS = 128
# A crowd's batch leaves at this size: further sends are gathered while it waits for its acknowledgement.
CROWD_ROWS = 512
PIECES_UNDER_WAY = 16  # 1,035 k messages/s with 16, 784 k with 4, 876 k with 64.
# Calls of one turn share a batch of this many rows: in batches of 500 a row costs half as much again. Larger pieces go
# alone.
JOINED_ROWS = 2_000
JOINED_BYTES = 512 << 10  # Above this a batch costs what its bytes cost, whoever shares it.
CLOSE_GATHERING_MS = 500.0  # A send may fail this much later than its own limit, while nothing gets through.


class Outbox:
    """Belongs to one loop; the caller has checked the rows and bounds their bytes."""

    def __init__(self, sender: BatchSender, linger_ms: float, timeout_ms: float, unheard: Unheard) -> None:
        self._sender = sender
        self._timeout_s = timeout_ms / 1000
        self.on_free: Callable[[int], None] = _nobody_waits  # Called with how many bytes of single sends have ended.
        self._loop = asyncio.get_running_loop()
        self._pieces = SendSlots(lambda: PIECES_UNDER_WAY)

        def singles() -> _Lane[Gathering]:
            slots = SendSlots(lambda: SINGLES_UNDER_WAY * max(1, len(sender.groups)))
            return _Lane(lambda: Gathering(unheard), slots, self._leave, linger_ms / 1000, CROWD_ROWS)

        def blocks() -> _Lane[Block]:
            return _Lane(Block, self._pieces, self._leave, 0.0, JOINED_ROWS)

        self._plain, self._keyed = singles(), singles()
        self._plain_blocks, self._keyed_blocks = blocks(), blocks()
        self._recorded: _Lane[Recorded] | None = None  # Most producers need none.
        self._linger_s = linger_ms / 1000
        self._lanes: tuple[_Lane[Gathering] | _Lane[Block] | _Lane[Recorded], ...] = (
            *(self._plain, self._keyed),
            *(self._plain_blocks, self._keyed_blocks),
        )
        self._under_way: dict[Parcel, asyncio.Future[None] | None] = {}  # Each with the future that `flush` waits for.
        self._tasks: set[asyncio.Task[None]] = set()  # Tasks of parcels that wait before they are carried.

    @property
    def unsent(self) -> int:
        """Messages that have no outcome yet."""
        gathered = sum([lane.gathering.count for lane in self._lanes])
        return gathered + sum([parcel.rows.count for parcel in list(self._under_way)])

    def add(self, row: Single, byte_count: int, waiter: Waiter[Receipt]) -> None:
        """Take one send, which holds ``byte_count`` bytes."""
        label = row[5]
        lane = self._plain if label is None or not label.key else self._keyed
        gathering = lane.gathering
        # The same as `Gathering.add`: a call for each send would be a hundredth of its cost.
        gathering.rows.append(row)
        gathering.waiters.append(waiter)
        gathering.held_bytes += byte_count
        if len(gathering.rows) >= lane.look_at or gathering.held_bytes >= BYTES_TARGET:
            lane.look()

    def add_recorded(self, send: RecordedSend) -> None:
        """Take one send that is to happen once; its caller waits, and bounds how many there are."""
        lane = self._recorded
        if lane is None:
            groups = self._sender.groups
            slots = SendSlots(lambda: SINGLES_UNDER_WAY * max(1, len(groups)))
            lane = self._recorded = _Lane(Recorded, slots, self._leave, self._linger_s, CROWD_ROWS)
            self._lanes = (*self._lanes, lane)
        lane.gathering.add(send)
        if lane.gathering.count >= lane.look_at or lane.gathering.size_bytes >= BYTES_TARGET:
            lane.look()

    async def add_batch(self, progress: Progress, columns: Columns) -> None:
        """Take the rows of one `send_batch`, piece by piece; returns when the last of them is gathered or under way."""
        lane = self._keyed_blocks if columns.has_keys else self._plain_blocks
        for run, size_bytes in split_rows(columns.sizes):
            is_whole = len(run) == len(columns.bodies)
            piece = Piece(progress, np.arange(run.start, run.stop), columns if is_whole else columns.cut(run))
            if len(run) < JOINED_ROWS and size_bytes < JOINED_BYTES:
                self._gather(piece, size_bytes, lane)
                continue
            try:
                await self._pieces.take(self._loop.time() + self._timeout_s)
            except TimeoutError:
                rest = np.arange(run.start, len(columns.sizes))
                progress.fail(rest, self._no_slot())
                return
            self._carry(self._sender.parcel(Block(piece)), self._pieces)

    def _gather(self, piece: Piece, size_bytes: int, lane: _Lane[Block]) -> None:
        """Take a small piece, which shares a batch with others."""
        block = lane.gathering
        if block.count + len(piece.rows) > ROWS_TARGET or block.size_bytes + size_bytes > BYTES_TARGET:
            lane.close_gathering()
            block = lane.gathering
        block.add(piece, size_bytes)
        if block.count >= lane.look_at:
            lane.look()

    async def flush(self) -> None:
        """Wait until everything that was added before has ended."""
        for lane in self._lanes:
            if lane.gathering.count:
                lane.close_gathering()
        ends: list[asyncio.Future[None]] = []
        for parcel, end in self._under_way.items():
            if end is None:
                end = self._under_way[parcel] = self._loop.create_future()
            ends.append(end)
        if ends:
            await asyncio.wait(ends)

    def _leave(self, rows: UnsentRows, slots: SendSlots) -> None:
        """Carry rows as soon as they have a slot; their time limit begins now."""
        parcel = self._sender.parcel(rows)
        if slots.take_free():
            self._carry(parcel, slots)
        else:
            self._under_way[parcel] = None
            self._spawn(self._carry_when_free(parcel, slots))

    def _carry(self, parcel: Parcel, slots: SendSlots) -> None:
        """Carry a parcel that has a slot."""
        self._under_way.setdefault(parcel, None)
        self._sender.carry(parcel, partial(self._ended, slots))

    async def _carry_when_free(self, parcel: Parcel, slots: SendSlots) -> None:
        is_piece = slots is self._pieces
        try:
            await slots.take(parcel.deadline)
        except TimeoutError:
            parcel.rows.fail(self._no_slot() if is_piece else self._sender.given_up(parcel))
            self.on_free(parcel.rows.held_bytes)
            self._over(parcel)
            return
        if is_piece:
            # As of a piece that goes alone: the wait for a slot has had a limit of its own.
            parcel.deadline = self._loop.time() + self._timeout_s
        self._carry(parcel, slots)

    def _no_slot(self) -> QueueFull:
        return QueueFull(f"{PIECES_UNDER_WAY} batches stayed under way for {self._timeout_s:g} s")

    def _ended(self, slots: SendSlots, parcel: Parcel, split: Split) -> None:
        slots.give()
        self.on_free(parcel.rows.held_bytes)
        if split:
            # Split parcels need no slot, because refusals are rare.
            self._spawn(self._carry_split(parcel, split))
        else:
            self._over(parcel)
        for lane in self._lanes:
            if slots in (lane.slots, self._pieces):
                lane.flush()

    async def _carry_split(self, parcel: Parcel, split: Split) -> None:
        """Carry the parts that a parcel was split into; the parcel ends with them."""
        await asyncio.gather(*(self._carry_part(part, wait_s) for part, wait_s in split))
        self._over(parcel)

    async def _carry_part(self, parcel: Parcel, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        ended: asyncio.Future[Split] = self._loop.create_future()
        self._sender.carry(parcel, lambda _, split: ended.set_result(split))
        await asyncio.gather(*(self._carry_part(part, part_wait_s) for part, part_wait_s in await ended))

    def _over(self, parcel: Parcel) -> None:
        end = self._under_way.pop(parcel)
        if end is not None and not end.done():
            end.set_result(None)

    def _spawn(self, waiting: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(waiting)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Gathered(UnsentRows, Protocol):
    """Unsent rows that grow until they leave."""

    @property
    def size_bytes(self) -> int:
        """How many bytes they have."""


Rows = TypeVar("Rows", bound=Gathered)


class _Lane(Generic[Rows]):
    """Sends that share batches, until these leave."""

    def __init__(
        self,
        empty: Callable[[], Rows],
        slots: SendSlots,
        leave: Callable[[Rows, SendSlots], None],
        linger_s: float,
        crowd_rows: int,
    ) -> None:
        self.gathering = empty()
        self.look_at = 1  # `look` is called when this many rows are gathered.
        self.slots = slots
        self._empty = empty
        self._leave = leave
        self._linger_s = linger_s
        self._crowd_rows = crowd_rows
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None  # Set while anything is gathered.

    def look(self) -> None:
        """Decide when the gathering leaves, at its first row and whenever it has become much larger."""
        count = self.gathering.count
        is_crowd = count >= self._crowd_rows
        if count >= ROWS_TARGET or self.gathering.size_bytes >= BYTES_TARGET or (is_crowd and self.slots.free):
            self.close_gathering()
            return
        has_company = count >= COMPANY_ROWS
        self.look_at = ROWS_TARGET if is_crowd else self._crowd_rows if has_company else COMPANY_ROWS
        if (has_company and self.slots.free) or not self.slots.taken:
            self._set_timer(self._loop.call_soon(self.flush))
        elif self._timer is None:
            self._set_timer(self._loop.call_later(self._linger_s, self.flush))

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def flush(self) -> None:
        """Send what is gathered, if it may leave now."""
        if not self.gathering.count:
            return
        if self.slots.free:
            self.close_gathering()
        else:
            self._set_timer(self._loop.call_later(CLOSE_GATHERING_MS / 1000, self.close_gathering))

    def close_gathering(self) -> None:
        """End the gathering: it leaves when it has a slot, and its time limit begins now."""
        self._set_timer(None)
        self.look_at = 1
        gathering, self.gathering = self.gathering, self._empty()
        self._leave(gathering, self.slots)


def _nobody_waits(_: int) -> None:
    """Nothing was queued by single sends."""
