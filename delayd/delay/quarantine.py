"""Quarantine: files and values that this server can't read or that don't check, set aside by name until they are mended
(rules L5, L9, L10).

Invariant: an entry concerns only the thing that its name says, and everything else goes on. Nothing is written to a
damaged file: what belongs into it goes to a file beside it, in the same format. When the damaged file was restored from
a copy, the contents of the file beside it are appended to it.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_from_name, hour_name
from delayd.log.dispatch import NewPart, Outcome, OutcomeRows
from delayd.machine.clock import Clock
from delayd.machine.disk import Disk, list_named
from delayd.wire.status import Decision, Quarantined

Decided = Callable[[bool, str], None]
"""Called with whether an operator's decision changed something, and a sentence that says what."""

log = logging.getLogger(__name__)

OUTCOMES_BESIDE = re.compile(r"([0-9]{10})(?:\.([0-9]+))?\.log")


class Kind(StrEnum):
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
COSTS: dict[Kind, dict[Decision, str]] = {
    Kind.SCHEDULE: {
        Decision.TAKE: _READ_AGAIN,
        Decision.GIVE_UP: "messages of this hour that only the damaged part of its file holds are lost for good",
    },
    Kind.DISPATCH: {
        Decision.TAKE: _READ_AGAIN,
        Decision.GIVE_UP: "messages of this hour without a known outcome are never sent; what was not delivered is "
        "lost",
    },
    Kind.ROWS: {
        Decision.TAKE: "they are read again now; nothing is lost by it",
        Decision.GIVE_UP: "these messages are given up: they get the outcome DEAD and are never sent",
    },
    Kind.SEALED: {Decision.TAKE: "the file is looked for again now; nothing is lost by it"},
    Kind.SEAL: {Decision.TAKE: _READ_AGAIN},
    Kind.LOG: {
        Decision.TAKE: "the file is looked for again now, and written again if it is gone and the server still has it "
        "open; nothing is lost by it"
    },
    Kind.TARGET: {
        Decision.RELEASE: "the subject goes where meta says; if its route was moved since, messages in doubt may come "
        "twice"
    },
    Kind.PRODUCER: {
        Decision.RELEASE: "its batches are taken again; one that it repeats from before this start may be kept twice"
    },
}


@dataclass(slots=True)
class Entry:
    """One thing that is set aside."""

    kind: Kind
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
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        kind: Kind,
        name: str,
        error: DamagedData,
        rows: int = 0,
        *,
        hour: int | None = None,
        subject: str | None = None,
    ) -> None:
        """Set something aside, or update why and how many rows; a new reason is logged."""
        entry = Entry(kind, name, error, rows, self._clock.now_ms(), hour, subject)
        known = self._entries.get(entry.id)
        if known is not None:
            entry.since_ms = known.since_ms
        self._entries[entry.id] = entry
        if known is None or str(known.error) != str(error):
            log.critical("quarantined id=%s rows=%d reason=%r", entry.id, rows, str(error))

    def lift(self, kind: Kind, name: str) -> bool:
        """Take something back; return whether it was set aside."""
        entry = self._entries.pop(f"{kind}/{name}", None)
        if entry is not None:
            log.info("released id=%s rows=%d", entry.id, entry.rows)
        return entry is not None

    def find(self, id_: str) -> Entry | None:
        """The entry of an id."""
        return self._entries.get(id_)

    def get(self, kind: Kind, name: str) -> Entry | None:
        """The entry of a kind and a name."""
        return self._entries.get(f"{kind}/{name}")

    def has_hour(self, hour: int) -> bool:
        """Whether one of an hour's files is set aside."""
        name = hour_name(hour)
        return any(f"{kind}/{name}" in self._entries for kind in (Kind.SCHEDULE, Kind.DISPATCH))

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


def quarantine_path(folder: str, hour: int, number: int = 1) -> str:
    """Path of a file that takes outcomes of an hour while its dispatch log and the files with lower numbers are
    damaged.
    """
    name = hour_name(hour) if number == 1 else f"{hour_name(hour)}.{number}"
    return f"{folder}/quarantine/{name}.log"


def outcomes_beside(disk: Disk, folder: str) -> dict[int, list[int]]:
    """The numbers, rising, of the files that stand beside damaged dispatch logs, by hour."""
    found: dict[int, list[int]] = {}
    for name in list_named(disk, f"{folder}/quarantine"):
        match = OUTCOMES_BESIDE.fullmatch(name)
        if match is None:
            continue
        try:
            found.setdefault(hour_from_name(match[1]), []).append(int(match[2] or 1))
        except BadArgument:
            continue  # These ten digits name no hour: no server wrote such a file.
    return {hour: sorted(numbers) for hour, numbers in found.items()}


def schedule_beside_path(folder: str, hour: int) -> str:
    """Path of the file that takes rows of an hour while its schedule log is damaged."""
    return f"{folder}/quarantine/{hour_name(hour)}.schedule.log"


def missing_parts(outcomes: OutcomeRows, known: OutcomeRows) -> list[NewPart]:
    """The rows of ``outcomes`` that are not among the known ones, as they were recorded."""
    missing = ~np.isin(outcomes.sequences, known.sequences)
    parts: list[NewPart] = []
    for number in np.unique(outcomes.part_of[missing]).tolist():
        rows = outcomes.part_of == number
        part = outcomes.parts[number]
        whole = NewPart(
            outcomes.sequences[rows],
            outcomes.deliver_at_ms[rows],
            Outcome(int(part["outcome"])),
            claimed_at_ms=int(part["claimed_at_ms"]),
            target_log_id=int(part["target_log_id"]),
            epoch=int(part["epoch"]),
            batch_id=int(part["batch_id"]),
            target_appended_at_ms=int(part["target_appended_at_ms"]),
            target_offset=int(part["target_offset"]),
            attempt=int(part["attempt"]),
            hashes=outcomes.content_hash[rows],
            reason=int(part["reason"]),
        )
        parts += whole.only(missing[rows])
    return parts


def forget_quarantine(disk: Disk, folder: str, hour: int, numbers: Sequence[int]) -> None:
    """Remove the files beside a restored dispatch log, which holds all their outcomes now."""
    for number in numbers:
        disk.remove(quarantine_path(folder, hour, number))
    disk.sync_folder(f"{folder}/quarantine")
    log.info("hour_restored hour=%s", hour_name(hour))
