"""Plan: what an audit reads of a data directory, in which order, and which servers of it are up (rules P3, S7).

Invariant (rule P3): realtime logs are read first, then the sizes of the dispatch logs are taken, then the checkpoint
and the message log's size, and at last the batches that came to the realtime logs meanwhile; later bytes are left out.
So the origin of each row at a target is read, the schedule of each outcome, and, for each DISPATCHED outcome, the row
at its target.

A message without an outcome is called lost only if its delay server says so (rule S7): each checkpoint publishes the
instant before which the server holds nothing any more that fell due. So a server that is away, full or fenced makes no
message lost, and a message that the server forgot is found all the same.

Whoever shares the hours out among tasks gives a `Scan`. Then the realtime logs are read by it, and the message log's
filed rows by the tasks; what is left to do here grows with hours, batches and groups, not with bytes.
"""

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_name, hour_of_ms, instant_text
from delayd.log.checkpoint import read_checkpoint
from delayd.log.hour import OutcomeRows
from delayd.log.log import LogPlace
from delayd.log.segment import FileKind
from delayd.machine.disk import Disk
from delayd.machine.identity import LOCK
from delayd.machine.operating import counted
from delayd.reading.audit import LATE_MS_LIMIT, LOST_GRACE_MS, NO_SPANS, AuditTerms, FiledByLog, Span, Spans
from delayd.reading.consumption import Consumption, read_consumption
from delayd.reading.explanations import read_explanations
from delayd.reading.files.directory import (
    CheckpointWord,
    Directory,
    Role,
    ScheduleSnapshot,
    find_directories,
    not_counted,
    server_runs,
    take_snapshot,
    take_what_is_there,
    was_removed,
)
from delayd.reading.files.origins import (
    MessageTail,
    dispatch_sizes,
    hours_on_disk,
    part_hour,
    read_hour,
    read_outcomes,
    read_tail,
)
from delayd.reading.files.row_arrays import NO_INT64S, Batches, RowCollector, ScheduleRows, Sorter, TargetRows
from delayd.reading.files.stored_groups import TornTail, log_size
from delayd.reading.files.target_index import HourPlaces, Scan, TargetIndex, TargetIndexer, read_target_rows
from delayd.reading.findings import HourKey, HourSummary, StoredAcceptance, read_acceptances
from delayd.reading.seals import sealed_facts

META = "meta"
NOT_SCHEDULED = "nothing shows that it was given {messages} before it handed them over"
NOT_ARRIVED = "nothing but dispatch logs shows that {messages} arrived there"
NOT_FOLLOWED = "nothing shows what became of {messages} that moved there"
PART_ROWS_MAX = 1_000_000  # An hour with more rows is read in parts: an audit takes about 300 bytes a row.


class LifeState(StrEnum):
    """The state of a server while the books are read."""

    UP = "up"
    AWAY = "away"  # Stopped, dead, or this is a copy of its directory.


class DoubledServer(NamedTuple):
    """A server of which two directories are there; only one of them is read."""

    role: str
    log_id: int
    path: str
    left_out: str

    @property
    def sentence(self) -> str:
        if self.left_out == self.path:
            return f"{self.path} was given twice, and counts once"
        return (
            f"{self.left_out} is left out: {self.path} is of {self.role} server {self.log_id:016x}, too, and a server "
            "counts once"
        )


@dataclass(frozen=True, slots=True)
class MissingServer:
    """A server whose directory would show more of some messages, and is not among those that are read."""

    role: Role
    log_id: int
    what: str  # What nobody knows without it, with a place for the messages.
    rows: int
    first_hour: int
    last_hour: int

    @property
    def sentence(self) -> str:
        hours = hour_name(self.first_hour)
        if self.last_hour > self.first_hour:
            hours = f"{hours} to {hour_name(self.last_hour)}"
        messages = counted(self.rows, "message|messages")
        what = self.what.format(messages=f"{messages} (due in {hours})")
        return f"the directory of {self.role} server {self.log_id:016x} is not here, so {what}"


@dataclass(frozen=True, slots=True)
class LastLife:
    """One server's present or last life; ``until_ms`` is the last instant that its own files name, 0 for none."""

    path: str
    role: str
    log_id: int  # 0 for meta, which has no log.
    state: LifeState
    until_ms: int

    @property
    def sentence(self) -> str:
        last = f", the last that it wrote is of {instant_text(self.until_ms)}" if self.until_ms else ""
        return f"{self.path} is {self.state}{last}"


def read_life(disk: Disk, directory: Directory, seen_ms: int, now_ms: int) -> LastLife:
    """Read the life of a server with logs; ``seen_ms`` is the last instant that its logs name."""
    clock = (read_checkpoint(disk, directory.path, directory.log_id) or {}).get("clock")
    wall_ms = clock[2] if isinstance(clock, list) and len(clock) == 3 else 0
    until_ms = min(now_ms, max(seen_ms, wall_ms if isinstance(wall_ms, int) else 0))
    state = LifeState.UP if server_runs(directory.path) else LifeState.AWAY
    return LastLife(directory.path, directory.role, directory.log_id, state, until_ms)


def read_meta_life(data: str) -> LastLife | None:
    """Read the life of meta, which has no logs; None when it is not in this data directory."""
    path = f"{data}/{META}"
    if not os.path.exists(f"{path}/{LOCK}"):
        return None
    return LastLife(path, META, 0, LifeState.UP if server_runs(path) else LifeState.AWAY, 0)


def spans_of(word: CheckpointWord, log_id: int, index: TargetIndex) -> Spans:
    """For the rows of one delay server up to when the rows of each subject were settled, as its word says."""
    here = {target.log_id for target in index.targets}
    # If a target's log is not here, nobody can prove which rows it holds.
    settled_ms = {link.log_id: link.settled_ms if link.log_id in here else 0 for link in word.links}
    until_ms = {log_id: min(word.settled_ms, instant) for log_id, instant in settled_ms.items()}
    # Nobody knows yet to which target a new subject goes.
    common = Span(0, min([word.settled_ms, *until_ms.values()]) if here else 0)
    ids = [target.log_id for target in index.targets]
    of_subject: dict[str, Span] = {}
    for subject, target in _last_targets(index, log_id):
        until = until_ms.get(ids[target])
        if until is not None and until != common.until_ms:
            of_subject[index.subjects[subject]] = Span(0, until)
    return Spans(common, of_subject)


def what_holds_up(word: CheckpointWord) -> list[str]:
    """Why messages wait, as the delay server itself says."""
    found = [word.waits] if word.waits else []
    found += [f"realtime server {link.log_id:016x}: {link.waits}" for link in word.links if link.waits]
    return found


def _last_targets(index: TargetIndex, log_id: int) -> list[tuple[int, int]]:
    """For each subject of a delay server, the target that had it last; both as numbers."""
    batches = index.batches
    own = np.flatnonzero(batches["origin_log_id"] == log_id)
    # The youngest batch is written last, and stays.
    own = own[np.argsort(batches["appended_at_ms"][own], kind="stable")]
    last = np.full(len(index.subjects), -1, np.int64)
    last[batches["subject"][own]] = own
    subjects = np.flatnonzero(last >= 0)
    return list(zip(subjects.tolist(), batches["target"][last[subjects]].tolist(), strict=True))


def each_once(disk: Disk, directories: Sequence[Directory]) -> tuple[list[Directory], tuple[DoubledServer, ...]]:
    """One directory of each server, and which are left out: copies, or the same one named twice.

    A directory whose server runs goes before a copy, a longer message log before a shorter one, and of two that are
    equal the first one is taken.
    """
    by_server: dict[tuple[Role, int], list[Directory]] = {}
    for directory in directories:
        by_server.setdefault((directory.role, directory.log_id), []).append(directory)
    taken: list[Directory] = []
    doubled: list[DoubledServer] = []
    for found in by_server.values():
        best = found[0] if len(found) == 1 else max(found, key=lambda each: _newness(disk, each))
        taken.append(best)
        doubled += [DoubledServer(best.role, best.log_id, best.path, each.path) for each in found if each is not best]
    return taken, tuple(doubled)


def _newness(disk: Disk, directory: Directory) -> tuple[bool, int]:
    kind = FileKind.MESSAGE if directory.role is Role.DELAY else FileKind.REALTIME
    place = LogPlace(directory.message_folder, kind, directory.log_id)
    return server_runs(directory.path), log_size(disk, place)


@dataclass(frozen=True, slots=True)
class AuditedOrigin:
    """The bounds within which one delay server's logs are read; ``hours`` are those to audit."""

    snapshot: ScheduleSnapshot
    dispatch_sizes: dict[int, int]
    terms: AuditTerms
    hours: tuple[int, ...]
    follows: tuple[str, ...] = ()  # Where the message log's groups do not follow each other (rule S5).
    first_sequence: int = 0  # The lowest sequence that the message log keeps.
    # Rows that operators gave up, by hour, also according to the message log.
    dropped: Mapping[int, int] = field(default_factory=dict)

    @property
    def log_id(self) -> int:
        return self.snapshot.directory.log_id


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Everything that an audit needs to know before it reads hours; small, and can be pickled."""

    origins: tuple[AuditedOrigin, ...]
    index: TargetIndex
    terms: AuditTerms  # For all servers: those of a delay server have its spans, too.
    torn: tuple[TornTail, ...] = ()
    lives: tuple[LastLife, ...] = ()  # Of all servers whose directories are here.
    holds_up: tuple[str, ...] = ()  # Why they wait, as their delay server says.
    # The contents of the targets' pull logs, in the order of the index; () when the caller did not ask for it.
    consumption: tuple[Consumption, ...] = ()
    acceptances: tuple[StoredAcceptance, ...] = ()  # What operators have said of findings in these hours.
    data: tuple[str, ...] = ()  # Where all of this lies.
    # Rows at targets whose hours the delay server's retention has removed, by delay server and hour.
    deleted: Mapping[HourKey, int] = field(default_factory=dict)
    doubled: tuple[DoubledServer, ...] = ()
    # Rows at targets of delay servers that are not here, by delay server and hour.
    strangers: Mapping[HourKey, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # Sentences on places that a newer delayd wrote.

    @property
    def hour_count(self) -> int:
        return sum(len(origin.hours) for origin in self.origins)

    def split(self, parts: int) -> "list[AuditPlan]":
        """Deal the hours out to at most ``parts`` plans, each with only what its hours need."""
        every = [(number, hour) for number, origin in enumerate(self.origins) for hour in origin.hours]
        parts, places = min(parts, len(every)), self.index.by_hour()
        return [self.only(every[part::parts], places) for part in range(parts)]

    def only(self, chosen: Sequence[tuple[int, int]], places: HourPlaces) -> "AuditPlan":
        """The plan for some hours, each with the number of its origin, with only what these need.

        ``places`` are those of all batches, as the index gives them.
        """
        hours_of: list[list[int]] = [[] for _ in self.origins]
        for number, hour in chosen:
            hours_of[number].append(hour)
        origins: list[AuditedOrigin] = []
        for origin, hours in zip(self.origins, hours_of, strict=True):
            snapshot = origin.snapshot
            own = replace(
                snapshot,
                hours={hour: snapshot.hours[hour] for hour in hours if hour in snapshot.hours},
                outcome_ends={hour: snapshot.outcome_ends[hour] for hour in hours if hour in snapshot.outcome_ends},
            )
            sizes = {hour: origin.dispatch_sizes[hour] for hour in hours if hour in origin.dispatch_sizes}
            origins.append(AuditedOrigin(own, sizes, origin.terms, tuple(hours), dropped=origin.dropped))
        keys = dict.fromkeys((self.origins[number].log_id, hour) for number, hour in chosen)
        batches = self.index.batches[np.concatenate([NO_INT64S, *(places[key] for key in keys if key in places)])]
        # What is known of the index's faults is the driver's to tell.
        index = replace(self.index, batches=batches, faults=(), hellos={})
        return AuditPlan(tuple(origins), index, self.terms)


@dataclass(frozen=True, slots=True)
class HourBooks:
    """The three logs of one hour of one delay server, each read when it is asked for."""

    disk: Disk
    origin: AuditedOrigin
    hour: int
    tail: "_Tail"
    index: TargetIndex
    batches: Batches
    torn: list[TornTail] = field(default_factory=list)  # Tails that `outcomes` found behind the last whole group.
    part: range | None = None  # The sequences to read; None: all.
    whole: bool = True  # Whether to read and verify bodies, too.
    wanted: Callable[[str], bool] | None = None  # Which subjects to read of the schedule side; None: all.

    @property
    def log_id(self) -> int:
        return self.origin.snapshot.directory.log_id

    @property
    def terms(self) -> AuditTerms:
        return self.origin.terms

    def schedule(self, sorter: Sorter | None = None) -> ScheduleRows:
        """The scheduled rows, by rising sequence; ``sorter`` sorts the other logs, too."""
        collector = RowCollector(self.part, whole=self.whole, wanted=self.wanted)
        return read_hour(self.disk, self.origin.snapshot, self.tail.get().unfiled, self.hour, collector, sorter)

    def accepted(self) -> FiledByLog:
        snapshot, tail = self.origin.snapshot, self.tail.get()
        word = snapshot.word
        dropped = self.origin.dropped.get(self.hour, 0)
        facts = tail.first, word.next_sequence, snapshot.counted(self.hour), dropped
        rows, ended = tail.accepted.of_hour(self.hour, self.part), tail.decisions.of_hour(self.hour, self.part)
        return FiledByLog(rows, *facts, word.skipped, ended=ended)

    def outcomes(self) -> OutcomeRows:
        """The hour's outcomes, from the dispatch log, and behind them those that it lacks of decided rows."""
        size = self.origin.dispatch_sizes.get(self.hour, 0)
        snapshot = self.origin.snapshot
        durable = snapshot.outcome_ends.get(self.hour, 0)
        self.torn.clear()
        found = read_outcomes(self.disk, snapshot.directory, self.hour, size, self.torn, durable, self.part)
        # The dispatch log of a sealed hour has all outcomes, and its seal is compared with them.
        sealed = snapshot.is_sealed(self.hour)
        return found if sealed else self.tail.get().decisions.behind(self.hour, found, self.part)

    def realtime(self) -> TargetRows:
        return read_target_rows(self.disk, self.index, self.batches, self.part)

    def parts(self) -> "list[HourBooks]":
        """Split the hour into parts that fit into memory, by rising sequence; most hours are one part."""
        snapshot, unfiled = self.origin.snapshot, self.tail.get().unfiled
        rows = snapshot.counted(self.hour) + len(unfiled.of_hour(self.hour))
        # The rows that operators gave up are compared with a number for the whole hour, so that hour is not split.
        if rows <= PART_ROWS_MAX or self.hour in snapshot.word.dropped:
            return [self]
        found = part_hour(self.disk, snapshot, unfiled, self.hour, PART_ROWS_MAX)
        return [replace(self, part=part) for part in found]


def plan_audit(
    disk: Disk,
    data: tuple[str, ...],
    now_ms: int,
    hours: Container[int] | None = None,
    late_ms_limit: int = LATE_MS_LIMIT,
    lost_grace_ms: int = LOST_GRACE_MS,
    *,
    consumption: bool = True,
    scan: Scan | None = None,
    damage: list[DamagedData] | None = None,
    need_schedule: bool = True,
) -> tuple[AuditPlan, list[MessageTail]]:
    """Scan the realtime logs, then take the bounds of all others; with each delay server's tail of its message log.

    ``data`` are the data directories of the servers: of one machine, or of several. With a ``scan`` that reads the
    realtime logs the tails lack filed rows: who needs those of some hours reads them. ``damage`` receives files of
    delay servers that are gone or cut, and the rest is planned. Without ``need_schedule`` there may be realtime servers
    alone. Raises LogMoved when files went away meanwhile, DamagedData when nobody gave ``damage`` or the rest can't be
    read without the file.
    """
    delays, realtimes, doubled = _servers_of(disk, data, need_schedule)
    _name_damage(disk, (*realtimes, *delays), damage, hours)
    torn: list[TornTail] = []
    # The pull logs are read before the message logs, so that each message that a group was given is found.
    consumed = tuple(read_consumption(disk, directory, torn) for directory in realtimes) if consumption else ()
    indexer = TargetIndexer(disk, realtimes, torn)
    indexer.scan(newer=False, scan=scan)
    listed = [hours_on_disk(disk, directory) for directory in delays]
    # A directory has files of thousands of hours, and those that nobody asks for are not opened.
    wanted = [[hour for hour in each if hours is None or hour in hours] for each in listed]
    sizes = [dispatch_sizes(disk, *each) for each in zip(delays, wanted, strict=True)]
    snapshots = [
        take_snapshot(disk, directory) if damage is None else take_what_is_there(disk, directory, damage)
        for directory in delays
    ]
    indexer.scan(newer=True, scan=scan)
    index = indexer.index()
    lives = _lives_without_books(disk, data, realtimes, index, now_ms)
    terms = AuditTerms(now_ms, NO_SPANS, late_ms_limit, lost_grace_ms)
    origins: list[AuditedOrigin] = []
    tails: list[MessageTail] = []
    deleted: dict[HourKey, int] = {}
    held, ours = index.rows_by_hour(), {directory.log_id for directory in delays}
    for directory, on_disk, dispatched, snapshot in zip(delays, listed, sizes, snapshots, strict=True):
        tail = read_tail(disk, snapshot, torn, hours, filed=scan is None, damage=damage)
        own = index.batches["origin_log_id"] == directory.log_id
        claimed_ms = int(index.batches["claimed_at_ms"][own].max(initial=0))
        stored = {hour: rows for (log_id, hour), rows in held.items() if log_id == directory.log_id}
        lives.append(read_life(disk, directory, max(tail.last_appended_at_ms, claimed_ms), now_ms))
        known, removed = _split_hours(disk, snapshot, on_disk, tail, stored, lives[-1].until_ms)
        deleted |= {(directory.log_id, hour): rows for hour, rows in stored.items() if hour in removed}
        chosen = tuple(hour for hour in known if hours is None or hour in hours)
        spans = spans_of(snapshot.word, directory.log_id, index)
        explanations = read_explanations(disk, directory, realtimes, index)
        own_terms = replace(terms, spans=spans, explanations=explanations)
        facts = tail.faults, tail.first, _given_up(snapshot, tail)
        origins.append(AuditedOrigin(snapshot, dispatched, own_terms, chosen, *facts))
        tails.append(tail)
    plan = AuditPlan(
        tuple(origins),
        index,
        terms,
        # The realtime logs are scanned twice; a tail from the second scan is newer.
        torn=tuple({tail.path: tail for tail in torn}.values()),
        lives=tuple(lives),
        holds_up=tuple(what for snapshot in snapshots for what in what_holds_up(snapshot.word)),
        consumption=consumed,
        acceptances=tuple(each for directory in delays for each in read_acceptances(disk, directory, hours)),
        data=data,
        deleted=deleted,
        doubled=doubled,
        strangers={key: held[key] for key in held if key[0] not in ours and (hours is None or key[1] in hours)},
    )
    return plan, tails


def _servers_of(
    disk: Disk, data: Sequence[str], need_schedule: bool
) -> tuple[list[Directory], list[Directory], tuple[DoubledServer, ...]]:
    """The directories of delay servers and of realtime servers, and which are left out."""
    directories, doubled = each_once(disk, [each for place in data for each in find_directories(disk, place)])
    delays, realtimes = ([each for each in directories if each.role == role] for role in (Role.DELAY, Role.REALTIME))
    if not delays and need_schedule:
        places = " and ".join(data)
        raise BadArgument(f"{places} holds no delay server's directory, so nothing says what was scheduled")
    return delays, realtimes, doubled


def _name_damage(
    disk: Disk, directories: Sequence[Directory], damage: list[DamagedData] | None, hours: Container[int] | None
) -> None:
    for directory in directories:
        # An audit ends with any damage that there is, also of hours that it was not asked for.
        for error in not_counted(disk, directory, None if damage is None else hours):
            if damage is None:
                raise error
            damage.append(error)


def _lives_without_books(
    disk: Disk, data: Sequence[str], realtimes: Sequence[Directory], index: TargetIndex, now_ms: int
) -> list[LastLife]:
    """The lives of meta and of realtime servers."""
    lives = [meta for place in data if (meta := read_meta_life(place)) is not None]
    seen = zip(realtimes, index.last_appended_ms, strict=True)
    return lives + [read_life(disk, directory, seen_ms, now_ms) for directory, seen_ms in seen]


def _given_up(snapshot: ScheduleSnapshot, tail: MessageTail) -> dict[int, int]:
    """Rows that operators gave up, by hour, as far as the message log has the record of that behind them."""
    dropped = snapshot.word.dropped
    return {hour: rows for hour, rows in dropped.items() if f"schedule/{hour_name(hour)}" in tail.given_up}


def _split_hours(
    disk: Disk,
    snapshot: ScheduleSnapshot,
    dispatched: Iterable[int],
    tail: MessageTail,
    stored: Iterable[int],
    until_ms: int,
) -> tuple[list[int], set[int]]:
    """The hours of a delay server that there is anything to compare of, rising, and those that retention removed.

    ``dispatched`` are those with a dispatch log, ``stored`` those with rows at targets, ``until_ms`` is its last
    instant.
    """
    removed = {hour for hour in snapshot.hours if was_removed(disk, snapshot, hour)}
    known = (set(snapshot.hours) | set(dispatched) | set(tail.unfiled.counts())) - removed
    found = set(stored) | tail.filed_hours
    # An hour that is over and that its delay server does not know was removed by retention, which removes only
    # sealed hours: rows of it in targets and message log have nothing left to be compared with.
    unknown = {hour for hour in found - known if hour < hour_of_ms(until_ms)}
    if known and unknown:
        removed |= unknown & sealed_facts(disk, snapshot).keys()
    return sorted((known | found) - removed), removed


def missing_servers(hours: Sequence[HourSummary], plan: AuditPlan) -> tuple[MissingServer, ...]:
    """The servers whose directories would show more of some rows of these hours, by role and log_id."""
    here = {
        (Role.DELAY, log_id) for log_id in (*(each.log_id for each in plan.origins), *(each.log_id for each in hours))
    }
    here |= {(Role.REALTIME, target.log_id) for target in plan.index.targets}
    found: dict[tuple[str, Role, int], dict[int, int]] = {}
    for (log_id, hour), rows in plan.strangers.items():
        found.setdefault((NOT_SCHEDULED, Role.DELAY, log_id), {})[hour] = rows
    for summary in hours:
        for role, log_id, rows in summary.elsewhere:
            if (role, log_id) not in here:
                what = NOT_ARRIVED if role is Role.REALTIME else NOT_FOLLOWED
                of_hour = found.setdefault((what, role, log_id), {})
                of_hour[summary.hour] = of_hour.get(summary.hour, 0) + rows
    return tuple(
        MissingServer(role, log_id, what, sum(rows.values()), min(rows), max(rows))
        for (what, role, log_id), rows in sorted(found.items(), key=lambda pair: pair[0][1:])
    )


def plan_hours(
    disk: Disk,
    plan: AuditPlan,
    tails: Sequence[MessageTail] | None = None,
    *,
    whole: bool = True,
    wanted: Callable[[str], bool] | None = None,
) -> Iterator["HourBooks"]:
    """The hours of a plan, nothing of them read yet; the message log's tail is read once, when it is needed.

    Unless ``whole`` bodies in schedule logs are neither read nor verified. Their schedule sides have rows of ``wanted``
    subjects only; None: all.
    """
    places = plan.index.by_hour()
    for number, origin in enumerate(plan.origins):
        tail = _Tail(disk, origin, tails[number] if tails else None)
        for hour in origin.hours:
            batches = plan.index.at(places.get((origin.log_id, hour), NO_INT64S))
            books = HourBooks(disk, origin, hour, tail, plan.index, batches)
            yield replace(books, whole=whole, wanted=wanted)


class _Tail:
    """The message log from the replay offset on; read at most once."""

    def __init__(self, disk: Disk, origin: AuditedOrigin, tail: MessageTail | None) -> None:
        self._disk = disk
        self._hours = origin.hours
        self._snapshot = origin.snapshot
        self._tail = tail

    def get(self) -> MessageTail:
        if self._tail is None:
            self._tail = read_tail(self._disk, self._snapshot, hours=self._hours)
        return self._tail
