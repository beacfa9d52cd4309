"""Quotas of subjects, on both sides of a connection (docs/protocol.md, requests 32 to 34)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from delayd.batch.columns import Buffer, Int64s
from delayd.errors import BadRequest
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    INT_MAX,
    need_bool,
    need_instant,
    need_int,
    need_page,
    need_str,
)

PAGE_MAX = 50  # Quotas in one answer: some 400 bytes each.
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
    highest_ms: int  # The begin of the second that is loaded most; 0 when nothing is due.
    highest: int  # How many messages are due in it.

    def to_head(self) -> Head:
        """As one item of `quotas`."""
        return dict(self._asdict())


def quotas_head(quotas: Sequence[QuotaInfo]) -> Head:
    """The answer to QUOTAS: the first page of these, and whether there are more."""
    heads: list[HeadValue] = [each.to_head() for each in islice(quotas, PAGE_MAX)]
    return {"quotas": heads, "more": len(quotas) > PAGE_MAX}


def read_quotas(head: Head) -> tuple[list[QuotaInfo], bool]:
    """The quotas of an answer, and whether there are more."""
    return need_page(head, "quotas", _read)


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


def _read(head: Head) -> QuotaInfo:
    return QuotaInfo(
        need_str(head, "subject"),
        *limits_of(head),
        need_bool(head, "counted"),
        need_int(head, "pending_now"),
        need_int(head, "bytes_now"),
        need_instant(head, "highest_ms"),
        need_int(head, "highest"),
    )
