"""Log watch: it notices files of a log that someone removes, replaces or cuts under a running server, and tries files
again that a start left out (rule L10).

An open descriptor reads a removed file to its end, so nothing is lost until this process ends. A server keeps the file
open that it appends to, and the ones that it used last (`delayd.machine.disk`). New groups go to another
file, and the server is told, so that it can write elsewhere what the file held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from delayd.errors import DamagedData, DataError
from delayd.log.log import Found, Log
from delayd.log.segment import Segment
from delayd.machine.clock import Clock
from delayd.machine.executor import Done, Executor, Priority

log = logging.getLogger(__name__)

LOOK_MS = 30_000

Told = Callable[[bool, str], None]
"""Called with whether all files are there, and what is wrong with those that are not."""
Append = Callable[[Callable[[], None], Callable[[Done[None]], None]], object]
"""Runs a job on the thread that appends to the log, and calls back on the loop."""


@dataclass(frozen=True, slots=True)
class OnFiles:
    """What a server does about the files of a log.

    ``put`` is called with the name of a file that is gone or changed, ``lift`` when it is whole again or not needed any
    more, and ``rolled`` when such files are new and groups go to another file.
    """

    put: Callable[[str, DamagedData], object]
    lift: Callable[[str], object]
    rolled: Callable[[], None]


class LogWatch:
    """Looks for the files of one log now and then; for the loop alone."""

    def __init__(self, message_log: Log, append: Append, worker: Executor, clock: Clock, on_files: OnFiles) -> None:
        self._log = message_log
        self._append = append
        self._worker = worker
        self._clock = clock
        self._on_files = on_files
        self._known: dict[str, DamagedData] = {}
        self._settled: set[str] = set()  # Files that are not appended to any more, and of which the server was told.
        self._due_ms = clock.monotonic_ms() + LOOK_MS
        for damage in message_log.lost:
            self._set_aside(_name(damage), damage)
            self._settled.add(_name(damage))

    def __iter__(self) -> Iterator[DamagedData]:
        return iter(self._known.values())

    @property
    def due_ms(self) -> int:
        """When the next look is due, in monotonic ms."""
        return self._due_ms

    def step(self) -> None:
        """Look when it is time."""
        if self._clock.monotonic_ms() >= self._due_ms:
            self.look()

    def stood_still(self, ms: int) -> None:
        """No file could change for so long: the next look comes so much later."""
        self._due_ms += ms

    def look(self, told: Told | None = None) -> None:
        """Look now; with ``told`` removed files are written again, and it is called with whether all files are
        there.
        """
        self._due_ms = self._clock.monotonic_ms() + LOOK_MS
        # Retention removes files on the same thread, so a file that it has taken out of the log is not looked for. A
        # removed file is written again only if an operator asks for it: it may have been removed on purpose.
        work = partial(self._log.look, self._worker.give_way, write_again=told is not None)
        self._worker.submit(work, partial(self._looked, told), Priority.SPARE)

    def _looked(self, told: Told | None, done: Done[list[Found]]) -> None:
        try:
            found = done.result()
        except DataError as error:
            # The process can't tell now; the next look may.
            if told is not None:
                told(False, str(error))
            return
        damaged = {_name(each.damage): each for each in found if each.whole is None}
        for name in self._known.keys() - {_name(each.damage) for each in found}:
            self._take_back(name)
        for name, each in damaged.items():
            self._set_aside(name, each.damage)
        if damaged.keys() - self._settled:
            roll = any(self._log.is_last(each.segment) for each in damaged.values())
            work = partial(self._log.roll, self._clock.now_ms()) if roll else _nothing
            self._append(work, partial(self._settle, set(damaged)))
        whole = [each for each in found if each.whole is not None]
        if whole:
            self._append(partial(self._adopt, whole), partial(self._adopted, whole, told, damaged))
        elif told is not None:
            _tell(told, damaged)

    def _adopt(self, whole: list[Found]) -> None:
        for each in whole:
            self._log.adopt(each)

    def _adopted(self, whole: list[Found], told: Told | None, damaged: dict[str, Found], done: Done[None]) -> None:
        done.result()
        for each in whole:
            self._take_back(_name(each.damage))
        if told is not None:
            _tell(told, damaged)

    def _settle(self, names: set[str], done: Done[None]) -> None:
        try:
            done.result()
        except DataError:
            return  # The disk is full, which the appending thread logs: the next look tries again.
        self._settled |= names
        self._on_files.rolled()

    def _set_aside(self, name: str, damage: DamagedData) -> None:
        self._known[name] = damage
        self._on_files.put(name, damage)

    def _take_back(self, name: str) -> None:
        self._settled.discard(name)
        if self._known.pop(name, None) is not None:
            self._on_files.lift(name)


def write_again(segments: Iterable[Segment]) -> bool:
    """Write removed files again from their open descriptors while these exist: nothing else holds their contents.

    Returns False when a later try may do what could not be done now.
    """
    done = True
    for segment in segments:
        if segment.lost is not None or segment.disk.exists(segment.path):
            continue
        try:
            segment.write_again()
            log.critical("file_written_again path=%s", segment.path)
        except DataError as error:
            log.critical("file_not_written_again path=%s reason=%r", segment.path, str(error))
            # Without a descriptor nothing has the bytes any more.
            done &= isinstance(error, DamagedData)
    return done


def _tell(told: Told, damaged: dict[str, Found]) -> None:
    told(not damaged, "; ".join(str(each.damage) for each in damaged.values()) or "all files of this log are there")


def _nothing() -> None:
    """Nothing is appended to a damaged file, so no roll is needed."""


def _name(error: DamagedData) -> str:
    return error.path.rpartition("/")[2].removesuffix(".log")
