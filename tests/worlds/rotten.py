"""A realtime server that reads its batches from files, and batches that rot there."""

from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import GROUP, SimPeer, World

FOLDER = "/data/realtime/message"
BAD = b"bad" * 100
OUT_OF_MEMORY = {"tail_bytes": 0}


def flip(disk: MemoryDisk, wanted: bytes) -> None:
    """Change the first byte of a body, or change it back."""
    for name in disk.list_folder(FOLDER):
        file = disk.open(f"{FOLDER}/{name}", write=True)
        at = file.pread(file.size(), 0).find(wanted[1:]) - 1
        if at >= 0:
            (before,) = file.pread(1, at)
            file.pwritev([bytes([before ^ 0xFF])], at)
            file.sync()
        file.close()


def flip_value(state: MemoryState, key: bytes) -> None:
    """Change a bit of a stored value, or change it back."""
    stored = bytearray(state._pairs[key])
    stored[len(stored) // 2] ^= 0x40
    state._pairs[key] = bytes(stored)


def served(*batches: list[bytes], settings: dict[str, int] | None = None) -> tuple[World, SimPeer]:
    """A server that keeps nothing in memory, and was handed these batches."""
    world, peer = World(settings=settings or OUT_OF_MEMORY), SimPeer()
    world.hello(peer, 1)
    for batch_id, bodies in enumerate(batches, 1):
        world.dispatch(peer, 1, dispatch_batch(batch_id, bodies))
    return world, peer


def pull_all(world: World, group: str = GROUP) -> list[bytes]:
    """Pull and acknowledge until there is nothing."""
    peer, found = SimPeer(), list[bytes]()
    while (pulled := world.pull(peer, group)).bodies:
        found += pulled.bodies
        assert world.ack(peer, pulled.handles, group) == []
    return found
