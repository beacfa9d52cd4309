"""Nothing costs the square of what a client sends or holds: twice as much is at most twice the steps (rule B2)."""

import pytest

from delayd.testing.executor import StepExecutor
from realtime import checkpoint
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World


def test_rule_B2_a_checkpoint_copies_in_turns_and_stays_what_it_was_at_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "COPIES_A_TURN", 3)
    work = StepExecutor()
    world, peer = World(work=work, settings={"tail_bytes": 0}), SimPeer()
    world.hello(peer, 1)
    subjects = [f"s{number}" for number in range(10)]
    pulled = {}
    for number, subject in enumerate(subjects, 1):
        world.dispatch(peer, 1, dispatch_batch(number, [b"a", b"b"], subject=subject, w=(1, number - 1)))
        pulled[subject] = world.pull(peer, subject=subject, most=1)
    world.core.checkpoint()
    turns = 1
    while world.core._snapshots.copying is not None:
        # While it copies, groups change and messages come.
        subject = subjects[-turns]
        world.ack(peer, pulled[subject].handles, subject=subject)
        world.dispatch(peer, 1, dispatch_batch(100 + turns, [b"c"], subject=subject, w=(1, 99)))
        assert world.core.next_wake_ms() <= world.clock.monotonic_ms()
        world.core.wake()
        turns += 1
    assert turns >= 6
    work.run_all()
    assert world.core._checkpoints.published == 1
    acked = subjects[-turns + 1 :]
    for later in (World(world.disk.after_crash(), world.state.after_crash()), after_stop(world, work)):
        later.pass_time(60_000)
        for subject in subjects:
            bodies = later.pull(SimPeer(), subject=subject).bodies
            assert sorted(bodies) == ([b"b", b"c"] if subject in acked else [b"a", b"b"]), subject
            assert later.pull(SimPeer(), "new", subject=subject).bodies == [b"a", b"b", b"c"][: 2 + (subject in acked)]


def test_rule_B2_retention_asks_a_few_groups_a_turn_and_passes_none_that_is_made_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "GROUPS_A_TURN", 2)
    settings = {"tail_bytes": 0, "segment_bytes": 4096, "retention_ms": 60_000}
    world, peer = World(settings=settings), SimPeer()
    world.hello(peer, 1)
    bodies = []
    for number in range(1, 31):
        bodies.append(f"{number}".encode().ljust(600, b"."))
        world.dispatch(peer, 1, dispatch_batch(number, [bodies[-1]], w=(1, number - 1)))
    world.hello(SimPeer(), 2, w=(1, 30))
    # The group that is asked last has acknowledged the least.
    for group in range(7):
        pulled = world.pull(SimPeer(), f"g{group}", most=20 if group else 10)
        assert world.ack(SimPeer(), pulled.handles, f"g{group}") == []
    world.core.checkpoint()
    world.pass_time(120_000)
    world.core.retain()
    turns = 0
    while world.core._snapshots.copying is not None:
        if turns == 0:
            assert world.pull(SimPeer(), "new", most=1).bodies == bodies[:1]
        world.core.wake()
        turns += 1
    assert turns == 3
    assert world.recovered.message_log.start == 0, "the group that was made meanwhile has acknowledged nothing"
    assert world.pull(SimPeer(), "later", most=40).bodies == bodies


def after_stop(world: World, work: StepExecutor) -> World:
    stopped: list[bool] = []
    world.core.stop(lambda: stopped.append(True))
    while not stopped:
        work.run_all()
        world.core.wake()
    world.core.close()
    world.lock.release()
    return World(world.disk, world.state, world.clock.restarted())
