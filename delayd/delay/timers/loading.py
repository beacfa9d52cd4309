"""Loading: the coming hours enter the wheel, one after the other, before anything of them is due (rules P5, P7, B2).

After a long silence many hours have passed that are not loaded. They are loaded in runs, many hours at a time.

Invariant: one replay offset divides the rows of an hour that is attached: below it they come from the schedule log, as
far as the last checkpoint counted it, above it from the pending rows. A load may run while a checkpoint writes. If that
checkpoint is counted before the load is attached, the load is done again. No other checkpoint begins meanwhile, so this
happens once at most.

     what is due ──▶ read the schedule logs ──▶ number their subjects ──▶ order the rows ──▶ attach
                     (worker thread)            (loop)                    (worker thread)    (loop)
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

from delayd.batch.sequences import NO_SEQUENCES, Sequences
from delayd.delay.filing.checkpoint import Checkpointer
from delayd.delay.rows import Rows, hour_span, without
from delayd.delay.timers.hour_wheel import PreparedRows
from delayd.delay.timers.hours import Hours
from delayd.delay.timers.loader import FilesOfHour, LoadedHour, LoadedRun, load_run, order_hour, order_run
from delayd.errors import Shortage
from delayd.hours import hour_name, hour_of_ms
from delayd.machine.executor import Done, Priority
from delayd.machine.identity import Site

RUN_HOURS = 4_096  # Looked at together, when they have passed.

log = logging.getLogger(__name__)


Attached = Callable[[Sequence[LoadedHour]], None]
"""Called with the hours that have files, when they are loaded, in full or in part."""


class Loading:
    """Loads hours beside the loop; belongs to the loop."""

    def __init__(
        self,
        site: Site,
        hours: Hours,
        ended_in: Callable[[range], dict[int, Sequences]],
        load_ahead_ms: int,
        checkpointer: Checkpointer,
        attached: Attached,
    ) -> None:
        self.running = False
        self._hours = hours
        self._ended_in = ended_in  # Tells the rows of some hours that have ended, sorted: they are left out.
        self._site = site
        self._filed = hours.filed
        self._pending = hours.pending
        self._wheel = hours.wheel
        self._subjects = hours.subjects
        self._beside = hours.beside
        self._load_ahead_ms = load_ahead_ms
        self._checkpointer = checkpointer
        self._attached = attached
        self._short: Shortage | None = None

    @property
    def next_hour(self) -> int | None:
        """An hour that is not loaded, so that none between it and the loaded ones has rows; None when none has any."""
        filed, kept = self._filed.next_after(self._hours.loaded_until), self._pending.first_kept_hour
        hours = [hour for hour in (filed, kept) if hour is not None]
        return max(min(hours), self._hours.loaded_until + 1) if hours else None

    def take(self, rows: Rows) -> None:
        """Take rows that have just become durable: those of loaded hours enter the wheel, the others are kept."""
        span, loaded = hour_span(rows), self._hours.loaded
        if span[1] >= loaded.stop or self._hours.withheld:
            far = self._hours.are_far(rows["hour"])
            self._pending.keep(rows.take(np.flatnonzero(far)))
            rows = rows.take(np.flatnonzero(~far))
            span = hour_span(rows) if len(rows) else (loaded.start, loaded.start)
        self._pending.count(rows, span)
        if span[0] < loaded.start:
            # The clock was set back to before the start. Rows that these hours held then were loaded at the start, so
            # only these new rows are missing from the wheel.
            self._hours.put_back(rows)
        else:
            self._wheel.insert(rows, span)

    def reopen(self) -> None:
        """The log was set back: hours up to the last loaded one, which were empty and left the wheel, may get rows."""
        self._hours.loaded = range(self._hours.loaded.stop, self._hours.loaded.stop)

    def drop_empty(self, before: int) -> None:
        """Drop the hours before this one that are empty."""
        for hour in self._wheel.hours():
            if hour < before and not self._wheel.len_of(hour):
                self._wheel.drop_hour(hour)

    def step(self, filing_ms: int, passed: int, put_off: Callable[[], Collection[int]]) -> None:
        """Begin to load the next hours when they are due. New rows are filed in the hour of ``filing_ms`` or later, and
        in no hour before ``passed``.

        ``put_off`` names hours that are loaded later: rows of them are being claimed.
        """
        if self.running:
            return
        first, stop = self._hours.loaded_until + 1, hour_of_ms(filing_ms + self._load_ahead_ms) + 1
        self._hours.loading = range(first, min(stop, first + 1))
        if first >= stop:
            return
        later = {hour for hour in put_off() if hour >= first}
        if first in later:
            return
        if first in self._hours.withheld:
            self._load_until(first)
            self._hours.loading = range(first + 1, min(stop, first + 2))
            return
        stop = min(stop, passed, first + RUN_HOURS, *later, *(hour for hour in self._hours.withheld if hour > first))
        self.running = True
        self._read(range(first, max(stop, first + 1)))

    def _read(self, hours: range) -> None:
        self._hours.loading = hours
        filed = sorted({*self._filed.within(hours), *self._beside.within(hours)})
        ended = self._ended_in(hours)
        parts = self._hours.files.parts
        files = {hour: FilesOfHour(parts(hour), ended.get(hour, NO_SEQUENCES)) for hour in filed}
        work = partial(load_run, self._site, hours, files, self._pending.views(0))
        self._site.worker.submit(work, partial(self._number, self._checkpointer.replay.offset), Priority.DUE)

    def _load_until(self, hour: int) -> None:
        self._hours.loaded = range(self._hours.loaded.start, hour + 1)

    def _ended_of(self, hour: int) -> Sequences:
        return self._ended_in(range(hour, hour + 1)).get(hour, NO_SEQUENCES)

    def _number(self, replay_offset: int, done: Done[LoadedRun]) -> None:
        """Give their subjects the numbers of this server."""
        try:
            run = done.result()
        except Shortage as error:
            # The file is not damaged; the process was short of something. The next tick tries again.
            if str(self._short) != str(error):
                log.warning("load_put_off reason=%r", str(error))
            self._short, self.running = error, False
            return
        self._short, self._hours.loading = None, run.hours
        if self._checkpointer.replay.offset != replay_offset:
            self._read(run.hours)
            return
        numbers = [self._subjects.numbers(loaded.names) for loaded in run.loaded]
        views, kept = self._pending.views(0), self._pending.kept
        if len(run.hours) > 1:
            order = partial(order_run, run, numbers, views, self._ended_in(run.hours))
            self._site.worker.submit(order, partial(self._attach_run, replay_offset, run), Priority.DUE)
            return
        (loaded,) = run.loaded
        work = partial(order_hour, loaded, numbers[0], views, self._ended_of(loaded.hour))
        self._site.worker.submit(work, partial(self._attach, replay_offset, loaded, kept), Priority.DUE)

    def _attach(self, replay_offset: int, loaded: LoadedHour, kept: int, done: Done[list[PreparedRows]]) -> None:
        """Put the rows into the wheel, with the rows that arrived while they were being ordered."""
        prepared, hour = done.result(), loaded.hour
        if self._checkpointer.replay.offset != replay_offset:
            self._read(self._hours.loading)
            return
        self._wheel.add_hour(hour)
        for rows in prepared:
            self._wheel.add_hour(hour, rows)
        self._wheel.insert(without(self._pending.of_hour(hour, kept), self._ended_of(hour)))
        log.info("hour_loaded hour=%s rows=%d", hour_name(hour), self._wheel.len_of(hour))
        self._end(hour, [loaded])

    def _attach_run(self, replay_offset: int, run: LoadedRun, done: Done[Rows]) -> None:
        """Put the rows of hours that have passed into the wheel; no other row of them has come meanwhile."""
        rows = done.result()
        if self._checkpointer.replay.offset != replay_offset:
            self._read(run.hours)
            return
        self._wheel.add_closed(rows)
        first, last = run.hours[0], run.hours[-1]
        log.info("hours_loaded first=%s last=%s rows=%d", hour_name(first), hour_name(last), len(rows))
        self._end(last, run.loaded)

    def _end(self, until: int, loaded: Sequence[LoadedHour]) -> None:
        self.running = False
        self._load_until(until)
        self._hours.loading = range(0)
        self._attached(loaded)
