"""Ctrl-C while messages are handed on: it ends a wait, and never falls between a message and its acknowledgement.

Invariant: outside of `at_once` an interrupt is only remembered; it is raised where the caller looks for it.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Self


class Interrupts:
    """Holds back KeyboardInterrupt while its `with` block runs; does nothing where SIGINT is ignored."""

    def __init__(self) -> None:
        self._heard = False
        self._at_once = False
        self._holds = False

    def __enter__(self) -> Self:
        self._holds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in here as it comes, and first what was held back."""
        self._at_once = True
        try:
            if self._heard:
                raise KeyboardInterrupt
            yield
        finally:
            self._at_once = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
        if self._at_once:
            raise KeyboardInterrupt
