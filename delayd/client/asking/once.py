"""Once: sends that are repeated with their answers, by a caller's name for the request (docs/once.md).

     send ──▶ record and message in one batch ──▶ the record is new: a receipt
                                              ├─▶ there was one ──▶ read it ──▶ the first receipt again
                                              └─▶ nothing new is taken: ask for the record by its key, and so on

Invariant: of all sends under one name, through whichever client, one is done as long as its record is kept.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np

from delayd.batch.columns import RECORD_FLAG, ColumnId
from delayd.batch.content import Names, slots_of_names
from delayd.batch.names import RECORD_SUBJECT
from delayd.client.asking.messages import GET, AskedRows, Asker, MessageInfo, asked_of, info_of
from delayd.client.instants import wish
from delayd.client.limits import NO_HEADERS
from delayd.client.sending.outbox import Outbox, RecordedSend, RecordMet, accepted_at
from delayd.client.sending.receipts import Receipt
from delayd.client.sending.send_options import ON_CONFLICT, Label, Sends, Single
from delayd.errors import BadExpiry, DelaydError, DiskReserve, HourFull, LogId, QuotaReached, SlowDown
from delayd.hours import hour_of_ms, hour_start_ms
from delayd.outcome import MessageState
from delayd.wire.asked import AskedKeys, AskedWindow, Content, Piece, Place
from delayd.wire.once import KEPT_MS, SendRecord

# Why a server takes nothing new, though it may have the record of what was sent before.
NOTHING_NEW = (QuotaReached, HourFull, DiskReserve, BadExpiry)
TRIES_MAX = 4  # A record that ends at the moment at which it is met.
FITS = 4_096  # Names that are tried at once; one in 1,024 falls into the wanted slot.
AHEAD_ROWS, AHEAD_MS = 4_096, 60_000  # Records that are read together: so many, due within so long.
KNOWN_MAX = 65_536  # Some 300 bytes each.
HOURS_LATE_MAX = 48  # A message that was accepted longer after its due instant is not looked for.
CLOCK_ERROR_MS = 5_000  # A client knows a server's clock better than this.

_RECORD = RECORD_SUBJECT.encode()


class SentOnce(NamedTuple):
    """What became of a send under a name.

    Fields:
        receipt: of its message, the same with each repetition but for `duplicate` and `replaced`; None of a `claim`,
            and when another request was done.
        digest: of the request that was done, which may be another one than this.
    """

    receipt: Receipt | None
    digest: bytes


class _Found(NamedTuple):
    """A record, as it was read."""

    sequence: int  # When it was taken, at the server of that time.
    body: bytes

    @property
    def record(self) -> SendRecord:
        """What it says; BadRequest when it says nothing, which is no matter of those that were read with it."""
        return SendRecord.decode(self.body)


def once_key(*parts: bytes) -> bytes:
    """The key of the record of a request, from all that names it: 43 letters, digits and signs."""
    named = b"".join([len(part).to_bytes(4, "little") + part for part in parts])
    return base64.urlsafe_b64encode(hashlib.sha256(named).digest()).rstrip(b"=")


class CheckedSends(Sends[tuple[Single, int | None]]):
    """Checks the arguments of a send, and gives it back: its row, and the window of a send with spread."""

    def _begin(self, meta: str) -> None:
        """Nobody is asked."""

    def _queue(self, row: Single) -> tuple[Single, int | None]:
        return row, None

    def _queue_spread(self, row: Single, window_ms: int) -> tuple[Single, int | None]:
        return row, window_ms

    def record(self, key: bytes) -> Single:
        """The record of a send, without its body."""
        when, relative = wish(timedelta(milliseconds=KEPT_MS), None, None, self._horizon)
        return RECORD_SUBJECT, b"", when, relative, NO_HEADERS, Label(key, RECORD_FLAG, b"")


class OnceSends:
    """Sends under names, for one producer, on one loop.

    Fields:
        checked: makes a row of the arguments of a send; its `send_nowait` raises what is wrong with them.
    """

    def __init__(self, outbox: Outbox, messages: Asker, checked: CheckedSends, timeout_ms: float) -> None:
        self.checked = checked
        self._outbox = outbox
        self._messages = messages
        self._timeout_ms = int(timeout_ms)
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._reading = 0  # How many sends read a record, or wait to.
        self._known: dict[tuple[int, int], _Found] = {}  # By log and sequence: what was read never changes.

    async def claim(self, key: bytes, digest: bytes) -> SentOnce:
        """Take a name for a request that is several sends, or whose message has a key. Raises as `send`."""
        return await self._send(key, digest, None)

    async def send(
        self,
        key: bytes,
        digest: bytes,
        row: Single,
        window_ms: int | None = None,
        refusal: DelaydError | None = None,
    ) -> SentOnce:
        """Send a message unless one was sent under this key; ``window_ms`` as of a send with spread.

        ``refusal``: why it can't be sent now, when the caller knows it; what was sent before is told all the same.
        Raises as a send: nothing is kept then, nor a record, but with OutcomeUnknown.
        """
        label = row[5]
        if label is not None and label.key:
            key = _fitted(key, row[0].encode("ascii"), label.key)
        return await self._send(key, digest, row, window_ms, refusal)

    async def _send(
        self,
        key: bytes,
        digest: bytes,
        row: Single | None,
        window_ms: int | None = None,
        refusal: DelaydError | None = None,
    ) -> SentOnce:
        for _ in range(TRIES_MAX):
            try:
                if refusal is not None:
                    raise refusal
                told = await self._queue(key, digest, row, window_ms)
            except NOTHING_NEW:
                record = await self._standing(key)
                if record is None:
                    raise
            else:
                if not isinstance(told, RecordMet):
                    return SentOnce(None if row is None else told, digest)
                record = told.record
            found = await self._read(record)
            if found is not None and (row is None or found.record.digest != digest):
                return SentOnce(None, found.record.digest)
            if found is not None and row is not None:
                return SentOnce(await self._first(found, row), digest)
        raise SlowDown("the record of this request ends at this moment; send again")

    async def _queue(self, key: bytes, digest: bytes, row: Single | None, window_ms: int | None) -> Receipt | RecordMet:
        """Send a record and its message."""
        if row is not None and window_ms is not None:
            row = await self._messages.place(row, window_ms)
        waiter: asyncio.Future[Receipt | RecordMet] = self._loop.create_future()
        self._outbox.add_recorded(RecordedSend(self.checked.record(key), digest, row, waiter))
        return await waiter

    async def _standing(self, key: bytes) -> Receipt | None:
        """The record with a key; None when there is none."""
        (owner,), (told,) = await self._messages.ask(GET, AskedRows(None, AskedKeys(_RECORD, [key])))
        if info_of(told).state is not MessageState.PENDING:
            return None
        sequence, due_ms, accepted_ms = (int(told[name]) for name in ("sequence", "deliver_at_ms", "accepted_at_ms"))
        return Receipt(LogId(int(owner)), sequence, due_ms, accepted_ms, False, False)

    async def _read(self, met: Receipt) -> _Found | None:
        """Read a record that a send has met; None when it has ended.

        When a long stream is repeated, thousands wait for records that were taken one behind the other. So whoever
        reads while others wait reads theirs, too: a server verifies a whole batch for each that is read alone.
        """
        self._reading += 1
        try:
            async with self._turn:
                place = met.log_id, met.sequence
                if place not in self._known:
                    if len(self._known) > KNOWN_MAX:
                        self._known.clear()
                    self._known |= await self._read_from(met, AHEAD_ROWS if self._reading > 1 else 1)
                return self._known.get(place)
        finally:
            self._reading -= 1

    async def _read_from(self, met: Receipt, rows_max: int) -> dict[tuple[int, int], _Found]:
        """Read a record, and those behind it, as many as an answer has."""
        from_ms, until_sequence = met.deliver_at_ms, 0
        to_ms = from_ms + AHEAD_MS
        if rows_max == 1:
            to_ms, until_sequence = from_ms + 1, met.sequence + 1
        window = AskedWindow(
            _RECORD,
            from_ms,
            to_ms,
            Place(hour_of_ms(from_ms), met.sequence - 1),
            until_sequence,
            rows_max=rows_max,
            content=Content.WHOLE,
        )
        return _records_of(met.log_id, await self._messages.find(met.log_id, window))

    async def _first(self, found: _Found, row: Single) -> Receipt:
        """The first answer to a send."""
        record = found.record
        receipt = Receipt(LogId(record.log_id), found.sequence + 1, record.deliver_at_ms, 0, False, True)
        earliest, latest = record.sent_at_ms - CLOCK_ERROR_MS, record.sent_at_ms + self._timeout_ms
        hours = {hour_of_ms(max(record.deliver_at_ms, at_ms)) for at_ms in (earliest, record.sent_at_ms, latest)}
        keeps = row[5] is not None and row[5].on_conflict == ON_CONFLICT["keep"]
        places = [accepted_at(receipt, record.accepted_at_ms(hour)) for hour in sorted(hours)]
        if len(places) == 1 and not keeps:
            return places[0]
        found_there = await self._found(row[0], places)
        if found_there is None:
            return accepted_at(receipt, record.sent_at_ms)
        first, info = found_there
        if info.state is MessageState.IN_FLIGHT and keeps:
            raise _unsure()
        if info.state is not MessageState.KEPT or info.other is None or info.other_at_ms is None:
            return first
        other = _other(first, info.other, info.other_at_ms)
        # It is filed in the hour in which it is due, or in the later one in which it was accepted.
        due_hour, last_hour = hour_of_ms(other.deliver_at_ms), hour_of_ms(first.accepted_at_ms)
        later = range(due_hour + 1, min(last_hour, due_hour + HOURS_LATE_MAX) + 1)
        if not later:
            return other
        places = [other, *(other._replace(accepted_at_ms=hour_start_ms(hour)) for hour in later)]
        found_there = await self._found(row[0], places)
        return other if found_there is None else found_there[0]

    async def _found(self, subject: str, places: Sequence[Receipt]) -> tuple[Receipt, MessageInfo] | None:
        """The true one of receipts that name one message in several hours, and what became of the message."""
        unsure: list[tuple[Receipt, MessageInfo]] = []
        for place in places:
            info = await self._messages.get_one(asked_of(subject, place))
            if info.state is MessageState.IN_FLIGHT:
                # So is every row that is asked for in an hour that is just being loaded, or can't be read.
                unsure.append((place, info))
            elif info.state is not MessageState.UNKNOWN:
                return place, info
        if len(unsure) > 1:
            raise _unsure()
        return unsure[0] if unsure else None


def _unsure() -> SlowDown:
    return SlowDown("nobody can say now where the message of this request is; send it again")


def _other(receipt: Receipt, sequence: int, due_ms: int) -> Receipt:
    """The receipt of a message for which an earlier one with its key stands."""
    return receipt._replace(
        sequence=sequence,
        deliver_at_ms=due_ms,
        accepted_at_ms=min(receipt.accepted_at_ms, due_ms),
        was_due=due_ms <= receipt.accepted_at_ms,
        kept=True,
    )


def _records_of(log_id: int, piece: Piece) -> dict[tuple[int, int], _Found]:
    """The records of a piece of a walk, by log and sequence."""
    batch = piece.batch
    if batch is None:
        return {}
    starts, ends = batch.region(ColumnId.BODY_END)
    origins = np.zeros(batch.count, np.uint64)
    if ColumnId.ORIGIN_SEQUENCE in batch:
        origins = batch.uint64s(ColumnId.ORIGIN_SEQUENCE)
    sequences = batch.uint64s(ColumnId.SEQUENCE)
    firsts = np.where(origins > 0, origins, sequences).tolist()
    bodies = [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    found = map(_Found, firsts, bodies)
    return {(log_id, sequence): each for sequence, each in zip(sequences.tolist(), found, strict=True)}


def _fitted(key: bytes, subject: bytes, message_key: bytes) -> bytes:
    """The key of the record of a message with a key: it falls into the slot of that key, so that one server decides
    about both (rule I4). Always the same for the same three.
    """
    (slot,) = slots_of_names(Names.of_lists([subject], [message_key])).tolist()
    first = 0
    while True:
        keys = [b"%b.%x" % (key, number) for number in range(first, first + FITS)]
        fits = np.flatnonzero(slots_of_names(Names.of_lists([_RECORD] * FITS, keys)) == slot)
        if len(fits):
            return keys[int(fits[0])]
        first += FITS
