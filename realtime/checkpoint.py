"""Checkpoints: consume logs, then one LMDB transaction, then the published file (docs/formats/checkpoint.md).

The contents of a checkpoint are fixed at one moment on the loop. All writing is done beside the loop and holds up no
commit.

1. On the loop: the offset of the message log up to which batches are indexed is noted, say 8,000. Groups are copied in
   pieces as they were at this moment (`changes`), subjects with the entries that their consume logs lack.
2. The pull log is fsynced up to these copies, so that the state never says more than the pull log.
3. Beside the loop: the entries are written to the consume logs of their subjects, and synced.
4. One LMDB transaction stores the offset 8,000, the groups, the subjects and the delay servers.
5. The checkpoint file is published for readers in other processes.

Invariant: a group or subject that changes while others are copied is copied as it was at the beginning; what a
checkpoint that was put off had to hold is in the next one.

A crash before step 4 leaves entries that nothing counts: the next start replays from the last counted offset. A crash
after step 4 replays from 8,000.
"""

import bisect
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from delayd.errors import DamagedData, DataError, DelaydError, DiskFull, NotWritable, ServerStopped, Shortage
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import CheckpointFile, Payload
from delayd.log.consume import ConsumePlace, ConsumeTail, append_entries, entries_of
from delayd.machine.clock import ClockEvidence, JudgedClock
from delayd.machine.disk import Disk, File
from delayd.machine.executor import Abandoned, Done
from delayd.machine.identity import Site
from delayd.machine.open_files import unsynced_files_max

from .group_records import GroupRecords
from .groups import Changes, Group, GroupCopy
from .kept import (
    Marks,
    Pair,
    copied,
    encode_group_copy,
    encode_lives,
    encode_marks,
    encode_name,
    encode_offers,
    encode_origin,
    encode_subject,
)
from .recovery import Recovered
from .removal import keep_from
from .subject_index import Index, Subject

PAIRS_A_PIECE = 1_000  # Encoded between two calls of `give_way`, in some 2 ms.
SYNC_FILES_MIN = 64  # From this many consume logs on, one syncfs costs less than a sync of each.
# A checkpoint that was put off is tried again after this long at most: a full disk gets free when files are removed.
RETRY_MS_MAX = 5_000

# This many groups are asked for their oldest message in one turn; each costs a read of a consume log.
GROUPS_A_TURN = 100
COPIES_A_TURN = 1_000  # Groups and subjects copied in one turn: some 2 us each, and 0.1 ms for a group with many pulls.

log = logging.getLogger(__name__)


class ConsumePart(NamedTuple):
    """Messages of one subject whose entries are to be written: batch offsets, and the first consume sequence of each
    batch.
    """

    subject: Subject
    place: ConsumePlace
    tail: ConsumeTail
    end: int  # The consume sequence behind these messages.
    lost: bool  # Whether the log must be rebuilt, so that nothing can be written to it now.
    offsets: "array[int]"
    firsts: "array[int]"  # The first consume sequence of each batch, then the end.


@dataclass(slots=True)
class Snapshot:
    """The contents of one checkpoint."""

    marks: Marks
    epoch: int
    pairs: list[Pair]
    groups: list[GroupCopy]
    removes: list[bytes]
    parts: list[ConsumePart]
    now_ms: int
    evidence: ClockEvidence
    retains: bool = False  # Whether retention was asked for.
    # Retention may remove the message log below this offset, once this checkpoint is published.
    keep_from: int | None = None
    # Groups that were not asked yet which messages they need; None: none was asked.
    groups_left: list[GroupCopy] | None = None
    oldest_ms: int = 0  # Messages that were appended before this are old enough to be removed.
    begins: int = 0  # Where the message log may begin, by this checkpoint and those before it.
    tails: list[ConsumeTail] = field(default_factory=list)
    damaged: list[tuple[Subject, DamagedData]] = field(default_factory=list)  # Consume logs that took no entries.
    counted: bool = False  # Whether the state holds this checkpoint; it may not have been published.
    unpublished: DataError | None = None  # Why the checkpoint file could not be written.


class Checkpointer:
    """Takes one checkpoint at a time; belongs to the loop."""

    def __init__(self, site: Site, index: Index, marks: Marks, every_ms: int, every_bytes: int) -> None:
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.last = marks
        self.published = 0
        self._site = site
        self._index = index
        self._file = CheckpointFile(site.disk, site.folder, site.log_id)
        self._clock = site.clock
        self._every_ms = every_ms
        self._every_bytes = every_bytes
        self._due_ms = site.clock.monotonic_ms() + every_ms
        self._not_before_ms = 0
        self.under_way = False

    @property
    def due_ms(self) -> int:
        """When to check whether one is due, monotonic; while one is under way, a whole interval from now."""
        return self._clock.monotonic_ms() + self._every_ms if self.under_way else self._due_ms

    def is_due(self, end: int) -> bool:
        """Whether a checkpoint is due, by time or by new bytes; ``end`` is the end of the message log."""
        now_ms = self._clock.monotonic_ms()
        if self.under_way or now_ms < self._not_before_ms:
            return False
        return now_ms >= self._due_ms or end - self.last.indexed_offset >= self._every_bytes

    def take(self, snapshot: Snapshot, done: Callable[[Snapshot, DelaydError | None], None]) -> None:
        """Write and publish; the pull log up to the snapshot must be durable. ``done`` is called on the loop."""
        work = partial(write, self._site, self._file, snapshot)
        self._site.worker.submit(work, partial(self._finished, snapshot, done))

    def begin(self) -> None:
        """Note that one is under way."""
        self.under_way = True
        self._due_ms = self._clock.monotonic_ms() + self._every_ms

    def close(self) -> None:
        """Close the published file."""
        self._file.close()

    def _finished(
        self, snapshot: Snapshot, done: Callable[[Snapshot, DelaydError | None], None], outcome: Done[None]
    ) -> None:
        self.under_way = False
        try:
            outcome.result()
        except (DiskFull, Shortage) as error:
            self._put_off(error)
            done(snapshot, error)
            return
        except (ServerStopped, DamagedData) as error:
            self.on_failure(error)
            return
        except (OSError, DataError) as error:
            self.on_failure(ServerStopped(f"a checkpoint can't be written ({error}); check the disk, then restart"))
            return
        # The state counts these entries even if the checkpoint file could not be written. If they were treated as not
        # counted they would be cut off, and a crash after that would leave a hole.
        self._keep_tails(snapshot)
        if snapshot.unpublished is not None:
            self._put_off(snapshot.unpublished)
            done(snapshot, snapshot.unpublished)
            return
        self.last = snapshot.marks
        self.published += 1
        done(snapshot, None)

    def _put_off(self, error: DelaydError) -> None:
        """Keep the last checkpoint; the logs hold everything newer."""
        # The bytes that asked for this checkpoint are still there and would ask for the next one at once.
        self._due_ms = self._not_before_ms = self._clock.monotonic_ms() + min(self._every_ms, RETRY_MS_MAX)
        level = logging.CRITICAL if isinstance(error, DamagedData) else logging.WARNING
        log.log(level, "checkpoint_put_off reason=%r", error.message)

    def _keep_tails(self, snapshot: Snapshot) -> None:
        for part, tail in zip(snapshot.parts, snapshot.tails, strict=True):
            subject = part.subject
            if tail.valid and subject.damage is None and subject.tail is part.tail:
                subject.tail = tail
            else:
                # The log must be rebuilt, or was rebuilt since the snapshot up to an older offset. The rebuilt files
                # don't have these entries, so the runs stay in memory.
                self._index.changed(subject)
        for subject, damage in snapshot.damaged:
            self._index.damaged(subject, damage)


def consume_part(index: Index, subject: Subject, stop: int) -> ConsumePart:
    """Copy the entries that a subject's consume log lacks for messages below an offset; the log may have later ones
    already.
    """
    begin = bisect.bisect_left(subject.firsts, subject.tail.end)
    until = max(begin, bisect.bisect_left(subject.offsets, stop))
    end = subject.firsts[until] if until < len(subject.firsts) else subject.end
    firsts = subject.firsts[begin:until]
    firsts.append(end)
    lost = subject.damage is not None
    return ConsumePart(subject, index.place(subject), subject.tail, end, lost, subject.offsets[begin:until], firsts)


def write(site: Site, file: CheckpointFile, snapshot: Snapshot) -> None:
    """Make a snapshot durable, in the order that recovery relies on; runs beside the loop."""
    give_way = site.worker.give_way
    _write_parts(site.disk, snapshot, give_way)
    pairs: list[Pair] = []
    for part, tail in zip(snapshot.parts, snapshot.tails, strict=True):
        pairs.append(encode_subject(part.subject, tail))
        if not len(pairs) % PAIRS_A_PIECE:
            give_way()
    for group in snapshot.groups:
        pairs.append(encode_group_copy(group))
        if not len(pairs) % PAIRS_A_PIECE:
            give_way()
    marks_pair = encode_marks(snapshot.marks, snapshot.epoch)
    give_way()
    site.state.commit(copied([*pairs, *snapshot.pairs, marks_pair]), snapshot.removes)
    snapshot.counted = True
    marks = snapshot.marks
    published: Payload = {
        "indexed_offset": marks.indexed_offset,
        "pull_offset": marks.pull_offset,
        "next_sequence": marks.next_sequence,
        "keep_from": snapshot.begins,
        "epoch": snapshot.epoch,
        "clock": [snapshot.evidence.boot_id, snapshot.evidence.boottime_ms, snapshot.evidence.wall_ms],
        "gaps": [list(gap) for gap in snapshot.evidence.gaps],
    }
    try:
        file.publish(published, snapshot.now_ms)
    except DataError as error:
        snapshot.unpublished = error
    except OSError as error:
        snapshot.unpublished = NotWritable(CHECKPOINT, str(error))


def _write_parts(disk: Disk, snapshot: Snapshot, give_way: Callable[[], None]) -> None:
    """Write and sync the entries of all subjects."""
    unsynced: list[File] = []
    files_max = unsynced_files_max()  # Held open until they are synced (rule L4).
    try:
        for part in snapshot.parts:
            snapshot.tails.append(_write_part(disk, part, snapshot, unsynced))
            if len(unsynced) >= files_max:
                _sync(disk, part.place.folder, unsynced)
            give_way()
        if unsynced:
            _sync(disk, snapshot.parts[-1].place.folder, unsynced)
    except Abandoned:
        # Nothing counts these entries, and this process syncs nothing more.
        while unsynced:
            unsynced.pop().close()
        raise


def _write_part(disk: Disk, part: ConsumePart, snapshot: Snapshot, unsynced: list[File]) -> ConsumeTail:
    """Write the entries of one subject; a log that can't take them is counted as lost, and all else goes on."""
    if part.lost:
        return ConsumeTail.lost(part.end)
    try:
        entries = entries_of(
            np.array(part.offsets, np.uint64), np.diff(np.array(part.firsts, np.int64)).astype(np.int64)
        )
        return append_entries(disk, part.place, part.tail, entries, snapshot.now_ms, unsynced)
    except DamagedData as error:
        snapshot.damaged.append((part.subject, error))
    except (NotWritable, PermissionError) as error:
        snapshot.damaged.append((part.subject, DamagedData(part.place.folder, 0, str(error))))
    return ConsumeTail.lost(part.end)


def _sync(disk: Disk, path: str, unsynced: list[File]) -> None:
    if len(unsynced) >= SYNC_FILES_MIN and disk.reports_sync_errors:
        disk.sync_filesystem(path)
    else:
        for file in unsynced:
            file.sync()
    while unsynced:
        unsynced.pop().close()


class Snapshots:
    """Makes one snapshot at a time; belongs to the loop."""

    def __init__(self, recovered: Recovered, groups: GroupRecords, clock: JudgedClock, retention_ms: int) -> None:
        self.copying: Snapshot | None = None  # A snapshot that takes more than one turn of the loop to copy.
        self.forgetting: list[Subject] = []  # Subjects whose runs in memory the consume logs have by now.
        self.retention_wanted = False
        self._recovered = recovered
        self._index, self._origins = recovered.index, recovered.origins
        self._groups = groups
        self._clock = clock
        self._retention_ms = retention_ms
        self._subjects_left: list[Subject] = []
        self._in_memory: dict[Subject, None] = {}  # Subjects with runs in memory that a checkpoint has passed.
        self._named: set[Group] = set()  # Groups whose names this life has written to the state.
        self._lives_kept = False  # Whether a checkpoint has stored where this life began.

    def begin(self, marks: Marks, *, ends: bool) -> None:
        """Fix the contents of a checkpoint that covers the logs up to ``marks``; `step` copies groups and consume logs
        with their state of this moment. ``ends``: nothing is offered any more.
        """
        origins = [origin for origin in self._origins if origin.dirty]
        for origin in origins:
            origin.dirty = False
        pairs = [*map(encode_origin, origins), encode_offers(self._recovered.lost_offers.kept(ends=ends))]
        if not self._lives_kept and self._recovered.pulls is not None:
            self._lives_kept = True
            pairs.append(encode_lives(self._recovered.pulls.lives))
        removes, self._groups.removes = self._groups.removes, []
        evidence = self._clock.restart_evidence()
        retains = self.retention_wanted and self._clock.confirmed
        # Retention needs to know for each group what the transaction will store.
        self._groups.changes.begin(self._groups.roster.groups.values() if retains else ())
        self._subjects_left = self._index.take_fresh()
        epoch, now_ms = self._recovered.identity.epoch, self._clock.now_ms()
        self.copying = Snapshot(marks, epoch, pairs, [], removes, [], now_ms, evidence, retains=retains)

    def step(self) -> Snapshot | None:
        """Copy as much as one turn of the loop may; return the snapshot when that was all."""
        snapshot = self.copying
        assert snapshot is not None, "one was begun"
        changes = self._groups.changes
        left = COPIES_A_TURN - changes.copy_some(COPIES_A_TURN)
        if left <= 0:
            return None
        part, self._subjects_left = self._subjects_left[-left:], self._subjects_left[:-left]
        snapshot.parts += [consume_part(self._index, subject, snapshot.marks.indexed_offset) for subject in part]
        if self._subjects_left:
            return None
        if snapshot.retains and not self._keep_for(snapshot, changes):
            return None
        snapshot.groups = changes.copies
        unnamed = [copied.group for copied in changes.copies if copied.group not in self._named]
        snapshot.pairs += map(encode_name, unnamed)
        self._named.update(unnamed)
        snapshot.begins = max(self._recovered.message_log.start, self._index.leaving_below)
        self.copying = None
        return snapshot

    def stored(self, snapshot: Snapshot) -> None:
        """Begin to forget the runs that the consume logs have, because the checkpoint is published."""
        self._in_memory.update((part.subject, None) for part in snapshot.parts)
        self.forgetting = list(self._in_memory)
        self.forget_some()

    def refused(self, snapshot: Snapshot) -> None:
        """Let the next snapshot hold everything of this one again, because the checkpoint was put off."""
        self._groups.changes.again(snapshot.groups)
        self._lives_kept = False
        self._named.difference_update([copied.group for copied in snapshot.groups])
        for origin in self._origins:
            origin.dirty = True
        for part in snapshot.parts:
            self._index.changed(part.subject)
        self._groups.removes += snapshot.removes
        self._index.leaving_below = 0

    def forget_some(self) -> None:
        """Forget runs that the consume logs have, for as many subjects as one turn of the loop may."""
        part, self.forgetting = self.forgetting[-COPIES_A_TURN:], self.forgetting[:-COPIES_A_TURN]
        memory_start = self._recovered.stored.memory_start
        for subject in part:
            subject.forget_below(memory_start)
            if not subject.firsts:
                del self._in_memory[subject]

    def _keep_for(self, snapshot: Snapshot, changes: Changes) -> bool:
        """Find out which messages retention must keep, for as many groups as one turn of the loop may; return whether
        that was all.
        """
        message_log = self._recovered.message_log
        if snapshot.groups_left is None:
            snapshot.groups_left = list(changes.copies)
            snapshot.oldest_ms = self._clock.now_ms() - self._retention_ms
        part: list[Group | GroupCopy] = [*snapshot.groups_left[-GROUPS_A_TURN:]]
        del snapshot.groups_left[-GROUPS_A_TURN:]
        if not snapshot.groups_left:
            # Groups created since this began are included; groups created later begin at a message that is kept.
            part += changes.created
        kept = keep_from(message_log, snapshot.oldest_ms, snapshot.marks, part, self._index)
        snapshot.keep_from = kept if snapshot.keep_from is None else min(kept, snapshot.keep_from)
        if snapshot.groups_left:
            return False
        self.retention_wanted = False
        if self._groups.roster.all_lost or not self._groups.roster.known:
            # Nobody knows which messages these groups have not acknowledged, so nothing is removed (rule Q3).
            snapshot.keep_from = message_log.start
        self._index.leaving_below = snapshot.keep_from
        snapshot.marks = replace(snapshot.marks, kept_from=max(snapshot.marks.kept_from, snapshot.keep_from))
        return True
