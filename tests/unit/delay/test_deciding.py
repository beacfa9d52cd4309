"""Groups with decisions before their rows: a decider adds batches of its own, and a group is whole or not there."""

from __future__ import annotations

import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import MOVED_PRODUCER_ID, BatchKind, ProducerPart
from delayd.config import COMMIT_BYTES_MAX
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.intake import DECIDED_BYTES_MAX, Decided, OpenGroup
from delayd.delay.producers import AcceptedBatch
from delayd.errors import BatchMalformed, DelaydError, DiskReserve
from delayd.log.group import BYTES_MAX, CommitGroup, GroupKind
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.reading.verify import verify_files
from delayd.testing.clock import START_MS
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.ending import CancelAnswer, MessageState
from tests.crash.harness import ways
from tests.worlds.delay import FOLDER, PRODUCER_ID, World, encode_wanted, wanted
from tests.worlds.outside import Sent, Wanted

HOUR_MS = 3_600_000
MOVED_PART = ProducerPart(MOVED_PRODUCER_ID, 0, 0)


class Mover:
    """A decider that logs what cancels decide before the rows of the commit, and adds rows of its own."""

    def __init__(self, world: World, batches: list[list[Wanted]]) -> None:
        self._inner: MessageRequests = world.core.endings.requests
        self._batches = batches
        self._world = world
        world.core.intake.decider = self

    @property
    def waiting(self) -> bool:
        return self._inner.waiting

    def close(self, group: OpenGroup) -> Decided:
        decided = self._inner.close(group)
        if decided.record is None:
            return decided
        sequence, moved = group.next_sequence, []
        for number, rows in enumerate(self._batches):
            data = encode_wanted(rows, MOVED_PART)
            moved.append(parse(data))
            accepted = AcceptedBatch(sequence, len(rows), group.appended_at_ms, 0, 0)
            self._world.outside.accepted[-1 - number] = Sent(-1 - number, data, rows), accepted
            sequence += len(rows)
        return Decided(decided.record, with_rows=True, moved=moved)

    def committed(self) -> None:
        self._inner.committed()

    def answer(self) -> None:
        self._inner.answer()

    def refused(self, error: DelaydError) -> None:
        for number in range(len(self._batches)):
            self._world.outside.accepted.pop(-1 - number, None)
        self._inner.refused(error)


def moving(due_ms: int) -> tuple[World, list[list[CancelAnswer]]]:
    """A world in which the next commit cancels one message, takes others from a producer, and moves some."""
    world = World(load_ahead_ms=1_000, segment_bytes=4_096)
    world.send(wanted(3, due_ms, "old"))
    world.settle()
    Mover(world, [wanted(2, 5_000, "moved near"), wanted(2, due_ms, "moved far")])
    world.send(wanted(1, 3_000, "before"))
    told = world.cancel(world.receipts("old-1"))
    world.send(wanted(2, 4_000, "other"))
    return world, told


def data_groups(world: World) -> list[CommitGroup]:
    place = LogPlace(f"{FOLDER}/message", FileKind.MESSAGE, world.core.identity.log_id)
    log = open_log(world.disk.after_kill(), place, START_MS)
    return [group for group in log.scan(log.start, log.durable) if group.header.kind == GroupKind.DATA]


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("due_ms", [5_000, 2 * HOUR_MS])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_decisions_producers_batches_and_moved_ones_stand_in_one_group(due_ms: int, checkpointed: bool) -> None:
    world, told = moving(due_ms)
    world.settle()
    assert told == [[CancelAnswer.CANCELLED]]
    group = data_groups(world)[-1]
    batches = [batch for _, batch in group.batches()]
    assert [batch.kind for batch in batches] == [BatchKind.CONTROL] + [BatchKind.PRODUCER] * 3
    assert [batch.producer.producer_id for batch in batches[1:]] == [PRODUCER_ID, MOVED_PRODUCER_ID, MOVED_PRODUCER_ID]
    assert (group.header.base_sequence, group.header.row_count) == (5, 6)
    assert world.core.intake.next_sequence == 11
    segments = [f"{FOLDER}/message/{name}" for name in world.disk.list_folder(f"{FOLDER}/message")]
    report = verify_files(segments, disk=world.disk.after_kill())
    assert report.files and not [file.sentence for file in report.files if file.damage]
    if checkpointed:
        world.checkpoint()
    for life in (world.after_crash(), world.after_crash(PowerLoss.ALL_LOST), world):
        assert len(life.core.producers) == 1
        end(life)


def test_rule_L1_a_group_with_decisions_and_rows_is_whole_or_not_there_wherever_the_server_dies() -> None:
    world, _ = moving(2 * HOUR_MS)
    before = len(world.disk.operations)
    world.settle()
    outcomes = set()
    for at in range(before + 1, len(world.disk.operations) + 1):
        for way in ways(3):
            world, told = moving(2 * HOUR_MS)
            world.disk.faults.crash_at = at
            with pytest.raises(Crash):
                world.settle()
            life = world.after_crash(way.loss, way.seed)
            (state,) = life.states(world.receipts("old-1"))
            moved = life.core.intake.next_sequence > 7
            assert (state is MessageState.CANCELLED) == moved
            assert moved or not told
            outcomes.add(moved)
            if not moved:
                life.outside.accepted = {number: kept for number, kept in life.outside.accepted.items() if number > 0}
            end(life)
    assert outcomes == {False, True}


def test_rule_S5_a_full_disk_undoes_decisions_and_moved_rows_and_gives_their_sequences_again() -> None:
    world, told = moving(2 * HOUR_MS)
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    world.settle()
    assert not told and isinstance(world.outside.refused[-1][1], DiskReserve)
    assert world.core.intake.next_sequence == 4
    world.disk.capacity_bytes = capacity
    world.core.reserve(capacity)
    world.core.intake.decider = world.core.endings.requests
    end(world)


def test_a_producer_can_not_use_the_id_of_moved_rows() -> None:
    world = World()
    heard: list[object] = []
    world.core.send(parse(encode_wanted(wanted(1, 1_000, "false"), MOVED_PART)), lambda what, _: heard.append(what))
    world.settle()
    assert isinstance(heard[0], BatchMalformed) and world.core.intake.next_sequence == 1


def test_a_group_leaves_room_for_decisions_beside_the_most_that_producers_send() -> None:
    world = World(group_bytes_max=COMMIT_BYTES_MAX, intake_queue_bytes_max=2 * COMMIT_BYTES_MAX)
    world.send(wanted(1, 2 * HOUR_MS, "old"))
    world.settle()
    Mover(world, [])
    world.send(wanted(1, 5_000, "before"))
    told = world.cancel(world.receipts("old"))
    for number in range(65):
        world.send([(START_MS + 6_000, b"orders.eu", b"%d-" % number + bytes(1_000_000))])
    for _ in range(2):
        world.executors()[0].run_one()
        world.executors()[0].complete_one()
    assert told == [[CancelAnswer.CANCELLED]]
    room = BYTES_MAX - data_groups(world)[-1].header.total_bytes
    assert room > DECIDED_BYTES_MAX > 20 << 20
