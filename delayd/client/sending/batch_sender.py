"""Sender: it numbers batches, binds them to a server, sends them, and repeats them until their outcome is known.

     gathered ──▶ bound ──▶ sent ──▶ ACCEPTED, REFUSED
                   ▲          ├─ nothing left, or refused by name and another server serves: another number, at once
                   └──────────┤  refused by name by all that serve: another number, after a while
                              └─ lost after it left: again, same number, same group ──limit──▶ OutcomeUnknown

Which server gets a batch, and which are left out for a while, `Groups` says. A batch with keys goes to their owner only
(rule I4): it waits for that server, and the error after the time limit names it.

Invariant (rules I1, I3): a number names one batch, byte for byte, and once its bytes may have left it goes to one group
only. Numbers below the low-water mark in a batch are never sent again.

Unsent: rows on their way to a delay server, and the callers that wait for their outcome.

Invariant: each row ends exactly once, accepted or failed, however often it was regrouped on the way.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import ROWS_MAX, Buffer, ProducerPart
from delayd.batch.content import Names, slots_of_names
from delayd.client.instants import ServerClock, monotonic_us
from delayd.client.routing import DelayGroup, Groups, KeyOwners, MetaView, RetryWaits, spread_ms, unreadable
from delayd.client.sending.receipts import Accepted, Verdicts
from delayd.errors import (
    BadRequest,
    BatchMalformed,
    ClockInDoubt,
    DelaydError,
    Detail,
    HourFull,
    InternalError,
    LogId,
    NotOwner,
    OutcomeUnknown,
    QuotaReached,
    RequestFailed,
    RetryLater,
    SendHandle,
    ServerCordoned,
    ServerUnavailable,
    error_by_code,
)
from delayd.log.hour import ENDED_BYTES
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    ERROR_TEXT_BYTES_MAX,
    need_bool,
    need_instant,
    need_int,
    need_ints,
    need_map,
    need_maps,
    need_retry_after,
    need_str,
    need_u64,
)
from delayd.wire.meta import slot_set, slots_text
from delayd.wire.requests import RequestType

Outcome = TypeVar("Outcome", contravariant=True)


class Waiter(Protocol[Outcome]):
    """A caller that waits for one outcome: a future of asyncio or of a thread."""

    def done(self) -> bool:
        """Whether nobody waits any more."""

    def set_result(self, outcome: Outcome, /) -> None:
        """Tell that it is accepted."""

    def set_exception(self, error: DelaydError, /) -> None:
        """Tell that it failed."""


class RowsWithKeys(NamedTuple):
    """Rows that have a key, with their subjects and keys."""

    rows: Sequence[int]
    subjects: Sequence[bytes]
    keys: Sequence[bytes]


NO_KEYED_ROWS = RowsWithKeys((), (), ())


class UnsentRows(Protocol):
    """The rows of a batch, with the callers that wait for them."""

    @property
    def count(self) -> int:
        """How many rows."""

    @property
    def held_bytes(self) -> int:
        """How many bytes of memory they hold."""

    def encode(self, part: ProducerPart, clock: ServerClock, log_id: int) -> Sequence[bytes]:
        """Encode the batch for one server, whose clock resolves `delay=`, in pieces that follow one another."""

    def accept(self, accepted: Accepted) -> None:
        """Note that all rows are kept; only after `encode`, because the receipts repeat its instants."""

    def fail(self, error: DelaydError) -> None:
        """Note that all rows failed."""

    def keyed_rows(self) -> RowsWithKeys:
        """The rows that have a key, by rising number."""

    def together(self, rows: list[int]) -> list[int]:
        """These rows, with those that are kept or refused with them."""

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """Split into the named rows and the others; neither side may be empty."""


log = logging.getLogger(__name__)

# For how long the handle of an unknown outcome holds the low-water mark back, for callers that ask at once.
UNKNOWN_KEPT_MS = 60_000
UNKNOWN_KEPT_MAX = 1_000  # A server remembers every number above the mark, so at most this many handles hold it back.
# A batch that was refused, or found no server, is certainly not kept. A further try whose answer comes too late would
# make that unknown, so none is made in this last part of the time limit.
NO_TRY_SHARE = 0.1


class Refusal(NamedTuple):
    """A delay server's answer that it kept no row of a batch, because of these rows (all of them, if none is named)."""

    error: DelaydError
    rows: list[int]


NO_REFUSERS: frozenset[int] = frozenset()
FULL_THERE = (QuotaReached, HourFull)
"""Refusals of messages that another server may have room for."""


class Parcel:
    """Rows, and the state of their way to a server."""

    __slots__ = (
        "_backoff",
        "data",
        "deadline",
        "ended",
        "failure",
        "group",
        "keyed",
        "may_be_kept",
        "number",
        "owner",
        "refusers",
        "roomy",
        "rows",
    )

    def __init__(self, rows: UnsentRows, deadline: float) -> None:
        self.rows = rows
        self.deadline = deadline  # On the loop's clock.
        self.group: DelayGroup | None = None
        self.number = 0
        self.data: Sequence[bytes] = ()  # The pieces of the batch, once it is bound.
        self.may_be_kept = False  # Bytes left and no outcome came: from now on it belongs to this group.
        # Why the last try brought no outcome; None before the first try has failed.
        self.failure: DelaydError | None = None
        # With several servers, rows with keys go to the owner of the keys only.
        self.keyed = False
        self.owner: DelayGroup | None = None
        # The logs of the servers that refused it for what it is: its subject's quota or its hour is full there.
        self.refusers: frozenset[int] = NO_REFUSERS
        self.roomy = 0  # The log of a server that refused other rows for that, and has room for these.
        self.ended: Ended | None = None
        self._backoff: RetryWaits | None = None

    @property
    def backoff(self) -> RetryWaits:
        """The waits between its tries; most parcels need no second one."""
        if self._backoff is None:
            self._backoff = RetryWaits()
        return self._backoff

    @property
    def surely_not_kept(self) -> bool:
        """Whether a try has failed, and nothing of it is kept for certain."""
        return self.failure is not None and not self.may_be_kept


Split = list[tuple[Parcel, float]]
"""The parts of a parcel whose other rows a server refused: each part is carried too, after this many seconds."""

Ended = Callable[[Parcel, Split], None]
"""Called once for each parcel, when its rows were told their outcome."""


class BatchSender:
    """Brings parcels to their outcome; used by one producer, on one loop."""

    def __init__(self, meta: MetaView, timeout_ms: float, unreached_s: float = 0.0) -> None:
        """``unreached_s``: how much of the time limit is left when a parcel is given up, if no server is reached."""
        self.groups = Groups(meta)
        self.owners = KeyOwners(meta, self.groups)
        self.producer_id = 0  # Drawn at the first send (rule I2).
        self._meta = meta
        self._timeout_s = timeout_ms / 1000
        self._unreached_s = unreached_s
        self._no_try_s = self._timeout_s * NO_TRY_SHARE
        self._loop = asyncio.get_running_loop()
        self._next_number = 1
        # Numbers in use, rising: dicts keep the order, and the first one is the low-water mark.
        self._in_use: dict[int, None] = {}
        self._unknown: dict[int, float] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    def parcel(self, rows: UnsentRows) -> Parcel:
        """A parcel of rows whose time limit begins now."""
        return Parcel(rows, self._loop.time() + self._timeout_s)

    def carry(self, parcel: Parcel, ended: Ended) -> None:
        """Bring a parcel to its outcome, tell its rows, and then call ``ended``.

        Over a connection that stands, its bytes leave before this returns.
        """
        parcel.ended = ended
        self._try(parcel)

    async def close(self) -> None:
        """End all connections."""
        await self.groups.close()

    def _try(self, parcel: Parcel) -> None:
        """Send a parcel, for the first time or again."""
        left_s = parcel.deadline - self._loop.time()
        if left_s <= 0:
            self._end(parcel, self.given_up(parcel))
            return
        group = parcel.group
        if group is None and len(self.groups) > 1 and (keyed := parcel.rows.keyed_rows()).rows:
            parcel.keyed = True
            log_ids = self.owners.known(keyed.subjects, keyed.keys)
            if log_ids is None:
                self._later(self._find_owners(parcel, keyed, left_s))
                return
            if (log_ids != log_ids[0]).any():
                self._part(parcel, keyed, log_ids)
                return
            group = parcel.owner = self.groups.known(int(log_ids[0]))
        elif group is None:
            group = self.groups.choose(parcel.refusers, parcel.roomy)
        connection = None if group is None else group.link.standing
        if group is None or connection is None:
            self._later(self._connect(parcel, group, left_s))
            return
        self._ask(parcel, group, connection, left_s)

    def _later(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _find_owners(self, parcel: Parcel, keyed: RowsWithKeys, left_s: float) -> None:
        """Ask meta who owns the keys of a parcel, and then try it (rule I4)."""
        try:
            async with asyncio.timeout(left_s):
                await self.owners.find(keyed.subjects, keyed.keys)
        except TimeoutError:
            self._end(parcel, self.given_up(parcel))
        except DelaydError as error:
            self._heard(parcel, error)
        else:
            self._try(parcel)

    def _part(self, parcel: Parcel, keyed: RowsWithKeys, log_ids: NDArray[np.uint64]) -> None:
        """Part the rows of different owners; rows without a key go with the others."""
        assert parcel.ended is not None, "it is being carried"
        first = [row for row, log_id in zip(keyed.rows, log_ids.tolist(), strict=True) if log_id == int(log_ids[0])]
        parts = parcel.rows.split(first)
        parcel.ended(parcel, [(Parcel(part, parcel.deadline), 0.0) for part in parts])

    async def _connect(self, parcel: Parcel, group: DelayGroup | None, left_s: float) -> None:
        """Find a group and connect to it, and then send."""
        # What has left goes to its server until the time limit; else connecting has a limit of its own.
        reach_s = left_s if parcel.may_be_kept else max(left_s - self._unreached_s, 0.0)
        try:
            async with asyncio.timeout(reach_s):
                if group is None:
                    group = await self.groups.find()
                    if len(self.groups) > 1:
                        # A row with a key may not go to any of them.
                        self._try(parcel)
                        return
                try:
                    connection = await group.link.connection()
                except ServerUnavailable:
                    self._meta.refresh_soon()
                    if not parcel.may_be_kept:
                        self._unbind(parcel)
                    raise
        except TimeoutError:
            if parcel.failure is None:
                parcel.failure = self.groups.unreached(group)
            self._end(parcel, self.given_up(parcel))
        except DelaydError as error:
            self._heard(parcel, error)
        else:
            self._ask(parcel, group, connection, parcel.deadline - self._loop.time())

    def _ask(self, parcel: Parcel, group: DelayGroup, connection: Connection, left_s: float) -> None:
        if parcel.surely_not_kept and left_s < self._no_try_s:
            self._loop.call_later(max(left_s, 0), self._try, parcel)  # Its time is over then.
            return
        try:
            if parcel.group is None:
                self._bind(parcel, group)
        except ClockInDoubt as error:
            # Nothing has left, and another server's clock may be confirmed.
            group.refused(self._loop.time())
            self._unbind(parcel)
            self._heard(parcel, error)
        except Exception:
            log.exception("bug batch=%d rows=%d", parcel.number, parcel.rows.count)
            self._fail_by_bug(parcel)
        else:
            group.asked(self._loop.time())
            answered = partial(self._answered, parcel, group, connection, monotonic_us())
            connection.call(RequestType.SEND, {}, parcel.data, answered, left_s * 1000, now=True)

    def _bind(self, parcel: Parcel, group: DelayGroup) -> None:
        parcel.group = group
        group.in_flight += 1
        parcel.number = self._next_number
        self._next_number += 1
        self._in_use[parcel.number] = None
        part = ProducerPart(self._own_id(), parcel.number, self._low_water())
        parcel.data = parcel.rows.encode(part, group.link.clock, group.log_id)

    def _answered(
        self, parcel: Parcel, group: DelayGroup, connection: Connection, asked_us: int, answer: Frame | DelaydError
    ) -> None:
        if isinstance(answer, DelaydError):
            if not isinstance(answer, RequestFailed):
                group.link.heard()
            self._heard(parcel, answer)
            return
        try:
            group.link.hear(asked_us, answer.head)
            _check_log(answer.head, group.log_id)
            results = need_maps(answer.head, "results")
            if len(results) != 1:
                raise BadRequest(f"{len(results)} results came for one batch")
            outcome = _outcome(results[0], group.log_id, parcel.rows.count, answer.body)
        except (BadRequest, BatchMalformed) as error:
            self._heard(parcel, unreadable(connection, error))
        else:
            if isinstance(outcome, Refusal):
                outcome = outcome._replace(rows=parcel.rows.together(outcome.rows))
            self._heard(parcel, outcome)

    def _heard(self, parcel: Parcel, outcome: Accepted | Refusal | DelaydError) -> None:
        """Take the result of a try: the parcel has ended, or it is tried again after a while."""
        wait_ms = None if isinstance(outcome, Accepted) else self._again_after_ms(parcel, outcome)
        if wait_ms is None:
            self._end(parcel, outcome)
        else:
            wait_s = min(wait_ms / 1000, parcel.deadline - self._loop.time())
            self._loop.call_later(max(wait_s, 0), self._try, parcel)

    def _again_after_ms(self, parcel: Parcel, outcome: Refusal | DelaydError) -> float | None:
        """How long to wait before the next try; None when this result is the outcome."""
        if isinstance(outcome, DelaydError):
            self.owners.heard(outcome)
        if isinstance(outcome, RequestFailed):
            # If the try never left, the error of the last try that did leave stays.
            if outcome.sent:
                parcel.failure, parcel.may_be_kept = outcome, True
            if not parcel.may_be_kept:
                self._unbind(parcel)
            self._meta.refresh_soon()
            return 0.0 if self._moves(parcel) and self.groups.another_takes() else parcel.backoff.next_ms()
        if isinstance(outcome, InternalError):
            # The server failed in the middle of the work, perhaps after the append.
            parcel.failure, parcel.may_be_kept = outcome, True
            return parcel.backoff.next_ms()
        if isinstance(outcome, Refusal):
            if len(outcome.rows) not in (0, parcel.rows.count):
                return None
            outcome = outcome.error
            self.owners.heard(outcome)
        if isinstance(outcome, FULL_THERE):
            wait_ms = self._elsewhere_after_ms(parcel, parcel.group)
            if wait_ms is not None:
                parcel.failure = outcome
                self._unbind(parcel)
            return wait_ms
        if not isinstance(outcome, RetryLater):
            return None
        if isinstance(outcome, NotOwner | ServerCordoned):
            # The server would know the batch if it had kept it, so it kept nothing.
            parcel.may_be_kept = False
            self._unbind(parcel)
        parcel.failure = outcome
        if self._moves(parcel):
            if parcel.group is not None:
                parcel.group.refused(self._loop.time())
            self._unbind(parcel)
            if self.groups.another_takes():
                return 0.0
        return spread_ms(outcome.retry_after_ms)

    def _moves(self, parcel: Parcel) -> bool:
        """Whether a parcel that was refused may go to another server (rules I3, I4)."""
        return len(self.groups) > 1 and not parcel.may_be_kept and not parcel.keyed

    def _elsewhere_after_ms(self, parcel: Parcel, refuser: DelayGroup | None) -> float | None:
        """After how long rows that are too many at one server are tried at another; None when no other is left."""
        if refuser is None or not self._moves(parcel):
            return None
        parcel.refusers |= {refuser.log_id}
        if self.groups.another_takes(parcel.refusers):
            return 0.0
        return parcel.backoff.next_ms() if self.groups.another_may_come(parcel.refusers) else None

    def _end(self, parcel: Parcel, outcome: Accepted | Refusal | DelaydError) -> None:
        """Tell the rows of a parcel their outcome."""
        assert parcel.ended is not None, "it is being carried"
        group = parcel.group
        self._unbind(parcel, unknown=isinstance(outcome, OutcomeUnknown))
        split: Split = []
        try:
            if isinstance(outcome, Accepted):
                if group is not None:
                    group.accepted()
                parcel.rows.accept(outcome)
            elif isinstance(outcome, Refusal):
                split = self._refused(parcel, group, outcome)
            else:
                parcel.rows.fail(outcome)
        except Exception:
            log.exception("bug batch=%d rows=%d", parcel.number, parcel.rows.count)
            self._fail_by_bug(parcel)
        else:
            parcel.ended(parcel, split)

    def _fail_by_bug(self, parcel: Parcel) -> None:
        """End a parcel after a bug: nobody may wait for ever, and the bug must not be raised from an unrelated send."""
        assert parcel.ended is not None, "it is being carried"
        self._unbind(parcel)
        parcel.rows.fail(InternalError("this client met a bug of its own while it sent a batch; its log says more"))
        parcel.ended(parcel, [])

    def _refused(self, parcel: Parcel, group: DelayGroup | None, refusal: Refusal) -> Split:
        named = sorted(set(refusal.rows))
        if len(named) in (0, parcel.rows.count):
            parcel.rows.fail(refusal.error)
            return []
        refused, others = parcel.rows.split(named)
        rest = Parcel(others, parcel.deadline)
        split = [(rest, 0.0)]
        wait_ms: float | None = None
        if isinstance(refusal.error, (RetryLater, *FULL_THERE)):
            wait_ms = self._elsewhere_after_ms(parcel, group)
            # Elsewhere the rows that it takes would use up the room of those that it does not take.
            rest.roomy = group.log_id if group is not None else 0
        if wait_ms is None and isinstance(refusal.error, RetryLater):
            wait_ms = spread_ms(refusal.error.retry_after_ms)
        if wait_ms is None:
            refused.fail(refusal.error)
        else:
            again = Parcel(refused, parcel.deadline)
            again.failure, again.refusers = refusal.error, parcel.refusers
            split.append((again, max(min(wait_ms / 1000, parcel.deadline - self._loop.time()), 0.0)))
        return split

    def given_up(self, parcel: Parcel) -> DelaydError:
        """The error for the rows of a parcel when its time is over."""
        failure = parcel.failure or ServerUnavailable("no delay server was reached in time; nothing was sent")
        group = parcel.group
        if not parcel.may_be_kept or group is None:
            return failure if parcel.owner is None else self._at_owner(parcel, parcel.owner, failure)
        handle = SendHandle(LogId(group.log_id), self._own_id(), parcel.number)
        unknown = OutcomeUnknown(
            f"batch {parcel.number} was sent to {group.link.address} and no outcome came in time"
            f" ({failure.message}); ask with the handle",
            handle,
        )
        unknown.__cause__ = failure
        return unknown

    def _at_owner(self, parcel: Parcel, owner: DelayGroup, failure: DelaydError) -> DelaydError:
        """The error for rows that only the owner of their keys may take, and that it did not take in time."""
        keyed = parcel.rows.keyed_rows()
        slots = slots_text(slot_set(slots_of_names(Names.of_lists(keyed.subjects, keyed.keys))))
        what = (
            f"{failure.message}; only the delay server at {owner.link.address} may take messages with these keys:"
            f" `delayd status` says what it waits for; or give their slots to another server, with"
            f" `delayd slots move {slots} --to LOG_ID`, and `--lost` if this one is gone for good"
        )
        named = error_by_code(failure.code, what, failure.retry_after_ms, failure.details)
        named.__cause__ = failure
        return named

    def _unbind(self, parcel: Parcel, *, unknown: bool = False) -> None:
        if parcel.group is None:
            return
        parcel.group.in_flight -= 1
        parcel.group = None
        parcel.data = ()
        self._in_use.pop(parcel.number)
        if unknown:
            while len(self._unknown) >= UNKNOWN_KEPT_MAX:
                del self._unknown[next(iter(self._unknown))]
            self._unknown[parcel.number] = self._loop.time()

    def _low_water(self) -> int:
        now = self._loop.time()
        while self._unknown and next(iter(self._unknown.values())) + UNKNOWN_KEPT_MS / 1000 < now:
            del self._unknown[next(iter(self._unknown))]
        return min(next(iter(self._in_use)), min(self._unknown, default=self._next_number))

    def _own_id(self) -> int:
        if not self.producer_id:
            self.producer_id = int.from_bytes(os.urandom(8), "little") | 1  # 0 would mean that none was drawn.
        return self.producer_id


def _check_log(head: Head, log_id: int) -> None:
    answered = need_u64(head, "log_id")
    if answered != log_id:
        raise BadRequest(f"it is for the log {answered:016x} instead of {log_id:016x}")


def _outcome(result: Head, log_id: int, count: int, body: Buffer) -> Accepted | Refusal:
    if "error" not in result:
        accepted = _accepted(result, log_id, body)
        if accepted.row_count != count:
            raise BadRequest(f"{accepted.row_count} rows were accepted of a batch of {count}")
        return accepted
    rows = need_ints(result, "rows")
    if any(row >= count for row in rows):
        raise BadRequest(f"row {max(rows)} was refused of a batch of {count}")
    hint = result.get("retry_after_ms")
    message = need_str(result, "message", ERROR_TEXT_BYTES_MAX)
    retry_after_ms = 0 if hint is None else need_retry_after(result)
    details: dict[str, Detail] = {}
    if "next_free_ms" in result:
        details["next_free_ms"] = need_instant(result, "next_free_ms")
    return Refusal(error_by_code(need_str(result, "error"), message, retry_after_ms, details), rows)


def read_outcome(answer: Frame, log_id: int) -> Accepted | None:
    """Read what became of a batch; None when it was not kept and never will be.

    Raises:
        BadRequest, BatchMalformed: it is no such answer.
    """
    state = need_str(answer.head, "state")
    if state == "accepted":
        return _accepted(need_map(answer.head, "result"), log_id, answer.body)
    if state != "unknown":
        raise BadRequest(f"the state is {state}, which is neither accepted nor unknown")
    return None


def _accepted(result: Head, log_id: int, body: Buffer) -> Accepted:
    count = need_int(result, "count", 1, ROWS_MAX)
    decided = need_int(result, "decided", 1, count) if "decided" in result else 0
    if len(body) != decided * ENDED_BYTES:
        raise BadRequest(f"its body has {len(body)} bytes for {decided} rows that were decided about")
    accepted = Accepted(
        LogId(log_id),
        need_u64(result, "base_sequence"),
        count,
        need_instant(result, "appended_at_ms"),
        need_bool(result, "duplicate"),
        bytes(body),
    )
    if decided:
        # What does not fit the batch is found here and not by the caller.
        Verdicts.of(accepted)
    return accepted
