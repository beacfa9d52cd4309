"""What a batch costs the delay server's intake, as counts that fail when they grow."""

from collections.abc import Mapping, Sequence

import pytest

from delayd.batch.columns import Buffer, ProducerPart
from delayd.delay.requests import Requests
from delayd.wire.frame import Frame, HeadValue
from delayd.wire.requests import RequestType
from tests.counts import calls
from tests.unit.delay.answers import Answers
from tests.worlds.delay import PRODUCER_ID, World, encode_wanted, wanted

# Calls of Python functions, the disk in memory and this file included, measured and rounded up by a tenth: each costs
# 0.1 to 0.3 us. They grow with neither rows nor bytes.
TAKEN_CALLS_MAX = 46  # From a frame of one batch until it waits for its group.
GROUP_CALLS_MAX = 345  # Calls for a group of five batches, from its write until all are answered and indexed.
GROUP = 5


class Intake:
    """A server with a group commit under way, so that what comes next is gathered."""

    def __init__(self) -> None:
        self.world = World(segment_bytes=64 << 20)
        self.requests = Requests(self.world.core, self.world.clock, dict)
        self.answers = Answers()
        self.commit, *_ = self.world.executors()
        self._number = 0

    def frame(self, rows: int) -> Frame:
        self._number += 1
        part = ProducerPart(PRODUCER_ID, self._number, self._number)
        data = encode_wanted(wanted(rows, 7_200_000, f"b{self._number}"), part)
        return Frame(RequestType.SEND, 0, self._number, {}, memoryview(data))

    def take(self, frame: Frame) -> None:
        self.requests.received(self.answers, frame)

    def step(self) -> None:
        self.commit.run_one()
        self.commit.complete_one()


@pytest.mark.parametrize("rows", [40, 500])
def test_the_calls_of_intake_are_few_and_do_not_grow_with_rows(rows: int) -> None:
    intake = Intake()
    intake.take(intake.frame(rows))
    frames = [intake.frame(rows) for _ in range(GROUP)]
    for frame in frames[1:]:
        intake.take(frame)
    assert calls(lambda: intake.take(frames[0])) <= TAKEN_CALLS_MAX
    intake.step()
    assert calls(intake.step) <= GROUP_CALLS_MAX
    assert len(intake.answers.heads) == 1 + GROUP


def test_a_group_of_batches_is_one_write_and_one_sync() -> None:
    intake = Intake()
    for _ in range(1 + GROUP):
        intake.take(intake.frame(500))
    intake.step()
    before = len(intake.world.disk.operations)
    intake.step()
    operations = [operation.split()[0] for operation in intake.world.disk.operations[before:]]
    assert sorted(operations) == ["sync", "write"]
    assert len(intake.answers.heads) == 1 + GROUP


def test_the_next_group_is_given_to_the_thread_before_the_last_one_is_answered() -> None:
    intake = Intake()
    waiting_at_answer: list[int] = []

    class Looking(Answers):
        def answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = ()) -> None:
            waiting_at_answer.append(intake.commit.waiting)

    intake.answers = Looking()
    for _ in range(2):
        intake.take(intake.frame(500))
    intake.step()
    assert waiting_at_answer == [1]
