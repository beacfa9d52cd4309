"""Counting what code does, so that a test fails when a path grows: Python calls, and operations of the disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from delayd.testing.disk import MemoryDisk


def calls(do: Callable[[], object]) -> int:
    """How many Python functions are called."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count


def operations(disk: MemoryDisk, do: Callable[[], object]) -> list[str]:
    """What is done to the disk, without the places."""
    before = len(disk.operations)
    do()
    return [operation.split()[0] for operation in disk.operations[before:]]
