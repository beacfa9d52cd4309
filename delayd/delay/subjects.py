"""Subjects: the server's own small numbers for names, so that a pending row needs four bytes for its subject.

Numbers are given in order of first appearance and mean nothing outside this process. A number is never given to a
second name, so a row can't come to a wrong subject. Names that no row in memory uses are given back (rule B1).
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId

BYTES_MAX = 256 << 20  # Names of subjects that rows in memory use, about a million; beyond, new names are refused.
SWEEP_BYTES = 64 << 20  # Below this no sweep takes place: most servers know some thousand subjects for ever.
SWEEP_GROWTH = 1.25  # A sweep takes place only when this many times the bytes are held that the last sweep left.
NAME_BYTES = 320  # A name takes this besides its bytes: its number, its target, and their places in dicts.
TABLES_BYTES_MAX = 16 << 20  # Subject tables are remembered up to this, because producers repeat theirs.
TABLE_BYTES_MAX = 4_096  # A longer table is rarely repeated, and to look its subjects up again costs 0.1 us each.
TABLE_BYTES = 320  # A remembered table takes this much besides its bytes and its numbers.


class Subjects:
    """Names by number and numbers by name."""

    def __init__(self) -> None:
        self.names: list[bytes] = []  # Empty where a name was given back.
        self.held_bytes = 0
        self._numbers: dict[bytes, int] = {}
        self._tables: dict[bytes, NDArray[np.uint32]] = {}
        self._tables_bytes = 0
        self._left_bytes = 0  # ``held_bytes`` after the last sweep.

    def __len__(self) -> int:
        """How many numbers were given."""
        return len(self.names)

    @property
    def known(self) -> int:
        """How many names are remembered."""
        return len(self._numbers)

    def wants_sweep(self, targets: int) -> bool:
        """Whether it is time for a sweep; ``targets`` subjects have a target, some of them without a name here."""
        held_bytes = self.held_bytes + max(0, targets - self.known) * NAME_BYTES
        return held_bytes > max(SWEEP_BYTES, SWEEP_GROWTH * self._left_bytes)

    @property
    def is_full(self) -> bool:
        """Whether new names are refused for now."""
        return self.held_bytes > BYTES_MAX

    def number(self, name: bytes) -> int:
        """The number of a name, a new one at its first appearance."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
            self.held_bytes += len(name) + NAME_BYTES
        return number

    def numbers(self, names: Sequence[bytes]) -> NDArray[np.uint32]:
        """The numbers of several names: u32[n]."""
        return np.fromiter(map(self.number, names), np.uint32, len(names))

    def find(self, name: bytes) -> int | None:
        """The number of a name, if it is remembered."""
        return self._numbers.get(name)

    def has(self, name: bytes) -> bool:
        """Whether a name is remembered."""
        return name in self._numbers

    def new_rows(self, batch: Batch) -> NDArray[np.intp]:
        """The rows of a batch whose subjects are new here, by rising number."""
        are_new = np.array([name not in self._numbers for name in batch.subjects()])
        return np.flatnonzero(
            are_new[batch.uint32s(ColumnId.SUBJECT)]
            if ColumnId.SUBJECT in batch.offsets
            else np.repeat(are_new, batch.count)
        )

    def of_batch(self, batch: Batch) -> NDArray[np.uint32]:
        """The numbers of a batch's subject table: u32[subject_count], not to be written."""
        table = batch.subject_table
        numbers = self._tables.get(table)
        if numbers is None:
            numbers = self.numbers(batch.subjects())
            if len(table) <= TABLE_BYTES_MAX:
                self._remember(table, numbers)
        return numbers

    def sweep(self, rows: Iterable[NDArray[np.void]]) -> int:
        """Give back the names that none of ``rows``, all rows in memory (ROW), uses; return how many these were."""
        used = np.zeros(len(self.names), np.bool_)
        for part in rows:
            used[part["subject"]] = True
        before = self.known
        for number in np.flatnonzero(~used).tolist():
            name = self.names[number]
            if name:
                self.names[number] = b""
                del self._numbers[name]
                self.held_bytes -= len(name) + NAME_BYTES
        self._forget_tables()
        self._left_bytes = self.held_bytes
        return before - self.known

    def _remember(self, table: bytes, numbers: NDArray[np.uint32]) -> None:
        size = len(table) + numbers.nbytes + TABLE_BYTES
        if self._tables_bytes + size > TABLES_BYTES_MAX:
            self._forget_tables()
        self._tables[table] = numbers
        self._tables_bytes += size

    def _forget_tables(self) -> None:
        self._tables.clear()
        self._tables_bytes = 0
