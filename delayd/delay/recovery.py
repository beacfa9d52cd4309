"""Recovery: it reads a directory and builds everything that a delay server holds in memory (rules L1, P4, P5, P7).

The order matters: epoch, dispatch logs, message log, then the hours. Nothing is served before all four are done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import BatchKind, ColumnId
from delayd.batch.labels import dead_letters
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
from delayd.delay.filing.hour_table import OutcomeEnd
from delayd.delay.filing.pending import PendingRows
from delayd.delay.handoff.target_words import AcceptedTarget, accepted_targets, counts
from delayd.delay.kept_state import KeptState, heal_hours, read_kept
from delayd.delay.keys.run import KeyedRows, sent_rows
from delayd.delay.producers import Producers
from delayd.delay.rows import Rows, Stored, replayed_rows, stored_batches
from delayd.delay.subjects import Subjects
from delayd.delay.timers.hour_wheel import PreparedRows, prepare
from delayd.delay.timers.loading import load_hour, order_hour
from delayd.delay.timers.wheel import Wheel
from delayd.errors import DamagedData
from delayd.hours import hour_name, hour_of_ms
from delayd.log.control import Ended, Known, LogTime, SkippedSequences, TargetNote, Tried, decode_known
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.hour import (
    NO_ENDED,
    NO_TRIED,
    EndedRows,
    OutcomeRows,
    decided_about,
    decode_ended,
    decode_tried,
    dispatch_path,
    tried_rows,
)
from delayd.log.log import Log, LogPlace, open_needed_log
from delayd.log.segment import FileKind, Segment, UnfinishedFile, open_segment
from delayd.log.tail import decided_behind
from delayd.machine.clock import Clock
from delayd.machine.disk import Disk
from delayd.machine.identity import Site
from delayd.outcome import TOOK_NO_KEY, Outcome

REPLAY_ROWS = 32_768  # This many rows of the message log are indexed at a time: most groups have some hundred.

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FoundOutcomes:
    """What the dispatch logs of hours that are not sealed say."""

    logs: dict[int, Segment] = field(default_factory=dict)  # Open, by hour.
    # By hour: how many of its rows have an outcome in its dispatch log, and how many of these are DEAD.
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    # By hour: sequences with an outcome, and those that a decision has ended, sorted.
    ended: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    target_ends: dict[int, int] = field(default_factory=dict)  # By target: highest offset that is named (rule H7).
    named: int = 0  # The highest sequence that an outcome names.
    # Hours whose dispatch log is damaged: nobody knows which of their rows were sent.
    quarantined: dict[int, DamagedData] = field(default_factory=dict)

    @property
    def ends(self) -> dict[int, OutcomeEnd]:
        """The ends of the dispatch logs that are whole, by hour."""
        return {
            hour: OutcomeEnd(segment.durable, *self.rows[hour])
            for hour, segment in self.logs.items()
            if hour not in self.quarantined
        }


@dataclass(slots=True)
class Recovered:
    """Everything that a start finds in its directory: what the state kept, what the logs said, and what is loaded."""

    kept: KeptState
    log: Log
    replayed: Replay
    outcomes: FoundOutcomes
    owed: EndedRows  # Rows that a decision has ended and that have no outcome yet, by rising sequence.
    wheel: Wheel
    seals: SealLog | None  # None: the seal log is damaged, and no hour is sealed until it is restored.
    seals_damage: DamagedData | None
    damage: list[DamagedData]
    # Hours whose schedule log is damaged or waits for its operator: why, and how many rows are not read.
    unloaded: dict[int, tuple[DamagedData, int]]
    replaced: bool  # Whether logs that the checkpoint file counts have others in their places.
    # By hour: rows of given up dispatch logs that may have been handed over without anybody knowing.
    in_doubt: dict[int, Rows] = field(default_factory=dict)
    loaded_until: int = 0  # The last loaded hour.

    def loaded_hours(self, stamp_ms: int) -> range:
        """The hours whose rows are in the wheel; at least the last one, or one behind it when it was stamped ahead."""
        first = hour_of_ms(max(stamp_ms, self.replayed.appended_at_ms))
        if hour_of_ms(self.replayed.reach_ms) > first:
            first = self.loaded_until + 1
        return range(first, self.loaded_until + 1)

    @property
    def quarantined_ends(self) -> dict[int, OutcomeEnd]:
        """The ends of damaged dispatch logs that the last checkpoint counts: the next one goes on to name what was
        durable there.
        """
        return {hour: end for hour, end in self.kept.ends.items() if hour in self.outcomes.quarantined}

    @property
    def ends_apart(self) -> dict[int, OutcomeEnd]:
        """What figures count of dispatch logs that are not open. A damaged log does not tell which rows it has, and the
        files beside it may have some of them again: only what these have counts as ended.
        """
        found = self.sealed_ends
        for hour, end in self.quarantined_ends.items():
            found[hour] = OutcomeEnd(0, 0, end.dead)
        for hour in self.outcomes.quarantined.keys() & self.outcomes.rows.keys():
            rows, dead = self.outcomes.rows[hour]
            found[hour] = OutcomeEnd(0, rows, dead + found.get(hour, OutcomeEnd()).dead)
        return found

    @property
    def sealed_ends(self) -> dict[int, OutcomeEnd]:
        """The ends of sealed hours' logs as a checkpoint counted them: these logs were not opened."""
        return {hour: end for hour, end in self.kept.ends.items() if self.kept.hours.get(hour).sealed}


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
    kept = read_kept(site.disk, site.state, site.folder, site.log_id)
    heal_hours(site.state, kept)
    aside = {*kept.beside.rows["hour"].tolist(), *kept.salvage}
    unloaded = take_back_schedules(site, kept)
    replaced = len(unloaded) < len(aside) or not all(word.done for word in kept.given_up.values())
    outcomes = _recover_outcomes(site, kept, accepted_targets(site.state))
    _count_dead(site, kept)
    for segment in outcomes.logs.values():
        opened.callback(segment.close)
    replayed = Replay(kept, site.clock)
    message_log = _replay(site, config, replayed)
    opened.callback(message_log.close)
    _leave_named_unused(replayed, outcomes.named, message_log)
    if kept.ended is None:
        replayed.find_ended(message_log)
    _find_targets(message_log, replayed)
    owed = _owe(replayed, outcomes.ended)
    damage = [*unloaded.values(), *outcomes.quarantined.values(), *message_log.lost]
    seals: SealLog | None = None
    seals_damage: DamagedData | None = None
    try:
        seals = open_seal_log(site, kept.hours, whole=kept.flags_unknown)
    except DamagedData as error:
        seals_damage = error
        damage.append(error)
    waiting = {hour: (error, kept.hours.get(hour).rows) for hour, error in unloaded.items()}
    broken = seals, seals_damage, damage, waiting
    found = Recovered(kept, message_log, replayed, outcomes, owed, Wheel(), *broken, replaced)
    _load(site, config, found)
    return found


def _replay(site: Site, config: DelayConfig, replayed: Replay) -> Log:
    """Open the message log, and take in what it has above the checkpoint."""
    place = LogPlace(f"{site.folder}/message", FileKind.MESSAGE, site.log_id, config.segment_bytes)
    confirmed = partial(decided_behind, site.disk, site.folder, site.log_id)
    begin = replayed.kept.replay
    message_log = open_needed_log(
        site.disk, place, site.clock.now_ms(), begin.offset, begin.crc32c, replayed.take, confirmed=confirmed
    )
    replayed.index()
    return message_log


def _find_targets(message_log: Log, replayed: Replay) -> None:
    """Look in the message log, as far as it is kept, for notes whose values in the state do not check."""
    kept = replayed.kept
    lost = kept.targets_lost = {
        subject: error for subject, error in kept.targets_lost.items() if subject not in kept.targets
    }
    if not lost:
        return
    try:
        for record in _all_records(message_log):
            if isinstance(record, TargetNote) and record.subject in lost:
                # The last note counts; the next checkpoint stores it again.
                kept.targets[record.subject] = record.log_id
                replayed.targets_owed.add(record.subject)
    except DamagedData as error:
        log.warning("notes_not_found reason=%r", str(error))
    kept.targets_lost = {subject: error for subject, error in lost.items() if subject not in kept.targets}


def _all_records(message_log: Log) -> Iterator[Known]:
    """The control records of the message log, as far as it is kept; DamagedData where it does not check."""
    for group in message_log.scan(message_log.start, message_log.durable):
        yield from _records(group)


def _records(group: CommitGroup) -> list[Known]:
    """The known control records of a group; in a group of messages they stand before these."""
    front = group.batches() if group.header.kind == GroupKind.CONTROL else islice(group.batches(), 1)
    return [record for _, batch in front if batch.kind is BatchKind.CONTROL for record in decode_known(batch)]


def _owe(replayed: Replay, ended: dict[int, NDArray[np.uint64]]) -> EndedRows:
    """The rows that decisions have ended and that have no outcome yet; they are added to ``ended``, so that none of
    them is loaded (rule C2).
    """
    hours = replayed.kept.hours
    rows = np.concatenate([NO_ENDED, *replayed.ended])
    _, firsts = np.unique(rows["sequence"], return_index=True)
    rows = rows.take(firsts)
    rows = rows.take(np.argsort(rows["hour"], kind="stable"))
    hours_of_rows, begins = np.unique(rows["hour"], return_index=True)
    owed: list[EndedRows] = []
    for hour, of_hour in zip(hours_of_rows.tolist(), np.split(rows, begins[1:]), strict=False):
        # Each row of a sealed hour has its outcome. So had each of an hour that is deleted, and so not known.
        if hours.get(hour).sealed or not (hour in hours or replayed.pending.has_hour(hour)):
            continue
        told = ended.get(hour, NO_SEQUENCES)
        of_hour = of_hour.compress(~among(of_hour["sequence"].copy(), told))
        if len(of_hour):
            ended[hour] = np.sort(np.concatenate((told, of_hour["sequence"])), kind="stable")
            owed.append(of_hour)
    rows = np.concatenate([NO_ENDED, *owed])
    return rows.take(np.argsort(rows["sequence"], kind="stable"))


class Replay:
    """Replay of the message log above the checkpoint, group by group (rule P1: replay decides nothing).

    An example: the checkpoint says that the next sequence is 7. Behind it stand a group with the messages 7, 8 and 9;
    a control record, which says that the target of their subject is T; and a group with message 10, and with the
    record that a cancel has ended 8. Then 7 to 10 are pending, the next sequence is 11, the next checkpoint owes T to
    the state, and 8 is ended: it is owed its outcome, and is not loaded.
    """

    def __init__(self, kept: KeptState, clock: Clock) -> None:
        self.kept = kept
        self.producers = Producers(clock.monotonic_ms)
        self.producers.load(kept.producers)
        self.producers.lost |= kept.producers_lost.keys()
        self.subjects = Subjects()
        self.pending = PendingRows()
        # Subjects whose target only the message log names: the next checkpoint must store it.
        self.targets_owed: set[bytes] = set()
        self.next_sequence = kept.next_sequence
        self.appended_at_ms = kept.appended_at_ms
        # The latest appended_at of any group, even if an operator's decision has set the log's time back since.
        self.reach_ms = kept.reach_ms
        self.skipped = list(kept.skipped)  # Sequences that an operator's decision left unused.
        self.ended: list[EndedRows] = [] if kept.ended is None else [kept.ended]
        self.keyed: list[KeyedRows] = []  # Rows above the checkpoint that took their keys.
        self.has_letters = False  # Whether some of the rows are dead letters.
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
        """Take in a group; `index` completes what it does."""
        header = group.header
        self.next_sequence = max(self.next_sequence, header.base_sequence + header.row_count)
        self.appended_at_ms = max(self.appended_at_ms, header.appended_at_ms)
        if header.kind == GroupKind.DATA:
            stored, earlier = stored_batches(group), len(self.ended)
            if len(stored) < header.batch_count:
                self._take_records(group)
            ended = np.concatenate([NO_ENDED, *self.ended[earlier:]])
            for entry in stored:
                self.has_letters = self.has_letters or len(dead_letters(entry.batch)) > 0
                decided = b""
                if ColumnId.KEY_END in entry.batch.offsets:
                    self._take_keys(entry, header.appended_at_ms, ended)
                    decided = decided_about(ended, entry.base_sequence, entry.batch.count).tobytes()
                self.producers.accept(entry.batch, entry.base_sequence, header.appended_at_ms, decided)
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
                    self.kept.targets[subject] = log_id
                    self.targets_owed.add(subject)
                case SkippedSequences(count):
                    self.skipped.append((header.base_sequence - count, count))
                case LogTime(from_ms):
                    self.reach_ms = max(self.reach_ms, from_ms, self.appended_at_ms)
                    self.appended_at_ms = header.appended_at_ms
                case Ended(rows):
                    ended.append(decode_ended(rows))
                case Tried(rows):
                    tried.append(decode_tried(rows))
        self.ended += ended[1:]
        for each in tried_rows(np.concatenate(ended), np.concatenate(tried)):
            self.producers.tried(*each)


def _load(site: Site, config: DelayConfig, found: Recovered) -> None:
    """Load every hour that is not sealed, up to the one that the loader would have reached by now (rule P5)."""
    kept, replayed, outcomes = found.kept, found.replayed, found.outcomes
    now_ms = max(site.clock.stamp_ms(), replayed.appended_at_ms)
    live = set(range(hour_of_ms(now_ms), hour_of_ms(now_ms + config.load_ahead_ms) + 1))
    # While the log was stamped ahead, rows were filed in hours that lie long after the rows are due.
    until = found.loaded_until = max(*live, hour_of_ms(replayed.reach_ms))
    filed = set(kept.hours.unsealed(until))
    filed |= {hour for hour in kept.beside.rows["hour"].tolist() if hour <= until}
    unfiled = replayed.pending.count_by_hour()
    wanted = filed | live | {hour for hour in unfiled if hour <= until}
    doubted = {hour for hour, word in kept.given_up.items() if not word.done}
    lacking = {hour for hour in kept.dropped if not kept.hours.get(hour).sealed}
    # Any row of a quarantined hour may have been handed over, so none is loaded until its dispatch log is restored.
    for hour in sorted((wanted | doubted | lacking) - outcomes.quarantined.keys()):
        ended = outcomes.ended.get(hour, NO_SEQUENCES)
        # What became of a row that was handed over before it was filed, nobody knows once its log is given up.
        parts, whole = kept.files.parts(hour), hour in doubted
        loaded = load_hour(site.disk, site.folder, site.log_id, hour, parts, ended, whole=whole)
        numbers = replayed.subjects.numbers(loaded.names)
        ordered = order_hour(loaded, numbers, replayed.pending.views(0), ended)
        if hour in doubted:
            ordered = _without_doubtful(hour, ordered, found)
        if loaded.damage is not None:
            found.damage.append(loaded.damage)
            found.unloaded[hour] = loaded.damage, loaded.unread
        elif hour in outcomes.rows:
            rows_of_hour = sum([part.counted.rows for part in parts]) + unfiled.get(hour, 0)
            _count_outcomes(hour, rows_of_hour - sum([len(each.rows) for each in ordered]), found)
        if hour > until:
            continue  # It was read for the rows in doubt or in the count alone.
        found.wheel.add_hour(hour)
        for rows in ordered:
            found.wheel.add_hour(hour, rows)
    replayed.pending.drop_loaded(until, outcomes.quarantined)


def _count_outcomes(hour: int, ended: int, found: Recovered) -> None:
    """Count the outcomes of an hour of which so many rows were not loaded: its dispatch log may have outcomes of rows
    that are lost, and count as pending no more than these rows do.
    """
    without = int(np.count_nonzero(found.owed["hour"] == np.uint32(hour))) + len(found.in_doubt.get(hour, ()))
    found.outcomes.rows[hour] = ended - without, found.outcomes.rows[hour][1]


def _without_doubtful(hour: int, ordered: list[PreparedRows], found: Recovered) -> list[PreparedRows]:
    """Leave rows out that may have been handed over without anybody knowing; they have ended."""
    left: list[PreparedRows] = []
    lost: list[Rows] = []
    for rows in (prepared.rows for prepared in ordered):
        chosen = doubtful(rows, found.kept.given_up[hour])
        lost.append(rows.compress(chosen))
        left.append(prepare(rows.compress(~chosen)))
    found.in_doubt[hour] = np.concatenate(lost)
    ended = (found.outcomes.ended.get(hour, NO_SEQUENCES), found.in_doubt[hour]["sequence"])
    found.outcomes.ended[hour] = np.sort(np.concatenate(ended), kind="stable")
    return left


def _leave_named_unused(read: Replay, named: int, message_log: Log) -> None:
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


def _recover_outcomes(site: Site, kept: KeptState, accepted: Mapping[int, AcceptedTarget]) -> FoundOutcomes:
    """Open the dispatch logs of hours that are not sealed; damaged ones are quarantined (rule L5)."""
    found = FoundOutcomes()
    unfinished = {hour for hour, word in kept.given_up.items() if not word.done}
    files = {hour for hour, _ in list_dispatch_logs(site.disk, site.folder)}
    beside = outcomes_beside(site.disk, site.folder)
    for hour in sorted(files | kept.ends.keys() | beside.keys() | unfinished):
        if kept.hours.get(hour).sealed:
            continue
        try:
            if hour in unfinished:
                opened: tuple[Segment, OutcomeRows] | None = give_up_outcomes(site, hour)
            else:
                opened = open_dispatch_log(site, hour, kept.ends.get(hour, OutcomeEnd()).length)
        except DamagedData as damage:
            found.quarantined[hour] = damage
            segment, parts = _open_beside(site, hour, beside.get(hour, ()))
        else:
            if opened is None:
                continue
            segment, parts = opened[0], [opened[1]]
        if segment is not None:
            found.logs[hour] = segment
        if parts:
            # Sorting is enough. numpy's unique would hash a million rows for a second, and a repeated sequence does no
            # harm.
            told = np.concatenate([outcomes.sequences for outcomes in parts])
            found.ended[hour] = np.sort(told, kind="stable")
            found.rows[hour] = len(told), sum([outcomes.count_of(Outcome.DEAD) for outcomes in parts])
        for outcomes in parts:
            note_ends(found.target_ends, outcomes, accepted)
            found.named = max(found.named, outcomes.highest_sequence())
    return found


def _count_dead(site: Site, kept: KeptState) -> None:
    """Count what is DEAD in sealed hours anew where the state has lost it; other sealed logs are not opened."""
    for hour in kept.hours.sealed():
        end = kept.ends.get(hour, OutcomeEnd())
        if end.dead or not kept.hours.get(hour).dead:
            continue
        path = dispatch_path(site.folder, hour)
        try:
            with closing(open_segment(site.disk, path, FileKind.DISPATCH, site.log_id, write=False)) as segment:
                kept.ends[hour] = end._replace(dead=read_outcomes(segment).count_of(Outcome.DEAD))
        except (DamagedData, UnfinishedFile, FileNotFoundError) as error:
            log.warning("hour_not_counted hour=%s reason=%r", hour_name(hour), str(error))


def _open_beside(site: Site, hour: int, numbers: Sequence[int]) -> tuple[Segment | None, list[OutcomeRows]]:
    """Read the files beside a damaged dispatch log, as far as they check; open the newest one if it checks."""
    newest: Segment | None = None
    found: list[OutcomeRows] = []
    for number in numbers:
        if newest is not None:
            newest.close()
            newest = None
        try:
            newest = reopen_dispatch_log(site.disk, quarantine_path(site.folder, hour, number), site.log_id, 0, hour)
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
