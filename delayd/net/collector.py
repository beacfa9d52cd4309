"""Collector: runs Python's garbage collector when nobody waits.

Invariant: no collection starts by itself inside a request. Memory in cycles is still bounded: above a hard limit of new
objects a collection runs at the next tick, quiet or not.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

TICK_S = 0.1
YOUNG_OBJECTS_MIN = 2_000  # Fewer new containers than this are not worth a pass, which takes some 10 us for each 1,000.
YOUNG_OBJECTS_MAX = 200_000  # About 20 MB of small containers: these are collected even if it is never quiet.
OLD_TICKS_MIN = 600  # At least a minute passes between walks through everything except the objects of the start.
OLD_TICKS_MAX = 6_000  # After this the walk is done even if it is never quiet.


def always() -> bool:
    """Every moment is quiet."""
    return True


class QuietCollector:
    """Freezes the objects that exist now, and collects later ones at ticks of the loop at which `quiet()` holds."""

    __slots__ = ("_handle", "_loop", "_quiet", "_ticks")

    def __init__(self, loop: asyncio.AbstractEventLoop, quiet: Callable[[], bool] = always) -> None:
        self._loop = loop
        self._quiet = quiet
        self._ticks = 0
        gc.collect()
        gc.freeze()
        gc.disable()
        self._handle = loop.call_later(TICK_S, self._tick)

    def close(self) -> None:
        """End the ticks, because the process ends; nothing is collected any more. Python's own last walk through all
        objects would take a tenth of a second of a processor.
        """
        self._handle.cancel()
        gc.freeze()

    def _tick(self) -> None:
        self._handle = self._loop.call_later(TICK_S, self._tick)
        self._ticks += 1
        young = gc.get_count()[0]
        quiet = self._quiet()
        if self._ticks >= (OLD_TICKS_MIN if quiet else OLD_TICKS_MAX):
            self._ticks = 0
            gc.collect()
        elif young >= (YOUNG_OBJECTS_MIN if quiet else YOUNG_OBJECTS_MAX):
            gc.collect(1)
