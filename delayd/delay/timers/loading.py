"""Loading: the coming hours enter the wheel, one after the other, before anything of them is due (rules P5, P7, B2).

Invariant: one replay offset divides the rows of an hour that is attached: below it they come from the schedule log, as
far as the last checkpoint counted it, above it from the pending rows. A load may run while a checkpoint writes. If that
checkpoint is counted before the load is attached, the load is done again. No other checkpoint begins meanwhile, so this
happens once at most.

     what is due ──▶ read the schedule log ──▶ number its subjects ──▶ order the rows ──▶ attach
                     (worker thread)           (loop)                  (worker thread)    (loop)
"""

import logging
from collections.abc import Callable, Container
from functools import partial

from delayd.delay.filing.hour_table import HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.delay.rows import without
from delayd.delay.subjects import Subjects
from delayd.delay.timers.earlier import EarlierOutcomes
from delayd.delay.timers.loader import LoadedHour, load_hour, order_hour
from delayd.delay.timers.wheel import PreparedRows, Wheel
from delayd.disk import Disk
from delayd.errors import Shortage
from delayd.executor import Done, Executor, Priority
from delayd.hours import hour_name

log = logging.getLogger(__name__)


class Loading:
    """Loads hours beside the loop; belongs to the loop."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        log_id: int,
        executor: Executor,
        hours: HourTable,
        pending: PendingRows,
        wheel: Wheel,
        subjects: Subjects,
        earlier: EarlierOutcomes,
        until: int,
        replay_offset: Callable[[], int],
        attached: Callable[[], None],
        beside: HourTable,
        withheld: Container[int],
        damaged: Callable[[LoadedHour], None],
    ) -> None:
        self.until = until  # The last loaded hour; all before it are loaded too.
        self.running = False
        self._disk = disk
        self._folder = folder
        self._log_id = log_id
        self._executor = executor
        self._hours = hours
        self._pending = pending
        self._wheel = wheel
        self._subjects = subjects
        self._earlier = earlier
        self._replay_offset = replay_offset
        self._attached = attached
        self._beside = beside  # The file beside each damaged schedule log: how much of it a checkpoint counts.
        self._withheld = withheld  # Hours whose rows must not be loaded now.
        self._damaged = damaged
        self._short: Shortage | None = None

    def load_next(self) -> None:
        """Begin to load the hour behind the last loaded one."""
        hour = self.until + 1
        if hour in self._withheld:
            self.until = hour
            return
        self.running = True
        self._read(hour)

    def _read(self, hour: int) -> None:
        decided = self._earlier.of(hour)
        files = (self._hours.get(hour), decided, self._beside.get(hour))
        work = partial(load_hour, self._disk, self._folder, self._log_id, hour, *files)
        self._executor.submit(work, partial(self._number, self._replay_offset()), Priority.DUE)

    def _number(self, replay_offset: int, done: Done[LoadedHour]) -> None:
        """Give its subjects the numbers of this server."""
        try:
            loaded = done.result()
        except Shortage as error:
            # The file is not damaged; the process was short of something. The next tick tries again.
            if str(self._short) != str(error):
                log.warning("load_put_off reason=%r", str(error))
            self._short, self.running = error, False
            return
        self._short = None
        if self._replay_offset() != replay_offset:
            self._read(loaded.hour)
            return
        numbers = self._subjects.numbers(loaded.names)
        decided, kept = self._earlier.of(loaded.hour), self._pending.kept
        work = partial(order_hour, loaded, numbers, self._pending.views(0), decided)
        self._executor.submit(work, partial(self._attach, replay_offset, loaded, kept), Priority.DUE)

    def _attach(self, replay_offset: int, loaded: LoadedHour, kept: int, done: Done[list[PreparedRows]]) -> None:
        """Put the rows into the wheel, with the rows that arrived while they were being ordered."""
        prepared, hour = done.result(), loaded.hour
        if self._replay_offset() != replay_offset:
            self._read(hour)
            return
        self._wheel.add_hour(hour)
        for rows in prepared:
            self._wheel.add_hour(hour, rows)
        self._wheel.insert(without(self._pending.of_hour(hour, kept), self._earlier.of(hour)))
        self.running = False
        self.until = hour
        if loaded.damage is not None:
            self._damaged(loaded)
        log.info("hour_loaded hour=%s rows=%d", hour_name(hour), self._wheel.len_of(hour))
        self._attached()
