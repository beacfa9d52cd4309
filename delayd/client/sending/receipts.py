"""Receipts: what the callers of a producer get back.

Receipt: tells the caller of a producer that its messages are kept, where, and when they are due.

Invariant: a receipt exists only for messages that a delay server has made durable (rule L2).

Rescheduled: what a producer is told about messages that it wanted moved to other instants (docs/keys.md).

Send future: the outcome of one send, for threads.

Invariant: it is set once, by the loop's thread; each waiting thread and each callback is told once.

Unheard: sends that have failed and whose outcome nobody has asked for, so that a close can say that they are lost.

Invariant: a failure is told once: by its future, or by the one warning of the close.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from functools import partial
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.client.instants import utc
from delayd.client.limits import is_number, need_callable, need_text
from delayd.errors import BadArgument, BatchMalformed, DelaydError, InFlight, KeyPending, LogId
from delayd.hours import INSTANT_MS_MAX
from delayd.log.hour import EndedRows, decode_ended, others_filed_at_ms
from delayd.outcome import Reason
from delayd.wire.asked import AnswerRows, RescheduleAnswer

Column = TypeVar("Column", bound=np.generic)

TOKEN_FIELDS_BYTES = 28  # log_id and sequence in 8 bytes each, two instants in 6 bytes each.
_TOKEN = struct.Struct(">QQIQ")
_LOW_64 = (1 << 64) - 1
# base64.b32encode takes five times as long, and each answer of a gateway has a token.
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [first + second for first in _LETTERS for second in _LETTERS]
_PAIR_BITS = range(230, -1, -10)
_LETTER_CODES = np.frombuffer(_LETTERS.encode(), np.uint8)
_LETTER_BITS = np.arange(35, -1, -5, dtype=np.uint64)
CHECK_BYTES = 2  # The front of a CRC-32C; with them a token has whole letters, 48 of them.

_NO_UINT8S: NDArray[np.uint8] = np.empty(0, np.uint8)
_NO_INT64S: Int64s = np.empty(0, np.int64)
_NO_UINT64S: NDArray[np.uint64] = np.empty(0, np.uint64)


class Accepted(NamedTuple):
    """A delay server's answer that one batch is durable; its row i has the sequence ``base_sequence + i``."""

    log_id: LogId
    base_sequence: int
    row_count: int
    accepted_at_ms: int
    duplicate: bool
    decided: bytes = b""  # Rows of `delayd.log.hour`, for those that met others by their keys; see `Verdicts`.

    def part(self, first: int, count: int) -> Accepted:
        """The same answer about ``count`` rows of the batch, from row ``first`` on."""
        decided = self.decided
        if decided:
            rows = decode_ended(decided)
            place = _new_rows(rows) - np.uint64(self.base_sequence)
            decided = rows[(place >= first) & (place < first + count)].tobytes()
        return self._replace(base_sequence=self.base_sequence + first, row_count=count, decided=decided)


class SendVerdict(IntEnum):
    """What became of a message that was sent with a key (docs/keys.md).

    ACCEPTED: it is kept. KEPT: an earlier message with the key stands for it. REPLACED: it is kept, and the earlier
    message has ended. REJECTED and IN_FLIGHT: it is not kept, and the earlier message stays as it is.
    """

    ACCEPTED = 0
    KEPT = 1
    REPLACED = 2
    REJECTED = 3
    IN_FLIGHT = 4


_VERDICT_OF = np.zeros(max(Reason) + 2, np.uint8)  # By reason; 0 where a send can't have it.
_VERDICT_OF[[Reason.REPLACED, Reason.REJECTED, Reason.KEPT, Reason.IN_FLIGHT]] = [
    SendVerdict.REPLACED,
    SendVerdict.REJECTED,
    SendVerdict.KEPT,
    SendVerdict.IN_FLIGHT,
]


class Receipt(NamedTuple):
    """Says that one message is kept. No other message ever has the same (log_id, sequence).

    Example::

        receipt = producer.send("orders.cancel", b"42", delay=timedelta(minutes=30))
        print("kept as", receipt.sequence, "of log", receipt.log_id, "due at", receipt.deliver_at)

    Fields:
        log_id: names the delay server whose log holds the message.
        sequence: the message's number in that log.
        deliver_at_ms: when the message is due, in milliseconds since the epoch.
        accepted_at_ms: when the delay server made the message durable, by that server's clock.
        was_due: whether the message was due already when it was accepted; then it is delivered at once.
        duplicate: whether the server knew the message from an earlier try. It has kept the message once.
        kept: whether an earlier message with this key stands for this one, which is not kept. ``sequence`` and
            ``deliver_at_ms`` are then those of the earlier message, and ``accepted_at_ms`` is not exact.
        replaced: the sequence of the earlier message with this key, which this one replaced; None when there was none.
    """

    log_id: LogId
    sequence: int
    deliver_at_ms: int
    accepted_at_ms: int
    was_due: bool
    duplicate: bool
    kept: bool = False
    replaced: int | None = None

    @property
    def deliver_at(self) -> datetime:
        """When it is due, in UTC."""
        return utc(self.deliver_at_ms)

    @property
    def accepted_at(self) -> datetime:
        """When the delay server made it durable, in UTC and by that server's clock."""
        return utc(self.accepted_at_ms)

    @property
    def token(self) -> str:
        """The receipt as one word of 48 letters and digits, for a database or a command line; see `of_token`."""
        instants = self.deliver_at_ms << 48 | self.accepted_at_ms
        fields = _TOKEN.pack(self.log_id, self.sequence, instants >> 64, instants & _LOW_64)
        packed = int.from_bytes(fields + _check_of(fields), "big")
        return "".join([_PAIRS[packed >> bits & 1023] for bits in _PAIR_BITS])

    @classmethod
    def of_token(cls, token: str) -> Receipt:
        """The receipt that a token stands for.

        `cancel`, `reschedule` and `get` take it as they take the receipt itself; ``duplicate``, ``kept`` and
        ``replaced`` are not part of a token.

        Raises:
            BadArgument: it was mistyped, cut, or is no token.
        """
        try:
            packed = base64.b32decode(need_text("token", token).strip().upper())
        except ValueError:
            packed = b""
        fields, check = packed[:TOKEN_FIELDS_BYTES], packed[TOKEN_FIELDS_BYTES:]
        if len(packed) != TOKEN_FIELDS_BYTES + CHECK_BYTES or check != _check_of(fields):
            raise BadArgument(f"token {token.strip()[:80]!r} is no receipt; it was mistyped or cut")
        deliver_at_ms, accepted_at_ms = int.from_bytes(fields[16:22], "big"), int.from_bytes(fields[22:], "big")
        log_id, sequence = LogId(int.from_bytes(fields[:8], "big")), int.from_bytes(fields[8:16], "big")
        return cls(log_id, sequence, deliver_at_ms, accepted_at_ms, deliver_at_ms <= accepted_at_ms, False)


def tokens_of(
    log_ids: NDArray[np.uint64], sequences: NDArray[np.uint64], deliver_at_ms: Int64s, accepted_at_ms: Int64s
) -> list[str]:
    """The tokens of many receipts, given as columns; see `Receipt.token`."""
    count = len(sequences)
    fields = np.empty((count, TOKEN_FIELDS_BYTES + CHECK_BYTES), np.uint8)
    begin = 0
    for column, size in ((log_ids, 8), (sequences, 8), (deliver_at_ms, 6), (accepted_at_ms, 6)):
        fields[:, begin : begin + size] = column.astype(">u8").view(np.uint8).reshape(count, 8)[:, 8 - size :]
        begin += size
    packed = fields[:, :begin].tobytes()
    checks = b"".join([_check_of(packed[first : first + begin]) for first in range(0, len(packed), begin)])
    fields[:, begin:] = np.frombuffer(checks, np.uint8).reshape(count, CHECK_BYTES)
    # Five bytes are eight letters of five bits each.
    fives = np.zeros((count * fields.shape[1] // 5, 8), np.uint8)
    fives[:, 3:] = fields.reshape(-1, 5)
    bits = fives.view(">u8").astype(np.uint64) >> _LETTER_BITS & np.uint64(31)
    text = _LETTER_CODES[bits].tobytes().decode("ascii")
    size = len(text) // count if count else 1
    return [text[first : first + size] for first in range(0, len(text), size)]


def _check_of(fields: bytes) -> bytes:
    return crc32c(fields).to_bytes(4, "big")[:CHECK_BYTES]


_new_receipt = partial(tuple.__new__, Receipt)


def receipts(accepted: Accepted, deliver_at_ms: Sequence[int]) -> Iterable[Receipt | KeyPending | InFlight]:
    """The receipt of each single send of a batch, or the error in its place; made without a Python call for each."""
    log_id, base_sequence, _, at_ms, duplicate, decided = accepted
    was_due = [due <= at_ms for due in deliver_at_ms]
    shared = repeat(log_id), count(base_sequence), deliver_at_ms, repeat(at_ms), was_due, repeat(duplicate)
    made: Iterator[Receipt] = map(_new_receipt, zip(*shared, repeat(False), repeat(None)))
    if not decided:
        return made
    columns = zip(made, *(column.tolist() for column in Verdicts.of(accepted)), strict=True)
    return [_met(receipt, SendVerdict(verdict), *other) for receipt, verdict, *other in columns]


def _met(
    receipt: Receipt, verdict: SendVerdict, other: int, other_at_ms: int, filed_at_ms: int
) -> Receipt | KeyPending | InFlight:
    """The outcome of a single send of which this is the receipt, if no key met another."""
    if verdict is SendVerdict.ACCEPTED:
        return receipt
    if verdict is SendVerdict.REPLACED:
        return receipt._replace(replaced=other)
    if verdict is SendVerdict.KEPT:
        # The server does not say when it had accepted the earlier message. Whoever asks about this one needs an instant
        # of its filing hour.
        return receipt._replace(
            sequence=other,
            deliver_at_ms=other_at_ms,
            accepted_at_ms=min(receipt.accepted_at_ms, filed_at_ms),
            was_due=other_at_ms <= receipt.accepted_at_ms,
            kept=True,
        )
    due = utc(other_at_ms).isoformat()
    if verdict is SendVerdict.REJECTED:
        return KeyPending(
            f"message {other}, due at {due}, is pending with this key",
            log_id=receipt.log_id,
            sequence=other,
            deliver_at_ms=other_at_ms,
        )
    return InFlight(
        f"message {other} with this key was due at {due} and is being handed over; send again a moment later"
    )


def _new_rows(decided: EndedRows) -> NDArray[np.uint64]:
    """The sequences of the rows that were sent, of which decisions are.

    A row REPLACED is the earlier one, and names the new one; the others are new rows, and name the earlier one.
    """
    return np.where(decided["reason"] == Reason.REPLACED, decided["other"], decided["sequence"])


class Verdicts(NamedTuple):
    """What became of the rows of one batch by their keys: columns with one item for each row."""

    verdict: NDArray[np.uint8]  # `SendVerdict`.
    other: NDArray[np.uint64]  # The sequence of the earlier message that the row met; 0 for ACCEPTED.
    other_at_ms: Int64s  # When that message is due; 0 for ACCEPTED.
    other_filed_at_ms: Int64s  # An instant of the hour in which it is filed; 0 for ACCEPTED.

    @classmethod
    def of(cls, accepted: Accepted) -> Verdicts:
        """Read what a server decided; BatchMalformed when it does not fit the batch."""
        columns = cls(
            np.zeros(accepted.row_count, np.uint8),
            np.zeros(accepted.row_count, np.uint64),
            np.zeros(accepted.row_count, np.int64),
            np.zeros(accepted.row_count, np.int64),
        )
        rows = decode_ended(accepted.decided)
        replaced = rows["reason"] == Reason.REPLACED
        place = _new_rows(rows) - np.uint64(accepted.base_sequence)
        if bool((place >= accepted.row_count).any()) or len(np.unique(place)) < len(place):
            raise BatchMalformed("a decision is not about a row of the batch")
        verdict = _VERDICT_OF.take(rows["reason"], mode="clip")
        if not verdict.all():
            raise BatchMalformed("a decision about a row that was sent has a reason that a send can't have")
        columns.verdict[place] = verdict
        columns.other[place] = np.where(replaced, rows["sequence"], rows["other"])
        columns.other_at_ms[place] = np.where(replaced, rows["deliver_at_ms"], rows["other_at_ms"])
        columns.other_filed_at_ms[place] = others_filed_at_ms(rows)
        if bool((columns.other_at_ms < 0).any()) or bool((columns.other_at_ms > INSTANT_MS_MAX).any()):
            raise BatchMalformed("a decision names an instant that no message has")
        return columns


@dataclass(frozen=True, eq=False)
class ReceiptColumns:
    """Receipts of many messages as columns, which `cancel_batch`, `get_batch` and `reschedule_batch` take.

    Fields:
        log_ids: uint64[n], the log_id of the delay server that holds each message.
        sequences: uint64[n], the number of each message; 0 where nothing is known of it.
        deliver_at_ms: int64[n], when it is due, in milliseconds since the epoch.
        accepted_at_ms: int64[n], when it was accepted or moved, or another instant of the hour in which it is filed.
    """

    log_ids: NDArray[np.uint64]
    sequences: NDArray[np.uint64]
    deliver_at_ms: Int64s
    accepted_at_ms: Int64s

    def __len__(self) -> int:
        return len(self.sequences)

    def receipts(self) -> Iterator[Receipt]:
        """The receipt of each message."""
        columns = (self.log_ids, self.sequences, self.deliver_at_ms, self.accepted_at_ms)
        for log_id, sequence, due_ms, accepted_ms in zip(*(column.tolist() for column in columns), strict=True):
            yield Receipt(LogId(log_id), sequence, due_ms, accepted_ms, due_ms <= accepted_ms, False)


class ReceiptPart(NamedTuple):
    """Rows of one `send_batch` that one server accepted together."""

    rows: Int64s  # Rising; row ``rows[i]`` has the sequence ``accepted.base_sequence + i``.
    deliver_at_ms: Int64s
    accepted: Accepted


class BatchReceipt:
    """Says that many messages are kept. Each column has one item for each accepted message, in the order given.

    Of messages with keys, ``verdicts`` says which are kept, and which met an earlier message.

    Example::

        receipt = producer.send_batch("orders.cancel", [b"42", b"43"], delay=timedelta(minutes=30))
        print(len(receipt), "messages are kept as", receipt.sequences)
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[ReceiptPart]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def __repr__(self) -> str:
        batches = "1 batch" if len(self.parts) == 1 else f"{len(self.parts)} batches"
        return f"BatchReceipt({len(self)} messages in {batches})"

    @property
    def rows(self) -> Int64s:
        """int64[n], rising: positions of the accepted messages in `send_batch`; 0 to n - 1 when none was refused."""
        return np.sort(self._given())

    @property
    def log_ids(self) -> NDArray[np.uint64]:
        """uint64[n]: the log_id of the delay server that holds each message."""
        return self._ordered(
            [_NO_UINT64S, *(np.full(len(part.rows), part.accepted.log_id, np.uint64) for part in self.parts)]
        )

    @property
    def sequences(self) -> NDArray[np.uint64]:
        """uint64[n]: the number of each message in its log."""
        return self._ordered([_NO_UINT64S, *map(_sequences, self.parts)])

    @property
    def deliver_at_ms(self) -> Int64s:
        """int64[n]: when each message is due, in milliseconds since the epoch."""
        return self._ordered([_NO_INT64S, *(part.deliver_at_ms for part in self.parts)])

    @property
    def accepted_at_ms(self) -> Int64s:
        """int64[n]: when each message was accepted, by the delay server's clock."""
        return self._ordered(
            [_NO_INT64S, *(np.full(len(part.rows), part.accepted.accepted_at_ms, np.int64) for part in self.parts)]
        )

    @property
    def was_due(self) -> NDArray[np.bool_]:
        """bool[n]: whether each message was due already when it was accepted; then it is delivered at once."""
        return self.deliver_at_ms <= self.accepted_at_ms

    @property
    def verdicts(self) -> NDArray[np.uint8]:
        """uint8[n]: the `SendVerdict` of each message; all 0, ACCEPTED, where no key met another."""
        return self._ordered([_NO_UINT8S, *(Verdicts.of(part.accepted).verdict for part in self.parts)])

    @property
    def others(self) -> NDArray[np.uint64]:
        """uint64[n]: the sequence of the earlier message that each one met by its key; 0 where it met none."""
        return self._ordered([_NO_UINT64S, *(Verdicts.of(part.accepted).other for part in self.parts)])

    @property
    def others_at_ms(self) -> Int64s:
        """int64[n]: when those earlier messages are due, in milliseconds since the epoch; 0 where there is none."""
        return self._ordered([_NO_INT64S, *(Verdicts.of(part.accepted).other_at_ms for part in self.parts)])

    def receipts(self) -> list[Receipt | None]:
        """The receipt of each message, as `send` gives it; None for a message that is not kept, because of its key."""
        found: list[Receipt | None] = []
        for part in self.parts:
            each = receipts(part.accepted, part.deliver_at_ms.tolist())
            found += [receipt if isinstance(receipt, Receipt) else None for receipt in each]
        return [found[place] for place in np.argsort(self._given(), kind="stable").tolist()]

    @property
    def tokens(self) -> list[str | None]:
        """The token of each message; None for a message that is not kept, because of its key. See `Receipt.token`."""
        return [None if receipt is None else receipt.token for receipt in self.receipts()]

    @property
    def others_filed_at_ms(self) -> Int64s:
        """int64[n]: an instant of the hour in which each of those earlier messages is filed; 0 where there is none."""
        return self._ordered([_NO_INT64S, *(Verdicts.of(part.accepted).other_filed_at_ms for part in self.parts)])

    @property
    def duplicates(self) -> int:
        """How many messages a server knew from an earlier try. It has kept each of them once."""
        return sum(len(part.rows) for part in self.parts if part.accepted.duplicate)

    def _given(self) -> Int64s:
        return np.concatenate([_NO_INT64S, *(part.rows for part in self.parts)])

    def _ordered(self, columns: list[NDArray[Column]]) -> NDArray[Column]:
        return np.concatenate(columns)[np.argsort(self._given(), kind="stable")]


class Failure(NamedTuple):
    """Rows of one `send_batch` that share an error."""

    rows: Int64s
    error: DelaydError


class BatchFailed(DelaydError):
    """Some messages of a `send_batch` failed: it is not known that they are kept.

    Example::

        try:
            receipt = producer.send_batch("orders.cancel", bodies, due_ms)
        except delayd.BatchFailed as failed:
            print(len(failed.receipt), "messages are kept")
            for failure in failed.failures:
                print("messages", failure.rows, "failed:", failure.error)

    Attributes:
        receipt: the `BatchReceipt` of the messages that are kept.
        failures: each has ``rows`` (positions in `send_batch`) and the ``error`` that these messages share.
    """

    receipt = BatchReceipt(())
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of(cls, receipt: BatchReceipt, failures: Sequence[Failure]) -> BatchFailed:
        """The error of a batch with ``failures``."""
        failed = sum(len(failure.rows) for failure in failures)
        error = cls(
            f"{failed} of {failed + len(receipt)} messages failed, the first with: {failures[0].error.message}",
            accepted=len(receipt),
            failed=failed,
        )
        error.receipt = receipt
        error.failures = tuple(failures)
        error.__cause__ = failures[0].error
        return error


def _sequences(part: ReceiptPart) -> NDArray[np.uint64]:
    return np.arange(len(part.rows), dtype=np.uint64) + np.uint64(part.accepted.base_sequence)


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The answer to the wish to move one message to another instant.

    Example::

        moved = producer.reschedule("orders.cancel", receipt=receipt, delay=timedelta(hours=2))
        if moved.answer is delayd.RescheduleAnswer.MOVED:
            receipt = moved.receipt

    Fields:
        answer: a `RescheduleAnswer`.
        receipt: of the message as it stands now: with MOVED it has the new instant. None when nothing is known of it.
            Earlier receipts of the message go on to stand for it.
    """

    answer: RescheduleAnswer
    receipt: Receipt | None

    def __str__(self) -> str:
        due = "" if self.receipt is None else f", due at {utc(self.receipt.deliver_at_ms).isoformat()}"
        return f"{self.answer.name.lower()}{due}"


@dataclass(frozen=True, eq=False)
class RescheduledBatch(ReceiptColumns):
    """The answers to the wish to move many messages: columns with one item for each, in the order of the request.

    `cancel_batch`, `get_batch` and `reschedule_batch` take it as they take the receipt of a `send_batch`.

    Fields, beside those of `ReceiptColumns`, which are of the messages as they stand now:
        answers: uint8[n], a `RescheduleAnswer` each.
    """

    answers: NDArray[np.uint8]


def rescheduled_of(log_id: int, answer: np.void) -> Rescheduled:
    """One answer as a caller reads it."""
    told = RescheduleAnswer(int(answer["answer"]))
    if told is RescheduleAnswer.UNKNOWN:
        return Rescheduled(told, None)
    due_ms, accepted_at_ms = int(answer["deliver_at_ms"]), int(answer["accepted_at_ms"])
    sequence, was_due = int(answer["sequence"]), due_ms <= accepted_at_ms
    return Rescheduled(told, Receipt(LogId(log_id), sequence, due_ms, accepted_at_ms, was_due, False))


def rescheduled_batch_of(log_ids: NDArray[np.uint64], answers: AnswerRows) -> RescheduledBatch:
    """Many answers as a caller reads them."""
    sequences, due_ms, accepted_ms = (answers[name].copy() for name in ("sequence", "deliver_at_ms", "accepted_at_ms"))
    return RescheduledBatch(log_ids, sequences, due_ms, accepted_ms, answers["answer"].copy())


# Held for a few assignments at a time, so all futures can share it: a `concurrent.futures.Future` has a condition of
# its own, a dozen objects, and with 100,000 of them alive the garbage collector takes longer than everything else
# together. Reentrant, because `concurrent.futures.wait` takes the conditions of all its futures at once.
_LOCK = threading.RLock()

_SECOND = timedelta(seconds=1)

log = logging.getLogger(__name__)

Timeout = float | timedelta


class SendFuture(Future[Receipt]):
    """The outcome of one `send_nowait`, now or later.

    It is a `concurrent.futures.Future`, so `concurrent.futures.wait`, `as_completed` and `asyncio.wrap_future` take it.
    A send can't be cancelled.

    Example::

        future = producer.send_nowait("orders.cancel", b"42", delay=timedelta(minutes=30))
        future.add_done_callback(lambda future: print(future.exception() or "kept"))
        receipt = future.result(timeout=10)
    """

    # What `concurrent.futures` reads and the base class would make for each future: its condition, its state, and those
    # who wait.
    _condition = threading.Condition(_LOCK)

    __slots__ = ("_callbacks", "_done", "_error", "_heard", "_receipt", "_waiting")

    def __init__(self) -> None:  # The base class would make what is shared here.
        self._done = False
        self._receipt: Receipt | None = None
        self._error: DelaydError | None = None
        self._heard = False  # Somebody waits for the outcome, or has asked for it.
        self._waiting: list[Any] | None = None
        self._callbacks: list[Callable[[SendFuture], object]] | None = None

    def __repr__(self) -> str:
        return f"SendFuture({'no outcome yet' if not self._done else self._error or self._receipt!r})"

    def done(self) -> bool:
        """Whether the send has an outcome."""
        return self._done

    def running(self) -> bool:
        """Whether the send has no outcome yet: it began when it was called."""
        return not self._done

    def cancel(self) -> bool:
        """Do nothing, and return False: a send can't be taken back. `Producer.cancel` ends a message that is kept."""
        return False

    def cancelled(self) -> bool:
        """False; see `cancel`."""
        return False

    def result(self, timeout: Timeout | None = None) -> Receipt:
        """Wait for the outcome, and return the receipt or raise the error of the send.

        Args:
            timeout: how long to wait, in seconds or as a timedelta; None waits until there is an outcome.

        Raises:
            TimeoutError: there was no outcome within ``timeout``; the send goes on.
        """
        return self.receipt(_seconds(timeout))

    def exception(self, timeout: Timeout | None = None) -> DelaydError | None:
        """Wait for the outcome, and return the error of the send; None when the message is kept.

        Args:
            timeout: how long to wait, in seconds or as a timedelta; None waits until there is an outcome.

        Raises:
            TimeoutError: there was no outcome within ``timeout``; the send goes on.
        """
        wait_s = _seconds(timeout)
        if not self._done:
            self._wait(wait_s)
        self._heard = True
        return self._error

    def add_done_callback(self, callback: Callable[[SendFuture], object]) -> None:
        """Have a function called with this future once there is an outcome; at once when there is one already.

        Args:
            callback: is called on the producer's thread, so it must return soon: all sends wait meanwhile.
        """
        need_callable("callback", callback)
        with _LOCK:
            if not self._done:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback(self)

    def receipt(self, wait_s: float | None) -> Receipt:
        """As `result`, without a check of the time limit; for the producer.

        Args:
            wait_s: how many seconds to wait; None waits until there is an outcome.
        """
        if not self._done:
            self._wait(wait_s)
        if self._error is not None:
            self._heard = True
            raise self._error
        assert self._receipt is not None, "a send ends with a receipt or an error"
        return self._receipt

    @property
    def is_unheard(self) -> bool:
        """Whether the send has failed and nobody has asked for its outcome."""
        return self._error is not None and not self._heard

    def set_result(self, receipt: Receipt) -> None:
        """Note that the message is accepted; for the producer."""
        self._receipt = receipt
        self._end()

    def set_exception(self, error: BaseException | None) -> None:
        """Note that the send failed; for the producer."""
        assert isinstance(error, DelaydError), "a send fails with an error of delayd"
        self._error = error
        self._end()

    # Read by `concurrent.futures`, with the lock held. Type checkers know them as attributes of the base class.
    if not TYPE_CHECKING:

        @property
        def _state(self) -> str:
            return "FINISHED" if self._done else "RUNNING"

        @property
        def _waiters(self) -> list[Any]:
            if self._waiting is None:
                self._waiting = []
            return self._waiting

    def _end(self) -> None:
        with _LOCK:
            self._done = True
            self._heard = bool(self._waiting)
            callbacks = self._callbacks
            for waiter in self._waiting or ():
                (waiter.add_result if self._error is None else waiter.add_exception)(self)
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:
                # One caller's bug must not keep the other callers of its batch from their outcomes.
                log.exception("callback_failed callback=%r", callback)

    def _wait(self, wait_s: float | None) -> None:
        with _LOCK:
            if self._done:
                return
            waiter = _Waiter()
            waiting = self._waiting
            if waiting is None:
                waiting = self._waiting = []
            waiting.append(waiter)
        if not waiter.woken.acquire(timeout=-1 if wait_s is None else wait_s):
            with _LOCK:
                waiting.remove(waiter)
            raise TimeoutError(f"a send had no outcome within the timeout of {wait_s} s; it goes on")


class _Waiter:
    """One thread that waits, as `concurrent.futures` tells its own."""

    __slots__ = ("woken",)

    def __init__(self) -> None:
        self.woken = threading.Lock()
        self.woken.acquire()

    def add_result(self, _: SendFuture) -> None:
        self.woken.release()

    add_exception = add_result


def _seconds(timeout: Timeout | None) -> float | None:
    """The time limit in seconds that a lock takes."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        timeout = timeout / _SECOND
    if not is_number(timeout) or timeout != timeout:
        raise BadArgument(f"timeout is a number of seconds or a timedelta, not {timeout!r:.100}")
    return float(min(max(timeout, 0), threading.TIMEOUT_MAX))


SWEPT_AT = 1_000  # As many failures are kept before those that somebody has heard of are forgotten.
KEPT_MAX = 100_000  # A producer that fails for days, and whose caller asks for nothing, keeps no more: 40 MB.


SendWaiter = SendFuture | asyncio.Future[Receipt]
"""The caller of a single send, who waits for its outcome in a thread or on a loop."""


class Unheard:
    """Belongs to one producer, on its loop."""

    def __init__(self) -> None:
        self._failed: list[SendWaiter] = []
        self._sweep_at = SWEPT_AT
        self._forgotten = 0  # Unheard failures that there was no room to keep.

    def add(self, failed: object) -> None:
        """Note the future of a send that has failed just now: its caller may ask for the outcome later."""
        if isinstance(failed, SendFuture | asyncio.Future):
            self._failed.append(failed)
        if len(self._failed) >= self._sweep_at:
            self._failed = [each for each in self._failed if is_unheard(each)]
            if len(self._failed) >= KEPT_MAX:
                self._forget(KEPT_MAX // 2)
            self._sweep_at = max(SWEPT_AT, 2 * len(self._failed))

    def tell(self) -> None:
        """Log how many messages are lost without anybody's knowledge, and why the first of them is."""
        errors = [failed.exception() for failed in self._failed if is_unheard(failed)]
        count = len(errors) + self._forgotten
        self._failed.clear()
        self._forgotten = 0
        if errors:
            first = errors[0]
            code = first.code if isinstance(first, DelaydError) else type(first).__name__
            log.warning("sends_failed messages=%d code=%s reason=%r", count, code, str(first))

    def _forget(self, count: int) -> None:
        for oldest in self._failed[:count]:
            oldest.exception()  # So asyncio does not log it, too.
        del self._failed[:count]
        self._forgotten += count


def is_unheard(failed: SendWaiter) -> bool:
    """Whether a send has failed and nobody has asked for its outcome."""
    if isinstance(failed, SendFuture):
        return failed.is_unheard
    # asyncio keeps this mark to log, when the future is gone, an exception that nobody has fetched.
    return failed._log_traceback
