"""Recovery: it reads the last checkpoint and the two logs behind it, and rebuilds the state before the stop.

A start indexes and answers nothing before it is known to be durable: `open_log` writes back and syncs bytes that may
not be (rule L1). The order is: identity, message log and its rescan, pull log. Entries of the pull log are applied in
its order, so a replay ends in the state of the life that wrote them (docs/formats/pull.md). Consumers may have been
given messages that a power cut took before their fsync: their groups are set back, durably, before the start takes a
message (rule L2). This is the only code that reads the directory into memory (docs/decisions.md, 0017).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import ROWS_MAX, ColumnId
from delayd.batch.names import RETRY_PREFIX, parse_retry_subject
from delayd.batch.sequences import ROW_BITS, ROW_MASK
from delayd.config import RealtimeConfig
from delayd.errors import BatchMalformed, DamagedData, DamagedValue, DataError, DiskFull, RetryLater, Shortage
from delayd.log.consume import (
    SEGMENT_ENTRIES,
    ConsumeTail,
    check_tail,
    consume_place,
    read_unchecked,
    remove_segments,
    segment_bases,
)
from delayd.log.control import (
    GroupBegins,
    GroupBounded,
    GroupCreated,
    GroupDeleted,
    GroupEphemeral,
    GroupFiltered,
    GroupHeldBack,
    GroupIdsSkipped,
    GroupMoved,
    GroupOrdered,
    GroupSetBack,
    HelloHeard,
    Known,
    OriginAccepted,
    RetryAccepted,
    RetryDecided,
    decode_known,
    decode_sound,
    encode_known,
)
from delayd.log.group import CommitGroup, GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, open_log, open_needed_log
from delayd.log.pull import GroupDecision, PullEntry, PullOp, decode_entries, decode_rows, decode_void, encode_void
from delayd.log.segment import FileKind
from delayd.log.tail import COPY_PREFIX, named_behind
from delayd.machine.clock import Clock
from delayd.machine.disk import Disk
from delayd.machine.identity import Identity, open_identity
from delayd.machine.state import State

from .commit import hello_of_record
from .groups import Group, LostGroup
from .handoff import LostOffers, Origins
from .kept import (
    UNREAD_KEY,
    Kept,
    Life,
    Marks,
    copied,
    encode_marks,
    encode_offers,
    encode_unread,
    group_keys,
    subject_of_key,
)
from .rebuild import rows_of
from .subject_index import Index, StoredBatches
from .terms import decode_filter

READS = 2  # A read is tried this often: it may fail once.
ANCHOR_BATCHES = 100_000  # The newest batches of a subject; an entry of its consume log should name one of them.

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """Everything that a start finds; the marks say how much of it the last checkpoint holds."""

    identity: Identity
    marks: Marks
    message_log: Log
    index: Index
    stored: StoredBatches
    origins: Origins
    next_sequence: int
    lost_offers: LostOffers
    pull_place: LogPlace
    # Reads the pull log into groups of an index; it gets the time, too, and raises DamagedData.
    read_pulls: Callable[[Index, int], tuple[PullReplay, Log]]
    appended_at_ms: int = 0
    pulls: PullReplay | None = None  # None: the pull log can't be read; ``pull_damage`` says why.
    pull_log: Log | None = None
    pull_damage: DamagedData | None = None
    unread_from: int | None = None  # Then: where the message log ended when it could first not be read.
    window_damage: DamagedData | None = None  # Why nobody can say which batches are in doubt.

    @property
    def window_offset(self) -> int:
        """The lowest offset of a batch that was above W at the checkpoint; its end where there is none."""
        return min(self.marks.window_offset, self.marks.indexed_offset)

    def window_groups(self) -> Iterator[CommitGroup]:
        """The groups up to the checkpoint that may hold batches in doubt; raises DamagedData."""
        start = self.window_offset
        return self.message_log.scan(start, self.marks.indexed_offset, 0 if start == 0 else None)


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
    lost_offers = LostOffers(clock, kept.offers(), identity.epoch, ahead=not config.offer_durable_only)
    # The incarnation is the epoch under another name: both rise by one, durably, at each start.
    state.commit(copied([encode_marks(marks, identity.epoch), encode_offers(lost_offers.kept(ends=False))]))
    now_ms = clock.now_ms()
    message_place = LogPlace(f"{config.folder}/message", FileKind.REALTIME, identity.log_id, config.segment_bytes)
    whole = (marks.indexed_offset, marks.indexed_crc32c)
    # A tail that does not check is cut unless the pull log says that it was durable, so the pull log is asked before.
    confirmed = partial(named_behind, disk, state.scan, config.folder, identity.log_id)
    message_log = open_needed_log(disk, message_place, now_ms, *whole, kept_from=marks.kept_from, confirmed=confirmed)
    opened.callback(message_log.close)
    index = Index(disk, config.folder, message_log)
    for damage in kept.subjects(index):
        _find_subject(disk, config.folder, index, message_log, marks.indexed_offset, damage)
    _check_consume_logs(disk, config.folder, identity.log_id, index)
    origins = Origins()
    kept.origins(origins)
    pull_place = LogPlace(f"{config.folder}/pull", FileKind.PULL, identity.log_id, config.segment_bytes)
    recovered = Recovered(
        identity,
        marks,
        message_log,
        index,
        StoredBatches(message_log, config.tail_bytes),
        origins,
        marks.next_sequence,
        lost_offers,
        pull_place,
        partial(_read_pull_log, disk, pull_place, kept, marks),
    )
    _read_message_log(recovered)
    _open_pull_log(opened, recovered, kept, state, now_ms)
    return recovered


def _open_pull_log(opened: ExitStack, recovered: Recovered, kept: Kept, state: State, now_ms: int) -> None:
    """Read the pull log, and set groups back that a power cut concerns; while it can't be read only consumers wait."""
    message_log, unread_from = recovered.message_log, kept.unread_from()
    try:
        with ExitStack() as mine:
            pulls, pull_log = recovered.read_pulls(recovered.index, now_ms)
            mine.callback(pull_log.close)
            _check_end(recovered, pulls)
            try:
                behind = groups_behind(pulls, recovered.index, unread_from)
                set_back(pulls, behind, pull_log, recovered.identity.epoch, message_log.end)
            except (RetryLater, DiskFull) as error:
                # Nothing is damaged there, so an operator who gives it up gives up nothing before this position.
                what = f"groups can't be set back now: {error.message}"
                raise DamagedData(pulls.folder, pull_log.end, what, waits=True) from error
            opened.enter_context(mine.pop_all())
    except DamagedData as damage:
        if damage.end_of:
            raise
        recovered.pull_damage = damage
        recovered.unread_from = message_log.end if unread_from is None else unread_from
        if unread_from is None:
            # This life takes messages under numbers that the pull log may have given to others.
            state.commit(copied([encode_unread(message_log.end)]))
        return
    recovered.pulls, recovered.pull_log = pulls, pull_log
    if unread_from is not None:
        state.commit([], [UNREAD_KEY, COPY_PREFIX + UNREAD_KEY])


def _check_consume_logs(disk: Disk, folder: str, log_id: int, index: Index) -> None:
    """Note which consume logs must be rebuilt; remove those that no checkpoint knows, left by one that did not finish
    (rule L4).
    """
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
            log.warning("consume_log_not_checked subject=%s reason=%r", subject.name, error.message)
    for name in disk.list_folder(f"{folder}/consume"):
        if not name.isdecimal():
            continue
        found = known.get(name)
        place = consume_place(folder, log_id, int(name))
        last = found.tail.base if found is not None and found.tail.count else -SEGMENT_ENTRIES
        remove_segments(disk, place, [base for base in segment_bases(disk, place) if base > last])


def _find_subject(disk: Disk, folder: str, index: Index, message_log: Log, stop: int, damage: DamagedValue) -> None:
    """Find out what the lost value of a subject said: its id, and its end below the checkpoint (rule L9).

    An entry of a consume log that belongs to no known subject says which consume sequence one of its batches has.
    Counting the messages from there on gives the end. If retention has removed nothing from the message log, the count
    alone gives the end.
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
            # Retention has removed all its messages: the number of entries below the checkpoint gives the end.
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
    """Rescan from the lowest batch that was above W, and index the batches that the checkpoint does not hold."""
    marks, message_log = recovered.marks, recovered.message_log
    for _ in range(READS):
        try:
            recovered.appended_at_ms = _read_window(recovered.origins, recovered.window_groups())
            recovered.window_damage = None
            break
        except DamagedData as damage:
            # Only the batches in doubt are read from there, so everybody else is served meanwhile.
            recovered.window_damage = damage
    for group in message_log.scan(marks.indexed_offset, message_log.durable, marks.indexed_crc32c):
        header = group.header
        recovered.appended_at_ms = max(recovered.appended_at_ms, header.appended_at_ms)
        if header.kind == GroupKind.CONTROL:
            _hear_again(recovered.origins, group)
        elif header.kind == GroupKind.DATA:
            _take_again(recovered, group)
            recovered.next_sequence = header.base_sequence + header.row_count


def _read_window(origins: Origins, groups: Iterable[CommitGroup]) -> int:
    """Find the batches in doubt again, from the first group with a batch above W on; return the latest stamp."""
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


def _hear_again(origins: Origins, group: CommitGroup) -> None:
    for _, batch in group.batches():
        for record in decode_known(batch):
            if isinstance(record, OriginAccepted):
                origins.origin(record.log_id).accept()
            elif isinstance(record, HelloHeard):
                hello = hello_of_record(record)
                origin = origins.origin(hello.log_id)
                if (hello.epoch, hello.session) > (origin.epoch, origin.session):
                    origin.hear(hello)
                origin.advance(hello.w)


def _take_again(recovered: Recovered, group: CommitGroup) -> None:
    for offset, batch in group.batches():
        _remember(recovered.origins, group, offset, batch)
        recovered.index.subject_of(batch).add(offset, batch.count, batch.total_bytes)


def _remember(origins: Origins, group: CommitGroup, offset: int, batch: Batch) -> None:
    part = batch.dispatch
    origin = origins.origin(part.origin_log_id)
    origin.remember(batch, part, offset, group.header.offset, group.header.appended_at_ms)
    origin.highest_sequence = max(origin.highest_sequence, int(batch.uint64s(ColumnId.SEQUENCE).max()))


def _read_pull_log(
    disk: Disk, place: LogPlace, kept: Kept, marks: Marks, index: Index, now_ms: int
) -> tuple[PullReplay, Log]:
    """Bring the groups of the checkpoint to the end of the pull log."""
    replay = PullReplay(kept, index, marks, place.folder)
    pull_log = open_log(disk, place, now_ms, marks.pull_offset, marks.pull_crc32c, leave_out=True)
    try:
        for group in pull_log.scan(marks.pull_offset, pull_log.durable, marks.pull_crc32c):
            replay.take(group)
        _meet_former(replay, index, pull_log, marks)
    except BaseException:
        pull_log.close()
        raise
    return replay, pull_log


def _meet_former(replay: PullReplay, index: Index, pull_log: Log, marks: Marks) -> None:
    """Find the ids of groups that are gone: no id is given twice, or a new group would get the retries and dead letters
    of an old one (rule Q2).
    """
    for subject in index.listed(RETRY_PREFIX, ""):
        whose = parse_retry_subject(subject.name)
        if whose is not None and whose[0] == pull_log.place.log_id:
            replay.meet(whose[1])
    if not marks.next_group:
        # An earlier version wrote this checkpoint. Damage below it keeps no server from its start.
        with suppress(DataError):
            for group in pull_log.scan(pull_log.start, marks.pull_offset):
                replay.meet_made(group)


def _check_end(recovered: Recovered, replay: PullReplay) -> None:
    """Refuse a message log that ends before what the pull log calls durable: its end is lost, and new messages would
    get old numbers. No crash causes this. A group that is about to get these numbers has already acknowledged others
    under them.
    """
    message_log = recovered.message_log
    if replay.durable_offset > message_log.end:
        folder = recovered.pull_place.folder
        what = (
            f"the log ends there, and the pull log says that it was durable up to offset {replay.durable_offset}; "
            f"where no copy is left `delayd mend give-up {folder}` says what that costs"
        )
        position = message_log.file_position(message_log.end)[1]
        raise DamagedData(message_log.segments[-1].path, position, what, end_of=folder)


def groups_behind(replay: PullReplay, index: Index, unread_from: int | None) -> dict[int, int]:
    """Groups that were given messages which a power cut took before their fsync (rule L2), with the consume sequence at
    which each goes on. ``unread_from`` is where the message log ended when a start could not read the pull log; what
    stands behind came later.

    Raises:
        RetryLater: nobody can say it now.
    """
    behind: dict[int, int] = {}
    for group in replay.groups.values():
        # The groups may be those of an index beside this one.
        subject = index.by_name.get(group.subject.name, group.subject)
        end = subject.end if unread_from is None else index.first_from(subject, unread_from)
        if replay.came_to(group) > end:
            behind[group.group_id] = end
    return behind


def set_back(replay: PullReplay, behind: Mapping[int, int], pull_log: Log, epoch: int, durable_offset: int) -> None:
    """Set groups back to where they go on; durable on return. Raises DiskFull.

    An example: a subject has the messages 0 to 6, and its group was given 5 to 8, as the pull sequences 70 to 73. Its
    consumer has acknowledged 8, and nobody has told it so. The record says that the group goes on at 7, and that 72 and
    73 are void: the delay server sends other messages as 7 and 8, which a later replay must not take for acknowledged,
    and to acknowledge 73 once more is stale.
    """
    if not behind:
        return
    void: dict[int, list[tuple[int, int]]] = {group_id: [] for group_id in behind}
    for group in pull_log.scan(replay.begun_at, pull_log.durable):
        for entry in _pulls_in(group):
            end = behind.get(entry.group_id)
            if end is not None and (gone := entry.consume_first + entry.covered - end) > 0:
                stop, own = entry.pull_first + entry.covered, void[entry.group_id]
                first = stop - min(gone, entry.covered)
                # Neighbours are joined: a record of a million single pulls would not fit into a batch.
                own.append((own.pop()[0] if own and own[-1][1] == first else first, stop))
    records: list[Known] = [GroupSetBack(id_, end, encode_void(void[id_])) for id_, end in behind.items()]
    stamps = (epoch, replay.appended_at_ms, durable_offset)
    pull_log.append([NewGroup(GroupKind.CONTROL, [encode_known(records)], *stamps)], replay.appended_at_ms)
    pull_log.flush()
    for group_id, end in behind.items():
        consumers = replay.groups[group_id]
        log.warning(
            "group_set_back subject=%s group=%s messages=%d reason=a_power_cut_took_them_before_their_fsync",
            *(*consumers.names, replay.came_to(consumers) - end),
        )
        consumers.changing().set_back(end, void[group_id])


def _pulls_in(group: CommitGroup) -> Iterator[PullEntry]:
    if group.header.kind == GroupKind.DATA:
        for _, batch in group.batches():
            yield from [entry for entry in decode_entries(batch) if entry.op == PullOp.PULL]


class PullReplay:
    """The groups of a server on their way from its checkpoint to the end of its pull log."""

    def __init__(self, kept: Kept, index: Index, marks: Marks, folder: str) -> None:
        self.groups, lost = kept.groups(index)
        self.lost = {each.group_id: each for each in lost}  # Groups whose progress does not check, or is gone.
        self.lives = kept.lives()  # In order; the last one is the newest.
        self.next_pull = marks.next_pull
        # No group has had this id or a higher one, also of those that are gone.
        self.next_group = max([marks.next_group - 1, 0, *self.groups, *self.lost]) + 1
        self.begun_at = marks.pull_offset
        self.durable_offset = 0  # Up to where the message log was durable, as the newest group of the pull log says.
        self._pulled_until: dict[int, int] = {}  # By group: the consume sequence behind all that it was given.
        self.appended_at_ms = 0
        self.removes: list[bytes] = []  # Keys of deleted groups; the next checkpoint removes them.
        self._index = index
        self._kept = kept
        self.folder = folder

    def take(self, group: CommitGroup) -> None:
        """Apply one group of the pull log.

        Raises:
            DamagedData: it says what no server writes.
        """
        try:
            self._take(group)
        except BatchMalformed as error:
            raise DamagedData(self.folder, group.header.offset, str(error)) from error

    def _take(self, group: CommitGroup) -> None:
        header = group.header
        self.appended_at_ms = max(self.appended_at_ms, header.appended_at_ms)
        self.durable_offset = max(self.durable_offset, header.base_sequence)
        self.begin_life(header.epoch)
        for _, batch in group.batches():
            if header.kind == GroupKind.CONTROL:
                for record in decode_known(batch):
                    self._hear(record)
                continue
            for entry in decode_entries(batch):
                consumers = self.groups.get(entry.group_id)
                if consumers is None:
                    if entry.group_id not in self.lost:
                        self._lose(entry.group_id, header.offset)
                    self.next_pull = max(self.next_pull, entry.pull_first + entry.covered)
                    continue
                consumers.apply(entry)
                if entry.op == PullOp.PULL:
                    self.next_pull = max(self.next_pull, entry.pull_first + entry.covered)
                    until = max(self._pulled_until.get(entry.group_id, 0), entry.consume_first + entry.covered)
                    self._pulled_until[entry.group_id] = until

    def came_to(self, group: Group) -> int:
        """The consume sequence behind all that a group has passed or was given, also before an operator moved it."""
        return max(group.next, self._pulled_until.get(group.group_id, 0))

    def meet(self, group_id: int) -> None:
        """Note that there is, or was, a group with this id."""
        self.next_group = max(self.next_group, group_id + 1)

    def meet_made(self, group: CommitGroup) -> None:
        """Note the ids of the groups that one group of the pull log creates, and nothing else."""
        if group.header.kind == GroupKind.CONTROL:
            for _, batch in group.batches():
                for record in decode_sound(batch):
                    if isinstance(record, GroupCreated):
                        self.meet(record.group_id)

    def _hear(self, record: Known) -> None:
        if isinstance(record, GroupCreated):
            self._create(record)
        elif isinstance(record, GroupDeleted):
            self._delete(record.group_id)
        elif isinstance(record, GroupIdsSkipped):
            self.next_group += record.ids
        elif isinstance(record, GroupMoved) and (group := self.groups.get(record.group_id)) is not None:
            group.move(record.next)
        elif isinstance(record, GroupSetBack) and (group := self.groups.get(record.group_id)) is not None:
            group.changing().set_back(record.next, decode_void(record.void))
            self._pulled_until.pop(record.group_id, None)
        elif isinstance(record, GroupHeldBack) and (group := self.groups.get(record.group_id)) is not None:
            group.hold_back(bool(record.held_back))
        elif isinstance(record, GroupEphemeral) and (group := self.groups.get(record.group_id)) is not None:
            group.make_ephemeral()
        elif isinstance(record, GroupFiltered) and (group := self.groups.get(record.group_id)) is not None:
            group.want(decode_filter(record.tags))
        elif isinstance(record, GroupOrdered) and (group := self.groups.get(record.group_id)) is not None:
            group.keep_order()
        elif isinstance(record, GroupBegins) and (group := self.groups.get(record.group_id)) is not None:
            group.begins_at_ms = record.begins_at_ms
        elif isinstance(record, GroupBounded) and (group := self.groups.get(record.group_id)) is not None:
            group.bound(record.in_flight_max)
        elif isinstance(record, RetryDecided) and (group := self.groups.get(record.group_id)) is not None:
            group.changing().leave(GroupDecision(*record[:-1], decode_rows(record.rows)))
        elif isinstance(record, RetryAccepted) and (group := self.groups.get(record.group_id)) is not None:
            group.changing().leaving.pop((record.producer, record.number), None)

    def _lose(self, group_id: int, offset: int) -> None:
        """Note a group that has entries but no beginning: nobody knows where it stood. All other groups are served."""
        self.meet(group_id)
        what = f"an entry names the group {group_id}, which no record before it made"
        self.lost[group_id] = LostGroup(group_id, self._kept.names_of(group_id), DamagedData(self.folder, offset, what))

    def begin_life(self, epoch: int) -> None:
        """Note where a life begins: it uses the pull sequences again that the life before gave out and lost."""
        if not self.lives or self.lives[-1].epoch < epoch:
            self.lives.append(Life(epoch, self.next_pull))

    def settle_starts(self) -> None:
        """Groups that were created anew while nobody knew their first kept message begin there, not at 0."""
        for group in self.groups.values():
            if min([group.next, *[run.first for run in group.window.others.within(0, 1)]]) == 0:
                group.settled = False
                try:
                    group.begin_at(self._index.first(group.subject))
                except RetryLater:
                    # The consume log is being rebuilt, or can be read again before the group gets any message.
                    continue

    def _delete(self, group_id: int) -> None:
        self.meet(group_id)
        self.lost.pop(group_id, None)
        self.groups.pop(group_id, None)
        self.removes += group_keys(group_id)

    def _create(self, record: GroupCreated) -> None:
        self.meet(record.group_id)
        self.lost.pop(record.group_id, None)
        subject = self._index.subject(record.subject)
        try:
            start = self._index.first(subject)
        except RetryLater:
            start = 0  # `settle_starts` moves it to the first message that is kept.
        self.groups[record.group_id] = Group(record.group_id, subject, record.group, start, self.next_pull)
