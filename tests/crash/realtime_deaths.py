"""Deaths of a realtime server in memory: a life that ends in a crash, and the worlds in which the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from delayd.testing.clock import SimClock
from delayd.testing.disk import Crash, Faults, MemoryDisk
from delayd.testing.state import MemoryState
from tests.crash.harness import look_of, ways
from tests.worlds.realtime import World

Told = TypeVar("Told")


class Life(NamedTuple, Generic[Told]):
    """What a life leaves, and what it told and was told."""

    disk: MemoryDisk
    state: MemoryState
    clock: SimClock
    told: Told


def live(
    workload: Callable[[World, Told], None], told: Told, settings: Mapping[str, int], crash_at: int | None = None
) -> Life[Told]:
    """One life of a workload, to its end or to its crash."""
    disk = MemoryDisk(Faults(crash_at=crash_at))
    state, clock = MemoryState(disk), SimClock()
    try:
        workload(World(disk, state, clock, settings=settings), told)
    except Crash:
        pass
    return Life(disk, state, clock, told)


def rebooted(clock: SimClock) -> SimClock:
    """The clock of the next life, on a machine that it has for itself: others go on from the same death."""
    machine = replace(clock.machine)
    machine.reboot(0)
    return SimClock(machine=machine, previous=clock.restart_evidence())


def check_each_next(life: Life[Told], settings: Mapping[str, int], check: Callable[[World, Told], None]) -> None:
    """Start again on each disk that a crash may leave, and check what is there against what was told, of which each
    check has a copy. AssertionError says how it died.
    """
    disk, state, clock, told = life
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
