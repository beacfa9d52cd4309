"""Deaths of a realtime server in memory: a life that ends in a crash, and the worlds in which the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TypeVar

from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from tests.crash.harness import look_of, ways
from tests.worlds.realtime import World

Told = TypeVar("Told")


def rebooted(clock: SimClock) -> SimClock:
    """The clock of the next life, on a machine that it has for itself: others go on from the same death."""
    machine = replace(clock.machine)
    machine.reboot(0)
    return SimClock(machine=machine, previous=clock.restart_evidence())


def check_each_next(
    disk: MemoryDisk,
    state: MemoryState,
    clock: SimClock,
    settings: Mapping[str, int],
    check: Callable[[World, Told], None],
    told: Told,
) -> None:
    """Start again on each disk that a crash may leave, and check what is there against what was ``told``, of which each
    check has a copy. AssertionError says how it died.
    """
    seen: set[object] = set()
    for way in ways(seeds=2):
        found = way.die(disk)
        look = look_of(found)
        if look in seen:
            continue
        seen.add(look)
        try:
            check(World(found, state.after_crash(found), rebooted(clock), settings=settings), deepcopy(told))
        except (AssertionError, LookupError) as error:
            died_at = len(disk.operations)
            raise AssertionError(f"died at {died_at}, {disk.operations[-1]}, {way}: {error!r}") from error
