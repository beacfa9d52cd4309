"""Trace: follows one message through the logs of a delay server and of the realtime server that it went to.

accepted ──▶ filed ──▶ due ──▶ claimed ──▶ appended ──▶ indexed ──▶ pulled ──▶ acknowledged | lapsed ──▶ pulled, ...
                         └── stood still, clock in doubt, set back: by the next checkpoint of its server
                  │                                                        └──▶ retried, rejected ──▶ its next life
                  └──▶ cancelled, dead, expired, in doubt, moved, replaced, drained ──▶ steps of the row in its place

Invariant: each step names the file and the byte at which it was read. Nothing is guessed: what no file tells, or what a
directory that is not here would tell, is said in a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.labels import (
    FIRST_DUE_MS,
    OCCURRENCE_MS,
    SCHEDULE,
    SKIPPED,
    SKIPPED_COUNT,
    SKIPPED_UNTIL_MS,
    decode_headers,
    number_in,
)
from delayd.batch.names import parse_retry_subject, retry_subject
from delayd.batch.sequences import ROW_BITS, locate
from delayd.errors import BadArgument, BadHeaders, BatchMalformed, DamagedData, NewerFormat
from delayd.hours import hour_name, instant_text
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_gaps
from delayd.log.consume import consume_place, entry_position, read_unchecked
from delayd.log.consume import segment_bases as consume_bases
from delayd.log.control import (
    GroupBegins,
    GroupCreated,
    GroupDeleted,
    GroupMoved,
    GroupSetBack,
    RetryDecided,
    decode_sound,
)
from delayd.log.group import GroupKind
from delayd.log.hour import decode_outcomes, dispatch_path, schedule_path
from delayd.log.log import LogPlace
from delayd.log.pull import PullEntry, PullOp, RetryRow, decode_entries, decode_rows
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.machine.clock import SET_BACK, STOOD_STILL
from delayd.machine.disk import Disk
from delayd.outcome import Outcome, Reason, reason_name
from delayd.reading.files.directory import Directory, Role, ScheduleSnapshot, find_directories, take_snapshot
from delayd.reading.files.origins import (
    NO_HOURS,
    as_outcomes,
    open_hour,
    outcome_word,
    place_of,
    read_batch,
    read_hour,
    read_tail,
)
from delayd.reading.files.row_arrays import NO_INT64S, RowCollector, ScheduleRows
from delayd.reading.files.stored_groups import (
    log_size,
    read_groups,
    read_known,
    read_log,
    segment_bases,
    until_still,
    whole_batch,
)
from delayd.reading.find import FileFinder, FoundRow, Search, WantedMessages

FOLLOWED = (Reason.MOVED, Reason.REPLACED, Reason.DRAINED)
NEVER_TOOK = tuple(reason_name(reason) for reason in (Reason.REJECTED, Reason.KEPT, Reason.IN_FLIGHT))
SETTLED = ("acknowledged", "retried", "rejected")  # A group waits for nothing any more behind these words.
ENDS = {PullOp.ACK: "acknowledged", PullOp.NACK: "given back", PullOp.LAPSED: "lapsed", PullOp.RETURNED: "returned"}
_Record = GroupCreated | GroupBegins | GroupMoved | GroupSetBack | GroupDeleted | RetryDecided | PullEntry
_ABOUT_GROUPS = (GroupCreated, GroupBegins, GroupMoved, GroupSetBack, GroupDeleted, RetryDecided)
_Servers = dict[tuple[Role, int], Directory]  # All that are in the data directory, by role and log_id.


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened to a message; ``at_ms`` is None where the log has no time of it."""

    what: str
    at_ms: int | None
    path: str
    position: int
    detail: str = ""
    log_id: int = 0  # The delay server that has taken the message since; 0: that of the trace.
    late_ms: int | None = None  # From the later of due and accepted, of the steps `claimed` and `appended`.


@dataclass(slots=True)
class Trace:
    """One message of one delay server: what happened, what it waits for ("" for nothing), and what no file tells."""

    log_id: int
    sequence: int
    deliver_at_ms: int
    steps: list[Step] = field(default_factory=list)
    waits_for: str = ""
    unseen: list[str] = field(default_factory=list)
    earlier: int = 0  # How many messages had the key before this one.


class _NextLife(NamedTuple):
    """How a message lives on that a group gave back: under which subject of which delay server, and when it is due."""

    origin_log_id: int
    subject: str
    due_ms: int
    is_dead: bool


class _Place(NamedTuple):
    """A row: its sequence at a delay server."""

    log_id: int
    sequence: int


class _FirstLife(NamedTuple):
    """What later lives say of the first one. Messages of several servers may have one sequence, and come together."""

    sequence: int
    due_ms: int  # 0: nobody knows. The headers of a message that left before it was filed are not kept.

    @classmethod
    def of(cls, row: FoundRow) -> _FirstLife:
        """What a row says of it."""
        try:
            headers = decode_headers(row.headers)
        except BadHeaders:
            headers = {}  # Intake refuses such headers, so a file was changed, and nothing is known.
        return cls(row.origin_sequence, number_in(headers, FIRST_DUE_MS))

    def may_be_of(self, row: FoundRow) -> bool:
        """Whether a row may be a later life of the same message."""
        said = self.of(row)
        return said.sequence == self.sequence and (said.due_ms == self.due_ms or not (said.due_ms and self.due_ms))


class _Lived(NamedTuple):
    """The lives of a message up to now: what is known of the first one, and all rows that it was."""

    first: _FirstLife | None
    places: Set[_Place]


NOT_LIVED = _Lived(None, frozenset())


class _Row(NamedTuple):
    """The steps of one row; the row in its place, if one is; and how it lives on."""

    found: Trace | None
    follower: _Place | None = None  # Of a drained row it is at another delay server.
    lives: tuple[_NextLife, ...] = ()


def trace(disk: Disk, data: str, subject: str, which: int | str, log_id: int | None = None) -> list[Trace]:
    """Follow a message in the directories below ``data``: one trace for each delay server that has such a message.

    ``which`` is its sequence, or its key: then the newest message that took the key is followed. The trace of a message
    that was moved or replaced goes on with the one that took its place, that of a drained one at the delay server that
    took it, and that of a message that a group gave back, to come later or as a dead letter, with its next life.

    Raises:
        BadArgument: no delay server there has it.
        DamagedData: a file does not check.
    """
    directories = find_directories(disk, data)
    servers = {(each.role, each.log_id): each for each in directories}
    delays = [each for each in directories if each.role == Role.DELAY and log_id in (None, each.log_id)]

    def follow(delay: Directory) -> Trace | None:
        if isinstance(which, str):
            return _trace_key(disk, delay, servers, subject, which)
        return _trace(disk, delay, servers, subject, which)

    found = [each for delay in delays if (each := until_still(delay.path, partial(follow, delay))) is not None]
    if not found:
        name = "key" if isinstance(which, str) else "sequence"
        where = "no delay server's directory" if not delays else f"no message of that subject and {name}"
        raise BadArgument(
            f"{data} has {where}: it was never accepted here, or retention has removed it; receipts name the sequence"
        )
    return found


def _trace_key(disk: Disk, delay: Directory, servers: _Servers, subject: str, key: str) -> Trace | None:
    wanted = WantedMessages(subject=subject.encode(), key=key.encode("utf-8", "surrogateescape"))
    results = list(FileFinder(disk, delay.path, Search(wanted, ended=True, with_bodies=False)).found())
    # A row that was rejected or kept never took the key.
    states = {row.sequence: row.state for result in results for row in result.rows}
    took = [sequence for sequence, state in states.items() if state not in NEVER_TOOK] or list(states)
    damage = [error for result in results for error in result.damage]
    if not took:
        for error in damage:
            raise error
        return None
    found = _trace(disk, delay, servers, subject, max(took))
    if found is not None:
        found.earlier = len(took) - 1
        found.unseen += [f"messages with the key in a part of a file: {error.message}" for error in damage]
    return found


def _trace(
    disk: Disk, delay: Directory, servers: _Servers, subject: str, sequence: int, lived: _Lived = NOT_LIVED
) -> Trace | None:
    """The trace of a row and of all that it became; ``lived`` has the lives of the message before this one."""
    found, follower, lives = _trace_row(disk, delay, servers, subject, sequence)
    followed = {*lived.places, _Place(delay.log_id, sequence)}
    while found is not None and follower is not None and follower not in followed:  # Files that lie may name a circle.
        followed.add(follower)
        sequence, taker = follower.sequence, servers.get((Role.DELAY, follower.log_id))
        if taker is None:
            found.unseen.append(
                f"what became of it as sequence {sequence} of delay server {follower.log_id:016x}, which took it: that "
                "server's directory is not here"
            )
            break
        delay = taker
        after, follower, lives = _trace_row(disk, delay, servers, subject, sequence)
        if after is None:
            found.unseen.append(f"what became of sequence {sequence}: retention has removed it")
            break
        _go_on(found, after)
    if found is not None and lives:
        first = lived.first or _first_life(disk, delay, subject, sequence, found.deliver_at_ms)
        for life in lives:
            _live_on(disk, servers, found, life, _Lived(first, frozenset(followed)))
    return found


def _go_on(found: Trace, after: Trace) -> None:
    """Add the trace of the row that a message lives on in; it waits for what that row waits for, too."""
    found.steps += [replace(step, log_id=step.log_id or after.log_id) for step in after.steps]
    found.deliver_at_ms = after.deliver_at_ms
    found.waits_for = _both(found.waits_for, after.waits_for)
    found.unseen += after.unseen


def _live_on(disk: Disk, servers: _Servers, found: Trace, life: _NextLife, lived: _Lived) -> None:
    """Go on with the next life of a message."""
    log_id = life.origin_log_id
    delay = servers.get((Role.DELAY, log_id))
    if delay is None:
        found.unseen.append(f"its next life: the directory of delay server {log_id:016x}, which takes it, is not here")
        return
    last = max((place.sequence for place in lived.places if place.log_id == log_id), default=0)
    rows = _rows_of(disk, delay, WantedMessages(from_ms=life.due_ms, subject=life.subject.encode()))
    rows = [row for row in rows if row.sequence > last and row.deliver_at_ms == life.due_ms]
    own = sorted(row.sequence for row in rows if lived.first is not None and lived.first.may_be_of(row))
    if len(own) > 1:
        found.unseen.append(f"which of the sequences {own} of delay server {log_id:016x} is its next life")
    after = _trace(disk, delay, servers, life.subject, own[0], lived) if own else None
    if after is None:
        lost = "its delay server, which has not taken its next life, or has removed it since"
        found.waits_for = _both(found.waits_for, lost)
        return
    if life.is_dead and after.steps[-1].what in ("accepted", "filed"):
        after.waits_for = "an operator, as a dead letter (`delayd dead`)"
    _go_on(found, after)


def _both(one: str, other: str) -> str:
    return f"{one}; and {other}" if one and other else one or other


def _first_life(disk: Disk, delay: Directory, subject: str, sequence: int, due_ms: int) -> _FirstLife:
    if parse_retry_subject(subject) is None:
        return _FirstLife(sequence, due_ms)
    rows = _rows_of(disk, delay, WantedMessages(subject=subject.encode(), sequence=sequence))
    return next((_FirstLife.of(row) for row in rows if row.origin_sequence), _FirstLife(sequence, due_ms))


def _rows_of(disk: Disk, delay: Directory, wanted: WantedMessages) -> list[FoundRow]:
    search = Search(wanted, ended=True, with_bodies=False)
    return [row for result in FileFinder(disk, delay.path, search).found() for row in result.rows]


def _trace_row(disk: Disk, delay: Directory, servers: _Servers, subject: str, sequence: int) -> _Row:
    snapshot = take_snapshot(disk, delay)
    accepted, occurrence = _accepted(disk, snapshot, sequence)
    hours = accepted.hours().tolist() if accepted is not None else sorted(snapshot.hours)
    filed: ScheduleRows | None = None
    hour = hours[0] if hours else 0
    for each in hours:
        rows = read_hour(disk, snapshot, NO_HOURS, each, RowCollector(range(sequence, sequence + 1)))
        if len(rows):
            filed, hour = rows, each
            break
    row = filed if filed is not None else accepted
    if row is None or row.subjects[int(row.subject[0])] != subject:
        return _Row(None)
    found = Trace(delay.log_id, sequence, int(row.deliver_at_ms[0]))
    if accepted is not None:
        _, offset, number = locate(int(accepted.location[0]))
        path, position = place_of(disk, snapshot.place, offset)
        found.steps.append(
            Step("accepted", int(accepted.appended_at_ms[0]), path, position, f"row {number}{occurrence}")
        )
    else:
        found.unseen.append("when it was accepted: retention has removed that part of the message log")
    if filed is not None:
        _, offset, number = locate(int(filed.location[0]))
        path = schedule_path(delay.path, hour)
        position = offset + FILE_HEADER_BYTES
        found.steps.append(Step("filed", None, path, position, f"hour {hour_name(hour)}, row {number}"))
    outcome = _outcome(disk, delay, hour, sequence)
    if outcome is None and _decided(disk, snapshot, found, sequence):
        return _Row(found)
    if outcome is None:
        files = "a checkpoint that files it, and " if filed is None else ""
        found.waits_for = f"{files}its instant; `delayd status` says what a due message waits for"
        return _Row(found)
    step, part, other = outcome
    due_from_ms = int(row.due_from_ms()[0])
    if Outcome(int(part["outcome"])) is not Outcome.CANCELLED:
        _fall_due(found, due_from_ms)
    if Outcome(int(part["outcome"])) is Outcome.DISPATCHED:
        step = _late(step, due_from_ms)
        _add_gaps(disk, delay, found, due_from_ms, step.at_ms or 0)
    found.steps.append(step)
    if Outcome(int(part["outcome"])) is not Outcome.DISPATCHED:
        if int(part["reason"]) not in FOLLOWED:
            return _Row(found)
        is_drained = int(part["reason"]) == Reason.DRAINED
        return _Row(found, _Place(int(part["target_log_id"]) if is_drained else delay.log_id, other))
    return _Row(found, None, tuple(_at_target(disk, servers, found, part, subject, due_from_ms)))


def _fall_due(found: Trace, due_from_ms: int) -> None:
    """Add the instant that was wished to the steps of a row that waited for it; it stands where the row does.

    A message that was due already when it was accepted has this step first: 12:00:00 due, 12:00:03 accepted.
    """
    due_ms, row = found.deliver_at_ms, found.steps[-1]
    was_due = due_ms < due_from_ms
    detail = "before it was accepted, from which `late` counts" if was_due else ""
    found.steps.insert(0 if was_due else len(found.steps), Step("due", due_ms, row.path, row.position, detail))


def _add_gaps(disk: Disk, server: Directory, found: Trace, from_ms: int, until_ms: int) -> None:
    """Add the times between these instants in which a server handed over nothing, each before what came behind it.

    A clock that was set back keeps a message waiting that was accepted before: 10:09 accepted, 10:10 set back to 10:00,
    10:15 due and claimed. Its step stands where the clock was, at 10:10.
    """
    accepted_ms = next((step.at_ms for step in found.steps if step.what == "accepted" and step.at_ms), from_ms)
    try:
        position, gaps = read_gaps(disk, server.path, server.log_id)
    except (DamagedData, NewerFormat) as error:
        found.unseen.append(f"whether the {server.role} server {server.log_id:016x} stood still: {error.message}")
        return
    for gap in gaps:
        # A realtime server takes messages also while it doubts its clock.
        kept = gap.what == STOOD_STILL or server.role == Role.DELAY
        is_set_back = gap.what == SET_BACK
        began_ms, at_ms = (accepted_ms, gap.until_ms) if is_set_back else (from_ms, gap.from_ms)
        if kept and gap.from_ms < until_ms and gap.until_ms > began_ms:
            later = (at for at, step in enumerate(found.steps) if step.at_ms is not None and step.at_ms > at_ms)
            how_long = f"{'by' if is_set_back else 'for'} {gap.until_ms - gap.from_ms} ms"
            detail = f"the {server.role} server {server.log_id:016x}, {how_long}"
            step = Step(gap.what, at_ms, f"{server.path}/{CHECKPOINT}", position, detail)
            found.steps.insert(next(later, len(found.steps)), step)


def _late(step: Step, due_from_ms: int) -> Step:
    return step if step.at_ms is None else replace(step, late_ms=step.at_ms - due_from_ms)


def _accepted(disk: Disk, snapshot: ScheduleSnapshot, sequence: int) -> tuple[ScheduleRows | None, str]:
    """The row in the message log, and which occurrence it says that it is; None where the log does not reach back to
    it, or not up to it.
    """
    bases = segment_bases(disk, snapshot.place)
    if not bases:
        return None, ""
    bounds = min(bases[0], snapshot.replay_offset), snapshot.replay_offset, snapshot.message_stop
    for group in read_known(disk, snapshot.place, bounds, [], whole=False):
        header = group.header
        first = header.base_sequence
        if header.kind != GroupKind.DATA or not first <= sequence < first + header.row_count:
            continue
        for offset, batch in group.batches():
            if batch.kind != BatchKind.PRODUCER:
                continue
            if sequence < first + batch.count:
                whole = whole_batch(group, offset, batch)
                collector = RowCollector()
                collector.add_message_batch(whole, offset, first, header.appended_at_ms)
                rows = collector.rows()
                return rows.take(np.flatnonzero(rows.sequence == sequence)), _recurs(whole, sequence - first)
            first += batch.count
    return None, ""


def _recurs(batch: Batch, row: int) -> str:
    """Which occurrence of a recurring schedule a row is, or which ones it says were skipped; "" for none."""
    if ColumnId.HEADERS_END not in batch:
        return ""
    starts, ends = batch.region(ColumnId.HEADERS_END)
    try:
        headers = decode_headers(bytes(batch.heap[int(starts[row]) : int(ends[row])]))
    except BadHeaders:
        return ""
    name, instant = headers.get(SCHEDULE), instant_text(number_in(headers, OCCURRENCE_MS))
    if not name:
        return ""
    reason = headers.get(SKIPPED)
    if not isinstance(reason, str):
        return f"; occurrence {instant} of the schedule {name!r}"
    until = instant_text(number_in(headers, SKIPPED_UNTIL_MS))
    count = number_in(headers, SKIPPED_COUNT)
    return f"; {count} occurrences of the schedule {name!r} skipped as {reason}, {instant} to {until}"


def _outcome(disk: Disk, delay: Directory, hour: int, sequence: int) -> tuple[Step, np.void, int] | None:
    """The outcome of a row: the step, its part, and the sequence of the other row that it names, if it does."""
    path = dispatch_path(delay.path, hour)
    segment = open_hour(disk, path, FileKind.DISPATCH, delay.log_id, hour)
    if segment is None:
        return None
    try:
        for group in read_groups(segment, 0, segment.file.size(), [], previous_crc32c=0):
            for offset, batch in group.batches():
                if batch.kind != BatchKind.OUTCOME:
                    continue
                at = np.flatnonzero(batch.column(ColumnId.SEQUENCE) == sequence)
                if len(at):
                    rows = decode_outcomes([batch])
                    part: np.void = rows.parts[int(rows.part_of[int(at[0])])]
                    named = int(rows.others(at[:1])[0])
                    return _ended(part, named, path, segment.position(offset)), part, named
    finally:
        segment.close()
    return None


def _decided(disk: Disk, snapshot: ScheduleSnapshot, found: Trace, sequence: int) -> bool:
    """Add the decision that has ended a row whose outcome is not written yet; whether there is one."""
    damage: list[DamagedData] = []
    decisions = read_tail(disk, snapshot, filed=False, unfiled=False, damage=damage).decisions
    (at,) = decisions.find(np.array([sequence], np.uint64)).tolist()
    if at < 0:
        found.unseen += [f"whether a decision has ended it: {error.message}" for error in damage]
        return False
    row = decisions.rows[at : at + 1]
    told, hour = as_outcomes(row), int(row["hour"][0])
    part, named = told.parts[0], int(told.others(np.zeros(1, np.intp))[0])
    path, position = place_of(disk, snapshot.place, int(decisions.offsets[at]))
    found.steps.append(_ended(part, named, path, position))
    follow = f"; trace sequence {named}, which took its place" if named and int(part["reason"]) in FOLLOWED else ""
    if int(part["reason"]) == Reason.DRAINED:
        found.waits_for = (
            f"delay server {int(part['target_log_id']):016x} to take it; `delayd status` of {found.log_id:016x} says "
            "why it has not"
        )
    found.unseen.append(f"its outcome: the dispatch log of hour {hour_name(hour)} does not have it yet{follow}")
    return True


def _ended(part: np.void, named: int, path: str, position: int) -> Step:
    """The step that a part of outcomes tells; ``named`` is the sequence of the other row, if it names one."""
    outcome = Outcome(int(part["outcome"]))
    what = "claimed" if outcome is Outcome.DISPATCHED else outcome_word(part).replace("_", " ")
    detail = f"attempt {int(part['attempt'])}, batch {int(part['batch_id'])}"
    if outcome is Outcome.DISPATCHED:
        detail += f" to {int(part['target_log_id']):016x}"
    elif outcome is Outcome.CANCELLED:
        detail = ""
        if part["reason"] > Reason.CANCELLED:
            at = f"{np.datetime64(int(part['target_appended_at_ms']), 'ms')}Z"
            if int(part["reason"]) == Reason.DRAINED:
                detail = f"to delay server {int(part['target_log_id']):016x}"
                detail += f", sequence {named}, accepted there {at}" if named else ""
            else:
                detail = f"sequence {named}, due {at}"
                detail = f"to {detail}" if int(part["reason"]) in FOLLOWED else f"because of {detail}"
    return Step(what, int(part["claimed_at_ms"]) or None, path, position, detail)


def _at_target(
    disk: Disk, servers: _Servers, found: Trace, part: np.void, subject: str, due_from_ms: int
) -> list[_NextLife]:
    log_id, offset = int(part["target_log_id"]), int(part["target_offset"])
    target = servers.get((Role.REALTIME, log_id))
    if target is None:
        found.unseen.append(f"what became of it at realtime server {log_id:016x}: its directory is not here")
        return []
    place = LogPlace(target.message_folder, FileKind.REALTIME, log_id)
    bases = segment_bases(disk, place)
    if not bases or bases[0] > offset:
        found.unseen.append(f"where it stands at realtime server {log_id:016x}: retention has removed it")
        return []
    path, position = place_of(disk, place, offset)
    try:
        batch = read_batch(disk, path, position)
    except BatchMalformed as error:
        raise DamagedData(path, position, error.message) from error
    rows = (
        np.flatnonzero(batch.uint64s(ColumnId.SEQUENCE) == found.sequence) if ColumnId.SEQUENCE in batch else NO_INT64S
    )
    if not len(rows):
        found.unseen.append(f"{path} has another batch at byte {position} than the dispatch log says: run the audit")
        return []
    row = int(rows[0])
    at_ms = int(part["target_appended_at_ms"])
    _add_gaps(disk, target, found, int(part["claimed_at_ms"]), at_ms)
    appended = Step("appended", at_ms, path, position, f"realtime server {log_id:016x}, row {row}{_recurs(batch, row)}")
    found.steps.append(_late(appended, due_from_ms))
    indexed = _indexed(disk, target, offset << ROW_BITS | row)
    if indexed is None:
        found.unseen.append("its consume sequence: the next checkpoint of the realtime server writes it")
        return []
    consume, step = indexed
    found.steps.append(step)
    pulled = _pulled(disk, target, subject, consume, part)
    found.steps += pulled.steps
    if not pulled.is_whole:
        found.unseen.append("pulls of groups whose records a checkpoint has removed from the pull log")
    for group, word in pulled.last:
        if word not in SETTLED:
            does = {"": "pulls it", "pulled": "acknowledges it"}.get(word, "pulls it again")
            found.waits_for = _both(found.waits_for, f"a consumer of group {group} that {does}")
    if not pulled.last and not pulled.steps:
        found.waits_for = "a consumer that pulls it"
    return pulled.lives


def _indexed(disk: Disk, target: Directory, entry: int) -> tuple[int, Step] | None:
    for name in disk.list_folder(f"{target.path}/consume"):
        if not name.isdecimal():
            continue
        place = consume_place(target.path, target.log_id, int(name))
        for base in consume_bases(disk, place):
            entries = read_unchecked(disk, place, base)
            at = np.flatnonzero(entries == np.uint64(entry))
            if len(at):
                number = int(at[0])
                step = Step("indexed", None, place.path(base), entry_position(number), f"number {base + number}")
                return base + number, step
    return None


class _Pulled:
    """What groups did with one message: the steps, how it lives on, and what each group that is there did last."""

    def __init__(self, target: int, subject: str, consume: int, claimed_at_ms: int) -> None:
        self.is_cut = False  # Whether a checkpoint has removed the beginning of the log.
        self._target = target
        self._subject = subject
        self._consume = consume
        self._claimed_at_ms = claimed_at_ms
        self._names: dict[int, tuple[str, str]] = {}
        self._last: dict[int, str] = {}  # By group; "" of one that gets the message and has not pulled it.
        self._held: set[tuple[int, int]] = set()  # Group and pull sequence of each time that it was given out.
        self._unknown: set[int] = set()
        self._steps: list[tuple[int, Step]] = []  # Each with its group.
        self._lives: list[tuple[int, _NextLife]] = []

    @property
    def steps(self) -> list[Step]:
        """What groups did with it, in the order of the log."""
        return [step for _, step in self._steps]

    @property
    def lives(self) -> list[_NextLife]:
        """How it lives on, by the decisions of groups."""
        return [life for _, life in self._lives]

    @property
    def last(self) -> list[tuple[str, str]]:
        """Each group and its last word about the message, by name."""
        return sorted((self._names[group_id][1], word) for group_id, word in self._last.items())

    @property
    def is_whole(self) -> bool:
        """Whether the log names all groups and all that they did."""
        return not (self.is_cut or self._unknown)

    def take(self, record: _Record, path: str, position: int) -> None:
        """Take the next record, which stands at a byte of a file."""
        group_id = record.group_id
        if isinstance(record, GroupCreated):
            self._names[group_id] = (record.subject, record.group)
            if record.subject == self._subject:
                self._last[group_id] = ""
            return
        if group_id not in self._names:
            self._unknown.add(group_id)
            return
        held = {at for own, at in self._held if own == group_id}
        if isinstance(record, GroupBegins):
            if record.begins_at_ms > self._claimed_at_ms:
                self._last.pop(group_id, None)
        elif isinstance(record, GroupSetBack):
            self._set_back(record, held, path, position)
        elif isinstance(record, GroupMoved | GroupDeleted):
            self._let_go(record, held, path, position)
        elif isinstance(record, RetryDecided):
            for row in decode_rows(record.rows):
                for at in held.intersection(range(row.pull_first, row.pull_first + row.covered)):
                    self._held.discard((group_id, at))
                    self._retried(record, row, path, position)
        else:
            self._entry(record, held, path, position)

    def _step(self, group_id: int, what: str, at_ms: int, path: str, position: int, detail: str = "") -> None:
        detail = f"group {self._names[group_id][1]}{detail}"
        self._steps.append((group_id, Step(what, at_ms, path, position, detail)))
        self._last[group_id] = what

    def _set_back(self, record: GroupSetBack, held: set[int], path: str, position: int) -> None:
        # A power cut took what had this number before (rule L2), and what the group did and decided with it. That may
        # have been another message, so nothing else is told.
        group_id = record.group_id
        if record.next <= self._consume and self._names[group_id][0] == self._subject:
            self._held -= {(group_id, at) for at in held}
            had = any(own == group_id for own, _ in self._steps)
            self._steps = [pair for pair in self._steps if pair[0] != group_id]
            self._lives = [pair for pair in self._lives if pair[0] != group_id]
            self._last[group_id] = ""
            if had:
                detail = f"group {self._names[group_id][1]} was set back behind what had this number before"
                self._steps.append((group_id, Step("let go", None, path, position, detail)))

    def _let_go(self, record: GroupMoved | GroupDeleted, held: set[int], path: str, position: int) -> None:
        group_id, is_move = record.group_id, isinstance(record, GroupMoved)
        self._held -= {(group_id, at) for at in held}
        detail = f"group {self._names[group_id][1]} was {'moved' if is_move else 'deleted'}"
        self._steps += [(group_id, Step("let go", None, path, position, detail))] * len(held)
        known = self._last.pop(group_id, "")
        # A group that was moved back gets the message again, also when it has acknowledged it.
        if (
            isinstance(record, GroupMoved)
            and record.next <= self._consume
            and self._names[group_id][0] == self._subject
        ):
            self._last[group_id] = known and "let go"

    def _retried(self, record: RetryDecided, row: RetryRow, path: str, position: int) -> None:
        due = np.datetime64(row.due_ms, "ms")
        why = f": {row.reason or row.error}" if row.reason or row.error else ""
        what, detail = ("rejected", "") if row.reason else ("retried", f", due {due}Z")
        self._step(record.group_id, what, record.at_ms, path, position, f"{detail}{why}")
        is_first = parse_retry_subject(self._subject) is None
        again = retry_subject(self._target, record.group_id) if is_first else self._subject
        self._lives.append((record.group_id, _NextLife(record.origin, again, row.due_ms, bool(row.reason))))

    def _entry(self, entry: PullEntry, held: set[int], path: str, position: int) -> None:
        group_id = entry.group_id
        if entry.op is not PullOp.PULL:
            hit = next((at for at in held if entry.pull_first <= at < entry.pull_first + entry.covered), None)
            if hit is not None:
                self._held.discard((group_id, hit))
                self._step(group_id, ENDS[entry.op], entry.at_ms, path, position)
            return
        number = self._consume - entry.consume_first
        if self._names[group_id][0] == self._subject and 0 <= number < entry.covered:
            self._held.add((group_id, entry.pull_first + number))
            self._step(group_id, "pulled", entry.at_ms, path, position, f", attempt {entry.attempt}")


def _pulled(disk: Disk, target: Directory, subject: str, consume: int, part: np.void) -> _Pulled:
    """What groups of consumers did with the message of a dispatch part, in the order of the pull log."""
    place = LogPlace(f"{target.path}/pull", FileKind.PULL, target.log_id)
    bases = segment_bases(disk, place)
    pulled = _Pulled(target.log_id, subject, consume, int(part["claimed_at_ms"]))
    for offset, record in _records(disk, place, bases[0]) if bases else ():
        pulled.take(record, *place_of(disk, place, offset))
    pulled.is_cut = bool(bases and bases[0] > 0)
    return pulled


def _records(disk: Disk, place: LogPlace, start: int) -> Iterator[tuple[int, _Record]]:
    for group in read_log(disk, place, start, log_size(disk, place), []):
        for offset, batch in group.batches():
            if group.header.kind == GroupKind.CONTROL:
                for record in decode_sound(batch):
                    if isinstance(record, _ABOUT_GROUPS):
                        yield offset, record
            else:
                for entry in decode_entries(batch):
                    yield offset, entry
