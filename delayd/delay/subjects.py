"""Subjects: the server's own small numbers for names, so that a pending row carries four bytes of its subject.

Numbers are given in order of first appearance and mean nothing outside this process.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Batch

TABLES_MAX = 65_536  # Remembered subject tables; producers repeat theirs, and forgetting one costs 2 us a subject.


class Subjects:
    """Names by number and numbers by name."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._tables: dict[bytes, NDArray[np.uint32]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: bytes) -> int:
        """The number of a name, a new one at its first appearance."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def numbers(self, names: Sequence[bytes]) -> NDArray[np.uint32]:
        """The numbers of several names: u32[n]."""
        return np.fromiter(map(self.number, names), np.uint32, len(names))

    def of_batch(self, batch: Batch) -> NDArray[np.uint32]:
        """The numbers of a batch's subject table: u32[subject_count], not to be written."""
        table = batch.subject_table
        numbers = self._tables.get(table)
        if numbers is None:
            if len(self._tables) >= TABLES_MAX:
                self._tables.clear()
            numbers = self._tables[table] = self.numbers(batch.subjects())
        return numbers
