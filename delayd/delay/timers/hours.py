"""Hours: the places where rows of an hour may be, from its schedule log to the wheel."""

from dataclasses import dataclass

from delayd.delay.filing.hour_table import HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.delay.subjects import Subjects
from delayd.delay.timers.earlier import EarlierOutcomes
from delayd.delay.timers.ledger import Ledger
from delayd.delay.timers.wheel import Wheel


@dataclass(frozen=True, slots=True)
class Hours:
    """All that is known of hours; for the loop alone."""

    filed: HourTable
    beside: HourTable  # The files beside damaged schedule logs: how much of them a checkpoint counts.
    pending: PendingRows
    wheel: Wheel
    subjects: Subjects
    earlier: EarlierOutcomes
    ledger: Ledger  # Knows which rows have ended: each row passes it on its way in and out of the wheel.
    withheld: set[int]  # Hours of which nothing is loaded, because any of their rows may have been handed over.
