"""The pace of frames: little waits for the answer to the frame before it, much fills the window."""

from delayd.batch import Batch, parse
from delayd.testing.clock import START_MS
from tests.delay_harness import wanted
from tests.unit.delay.handoff import cable_of, ready_world


def split(body: bytes) -> list[Batch]:
    """The batches of a frame."""
    found, position = list[Batch](), 0
    while position < len(body):
        found.append(parse(body, position))
        position += found[-1].total_bytes
    return found


def test_little_that_is_due_waits_for_the_answer_under_way_and_leaves_in_one_frame() -> None:
    world = ready_world()
    cable = cable_of(world)
    for number in range(4):
        world.send(wanted(3, world.clock.now_ms() - START_MS + 100 + number, f"m{number}"))
    world.settle()
    world.clock.advance(100)
    for _ in range(4):
        world.core.wake()
        world.clock.advance(1)
    assert len(cable.up) == 1
    cable.carry_up()
    cable.target.sync()
    cable.carry_down()
    (call,) = cable.up
    assert sum(batch.count for batch in split(call.asked.body)) == 9
    world.drain()
    world.check_books()


def test_a_quarter_of_a_frame_does_not_wait_for_an_answer() -> None:
    world = ready_world(frame_rows_max=40)
    for number in range(3):
        world.send(wanted(10, world.clock.now_ms() - START_MS + 100 + number, f"m{number}"))
    world.settle()
    world.clock.advance(100)
    for _ in range(3):
        world.core.wake()
        world.clock.advance(1)
    assert len(cable_of(world).up) == 3
