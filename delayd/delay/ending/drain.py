"""Drain: pending rows that go to another delay server, because an operator wants this one empty (docs/drain.md).

     find a piece ──▶ copy ──▶ decide: claim, log which batch they are in ──▶ send until taken ──▶ outcome DRAINED
     (Finder)         (MessageRequests, as for a move)                       (the courier)        (Owed)

Invariant: a batch is sent only when the decision about its rows is durable, and from then on until the other server has
taken it, always under the same number to the same server, which takes a number once. So a row is deliverable here or
there, and never at both. After a crash the batch is made again from the schedule logs.

An example: the rows 1, 2 and 3 go to the server B, as a batch whose number is drawn at random. The decision is durable,
B takes the batch, and this server is killed before it hears so. The next start finds three rows that have ended as
DRAINED and have no outcome: it makes the batch again, and sends it under the same number. B has taken that number, and
gives the answer of the first time. The outcomes are written, and nothing of the batch is left here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, ProducerPart
from delayd.batch.sequences import Locations, pack_locations
from delayd.delay.ending.copies import Copied, Leave, ToMove, copy_rows
from delayd.delay.ending.finder import Finder
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.ending.requested import Leaver, RequestWish, Whole
from delayd.delay.filing.hour_table import HourPart
from delayd.delay.filing.schedule_log import Sources, scan_fronts
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.ledger.owed import Leaving
from delayd.delay.reply import Reply
from delayd.errors import BadArgument, BadRequest, DamagedData, DataError, DelaydError, NotReady, SlowDown
from delayd.hours import INSTANT_MS_MAX
from delayd.machine.alarms import DAMAGED_AGAIN_MS
from delayd.machine.executor import Done, Executor, Priority
from delayd.machine.identity import Site
from delayd.machine.operating import LogLimit, Wait, WaitKind, counted
from delayd.outcome import MessageState
from delayd.wire.asked import AnswerRows, AskedWindow, DrainOrder, DrainProgress, Piece
from delayd.wire.frame import Head
from delayd.wire.heads import (
    INT_MAX,
    need_instant,
    need_u64,
)

log = logging.getLogger(__name__)
limited = LogLimit(log)

NEAR_MS = 10_000  # A row that is due so soon stays and is delivered here: it must not be late because it moves.
PIECE_ROWS = 32_768  # Rows of one piece: a tenth of a second of work, and a few MB where bodies are small.
LEAVING_MAX = 8  # Batches that no other server has taken: when this many wait, the next piece waits, too.
RETRY_AFTER_MS = 50

OnProgress = Callable[[DrainProgress | DelaydError], None]


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch that is on its way; ``body`` is None until it was made again after a start."""

    leaving: Leaving
    body: bytes | None
    refusal: str = ""  # Why the other server refuses it, or why it can't be made.
    again_ms: int = field(default=0)  # When to try to make it, in monotonic time.


class Drain:
    """Belongs to the loop; the `Letters` of a courier."""

    def __init__(
        self,
        site: Site,
        ledger: Ledger,
        sources: Sources,
        finder: Finder,
        requests: MessageRequests,
    ) -> None:
        self.on_new: Callable[[int], None] = lambda to: None
        # Calls back when everything that is durable now is filed, too.
        self.when_filed: Callable[[Callable[[], None]], None] = lambda done: None
        self.draw: Callable[[], int] = lambda: 0  # A random number of 64 bits.
        self._site = site
        self._hours = ledger.hours
        self._sources = sources
        self._finder = finder
        self._requests = requests
        self._owed = ledger.owed
        self._made: dict[int, bytes] = {}  # Batches of the commit that is under way, by number.
        self._batches: dict[int, _Batch] = {}  # By number, in the order of the decisions.
        self._making = False
        self._again = site.alarms.alarm(self._make_next)
        ledger.owed.on_leaving = self._leaves

    @property
    def rows(self) -> int:
        """Rows that are on their way."""
        return sum(len(batch.leaving.rows) for batch in self._batches.values())

    def piece(self, order: DrainOrder, answer: OnProgress) -> None:
        """Let the next pending rows of a walk leave, or count them; ``answer`` is called when that is durable.

        Raises:
            BadArgument, SlowDown: nothing is done.
        """
        if order.to == self._site.log_id:
            raise BadArgument("the messages are at this server; name another one that gets them")
        if order.to and len(self._batches) >= LEAVING_MAX:
            raise SlowDown("the other server has not taken the last messages yet", retry_after_ms=RETRY_AFTER_MS)
        window = AskedWindow(b"", 0, INSTANT_MS_MAX, order.place, order.until_sequence, PIECE_ROWS)
        self._finder.find(window, partial(self._found, order, answer))

    def _found(self, order: DrainOrder, answer: OnProgress, piece: Piece) -> None:
        told = partial(self._tell, answer, piece)
        # Rows that are due about now are handed over here. What is overdue waits for its target, which another server
        # can do as well.
        far = np.abs(piece.rows["deliver_at_ms"] - self._site.clock.now_ms()) > NEAR_MS
        if not order.to or not far.any():
            told(0)
            return
        leaver = Leaver(order.to, order.slots, self.draw, self._goes)
        asked = piece._replace(rows=piece.rows.compress(far)).asked()
        try:
            reply: Reply[AnswerRows] = Reply(partial(self._left, told, answer))
            self._requests.take(Whole(RequestWish.MOVE, asked, reply, asked.deliver_at_ms, leaver=leaver))
        except DelaydError as error:
            answer(error)

    def _left(self, told: Callable[[int], None], answer: OnProgress, what: AnswerRows | DelaydError) -> None:
        if isinstance(what, DelaydError):
            answer(what)
        else:
            told(int(np.count_nonzero(what["state"] == MessageState.DRAINED)))

    def _tell(self, answer: OnProgress, piece: Piece, drained: int) -> None:
        counts = (len(piece.rows), drained, piece.in_flight, piece.unread, self.rows, 0)
        answer(DrainProgress(*counts, piece.until_sequence, piece.place))

    def _goes(self, batch: Batch) -> None:
        """The decision about the rows of a batch is durable; `_leaves` follows at once."""
        self._made[batch.producer.producer_id] = bytes(batch.buffer[: batch.total_bytes])

    def _leaves(self, leaving: Leaving) -> None:
        batch = self._batches[leaving.number] = _Batch(leaving, self._made.pop(leaving.number, None))
        if batch.body is not None:
            self.on_new(leaving.to)
        elif self._again.at_ms is None:
            self._again.soon()

    # What the courier asks.

    def origins(self) -> list[int]:
        """The delay servers for which there is something."""
        return list({batch.leaving.to for batch in self._batches.values() if batch.body is not None})

    def waiting(self, origin: int) -> Iterator[Leaving]:
        """What is to be sent to one, in order."""
        for batch in list(self._batches.values()):
            if batch.leaving.to == origin and batch.body is not None and batch.leaving.number in self._batches:
                yield batch.leaving

    def batch_of(self, leaving: Leaving) -> bytes:
        """The batch."""
        body = self._batches[leaving.number].body
        if body is None:
            raise NotReady("it is being made")
        return body

    def accepted(self, leaving: Leaving, result: Head) -> None:
        """The other server has taken it: its rows get their outcomes.

        Raises:
            BadRequest: the answer does not say where they are.
        """
        base_sequence, appended_at_ms = need_u64(result, "base_sequence"), need_instant(result, "appended_at_ms")
        if not 0 < base_sequence <= INT_MAX:
            raise BadRequest(f"base_sequence is {base_sequence}, which no message has", field="base_sequence")
        if self._batches.pop(leaving.number, None) is not None:
            self._owed.arrived(leaving, base_sequence, appended_at_ms)

    def refused(self, leaving: Leaving, error: DelaydError) -> None:
        """The other server has refused it by name; it is sent again later."""
        number, what = leaving.number, error.message
        limited.warning("drained_refused", "drained_refused number=%d code=%s reason=%r", number, error.code, what)
        batch = self._batches.get(leaving.number)
        if batch is not None:
            batch.refusal = what

    def unread(self, leaving: Leaving, error: DelaydError) -> None:
        """Its batch is being made; it comes by itself."""

    def waits(self) -> Iterator[Wait]:
        """List what keeps rows on their way."""
        stuck: dict[int, list[_Batch]] = {}
        for batch in self._batches.values():
            if batch.refusal:
                stuck.setdefault(batch.leaving.to, []).append(batch)
        for to, batches in stuck.items():
            rows = sum(len(batch.leaving.rows) for batch in batches)
            yield WaitKind.DRAIN_REFUSED.wait(
                batches[0].refusal, messages=counted(rows, "message|messages"), to=f"{to:016x}"
            )

    # Batches that a start has found.

    def _make_next(self) -> None:
        """Make a batch again that a start has found, one at a time."""
        bare = [batch for batch in self._batches.values() if batch.body is None]
        if self._making or not bare:
            return
        batch = min(bare, key=lambda batch: batch.again_ms)
        if batch.again_ms > self._site.clock.monotonic_ms():
            self._again.at(batch.again_ms)
            return
        self._making = True
        self.when_filed(partial(self._make, batch))

    def _make(self, batch: _Batch) -> None:
        rows = batch.leaving.rows
        files = [file for hour in np.unique(rows["hour"]).tolist() for file in self._hours.files.parts(hour)]
        work = partial(_copy_again, self._site, self._sources.reader(), batch.leaving, files)
        self._site.worker.submit(work, partial(self._made_again, batch), Priority.NORMAL)

    def _made_again(self, batch: _Batch, done: Done[Batch]) -> None:
        self._making = False
        try:
            made = done.result()
        except (DataError, FileNotFoundError) as error:
            log.warning("drained_unread number=%d reason=%r", batch.leaving.number, str(error))
            batch.refusal = f"they can't be read here: {error}"
            batch.again_ms = self._site.clock.monotonic_ms() + DAMAGED_AGAIN_MS
        else:
            batch.body, batch.refusal = bytes(made.buffer[: made.total_bytes]), ""
            self.on_new(batch.leaving.to)
        self._make_next()


def _copy_again(site: Site, reader: Sources, leaving: Leaving, files: Sequence[HourPart]) -> Batch:
    """Make a batch from the schedule logs, which have all of its rows. On the worker thread.

    Raises:
        DataError, FileNotFoundError: some of them can't be read.
    """
    rows = leaving.rows
    sequences = rows["sequence"].copy()
    locations = np.zeros(len(rows), np.uint64)
    try:
        for file in files:
            _locate(site, file, sequences, locations, site.worker)
        if not locations.all():
            raise DamagedData(site.folder, 0, f"{np.count_nonzero(locations == 0)} rows are in no schedule log")
    except BaseException:
        reader.close()
        raise
    part = ProducerPart(leaving.number, 1, 1)
    moves = ToMove(
        np.arange(len(rows)),
        rows["hour"].copy(),
        sequences,
        locations,
        rows["deliver_at_ms"].copy(),
        Leave(part, every=True),
    )
    copied: Copied = copy_rows(reader, site.worker, moves)
    if copied.batch is None or len(copied.stay):
        raise DamagedData(site.folder, 0, f"{len(copied.stay)} rows can't be read")
    return copied.batch


def _locate(site: Site, file: HourPart, sequences: NDArray[np.uint64], locations: Locations, worker: Executor) -> None:
    """Fill in where a schedule log has some of the rows."""
    for stored in scan_fronts(site.disk, site.folder, site.log_id, file):
        in_file = stored.batch.uint64s(ColumnId.SEQUENCE)
        _, places, found = np.intersect1d(in_file, sequences, assume_unique=True, return_indices=True)
        if len(found):
            locations[found] = pack_locations(True, stored.offset, places.astype(np.uint16))
        worker.give_way()
