"""What every server says of itself: STATUS, what waits for an operator, and what it can't read (docs/protocol.md).

An entry of *waits* says what waits and why, each in at most `WAIT_TEXT_MAX` bytes, and which command helps. A command
is told whole, because nobody can type one that was cut. Invariant: a list has at most `WAITS_MAX` entries and
`WAITS_BYTES_MAX`, so that an answer with two of them always fits a head.

What a server can't read and has set aside is listed and decided on by MEND_LIST and MEND. Invariant: an entry keeps its
id for as long as the same thing is quarantined, over restarts too, so an operator's command never meets another entry
than the one that was listed. A server takes only a decision that the entry offers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from delayd import kernel
from delayd.errors import BadArgument, BadRequest
from delayd.machine.operating import Wait, WaitKind, counted
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    TEXT_PREFIX_BYTES_MAX,
    cut_text,
    need_bool,
    need_int,
    need_list,
    need_map,
    need_maps,
    need_str,
    optional_str,
    text_bytes,
)


def status_head(
    *,
    role: str,
    log_id: int,
    epoch: int,
    cluster_id: int,
    pid: int,
    started_at_ms: int,
    now_ms: int,
    counters: Mapping[str, int],
    waits: Iterable[Wait],
    refuses: Iterable[Wait] = (),
    own: Mapping[str, HeadValue],
) -> Head:
    """The answer to STATUS.

    Args:
        role: meta, delay or realtime.
        log_id: who the server is; 0 when its files do not say.
        epoch: which of its starts this is.
        cluster_id: the cluster that it belongs to; 0 while it does not know.
        pid: its process.
        started_at_ms: when it started, by its own clock.
        now_ms: that clock, now.
        counters: figures of its role.
        waits: what waits for an operator.
        refuses: what it refuses for now; each of these ends by itself.
        own: what this role adds, and what the server says of its connections and its loop.
    """
    return {
        **own,
        "role": role,
        "log_id": log_id,
        "epoch": epoch,
        "cluster_id": cluster_id,
        "pid": pid,
        "started_at_ms": started_at_ms,
        "now_ms": now_ms,
        "counters": dict(counters),
        "waits": waits_head(waits),
        "refuses": waits_head(refuses),
        "kernel": kernel.state,
    }


WAITS_MAX = 100  # States in each of the two lists of a STATUS, and at most 384 KiB.
WAIT_TEXT_MAX = 500
COMMAND_MAX = 6_000  # A path has at most 4,096 bytes, and 1,024 slots are 2,600.
WAITS_BYTES_MAX = 384 << 10  # A hundred entries at a usual length are a tenth of it.
_SIZES = (WAIT_TEXT_MAX, WAIT_TEXT_MAX, COMMAND_MAX)


def waits_head(waits: Iterable[Wait]) -> list[HeadValue]:
    """The list as it stands in an answer: as many of the first ones as there is room for."""
    rows: list[HeadValue] = []
    left = WAITS_BYTES_MAX
    for wait in islice(waits, WAITS_MAX):
        row: list[HeadValue] = [cut_text(*each) for each in zip(wait, _SIZES, strict=True)]
        left -= sum(len(text_bytes(str(text))) + TEXT_PREFIX_BYTES_MAX for text in row)
        if left < 0:
            break
        rows.append(row)
    return rows


def read_waits(head: Head, name: str) -> list[Wait]:
    """The list of an answer; BadRequest when it is something else."""
    found: list[Wait] = []
    for row in need_list(head, name):
        texts = [text for text in row if isinstance(text, str)] if isinstance(row, list) else []
        if not isinstance(row, list) or len(row) != len(Wait._fields) or len(texts) != len(row):
            raise BadRequest(f"{name} has an entry that is not three texts", field=name)
        found.append(Wait._make(texts))
    return found


ENTRIES_MAX = 100  # Entries in one answer: they fit a head even with all texts at their longest.
ENTRY_TEXT_MAX = 1_000  # Bytes of a text in an entry; a path that is longer is cut.


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
        texts = {name: cut_text(getattr(self, name), ENTRY_TEXT_MAX) for name in ("id", "path", "reason")}
        numbers = {name: getattr(self, name) for name in ("position", "rows", "since_ms")}
        subject = None if self.subject is None else cut_text(self.subject, ENTRY_TEXT_MAX)
        costs: HeadValue = {decision.value: cut_text(cost, ENTRY_TEXT_MAX) for decision, cost in self.costs.items()}
        return {**texts, **numbers, "hour": self.hour, "subject": subject, "costs": costs}

    def wait(self, log_id: int, kind: WaitKind | None = None) -> Wait:
        """What STATUS of the server ``log_id`` tells of it. ``kind`` is that of its decisions unless given."""
        words = {"id": self.id, "path": self.path, "log_id": f"{log_id:016x}", "cost": self.costs.get(Decision.GIVE_UP)}
        what = f"{counted(self.rows, 'message|messages')}: {self.id}" if self.rows else self.id
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
    count = max(1, min(limit, ENTRIES_MAX))
    page = list(islice(behind, count + 1))
    heads: list[HeadValue] = [entry.head() for entry in page[:count]]
    return {"entries": heads, "more": len(page) > count}


def decided_head(id_: str, done: bool, message: str) -> Head:
    """The answer to MEND."""
    return {"id": cut_text(id_, ENTRY_TEXT_MAX), "done": done, "message": cut_text(message, ENTRY_TEXT_MAX)}


def read_list(head: Head) -> tuple[list[Quarantined], bool]:
    """The entries of an answer, and whether there are more."""
    return [_entry(item) for item in need_maps(head, "entries")], need_bool(head, "more")


def _entry(head: Head) -> Quarantined:
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
