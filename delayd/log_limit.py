"""Log lines whose rate a peer controls: the first few of a cause are written, then one line a minute counts the rest.

Invariant: lines that are left out are counted, and the count is logged a minute later, if `tell_left_out` is called
each second or so. Causes are constants of ours, never a peer's text, so memory is bounded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

LINES_A_MINUTE = 10  # Lines of one cause: enough to see who and why. A flood of them would fill the disk.
MINUTE_S = 60.0

_limits: list[LogLimit] = []


@dataclass(slots=True)
class _Cause:
    began: float
    lines: int = 0
    left_out: int = 0


class LogLimit:
    """The lines of one logger that peers can provoke."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._causes: dict[str, _Cause] = {}
        _limits.append(self)

    def warning(self, cause: str, message: str, *values: object) -> None:
        """Log a line of a cause, unless it had its share of this minute."""
        self._log(logging.WARNING, cause, message, values)

    def critical(self, cause: str, message: str, *values: object) -> None:
        """As `warning`, for lines that an operator must see."""
        self._log(logging.CRITICAL, cause, message, values)

    def info(self, cause: str, message: str, *values: object) -> None:
        """As `warning`, for lines that report no fault."""
        self._log(logging.INFO, cause, message, values)

    def error(self, cause: str, message: str, *values: object) -> None:
        """As `warning`, for lines that ask for somebody to look."""
        self._log(logging.ERROR, cause, message, values)

    def tell(self) -> None:
        """Log how many lines were left out in minutes that are over."""
        now, log = self._clock(), self._logger
        for cause, found in list(self._causes.items()):
            if now - found.began >= MINUTE_S:
                del self._causes[cause]
                if found.left_out:
                    log.warning("lines_left_out cause=%s count=%d", cause, found.left_out)

    def forget(self) -> None:
        """Begin anew."""
        self._causes.clear()

    def _log(self, level: int, cause: str, message: str, values: tuple[object, ...]) -> None:
        found = self._causes.get(cause)
        if found is not None and self._clock() - found.began >= MINUTE_S:
            self.tell()
            found = None
        if found is None:
            found = self._causes[cause] = _Cause(self._clock())
        if found.lines < LINES_A_MINUTE:
            found.lines += 1
            self._logger.log(level, message, *values)
        else:
            found.left_out += 1


def forget_all() -> None:
    """Forget all counts, as tests need that look for a line."""
    for limit in _limits:
        limit.forget()


def tell_left_out() -> None:
    """Log, for every limit of this process, how many lines it left out; a server calls this each second."""
    for limit in _limits:
        limit.tell()
