"""Retention: it decides which old segments may be removed, and removes them (rule Q3).

It never removes messages that a group has not acknowledged, batches that are in doubt, or anything that the last
durable checkpoint does not cover.

An example: the segments of the message log begin at the offsets 0, 100, 200 and 300, and the log ends at 380. The
offset up to which it may be removed is the lowest of these:

1. By age: the newest group below 200 is older than the retention, a younger one begins there: 200.
2. By the checkpoint that is to be published: it covers the log up to 350.
3. By doubt: the first batch above its delay server's W is in the group at 250.
4. By each group of consumers: the oldest message that it has not acknowledged is in the batch at 180.

So the offset is 180. It lies in the segment that begins at 100, so the segment from 0 to 100 is removed. If the consume
log of a group's subject can't be read now, nobody knows the offset of step 4, and nothing is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from delayd.errors import RetryLater, Shortage
from delayd.log.consume import SEGMENT_ENTRIES, ConsumePlace, remove_segments, segment_bases
from delayd.log.log import Log
from delayd.log.segment import Segment
from delayd.machine.disk import Disk
from delayd.machine.executor import Done, Executor

from .groups import Group, GroupCopy
from .kept import Marks
from .recovery import Recovered
from .subject_index import Index, Subject

if TYPE_CHECKING:
    from .checkpoint import Snapshot

LOOKED_A_TURN = 10_000  # Subjects looked at in one turn, some 30 ns each; most have one segment, which stays.
READS_A_TURN = 100  # Each reads an entry of a consume log, in some 20 us.

# Unseen subjects that are followed at a time: each may cost some reads of its consume log. The listing shows all.
SUBJECTS_MAX = 256

log = logging.getLogger(__name__)


def keep_from(message_log: Log, oldest_ms: int, marks: Marks, groups: Iterable[Group | GroupCopy], index: Index) -> int:
    """Where the message log may begin once these marks and groups are durable."""
    offset = min(message_log.older_than(oldest_ms), marks.indexed_offset, marks.window_offset)
    for group in groups:
        if offset > message_log.start and group.oldest < group.subject.end:
            try:
                offset = min(offset, index.locate(group.subject, group.oldest).offset)
            except RetryLater as error:
                # Nobody knows now where the group's oldest message is, so nothing is removed.
                log.warning("retention_put_off subject=%s reason=%r", group.subject.name, error.message)
                return message_log.start
    return message_log.base_below(offset)


def remove_old(
    recovered: Recovered, commit: Executor, work: Executor, snapshot: Snapshot, removed: Callable[[], None]
) -> None:
    """Remove segments that a published checkpoint has made superfluous: of the pull log always, of the message log when
    retention asked for it.

    ``removed`` is called on the loop when messages are not kept any more.
    """
    pull_log, message_log = recovered.pull_log, recovered.message_log
    if pull_log is not None and (old := pull_log.detach_below(snapshot.marks.pull_offset)):
        work.submit(partial(pull_log.remove, old), _removed)
    if snapshot.keep_from is not None and snapshot.keep_from > message_log.start:
        detach = partial(message_log.detach_below, snapshot.keep_from)
        commit.submit(detach, partial(_detached, recovered, work, removed))


class Trimming:
    """Finds the consume segments that are not needed any more, once messages were removed; belongs to the loop.

    For a subject whose log has several segments this costs a read, so a turn of the loop looks at some subjects only.
    """

    def __init__(self, index: Index, disk: Disk, work: Executor) -> None:
        self.left: list[Subject] = []  # Subjects that were not looked at yet.
        self._index = index
        self._disk = disk
        self._work = work

    def begin(self) -> None:
        """Messages were removed: look at all subjects, from the next turn on."""
        self.left = list(self._index)

    def step(self) -> None:
        """Look at as many subjects as one turn may."""
        ends: list[tuple[ConsumePlace, int, int]] = []
        part, self.left = self.left[-LOOKED_A_TURN:], self.left[:-LOOKED_A_TURN]
        while part and len(ends) < READS_A_TURN:
            subject = part.pop()
            if subject.tail.base > 0 and (end := _consume_end(self._index, subject)) is not None:
                ends.append(end)
        self.left += part
        if ends:
            self._work.submit(partial(remove_consume_segments, self._disk, ends), _removed)


def remove_consume_segments(disk: Disk, ends: Sequence[tuple[ConsumePlace, int, int]]) -> int:
    """Remove consume segments wholly below the first kept message, never the last one. ``ends`` has (place, first kept
    message, base of the last segment) for each log.
    """
    removed = 0
    for place, first, last in ends:
        old = [base for base in segment_bases(disk, place) if base + SEGMENT_ENTRIES <= first and base < last]
        remove_segments(disk, place, old)
        removed += len(old)
    return removed


def _detached(recovered: Recovered, work: Executor, removed: Callable[[], None], done: Done[list[Segment]]) -> None:
    old = done.result()
    if old:
        removed()
    work.submit(partial(recovered.message_log.remove, old), _removed)


def _consume_end(index: Index, subject: Subject) -> tuple[ConsumePlace, int, int] | None:
    """Where the needed entries begin, and the last segment; None when that is not known now."""
    try:
        return index.place(subject), index.first(subject), subject.tail.base
    except RetryLater:
        return None


def _removed(done: Done[int]) -> None:
    try:
        log.info("old_removed bytes_or_files=%d", done.result())
    except Shortage as error:
        log.warning("old_not_removed reason=%r", error.message)  # The next removal takes it along.


class Unseen:
    """Subjects whose messages nobody pulls, because no group was ever created; retention removes these messages all the
    same. It looks at them at the pace of housekeeping; belongs to the loop.

    A new group begins at the earliest message that is kept, so messages that were removed before are never delivered to
    it (rule Q3 is about groups only). Invariant: in each life such a subject is logged once before its first message is
    removed, and so is the loss. An unreadable file here never keeps retention from its work.
    """

    def __init__(self, index: Index, has_group: Callable[[str], bool], retention_ms: int) -> None:
        self._index = index
        self._has_group = has_group
        self._retention_ms = retention_ms
        # Subjects that had no group at the last look; a consumer may be about to create one.
        self._noticed: set[Subject] = set()
        # Subjects that were logged, with the first consume sequence that was kept then.
        self._told: dict[Subject, int] = {}
        # Subjects without kept messages, with their end at that time; they don't count against SUBJECTS_MAX.
        self._empty: dict[Subject, int] = {}

    def look(self) -> None:
        """Log subjects that had no group at the last look either."""
        self._told = {subject: first for subject, first in self._told.items() if not self._has_group(subject.name)}
        noticed: set[Subject] = set()
        for subject in self._index:
            if len(self._told) + len(noticed) >= SUBJECTS_MAX:
                break
            if subject in self._told or self._has_group(subject.name) or self._empty.get(subject) == subject.end:
                continue
            if subject not in self._noticed or (first := self._first(subject)) is None:
                noticed.add(subject)
            elif first == subject.end:
                self._empty[subject] = first
            else:
                self._told[subject] = first
                log.warning(
                    "subject_without_group subject=%s messages=%d kept_for_ms=%d then=removed_unseen "
                    "fix=let_a_consumer_of_a_group_pull_once",
                    *(subject.name, subject.end - first, self._retention_ms),
                )
        self._noticed = noticed

    def removed(self) -> None:
        """Log how many unseen messages retention has removed."""
        for subject, first in list(self._told.items()):
            if self._has_group(subject.name):
                continue
            kept_from = self._first(subject)
            if kept_from is None:
                continue
            if kept_from > first:
                log.error("messages_removed_unseen subject=%s messages=%d", subject.name, kept_from - first)
                self._told[subject] = kept_from
            if kept_from == subject.end:
                self._empty[subject] = self._told.pop(subject)

    def _first(self, subject: Subject) -> int | None:
        """The first message that is kept; None when its consume log can't be read, which a pull reports in full."""
        try:
            return self._index.first(subject)
        except RetryLater as error:
            log.warning("unseen_not_known subject=%s reason=%r", subject.name, error.message)
            return None
