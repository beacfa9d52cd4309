"""A full disk under each file of a delay server: refused by name, pending delivered, nothing lost, it recovers (L8)."""

import logging
from collections.abc import Iterable, Sequence

import pytest

from delayd.delay.core import DelayCore
from delayd.errors import DiskFull, DiskReserve
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.schedule import schedule_path
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.state import MemoryState
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import FOLDER, World, new_world, wanted

HOUR = hour_of_ms(START_MS)


class FullState(MemoryState):
    """LMDB on a disk that may be full: then a transaction is not there at all."""

    full = False

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        if self.full:
            raise DiskFull("/data/delay/state.lmdb")
        super().commit(puts, removes)


def on_full_state(**settings: int) -> tuple[World, FullState]:
    remains = new_world()
    state = FullState(remains.disk)
    found = type(remains)(remains.disk, state, remains.outside, remains.clock)
    return World(found, core=DelayCore, seed=0, **settings), state


def fill(world: World, left: int = 0) -> None:
    world.disk.capacity_bytes = world.disk.used_bytes + left


def free(world: World) -> None:
    world.disk.capacity_bytes = CAPACITY_BYTES
    # A file that could not be created was closed and removed as it was.
    world.disk.closed_unsynced.clear()


def restarted(world: World, way: PowerLoss = PowerLoss.ALL_LOST) -> World:
    return World(world.remains(way), core=DelayCore, seed=1, **world.settings)


@pytest.mark.parametrize("left", [0, 60, 300, 4_000])
def test_rule_L8_what_is_pending_is_delivered_and_recorded_when_space_returns(left: int) -> None:
    world = World()
    world.send(wanted(20, 500, "a", every_ms=200))
    world.settle()
    fill(world, left)
    refused = world.send(wanted(3, 600, "b"))
    world.pass_ms(6_000)
    if left < 300:
        assert [(number, type(error)) for number, error in world.outside.refused] == [(refused, DiskReserve)]
    free(world)
    world.pass_ms(2_000)
    world.drain()
    world.check_books()
    world.check_sealing()


def test_rule_L8_at_the_reserve_everything_pending_is_delivered_on_time() -> None:
    world = World(free_bytes_far=3_000_000, free_bytes_all=2_000_000)
    world.send(wanted(20, 500, "a", every_ms=200))
    world.settle()
    fill(world, 1_000_000)
    world.look_around()
    world.send(wanted(3, 600, "b"))
    world.pass_ms(5_000)
    ((_, error),) = world.outside.refused
    assert isinstance(error, DiskReserve) and "free space there" in str(error) and error.retry_after_ms > 0
    assert not world.missing()
    world.check_logs()
    free(world)
    world.drain()
    world.check_books()


def test_rule_L8_a_checkpoint_that_finds_no_space_in_an_hours_file_is_repeated_until_it_does() -> None:
    world = World(checkpoint_every_ms=2_000)
    world.send([*wanted(9, 1_000, "near"), *wanted(50, 2 * HOUR_MS, "far"), *wanted(50, 30 * HOUR_MS, "farther")])
    world.settle()
    fill(world, 100)
    world.pass_ms(10_000)
    assert world.core.counters()["replay_offset"] == 0 and world.core.counters()["pending_rows"] == 109
    again = restarted(world)
    assert again.core.counters()["pending_rows"] == 109
    free(again)
    again.pass_ms(4_000)
    assert again.core.counters()["pending_rows"] == 0
    assert again.disk.exists(schedule_path(FOLDER, HOUR + 30))
    again.drain(40 * HOUR_MS)
    again.check_books()
    again.check_sealing()


def test_a_full_disk_is_told_when_it_begins_and_when_it_ends_and_not_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world = World(checkpoint_every_ms=1_000, free_bytes_far=3_000, free_bytes_all=1_000)
    world.send(wanted(20, 500, "a", every_ms=300))
    world.settle()
    for left in (2_000, 0):
        fill(world, left)
        world.pass_ms(4_000)
    free(world)
    world.pass_ms(4_000)
    said = [record.getMessage().partition(" free_bytes")[0] for record in caplog.records]
    told = [line for line in said if line.startswith(("sends_taken", "dispatch_logs", "checkpoint_put_off"))]
    assert told.count("dispatch_logs_full hours=1") == told.count("dispatch_logs_full hours=0") == 1
    assert [line for line in told if line.startswith("sends")] == [
        "sends_taken which=near",
        "sends_taken which=none",
        "sends_taken which=all",
    ]
    assert sum(line.startswith("checkpoint_put_off") for line in told) <= 2, "once for each thing that found no space"
    assert not world.missing()
    world.check_books()


def test_rule_L8_a_state_that_finds_no_space_holds_up_checkpoints_only() -> None:
    world, state = on_full_state(checkpoint_every_ms=2_000)
    world.send(wanted(9, 1_000, "a"))
    world.settle()
    state.full = True
    world.send([*wanted(9, 3_000, "b"), *wanted(5, HOUR_MS, "far")])
    world.pass_ms(8_000)
    assert world.core.counters()["replay_offset"] == 0
    assert len(world.missing()) == 5
    state.full = False
    world.pass_ms(4_000)
    assert world.core.counters()["pending_rows"] == 0
    world.drain(2 * HOUR_MS)
    world.check_books()
    world.check_sealing()


def test_rule_L8_an_hour_that_finds_no_space_for_its_seal_is_sealed_and_deleted_when_it_does() -> None:
    world, state = on_full_state(retention_hours=1, checkpoint_every_ms=2_000)
    world.send(wanted(9, 1_000, "a"))
    world.pass_ms(2_000)
    world.clock.advance(HOUR_MS)
    world.pass_ms(5_000)
    state.full = True
    _sweep(world)
    assert not world.hours().get(HOUR).sealed
    state.full = False
    _sweep(world)
    assert world.hours().get(HOUR).sealed
    world.clock.advance(2 * HOUR_MS)
    world.pass_ms(3_000)
    state.full = True
    _sweep(world)
    assert HOUR in world.hours()
    state.full = False
    _sweep(world)
    assert HOUR not in world.hours()
    world.check_logs()


def test_rule_L8_a_server_starts_on_a_full_disk_and_delivers_what_is_pending() -> None:
    world = World()
    world.send([*wanted(5, 1_000, "a"), *wanted(5, 20_000, "b")])
    world.pass_ms(2_000)
    fill(world)
    again = restarted(world)
    again.core.reserve(0)
    again.send(wanted(1, 500, "c"))
    again.pass_ms(3_000)
    assert again.outside.refused
    free(again)
    again.drain()
    again.check_books()


def _sweep(world: World) -> None:
    for _ in range(5):
        world.core.sweep()
        world.settle()
        world.pass_ms(3_000)
