"""Groups with decisions before their rows: a decider adds batches of its own, and a group is whole or not there."""

from __future__ import annotations

from delayd.batch.batch import parse
from delayd.batch.columns import MOVED_PRODUCER_ID, ProducerPart
from delayd.config import COMMIT_BYTES_MAX
from delayd.delay.ending.message_requests import MessageRequests
from delayd.delay.intake import DECIDED_BYTES_MAX, Decided, OpenGroup
from delayd.delay.producers import AcceptedBatch
from delayd.errors import BatchMalformed, DelaydError
from delayd.log.group import BYTES_MAX, CommitGroup, GroupKind
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.testing.clock import START_MS
from delayd.wire.asked import CancelAnswer
from tests.worlds.delay import FOLDER, World, encode_wanted, wanted
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


def data_groups(world: World) -> list[CommitGroup]:
    place = LogPlace(f"{FOLDER}/message", FileKind.MESSAGE, world.core.identity.log_id)
    log = open_log(world.disk.after_kill(), place, START_MS)
    return [group for group in log.scan(log.start, log.durable) if group.header.kind == GroupKind.DATA]


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
