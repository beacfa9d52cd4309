"""Groups that begin at an instant that has not come, and bounds that outlive who said them."""

import pytest

from delayd.wire.frame import HeadValue
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import SimPeer, World, pull_head

HOUR_MS = 3_600_000


def _pull(world: World, **more: HeadValue) -> list[bytes]:
    _, body = world.ask(SimPeer(), RequestType.PULL, {**pull_head(), **more})
    return bodies_of(body)


def _died(world: World, restart: str) -> World:
    """The server dies, behind a checkpoint or before it, and starts again."""
    if restart == "checkpoint":
        world.core.checkpoint()
    state = world.state.after_crash()
    return World(world.disk.after_crash(), state, world.clock.restarted())


@pytest.mark.parametrize("restart", ["", "replay", "checkpoint"])
def test_a_group_that_begins_later_gets_nothing_of_before(restart: str) -> None:
    world, origin = World(), SimPeer()
    world.hello(origin, 1)
    begins_ms = world.clock.now_ms() + HOUR_MS
    assert _pull(world, start={"instant_ms": begins_ms}) == []
    claimed = [begins_ms - HOUR_MS, begins_ms - 1, begins_ms, begins_ms + 1]
    for number, (at_ms, body) in enumerate(zip(claimed, (b"a", b"b", b"c", b"d"), strict=True), 1):
        session = 2 if number > 2 and restart else 1
        batch = dispatch_batch(number, [body], w=(0, number - 1), claimed_at_ms=at_ms)
        world.dispatch(origin, session, batch)
        if number == 2 and restart:
            world = _died(world, restart)
            origin = SimPeer()
            world.hello(origin, 2)
    assert _pull(world) == [b"c", b"d"]
    assert world.core._pulls.counters["filtered"] == (0 if restart else 2) or restart
