"""The quarantined things of a server, as they are listed and decided on (docs/protocol.md, requests 6 to 8).

Invariant: an entry keeps its id for as long as the same thing is quarantined, over restarts too, so an operator's
command never meets another entry than the one that was listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_page,
    need_str,
    optional_str,
)
from delayd.wire.room import cut_text

PAGE_MAX = 100  # Entries in one answer: they fit a head even with all texts at their longest.
TEXT_MAX = 1_000  # Bytes of a text in an entry; a path that is longer is cut.


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that a server sets aside because it can't be read or does not check (rules L5, L9, L10)."""

    id: str  # Kind and name, such as ``schedule/2026112203``.
    path: str
    position: int  # Byte in the file.
    reason: str
    rows: int  # Messages concerned, as far as that is known.
    since_ms: int
    hour: str | None = None
    subject: str | None = None
    release: str = ""  # What QUARANTINE_RELEASE does and costs, in one sentence; empty if it can do nothing.
    drop: str = ""  # The same for QUARANTINE_DROP.

    def head(self) -> Head:
        """The entry as it stands in an answer; every text is cut, so that an answer always fits."""
        texts = {name: cut_text(getattr(self, name), TEXT_MAX) for name in ("id", "path", "reason", "release", "drop")}
        numbers = {name: getattr(self, name) for name in ("position", "rows", "since_ms")}
        subject = None if self.subject is None else cut_text(self.subject, TEXT_MAX)
        return {**texts, **numbers, "hour": self.hour, "subject": subject}


def list_head(entries: Iterable[Quarantined], after: str, limit: int) -> Head:
    """The answer to QUARANTINE_LIST: entries whose id comes behind ``after``, in order, and whether there are more."""
    behind = (entry for entry in sorted(entries, key=lambda entry: entry.id) if entry.id > after)
    count = max(1, min(limit, PAGE_MAX))
    page = list(islice(behind, count + 1))
    heads: list[HeadValue] = [entry.head() for entry in page[:count]]
    return {"entries": heads, "more": len(page) > count}


def decided_head(id_: str, done: bool, message: str) -> Head:
    """The answer to QUARANTINE_RELEASE and QUARANTINE_DROP."""
    return {"id": cut_text(id_, TEXT_MAX), "done": done, "message": cut_text(message, TEXT_MAX)}


def read_list(head: Head) -> tuple[list[Quarantined], bool]:
    """The entries of an answer, and whether there are more."""
    return need_page(head, "entries", _read)


def _read(head: Head) -> Quarantined:
    return Quarantined(
        need_str(head, "id"),
        need_str(head, "path"),
        need_int(head, "position"),
        need_str(head, "reason"),
        need_int(head, "rows"),
        need_int(head, "since_ms"),
        optional_str(head, "hour"),
        optional_str(head, "subject"),
        need_str(head, "release"),
        need_str(head, "drop"),
    )
