"""Seal mending: it opens a damaged seal log again and again until it is whole (rules L9, L10).

Nothing is sealed meanwhile, and an hour that is not sealed is not deleted.
"""

from collections.abc import Callable
from typing import Protocol

from delayd.clock import Clock
from delayd.delay.books.seal_log import SealLog
from delayd.delay.quarantine import Decided, Entry, Kind, Quarantine
from delayd.errors import DamagedData, DataError
from delayd.executor import Done, Executor

RETRY_MS = 30_000  # After a try that failed; one reads the end of the file.
NAME = "log"  # Names the entry of the quarantine: there is one seal log.


class Sealing(Protocol):
    """What seals hours, with a seal log or without one."""

    def set_seals_aside(self) -> None:
        """Seal nothing more until `use`."""

    def use(self, seals: SealLog) -> None:
        """Seal with a log that was damaged and is whole again."""


class SealMending:
    """Opens the seal log again, each RETRY_MS or when an operator asks for it."""

    def __init__(
        self,
        open_anew: Callable[[], SealLog],
        sealing: Sealing,
        quarantine: Quarantine,
        worker: Executor,
        clock: Clock,
    ) -> None:
        self._open_anew = open_anew
        self._sealing = sealing
        self._quarantine = quarantine
        self._worker = worker
        self._clock = clock
        self._opening = False
        self._told: list[Decided] = []  # Operators who wait for the result of the try under way.
        self._due_ms = clock.monotonic_ms() + RETRY_MS

    def damaged(self, error: DamagedData) -> None:
        """Seal nothing more until the file is back."""
        self._sealing.set_seals_aside()
        self._quarantine.put(Kind.SEAL, NAME, error)

    def step(self) -> None:
        """Try again if that is due."""
        if self._quarantine.get(Kind.SEAL, NAME) and self._clock.monotonic_ms() >= self._due_ms:
            self.try_now()

    def decide(self, entry: Entry, drop: bool, done: Decided) -> None:
        """Open the file now, by an operator's word."""
        self.try_now(done)

    def try_now(self, told: Decided | None = None) -> None:
        """Try to open the file; ``told`` is called with the result."""
        if told is not None:
            self._told.append(told)
        if self._opening:
            return
        self._opening = True
        self._due_ms = self._clock.monotonic_ms() + RETRY_MS

        def opened(done: Done[SealLog]) -> None:
            self._opening = False
            mended, message = True, "the seal log is whole again"
            try:
                self._sealing.use(done.result())
                self._quarantine.lift(Kind.SEAL, NAME)
            except DataError as error:
                mended, message = False, str(error)
                if isinstance(error, DamagedData):
                    self._quarantine.put(Kind.SEAL, NAME, error)
            told, self._told = self._told, []
            for tell in told:
                tell(mended, message)

        self._worker.submit(self._open_anew, opened)
