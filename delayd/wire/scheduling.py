"""What a delay server says of sends, quotas and targets, on both sides of a connection (docs/protocol.md).

The *results* of a SEND say what became of each of its batches, in one head. Invariant: the results of 4,096 batches
fit, whatever each of them says (rule E1). When they would not, sentences are cut and fewer of the rows at fault are
named, but at least one of each batch that named any. A client fails the rows that are named and sends the others again;
if more of them are at fault it is told then.

*Quotas* are of subjects (requests 32 to 34); *due hours* say how many messages are pending in each (65). *Targets* are
the realtime servers as a delay server sees them (23 to 25). Every answer fits one head, however many there are, because
it is paged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from delayd.batch.columns import Buffer, Int64s
from delayd.errors import BadRequest
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    INT_MAX,
    ROWS_BYTES_MAX,
    U64,
    Instant,
    cut_text,
    need_int,
    read_page,
    text_bytes,
)

BATCHES_MAX = 4_096  # Batches of a SEND; a client that has more of them makes larger batches.
PLAIN_BYTES_MAX = 136  # Room for the names and numbers of a result, and for the code of an error.
ROW_BYTES_MAX = 5  # A row's number in msgpack.
MESSAGE_BYTES_MIN = 96  # A sentence that is cut keeps this much.


def accepted_head(base_sequence: int, count: int, appended_at_ms: int, duplicate: bool, decided: int = 0) -> Head:
    """A batch that was taken, as one of `results`."""
    head: Head = {
        "base_sequence": base_sequence,
        "count": count,
        "appended_at_ms": appended_at_ms,
        "duplicate": duplicate,
    }
    if decided:
        head["decided"] = decided
    return head


@dataclass(frozen=True, slots=True)
class AcceptedResult:
    """A batch that was taken."""

    base_sequence: int
    count: int
    appended_at_ms: int
    duplicate: bool
    decided: int = 0  # How many of its rows met others by their keys.
    decisions: bytes = b""  # What was decided about these: as many rows of `delayd.log.hour`, in the answer's body.

    def to_head(self) -> Head:
        """As one of `results`."""
        return accepted_head(self.base_sequence, self.count, self.appended_at_ms, self.duplicate, self.decided)


@dataclass(frozen=True, slots=True)
class RefusedResult:
    """A batch that was refused by name; `rows` are those at fault, as far as it is about rows."""

    code: str
    message: str
    retry_after_ms: int
    rows: Sequence[int]
    next_free_ms: int | None = None  # Said of `quota_reached` only.


def results_head(results: Sequence[AcceptedResult | RefusedResult]) -> list[HeadValue]:
    """The field `results` of the answer."""
    refused = [each for each in results if isinstance(each, RefusedResult)]
    wanted = sum(len(text_bytes(each.message)) + ROW_BYTES_MAX * len(each.rows) for each in refused)
    if PLAIN_BYTES_MAX * len(results) + wanted <= ROWS_BYTES_MAX:
        message_bytes = rows_max = ROWS_BYTES_MAX
    else:
        # Each refused batch has the same share of the room that the plain fields leave.
        share = (ROWS_BYTES_MAX - PLAIN_BYTES_MAX * len(results)) // len(refused)
        message_bytes = max(MESSAGE_BYTES_MIN, share // 4)
        rows_max = max(1, (share - message_bytes) // ROW_BYTES_MAX)
    return [
        _head(each, message_bytes, rows_max) if isinstance(each, RefusedResult) else each.to_head() for each in results
    ]


def results_body(results: Sequence[AcceptedResult | RefusedResult]) -> list[bytes]:
    """The body of the answer: what was decided about the batches, one behind the other."""
    return [each.decisions for each in results if isinstance(each, AcceptedResult) and each.decided]


def _head(refused: RefusedResult, message_bytes: int, rows_max: int) -> Head:
    head: Head = {
        "error": refused.code,
        "message": cut_text(refused.message, message_bytes),
        "retry_after_ms": refused.retry_after_ms,
        "rows": list(refused.rows[:rows_max]),
    }
    if refused.next_free_ms is not None:
        head["next_free_ms"] = refused.next_free_ms
    return head


QUOTAS_PAGE_MAX = 50  # Quotas in one answer: some 400 bytes each.
LIMITS = ("per_second", "pending", "pending_bytes")


class QuotaInfo(NamedTuple):
    """A subject's quota at one delay server, and how much of it is used; a limit of None is no limit."""

    subject: str
    per_second: int | None
    pending: int | None
    pending_bytes: int | None
    counted: bool  # False: the server is still counting what is pending.
    pending_now: int
    bytes_now: int
    highest_ms: Instant  # The begin of the second that is loaded most; 0 when nothing is due.
    highest: int  # How many messages are due in it.

    def to_head(self) -> Head:
        """As one item of `quotas`."""
        return dict(self._asdict())


def quotas_head(quotas: Sequence[QuotaInfo]) -> Head:
    """The answer to QUOTAS: the first page of these, and whether there are more."""
    heads: list[HeadValue] = [each.to_head() for each in islice(quotas, QUOTAS_PAGE_MAX)]
    return {"quotas": heads, "more": len(quotas) > QUOTAS_PAGE_MAX}


def read_quotas(head: Head) -> tuple[list[QuotaInfo], bool]:
    """The quotas of an answer, and whether there are more."""
    return read_page(QuotaInfo, head, "quotas")


DUE_HOURS_PAGE_MAX = 2_000  # Hours in one answer: some 30 bytes each.


class DueHour(NamedTuple):
    """How many messages are pending at one delay server in an hour, counted since the epoch."""

    hour: int
    messages: int


def due_hours_head(hours: Sequence[DueHour]) -> Head:
    """The answer to DUE_HOURS: the first page of these, and whether there are more."""
    heads: list[HeadValue] = [dict(each._asdict()) for each in islice(hours, DUE_HOURS_PAGE_MAX)]
    return {"hours": heads, "more": len(hours) > DUE_HOURS_PAGE_MAX}


def read_due_hours(head: Head) -> tuple[list[DueHour], bool]:
    """The hours of an answer, and whether there are more."""
    return read_page(DueHour, head, "hours")


def limits_of(head: Head) -> tuple[int | None, int | None, int | None]:
    """The three limits of a head; each field is there, and a number or nil."""
    per_second, pending, pending_bytes = (_limit(head, name) for name in LIMITS)
    return per_second, pending, pending_bytes


def encode_instants(instants_ms: Int64s) -> bytes:
    """The body of PLACES, and of its answer: i64 each."""
    return instants_ms.astype("<i8").tobytes()


def read_instants(body: Buffer, least: int = 0, most: int = INSTANT_MS_MAX) -> Int64s:
    """Read such a body; BadRequest when it has no instants, or one outside of these bounds."""
    if not len(body) or len(body) % 8:
        raise BadRequest(f"a body of {len(body)} bytes is not made of instants", field="body")
    instants_ms = np.frombuffer(body, "<i8").astype(np.int64)
    if not least <= int(instants_ms.min()) <= int(instants_ms.max()) <= most:
        raise BadRequest("the body has an instant that no message can have", field="body")
    return instants_ms


def _limit(head: Head, name: str) -> int | None:
    return None if name in head and head[name] is None else need_int(head, name, 0, INT_MAX)


TARGETS_PAGE_MAX = 100  # Targets in one answer.
TEXT_MAX = 1_000  # Bytes of a text: a hundred targets with all texts at their longest fit a head.


class TargetInfo(NamedTuple):
    """One realtime server, as a delay server sees it."""

    log_id: U64
    address: str  # Empty while it is not known.
    state: str  # closed, connecting, asked, recording, ready; refused, while there is an alarm; lost.
    subjects: int
    waiting: int  # Messages that are due and wait for it.
    undecided: int  # Batches of which nobody knows durably whether the target has them.
    alarm: str  # Why nothing is sent until an operator decides; else empty.

    def to_head(self) -> Head:
        """As one item of `targets`."""
        texts: Head = {name: cut_text(getattr(self, name), TEXT_MAX) for name in ("address", "state", "alarm")}
        numbers: Head = {"subjects": self.subjects, "waiting": self.waiting, "undecided": self.undecided}
        return {"log_id": self.log_id, **texts, **numbers}


def targets_head(targets: Iterable[TargetInfo], after: int) -> Head:
    """The answer to TARGETS: those behind a log_id, and whether there are more."""
    page = list(islice((each for each in targets if each.log_id > after), TARGETS_PAGE_MAX + 1))
    heads: list[HeadValue] = [each.to_head() for each in page[:TARGETS_PAGE_MAX]]
    return {"targets": heads, "more": len(page) > TARGETS_PAGE_MAX}


def read_targets(head: Head) -> tuple[list[TargetInfo], bool]:
    """The targets of an answer, and whether there are more."""
    return read_page(TargetInfo, head, "targets")
