"""Counting what code does, so that a test fails when a path grows: Python calls, lines, and operations of the disk."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from delayd.testing.disk import MemoryDisk

if TYPE_CHECKING:
    from _typeshed import TraceFunction


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector ends, such as objects of an earlier test, is no part of what is counted."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def calls(do: Callable[[], object]) -> int:
    """How many Python functions are called; an adapter of tests/worlds is no part of a server."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and not frame.f_code.co_filename.endswith("_adapter.py")

    with _no_collection():
        sys.setprofile(seen)
        try:
            do()
        finally:
            sys.setprofile(None)
    return count


def lines(do: Callable[[], object]) -> int:
    """How many lines of Python run: loops that call nothing are counted by them."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return seen

    before = sys.gettrace()
    with _no_collection():
        sys.settrace(seen)
        try:
            do()
        finally:
            sys.settrace(before)
    return count


def operations(disk: MemoryDisk, do: Callable[[], object]) -> list[str]:
    """What is done to the disk, without the places."""
    before = len(disk.operations)
    do()
    return [operation.split()[0] for operation in disk.operations[before:]]
