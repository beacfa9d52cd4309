"""Targets: the realtime servers as a delay server sees them, on both sides of a connection (docs/protocol.md, requests
23 to 25).

Invariant: every answer fits one head, however many targets there are: it is paged by log_id.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_page,
    need_str,
    need_u64,
)
from delayd.wire.room import cut_text

PAGE_MAX = 100  # Targets in one answer.
TEXT_MAX = 1_000  # Bytes of a text: a hundred targets with all texts at their longest fit a head.


class TargetInfo(NamedTuple):
    """One realtime server, as a delay server sees it."""

    log_id: int
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
    page = list(islice((each for each in targets if each.log_id > after), PAGE_MAX + 1))
    heads: list[HeadValue] = [each.to_head() for each in page[:PAGE_MAX]]
    return {"targets": heads, "more": len(page) > PAGE_MAX}


def read_targets(head: Head) -> tuple[list[TargetInfo], bool]:
    """The targets of an answer, and whether there are more."""
    return need_page(head, "targets", _read)


def _read(head: Head) -> TargetInfo:
    texts = need_str(head, "address"), need_str(head, "state")
    numbers = need_int(head, "subjects"), need_int(head, "waiting"), need_int(head, "undecided")
    return TargetInfo(need_u64(head, "log_id"), *texts, *numbers, need_str(head, "alarm"))
