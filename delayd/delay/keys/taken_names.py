"""Taken names: which row has taken a name, also while a look-up in the files of the index is under way.

A look-up sees the index as it was when it began. Whoever decides by it asks here what came since.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from delayd.delay.keys.entries import Asked, Entries, Found, Index
from delayd.delay.keys.index import KeyIndex, View
from delayd.delay.keys.keyed import KeyedRows
from delayd.errors import DamagedData, SlowDown
from delayd.hours import HOUR_MS
from delayd.wire.asked import Asked as AskedRows


@dataclass(slots=True, eq=False)
class Watch:
    """A look-up, from its beginning until what it found is decided by."""

    added: int  # How many parts had been added to the index when it began.


class TakenNames:
    """The index of keys, and what was added to it lately; belongs to the loop."""

    def __init__(self, index: KeyIndex) -> None:
        self._index = index
        self._watches: set[Watch] = set()
        # Entries that were added since the oldest of these look-ups began, each part with its number.
        self._since: deque[tuple[int, Entries]] = deque()
        self._added = 0
        self.closing: Entries | None = None  # What the commit that is under way adds.

    def __len__(self) -> int:
        return len(self._watches)

    def check(self) -> None:
        """Raise SlowDown while names can't be looked up."""
        if not self._index.whole:
            raise SlowDown("this server makes its index of keys again; ask again later")

    def damaged(self, damage: DamagedData) -> None:
        """A look-up found a file damaged: the index is made again."""
        self._index.damaged(damage)

    def begin(self) -> tuple[Watch, View]:
        """Begin a look-up; it ends with `end`."""
        watch = Watch(self._added)
        self._watches.add(watch)
        return watch, self._index.view()

    def end(self, watch: Watch) -> None:
        """What a look-up found is not needed any more."""
        self._watches.discard(watch)
        self._forget()

    def compare(self, watch: Watch, asked: Asked, found: Found) -> None:
        """Note entries that came after a look-up had begun."""
        for number, part in self._since:
            if number > watch.added:
                part.find(asked, found)

    def add(self, rows: KeyedRows) -> None:
        """Take rows that have taken their keys durably."""
        self._add(self._index.entries(rows))

    def committed(self) -> None:
        """The commit that was under way is durable."""
        entries, self.closing = self.closing, None
        if entries is not None:
            self._add(entries)

    def _add(self, entries: Entries) -> None:
        self._index.add_entries(entries)
        self._added += 1
        self._since.append((self._added, entries))
        self._forget()

    def _forget(self) -> None:
        oldest = min((watch.added for watch in self._watches), default=self._added)
        while self._since and self._since[0][0] <= oldest:
            self._since.popleft()


class Named:
    """The rows that have taken the names of a request so far."""

    def __init__(self, taken: TakenNames, watch: Watch, names: Asked, found: Found) -> None:
        self._taken = taken
        self._watch = watch
        self._names = names
        self._found = found

    def take(self, rows: Index) -> Named:
        """The same of some of the names."""
        found = Found(len(rows))
        found.rows = self._found.rows.take(rows)
        return Named(self._taken, self._watch, self._names.take(rows), found)

    def rows(self) -> AskedRows:
        """The newest row of each name that is known so far; of a name without a row, one that never was."""
        rows = self._found.rows
        # An entry has the filing hour, and not when the row was accepted: the hour's start stands for that.
        begins = rows["hour"].astype(np.int64) * HOUR_MS
        accepted = np.where(rows["deliver_at_ms"] < begins, begins, 0)
        return AskedRows(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), accepted)

    def newer(self) -> bool:
        """Whether rows have taken some of the names since; then `rows` are others."""
        before = self._found.rows["sequence"].copy()
        self._taken.compare(self._watch, self._names, self._found)
        return bool((self._found.rows["sequence"] != before).any())

    def closing(self) -> bool:
        """Whether a row of the commit that is being closed takes one of the names."""
        entries = self._taken.closing
        if entries is None:
            return False
        found = Found(len(self._names.hashes))
        entries.find(self._names, found)
        return bool(found.known.any())
