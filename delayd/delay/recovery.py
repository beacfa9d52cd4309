"""Recovery: it reads a directory and builds everything that a delay server holds in memory (rules L1, P4, P5, P7).

The order matters: epoch, dispatch logs, message log, then the hours. Nothing is served before all four are done.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.sequences import NO_SEQUENCES, among
from delayd.config import DelayConfig
from delayd.delay.books.outcomes import (
    list_dispatch_logs,
    open_dispatch_log,
    outcomes_beside,
    quarantine_path,
    read_outcomes,
    reopen_dispatch_log,
)
from delayd.delay.books.sealing import SealLog, open_seal_log
from delayd.delay.damage.mending import doubtful, give_up_outcomes, take_back_schedules
from delayd.delay.filing.hour_table import FiledHours, GivenUp, HourTable, OutcomeEnd
from delayd.delay.filing.pending import PendingRows
from delayd.delay.handoff.target_words import AcceptedTarget, accepted_targets, counts
from delayd.delay.intake import Mark
from delayd.delay.kept_state import KeptState, heal_hours, read_kept
from delayd.delay.keys.run import KeyedRows, sent_rows
from delayd.delay.producers import Producers
from delayd.delay.rows import Rows, Stored, replayed_rows, stored_batches
from delayd.delay.subjects import Subjects
from delayd.delay.timers.hour_wheel import PreparedRows, prepare
from delayd.delay.timers.loading import load_hour, order_hour
from delayd.delay.timers.wheel import Wheel
from delayd.errors import DamagedData, DamagedValue
from delayd.hours import hour_of_ms
from delayd.log.control import Ended, Known, LogTime, SkippedSequences, TargetNote, Tried, decode_known
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.hour import (
    NO_ENDED,
    NO_TRIED,
    EndedRows,
    OutcomeRows,
    Skipped,
    decided_about,
    decode_ended,
    decode_tried,
    tried_rows,
)
from delayd.log.key_run import KnownRuns
from delayd.log.log import Log, LogPlace, open_needed_log
from delayd.log.segment import FileKind, Segment, UnfinishedFile, open_segment
from delayd.log.tail import decided_behind
from delayd.machine.disk import Disk
from delayd.machine.identity import Identity, Site
from delayd.outcome import TOOK_NO_KEY, Outcome

REPLAY_ROWS = 32_768  # This many rows of the message log are indexed at a time: most groups have some hundred.

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """Everything that a start finds in its directory."""

    identity: Identity
    log: Log
    hours: HourTable
    producers: Producers
    subjects: Subjects
    pending: PendingRows
    wheel: Wheel
    targets: dict[bytes, int]
    targets_owed: set[bytes]  # Subjects whose target only the message log names: the next checkpoint must store it.
    dispatch_logs: dict[int, Segment]
    # By hour: sequences with an outcome, and those that a decision has ended, sorted.
    decided: dict[int, NDArray[np.uint64]]
    told_rows: dict[int, int]  # By hour: how many outcomes its dispatch log has.
    owed: EndedRows  # Rows that a decision has ended and that have no outcome yet, by rising sequence.
    target_ends: dict[int, int]  # By target: highest offset that a dispatch log names (rule H7).
    replay: Mark
    next_sequence: int
    appended_at_ms: int
    # The latest appended_at of any group, even if an operator's decision has set the log's time back since.
    reach_ms: int
    skipped: list[Skipped]  # Sequences that an operator's decision left unused.
    dropped: dict[int, int]  # By hour: filed rows that operators gave up.
    given_up: dict[int, GivenUp]  # Operators' words on dispatch logs, by hour.
    # By hour: rows of given up dispatch logs that may have been handed over without anybody knowing.
    in_doubt: dict[int, Rows]
    loaded_until: int  # The last loaded hour.
    # Hours whose dispatch log is damaged: nobody knows which of their rows were sent.
    quarantined: dict[int, DamagedData]
    # Only hours that a checkpoint counts: the next checkpoint goes on to name what was durable there.
    quarantined_ends: dict[int, OutcomeEnd]
    # Ends of sealed hours' logs as a checkpoint counted them: these logs were not opened.
    sealed_ends: dict[int, OutcomeEnd]
    seals: SealLog | None  # None: the seal log is damaged, and no hour is sealed until it is restored.
    damage: list[DamagedData]
    beside: HourTable  # Extra files that hold rows of hours whose schedule log is damaged.
    # Hours whose schedule log is damaged or waits for its operator: why, and how many of its rows are loaded.
    unloaded: dict[int, tuple[DamagedData, int]]
    producers_lost: dict[int, DamagedValue]
    targets_lost: dict[bytes, DamagedValue]
    seals_damage: DamagedData | None
    filed_below: int  # Rows with lower sequences are in schedule logs; the others came from the message log.
    flags_unknown: bool  # Whether an hour may have a seal though its row in the state does not say so.
    keys: KnownRuns | None  # None: there is no index of keys, or its value does not check.
    keys_lost: bool
    keyed: list[KeyedRows]  # Rows above the checkpoint that took their keys.

    def loaded_hours(self, stamp_ms: int) -> range:
        """The hours whose rows are in the wheel; at least the last one, or one behind it when it was stamped ahead."""
        first = hour_of_ms(max(stamp_ms, self.appended_at_ms))
        if hour_of_ms(self.reach_ms) > first:
            first = self.loaded_until + 1
        return range(first, self.loaded_until + 1)

    @property
    def outcome_ends(self) -> dict[int, OutcomeEnd]:
        """The ends of the dispatch logs as they were found, by hour."""
        logs = self.dispatch_logs.items()
        return {
            hour: OutcomeEnd(segment.durable, self.told_rows[hour])
            for hour, segment in logs
            if hour not in self.quarantined
        }


def recover(site: Site, config: DelayConfig) -> Recovered:
    """Take back what was set aside and is whole again, open every log of the directory and rebuild the server's memory.

    Raises:
        DamagedData, NewerFormat: with the path and what to do; nothing is open then.
    """
    with ExitStack() as opened:
        found = _recover(opened, site, config)
        opened.pop_all()
        return found


def _recover(opened: ExitStack, site: Site, config: DelayConfig) -> Recovered:
    disk, state, clock, identity, folder = site.disk, site.state, site.clock, site.identity, site.folder
    kept = read_kept(disk, state, folder, identity.log_id)
    heal_hours(state, kept)
    damaged = take_back_schedules(site, kept)
    replay, hours, targets = Mark(kept.replay_offset, kept.replay_crc32c), kept.hours, kept.targets
    producers = Producers(clock.monotonic_ms)
    producers.load(kept.producers)
    producers.lost |= kept.producers_lost.keys()
    known, quarantined = kept.ends, dict[int, DamagedData]()
    dispatch_logs, decided, target_ends, named = _recover_outcomes(
        site, hours, known, kept.given_up, quarantined, accepted_targets(state)
    )
    for segment in dispatch_logs.values():
        opened.callback(segment.close)
    read = _Replay(producers, targets, kept)
    place = LogPlace(f"{folder}/message", FileKind.MESSAGE, identity.log_id, config.segment_bytes)
    confirmed = partial(decided_behind, disk, folder, identity.log_id)
    message_log = open_needed_log(
        disk, place, clock.now_ms(), replay.offset, replay.crc32c, read.take, confirmed=confirmed
    )
    read.index()
    opened.callback(message_log.close)
    _leave_named_unused(read, named, message_log)
    told_rows = {hour: len(sequences) for hour, sequences in decided.items()}
    if kept.ended is None:
        read.find_ended(message_log)
    found = Recovered(
        identity=identity,
        log=message_log,
        hours=hours,
        producers=producers,
        subjects=read.subjects,
        pending=read.pending,
        wheel=Wheel(),
        targets=targets,
        targets_owed=read.targets_owed,
        dispatch_logs=dispatch_logs,
        decided=decided,
        told_rows=told_rows,
        owed=_owe(read.ended, hours, read.pending, decided),
        target_ends=target_ends,
        replay=replay,
        next_sequence=read.next_sequence,
        appended_at_ms=read.appended_at_ms,
        reach_ms=read.reach_ms,
        skipped=read.skipped,
        dropped=kept.dropped,
        given_up=kept.given_up,
        in_doubt={},
        loaded_until=0,
        quarantined=quarantined,
        quarantined_ends={hour: known[hour] for hour in quarantined if hour in known},
        sealed_ends={hour: end for hour, end in known.items() if hours.get(hour).sealed},
        seals=None,
        damage=[*damaged.values(), *quarantined.values(), *message_log.lost],
        beside=kept.beside,
        unloaded={hour: (damage, 0) for hour, damage in damaged.items()},
        producers_lost=kept.producers_lost,
        targets_lost=_find_targets(message_log, kept.targets_lost, targets, read.targets_owed),
        seals_damage=None,
        filed_below=kept.next_sequence,
        flags_unknown=kept.flags_unknown,
        keys=kept.keys,
        keys_lost=kept.keys_lost,
        keyed=read.keyed,
    )
    try:
        found.seals = open_seal_log(site, hours, whole=kept.flags_unknown)
    except DamagedData as damage:
        found.seals_damage = damage
        found.damage.append(damage)
    _load(site, config, found)
    return found


def _find_targets(
    message_log: Log, lost: dict[bytes, DamagedValue], targets: dict[bytes, int], owed: set[bytes]
) -> dict[bytes, DamagedValue]:
    """Look in the message log, as far as it is kept, for notes whose values in the state do not check; return those
    that are still lost.
    """
    lost = {subject: error for subject, error in lost.items() if subject not in targets}
    if not lost:
        return lost
    try:
        for record in _all_records(message_log):
            if isinstance(record, TargetNote) and record.subject in lost:
                # The last note counts; the next checkpoint stores it again.
                targets[record.subject] = record.log_id
                owed.add(record.subject)
    except DamagedData as error:
        log.warning("notes_not_found reason=%r", str(error))
    return {subject: error for subject, error in lost.items() if subject not in targets}


def _all_records(message_log: Log) -> Iterator[Known]:
    """The control records of the message log, as far as it is kept; DamagedData where it does not check."""
    for group in message_log.scan(message_log.start, message_log.durable):
        yield from _records(group)


def _records(group: CommitGroup) -> list[Known]:
    """The known control records of a group; in a group of messages they stand before these."""
    front = group.batches() if group.header.kind == GroupKind.CONTROL else islice(group.batches(), 1)
    return [record for _, batch in front if batch.kind is BatchKind.CONTROL for record in decode_known(batch)]


def _owe(
    parts: Sequence[EndedRows], hours: HourTable, pending: PendingRows, decided: dict[int, NDArray[np.uint64]]
) -> EndedRows:
    """Those ended rows that have no outcome yet; they are added to ``decided``, so that none of them is loaded (rule
    C2).
    """
    rows = np.concatenate([NO_ENDED, *parts])
    _, firsts = np.unique(rows["sequence"], return_index=True)
    rows = rows.take(firsts)
    rows = rows.take(np.argsort(rows["hour"], kind="stable"))
    hours_of_rows, begins = np.unique(rows["hour"], return_index=True)
    owed: list[EndedRows] = []
    for hour, of_hour in zip(hours_of_rows.tolist(), np.split(rows, begins[1:]), strict=False):
        # Each row of a sealed hour has its outcome. So had each of an hour that is deleted, and so not known.
        if hours.get(hour).sealed or not (hour in hours or pending.has_hour(hour)):
            continue
        told = decided.get(hour, NO_SEQUENCES)
        of_hour = of_hour.compress(~among(of_hour["sequence"].copy(), told))
        if len(of_hour):
            decided[hour] = np.sort(np.concatenate((told, of_hour["sequence"])), kind="stable")
            owed.append(of_hour)
    rows = np.concatenate([NO_ENDED, *owed])
    return rows.take(np.argsort(rows["sequence"], kind="stable"))


class _Replay:
    """Replay of the message log above the checkpoint, group by group (rule P1: replay decides nothing)."""

    def __init__(self, producers: Producers, targets: dict[bytes, int], kept: KeptState) -> None:
        self.subjects = Subjects()
        self.pending = PendingRows()
        self.targets_owed: set[bytes] = set()
        self.next_sequence = kept.next_sequence
        self.appended_at_ms = kept.appended_at_ms
        self.reach_ms = kept.reach_ms
        self.skipped = list(kept.skipped)
        self.ended: list[EndedRows] = [] if kept.ended is None else [kept.ended]
        self.keyed: list[KeyedRows] = []
        self._producers = producers
        self._targets = targets
        self._stored: list[Stored] = []  # Batches whose rows are not indexed yet.
        self._appended_at_ms: list[int] = []  # For each of them, when it was appended.
        self._rows = 0

    def find_ended(self, message_log: Log) -> None:
        """Look in the message log, as far as it is kept, for the rows that decisions have ended."""
        try:
            for record in _all_records(message_log):
                if isinstance(record, Ended):
                    self.ended.append(decode_ended(record.rows))
        except DamagedData as error:
            log.warning("decisions_not_found reason=%r", str(error))

    def index(self) -> None:
        """Make pending rows of the groups that were taken; without this call the last groups are missing."""
        if self._stored:
            self.pending.keep(replayed_rows(self._stored, self.subjects, self._appended_at_ms))
            self._stored, self._appended_at_ms, self._rows = [], [], 0

    def take(self, group: CommitGroup) -> None:
        header = group.header
        self.next_sequence = max(self.next_sequence, header.base_sequence + header.row_count)
        self.appended_at_ms = max(self.appended_at_ms, header.appended_at_ms)
        if header.kind == GroupKind.DATA:
            stored, earlier = stored_batches(group), len(self.ended)
            if len(stored) < header.batch_count:
                self._take_records(group)
            ended = np.concatenate([NO_ENDED, *self.ended[earlier:]])
            for entry in stored:
                decided = b""
                if ColumnId.KEY_END in entry.batch.offsets:
                    self._take_keys(entry, header.appended_at_ms, ended)
                    decided = decided_about(ended, entry.base_sequence, entry.batch.count).tobytes()
                self._producers.accept(entry.batch, entry.base_sequence, header.appended_at_ms, decided)
            self._stored += stored
            self._appended_at_ms += [header.appended_at_ms] * len(stored)
            self._rows += header.row_count
            if self._rows >= REPLAY_ROWS:
                self.index()
        else:
            self._take_records(group)

    def _take_keys(self, entry: Stored, appended_at_ms: int, ended: EndedRows) -> None:
        """Note the rows of a batch that took their keys; ``ended`` are the decisions of its group."""
        rows = sent_rows(entry, appended_at_ms)
        without = np.sort(ended["sequence"].compress(np.isin(ended["reason"], TOOK_NO_KEY)))
        self.keyed.append(rows.kept(~among(rows.sequences, without)))

    def _take_records(self, group: CommitGroup) -> None:
        header, ended, tried = group.header, [NO_ENDED], [NO_TRIED]
        for record in _records(group):
            match record:
                case TargetNote(subject, log_id):
                    self._targets[subject] = log_id
                    self.targets_owed.add(subject)
                case SkippedSequences(count):
                    self.skipped.append((header.base_sequence - count, count))
                case LogTime(from_ms):
                    self.reach_ms = max(self.reach_ms, from_ms)
                    self.appended_at_ms = header.appended_at_ms
                case Ended(rows):
                    ended.append(decode_ended(rows))
                case Tried(rows):
                    tried.append(decode_tried(rows))
        self.ended += ended[1:]
        for each in tried_rows(np.concatenate(ended), np.concatenate(tried)):
            self._producers.tried(*each)


def _load(site: Site, config: DelayConfig, found: Recovered) -> None:
    """Load every hour that is not sealed, up to the one that the loader would have reached by now (rule P5)."""
    now_ms = max(site.clock.stamp_ms(), found.appended_at_ms)
    live = set(range(hour_of_ms(now_ms), hour_of_ms(now_ms + config.load_ahead_ms) + 1))
    # While the log was stamped ahead, rows were filed in hours that lie long after the rows are due.
    found.loaded_until = max(*live, hour_of_ms(found.reach_ms))
    pending = found.pending.count_by_hour().keys()
    filed = set(found.hours.unsealed(found.loaded_until))
    filed |= {hour for hour in found.beside.rows["hour"].tolist() if hour <= found.loaded_until}
    wanted = filed | live | {hour for hour in pending if hour <= found.loaded_until}
    doubted = {hour for hour, word in found.given_up.items() if not word.done}
    # Any row of a quarantined hour may have been handed over, so none is loaded until its dispatch log is restored.
    for hour in sorted((wanted | doubted) - found.quarantined.keys()):
        decided = found.decided.get(hour, NO_SEQUENCES)
        parts = FiledHours(found.hours, found.beside).parts(hour)
        loaded = load_hour(site.disk, site.folder, site.log_id, hour, parts, decided)
        numbers = found.subjects.numbers(loaded.names)
        ordered = order_hour(loaded, numbers, found.pending.views(0), decided)
        if hour in doubted:
            ordered = _without_doubtful(hour, ordered, found)
        if loaded.damage is not None:
            found.damage.append(loaded.damage)
            found.unloaded[hour] = loaded.damage, len(loaded.prepared.rows)
        if hour > found.loaded_until:
            continue  # It was read for the rows in doubt alone.
        found.wheel.add_hour(hour)
        for rows in ordered:
            found.wheel.add_hour(hour, rows)
    found.pending.settle(found.loaded_until, found.quarantined)


def _without_doubtful(hour: int, ordered: list[PreparedRows], found: Recovered) -> list[PreparedRows]:
    """Leave rows out that may have been handed over without anybody knowing; they have ended."""
    kept: list[PreparedRows] = []
    lost: list[Rows] = []
    for rows in (prepared.rows for prepared in ordered):
        chosen = doubtful(rows, found.given_up[hour])
        lost.append(rows.compress(chosen))
        kept.append(prepare(rows.compress(~chosen)))
    found.in_doubt[hour] = np.concatenate(lost)
    ended = found.in_doubt[hour]["sequence"]
    found.decided[hour] = np.sort(np.concatenate((found.decided.get(hour, NO_SEQUENCES), ended)), kind="stable")
    return kept


def _leave_named_unused(read: _Replay, named: int, message_log: Log) -> None:
    """Give no sequence up to ``named``, the highest one that an outcome names (rule I5).

    A message is durable in the message log before it gets an outcome, or takes the place of one that does. So when an
    outcome names a sequence behind the log's end, that end was damaged, and not torn by a crash. If the sequence were
    given again, the outcome would end the new message, which would never be delivered.
    """
    if named >= read.next_sequence:
        log.critical(
            "log_end_lost path=%s next_sequence=%d outcomes_up_to=%d fix=restore_the_file_from_a_copy",
            *(message_log.segments[-1].path, read.next_sequence, named),
        )
        read.next_sequence = named + 1


def _recover_outcomes(
    site: Site,
    hours: HourTable,
    known: dict[int, OutcomeEnd],
    given_up: Mapping[int, GivenUp],
    quarantined: dict[int, DamagedData],
    accepted: Mapping[int, AcceptedTarget],
) -> tuple[dict[int, Segment], dict[int, NDArray[np.uint64]], dict[int, int], int]:
    """Open the dispatch logs of hours that are not sealed; put damaged ones into ``quarantined`` (rule L5). The last
    value is the highest sequence that an outcome names.
    """
    disk, folder = site.disk, site.folder
    segments: dict[int, Segment] = {}
    decided: dict[int, NDArray[np.uint64]] = {}
    target_ends: dict[int, int] = {}
    named = 0
    unfinished = {hour for hour, word in given_up.items() if not word.done}
    found, all_beside = {hour for hour, _ in list_dispatch_logs(disk, folder)}, outcomes_beside(disk, folder)
    for hour in sorted(found | known.keys() | all_beside.keys() | unfinished):
        if hours.get(hour).sealed:
            continue
        opened: tuple[Segment, OutcomeRows] | None
        try:
            if hour in unfinished:
                opened = give_up_outcomes(site, hour)
            else:
                opened = open_dispatch_log(site, hour, known.get(hour, OutcomeEnd()).length)
        except DamagedData as damage:
            quarantined[hour] = damage
            segment, known_outcomes = _open_beside(disk, folder, site.log_id, hour, all_beside.get(hour, ()))
        else:
            if opened is None:
                continue
            segment, known_outcomes = opened[0], [opened[1]]
        if segment is not None:
            segments[hour] = segment
        if known_outcomes:
            # Sorting is enough. numpy's unique would hash a million rows for a second, and a repeated sequence does no
            # harm.
            told = np.concatenate([outcomes.sequences for outcomes in known_outcomes])
            decided[hour] = np.sort(told, kind="stable")
        for outcomes in known_outcomes:
            note_ends(target_ends, outcomes, accepted)
            named = max(named, outcomes.highest_sequence())
    return segments, decided, target_ends, named


def _open_beside(
    disk: Disk, folder: str, log_id: int, hour: int, numbers: Sequence[int]
) -> tuple[Segment | None, list[OutcomeRows]]:
    """Read the files beside a damaged dispatch log, as far as they check; open the newest one if it checks."""
    newest: Segment | None = None
    found: list[OutcomeRows] = []
    for number in numbers:
        if newest is not None:
            newest.close()
            newest = None
        try:
            newest = reopen_dispatch_log(disk, quarantine_path(folder, hour, number), log_id, 0, hour)
            if newest is not None:
                found.append(read_outcomes(newest))
        except DamagedData as damage:
            log.critical("found_damaged reason=%r", str(damage))
            if newest is not None:
                newest.close()
                newest = None
    return newest, found


def ends_of_all(disk: Disk, folder: str, log_id: int, accepted: Mapping[int, AcceptedTarget]) -> dict[int, int]:
    """The highest offset that any dispatch log names, by target; logs that can't be read are left out."""
    found: dict[int, int] = {}
    for _, path in list_dispatch_logs(disk, folder):
        try:
            with closing(open_segment(disk, path, FileKind.DISPATCH, log_id, write=False)) as segment:
                note_ends(found, read_outcomes(segment), accepted)
        except (DamagedData, UnfinishedFile, FileNotFoundError) as error:
            log.warning("ends_not_known path=%s reason=%r", path, str(error))
    return found


def note_ends(ends: dict[int, int], outcomes: OutcomeRows, accepted: Mapping[int, AcceptedTarget]) -> None:
    """Raise the ends of targets to the highest offsets that an hour's outcomes name (rule H7)."""
    # Parts of CANCELLED rows name no target: those that were drained name a delay server.
    handed_over = outcomes.parts[outcomes.parts["outcome"] != Outcome.CANCELLED]
    for target in np.unique(handed_over["target_log_id"]).tolist():
        parts = handed_over[handed_over["target_log_id"] == target]
        offsets = parts["target_offset"][counts(parts, accepted.get(target))]
        ends[target] = max(ends.get(target, 0), int(offsets.max(initial=0)))
