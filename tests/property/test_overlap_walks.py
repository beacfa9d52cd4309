"""Walks of a schedule with overlap="skip": whatever is killed, cut, given back or run at once in between, an occurrence
is decided only when each earlier message was acknowledged (docs/recurring.md, One at a time).

The consumer and its group are a model at the target; the delay server is the real core, and each of its steps, and of
its messages to and from the target, is one step of the walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random

import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId, ProducerPart
from delayd.batch.labels import OCCURRENCE_MS, ORIGIN, SCHEDULE, decode_headers, number_in
from delayd.batch.names import retry_subject
from delayd.delay.ending import overlaps
from delayd.errors import DelaydError, SlowDown
from delayd.log.pull import RetryRow
from delayd.recurrence.deciding import RunPolicy
from delayd.recurrence.recurrence import Recurrence
from delayd.wire.frame import ANSWER, Frame
from delayd.wire.recurring import RecurringRecord, RecurringRequest, RecurringSpec, RecurringWish, body_of, read_body
from delayd.wire.requests import RequestType
from realtime.retries import RetriedRows, retry_batch
from tests.worlds.delay import PRODUCER_ID, TARGET_IDS, World, new_world
from tests.worlds.outside import Sent
from tests.worlds.target import Asked, Cable, FakeTarget

NAME, SUBJECT, GROUP = "one", b"orders.eu", 3
(TARGET,) = TARGET_IDS[:1]
AGAIN = retry_subject(TARGET, GROUP)
SPEC = RecurringSpec(Recurrence(every=timedelta(seconds=1)), RunPolicy(overlap="skip"), SUBJECT.decode(), b"body")
STEPS = 700
SEEDS = (*range(1, 9), 33)


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a message at the target."""

    sequence: int
    root: int  # The sequence of its first life.
    is_occurrence: bool  # A caller has not run it.
    batch: Batch
    row: int


@dataclass(slots=True)
class GroupTarget(FakeTarget):
    """A target with one group; what the group has said is durable at once."""

    messages: dict[int, Life] = field(default_factory=dict)  # By sequence, synced or not.
    arrived: dict[int, Life] = field(default_factory=dict)  # The first lives of messages, by sequence.
    acked: set[int] = field(default_factory=set)  # First lives.
    settled: set[int] = field(default_factory=set)  # Lives that ended here.
    leaving: dict[int, int] = field(default_factory=dict)  # Lives, with the batches in which they come again.
    asked: int = 0

    def receive(self, cable: Cable, asked: Asked, answer: Callable[[Frame | DelaydError], None]) -> None:
        if self.up and asked.kind == RequestType.UNFINISHED:
            self.asked += 1
            assert asked.head["schedules"] == [[SUBJECT.decode(), NAME]]
            places = [0] if self.open() else []
            head = {"log_id": self.log_id, "unfinished": places, "ungrouped": [], "unknown": [], "again": [GROUP]}
            answer(Frame(RequestType.UNFINISHED, ANSWER, 0, head, memoryview(b"")))  # type: ignore[arg-type]
            return
        # A dataclass with slots is made anew, so `super` does not find its base.
        FakeTarget.receive(self, cable, asked, answer)
        if self.up and asked.kind == RequestType.DISPATCH:
            self._take(asked.body)

    def open(self) -> list[Life]:
        """The lives that the group has not settled, which are durable here."""
        durable = {sequence for kept in self.log[: self.synced] for sequence in kept.sequences}
        return [life for life in self.messages.values() if life.sequence in durable - self.settled]

    def sync(self) -> None:
        FakeTarget.sync(self)
        for life in self.open():
            if life.sequence == life.root and life.root not in self.arrived:
                self._arrives(life)

    def _take(self, body: bytes) -> None:
        position = 0
        while position < len(body):
            batch = parse(body, position)
            position += batch.total_bytes
            starts, ends = batch.region(ColumnId.HEADERS_END)
            for row, sequence in enumerate(batch.uint64s(ColumnId.SEQUENCE).tolist()):
                headers = decode_headers(bytes(batch.heap[int(starts[row]) : int(ends[row])]))
                assert headers[SCHEDULE] == NAME
                is_occurrence = number_in(headers, OCCURRENCE_MS) % 1_000 == 0
                root = number_in(headers, ORIGIN) or sequence
                self.messages[sequence] = Life(sequence, root, is_occurrence, batch, row)

    def _arrives(self, new: Life) -> None:
        """Judge the decision that a new message shows: sequences rise in the order of decisions."""
        for root, other in self.arrived.items():
            if root < new.root and new.is_occurrence:
                assert root in self.acked, f"message {new.root} came while {root} was unacknowledged"
            assert root < new.root or not other.is_occurrence, f"{root} was decided while {new.root} was pending"
        self.arrived[new.root] = new


class Walk:
    """One walk, by its seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        remains = new_world()
        for log_id, plain in list(remains.outside.targets.items()):
            remains.outside.targets[log_id] = GroupTarget(log_id, plain.now_ms)
        self.world = World(remains, seed=seed)
        self._begin()
        body = b"".join(body_of(SPEC.encode()))
        request = RecurringRequest(RecurringWish.PUT, NAME.encode(), spec=SPEC)
        self.world.ask(RequestType.RECUR, request.to_head(self.world.server.log_id), body)

    @property
    def target(self) -> GroupTarget:
        target = self.world.outside.targets[TARGET]
        assert isinstance(target, GroupTarget)
        return target

    def _begin(self) -> None:
        self.world.own_all_keys()

    def step(self) -> None:
        """Do anything that may happen."""
        ways: list[tuple[float, Callable[[], None]]] = [
            (60, self.move),
            (14, self.advance),
            (3, self.ack),
            (5, self.give_back),
            (0.4, self.run),
            (0.3, self.die),
            (0.5, self.target_dies),
            (0.5, lambda: self.world.cut(TARGET)),
            (0.5, lambda: self.world.server.checkpoint(_filed)),
        ]
        chances, calls = zip(*ways, strict=True)
        self.random.choices(calls, chances)[0]()
        for number in list(self.world.outside.unanswered):
            if self.random.random() < 0.1:
                self.world.send_again(number)
        self.settle_taken()

    def move(self) -> None:
        moves = self.world.moves()
        if moves:
            self.random.choice(moves)()

    def advance(self) -> None:
        self.world.clock.advance(self.random.choice((1, 20, 200)))
        self.world.look_around()
        self.world.server.wake()

    def ack(self) -> None:
        for life in self.target.open():
            if life.sequence not in self.target.leaving:
                self.target.settled.add(life.sequence)
                self.target.acked.add(life.root)

    def give_back(self) -> None:
        """The group gives a message back, with a delay or none."""
        free = [life for life in self.target.open() if life.sequence not in self.target.leaving]
        if not free:
            return
        life, outside = self.random.choice(free), self.world.outside
        outside.last_number += 1
        due_ms = self.world.clock.now_ms() + self.random.choice((0, 0, 40, 1_500))
        how = RetryRow(1, 0, 0, 1, 1, due_ms, "", "no")
        part = ProducerPart(PRODUCER_ID, outside.last_number, min(outside.unanswered, default=outside.last_number))
        again = RetriedRows(life.batch, life.row, how)
        data = retry_batch(part, AGAIN, [again], self.world.clock.now_ms())
        sent = Sent(outside.last_number, data, [(due_ms, AGAIN.encode(), b"body")], again=True)
        outside.unanswered[outside.last_number] = sent
        self.target.leaving[life.sequence] = outside.last_number
        self.world.send_again(outside.last_number)

    def settle_taken(self) -> None:
        for sequence, number in list(self.target.leaving.items()):
            if number in self.world.outside.accepted:
                self.target.settled.add(sequence)
                del self.target.leaving[sequence]

    def run(self) -> None:
        if self.world.clock.now_ms() % 1_000:
            request = RecurringRequest(RecurringWish.RUN, NAME.encode(), number=self.random.randrange(1, 1 << 60))
            self.world.begin(RequestType.RECUR, request.to_head(self.world.server.log_id))

    def die(self) -> None:
        self.world = self.world.after_crash(seed=self.random.randrange(1 << 30))
        self.world.server.own_all_keys()

    def target_dies(self) -> None:
        if not self.target.up:
            self.target.restart()
        else:
            self.world.crash_target(TARGET)

    def heal(self) -> None:
        if not self.target.up:
            self.target.restart()
        for _ in range(40):
            self.world.pass_ms(500)
            for number in list(self.world.outside.unanswered):
                self.world.send_again(number)
            self.world.settle()
            self.settle_taken()
            self.ack()


def _filed(offset: int) -> None:
    """A checkpoint is written for its own sake."""


@pytest.mark.parametrize("seed", SEEDS)
def test_an_occurrence_is_decided_only_when_each_earlier_message_was_acknowledged(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(STEPS):
        walk.step()
    before = len(walk.target.arrived)
    walk.heal()
    assert walk.target.asked
    assert len(walk.target.arrived) >= before + 5, "occurrences run again once all is acknowledged"


def test_the_same_holds_when_there_is_room_for_a_few_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "PRUNE_FROM", 1)
    monkeypatch.setattr(overlaps, "NOTED_MAX", 3)
    walk = Walk(4)
    for _ in range(STEPS):
        walk.step()
    before = len(walk.target.arrived)
    walk.heal()
    assert len(walk.target.arrived) >= before + 5


def test_while_nobody_can_tell_nothing_is_decided_and_after_a_minute_it_can_be_paused() -> None:
    walk = Walk(0)
    world, target = walk.world, walk.target

    def ask(wish: RecurringWish) -> RecurringRecord:
        request = RecurringRequest(wish, NAME.encode())
        return RecurringRecord.decode(read_body(world.ask(RequestType.RECUR, request.to_head(world.server.log_id))[1]))

    world.pass_ms(1_500)
    walk.ack()
    assert len(target.arrived) == 1
    world.crash_target(TARGET)
    world.pass_ms(10_000)
    with pytest.raises(SlowDown):
        ask(RecurringWish.PAUSE)
    world.pass_ms(60_000)
    paused = ask(RecurringWish.PAUSE)
    assert (paused.sent, set(paused.skipped)) == (1, {"overlap", "superseded"})
    ask(RecurringWish.RESUME)
    world.pass_ms(70_000)
    target.restart()
    world.pass_ms(3_000)
    # The newest one runs, for those that were missed, too; the others are one message each.
    assert len(target.arrived) == 2
    assert ask(RecurringWish.PAUSE).sent == 2
