"""Seals: verifies seals as another process, from the files alone (docs/formats/seal.md, rule S4), and compares what
delay servers handed over with what realtime servers held, by their tallies (docs/formats/tally.md).

Invariant (rule P3): the published table is read first, then the seal log, then the hours' files. So each hour that the
table calls sealed has its seal, and hours are compared with their seals only if all their rows are there by the table.

Only sealed hours are compared with tallies, because in other hours a row may be at its target without a durable
outcome. A target is compared only if each message that it ever had is tallied or still in its log. The same tallies
are printed as lines, which two machines compare without their rows: a delay server and its realtime servers print the
same line for an hour that they agree on. If the lines do not decide a question, that is not called a difference.
"""

import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from delayd.batch.columns import BatchKind
from delayd.batch.content import Tally, tally
from delayd.errors import BadArgument, CallerError, DamagedData
from delayd.hours import hour_from_name, hour_name
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
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.log.tally import NO_TALLIES, Tallier, Tallies, covered, decode_tallies, joined, sum_tallies, tally_place
from delayd.machine.disk import Disk, RealDisk
from delayd.outcome import Outcome
from delayd.reading.files.directory import Directory, Role, ScheduleSnapshot, find_directories, take_snapshot
from delayd.reading.files.origins import NO_HOURS, read_hour, read_outcomes
from delayd.reading.files.row_arrays import ScheduleRows, Sorter, TargetRows
from delayd.reading.files.stored_groups import LogMoved, TornTail, log_size, read_log, segment_bases, until_still
from delayd.reading.files.target_index import TargetIndex, read_target_rows

PIECE_ROWS = 65_536  # Rows that are packed at a time: 4.5 MiB of outcomes.
FIGURES = ("rows", "body_bytes", *(outcome.word for outcome in SEALED_OUTCOMES), "due_min_ms", "due_max_ms")
PART_FIELDS = tuple(name for name in OUTCOME_ROW.names or () if name in (PART.names or ()))

Progress = Callable[[int, int], None]  # Hours verified, hours in all.
HourOf = tuple[int, int]  # A delay server's log_id, and the hour since the epoch.
ALL = 0  # Stands for all realtime servers together, as in a seal.
_ID = "[0-9a-f]{16}"
_DELAY = re.compile(rf"delay ({_ID})")
_REALTIME = re.compile(rf"realtime ({_ID}) (whole|partly)")
_TALLY = re.compile(rf"([0-9]{{10}}) ({_ID}) ({_ID}|all) ([0-9]{{1,20}}) ({_ID})({_ID})")


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


@dataclass(frozen=True, slots=True)
class TargetTallies:
    """The contents of a realtime server's tally log, and where its message log began when this was read."""

    log_id: int
    entries: Tallies
    start: int  # Where its message log began when this was read.

    @property
    def end(self) -> int:
        return int(self.entries["end"].max(initial=0))

    @property
    def whole(self) -> bool:
        """Whether no message was left out: neither the entries have a gap, nor do they end below the message log."""
        ranges = covered(self.entries)
        return ranges == [(0, self.end)] and self.start <= self.end if ranges else self.start == 0

    def of_hour(self, origin: int, hour: int) -> Tallies:
        found: Tallies = self.entries[
            (self.entries["origin_log_id"] == np.uint64(origin)) & (self.entries["hour"] == hour)
        ]
        return found


def read_held(disk: Disk, directory: Directory, torn: list[TornTail]) -> TargetTallies:
    """Read the tally log of a realtime server, before its message log is read."""
    place = tally_place(directory.path, directory.log_id)
    bases = segment_bases(disk, _message_place(directory))
    if not disk.list_folder(place.folder):
        return TargetTallies(directory.log_id, NO_TALLIES, bases[0] if bases else 0)
    groups = read_log(disk, place, 0, log_size(disk, place), torn)
    batches = [batch for group in groups for _, batch in group.batches() if batch.kind == BatchKind.TALLY]
    return TargetTallies(
        directory.log_id, joined([decode_tallies(batch) for batch in batches]), bases[0] if bases else 0
    )


def held_now(disk: Disk, directory: Directory, torn: list[TornTail]) -> tuple[TargetTallies, dict[HourOf, Tally]]:
    """Everything that a realtime server held, by delay server and hour: its entries, and the log behind them."""
    held = read_held(disk, directory, torn)
    place = _message_place(directory)
    start = max(held.end, held.start)
    tallier = Tallier(start)
    for group in read_log(disk, place, start, log_size(disk, place), torn) if log_size(disk, place) > start else ():
        try:
            tallier.take(group)
        except CallerError as error:
            base = max(base for base in segment_bases(disk, place) if base <= group.header.offset)
            path, position = f"{place.folder}/{segment_name(base)}", group.header.offset - base + FILE_HEADER_BYTES
            raise DamagedData(path, position, f"the group there: {error.message}") from error
    return held, {key: found for key, found, _ in sum_tallies(joined([held.entries, tallier.entries()]))}


@dataclass(slots=True)
class SidesCheck:
    """Compares one sealed hour on both sides; its rows come in parts. Targets that have all of it are left out."""

    helds: Sequence[TargetTallies]
    index: TargetIndex
    origin: int
    hour: int
    _own: dict[int, Tally] = field(default_factory=dict)  # By target: the tally from the dispatch log.
    # By target: the tally of rows that its log still has behind its entries.
    _kept: dict[int, Tally] = field(default_factory=dict)
    _in_doubt: bool = False

    @property
    def _wanted(self) -> Iterator[tuple[int, TargetTallies, Tallies]]:
        """Targets by number that were tallied without a gap, and whose retention has removed rows of the hour."""
        for number, held in enumerate(self.helds):
            entries = held.of_hour(self.origin, self.hour)
            start = self.index.targets[number].start
            if held.whole and start <= held.end and (entries["begin"] < start).any():
                yield number, held, entries

    def add_sent(self, outcomes: OutcomeRows) -> None:
        self._in_doubt |= bool((outcomes.parts["outcome"] == Outcome.IN_DOUBT).any())
        for number, held, _ in self._wanted:
            self._own[number] = self._own.get(number, Tally()) + tally_of(outcomes, held.log_id)

    def add_held(self, realtime: TargetRows) -> None:
        for number, held, _ in self._wanted:
            self._kept[number] = self._kept.get(number, Tally()) + _tally_behind(held, number, realtime)

    def proved(self) -> int:
        """How many messages that targets have removed their tallies prove, which agree with the dispatch log."""
        if self._in_doubt:
            return 0
        batches = self.index.batches
        of_hour = (batches["origin_log_id"] == np.uint64(self.origin)) & (batches["hour"] == self.hour)
        proved = 0
        for number, _, entries in self._wanted:
            own = self._own.get(number, Tally())
            if own == self._kept.get(number, Tally()) + _sum(entries):
                proved += own.rows - int(batches["count"][of_hour & (batches["target"] == number)].sum())
        return proved

    def differences(self) -> list[str]:
        """The differences, for people. None if rows were called in doubt: these may be at a target or not."""
        if self._in_doubt:
            return []
        found: list[str] = []
        for number, held, entries in self._wanted:
            own = self._own.get(number, Tally())
            theirs = self._kept.get(number, Tally()) + _sum(entries)
            if own != theirs:
                found.append(
                    f"the realtime server {held.log_id:016x} held {theirs.rows} messages of it with the tally "
                    f"{theirs.digest}, the dispatch log says {own.rows} with {own.digest}"
                )
        return found


def deleted_hour_differs(
    disk: Disk, helds: Sequence[TargetTallies], index: TargetIndex, key: HourOf, sealed: Tally, in_doubt: int
) -> str:
    """Where the targets differ from the seal of a deleted hour; "" if they do not.

    Targets whose logs are not here may have the missing rows, so fewer rows than were sealed are no difference.
    """
    origin, hour = key
    batches = index.batches
    found = Tally()
    for number, held in enumerate(helds):
        own = (batches["target"] == number) & (batches["origin_log_id"] == origin) & (batches["hour"] == hour)
        own &= batches["offset"] >= held.end
        found += _sum(held.of_hour(origin, hour))
        if own.any():
            found += _tally_behind(held, number, read_target_rows(disk, index, batches[own]))
    differs = found.rows > sealed.rows + in_doubt or (found.rows == sealed.rows and not in_doubt and found != sealed)
    if not differs:
        return ""
    return (
        f"its realtime servers held {found.rows} messages of it with the tally {found.digest}, "
        f"its seal says {sealed.rows} with {sealed.digest}"
    )


def tally_of(outcomes: OutcomeRows, target_log_id: int | None = None) -> Tally:
    """The tally of an hour's DISPATCHED outcomes, for one realtime server or for all of them."""
    handed_over = outcomes.parts["outcome"] == Outcome.DISPATCHED
    if target_log_id is not None:
        handed_over &= outcomes.parts["target_log_id"] == np.uint64(target_log_id)
    if handed_over.all():
        return tally(outcomes.sequences, outcomes.deliver_at_ms, outcomes.content_hash)
    rows = np.flatnonzero(handed_over[outcomes.part_of])
    return tally(outcomes.sequences[rows], outcomes.deliver_at_ms[rows], outcomes.content_hash[rows])


def tallies_by_target(outcomes: OutcomeRows) -> Mapping[int, Tally]:
    """The same for each realtime server that the outcomes name."""
    handed_over = outcomes.parts["outcome"] == Outcome.DISPATCHED
    targets = np.unique(outcomes.parts["target_log_id"][handed_over]).tolist()
    return {target: tally_of(outcomes, target) for target in targets}


def segment_differs(entries: Tallies, found: Tallies) -> str:
    """Where the entries of a segment differ from what its bytes give; "" if they do not."""
    said = {key: (total, differing) for key, total, differing in sum_tallies(entries)}
    given = {key: (total, differing) for key, total, differing in sum_tallies(found)}
    for key in sorted(said.keys() | given.keys()):
        if said.get(key) != given.get(key):
            own, theirs = said.get(key, (Tally(), 0))[0], given.get(key, (Tally(), 0))[0]
            return (
                f"it says {own.rows} messages of the delay server {key[0]:016x} and hour {key[1]} with the tally "
                f"{own.digest}, the message log has {theirs.rows} with {theirs.digest}"
            )
    return ""


def _sum(entries: Tallies) -> Tally:
    total = Tally()
    for _, found, _ in sum_tallies(entries):
        total += found
    return total


def _tally_behind(held: TargetTallies, number: int, realtime: TargetRows) -> Tally:
    """The tally of a target's rows behind all entries, by the hashes that are stored beside the rows."""
    batches = realtime.batches
    own = (batches["target"] == number) & (batches["offset"] >= held.end)
    rows = np.flatnonzero(own[realtime.batch_of])
    return tally(realtime.sequence[rows], realtime.deliver_at_ms[rows], realtime.hashes()[rows])


def _message_place(directory: Directory) -> LogPlace:
    return LogPlace(directory.message_folder, FileKind.REALTIME, directory.log_id)


@dataclass(frozen=True, slots=True)
class Sides:
    """What delay servers handed over, and realtime servers held; ``sealed`` and ``sent`` have sealed hours only."""

    sealed: dict[HourOf, Tally] = field(default_factory=dict)
    sent: dict[tuple[HourOf, int], Tally] = field(default_factory=dict)  # Only hours whose files are still there.
    held: dict[tuple[HourOf, int], Tally] = field(default_factory=dict)
    delays: set[int] = field(default_factory=set)
    realtimes: dict[int, bool] = field(default_factory=dict)  # Whether the tally covers every row that it held.

    def lines(self, hours: Container[int] | None = None) -> Iterator[str]:
        """One line for each server, and for each hour and target below it."""
        for log_id in sorted(self.delays):
            yield f"delay {log_id:016x}"
            found = {**self.sent, **{(key, ALL): total for key, total in self.sealed.items()}}
            yield from _lines({key: each for key, each in found.items() if key[0][0] == log_id}, hours)
        for log_id, whole in sorted(self.realtimes.items()):
            yield f"realtime {log_id:016x} {'whole' if whole else 'partly'}"
            yield from _lines({key: each for key, each in self.held.items() if key[1] == log_id}, hours)

    def join(self, other: "Sides") -> "Sides":
        """Put both together; for a server that both have, the first one counts."""
        return Sides(
            other.sealed | self.sealed,
            other.sent | self.sent,
            {key: each for key, each in other.held.items() if key[1] not in self.realtimes} | self.held,
            self.delays | other.delays,
            other.realtimes | self.realtimes,
        )


class Compared(NamedTuple):
    """A sealed hour on both sides, at one realtime server or at all; ``differs`` is "" where they agree.

    ``agrees`` is None where the lines do not decide it; ``differs`` then says why.
    """

    log_id: int
    hour: int
    target: int
    agrees: bool | None
    differs: str


def read_sides(disk: Disk, data: str, hours: Container[int] | None = None, progress: Progress | None = None) -> Sides:
    """Read both sides from a directory; for realtime servers from the bytes that they keep."""
    directories = find_directories(disk, data)

    def read() -> Sides:
        sides = Sides()
        for directory in directories:
            if directory.role is Role.DELAY:
                _read_delay(disk, directory, sides, hours, progress)
            else:
                held, tallies = held_now(disk, directory, [])
                sides.realtimes[directory.log_id] = held.whole
                sides.held.update(((key, directory.log_id), each) for key, each in tallies.items())
        return sides

    return until_still(data, read)


def parse_lines(lines: Iterable[str], name: str) -> Sides:
    """Read lines that `Sides.lines` has printed; BadArgument names the first line of another form."""
    sides, section = Sides(), None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if found := _DELAY.fullmatch(text):
            section = int(found[1], 16)
            sides.delays.add(section)
        elif found := _REALTIME.fullmatch(text):
            section = int(found[1], 16)
            sides.realtimes[section] = found[2] == "whole"
        elif (found := _TALLY.fullmatch(text)) and section is not None:
            key = int(found[2], 16), _hour(found[1], name, number)
            target = ALL if found[3] == "all" else int(found[3], 16)
            total = Tally(int(found[4]), int(found[5], 16), int(found[6], 16))
            if section in sides.realtimes:
                sides.held[key, target] = total
            elif target == ALL:
                sides.sealed[key] = total
            else:
                sides.sent[key, target] = total
        elif text:
            raise _no_line(name, number)
    return sides


def compare_sides(sides: Sides) -> list[Compared]:
    """Compare each sealed hour at each realtime server that the lines name."""
    found: list[Compared] = []
    sent: dict[HourOf, dict[int, Tally]] = {}
    for (key, target), total in sides.sent.items():
        sent.setdefault(key, {})[target] = total
    for key, total in sorted(sides.sealed.items()):
        by_target = sent.get(key, {})
        if sum(each.rows for each in by_target.values()) == total.rows:
            for target in sorted(sides.realtimes.keys()):
                own, theirs = by_target.get(target, Tally()), sides.held.get((key, target), Tally())
                found += _compare(sides, key, target, own, theirs)
            for target in sorted(by_target.keys() - sides.realtimes.keys()):
                found.append(Compared(*key, target, None, "no line of this realtime server is here"))
            continue
        # The hour is deleted: its seal only has the sum over all realtime servers.
        theirs = Tally()
        for target in sides.realtimes:
            theirs += sides.held.get((key, target), Tally())
        if theirs.rows < total.rows:
            what = f"{total.rows - theirs.rows} of its messages are at realtime servers whose lines are not here"
            found.append(Compared(*key, ALL, None, what))
        else:
            found += _compare(sides, key, ALL, total, theirs)
    return found


def _hour(text: str, name: str, number: int) -> int:
    try:
        return hour_from_name(text)
    except BadArgument:
        raise _no_line(name, number) from None


def _no_line(name: str, number: int) -> BadArgument:
    return BadArgument(f"{name}, line {number}: this is no line that `delayd seals --tallies` prints")


def _compare(sides: Sides, key: HourOf, target: int, own: Tally, theirs: Tally) -> Iterator[Compared]:
    if own == theirs:
        if own.rows:
            yield Compared(*key, target, True, "")
    elif theirs.rows < own.rows and not all(sides.realtimes.values() if target == ALL else [sides.realtimes[target]]):
        yield Compared(*key, target, None, "the realtime server's tallies leave messages out")
    else:
        what = f"handed over {own.rows} with {own.digest}, held {theirs.rows} with {theirs.digest}"
        yield Compared(*key, target, False, what)


def _read_delay(
    disk: Disk, directory: Directory, sides: Sides, hours: Container[int] | None, progress: Progress | None
) -> None:
    snapshot = take_snapshot(disk, directory)
    book = SealBook(disk, snapshot)
    sides.delays.add(directory.log_id)
    wanted = [seal.facts for seal in book.seals if hours is None or seal.facts.hour in hours]
    for done, facts in enumerate(wanted, 1):
        key = directory.log_id, facts.hour
        sides.sealed[key] = Tally(facts.dispatched, facts.tally_first, facts.tally_second)
        if book.has_standing(facts.hour):
            for target, total in _sent(disk, directory, facts.hour):
                sides.sent[key, target] = total
        if progress is not None:
            progress(done, len(wanted))


def _sent(disk: Disk, directory: Directory, hour: int) -> Sequence[tuple[int, Tally]]:
    try:
        return list(tallies_by_target(read_outcomes(disk, directory, hour)).items())
    except LogMoved:
        return ()  # Retention removed it just now: only the seal is left.


def _lines(found: dict[tuple[HourOf, int], Tally], hours: Container[int] | None) -> Iterator[str]:
    for ((origin, hour), target), total in sorted(found.items()):
        if hours is None or hour in hours:
            name = "all" if target == ALL else f"{target:016x}"
            yield f"{hour_name(hour)} {origin:016x} {name} {total.rows} {total.digest}"
