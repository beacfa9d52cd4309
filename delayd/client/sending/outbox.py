"""Outbox: messages that a producer was given and that have no outcome yet: single sends are gathered, batches are cut
in pieces.

Invariant: at most two batches of single sends for each delay server and lane are under way, and at most 16 pieces of
batches, so a slow server leads to fuller batches instead of more of them.

Single sends with keys have a lane of their own: a server looks their keys up, and refuses them while it can't, and no
other send waits for that.

When a gathering leaves depends on how many sends wait and how many batches are under way:

1. Nothing is under way: it leaves at the end of the loop's turn, with all sends of that turn. So a lone send never
   waits.
2. A crowd, CROWD_ROWS or more, leaves in the middle of the turn, if there is a slot.
3. One batch is under way, and fewer than COMPANY_ROWS sends wait: they leave when its acknowledgement comes, or when
   the linger is over. With COMPANY_ROWS or more they leave at the end of the turn.
4. Two batches are under way: all wait until one of them ends.

Slots: places that a bounded number of batches take while they are under way.

Invariant: no more are taken than the limit at that moment allows, and the task that has waited longest gets the next
one.

Gathering: single sends, of any subjects, that share a batch.

Invariant: a send costs two appends and leaves no object that the garbage collector would visit again and again: a row
is a tuple of plain values, which the collector stops tracking. Columns are made once, when the batch is bound to a
server.

Block: a piece of one `send_batch`, as columns, without a Python object for each message.

Invariant: errors and receipts name rows by their place in the caller's columns, also when a piece was split.

Packing: rows of a producer as one PRODUCER batch (docs/formats/batch.md).

Invariant: a batch that is packed here passes a delay server's intake: limits were checked before, layout and checksums
are made here. A row alone is made by `delayd.batch.batch.encode_single`.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Self

import numpy as np

from delayd.batch.batch import PADS, encode_pieces, encode_single, encode_subject_table, one_subject_table
from delayd.batch.columns import REGIONS, BatchKind, Buffer, ColumnArray, ColumnId, Int64s, ProducerPart
from delayd.client.instants import ServerClock
from delayd.client.limits import lengths_of
from delayd.client.sending.batch_sender import NO_KEYED_ROWS, BatchSender, Parcel, RowsWithKeys, Split, Waiter
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
from delayd.client.sending.send_options import NO_LABEL, Columns, Labels, SendItems, Single
from delayd.errors import DelaydError, QueueFull


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
    ordered = list(columns.items())
    heap: list[Buffer] = [table]
    begin = len(table)
    for column in REGIONS:
        if column in regions:
            ends, begin = _lay_out(*regions[column], begin, heap)
            ordered.append((column, ends))
    ordered.sort(key=itemgetter(0))
    count = len(columns[ColumnId.DELIVER_AT_MS])
    return encode_pieces(BatchKind.PRODUCER, part, count, ordered, heap, len(subjects))


def split_rows(sizes: Int64s) -> list[range]:
    """Cut rows of ``sizes`` bytes into runs within the targets; a row above them is a run of its own."""
    ends = sizes.cumsum()
    if 0 < len(sizes) <= ROWS_TARGET and ends[-1] <= BYTES_TARGET:
        return [range(len(sizes))]
    runs: list[range] = []
    start, before = 0, 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, before + BYTES_TARGET, side="right"))
        stop = max(min(stop, start + ROWS_TARGET), start + 1)
        runs.append(range(start, stop))
        start, before = stop, int(ends[stop - 1])
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

    def add(self, row: Single, byte_count: int, waiter: Waiter[Receipt]) -> None:
        """Take one row, which holds ``byte_count`` bytes; the outbox does the same without this call."""
        self.rows.append(row)
        self.waiters.append(waiter)
        self.held_bytes += byte_count

    def encode(self, part: ProducerPart, clock: ServerClock) -> Sequence[bytes]:
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
                # Each waiter gets a copy, because an exception that is raised in many places collects all of their
                # tracebacks.
                own = copy.copy(error)
                own.__cause__ = error.__cause__
                self._fail(waiter, own)

    def _fail(self, waiter: Waiter[Receipt], error: DelaydError) -> None:
        waiter.set_exception(error)
        self._unheard.add(waiter)

    def keyed_rows(self) -> RowsWithKeys:
        """See UnsentRows."""
        keyed = [(at, row[0].encode("ascii"), row[5].key) for at, row in enumerate(self.rows) if row[5] and row[5].key]
        return RowsWithKeys(*map(list, zip(*keyed, strict=True))) if keyed else NO_KEYED_ROWS

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named, others = type(self)(self._unheard), type(self)(self._unheard)
        chosen = set(rows)
        for at, (row, waiter) in enumerate(zip(self.rows, self.waiters, strict=True)):
            (named if at in chosen else others).add(row, row_bytes(row), waiter)
        return named, others


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
        elif len(self._failures) == 1 and not self._parts:
            # All rows failed together, so the error is the same as that of a single send.
            self._waiter.set_exception(self._failures[0].error)
        else:
            self._waiter.set_exception(BatchFailed.of(receipt, self._failures))


class Block:
    """See UnsentRows; all of one subject."""

    __slots__ = ("_columns", "_deliver_at_ms", "_progress", "_rows")

    def __init__(self, progress: Progress, rows: Int64s, columns: Columns) -> None:
        self._progress = progress
        self._rows = rows  # Their numbers in the call.
        self._columns = columns
        self._deliver_at_ms = columns.deliver

    @classmethod
    def cut(cls, progress: Progress, columns: Columns, run: range) -> Self:
        """The rows ``run`` of a call."""
        return cls(progress, np.arange(run.start, run.stop), columns.cut(run))

    @property
    def count(self) -> int:
        """See UnsentRows."""
        return len(self._rows)

    @property
    def held_bytes(self) -> int:
        """See UnsentRows; 0, because the caller holds the bodies and waits with them."""
        return 0

    def encode(self, part: ProducerPart, clock: ServerClock) -> Sequence[bytes]:
        """See UnsentRows."""
        columns = self._columns
        if columns.relative:
            self._deliver_at_ms = clock.latest_ms_column(columns.deliver)
        regions = {ColumnId.BODY_END: SendItems(columns.bodies, columns.body_bytes)}
        if columns.headers is not None:
            regions[ColumnId.HEADERS_END] = SendItems(columns.headers, lengths_of(columns.headers))
        packed: dict[ColumnId, ColumnArray] = {ColumnId.DELIVER_AT_MS: self._deliver_at_ms}
        if columns.labels is not None:
            columns.labels.add_to(packed, regions)
        return pack_rows(part, [columns.subject], packed, regions)

    def accept(self, accepted: Accepted) -> None:
        """See UnsentRows."""
        self._progress.accept(ReceiptPart(self._rows, self._deliver_at_ms, accepted))

    def fail(self, error: DelaydError) -> None:
        """See UnsentRows."""
        self._progress.fail(self._rows, error)

    def keyed_rows(self) -> RowsWithKeys:
        """See UnsentRows."""
        labels = self._columns.labels
        rows = [] if labels is None else labels.keyed_rows()
        if labels is None or not rows:
            return NO_KEYED_ROWS
        return RowsWithKeys(rows, [self._columns.subject] * len(rows), [labels.keys[row] for row in rows])

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See UnsentRows."""
        named = np.zeros(len(self._rows), bool)
        named[np.array(rows, np.int64)] = True
        return self._pick(np.flatnonzero(named)), self._pick(np.flatnonzero(~named))

    def _pick(self, rows: Int64s) -> Self:
        return type(self)(self._progress, self._rows[rows], self._columns.pick(rows))


SINGLES_UNDER_WAY = 2  # For each server: one batch is made durable while the next one travels.
# This many rows share the 0.3 ms that a batch costs both sides well enough; waiting for more is not worth it.
COMPANY_ROWS = 128
# A crowd's batch leaves at this size: further sends are gathered while it waits for its acknowledgement.
CROWD_ROWS = 512
PIECES_UNDER_WAY = 16  # 1,035 k messages/s with 16, 784 k with 4, 876 k with 64.
CLOSE_GATHERING_MS = 500.0  # A send may fail this much later than its own limit, while nothing gets through.


class Outbox:
    """Belongs to one loop; the caller has checked the rows and bounds their bytes."""

    def __init__(self, sender: BatchSender, linger_ms: float, timeout_ms: float, unheard: Unheard) -> None:
        self._sender = sender
        self._timeout_s = timeout_ms / 1000
        self.on_free: Callable[[int], None] = _nobody_waits  # Called with how many bytes of single sends have ended.
        self._loop = asyncio.get_running_loop()
        self._plain = _Lane(sender, linger_ms / 1000, self._leave, unheard)
        self._keyed = _Lane(sender, linger_ms / 1000, self._leave, unheard)
        self._pieces = SendSlots(lambda: PIECES_UNDER_WAY)
        self._under_way: dict[Parcel, asyncio.Future[None] | None] = {}  # Each with the future that `flush` waits for.
        self._tasks: set[asyncio.Task[None]] = set()  # Tasks of parcels that wait before they are carried.

    @property
    def unsent(self) -> int:
        """Messages that have no outcome yet."""
        gathered = self._plain.gathering.count + self._keyed.gathering.count
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

    async def add_batch(self, progress: Progress, columns: Columns) -> None:
        """Take the rows of one `send_batch`, piece by piece; returns when the last of them is under way."""
        for run in split_rows(columns.sizes):
            try:
                await self._pieces.take(self._loop.time() + self._timeout_s)
            except TimeoutError:
                rest = np.arange(run.start, len(columns.sizes))
                progress.fail(rest, QueueFull(f"{PIECES_UNDER_WAY} batches stayed under way for {self._timeout_s:g} s"))
                return
            parcel = self._sender.parcel(Block.cut(progress, columns, run))
            self._carry(parcel, self._pieces)

    async def flush(self) -> None:
        """Wait until everything that was added before has ended."""
        for lane in (self._plain, self._keyed):
            if lane.gathering.count:
                lane.close_gathering()
        ends: list[asyncio.Future[None]] = []
        for parcel, end in self._under_way.items():
            if end is None:
                end = self._under_way[parcel] = self._loop.create_future()
            ends.append(end)
        if ends:
            await asyncio.wait(ends)

    def _leave(self, parcel: Parcel, slots: SendSlots) -> None:
        """Carry a parcel as soon as it has a slot."""
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
        try:
            await slots.take(parcel.deadline)
        except TimeoutError:
            parcel.rows.fail(self._sender.given_up(parcel))
            self.on_free(parcel.rows.held_bytes)
            self._over(parcel)
            return
        self._carry(parcel, slots)

    def _ended(self, slots: SendSlots, parcel: Parcel, split: Split) -> None:
        slots.give()
        self.on_free(parcel.rows.held_bytes)
        if split:
            # Split parcels need no slot, because refusals are rare.
            self._spawn(self._carry_split(parcel, split))
        else:
            self._over(parcel)
        for lane in (self._plain, self._keyed):
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


class _Lane:
    """Single sends that share batches, until these leave."""

    def __init__(
        self, sender: BatchSender, linger_s: float, leave: Callable[[Parcel, SendSlots], None], unheard: Unheard
    ) -> None:
        self.gathering = Gathering(unheard)
        self.look_at = 1  # `look` is called when this many rows are gathered.
        self.slots = SendSlots(lambda: SINGLES_UNDER_WAY * max(1, len(sender.groups)))
        self._sender = sender
        self._linger_s = linger_s
        self._leave = leave
        self._unheard = unheard
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None  # Set while anything is gathered.

    def look(self) -> None:
        """Decide when the gathering leaves, at its first row and whenever it has become much larger."""
        count = self.gathering.count
        if count >= ROWS_TARGET or self.gathering.held_bytes >= BYTES_TARGET:
            self.close_gathering()
        elif count >= CROWD_ROWS:
            self.look_at = ROWS_TARGET
            if self.slots.free:
                self.close_gathering()
        elif count >= COMPANY_ROWS:
            self.look_at = CROWD_ROWS
            if self.slots.free:
                self._set_timer(self._loop.call_soon(self.flush))
        else:
            self.look_at = COMPANY_ROWS
            if self.slots.taken:
                self._set_timer(self._loop.call_later(self._linger_s, self.flush))
            else:
                self._set_timer(self._loop.call_soon(self.flush))

    def _set_timer(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def flush(self) -> None:
        """Send what is gathered, if it may leave now."""
        self._set_timer(None)
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
        parcel = self._sender.parcel(self.gathering)
        self.gathering = Gathering(self._unheard)
        self._leave(parcel, self.slots)


def _nobody_waits(_: int) -> None:
    """Nothing was queued by single sends."""
