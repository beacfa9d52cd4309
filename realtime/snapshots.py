"""Snapshots: the contents of a checkpoint, fixed at one moment and copied in as many turns of the loop as they need.

begin ──▶ step, step, ... ──▶ (the checkpoint is written) ──▶ stored: memory is freed of what the files have
                                                         └──▶ refused: the next snapshot holds all of it again

Invariant: a group or subject that changes while others are copied is copied as it was at the beginning.
"""

from dataclasses import replace

from delayd.machine.clock import JudgedClock

from .checkpoint import Snapshot, consume_part
from .closed import ClosedSegments
from .group_records import GroupRecords
from .groups import Changes, Group, GroupCopy
from .index import Subject
from .kept import Marks, encode_lives, encode_name, encode_origin
from .recovery import Recovered
from .retention import keep_from

# This many groups are asked for their oldest message in one turn; each costs a read of a consume log.
GROUPS_A_TURN = 100
COPIES_A_TURN = 1_000  # Groups and subjects copied in one turn: some 2 us each, and 0.1 ms for a group with many pulls.


class Snapshots:
    """Makes one snapshot at a time; belongs to the loop."""

    def __init__(
        self, recovered: Recovered, groups: GroupRecords, closed: ClosedSegments, clock: JudgedClock, retention_ms: int
    ) -> None:
        self.copying: Snapshot | None = None  # A snapshot that takes more than one turn of the loop to copy.
        self.forgetting: list[Subject] = []  # Subjects whose runs in memory the consume logs have by now.
        self.retention_wanted = False
        self._recovered = recovered
        self._index, self._origins = recovered.index, recovered.origins
        self._groups = groups
        self._closed = closed
        self._clock = clock
        self._retention_ms = retention_ms
        self._subjects_left: list[Subject] = []
        self._in_memory: dict[Subject, None] = {}  # Subjects with runs in memory that a checkpoint has passed.
        self._named: set[Group] = set()  # Groups whose names this life has written to the state.
        self._lives_kept = False  # Whether a checkpoint has stored where this life began.

    def begin(self, marks: Marks) -> None:
        """Fix the contents of a checkpoint that covers the logs up to ``marks``; `step` copies groups and consume logs
        with their state of this moment.
        """
        origins = [origin for origin in self._origins if origin.dirty]
        for origin in origins:
            origin.dirty = False
        pairs = list(map(encode_origin, origins))
        if not self._lives_kept and self._recovered.pulls is not None:
            self._lives_kept = True
            pairs.append(encode_lives(self._recovered.pulls.lives))
        removes, self._groups.removes = self._groups.removes, []
        evidence = self._clock.restart_evidence()
        retains = self.retention_wanted and self._clock.confirmed
        # Retention needs to know for each group what the transaction will store.
        self._groups.changes.begin(self._groups.roster.groups.values() if retains else ())
        self._subjects_left = self._index.take_fresh()
        stamps = (self._clock.now_ms(), (evidence.boot_id, evidence.boottime_ms, evidence.wall_ms))
        epoch = self._recovered.identity.epoch
        self.copying = Snapshot(marks, epoch, pairs, [], removes, [], *stamps, retains=retains)

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
        kept = min(kept, self._closed.kept_from)
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
