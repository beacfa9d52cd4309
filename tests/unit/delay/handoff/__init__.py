"""A delay server with one target that was greeted, and frames on their way to it."""

from delayd.delay.core import DelayCore
from delayd.delay.handoff.link import Link, Phase
from delayd.testing.clock import START_MS
from tests.worlds.delay import TARGET_IDS, World, wanted
from tests.worlds.target import Cable, FakeTarget

TARGET = TARGET_IDS[0]


def target_of(world: World) -> FakeTarget:
    return world.outside.targets[TARGET]


def link_of(world: World) -> Link:
    return world.core.handoff.dispatcher.links[TARGET]


def cable_of(world: World) -> Cable:
    """The open connection."""
    (cable,) = [cable for cable in world.cables if not cable.ended]
    return cable


def ready_world(**settings: int) -> World:
    """A world whose target was greeted and whose first message was delivered and decided."""
    world = World(None, core=DelayCore, seed=0, **settings)
    world.send(wanted(1, 0, "first"))
    world.pass_ms(200)
    assert link_of(world).phase is Phase.READY and link_of(world).sender.window.w == (1, 1)
    return world


def run_threads(world: World) -> None:
    """Everything but the network and the target."""
    for _ in range(3):
        world.core.wake()
        for executor in world.executors():
            executor.run_all()


def put_on_cable(world: World, count: int) -> None:
    """Let messages ``a-0`` and so on come due; their frames are on their way, as far as the window has room."""
    world.send(wanted(count, world.clock.now_ms() - START_MS + 100, "a"))
    world.settle()
    world.clock.advance(100)
    world.core.wake()
