"""File watch: schedule logs, and the files of sealed hours, that someone removes or cuts under a running server.

Nothing of them is open, so without a look a file that is gone shows when its hour is loaded, or in an audit. Invariant:
a look asks the system for the sizes of a few files; what it finds counts when the hour's files are still the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from delayd.clock import Clock
from delayd.delay.hour_table import HourFile, HourTable
from delayd.delay.quarantine import Kind, Quarantine
from delayd.disk import Disk, open_named
from delayd.errors import DamagedData, DataError
from delayd.executor import Done, Executor, Priority
from delayd.hours import hour_from_name, hour_name
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES

LOOK_MS = 30_000
HOURS_A_LOOK = 1_024  # Two files each, some microseconds: two years of hours are looked at within ten minutes.

Looked = list[tuple[int, HourFile, DamagedData | None]]
"""Hours that were looked at, their files as they were counted then, and what is wrong with them."""


class FileWatch:
    """Looks at some hours now and then; for the loop alone. ``damaged`` sets an hour's schedule log aside."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        clock: Clock,
        worker: Executor,
        hours: HourTable,
        quarantine: Quarantine,
        damaged: Callable[[int, DamagedData], None],
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self._worker = worker
        self._hours = hours
        self._quarantine = quarantine
        self._damaged = damaged
        self._due_ms = clock.monotonic_ms() + LOOK_MS
        self._behind = -1  # The hour that was looked at last.
        self._looking = False

    def step(self) -> None:
        """Look at the next hours when it is time."""
        if self._clock.monotonic_ms() >= self._due_ms and not self._looking:
            self._due_ms = self._clock.monotonic_ms() + LOOK_MS
            self.look()

    def look(self) -> None:
        """Look at the next hours, and at those that are set aside."""
        numbers = self._hours.rows["hour"]
        begin = int(np.searchsorted(numbers, self._behind, side="right"))
        part: list[int] = numbers[begin : begin + HOURS_A_LOOK].tolist()
        self._behind = part[-1] if len(part) == HOURS_A_LOOK else -1
        aside = [hour_from_name(entry.name) for entry in self._quarantine if entry.kind is Kind.SEALED]
        # As the loop names them: the worker never reads the table.
        wanted = [(hour, self._hours.get(hour)) for hour in dict.fromkeys([*aside, *part])]
        self._looking = True
        work = partial(_look, self._disk, self._folder, wanted, self._worker.give_way)
        self._worker.submit(work, self._looked, Priority.SPARE)

    def _looked(self, done: Done[Looked]) -> None:
        self._looking = False
        try:
            found = done.result()
        except DataError:
            return  # This process can't tell now; the next look may.
        for hour, file, damage in found:
            name = hour_name(hour)
            if self._hours.get(hour) != file or damage is None or file.removed:
                self._quarantine.lift(Kind.SEALED, name)
            elif file.sealed:
                self._quarantine.put(Kind.SEALED, name, damage)
            elif self._quarantine.get(Kind.SCHEDULE, name) is None:
                self._damaged(hour, damage)


def _look(disk: Disk, folder: str, wanted: list[tuple[int, HourFile]], give_way: Callable[[], None]) -> Looked:
    found: Looked = []
    for hour, file in wanted:
        give_way()
        damage = None
        if file.length and not file.removed:
            damage = _damage(disk, schedule_path(folder, hour), FILE_HEADER_BYTES + file.length)
            if damage is None and file.sealed:
                damage = _damage(disk, dispatch_path(folder, hour), FILE_HEADER_BYTES)
        found.append((hour, file, damage))
    return found


def _damage(disk: Disk, path: str, size: int) -> DamagedData | None:
    """What is wrong with a file that should have so many bytes at least."""
    try:
        file = open_named(disk, path)
    except FileNotFoundError:
        return DamagedData(path, 0, "the file was removed under the running server")
    except DamagedData as error:
        return error
    try:
        missing = size - file.size()
        return DamagedData(path, file.size(), f"it is {missing} bytes shorter than it was") if missing > 0 else None
    finally:
        file.close()
