"""What one frame, one pull and one acknowledgement cost, as counts that fail when they grow."""

from delayd.wire.requests import RequestType
from tests.counts import operations
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SUBJECT, SimPeer, World, pull_head


def waiting_world(*subjects: str) -> tuple[World, SimPeer, SimPeer]:
    """A delay server has said hello, and a group of each subject waits."""
    world, peer, consumer = World(), SimPeer(), SimPeer()
    world.hello(peer, 1)
    for subject in subjects:
        world.pull(consumer, subject=subject)
        world.send(consumer, RequestType.PULL, pull_head(subject=subject, wait_ms=5_000))
    return world, peer, consumer


def test_a_frame_costs_one_write_and_one_sync_and_its_answer_one_write() -> None:
    world, peer, _ = waiting_world(SUBJECT)
    frames = [dispatch_batch(number, [b"x"] * 5) for number in (1, 2)]
    answered = operations(world.disk, lambda: world.dispatch(peer, 1, frames[0]))
    assert sorted(answered) == ["sync", "write", "write"]
    assert sorted(operations(world.disk, lambda: world.dispatch(peer, 1, frames[1]))) == ["sync", "write"]


def test_a_frame_for_many_subjects_costs_the_pull_log_one_write() -> None:
    subjects = [f"orders.{number}" for number in range(20)]
    world, peer, consumer = waiting_world(*subjects)
    asked = len(consumer.answers)
    batches = [dispatch_batch(number, [b"x"], subject=subject) for number, subject in enumerate(subjects, 1)]
    assert sorted(operations(world.disk, lambda: world.dispatch(peer, 1, *batches))) == ["sync", "write", "write"]
    assert len(consumer.answers) == asked + 20


def test_an_acknowledgement_costs_one_write_and_one_sync_however_many_handles_it_has() -> None:
    world, peer, _ = waiting_world()
    world.dispatch(peer, 1, dispatch_batch(1, [b"x"] * 50))
    pulled = world.pull(peer)
    ((first, _, count, _),) = pulled.parts
    handles = [[pulled.incarnation, first + row, 1] for row in range(count)]
    assert sorted(operations(world.disk, lambda: world.ack(peer, handles))) == ["sync", "write"]
