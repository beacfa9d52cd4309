"""Each closed segment has an index, written beside the loop, and written anew when it is not whole (rule L9)."""

from itertools import pairwise

import pytest

from delayd.hours import hour_of_ms
from delayd.log.segment_index import IndexedGroup, read_index
from delayd.reading.files.stored_groups import proves
from delayd.testing.executor import StepExecutor
from tests.unit.log.dispatch_batches import batch
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN
from tests.worlds.realtime import SimPeer, World

SMALL = {"segment_bytes": 32_768, "retention_ms": 1_000, "tail_bytes": 0}
HOUR = hour_of_ms(DUE_MS)
FOLDER = "/data/realtime/index"


def filled(work: StepExecutor | None = None, body: bytes = bytes(9_000)) -> World:
    """A server with several segments of one message a batch."""
    world, peer = World(settings=SMALL, work=work), SimPeer()
    world.hello(peer, 1)
    for batch_id in range(1, 41):
        w = (1, batch_id - 1) if batch_id > 1 else (0, 0)
        row = (batch_id, DUE_MS, b"", body, -1)
        world.dispatch(peer, 1, batch(b"orders", [row], ORIGIN, HOUR, batch_id=batch_id, w=w))
    return world


def settle(world: World) -> None:
    for _ in range(100):
        world.pass_time(100)


def names(world: World) -> list[str]:
    return [name for name in world.disk.list_folder(FOLDER) if name.endswith(".log")]


def indexed(world: World) -> list[bool]:
    """For each closed segment: whether its index is whole, checks, and saves a reader the segment."""
    segments = world.recovered.message_log.segments
    found = []
    for segment, following in pairwise(segments):
        place, after = world.recovered.message_log.place, following.header
        groups = read_index(world.disk, place, segment.base_offset, following.base_offset, after.previous_crc32c)
        right = groups is not None and proves(groups, segment.header, after)
        found.append(right and any(isinstance(group, IndexedGroup) for group in groups or ()))
    return found


@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "of another segment"])
def test_rule_L9_an_index_that_is_not_whole_is_written_anew(how: str) -> None:
    world = filled()
    settle(world)
    first, second = (f"{FOLDER}/{name}" for name in names(world)[:2])
    if how == "of another segment":
        world.disk.remove(first)
        world.disk.rename(second, first)
    elif how == "gone":
        world.disk.remove(first)
    else:
        file = world.disk.open(first, write=True)
        if how == "cut":
            file.truncate(file.size() - 80)
        else:
            file.pwritev([b"\xff"], 200)
        file.close()
    assert not indexed(world)[0]
    later = world.restarted()
    settle(later)
    assert all(indexed(later))
