"""Planning: which hours of a view lie where, and which part reads which of them.

Invariants. The plan fixes what is read (rule P3). No row is read here but of tables that are small. Each table of an
hour is read once, from the place that has it, as an audit of the same places does:

1. The schedule and its outcomes: from the directory that has their files. If these are damaged, or the directory does
   not know that the hour was sealed and so is an older copy: from the first archive that has the hour, if one has.
2. What targets hold: see `delayd.reading.views.held`. A directory's hour is read without archives if the realtime logs
   have as many rows of it as its seal says were handed over, or might have been.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_name
from delayd.log.hour import Seal, dispatch_path, schedule_path
from delayd.machine.disk import RealDisk
from delayd.reading.archive.archive_audit import ArchivedBooks
from delayd.reading.archive.notes import CONSUMPTION as CONSUMED
from delayd.reading.archive.notes import MESSAGE, NOTES, SCHEDULE, ArchivedKey, Note, key_of_note
from delayd.reading.archive.pieces import fetch_checked, fetch_note, live_beside, seal_of
from delayd.reading.archive.rows import read_groups
from delayd.reading.archive.store import ArchiveStore, is_archive, open_store
from delayd.reading.audit import AuditTerms, Span, Spans
from delayd.reading.books import plan_faults, seal_books
from delayd.reading.conditions import common_hours, due_ms_max
from delayd.reading.consumption import GroupBooks, sum_groups
from delayd.reading.files.directory import Role, find_directories, take_snapshot
from delayd.reading.files.origins import HourRows, LoggedDecisions, MessageTail
from delayd.reading.files.row_arrays import NO_INT64S
from delayd.reading.files.stored_groups import until_still
from delayd.reading.files.target_index import (
    NO_INDEX,
    Chunk,
    HourPlaces,
    LogPiece,
    TargetIndex,
    scan_nothing,
    scan_piece,
)
from delayd.reading.findings import Finding
from delayd.reading.plan import PART_ROWS_MAX, AuditedOrigin, AuditPlan, plan_audit
from delayd.reading.seals import SealBook, sealed_facts
from delayd.reading.tables import CONSUMPTION, TABLES, Columns, Value, columns_of, group_row
from delayd.reading.views.held import PlacedFile
from delayd.reading.views.parts import (
    DAMAGED,
    ArchivedHour,
    DirectoryHours,
    HourOf,
    ViewPart,
    finding_row,
    hour_row,
)
from delayd.reading.views.query import (
    AT_TARGETS,
    AUDITED,
    BY_LOG,
    FINDINGS,
    GROUPS,
    HOURS,
    SEAL_TYPES,
    SEALS,
    ViewQuery,
)

READ_WHOLE = ("accepted", HOURS, FINDINGS)  # Views that compare the message log: a part reads that of its hours.


class Share(NamedTuple):
    """Pieces of an hour of a delay server that one part reads: each ``step``-th from ``first`` on."""

    origin: int
    hour: int
    first: int
    step: int
    rows: int
    held: tuple[PlacedFile, ...] = ()  # Files of archives that say what targets held of it.


@dataclass(frozen=True, slots=True)
class PlannedDirectories:
    """Data directories as they were when the plan was made."""

    plan: AuditPlan
    tails: Sequence[MessageTail]
    damaged: Mapping[HourOf, str]  # Hours of which files are gone or cut.
    damage: Sequence[tuple[int, str]]  # What else is, by the log_id of its server.


def plan_view(query: ViewQuery, places: Sequence[str], tasks: int, now_ms: int) -> list[ViewPart]:
    """Plan which of at most ``tasks`` parts reads what of a view.

    Args:
        query: what is asked for.
        places: data directories, and archives by their URIs or folders.
        tasks: how many parts there may be.
        now_ms: the wall clock: rows that are due later are pending.

    Raises:
        BadArgument: a place holds neither.
        DamagedData, NewerFormat: a checkpoint, or a realtime log that the view needs, can't be read.
        BadSetting, ServerUnavailable: an archive can't be read.
    """
    query = _narrowed(query)
    stores = [open_store(place) for place in places if is_archive(place)]
    data = tuple(place for place in places if not is_archive(place))
    planned = _plan_directories(query, data, now_ms, alone=not stores) if data else None
    rows = tuple(_known_rows(query, planned, stores))
    if query.view not in TABLES and query.view not in AUDITED:
        return [ViewPart(query, rows=rows)]
    archived = {} if query.view in BY_LOG else _archived_hours(query, stores, now_ms)
    shares = [] if planned is None else list(_shares(query, planned, archived, tasks))
    index = NO_INDEX if planned is None else planned.plan.index
    by_hour = index.by_hour()
    beside = _beside(index, by_hour, archived)
    units: list[Share | ArchivedHour] = [*sorted(shares, key=lambda share: -share.rows), *beside]
    dealt: list[list[Share | ArchivedHour]] = [[] for _ in range(tasks)]
    for number, unit in enumerate(units):
        dealt[number % tasks].append(unit)
    parts = [_part(query, planned, by_hour, units) for units in dealt if units]
    return [ViewPart(query, rows=rows), *parts] if rows else parts


def _narrowed(query: ViewQuery) -> ViewQuery:
    return replace(query, hours=common_hours(query.conditions, query.hours))


def _plan_directories(query: ViewQuery, data: tuple[str, ...], now_ms: int, *, alone: bool) -> PlannedDirectories:
    disk, damage = RealDisk(), list[DamagedData]()
    scan = _scan_here if query.view in AT_TARGETS else scan_nothing
    groups = query.view in ("consumption", FINDINGS)

    def plan() -> tuple[AuditPlan, list[MessageTail]]:
        damage.clear()
        options = {"consumption": groups, "need_schedule": alone}
        return plan_audit(disk, data, now_ms, query.hours, scan=scan, damage=damage, **options)

    planned, tails = until_still(" ".join(data), plan)
    hours, others = _sort_damage(planned, damage)
    return PlannedDirectories(planned, tails, hours, others)


def _scan_here(pieces: Sequence[LogPiece]) -> Iterator[Chunk]:
    return (chunk for piece in pieces for chunk in scan_piece(RealDisk(), piece))


def _sort_damage(plan: AuditPlan, damage: Iterable[DamagedData]) -> tuple[dict[HourOf, str], list[tuple[int, str]]]:
    """Which hours of a plan are damaged, and what else is; damage of hours that nobody asks for is left out."""
    hour_of: dict[str, HourOf] = {}
    server_of = {target.folder.rpartition("/")[0]: target.log_id for target in plan.index.targets}
    of_hours: list[str] = []
    for origin in plan.origins:
        path = origin.snapshot.directory.path
        server_of[path] = origin.log_id
        of_hours += [f"{path}/schedule/", f"{path}/dispatch/"]
        for hour in origin.hours:
            hour_of[schedule_path(path, hour)] = hour_of[dispatch_path(path, hour)] = (origin.log_id, hour)
    damaged: dict[HourOf, str] = {}
    others: list[tuple[int, str]] = []
    for each in damage:
        if each.path in hour_of:
            damaged.setdefault(hour_of[each.path], each.message)
        elif not each.path.startswith(tuple(of_hours)):
            servers = [log_id for path, log_id in server_of.items() if each.path.startswith(f"{path}/")]
            others.append((servers[0] if servers else 0, each.message))
    return damaged, others


def _archived_hours(query: ViewQuery, stores: Sequence[ArchiveStore], now_ms: int) -> dict[HourOf, ArchivedHour]:
    terms = AuditTerms(now_ms, Spans(Span(0, 0)))
    schedules: dict[HourOf, PlacedFile] = {}
    messages: dict[HourOf, dict[int, PlacedFile]] = {}
    for store in stores:
        for key in archived_keys(store):
            hour, file = (key.origin, key.hour), PlacedFile(store.uri, key)
            if key.table == MESSAGE:
                messages.setdefault(hour, {}).setdefault(key.log_id, file)
            elif key.table == SCHEDULE and query.wants(*hour):
                schedules.setdefault(hour, file)
    return {hour: ArchivedHour(file, tuple(messages.get(hour, {}).values()), terms) for hour, file in schedules.items()}


def _beside(index: TargetIndex, places: HourPlaces, archived: Mapping[HourOf, ArchivedHour]) -> Iterator[ArchivedHour]:
    """The hours of archives, with what targets hold whose logs are here and of which no archive has a file."""
    for key, hour in archived.items():
        live = live_beside({file.key.log_id for file in hour.messages}, index, places.get(key, NO_INT64S))
        yield replace(hour, live=live)


def archived_keys(store: ArchiveStore) -> list[ArchivedKey]:
    """The keys of all notes of an archive, by hour; BadArgument when there is none."""
    keys = sorted(key for name in store.names(NOTES) if (key := key_of_note(name)) is not None)
    if not keys:
        raise BadArgument(f"{store.uri} holds no archive; give what `delayd archive --to` was given")
    return keys


def _shares(
    query: ViewQuery, planned: PlannedDirectories, archived: dict[HourOf, ArchivedHour], tasks: int
) -> Iterator[Share]:
    """The hours of directories that are read there; they are taken out of ``archived``."""
    for index, origin in enumerate(planned.plan.origins):
        late, lacking = _later_hours(query, origin), _lacking_hours(query, planned.plan, origin) if archived else set()
        unfiled = planned.tails[index].unfiled.counts()
        for hour in origin.hours:
            key = origin.log_id, hour
            is_whole = key not in planned.damaged and origin.snapshot.is_sealed(hour)
            if not query.wants(*key) or (key in archived and not is_whole):
                continue
            there = archived.pop(key, None)
            held = there.messages if there is not None and hour in lacking else ()
            if hour in late:
                continue
            rows = origin.snapshot.counted(hour) + unfiled.get(hour, 0)
            # An audit of an hour adds up in one place.
            step = 1 if query.view in AUDITED else min(tasks, -(-rows // PART_ROWS_MAX)) or 1
            for first in range(step):
                yield Share(index, hour, first, step, rows // step, held)


def _later_hours(query: ViewQuery, origin: AuditedOrigin) -> set[int]:
    """Sealed hours all of whose rows are due later than any that is asked for."""
    latest_ms = due_ms_max(query.conditions)
    if latest_ms is None or query.view not in TABLES:
        return set()
    facts = sealed_facts(RealDisk(), origin.snapshot)
    sealed = {hour for hour in facts if origin.snapshot.is_sealed(hour)}
    return {hour for hour in sealed if facts[hour].due_min_ms > latest_ms}


def _lacking_hours(query: ViewQuery, plan: AuditPlan, origin: AuditedOrigin) -> set[int]:
    """Sealed hours of which the realtime logs have fewer rows than were handed over, or might have been."""
    if query.view not in AT_TARGETS:
        return set()
    rows, sealed = plan.index.rows_by_hour(), sealed_facts(RealDisk(), origin.snapshot)
    handed_over = {hour: facts.dispatched + facts.in_doubt for hour, facts in sealed.items()}
    return {hour for hour, count in handed_over.items() if rows.get((origin.log_id, hour), 0) < count}


def _part(
    query: ViewQuery, planned: PlannedDirectories | None, places: HourPlaces, units: Sequence[Share | ArchivedHour]
) -> ViewPart:
    archived = tuple(unit for unit in units if isinstance(unit, ArchivedHour))
    shares = sorted(unit for unit in units if isinstance(unit, Share))
    if planned is None or not shares:
        return ViewPart(query, None, archived)
    origins = planned.plan.origins
    read = {(origins[each.origin].log_id, each.hour): (each.first, each.step) for each in shares}
    chosen = [(each.origin, each.hour) for each in shares]
    tails = None
    if query.view not in READ_WHOLE:
        asked = [[hour for each, hour in chosen if each == index] for index in range(len(origins))]
        tails = tuple(map(_tail_of, planned.tails, asked))
    damaged = {key: what for key, what in planned.damaged.items() if key in read}
    held = {(origins[each.origin].log_id, each.hour): each.held for each in shares if each.held}
    return ViewPart(query, DirectoryHours(planned.plan.only(chosen, places), tails, read, damaged, held), archived)


def _tail_of(tail: MessageTail, hours: Sequence[int]) -> MessageTail:
    """The rows and decisions of some hours."""
    unfiled, decisions = np.isin(tail.unfiled.hours, hours), np.isin(tail.decisions.rows["hour"], hours)
    return MessageTail(
        unfiled=HourRows(tail.unfiled.rows.take(unfiled), tail.unfiled.hours[unfiled]),
        decisions=LoggedDecisions(tail.decisions.rows[decisions], tail.decisions.offsets[decisions]),
    )


def _known_rows(
    query: ViewQuery, planned: PlannedDirectories | None, stores: Sequence[ArchiveStore]
) -> Iterator[Columns]:
    """Rows that the plan already has, or that the planner reads: those of small tables, and those of no single hour."""
    if query.view == SEALS:
        seals = {(seal.log_id, seal.number): seal for seal in _seals(planned, stores)}
        wanted = [seal for _, seal in sorted(seals.items()) if query.wants(seal.log_id, seal.facts.hour)]
        yield columns_of(SEAL_TYPES, [_seal_row(seal) for seal in wanted])
    elif query.view == FINDINGS:
        yield columns_of(AUDITED[FINDINGS], [finding_row(each) for each in _totals(query, planned, stores)])
    elif query.view == GROUPS:
        yield columns_of(CONSUMPTION, [group_row(books) for books in _groups(query, planned, stores)])
    elif planned is None:
        return
    elif query.view == HOURS and planned.damage:
        damage = [hour_row((log_id, 0), DAMAGED, what, None) for log_id, what in planned.damage]
        yield columns_of(AUDITED[HOURS], damage)


def _groups(
    query: ViewQuery, planned: PlannedDirectories | None, stores: Sequence[ArchiveStore]
) -> Iterator[GroupBooks]:
    """The groups of realtime servers: by the logs of those whose directories are here, and by archives of others."""
    here: set[int] = set()
    if planned is not None:
        here = {target.log_id for target in planned.plan.index.targets}
        yield from (books for each in planned.plan.consumption for books in each.groups)
    files: dict[ArchivedKey, ArchiveStore] = {}
    for store in stores:
        for key in archived_keys(store):
            if key.table == CONSUMED and key.log_id not in here and key.hour in query.hours:
                files.setdefault(key, store)
    found: list[GroupBooks] = []
    with TemporaryDirectory() as folder:
        for key, store in files.items():
            note = fetch_note(store, key, Path(folder))
            if not note.sha256:
                continue
            path = fetch_checked(store, note, Path(folder))
            found += read_groups(f"{store.uri}/{key.file}", key, path)
            if path.is_relative_to(folder):
                path.unlink()  # The copy of an object.
    yield from sum_groups(found)


def _totals(query: ViewQuery, planned: PlannedDirectories | None, stores: Sequence[ArchiveStore]) -> Iterator[Finding]:
    """Findings about totals, of no single message."""
    disk, plan = RealDisk(), None if planned is None else planned.plan
    seals = {} if plan is None else seal_books(disk, plan)
    if plan is not None:
        yield from plan_faults(disk, plan, seals)
    if stores:
        books = ArchivedBooks(stores, query.hours)
        if plan is not None:
            books.compare_seals(plan, seals)
        yield from books.totals()


def _seals(planned: PlannedDirectories | None, stores: Sequence[ArchiveStore]) -> Iterator[Seal]:
    for store in stores:
        with TemporaryDirectory() as folder:
            for key in archived_keys(store):
                if key.table == SCHEDULE:
                    yield seal_of(fetch_note(store, key, Path(folder)))
    if planned is not None:
        for book in seal_books(RealDisk(), planned.plan).values():
            yield from book.seals


def _seal_row(seal: Seal) -> tuple[Value, ...]:
    facts = seal.facts._asdict() | {"number": seal.number, "hour": hour_name(seal.facts.hour)}
    facts |= {"log_id": f"{seal.log_id:016x}", "previous_sha256": seal.previous_sha256, "sha256": seal.sha256}
    for name in ("tally_first", "tally_second"):
        facts[name] = int(np.array(facts[name], np.uint64).view(np.int64))  # Tables have signed numbers of 64 bits.
    return tuple(each.hex() if isinstance(each := facts[name], bytes) else each for name in SEAL_TYPES)


class SealedHour(NamedTuple):
    """An hour that has a seal, and whether its rows are still there."""

    hour: int
    is_there: bool


def sealed_hours(places: Sequence[str], notes: dict[tuple[str, ArchivedKey], Note]) -> dict[int, dict[int, SealedHour]]:
    """The sealed hours of all delay servers, by log_id and number of the seal; each server seals in that order.

    An hour counts when its checkpoint calls it sealed, because then a plan reads all its rows. ``notes`` keeps those of
    archives, which never change, from one call to the next.
    """
    found: dict[int, dict[int, SealedHour]] = {}
    for place in places:
        listed = _archived_seals(place, notes) if is_archive(place) else until_still(place, partial(_own_seals, place))
        for log_id, number, sealed in listed:
            known = found.setdefault(log_id, {})
            known[number] = SealedHour(sealed.hour, sealed.is_there or (number in known and known[number].is_there))
    return found


def _own_seals(data: str) -> list[tuple[int, int, SealedHour]]:
    disk, found = RealDisk(), list[tuple[int, int, SealedHour]]()
    for directory in find_directories(disk, data):
        if directory.role is Role.DELAY:
            snapshot = take_snapshot(disk, directory, tail=False)
            book = SealBook(disk, snapshot)
            for seal in book.seals:
                is_deleted = book.is_deleted(seal.facts.hour)
                if not is_deleted and not snapshot.is_sealed(seal.facts.hour):
                    break
                found.append((seal.log_id, seal.number, SealedHour(seal.facts.hour, not is_deleted)))
    return found


def _archived_seals(uri: str, notes: dict[tuple[str, ArchivedKey], Note]) -> Iterator[tuple[int, int, SealedHour]]:
    store = open_store(uri)
    with TemporaryDirectory() as folder:
        for key in archived_keys(store):
            if key.table == SCHEDULE:
                note = notes.get((uri, key))
                if note is None:
                    note = notes[uri, key] = fetch_note(store, key, Path(folder))
                yield key.origin, seal_of(note).number, SealedHour(key.hour, bool(note.sha256))
