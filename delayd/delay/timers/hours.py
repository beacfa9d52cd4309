"""Hours: where the rows of an hour may be, from its schedule log to the wheel."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delayd.delay.filing.hour_table import FiledHours, HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.delay.rows import Rows
from delayd.delay.subjects import Subjects
from delayd.delay.timers.wheel import Wheel


@dataclass(slots=True)
class Hours:
    """All that is known of hours; for the loop alone."""

    filed: HourTable
    beside: HourTable  # The files beside damaged schedule logs: how much of them a checkpoint counts.
    pending: PendingRows
    wheel: Wheel
    subjects: Subjects
    withheld: set[int]  # Hours of which nothing is loaded, because any of their rows may have been handed over.
    loaded: range  # Hours that were loaded in this life; those before it were over at the start.
    loading: range = range(0)  # What is being loaded, or is to be loaded, though that may wait for something.

    @property
    def files(self) -> FiledHours:
        """The files that have rows of the hours."""
        return FiledHours(self.filed, self.beside)

    @property
    def loaded_until(self) -> int:
        """The last loaded hour."""
        return self.loaded.stop - 1

    def is_loaded(self, hour: int) -> bool:
        """Whether the rows of an hour are in the wheel, or have left it."""
        return hour < self.loaded.stop and hour not in self.withheld

    def are_far(self, hours: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of these are hours that are not loaded."""
        found: NDArray[np.bool_] = hours >= np.uint32(max(0, self.loaded.stop))
        if self.withheld:
            found |= np.isin(hours, np.array(sorted(self.withheld), np.uint32))
        return found

    def put_back(self, rows: Rows) -> None:
        """Put rows into the wheel whose hours may have left it."""
        for hour in np.unique(rows["hour"]).tolist():
            if not self.wheel.has_hour(hour):
                self.wheel.add_hour(hour)
        self.wheel.insert(rows)
