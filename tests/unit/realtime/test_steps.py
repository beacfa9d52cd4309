"""Nothing costs the square of what a client sends or holds: twice as much is at most twice the steps (rule B2)."""

from collections.abc import Callable, Sequence

import pytest

from delayd.log.consume import SEGMENT_ENTRIES, ConsumeTail
from delayd.log.pull import PullEntry, PullOp
from delayd.machine.disk import Disk
from delayd.testing.executor import InlineExecutor, StepExecutor
from delayd.wire.requests import RequestType
from realtime import pulls as pulls_module
from realtime import retention
from realtime import snapshots as snapshots_module
from realtime.groups import Group
from realtime.index import Index, Subject
from realtime.kept import encode_group
from tests.counts import calls, lines
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World, pull_head

MORE = 2.6  # Steps of twice the work, over those of it: two, and the logarithm.


def grows(steps: Callable[[int], int], size: int) -> float:
    """How many times the steps grow when the size doubles."""
    return steps(2 * size) / steps(size)


def group_with_pulls(count: int) -> Group:
    """One that holds as many pulls of one message each."""
    subject = Subject("orders")
    subject.end = 10 * count
    group = Group(1, subject, "billing", 0)
    for number in range(count):
        group.apply(PullEntry(PullOp.PULL, 1, 1, 1, number, number, 1, 0))
    return group


def holding(count: int) -> tuple[World, SimPeer, int]:
    """A server whose one group holds as many pulls of one message."""
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, [b"x"] * count))
    incarnation = 0
    for _ in range(count):
        incarnation = world.pull(peer, most=1).incarnation
    return world, peer, incarnation


@pytest.mark.parametrize("mine", [True, False])
def test_rule_B2_handles_that_cover_everything_again_and_again_meet_each_pull_once(mine: bool) -> None:
    def steps(count: int) -> int:
        world, peer, incarnation = holding(count)
        handles = [[incarnation if mine else 7, 0, count]] * count
        return lines(lambda: world.ack(peer, handles))

    assert grows(steps, 100) < MORE


def test_rule_B2_an_acknowledgement_of_every_other_message_costs_what_it_names() -> None:
    def steps(count: int) -> int:
        world, peer, incarnation = holding(count)
        handles = [[incarnation, number, 1] for number in range(0, count, 2)]
        return lines(lambda: world.ack(peer, handles))

    assert grows(steps, 100) < MORE


def test_rule_B2_fragments_that_were_given_back_cost_a_pull_what_it_takes() -> None:
    def steps(count: int) -> int:
        group = group_with_pulls(count)
        for number in range(0, count, 2):
            group.apply(PullEntry(PullOp.LAPSED, 1, 1, 1, number, 0, 1, 0))
        assert group.window.offered == count // 2
        return lines(lambda: group.apply(PullEntry(PullOp.PULL, 2, 1, 1, 2 * count, 0, 1, 0)))

    assert steps(2_000) == steps(200)


def test_rule_B2_what_a_checkpoint_copies_of_a_group_on_the_loop_costs_a_step_for_hundreds_of_pulls() -> None:
    group = group_with_pulls(10_000)
    # The first look after a change goes through all that has changed, so it is not counted.
    assert group.oldest == 0
    assert lines(lambda: group.copy()) < 10_000 / 50
    copied = group.copy()
    group.apply(PullEntry(PullOp.ACK, 0, 1, 1, 0, 0, 20_000, 0))
    # It stays as it was at its moment.
    assert len(list(copied.window.held())) == 10_000 and not group.outstanding and len(encode_group(group)[1]) < 150


def test_rule_B2_polls_that_end_cost_each_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls_module, "TURN_ANSWERS", 10_000)

    def steps(count: int) -> int:
        world, peer = World(), SimPeer()
        world.pull(peer)
        for _ in range(count):
            world.send(peer, RequestType.PULL, pull_head(wait_ms=1_000))
        world.clock.advance(1_000)
        return calls(world.core.wake)

    assert grows(steps, 500) < MORE


def test_rule_B2_a_checkpoint_copies_in_turns_and_stays_what_it_was_at_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots_module, "COPIES_A_TURN", 3)
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
    monkeypatch.setattr(snapshots_module, "GROUPS_A_TURN", 2)
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


def test_rule_B2_retention_looks_at_the_consume_logs_of_a_few_subjects_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "LOOKED_A_TURN", 7)
    monkeypatch.setattr(retention, "READS_A_TURN", 3)
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    for number in range(1, 21):
        world.dispatch(peer, 1, dispatch_batch(number, [b"x"], subject=f"s{number:02}"))
    index, asked, removed = world.recovered.index, list[str](), list[int]()
    for subject in list(index)[10:]:
        subject.tail = ConsumeTail(base=SEGMENT_ENTRIES)

    def first(index: Index, subject: Subject) -> int:
        asked.append(subject.name)
        return 5

    def remove(disk: Disk, ends: Sequence[object]) -> int:
        removed.append(len(ends))
        return 0

    monkeypatch.setattr(Index, "first", first)
    monkeypatch.setattr(retention, "remove_consume_segments", remove)
    trimming = retention.Trimming(index, world.disk, InlineExecutor())
    trimming.begin()
    turns = 0
    while trimming.left:
        trimming.step()
        turns += 1
        assert len(asked) <= 3 * turns
    assert sorted(asked) == [f"s{number}" for number in range(11, 21)] and sum(removed) == 10
    assert turns == 5


def after_stop(world: World, work: StepExecutor) -> World:
    stopped: list[bool] = []
    world.core.stop(lambda: stopped.append(True))
    while not stopped:
        work.run_all()
        world.core.wake()
    world.core.close()
    world.lock.release()
    return World(world.disk, world.state, world.clock.restarted())


def test_rule_B2_what_a_turn_copies_is_bounded_however_many_subjects_were_touched() -> None:
    def steps(count: int) -> int:
        world, peer = World(settings={"tail_bytes": 0}, work=StepExecutor()), SimPeer()
        world.hello(peer, 1)
        batches = [dispatch_batch(number, [b"a"], subject=f"s{number}") for number in range(1, count + 1)]
        for at in range(0, count, 1_000):
            world.dispatch(peer, 1, *batches[at : at + 1_000])
        return lines(world.core.checkpoint)

    assert steps(4_000) <= steps(2_000) + 100
