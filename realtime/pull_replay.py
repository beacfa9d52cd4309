"""Pull replay: it rebuilds the groups' progress, from the checkpoint's values and then from the pull log above them,
entry by entry.

Invariant: entries are applied in the order of the log, so a replay ends in the state of the life that wrote them
(docs/formats/pull.md). A replay that met damage is thrown away.
"""

from __future__ import annotations

from delayd.errors import BatchMalformed, DamagedData, RetryLater
from delayd.log.control import (
    GroupBegins,
    GroupBounded,
    GroupCreated,
    GroupDeleted,
    GroupEphemeral,
    GroupFiltered,
    GroupHeldBack,
    GroupMoved,
    GroupOrdered,
    Known,
    RetryAccepted,
    RetryDecided,
    decode_known,
)
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.pull import Decision, PullOp, decode_entries, decode_rows

from .filters import decode_filter
from .groups import Group
from .index import Index
from .kept import Kept, Life, LostGroup, Marks, group_keys


class PullReplay:
    """The groups of a server on their way from its checkpoint to the end of its pull log."""

    def __init__(self, kept: Kept, index: Index, marks: Marks, folder: str) -> None:
        self.groups, lost = kept.groups(index)
        self.lost = {each.group_id: each for each in lost}  # Groups whose progress does not check, or is gone.
        self.lives = kept.lives()  # In order; the last one is the newest.
        self.next_pull = marks.next_pull
        self.appended_at_ms = 0
        self.removes: list[bytes] = []  # Keys of deleted groups; the next checkpoint removes them.
        self._index = index
        self._kept = kept
        self._folder = folder

    def take(self, group: CommitGroup) -> None:
        """Apply one group of the pull log.

        Raises:
            DamagedData: it says what no server writes.
        """
        try:
            self._take(group)
        except BatchMalformed as error:
            raise DamagedData(self._folder, group.header.offset, str(error)) from error

    def _take(self, group: CommitGroup) -> None:
        header = group.header
        self.appended_at_ms = max(self.appended_at_ms, header.appended_at_ms)
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

    def _hear(self, record: Known) -> None:
        if isinstance(record, GroupCreated):
            self._create(record)
        elif isinstance(record, GroupDeleted):
            self._delete(record.group_id)
        elif isinstance(record, GroupMoved) and (group := self.groups.get(record.group_id)) is not None:
            group.move(record.next)
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
            group.changing().leave(Decision(*record[:-1], decode_rows(record.rows)))
        elif isinstance(record, RetryAccepted) and (group := self.groups.get(record.group_id)) is not None:
            group.changing().leaving.pop((record.producer, record.number), None)

    def _lose(self, group_id: int, offset: int) -> None:
        """Note a group that has entries but no beginning: nobody knows where it stood. All other groups are served."""
        what = f"an entry names the group {group_id}, which no record before it made"
        self.lost[group_id] = LostGroup(
            group_id, self._kept.names_of(group_id), DamagedData(self._folder, offset, what)
        )

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
        self.lost.pop(group_id, None)
        self.groups.pop(group_id, None)
        self.removes += group_keys(group_id)

    def _create(self, record: GroupCreated) -> None:
        self.lost.pop(record.group_id, None)
        subject = self._index.subject(record.subject)
        try:
            start = self._index.first(subject)
        except RetryLater:
            start = 0  # `settle_starts` moves it to the first message that is kept.
        self.groups[record.group_id] = Group(record.group_id, subject, record.group, start, self.next_pull)
