"""Wait for a condition: poll it, with a deadline. No test sleeps for a time that it hopes is long enough.

`until` waits on a loop, `wait_until` on a thread. Both fail with what the test has to say about the state of things.
`holds_once` is for what a machine that stands still for a moment spoils, and a broken promise spoils each time;
`holds_in_time` is the same where a length of time decides, which each try doubles.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import TypeVar

DEADLINE_S = 30.0  # Far above anything that works, on a machine that is busy with other things.
TRIES = 6
LOOK_S = 0.01
LOOK_ON_LOOP_S = 0.002

Found = TypeVar("Found")
Told = str | Callable[[], object]


async def until(
    condition: Callable[[], bool], what: Told = "the condition holds", within_s: float = DEADLINE_S
) -> None:
    """Poll on a loop until the condition holds; AssertionError at the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, _late(what, within_s)
        await asyncio.sleep(LOOK_ON_LOOP_S)


def wait_until(
    condition: Callable[[], Found],
    what: Told = "the condition holds",
    within_s: float = DEADLINE_S,
    every_s: float = LOOK_S,
) -> Found:
    """Poll on a thread until the condition gives something that is true, and return it; AssertionError at the deadline.

    ``every_s`` is the pause between two looks: longer where one look starts a process.
    """
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, _late(what, within_s)
        time.sleep(every_s)
    return found


def holds_once(judged: Callable[[], None], *spoils: type[Exception]) -> None:
    """Judge, each time from the start, until it holds; AssertionError when it does not in any of some tries.

    ``spoils`` are other errors that a machine which stands still may bring about.
    """
    spoiled: tuple[type[Exception], ...] = (AssertionError, *spoils)
    for left in reversed(range(TRIES)):
        try:
            judged()
            return
        except spoiled:
            if not left:
                raise


def holds_in_time(first: timedelta, judged: Callable[[timedelta], None], *spoils: type[Exception]) -> None:
    """`holds_once` with a length of time, which each try doubles: the first one is fast, the last one patient."""
    lengths = (first * 2**number for number in count())
    holds_once(lambda: judged(next(lengths)), *spoils)


def _late(what: Told, within_s: float) -> str:
    return f"not within {within_s:g} s: {what if isinstance(what, str) else what()}"
