"""Mend: what a server can't read and has set aside, as it is listed and decided on (docs/protocol.md, 6 and 7).

Invariant: an entry keeps its id for as long as the same thing is quarantined, over restarts too, so an operator's
command never meets another entry than the one that was listed. A server takes only a decision that the entry offers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from delayd.errors import BadArgument
from delayd.machine.operating import Wait, WaitKind
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_map,
    need_page,
    need_str,
    optional_str,
)
from delayd.wire.room import cut_text

PAGE_MAX = 100  # Entries in one answer: they fit a head even with all texts at their longest.
TEXT_MAX = 1_000  # Bytes of a text in an entry; a path that is longer is cut.


class Decision(StrEnum):
    """What an operator may decide about something that is quarantined."""

    TAKE = "take"  # Its file was put back: read it again now.
    RELEASE = "release"  # Go on without what can't be read, from here on as if it were new.
    GIVE_UP = "give-up"  # There is no copy: it is lost.


_DONE = {Decision.TAKE: "taken", Decision.RELEASE: "released", Decision.GIVE_UP: "given up"}
_WAITS = {
    frozenset({Decision.TAKE}): WaitKind.FILE_SET_ASIDE,
    frozenset({Decision.TAKE, Decision.GIVE_UP}): WaitKind.FILE_SET_ASIDE_OR_GIVEN_UP,
    frozenset({Decision.RELEASE}): WaitKind.SET_ASIDE,
    frozenset({Decision.RELEASE, Decision.GIVE_UP}): WaitKind.GROUP_DAMAGED,
    frozenset({Decision.GIVE_UP}): WaitKind.GROUP_WITHOUT_NAME,
}


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that a server sets aside because it can't be read or does not check (rules L5, L9, L10)."""

    id: str  # Kind and name, such as ``schedule/2026112203``.
    path: str
    position: int  # Byte in the file.
    reason: str
    rows: int  # Messages concerned, as far as that is known.
    since_ms: int  # 0 when that is not known.
    hour: str | None = None
    subject: str | None = None
    costs: Mapping[Decision, str] = field(default_factory=dict)  # What each decision that it offers does and costs.

    def head(self) -> Head:
        """The entry as it stands in an answer; every text is cut, so that an answer always fits."""
        texts = {name: cut_text(getattr(self, name), TEXT_MAX) for name in ("id", "path", "reason")}
        numbers = {name: getattr(self, name) for name in ("position", "rows", "since_ms")}
        subject = None if self.subject is None else cut_text(self.subject, TEXT_MAX)
        costs: HeadValue = {decision.value: cut_text(cost, TEXT_MAX) for decision, cost in self.costs.items()}
        return {**texts, **numbers, "hour": self.hour, "subject": subject, "costs": costs}

    def wait(self, log_id: int, kind: WaitKind | None = None) -> Wait:
        """What STATUS of the server ``log_id`` tells of it. ``kind`` is that of its decisions unless given."""
        words = {"id": self.id, "path": self.path, "log_id": f"{log_id:016x}", "cost": self.costs.get(Decision.GIVE_UP)}
        what = f"{self.rows:,} messages: {self.id}" if self.rows else self.id
        return (kind or _WAITS[frozenset(self.costs)]).wait(self.reason, what=what, **words)

    def check(self, decision: Decision) -> None:
        """Raise BadArgument for a decision that it does not offer."""
        if decision not in self.costs:
            offered = " or ".join(_DONE[each] for each in self.costs) or "mended by no decision"
            raise BadArgument(f"{self.id} can't be {_DONE[decision]}; it can be {offered}: {self.reason}")


def find_entry(entries: Iterable[Quarantined], id_: str) -> Quarantined:
    """The entry of that id; BadArgument when there is none."""
    for entry in entries:
        if entry.id == id_:
            return entry
    raise BadArgument(f"nothing is quarantined as {id_}; see `delayd mend list`")


def read_decision(head: Head, entries: Iterable[Quarantined]) -> tuple[str, Decision]:
    """The id and the decision of a MEND; BadArgument when nothing is quarantined so, or does not offer this."""
    word = need_str(head, "decision")
    entry = find_entry(entries, need_str(head, "id"))
    if word not in list(Decision):
        raise BadArgument(f"{word!r} is no decision; say one of {', '.join(Decision)}")
    entry.check(Decision(word))
    return entry.id, Decision(word)


def list_head(entries: Iterable[Quarantined], after: str, limit: int) -> Head:
    """The answer to MEND_LIST: entries whose id comes behind ``after``, in order, and whether there are more."""
    behind = (entry for entry in sorted(entries, key=lambda entry: entry.id) if entry.id > after)
    count = max(1, min(limit, PAGE_MAX))
    page = list(islice(behind, count + 1))
    heads: list[HeadValue] = [entry.head() for entry in page[:count]]
    return {"entries": heads, "more": len(page) > count}


def decided_head(id_: str, done: bool, message: str) -> Head:
    """The answer to MEND."""
    return {"id": cut_text(id_, TEXT_MAX), "done": done, "message": cut_text(message, TEXT_MAX)}


def read_list(head: Head) -> tuple[list[Quarantined], bool]:
    """The entries of an answer, and whether there are more."""
    return need_page(head, "entries", _read)


def _read(head: Head) -> Quarantined:
    costs = need_map(head, "costs")
    return Quarantined(
        need_str(head, "id"),
        need_str(head, "path"),
        need_int(head, "position"),
        need_str(head, "reason"),
        need_int(head, "rows"),
        need_int(head, "since_ms"),
        optional_str(head, "hour"),
        optional_str(head, "subject"),
        {decision: need_str(costs, decision) for decision in Decision if decision in costs},
    )
