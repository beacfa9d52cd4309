"""What is set aside: listed, released, and given up by an operator's word (rules L5, L10)."""

from __future__ import annotations

import pytest

from delayd.delay.books.dispatch_logs import read_outcomes
from delayd.delay.quarantine import schedule_beside_path
from delayd.errors import BadArgument
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.dispatch import Outcome
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.log.segment import FileKind, open_segment
from delayd.testing.clock import START_MS
from delayd.testing.disk import MemoryDisk
from tests.memory_files import content, files, put
from tests.named_commands import check_commands
from tests.unit.delay.answers import decided
from tests.worlds.delay import FOLDER, World, wanted

HOUR = hour_of_ms(START_MS)
FAR = HOUR + 5


def outcomes(world: World, hour: int) -> list[Outcome]:
    path = dispatch_path(FOLDER, hour)
    segment = open_segment(world.disk, path, FileKind.DISPATCH, world.core.identity.log_id, write=False)
    rows = read_outcomes(segment)
    return [Outcome(int(rows.parts[part]["outcome"])) for part in rows.part_of.tolist()]


def test_what_is_not_set_aside_can_not_be_decided_on() -> None:
    world = World()
    for action in (world.core.release, world.core.drop):
        with pytest.raises(BadArgument, match="nothing is quarantined as 'schedule/2027011513'"):
            action("schedule/2027011513", lambda done, text: None)


def test_a_schedule_log_that_is_dropped_loses_what_only_it_held_and_the_hour_goes_on() -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "lost"))
    world.settle()
    world.checkpoint()
    path, id_ = schedule_path(FOLDER, FAR), f"schedule/{hour_name(FAR)}"
    world.disk.remove(path)
    world.send(wanted(2, 5 * HOUR_MS, "beside"))
    world.settle()
    world.checkpoint()
    assert world.disk.exists(schedule_beside_path(FOLDER, FAR)) and [e.id for e in world.core.quarantine] == [id_]
    done, text = decided(world, "release", id_)
    assert not done and "the file is gone" in text
    (wait,) = world.core.waits()
    assert wait.what == f"3 messages: {id_}" and f"delayd mend take {id_}" in wait.command
    check_commands(wait.command)
    done, _ = decided(world, "drop", id_)
    assert done and not len(world.core.quarantine) and world.hours().get(FAR).rows == 2
    again = world.after_crash(None)
    again.clock.advance(5 * HOUR_MS - 10_000)
    again.pass_ms(15_000)
    assert again.missing() == {b"lost-0", b"lost-1", b"lost-2"}
    again.check_logs()


def test_a_dispatch_log_that_is_dropped_puts_what_may_have_been_sent_in_doubt_and_the_rest_is_sent() -> None:
    world = World()
    world.send([*wanted(2, 500, "sent"), *wanted(2, 600_000, "later")])
    world.pass_ms(2_000)
    world.checkpoint()
    remains = world.remains()
    remains.disk.remove(dispatch_path(FOLDER, HOUR))
    life = World(remains)
    life.send(wanted(2, 600_000, "new"))
    life.settle()
    done, _ = decided(life, "drop", f"dispatch/{hour_name(HOUR)}")
    assert done and not len(life.core.quarantine)
    life.clock.advance(600_000)
    life.pass_ms(5_000)
    life.check_logs()
    assert life.missing() == {b"later-0", b"later-1"}, "nobody knows whether they were sent"
    # The target still answers for those that it has.
    assert sorted(outcomes(life, HOUR)) == [Outcome.DISPATCHED] * 4 + [Outcome.IN_DOUBT] * 2


def put_by_rename(disk: MemoryDisk, path: str, data: bytes) -> None:
    """Put a file back as rsync and mv do: open descriptors still lead to the file that stood there."""
    put(disk, f"{path}.tmp", data)
    disk.rename(f"{path}.tmp", path)


@pytest.mark.parametrize("by", ["the next try", "an operator"])
@pytest.mark.parametrize("filed", [True, False])
def test_a_file_of_bodies_that_is_put_back_by_a_rename_is_read(filed: bool, by: str) -> None:
    world = World(tail_bytes=0, source_cache_bytes=1 << 20, segment_bytes=4096)
    due_ms = 5 * HOUR_MS if filed else 5_000
    world.send(wanted(3, due_ms, "rotten"))
    world.settle()
    if filed:
        world.checkpoint()
    # Groups go to another file of the message log from now on.
    for _ in range(3):
        world.send(wanted(200, 10 * HOUR_MS, "behind it"))
        world.settle()
    path = schedule_path(FOLDER, FAR) if filed else files(world.disk, f"{FOLDER}/message")[0]
    good = content(world.disk, path)
    assert good.count(b"rotten-1") == 1
    file = world.disk.open(path, write=True)
    file.pwritev([b"ROTTEN-1"], good.index(b"rotten-1"))
    file.close()
    world.clock.advance(due_ms - 4_000)
    world.pass_ms(5_000)
    name = hour_name(FAR) if filed else "message"
    assert world.core.quarantine.find(f"rows/{name}")
    put_by_rename(world.disk, path, good)
    if by == "an operator":
        assert decided(world, "release", f"rows/{name}") == (True, "3 messages can be read")
    else:
        world.pass_ms(100_000)
    assert not len(world.core.quarantine)
    world.pass_ms(1_000)
    assert outcomes(world, FAR if filed else HOUR)[:3] == [Outcome.DISPATCHED] * 3


def test_bodies_that_are_dropped_get_the_outcome_dead() -> None:
    world = World(tail_bytes=0, source_cache_bytes=1 << 20)
    world.send(wanted(3, 5 * HOUR_MS, "rotten"))
    world.settle()
    world.checkpoint()
    file = world.disk.open(schedule_path(FOLDER, FAR), write=True)
    file.pwritev([b"ROTTEN-1"], file.pread(file.size(), 0).index(b"rotten-1"))
    world.clock.advance(5 * HOUR_MS - 10_000)
    world.pass_ms(15_000)
    id_ = f"rows/{hour_name(FAR)}"
    assert world.core.counters()["quarantined_rows"] == 3 and world.core.quarantine.find(id_)
    assert not decided(world, "release", id_)[0]
    assert decided(world, "drop", id_)[0] and not len(world.core.quarantine)
    world.pass_ms(1_000)
    assert outcomes(world, FAR) == [Outcome.DEAD] * 3
