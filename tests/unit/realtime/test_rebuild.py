"""Consume logs that are not what they were: found, named, and rebuilt from the message log while all else is served."""

import pytest

from delayd.log.consume import ENTRY_BYTES
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import SimPeer, World, pull_head

FOLDER = "/data/realtime/consume"
SETTINGS = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 1_000}
PATH = f"{FOLDER}/00000000/{0:020}.log"


def pull_all(world: World, subject: str, group: str = "billing") -> list[bytes]:
    peer, found = SimPeer(), list[bytes]()
    while (pulled := world.pull(peer, group, subject=subject, most=7)).bodies:
        found += pulled.bodies
        assert world.ack(peer, pulled.handles, group, subject=subject) == []
    return found


def write(disk: MemoryDisk, path: str, position: int, data: bytes) -> None:
    file = disk.open(path, write=True)
    file.pwritev([data], position)
    file.sync()
    file.close()


def flip(disk: MemoryDisk, path: str, position: int, mask: int = 1) -> None:
    file = disk.open(path)
    (before,) = file.pread(1, position)
    file.close()
    write(disk, path, position, bytes([before ^ mask]))


@pytest.mark.parametrize("found_while", ["it waits for the pull log", "it waits for its thread", "it is written"])
def test_rule_L9_a_rebuild_beside_a_checkpoint_loses_nothing_of_what_the_checkpoint_wrote(found_while: str) -> None:
    work, pulls = StepExecutor(), StepExecutor()
    world, peer = World(settings=SETTINGS, work=work, pulls=pulls), SimPeer()
    world.hello(peer, 1)
    bodies = [f"{number}".encode().ljust(120, b".") for number in range(1, 61)]
    for number, body in enumerate(bodies, 1):
        world.dispatch(peer, 1, dispatch_batch(number, [body], w=(1, number - 1)))
        if number == 20:
            first = world.send(peer, RequestType.PULL, pull_head(most=1))
            world.core.checkpoint()
            pulls.run_all()
            work.run_all()
            assert bodies_of(peer.answers[first][0][1]) == bodies[:1]
    pulled = world.pull(peer, most=4)
    assert pulled.bodies == bodies[1:5]
    subject = world.recovered.index.by_name["orders"]
    world.core.checkpoint()
    if found_while != "it waits for the pull log":
        pulls.run_all()
    if found_while == "it is written":
        work.run_one()
    flip(world.disk, PATH, FILE_HEADER_BYTES + 8 * ENTRY_BYTES)
    subject._page = None
    waiting = SimPeer()
    world.send(waiting, RequestType.PULL, pull_head(wait_ms=5_000, most=100))
    assert subject.damage is not None and not waiting.answers
    while work.step():
        pass
    pulls.run_all()
    work.run_all()
    world.core.wake()
    assert bodies_of(waiting.answers[1][0][1]) == bodies[5:]
    for _ in range(2):
        # Two checkpoints and another life change nothing of it.
        world.core.checkpoint()
        pulls.run_all()
        work.run_all()
    later = World(world.disk.after_crash(), world.state.after_crash(), settings=SETTINGS)
    assert pull_all(later, "orders", "other") == bodies
    assert not world.failures and not later.failures
