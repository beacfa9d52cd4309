"""Seals: verifies seals as another process, from the files alone (docs/formats/seal.md, rule S4).

Invariant (rule P3): the published table is read first, then the seal log, then the hours' files. So each hour that the
table calls sealed has its seal, and hours are compared with their seals only if all their rows are there by the table.
"""

import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from delayd.batch.columns import BatchKind
from delayd.batch.content import Tally, tally
from delayd.errors import BadArgument, DamagedData
from delayd.log.hour import (
    NO_SEAL,
    OUTCOME_ROW,
    PART,
    SCHEDULE_ROW,
    SEALED_OUTCOMES,
    OutcomeRows,
    Seal,
    SealFacts,
    decode_seals,
    schedule_path,
    seal_place,
)
from delayd.log.log import segment_name
from delayd.machine.disk import Disk, RealDisk
from delayd.outcome import Outcome
from delayd.reading.files.directory import Role, ScheduleSnapshot, find_directories, take_snapshot
from delayd.reading.files.origins import NO_HOURS, read_hour, read_outcomes
from delayd.reading.files.row_arrays import ScheduleRows, Sorter
from delayd.reading.files.stored_groups import LogMoved, TornTail, log_size, read_log

PIECE_ROWS = 65_536  # Rows that are packed at a time: 4.5 MiB of outcomes.
FIGURES = ("rows", "body_bytes", *(outcome.word for outcome in SEALED_OUTCOMES), "due_min_ms", "due_max_ms")
# A digest has zeros in what is reserved, where parts that were cut keep a place.
PART_FIELDS = tuple(set(OUTCOME_ROW.names or ()) & set(PART.names or ()) - {"reserved"})

Progress = Callable[[int, int], None]  # Hours verified, hours in all.


class SealState(StrEnum):
    """The result of verifying a seal."""

    VERIFIED = "verified"
    DELETED = "deleted"  # Retention has removed the hour: only its seal is left, and its place in the chain.
    UNREAD = "unread"  # The caller did not ask for the hour, or it was sealed after the published table that was read.
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class SealReport:
    """One seal, or an hour that should have one: then ``seal`` is None. ``differs`` says what breaks it."""

    log_id: int
    hour: int
    seal: Seal | None
    state: SealState
    differs: str = ""


@dataclass(frozen=True, slots=True)
class SealsReport:
    """The seals of all delay servers of a directory, in the order of their logs."""

    seals: tuple[SealReport, ...]
    torn: tuple[TornTail, ...]

    @property
    def broken(self) -> tuple[SealReport, ...]:
        return tuple(report for report in self.seals if report.state is SealState.BROKEN)


class SealBook:
    """The seals of one delay server, with the contradictions that were found so far."""

    def __init__(self, disk: Disk, snapshot: ScheduleSnapshot, torn: list[TornTail] | None = None) -> None:
        """Read the seal log; ``snapshot`` was taken before. Raises DamagedData when a group of it does not check."""
        self._disk = disk
        self._snapshot = snapshot
        self._faults: dict[int, list[str]] = {}  # By number of the seal.
        self._verified: set[int] = set()  # Hours.
        self._seals = list(_read_seals(disk, snapshot, [] if torn is None else torn))
        self._of_hour: dict[int, int] = {}
        self._check_chain()

    @property
    def seals(self) -> list[Seal]:
        return self._seals

    def standing(self) -> list[int]:
        """Hours that have a seal and rows to compare with it."""
        return [hour for hour in self._of_hour if self.has_standing(hour)]

    def deleted(self) -> Iterator[Seal]:
        return (seal for seal in self._seals if self.is_deleted(seal.facts.hour))

    def has_standing(self, hour: int) -> bool:
        """Whether an hour has a seal and rows to compare with it."""
        return hour in self._of_hour and self._snapshot.is_closed(hour) and not self.is_deleted(hour)

    def is_deleted(self, hour: int) -> bool:
        """Whether retention has removed an hour that has a seal."""
        filed = self._snapshot.hours.get(hour)
        if filed is not None and not filed.removed:
            return False
        return not self._disk.exists(schedule_path(self._snapshot.directory.path, hour))

    def check(self, hour: int) -> "SealCheck":
        """What compares the rows of a standing hour, maybe in parts, with its seal; its result is for `note`."""
        return SealCheck(self._seals[self._of_hour[hour]].facts)

    def note(self, hour: int, differs: Sequence[str]) -> None:
        """Note the result of comparing a standing hour with its seal; this does not compare anything itself."""
        self._verified.add(hour)
        self._faults[self._of_hour[hour]] += differs

    def fail(self, hour: int, what: str) -> None:
        self._faults[self._of_hour[hour]].append(what)

    def reports(self) -> Iterator[SealReport]:
        """The results seal by seal, and then the hours whose seal is missing."""
        log_id = self._snapshot.directory.log_id
        for number, seal in enumerate(self._seals):
            hour = seal.facts.hour
            if self._faults[number]:
                yield SealReport(log_id, hour, seal, SealState.BROKEN, "; ".join(self._faults[number]))
            elif hour in self._verified:
                yield SealReport(log_id, hour, seal, SealState.VERIFIED)
            else:
                deleted = self.is_deleted(hour)
                yield SealReport(log_id, hour, seal, SealState.DELETED if deleted else SealState.UNREAD)
        for hour, filed in sorted(self._snapshot.hours.items()):
            if filed.sealed and hour not in self._of_hour:
                what = "the checkpoint calls the hour sealed, and the seal log has no seal of it"
                yield SealReport(log_id, hour, None, SealState.BROKEN, what)

    def _check_chain(self) -> None:
        before = NO_SEAL
        for number, seal in enumerate(self._seals):
            faults = self._faults[number] = []
            if seal.log_id != self._snapshot.directory.log_id:
                faults.append(f"it is of the log {seal.log_id:016x}")
            if seal.number != number:
                faults.append(f"it is number {seal.number}, and {number} seals are before it")
            if seal.previous_sha256 != before:
                faults.append("the seal before it is not the one that it follows")
            if seal.facts.hour in self._of_hour:
                faults.append(f"the hour has seal {self._of_hour[seal.facts.hour]} already")
            self._of_hour.setdefault(seal.facts.hour, number)
            before = seal.sha256


def verify_seals(
    data: str, *, hours: Container[int] | None = None, progress: Progress | None = None, disk: Disk | None = None
) -> SealsReport:
    """Verify the seals of a data directory, or of one server's, live, stopped or copied; nothing in it is changed.

    The rows of some ``hours`` are read, None for all; the chain is followed in any case. ``progress`` is called with
    the hours done and all hours.

    Raises:
        BadArgument: it holds no delay server's directory.
        DamagedData, NewerFormat: a seal log or a checkpoint can't be read.
    """
    disk = disk or RealDisk()
    delays = [directory for directory in find_directories(disk, data) if directory.role == Role.DELAY]
    if not delays:
        raise BadArgument(f"{data} holds no delay server's directory; give the one that `delayd up --data` was given")
    torn: list[TornTail] = []
    snapshots = [take_snapshot(disk, directory) for directory in delays]
    books = [SealBook(disk, snapshot, torn) for snapshot in snapshots]
    wanted = [
        (snapshot, book, hour)
        for snapshot, book in zip(snapshots, books, strict=True)
        for hour in book.standing()
        if hours is None or hour in hours
    ]
    for done, (snapshot, book, hour) in enumerate(wanted, 1):
        _verify_hour(disk, snapshot, book, hour)
        if progress is not None:
            progress(done, len(wanted))
    return SealsReport(tuple(report for book in books for report in book.reports()), tuple(torn))


def _verify_hour(disk: Disk, snapshot: ScheduleSnapshot, book: SealBook, hour: int) -> None:
    torn: list[TornTail] = []
    try:
        outcomes = read_outcomes(disk, snapshot.directory, hour, None, torn)
        schedule = read_hour(disk, snapshot, NO_HOURS, hour)  # A sealed hour gets no more messages.
    except DamagedData as error:
        book.fail(hour, error.message)
        return
    except LogMoved as moved:
        # The table may say by now that the hour is removed; its files are removed only after that.
        filed = take_snapshot(disk, snapshot.directory).hours.get(hour)
        if filed is not None and not filed.removed:
            book.fail(hour, f"{moved}, and retention did not remove it")
        return
    check = book.check(hour)
    check.add(schedule, outcomes)
    book.note(hour, check.differences(torn))


def sealed_facts(disk: Disk, snapshot: ScheduleSnapshot) -> dict[int, SealFacts]:
    """The facts of each hour that has a seal. Raises DamagedData when the seal log does not check."""
    return {seal.facts.hour: seal.facts for seal in _read_seals(disk, snapshot, [])}


def _read_seals(disk: Disk, snapshot: ScheduleSnapshot, torn: list[TornTail]) -> Iterator[Seal]:
    place = seal_place(snapshot.directory.path, snapshot.directory.log_id)
    if not disk.list_folder(place.folder):
        return
    try:
        for group in read_log(disk, place, 0, log_size(disk, place), torn):
            for _, batch in group.batches():
                if batch.kind == BatchKind.SEAL:
                    yield from decode_seals(batch)
    except LogMoved as moved:
        # Seals are never removed.
        raise DamagedData(f"{place.folder}/{segment_name(0)}", 0, str(moved)) from moved


class SealCheck:
    """Compares the rows of a sealed hour with its seal; the rows come in parts, by rising sequence."""

    def __init__(self, sealed: SealFacts) -> None:
        self._sealed = sealed
        self._schedule, self._outcomes = hashlib.sha256(), hashlib.sha256()
        self._numbers: dict[str, int] = {}  # Subjects in the order in which they appear.
        self._rows = self._body_bytes = 0
        self._kinds = np.zeros(max(Outcome) + 1, np.int64)
        self._due: list[int] = []
        self._tally = Tally()
        self._paired = True  # Whether each row has exactly one outcome.

    def add(self, schedule: ScheduleRows, outcomes: OutcomeRows) -> None:
        outcomes = Sorter().outcomes(outcomes)
        self._paired &= np.array_equal(schedule.sequence, outcomes.sequences)
        self._kinds += np.bincount(outcomes.parts["outcome"][outcomes.part_of], minlength=len(self._kinds))
        self._rows += len(schedule)
        self._body_bytes += int(schedule.body_bytes.sum(dtype=np.uint64))
        if len(schedule):
            self._due += [int(schedule.deliver_at_ms.min()), int(schedule.deliver_at_ms.max())]
        self._add_schedule(schedule)
        self._add_outcomes(outcomes)
        self._tally += tally_of(outcomes)

    def differences(self, torn: Sequence[TornTail] = ()) -> list[str]:
        """Where the rows differ from the seal, for people; the figures come first, because they say how."""
        sealed, tails = self._sealed, [tail.sentence for tail in torn]
        if not self._rows:
            return [f"{sealed.rows} rows are sealed, and none is in the schedule log", *tails]
        kinds = (int(self._kinds[outcome]) for outcome in SEALED_OUTCOMES)
        found = (self._rows, self._body_bytes, *kinds, min(self._due), max(self._due))
        differs = [
            f"{name} {number} instead of {getattr(sealed, name)}"
            for name, number in zip(FIGURES, found, strict=True)
            if number != getattr(sealed, name)
        ]
        if not self._paired:
            differs.append("not each row has exactly one outcome")
        if self._schedule_sha256() != sealed.schedule_sha256:
            differs.append("the schedule side has other rows")
        if self._outcomes.digest() != sealed.outcomes_sha256:
            differs.append("the outcome side has other rows")
        elif self._tally[1:] != (sealed.tally_first, sealed.tally_second):
            differs.append("its tally is not that of its rows")
        return [*differs, *tails]

    def _schedule_sha256(self) -> bytes:
        digest = self._schedule.copy()
        for subject in self._numbers:
            name = subject.encode("ascii")
            digest.update(len(name).to_bytes(4, "little"))
            digest.update(name)
        return digest.digest()

    def _add_schedule(self, schedule: ScheduleRows) -> None:
        # Filled from behind, so that the first row of each subject is written last and stays.
        first = np.full(len(schedule.subjects), len(schedule))
        if len(first) == 1:
            first[:] = 0
        else:
            first[schedule.subject[::-1]] = np.arange(len(schedule))[::-1]
        seen = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(schedule))]
        number_of = np.zeros(len(schedule.subjects), np.uint32)
        for subject in seen.tolist():
            number_of[subject] = self._numbers.setdefault(schedule.subjects[subject], len(self._numbers))
        memory = np.zeros(min(PIECE_ROWS, len(schedule)), SCHEDULE_ROW)
        for start in range(0, len(schedule), PIECE_ROWS):
            piece = slice(start, start + PIECE_ROWS)
            packed = memory[: len(schedule) - start]
            packed["sequence"] = schedule.sequence[piece]
            packed["deliver_at_ms"] = schedule.deliver_at_ms[piece]
            packed["subject"] = number_of[schedule.subject[piece]]
            packed["body_bytes"] = schedule.body_bytes[piece]
            packed["content_hash"] = schedule.hashes()[piece]
            self._schedule.update(packed.view(np.uint8).data)

    def _add_outcomes(self, outcomes: OutcomeRows) -> None:
        parts = np.zeros(len(outcomes.parts), OUTCOME_ROW)
        for name in PART_FIELDS:
            parts[name] = outcomes.parts[name]
        for start in range(0, len(outcomes.sequences), PIECE_ROWS):
            piece = slice(start, start + PIECE_ROWS)
            # One part is copied whole for each row; copying a field at a time costs three times as much.
            packed = parts.take(outcomes.part_of[piece])
            packed["sequence"] = outcomes.sequences[piece]
            packed["deliver_at_ms"] = outcomes.deliver_at_ms[piece]
            packed["content_hash"] = outcomes.content_hash[piece]
            self._outcomes.update(packed.view(np.uint8).data)


def held_differs(held: Tally, facts: SealFacts) -> str:
    """Where what realtime servers still hold of an hour differs from its seal, the hour's rows being gone; "" if it
    does not.

    Retention may have removed rows there, too, or other servers have them: so fewer rows than were sealed are no
    difference.
    """
    sealed = Tally(facts.dispatched, facts.tally_first, facts.tally_second)
    same = held == sealed or held.rows < sealed.rows or facts.in_doubt
    if held.rows <= sealed.rows + facts.in_doubt and same:
        return ""
    return (
        f"its realtime servers held {held.rows} messages of it with the tally {held.digest}, "
        f"its seal says {sealed.rows} with {sealed.digest}"
    )


def tally_of(outcomes: OutcomeRows) -> Tally:
    """The tally of an hour's DISPATCHED outcomes."""
    handed_over = outcomes.parts["outcome"] == Outcome.DISPATCHED
    if handed_over.all():
        return tally(outcomes.sequences, outcomes.deliver_at_ms, outcomes.content_hash)
    rows = np.flatnonzero(handed_over[outcomes.part_of])
    return tally(outcomes.sequences[rows], outcomes.deliver_at_ms[rows], outcomes.content_hash[rows])
