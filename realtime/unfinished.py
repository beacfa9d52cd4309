"""Unfinished: which recurring schedules have messages that nobody is done with, as their delay servers ask before an
occurrence is sent that must not overlap with an earlier one (UNFINISHED; docs/recurring.md, docs/protocol.md).

A message is unacknowledged while any group of its subject, or the group of what comes to that one again, has it new,
offered, held, paused, or leaving to come again. Not so a dead letter on its way, a message that can't be read, and one
that the group would pass over. Where there is no group, nobody is done with a message as long as it is kept, which is
told apart, for a subject that has moved has its groups elsewhere. A group whose progress is lost is done with nothing.

An example: subject reports has the messages 0 to 99 in one stored batch, of which 97 says in its headers that it is of
the schedule daily. Group g is at 98 and holds 97. The question is (reports, daily).

1. What g holds is the message 97, so its batch is searched once for the mark of a schedule. Row 97 has it.
2. Row 97 is within what g holds: place 0 is unfinished. Nothing else is looked at.
3. Once 97 is acknowledged, g holds nothing and begins at 98. The batch is searched again, and row 97 is not within 98
   to 99: place 0 is in no list.

Invariant: whatever was not searched counts as unfinished, or as unknown, and never as done. What is told to be done
stays done after a power cut (rule L2). The search of one subject is bounded in bytes, and so is a request: what does
not fit it is unknown, and is asked again (rule B2).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId
from delayd.batch.gather import item_of
from delayd.batch.labels import SCHEDULE, decode_headers, marks_of_schedules, rows_of_marks
from delayd.batch.names import retry_subject
from delayd.errors import BadHeaders, DamagedData, DataError, RetryLater
from delayd.machine.clock import Clock
from delayd.wire.frame import Frame
from delayd.wire.recurring import AskedSchedule, Unfinished, read_schedules

from .answers import are_over, why_nobody
from .commit import PullCommit
from .group_records import GroupRecords
from .groups import Group, LostGroup
from .handoff import Peer
from .subject_index import Index, StoredBatches, Subject

SEARCH_BYTES = 16 << 20  # For one subject: some 20 ms, more where the disk is slow.
READ_BYTES_MIN = 64 << 10  # A smaller batch that is read costs as much as one of this size, so at most 256 are read,
KEPT_BYTES_MIN = 4 << 10  # and 4,096 of those in memory are searched.
MARK_BYTES = 256  # What it costs to look at a mark, some 0.4 us.
HEADERS_BYTES = 1 << 10  # What it costs to decode the headers of a row.
GROUP_BYTES = 1 << 10  # What it costs to look at a group.
RUN_BYTES = 64  # What it costs to look at a run of a group's window.

_Passes = Callable[[Batch, int, int], NDArray[np.generic]]
"""Which of some rows nobody is to get any more."""


class _TooMuch(Exception):
    """The search of a subject takes too long."""


class _Range(NamedTuple):
    """Neighbouring messages of a subject that a group is not done with.

    Fields:
        passes: which of them it would pass over; None: it has decided about them.
        held: whether a consumer has them, so that it matters when they can't be read.
    """

    subject: Subject
    first: int
    end: int
    passes: _Passes | None = None
    held: bool = False


class _Marked(NamedTuple):
    """The rows of a batch that may be of schedules that were asked for, rising, and the names of these."""

    rows: list[int]
    names: list[str]
    batch: Batch | None = None


_NONE_MARKED = _Marked([], [])


class UnfinishedSearch:
    """Answers UNFINISHED; changes nothing."""

    def __init__(
        self, log_id: int, groups: GroupRecords, pull_log: PullCommit, index: Index, stored: StoredBatches, clock: Clock
    ) -> None:
        self._log_id = log_id
        self._roster = groups.roster
        self._log = pull_log
        self._index = index
        self._stored = stored
        self._clock = clock

    def answer(self, peer: Peer, frame: Frame) -> None:
        """Serve a request. What a power cut could still take has ended nothing, so the pull log is synced first."""
        found = self._find(read_schedules(frame.head)).to_head(self._log_id)
        self._log.when_durable(partial(peer.answer, frame.request_id, found))

    def _find(self, asked: Sequence[AskedSchedule]) -> Unfinished:
        unfinished: list[int] = []
        ungrouped: list[int] = []
        unknown: list[int] = []
        again: dict[int, None] = {}
        left = SEARCH_BYTES
        for subject_name, group in groupby(enumerate(asked), lambda each: each[1].subject):
            places = [(place, schedule.name) for place, schedule in group]
            if left <= 0:
                unknown += [place for place, _ in places]
                continue
            ids = [each.group_id for each in self._of(subject_name)]
            again.update(dict.fromkeys(each for each in ids if self._of(retry_subject(self._log_id, each))))
            search = _SubjectSearch(self._index, self._stored, {name for _, name in places})
            known = True
            try:
                search.look(self._ranges(subject_name, ids))
            except _TooMuch:
                search.found |= search.wanted
            except (RetryLater, DataError):
                known = False
            left -= SEARCH_BYTES - search.left + GROUP_BYTES * len(ids)
            (unfinished if ids else ungrouped).extend(place for place, name in places if name in search.found)
            if not known:
                unknown += [place for place, name in places if name not in search.found]
        return Unfinished(unfinished, ungrouped, unknown, list(again))

    def _ranges(self, subject_name: str, ids: Sequence[int]) -> Iterator[_Range]:
        """What the groups of a subject with these ids, and those of what comes to them again, are not done with."""
        if not ids:
            yield from self._kept(subject_name)
        for name in (subject_name, *(retry_subject(self._log_id, group_id) for group_id in ids)):
            for each in self._of(name):
                yield from self._open(each) if isinstance(each, Group) else self._kept(name)

    def _of(self, subject_name: str) -> list[Group | LostGroup]:
        return [*self._roster.of(subject_name), *self._roster.lost_of(subject_name)]

    def _kept(self, subject_name: str) -> Iterator[_Range]:
        """All that is kept of a subject: nobody knows of a group that is done with any of it."""
        subject = self._index.by_name.get(subject_name)
        if subject is not None and subject.end:
            yield _Range(subject, self._index.first(subject), subject.end, partial(are_over, clock=self._clock))

    def _open(self, group: Group) -> Iterator[_Range]:
        """What a group is not done with."""
        subject, window = group.subject, group.window
        passes = partial(why_nobody, group, clock=self._clock)
        for run in window.held():
            yield _Range(subject, run.consume_first, run.consume_first + run.messages, held=True)
        for decision in window.leaving.values():
            for row in decision.rows:
                if not row.reason:
                    yield _Range(subject, row.consume_first, row.consume_first + row.covered)
        for run in window.others:
            yield _Range(subject, run.first, run.end, passes)
        if window.next < subject.end:
            yield _Range(subject, max(window.next, self._index.first(subject)), subject.end, passes)


class _SubjectSearch:
    """The search for messages of some schedules in one subject."""

    def __init__(self, index: Index, stored: StoredBatches, wanted: set[str]) -> None:
        self.wanted = wanted
        self.found: set[str] = set()
        self.left = SEARCH_BYTES
        self._index = index
        self._stored = stored
        self._packed = {name.encode(): name for name in wanted}
        self._searched: dict[int, _Marked] = {}  # By the offset of the batch.

    def look(self, ranges: Iterator[_Range]) -> None:
        """Search ranges, until all schedules are found.

        Raises:
            _TooMuch: that is as much as one subject may cost.
            RetryLater, Shortage: they can't be searched now.
        """
        for each in ranges:
            self._pay(RUN_BYTES)
            self._look_at(each)
            if self.found == self.wanted:
                return

    def _look_at(self, wanted: _Range) -> None:
        first = wanted.first
        while first < wanted.end:
            run = self._index.locate(wanted.subject, first)
            rows = min(run.rows, wanted.end - first)
            first += rows
            try:
                marked = self._marked(run.offset)
            except DamagedData:
                if wanted.held:
                    self.found |= self.wanted
                continue
            low, high = (bisect.bisect_left(marked.rows, row) for row in (run.row, run.row + rows))
            if low < high and not self.found.issuperset(marked.names[low:high]):
                self._find(marked, low, high, wanted.passes)

    def _find(self, marked: _Marked, low: int, high: int, passes: _Passes | None) -> None:
        """Find schedules among some of the rows that were marked."""
        batch, begin = marked.batch, marked.rows[low]
        assert batch is not None, "a row is in a batch"
        passed = [] if passes is None else passes(batch, begin, marked.rows[high - 1] + 1 - begin).tolist()
        for row, name in zip(marked.rows[low:high], marked.names[low:high], strict=True):
            if name in self.found or (passed and passed[row - begin]):
                continue
            self._pay(HEADERS_BYTES)
            if _schedule_of(batch, row) == name:
                self.found.add(name)

    def _marked(self, offset: int) -> _Marked:
        """The rows of a batch that may be of the schedules; raises as `StoredBatches.fetch` does."""
        known = self._searched.get(offset)
        if known is not None:
            return known
        least = KEPT_BYTES_MIN if offset >= self._stored.memory_start else READ_BYTES_MIN
        self._pay(least)
        batch = self._stored.fetch(offset)
        self._pay(max(batch.total_bytes - least, 0))
        marked = self._searched[offset] = self._search(batch)
        return marked

    def _search(self, batch: Batch) -> _Marked:
        places: list[int] = []
        names: list[str] = []
        for place, packed in marks_of_schedules(batch):
            self._pay(MARK_BYTES)
            name = self._packed.get(packed)
            if name is not None:
                places.append(place)
                names.append(name)
        return _Marked(rows_of_marks(batch, places), names, batch) if places else _NONE_MARKED

    def _pay(self, size_bytes: int) -> None:
        self.left -= size_bytes
        if self.left < 0:
            raise _TooMuch


def _schedule_of(batch: Batch, row: int) -> str | bytes | None:
    """The schedule that a message says it is of."""
    length, item = item_of(batch, ColumnId.HEADERS_END, row)
    try:
        return decode_headers(bytes(item[:length])).get(SCHEDULE)
    except BadHeaders:
        return None
