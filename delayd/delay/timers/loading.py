"""Loading: the coming hours enter the wheel, one after the other, before anything of them is due (rules P5, P7, B2).

Invariant: one replay offset divides the rows of an hour that is attached: below it they come from the schedule log, as
far as the last checkpoint counted it, above it from the pending rows. A load may run while a checkpoint writes. If that
checkpoint is counted before the load is attached, the load is done again. No other checkpoint begins meanwhile, so this
happens once at most.

     what is due ──▶ read the schedule log ──▶ number its subjects ──▶ order the rows ──▶ attach
                     (worker thread)           (loop)                  (worker thread)    (loop)
"""

import logging
from collections.abc import Callable
from functools import partial

import numpy as np

from delayd.delay.rows import Rows, hour_span, without
from delayd.delay.timers.hours import Hours
from delayd.delay.timers.loader import LoadedHour, load_hour, order_hour
from delayd.delay.timers.wheel import PreparedRows
from delayd.errors import Shortage
from delayd.executor import Done, Priority
from delayd.hours import hour_name, hour_of_ms
from delayd.site import Site

log = logging.getLogger(__name__)


class Loading:
    """Loads hours beside the loop; belongs to the loop."""

    def __init__(
        self,
        site: Site,
        hours: Hours,
        loaded: range,
        load_ahead_ms: int,
        replay_offset: Callable[[], int],
        attached: Callable[[LoadedHour], None],
    ) -> None:
        self.until = loaded.stop - 1  # The last loaded hour; all from ``loaded.start`` to it are loaded.
        self.running = False
        self.is_due = False  # Whether the next hour is to be loaded, though that may wait for something.
        self._from = loaded.start
        self._site = site
        self._filed = hours.filed
        self._pending = hours.pending
        self._wheel = hours.wheel
        self._subjects = hours.subjects
        self._earlier = hours.earlier
        self._beside = hours.beside
        self._withheld = hours.withheld
        self._load_ahead_ms = load_ahead_ms
        self._replay_offset = replay_offset
        self._attached = attached  # Called with each hour that is loaded, in full or in part.
        self._short: Shortage | None = None

    def take(self, rows: Rows) -> None:
        """Take rows that have just become durable: those of loaded hours enter the wheel, the others are kept."""
        span = hour_span(rows)
        if span[1] > self.until or self._withheld:
            near = rows["hour"] <= np.uint32(self.until)
            if self._withheld:
                near &= ~np.isin(rows["hour"], list(self._withheld))
            self._pending.keep(rows.take(np.flatnonzero(~near)))
            rows = rows.take(np.flatnonzero(near))
            span = hour_span(rows) if len(rows) else (self._from, self._from)
        self._pending.count(rows, span)
        if span[0] < self._from:
            # The clock was set back to before the start. Rows that these hours held then were loaded at the start, so
            # only these new rows are missing from the wheel.
            self.put_back(rows)
        else:
            self._wheel.insert(rows, span)

    def put_back(self, rows: Rows) -> None:
        """Put rows into the wheel whose hours may have left it."""
        for hour in np.unique(rows["hour"]).tolist():
            if not self._wheel.has_hour(hour):
                self._wheel.add_hour(hour)
        self._wheel.insert(rows)

    def reopen(self) -> None:
        """The log was set back: hours up to the last loaded one, which were empty and left the wheel, may get rows."""
        self._from = self.until + 1

    def drop_empty(self, before: int) -> None:
        """Drop the hours before this one that are empty."""
        for hour in self._wheel.hours():
            if hour < before and not self._wheel.len_of(hour):
                self._wheel.drop_hour(hour)

    def step(self, filing_ms: int, waits: Callable[[int], bool]) -> None:
        """Begin to load the next hour when it is due. New rows are filed in the hour of ``filing_ms`` or later.

        ``waits`` says whether an hour is loaded later: it is being mended, or rows of it are being claimed.
        """
        self.is_due = hour_of_ms(filing_ms + self._load_ahead_ms) > self.until
        if self.is_due and not self.running and not waits(self.until + 1):
            self._load_next()

    def _load_next(self) -> None:
        """Begin to load the hour behind the last loaded one."""
        hour = self.until + 1
        if hour in self._withheld:
            self.until = hour
            return
        self.running = True
        self._read(hour)

    def _read(self, hour: int) -> None:
        decided = self._earlier.of(hour)
        files = (self._filed.get(hour), decided, self._beside.get(hour))
        work = partial(load_hour, self._site.disk, self._site.folder, self._site.log_id, hour, *files)
        self._site.worker.submit(work, partial(self._number, self._replay_offset()), Priority.DUE)

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
        self._site.worker.submit(work, partial(self._attach, replay_offset, loaded, kept), Priority.DUE)

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
        log.info("hour_loaded hour=%s rows=%d", hour_name(hour), self._wheel.len_of(hour))
        self._attached(loaded)
