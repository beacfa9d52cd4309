"""What an operator gives up of an hour, whatever is under way: as much is lost as was said, and nothing comes twice."""

from __future__ import annotations

import pytest

from delayd.delay.books.outcomes import read_outcomes
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.hour import Outcome, dispatch_path, schedule_path
from delayd.log.segment import FileKind, open_segment
from delayd.machine.alarms import LOOK_MS
from delayd.testing.clock import START_MS
from delayd.testing.disk import MemoryDisk
from tests.unit.delay.answers import decided
from tests.worlds.delay import FOLDER, World, wanted

HOUR = hour_of_ms(START_MS)
DISPATCH, SCHEDULE = f"dispatch/{hour_name(HOUR)}", f"schedule/{hour_name(HOUR)}"


def flip(disk: MemoryDisk, path: str) -> None:
    file = disk.open(path, write=True)
    at = file.size() // 2
    file.pwritev([bytes([file.pread(1, at)[0] ^ 1])], at)


def sent_and_later() -> World:
    """Some messages were delivered after they were filed, and their target knows that this is recorded."""
    world = World()
    world.send([*wanted(2, 2_000, "sent"), *wanted(2, 600_000, "later")])
    world.settle()
    world.checkpoint()
    for name in ("sent-too", "sent-last"):
        world.pass_ms(3_000)
        world.send(wanted(2, 100, name))
    world.pass_ms(3_000)
    return world


def told_once(world: World) -> list[Outcome]:
    """What became of the rows of the hour by its dispatch log, which has each of them once."""
    segment = open_segment(
        world.disk, dispatch_path(FOLDER, HOUR), FileKind.DISPATCH, world.core.site.identity.log_id, write=False
    )
    rows = read_outcomes(segment)
    assert len(rows.sequences) == len(set(rows.sequences.tolist()))
    return [Outcome(int(rows.parts[part]["outcome"])) for part in rows.part_of.tolist()]


def nothing_came_twice(world: World) -> bool:
    copies = [body for target in world.outside.targets.values() for kept in target.log for body in kept.bodies]
    return len(copies) == len(set(copies))


def live_on(world: World) -> None:
    world.pass_ms(2_000)
    world.clock.advance(600_000)
    world.pass_ms(60_000)


def damaged_at_the_start() -> World:
    remains = sent_and_later().remains()
    flip(remains.disk, dispatch_path(FOLDER, HOUR))
    life = World(remains)
    life.settle()
    return life


def test_a_drop_concerns_one_file_of_its_hour() -> None:
    life = damaged_at_the_start()
    life.disk.remove(schedule_path(FOLDER, HOUR))
    life.clock.advance(LOOK_MS)
    life.pass_ms(1_000)
    assert {entry.id for entry in life.core.memory.quarantine} == {DISPATCH, SCHEDULE}
    assert decided(life, "drop", DISPATCH)[0]
    assert {entry.id for entry in life.core.memory.quarantine} == {SCHEDULE}
    assert decided(life, "drop", SCHEDULE)[0] and not len(life.core.memory.quarantine)
    live_on(life)
    assert nothing_came_twice(life)


def test_rule_L5_a_dispatch_log_that_is_dropped_while_its_hour_cant_be_read_sends_nothing_twice() -> None:
    life = damaged_at_the_start()
    life.disk.faults.fail_reads["/schedule/"] = 1 << 40
    assert decided(life, "drop", DISPATCH)[0]
    life.disk.faults.fail_reads.clear()
    life.pass_ms(31_000)
    live_on(life)
    assert nothing_came_twice(life)
    assert Outcome.IN_DOUBT in told_once(life)


@pytest.mark.parametrize("steps", range(0, 60, 2))
def test_rule_L5_a_dispatch_log_that_is_dropped_while_its_server_dies_sends_nothing_twice(steps: int) -> None:
    life = damaged_at_the_start()
    told: list[bool] = []
    life.core.repair.decisions.drop(DISPATCH, lambda done, text: told.append(done))
    for _ in range(steps):
        life.core.wake()
        if move := life.next_move():
            move()
    again = life.after_crash(None)
    live_on(again)
    if told or not len(again.core.memory.quarantine):
        assert not len(again.core.memory.quarantine) and Outcome.IN_DOUBT in told_once(again)
    else:
        assert decided(again, "drop", DISPATCH)[0]
        live_on(again)
    assert not list(again.core.fence.waits()), "an hour that was given up makes nobody a restored server"
    assert nothing_came_twice(again)
    once_more = again.after_crash(None)
    live_on(once_more)
    assert nothing_came_twice(once_more) and not len(once_more.core.memory.quarantine)


def test_rule_L5_a_dispatch_log_that_is_dropped_under_a_live_server_sends_nothing_twice() -> None:
    world = sent_and_later()
    world.clock.advance(600_000)
    world.pass_ms(5_000)
    world.send(wanted(2, 100, "at-last"))
    world.pass_ms(5_000)
    flip(world.disk, dispatch_path(FOLDER, HOUR))
    world.clock.advance(HOUR_MS)
    world.pass_ms(5_000)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    assert world.core.memory.quarantine.find(DISPATCH)
    assert decided(world, "drop", DISPATCH)[0]
    world.pass_ms(5_000)
    assert told_once(world).count(Outcome.IN_DOUBT) == 4, "the others are filed as handed over"
    again = world.after_crash(None)
    live_on(again)
    assert nothing_came_twice(again)
