"""Quarantine: files and values that this server can't read or that don't check, set aside by name until they are mended
(rules L5, L9, L10).

Invariants: an entry concerns only the thing that its name says, and everything else goes on. An operator's decision is
durable in the message log before anything is done.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from delayd.errors import BadArgument, DamagedData, DiskFull
from delayd.hours import hour_name
from delayd.log.control import OperatorWord, encode_known
from delayd.machine.clock import Clock
from delayd.wire.status import Decision, Quarantined

OnWord = Callable[[bool, str], None]
"""Called with whether an operator's decision changed something, and a sentence that says what."""

log = logging.getLogger(__name__)


class SetAsideKind(StrEnum):
    """The kinds of things that may be quarantined; kind and name together are the id of an entry."""

    SCHEDULE = "schedule"  # An hour's schedule log: the entry counts its rows that are not in memory.
    DISPATCH = "dispatch"  # An hour's dispatch log: nobody knows which of the hour's rows were handed over.
    ROWS = "rows"  # Rows of an hour, or of the message log, whose bodies can't be read.
    SEALED = "sealed"  # A sealed hour's file that is gone or short: only audits need it.
    SEAL = "seal"  # The seal log: no hour is sealed until it is back.
    TARGET = "target"  # The note that says at which target a subject's rows may be.
    LOG = "log"  # A file of the message log that was removed or cut, or left out by the start.
    PRODUCER = "producer"  # The numbers of a producer's batches.


_READ_AGAIN = "the file is read again now; when it is whole the server pauses for some seconds, and nothing is lost"
COSTS: dict[SetAsideKind, dict[Decision, str]] = {
    SetAsideKind.SCHEDULE: {
        Decision.TAKE: _READ_AGAIN,
        Decision.GIVE_UP: "messages of this hour that only the damaged part of its file holds are lost for good",
    },
    SetAsideKind.DISPATCH: {
        Decision.TAKE: _READ_AGAIN,
        Decision.GIVE_UP: "messages of this hour without a known outcome are never sent; what was not delivered is "
        "lost",
    },
    SetAsideKind.ROWS: {
        Decision.TAKE: "they are read again now; nothing is lost by it",
        Decision.GIVE_UP: "these messages are given up: they get the outcome DEAD and are never sent",
    },
    SetAsideKind.SEALED: {Decision.TAKE: "the file is looked for again now; nothing is lost by it"},
    SetAsideKind.SEAL: {Decision.TAKE: _READ_AGAIN},
    SetAsideKind.LOG: {
        Decision.TAKE: "the file is looked for again now, and written again if it is gone and the server still has it "
        "open; nothing is lost by it"
    },
    SetAsideKind.TARGET: {
        Decision.RELEASE: "the subject goes where meta says; if its route was moved since, messages in doubt may come "
        "twice"
    },
    SetAsideKind.PRODUCER: {
        Decision.RELEASE: "its batches are taken again; one that it repeats from before this start may be kept twice"
    },
}


@dataclass(slots=True)
class SetAsideEntry:
    """One thing that is set aside."""

    kind: SetAsideKind
    name: str
    error: DamagedData
    rows: int
    since_ms: int
    hour: int | None
    subject: str | None

    @property
    def id(self) -> str:
        """The name by which an operator refers to it."""
        return f"{self.kind}/{self.name}"


class Quarantine:
    """The entries of one server, by id; for the loop alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, SetAsideEntry] = {}

    def __iter__(self) -> Iterator[SetAsideEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        kind: SetAsideKind,
        name: str,
        error: DamagedData,
        rows: int = 0,
        *,
        hour: int | None = None,
        subject: str | None = None,
    ) -> None:
        """Set something aside, or update why and how many rows; a new reason is logged."""
        entry = SetAsideEntry(kind, name, error, rows, self._clock.now_ms(), hour, subject)
        known = self._entries.get(entry.id)
        if known is not None:
            entry.since_ms = known.since_ms
        self._entries[entry.id] = entry
        if known is None or str(known.error) != str(error):
            log.critical("quarantined id=%s rows=%d reason=%r", entry.id, rows, str(error))

    def lift(self, kind: SetAsideKind, name: str) -> bool:
        """Take something back; return whether it was set aside."""
        entry = self._entries.pop(f"{kind}/{name}", None)
        if entry is not None:
            log.info("released id=%s rows=%d", entry.id, entry.rows)
        return entry is not None

    def find(self, id_: str) -> SetAsideEntry | None:
        """The entry of an id."""
        return self._entries.get(id_)

    def get(self, kind: SetAsideKind, name: str) -> SetAsideEntry | None:
        """The entry of a kind and a name."""
        return self._entries.get(f"{kind}/{name}")

    def has_hour(self, hour: int) -> bool:
        """Whether one of an hour's files is set aside."""
        name = hour_name(hour)
        return any(f"{kind}/{name}" in self._entries for kind in (SetAsideKind.SCHEDULE, SetAsideKind.DISPATCH))

    def hours(self) -> int:
        """How many hours have a file that is set aside."""
        return len({entry.hour for entry in self if entry.hour is not None})

    def listing(self) -> list[Quarantined]:
        """All entries, as requests list them."""
        return [
            Quarantined(
                entry.id,
                entry.error.path,
                entry.error.position,
                str(entry.error),
                entry.rows,
                entry.since_ms,
                None if entry.hour is None else hour_name(entry.hour),
                entry.subject,
                COSTS[entry.kind],
            )
            for entry in self
        ]


Act = Callable[[SetAsideEntry, bool, OnWord], None]
"""Tries a quarantined thing again, or gives it up if the second argument is True; the third is called with the
result.
"""


LogWord = Callable[[bytes, Callable[[], None], Callable[[DiskFull], None]], None]
"""Logs a control batch; calls the second when it is durable, or the third when there is no space for it."""


class OperatorWords:
    """Words of operators about entries of the quarantine; ``acts`` has the function that carries them out, by kind."""

    def __init__(
        self,
        quarantine: Quarantine,
        log_control: LogWord,
        acts: Mapping[SetAsideKind, Act],
    ) -> None:
        self._quarantine = quarantine
        self._log_control = log_control
        self._acts = acts

    def release(self, id_: str, done: OnWord) -> None:
        """Try a thing again; BadArgument when no entry has this id."""
        self._obey("release", self._entry(id_), done)

    def drop(self, id_: str, done: OnWord) -> None:
        """Give a thing up; BadArgument when no entry has this id."""
        self._obey("drop", self._entry(id_), done)

    def _entry(self, id_: str) -> SetAsideEntry:
        entry = self._quarantine.find(id_)
        if entry is None:
            raise BadArgument(f"nothing is quarantined as {id_!r}; see `delayd mend list`")
        return entry

    def _obey(self, action: str, entry: SetAsideEntry, done: OnWord) -> None:
        log.warning("operator action=%s id=%s rows=%d", action, entry.id, entry.rows)
        word = OperatorWord(action, entry.id, entry.rows)
        act = partial(self._acts[entry.kind], entry, action == "drop", done)

        def has_no_space(error: DiskFull) -> None:
            done(False, f"nothing is done, for the decision can't be stored: {error.message}")

        self._log_control(encode_known([word]), act, has_no_space)
