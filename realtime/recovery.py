"""Recovery: from the last checkpoint and the two logs behind it to the state before the stop.

Nothing is indexed or answered before it is known to be durable: `open_log` writes back and syncs what may not be
(rule L1). Identity, then message log and its rescan, then pull log.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from delayd.batch import ROWS_MAX, Batch, ColumnId
from delayd.clock import Clock
from delayd.config import RealtimeConfig
from delayd.disk import Disk
from delayd.errors import BatchMalformed, DamagedData, DamagedValue, DataError, RetryLater, Shortage
from delayd.identity import Identity, open_identity
from delayd.log.consume import (
    ROW_BITS,
    ROW_MASK,
    SEGMENT_ENTRIES,
    ConsumeTail,
    check_tail,
    consume_place,
    read_unchecked,
    remove_segments,
    segment_bases,
)
from delayd.log.control import RecordValue, decode_records
from delayd.log.group import Group as LogGroup
from delayd.log.group import GroupKind
from delayd.log.log import Log, LogPlace, open_needed_log
from delayd.log.pull import PullOp, decode_entries
from delayd.log.segment import FileKind
from delayd.log.tally import tally_place
from delayd.state import State

from .commit import accepted_of_record, hello_of_record
from .groups import Group
from .handoff import Origins
from .index import Index
from .kept import Kept, Life, LostGroup, Marks, copied, encode_marks, group_keys, subject_of_key
from .pulls import DELETED_RECORD, GROUP_RECORD
from .rebuild import rows_of
from .stored import StoredBatches
from .tally_log import TallyLog

READS = 2  # A read may fail once.
ANCHOR_BATCHES = 100_000  # The newest of a subject; an entry of its consume log names one of them.

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """All that a start finds; the marks say what of it the last checkpoint holds."""

    identity: Identity
    marks: Marks
    message_log: Log
    pull_log: Log
    tally_log: TallyLog
    index: Index
    stored: StoredBatches
    origins: Origins
    groups: dict[int, Group]
    next_sequence: int
    next_pull: int
    appended_at_ms: int = 0
    pull_appended_at_ms: int = 0
    lives: list[Life] = field(default_factory=list)  # This one is the last.
    lost: dict[int, LostGroup] = field(default_factory=dict)  # Groups whose progress does not check.
    removes: list[bytes] = field(
        default_factory=list
    )  # Keys of groups that are gone; the next checkpoint removes them.
    window_damage: DamagedData | None = None  # Why nobody can say which batches are in doubt.


def recover(
    config: RealtimeConfig, disk: Disk, state: State, clock: Clock, draw_u64: Callable[[], int], state_path: str
) -> Recovered:
    """Open a directory, new or old.

    Raises:
        DamagedData, NewerFormat: with the path and what to do; nothing is open then.
    """
    with ExitStack() as opened:
        recovered = _recover(opened, config, disk, state, clock, draw_u64, state_path)
        opened.pop_all()
        return recovered


def _recover(
    opened: ExitStack,
    config: RealtimeConfig,
    disk: Disk,
    state: State,
    clock: Clock,
    draw_u64: Callable[[], int],
    state_path: str,
) -> Recovered:
    identity = open_identity(state, state_path, draw_u64, disk)
    kept = Kept(state, state_path)
    marks = kept.marks()
    # The incarnation is the epoch under another name: both rise by one, durably, at each start.
    state.commit(copied([encode_marks(marks, identity.epoch)]))
    now_ms = clock.now_ms()
    message_place = LogPlace(f"{config.folder}/message", FileKind.REALTIME, identity.log_id, config.segment_bytes)
    whole = (marks.indexed_offset, marks.indexed_crc32c)
    message_log = open_needed_log(disk, message_place, now_ms, *whole, kept_from=marks.kept_from)
    opened.callback(message_log.close)
    pull_place = LogPlace(f"{config.folder}/pull", FileKind.PULL, identity.log_id, config.segment_bytes)
    pull_log = open_needed_log(disk, pull_place, now_ms, marks.pull_offset, marks.pull_crc32c)
    opened.callback(pull_log.close)
    for found in (*message_log.recovered, *pull_log.recovered):
        # After a SIGKILL bytes are written back that no header proves durable, and nothing is lost: no cause for alarm.
        log.log(
            logging.WARNING if found.cut_bytes else logging.INFO,
            "tail_recovered path=%s cut_bytes=%d reason=%r rewritten_bytes=%d",
            *(found.path, found.cut_bytes, found.cut_reason, found.rewritten_bytes),
        )
    place = tally_place(config.folder, identity.log_id)
    tally_log = TallyLog(disk, place, identity.epoch, now_ms, marks.tally_offset)
    index = Index(disk, config.folder, message_log)
    for damage in kept.subjects(index):
        _find_subject(disk, config.folder, index, message_log, marks.indexed_offset, damage)
    _check_consume_logs(disk, config.folder, identity.log_id, index)
    origins = Origins()
    kept.origins(origins)
    groups, lost = kept.groups(index)
    recovered = Recovered(
        identity,
        marks,
        message_log,
        pull_log,
        tally_log,
        index,
        StoredBatches(message_log, config.tail_bytes),
        origins,
        groups,
        marks.next_sequence,
        marks.next_pull,
        lives=kept.lives(),
        lost={each.group_id: each for each in lost},
    )
    _read_message_log(recovered)
    _replay_pull_log(recovered)
    _live(recovered, identity.epoch)
    if message_log.start:
        _settle_starts(recovered)
    return recovered


def _settle_starts(recovered: Recovered) -> None:
    """Groups that were made again while nobody could say which message is the first begin there, not at 0."""
    for group in recovered.groups.values():
        if min(group.next, group.next if group.redeliver.oldest is None else group.redeliver.oldest) == 0:
            group.settled = False
            try:
                group.begin_at(recovered.index.first(group.subject))
            except RetryLater:
                continue  # Its consume log is rebuilt, or can be read again before the group gets anything.


def _check_consume_logs(disk: Disk, folder: str, log_id: int, index: Index) -> None:
    """Note which of them must be rebuilt; what no checkpoint knows was left by one that did not finish (rule L4)."""
    known = {}
    for subject in index:
        place = index.place(subject)
        known[place.folder.rpartition("/")[2]] = subject
        if subject.damage is not None:
            continue
        if not subject.tail.valid:
            subject.damage = DamagedData(place.folder, 0, "its last checkpoint could not write it")
            continue
        try:
            check_tail(disk, place, subject.tail)
        except DamagedData as error:
            subject.damage = error
        except Shortage as error:
            log.warning("consume_log_not_checked subject=%s error=%r", subject.name, error.message)
    for name in disk.list_folder(f"{folder}/consume"):
        if not name.isdecimal():
            continue
        found = known.get(name)
        place = consume_place(folder, log_id, int(name))
        last = found.tail.base if found is not None and found.tail.count else -SEGMENT_ENTRIES
        remove_segments(disk, place, [base for base in segment_bases(disk, place) if base > last])


def _find_subject(disk: Disk, folder: str, index: Index, message_log: Log, stop: int, damage: DamagedValue) -> None:
    """Find out what a subject's lost value said: its id, and its end below the checkpoint (rule L9).

    An entry of a consume log that nobody claims says which consume sequence one of its batches has; the messages from
    there on are counted. A message log that has lost nothing to retention needs no entry.
    """
    name = subject_of_key(damage.key)
    offsets, counts = rows_of(message_log, name.encode(), stop)
    claimed = {subject.subject_id for subject in index}
    present = [int(each) for each in disk.list_folder(f"{folder}/consume") if each.isdecimal()]
    left, first_of = 0, dict[int, int]()  # By the offset of a batch: how many messages come from its first one on.
    for offset, count in list(zip(offsets, counts, strict=True))[: -ANCHOR_BATCHES - 1 : -1]:
        left += count
        first_of[offset] = left
    end, subject_id = sum(counts) if message_log.start == 0 else None, max([*claimed, *present], default=-1) + 1
    for candidate in sorted(set(present) - claimed):
        place = consume_place(folder, message_log.place.log_id, candidate)
        bases = segment_bases(disk, place)
        try:
            entries = read_unchecked(disk, place, bases[-1]) if bases else np.empty(0, np.uint64)
        except DataError:
            continue
        if not offsets and len(set(present) - claimed) == 1:
            # Retention has removed all its messages: the entries below the checkpoint say how many there were.
            end, subject_id = bases[-1] + int((entries >> np.uint64(ROW_BITS) < np.uint64(stop)).sum()), candidate
        for at in range(len(entries) - 1, max(-1, len(entries) - ROWS_MAX - 1), -1):
            offset, row = int(entries[at]) >> ROW_BITS, int(entries[at]) & ROW_MASK
            if offset in first_of:
                end, subject_id = bases[-1] + at - row + first_of[offset], candidate
                break
    if end is None:
        raise damage
    subject = index.subject(name)
    subject.tail, subject.end = ConsumeTail.lost(end), end
    subject.damage = damage
    index.number(subject, subject_id)
    index.changed(subject)
    log.error("subject_found_again subject=%s id=%d end=%d reason=%r", name, subject_id, end, damage.message)


def _read_message_log(recovered: Recovered) -> None:
    """Rescan from the lowest batch that was above W, and index what the checkpoint does not hold."""
    marks, message_log = recovered.marks, recovered.message_log
    start, checkpointed = min(marks.window_offset, marks.indexed_offset), marks.indexed_offset
    for _ in range(READS):
        try:
            groups = message_log.scan(start, checkpointed, 0 if start == 0 else None)
            recovered.appended_at_ms = read_window(recovered.origins, groups)
            recovered.window_damage = None
            break
        except DamagedData as damage:
            # Only what is in doubt is read from there: everybody else is served meanwhile.
            recovered.window_damage = damage
    for group in message_log.scan(checkpointed, message_log.durable, marks.indexed_crc32c):
        header = group.header
        recovered.appended_at_ms = max(recovered.appended_at_ms, header.appended_at_ms)
        if header.kind == GroupKind.CONTROL:
            _hear_again(recovered.origins, group)
        elif header.kind == GroupKind.DATA:
            _take_again(recovered, group)
            recovered.next_sequence = header.base_sequence + header.row_count


def read_window(origins: Origins, groups: Iterable[LogGroup]) -> int:
    """Find out again what is in doubt, from the first group with a batch above W on; the latest stamp of all."""
    appended_at_ms = 0
    for origin in origins:
        origin.forget_window()
    for group in groups:
        appended_at_ms = max(appended_at_ms, group.header.appended_at_ms)
        if group.header.kind == GroupKind.CONTROL:
            _hear_again(origins, group)
        elif group.header.kind == GroupKind.DATA:
            for offset, batch in group.batches():
                _remember(origins, group, offset, batch)
    return appended_at_ms


def _hear_again(origins: Origins, group: LogGroup) -> None:
    for _, batch in group.batches():
        for record in decode_records(batch):
            accepted = accepted_of_record(record)
            if accepted is not None:
                origins.origin(accepted).accept()
            hello = hello_of_record(record)
            if hello is not None:
                origin = origins.origin(hello.log_id)
                if (hello.epoch, hello.session) > (origin.epoch, origin.session):
                    origin.hear(hello)
                origin.advance(hello.w)


def _take_again(recovered: Recovered, group: LogGroup) -> None:
    for offset, batch in group.batches():
        _remember(recovered.origins, group, offset, batch)
        recovered.index.subject_of(batch).add(offset, batch.count, batch.total_bytes)


def _remember(origins: Origins, group: LogGroup, offset: int, batch: Batch) -> None:
    part = batch.dispatch
    origin = origins.origin(part.origin_log_id)
    origin.remember(batch, part, offset, group.header.offset, group.header.appended_at_ms)
    origin.highest_sequence = max(origin.highest_sequence, int(batch.uint64s(ColumnId.SEQUENCE).max()))


def _replay_pull_log(recovered: Recovered) -> None:
    marks, pull_log = recovered.marks, recovered.pull_log
    by_id = recovered.groups
    for group in pull_log.scan(marks.pull_offset, pull_log.durable, marks.pull_crc32c):
        recovered.pull_appended_at_ms = max(recovered.pull_appended_at_ms, group.header.appended_at_ms)
        _live(recovered, group.header.epoch)
        for _, batch in group.batches():
            if group.header.kind == GroupKind.CONTROL:
                for record in decode_records(batch):
                    _create_again(recovered, record)
                continue
            for entry in decode_entries(batch):
                consumers = by_id.get(entry.group_id)
                if consumers is None and entry.group_id in recovered.lost:
                    recovered.next_pull = max(recovered.next_pull, entry.pull_first + entry.covered)
                    continue
                if consumers is None:
                    what = f"an entry names the group {entry.group_id}, which no record before it made"
                    raise DamagedData(pull_log.place.folder, group.header.offset, what)
                consumers.apply(entry)
                if entry.op == PullOp.PULL:
                    recovered.next_pull = max(recovered.next_pull, entry.pull_first + entry.covered)


def _live(recovered: Recovered, epoch: int) -> None:
    """Note where a life begins: it reuses the pull sequences that the one before gave out and lost."""
    if not recovered.lives or recovered.lives[-1].epoch < epoch:
        recovered.lives.append(Life(epoch, recovered.next_pull))


def _create_again(recovered: Recovered, record: dict[str, RecordValue]) -> None:
    kind, group_id = record.get("type"), record.get("group_id")
    if kind not in (GROUP_RECORD, DELETED_RECORD):
        return
    if not isinstance(group_id, int):
        raise BatchMalformed("a record of a group has no id")
    recovered.lost.pop(group_id, None)
    if kind == DELETED_RECORD:
        recovered.groups.pop(group_id, None)
        recovered.removes += group_keys(group_id)
        return
    subject_name, name = record.get("subject"), record.get("group")
    if not isinstance(subject_name, str) or not isinstance(name, str):
        raise BatchMalformed("a record of a group has no names")
    subject = recovered.index.subject(subject_name)
    try:
        start = recovered.index.first(subject)
    except RetryLater:
        start = 0  # `_settle_starts` moves it to the first message that is kept.
    recovered.groups[group_id] = Group(group_id, subject, name, start, recovered.next_pull)
