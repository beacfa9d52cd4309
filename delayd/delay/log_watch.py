"""Log watch: files of the message log that someone removes or cuts under a running server (rule L10).

An open descriptor reads a removed file to its end, so nothing is lost until this process ends: a checkpoint files what
the file held, and new groups go to another one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from delayd.clock import Clock
from delayd.delay.quarantine import Kind, Quarantine
from delayd.errors import DamagedData, DataError
from delayd.executor import Done, Executor
from delayd.log.log import Log

LOOK_MS = 30_000

Told = Callable[[bool, str], None]


class LogWatch:
    """Looks for the files now and then; for the loop alone."""

    def __init__(
        self,
        message_log: Log,
        commit: Executor,
        worker: Executor,
        clock: Clock,
        quarantine: Quarantine,
        checkpoint: Callable[[], None],
    ) -> None:
        self._log = message_log
        self._commit = commit
        self._worker = worker
        self._clock = clock
        self._quarantine = quarantine
        self._checkpoint = checkpoint
        self._due_ms = clock.monotonic_ms() + LOOK_MS

    def step(self) -> None:
        """Look when it is time."""
        if self._clock.monotonic_ms() >= self._due_ms:
            self.look()

    def look(self, told: Told | None = None) -> None:
        """Look now; ``told`` hears whether all is there."""
        self._due_ms = self._clock.monotonic_ms() + LOOK_MS
        # Retention removes files on the same thread: what it has taken out of the log is not looked for.
        self._worker.submit(self._log.missing, partial(self._looked, told))

    def _looked(self, told: Told | None, done: Done[list[DamagedData]]) -> None:
        try:
            found = {_name(damage): damage for damage in done.result()}
        except DataError as error:
            # This process can't tell now; the next look may.
            if told is not None:
                told(False, str(error))
            return
        known = {entry.name for entry in self._quarantine if entry.kind is Kind.LOG}
        for name in known - found.keys():
            self._quarantine.lift(Kind.LOG, name)
        for name, damage in found.items():
            self._quarantine.put(Kind.LOG, name, damage)
        if found.keys() - known:
            self._commit.submit(partial(self._log.roll, self._clock.now_ms()), self._rolled)
        if told is not None:
            told(not found, "; ".join(map(str, found.values())) or "all files of the message log are there")

    def _rolled(self, done: Done[None]) -> None:
        try:
            done.result()
        except DataError:
            # A full disk, of which the intake tells: the next look tries again.
            for entry in self._quarantine:
                if entry.kind is Kind.LOG:
                    self._quarantine.lift(Kind.LOG, entry.name)
            return
        self._checkpoint()


def _name(error: DamagedData) -> str:
    return error.path.rpartition("/")[2].removesuffix(".log")
