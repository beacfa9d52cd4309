"""The pace of frames: little waits for the answer to the frame before it, much fills the window."""

from delayd.batch.batch import Batch, parse
from delayd.delay.handoff.sender import BATCHES_A_FRAME
from delayd.testing.clock import START_MS
from tests.unit.delay.handoff import cable_of, ready_world
from tests.worlds.delay import wanted


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


def test_a_subject_that_found_no_room_in_a_frame_is_in_the_next_one_whoever_came_meanwhile() -> None:
    world = ready_world()
    cable = cable_of(world)
    subjects = [b"subject.%d" % number for number in range(BATCHES_A_FRAME + 10)]

    def come_due(name: str, named: list[bytes]) -> None:
        due_ms = world.clock.now_ms() - START_MS + 100
        world.send([each for subject in named for each in wanted(1, due_ms, name + subject.decode(), subject)])
        while world.asked or any(executor.step() for executor in world.executors()):
            if world.asked:
                world.answer_routes()
        world.clock.advance(100)
        world.core.wake()

    def sent() -> set[bytes]:
        (call,) = cable.up
        return {subject for batch in split(call.asked.body) for subject in batch.subjects()}

    come_due("first-", subjects)
    before = sent()
    assert len(before) == BATCHES_A_FRAME
    come_due("second-", sorted(before))
    cable.carry_up()
    cable.target.sync()
    cable.carry_down()
    assert set(subjects) - before <= sent()
