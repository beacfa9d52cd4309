"""Parts: which messages an answer to a PULL holds, as stored batches that go out as they are; and plans: whole answers
before they leave, with the entries of the pull log that they become.

Invariant: a part's batch holds exactly its messages, verified; a batch that can't be read is quarantined and passed
over (rule L5).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, Buffer, ColumnArray, ColumnId
from delayd.batch.gather import ROW_COLUMNS_BYTES, Pick, compose, gather, row_bytes
from delayd.errors import DamagedData, RetryLater, Shortage, SlowDown
from delayd.log.pull import PullEntry, PullOp
from delayd.machine.clock import Clock

from .group_window import Offer
from .groups import Group
from .order import LOOKED_AT, LOOKED_AT_A_BATCH, Order
from .polls import Waiting
from .subject_index import SHORTAGE_RETRY_MS, Index, StoredBatches
from .terms import OPEN
from .unreadable import BATCHES_A_PULL, Rotten, UnreadableMessages

PARTS_MAX = 512  # Parts of a PULL's answer: each costs the loop some 20 us, and nobody else is served meanwhile.
OVERHEAD_BYTES = 512  # Header, directory and subject table of a batch, at most.
LOOKED_AHEAD = 4_096  # Messages of a batch that are compared with a filter at once, some 20 ns each.
PASSED = ("", "expired", "filtered")
_EXPIRED, _FILTERED = 1, 2


class Part(NamedTuple):
    """Neighbouring messages of one answer; ``batch`` holds exactly them."""

    consume_first: int
    rows: int
    attempt: int
    batch: Buffer
    due: memoryview = memoryview(b"")  # When each message was due, i64 each.
    passed: str = ""  # Why they go to nobody, as the counters call it; their batch is empty.


class NotWanted(Exception):
    """The next messages go to nobody."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part


class Parts:
    """Chooses the parts of an answer; changes a group only by quarantining messages, and by passing over those that
    nobody gets.
    """

    def __init__(
        self,
        index: Index,
        stored: StoredBatches,
        quarantine: UnreadableMessages,
        clock: Clock,
        pass_over: Callable[[Group, Part], None],
    ) -> None:
        self._index = index
        self._stored = stored
        self._quarantine = quarantine
        self._clock = clock
        self._pass_over = pass_over  # Counts messages as acknowledged that nobody gets.

    def of(self, group: Group, messages: int, size_bytes: int, parts_max: int) -> list[Part]:
        """The parts of an answer of up to so many messages, bytes and parts; none when of the batches that were looked
        at nothing can be read, or nothing is for this group.
        """
        parts: list[Part] = []
        rotten: list[Rotten] = []
        passed = 0
        while group.offers_any and not parts and len(rotten) + passed < BATCHES_A_PULL:
            try:
                if group.window.order is not None:
                    self._scan(group, group.window.order, messages)
                self._choose(parts, group, messages, size_bytes, parts_max)
                break  # There is something, or all that one pull may look at waits for other messages.
            except NotWanted as over:
                self._pass_over(group, over.part)
                passed += 1
            except Rotten as found:
                # Messages before the damaged batch are delivered first; the next pull begins at it.
                if not parts:
                    self._quarantine.take(group, found)
                    rotten.append(found)
            except RetryLater:
                # Messages that can't be found now are not lost; messages before them are delivered.
                if not parts:
                    raise
        while parts and parts[-1].passed:
            parts.pop()  # The next answer begins with them.
        if rotten:
            self._quarantine.tell(group, rotten)
        return parts

    def _choose(self, parts: list[Part], group: Group, messages: int, size_bytes: int, parts_max: int) -> None:
        """Add stored batches to the answer, whole ones wherever they fit, because these go out without a copy.

        Each offer is a range of messages, and lies in one stored batch or several. For each of these batches:

        1. All its messages are offered, and they fit the messages and bytes that may still be added: the batch goes out
           as it is.
        2. They do not fit, and the answer has something: the answer ends before this batch.
        3. They do not fit, and the answer is empty: as many messages as fit, one at least, are cut out of it.
        4. The offer names some of its messages only, and they fit: these are cut out, and the answer goes on.

        An example: a group is offered the messages 0 to 899, in stored batches of 300 each. A pull of at most 500 gets
        the first batch (case 1) and ends before the second, of which only 200 would fit (case 2). A pull of at most 200
        gets 200 messages of the first batch (case 3). If the messages 10 to 19 were given back, they are offered first:
        a pull of 500 gets these ten, cut out (case 4), and then goes on with the next offer.

        Where a batch has messages that expire, or the group wants only some, neighbours of one kind are a part: those
        that go to nobody are one without a batch (rule Q7), and an answer does not begin with such a part.
        """
        for offer in group.window.offers(group.subject.end):
            first, left = offer.consume_first, offer.messages
            while left and messages and size_bytes > 0 and len(parts) < parts_max:
                run = self._index.locate(group.subject, first)
                try:
                    batch = self._stored.fetch(run.offset)
                except Shortage as error:
                    raise SlowDown(error.message, retry_after_ms=SHORTAGE_RETRY_MS) from error
                except DamagedData as error:
                    raise Rotten(Offer(first, min(run.rows, left), offer.attempt), run, error) from error
                if run.row + run.rows > batch.count:
                    what = f"it names {run.row + run.rows} rows of the batch at {run.offset}, which has {batch.count}"
                    path = self._index.place(group.subject).folder
                    raise self._index.damaged(group.subject, DamagedData(path, 0, what))
                available = min(run.rows, left)
                if group.begins_at_ms or ColumnId.EXPIRES_AT_MS in batch.offsets or group.filter is not OPEN:
                    passed, available = self._alike(group, batch, run.row, min(available, max(messages, LOOKED_AHEAD)))
                    if passed:
                        hole = Part(first, available, offer.attempt, b"", passed=passed)
                        if not parts:
                            raise NotWanted(hole)
                        parts.append(hole)
                        first, left = first + available, left - available
                        continue
                rows = min(available, messages)
                whole = rows == batch.count
                buffer: Buffer = batch.buffer
                if not whole or batch.total_bytes > size_bytes:
                    fitting = _rows_that_fit(batch, run.row, rows, size_bytes)
                    if parts and (whole or fitting < available):
                        return
                    rows = max(1, fitting)
                    buffer = batch.buffer if rows == batch.count else _cut_out(batch, run.row, rows, group.subject.name)
                due = batch.due_column(run.row, rows)
                parts.append(Part(first, rows, offer.attempt, buffer, due))
                first, left, messages = first + rows, left - rows, messages - rows
                size_bytes -= len(buffer)

    def _scan(self, group: Group, order: Order, messages: int) -> None:
        """Read the keys of so many messages that enough may be pulled, or of as many as one pull may look at."""
        if not order.is_begun:
            group.window.begin_order()
        left = LOOKED_AT
        while left > 0 and not order.is_loaded:
            keys = self._keys(group, order.to_load.start, min(left, len(order.to_load)))
            order.load(keys)
            left -= max(len(keys), LOOKED_AT_A_BATCH)
        while left > 0 and order.is_loaded and order.ready < messages and order.wants_more(group.subject.end):
            keys = self._keys(group, order.scanned, min(left, group.subject.end - order.scanned))
            order.add(keys)
            left -= max(len(keys), LOOKED_AT_A_BATCH)

    def _keys(self, group: Group, first: int, count: int) -> Sequence[int]:
        """The ordering keys of neighbouring messages of one stored batch, up to ``count``; 0 for messages that hold up
        nobody: those without a key, those that the group does not want, and those that can't be read.
        """
        run = self._index.locate(group.subject, first)
        rows = min(run.rows, count)
        try:
            batch = self._stored.fetch(run.offset)
        except Shortage as error:
            raise SlowDown(error.message, retry_after_ms=SHORTAGE_RETRY_MS) from error
        except DamagedData:
            return [0] * rows  # It is quarantined when it is to be pulled.
        if ColumnId.ORDERING_KEY_HASH not in batch.offsets or run.row + rows > batch.count:
            return [0] * rows
        if batch.dispatch.claimed_at_ms < group.begins_at_ms:
            return [0] * rows
        keys = batch.uint64s(ColumnId.ORDERING_KEY_HASH)[run.row : run.row + rows]
        if group.filter is not OPEN:
            keys = keys * group.filter.matches(batch, run.row, rows)
        found: list[int] = keys.tolist()
        return found

    def _alike(self, group: Group, batch: Batch, row: int, rows: int) -> tuple[str, int]:
        """Why the messages from a row on go to nobody, "" when they are delivered, and of how many this is true, one
        behind the other.
        """
        kinds = why_nobody(group, batch, row, rows, self._clock)
        return PASSED[kinds[0]], int((kinds != kinds[0]).argmax()) or rows


def why_nobody(group: Group, batch: Batch, row: int, rows: int, clock: Clock) -> NDArray[np.uint8]:
    """Why messages of a group that nobody holds are passed over when their turn comes: uint8[rows], places in `PASSED`;
    0: they are delivered.
    """
    if batch.dispatch.claimed_at_ms < group.begins_at_ms:
        return np.full(rows, _FILTERED, np.uint8)
    kinds = np.zeros(rows, np.uint8)
    if group.filter is not OPEN:
        kinds[~group.filter.matches(batch, row, rows)] = _FILTERED
    kinds[are_over(batch, row, rows, clock)] = _EXPIRED
    return kinds


def are_over(batch: Batch, row: int, rows: int, clock: Clock) -> NDArray[np.bool_]:
    """Which messages have expired: bool[rows]; none, while nobody confirms the clock."""
    if ColumnId.EXPIRES_AT_MS not in batch.offsets or not clock.confirmed:
        return np.zeros(rows, np.bool_)
    expires = batch.int64s(ColumnId.EXPIRES_AT_MS)[row : row + rows]
    return (expires > 0) & (expires <= clock.now_ms())


def _rows_that_fit(batch: Batch, row: int, rows: int, size_bytes: int) -> int:
    if batch.total_bytes <= size_bytes:
        return rows
    # No more rows than this can fit, whatever they contain.
    rows = min(rows, max(1, size_bytes // ROW_COLUMNS_BYTES))
    sizes = np.cumsum(row_bytes(batch, row, rows))
    return int(np.searchsorted(sizes, np.int64(size_bytes - OVERHEAD_BYTES), side="right"))


def _cut_out(batch: Batch, row: int, rows: int, subject: str) -> bytes:
    picked = range(row, row + rows)
    gathered = gather([Pick(batch, picked)])
    sequences = batch.uint64s(ColumnId.SEQUENCE)[row : row + rows]
    others: dict[ColumnId, ColumnArray] = {ColumnId.CONTENT_HASH: batch.content_hashes()[row : row + rows]}
    if ColumnId.ACCEPTED_AT_MS in batch:
        others[ColumnId.ACCEPTED_AT_MS] = batch.int64s(ColumnId.ACCEPTED_AT_MS)[row : row + rows]
    return compose(BatchKind.DISPATCH, batch.dispatch, gathered, sequences, [subject.encode()], others).joined()


class Planned(NamedTuple):
    """The messages that a waiting PULL is about to get, by group; each group comes once, and has a part."""

    waiting: Waiting
    picked: list[tuple[Group, list[Part]]]

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of their pull sequences."""
        return [part for _, parts in self.picked for part in parts]


class PulledEntry(NamedTuple):
    """An entry of the pull log, and what it is about."""

    waiting: Waiting
    group: Group
    entry: PullEntry


def pulled(planned: Sequence[Planned], pull_first: int, nobody: int, now_ms: int) -> list[PulledEntry]:
    """The entries for planned answers, whose messages get the pull sequences from ``pull_first`` on. ``nobody`` is the
    incarnation in entries of messages that are passed over.
    """
    entries: list[PulledEntry] = []
    for waiting, picked in planned:
        for group, parts in picked:
            last: PullEntry | None = None
            for part in parts:
                if part.passed:
                    offer = Offer(part.consume_first, part.rows, part.attempt)
                    over = passed_over(group, offer, (nobody, pull_first), now_ms)
                    entries += [PulledEntry(waiting, group, entry) for entry in over]
                    last = None
                elif (
                    last is not None
                    and last.attempt == part.attempt
                    and last.consume_first + last.covered == part.consume_first
                    # Messages on the two sides of ``next`` are replayed differently, so they get two entries (rule Q5).
                    and part.consume_first != group.next
                ):
                    last = last._replace(covered=last.covered + part.rows)
                    entries[-1] = PulledEntry(waiting, group, last)
                else:
                    at = (waiting.incarnation, pull_first, part.consume_first, part.rows, now_ms)
                    last = PullEntry(PullOp.PULL, part.attempt, group.group_id, *at, waiting.lease_ms)
                    entries.append(PulledEntry(waiting, group, last))
                pull_first += part.rows
    return entries


def passed_over(group: Group, offer: Offer, at: tuple[int, int], now_ms: int) -> list[PullEntry]:
    """The entries by which messages count as acknowledged that nobody gets; ``at`` is an incarnation of nobody, and the
    pull sequence that comes next. They stand in one append, so that a crash keeps both or none.
    """
    first, count = offer.consume_first, offer.messages
    return [
        PullEntry(PullOp.PULL, offer.attempt, group.group_id, *at, first, count, now_ms),
        PullEntry(PullOp.ACK, 0, group.group_id, *at, 0, count, now_ms),
    ]
