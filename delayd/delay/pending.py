"""Pending columns: every row of the message log above the replay offset, in the order of the log.

They are what the next checkpoint writes to the schedule logs, and, until it has, that part of the schedule.
"""

import numpy as np

from delayd.delay.rows import ROW, Rows, copy_rows

ROWS_MIN = 65_536  # A first capacity that costs 2 MB.


class PendingColumns:
    """A growing array of ROW; taken from the front by checkpoints."""

    def __init__(self) -> None:
        self._rows = np.empty(ROWS_MIN, ROW)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, rows: Rows) -> None:
        """Copy rows behind the others."""
        needed = self._count + len(rows)
        if needed > len(self._rows):
            grown = np.empty(max(needed, 2 * len(self._rows)), ROW)
            copy_rows(grown, 0, self.view())
            self._rows = grown
        copy_rows(self._rows, self._count, rows)
        self._count = needed

    def view(self) -> Rows:
        """View all rows; valid until the next append or drop."""
        return self._rows[: self._count]

    def of_hour(self, hour: int) -> Rows:
        """Copy the rows of one filing hour."""
        rows = self.view()
        return rows.take(np.flatnonzero(rows["hour"] == np.uint32(hour)))

    def count_by_hour(self) -> dict[int, int]:
        """How many rows each filing hour has."""
        hours = self.view()["hour"]
        first = int(hours.min()) if len(hours) else 0
        counts = np.bincount(hours - np.uint32(first))
        return {first + index: int(counts[index]) for index in np.flatnonzero(counts).tolist()}

    def drop(self, count: int) -> None:
        """Forget the first ``count`` rows, which a published checkpoint covers."""
        kept = self._rows[count : self._count]
        self._rows = np.empty(max(ROWS_MIN, 2 * len(kept)), ROW)
        copy_rows(self._rows, 0, kept)
        self._count = len(kept)
