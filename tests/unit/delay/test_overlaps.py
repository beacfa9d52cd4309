"""Whose answer counts when a delay server asks whether messages of a schedule are unacknowledged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest

from delayd.errors import DelaydError, NotReady
from delayd.recurrence.deciding import RunPolicy
from delayd.recurrence.recurrence import Recurrence
from delayd.wire.frame import ANSWER, Frame
from delayd.wire.recurring import (
    RecurringRecord,
    RecurringRequest,
    RecurringSpec,
    RecurringWish,
    Unfinished,
    body_of,
    read_body,
    read_schedules,
)
from delayd.wire.requests import RequestType
from tests.worlds.delay import TARGET_IDS, World, new_world
from tests.worlds.outside import wanted
from tests.worlds.target import Asked, Cable, FakeTarget

NAME, SUBJECTS = "one", (b"orders.eu", b"orders.ev")
DONE = Unfinished([], [], [], [])
BUSY, UNGROUPED = DONE._replace(unfinished=[0]), DONE._replace(ungrouped=[0])
UNKNOWN = DONE._replace(unknown=[0])


@dataclass(slots=True)
class TellingTarget(FakeTarget):
    """A target that tells what the test says."""

    tells: Unfinished | DelaydError = DONE
    asked: int = 0

    def receive(self, cable: Cable, asked: Asked, answer: Callable[[Frame | DelaydError], None]) -> None:
        if asked.kind != RequestType.UNFINISHED:
            FakeTarget.receive(self, cable, asked, answer)  # A class with slots has no `super` here.
            return
        self.asked += 1
        assert [each.name for each in read_schedules(asked.head)] == [NAME]
        told = self.tells
        if isinstance(told, Unfinished):
            answer(Frame(RequestType.UNFINISHED, ANSWER, 0, told.to_head(self.log_id), memoryview(b"")))
        else:
            answer(told)


def record_after(own: Unfinished | DelaydError, other: Unfinished | DelaydError) -> RecurringRecord:
    """What a schedule has decided after three seconds, when its subject's target tells this, and another one that."""
    remains = new_world(TARGET_IDS)
    targets = {log_id: TellingTarget(log_id, plain.now_ms) for log_id, plain in remains.outside.targets.items()}
    remains.outside.targets.update(targets)
    world = World(remains)
    world.own_all_keys()
    own_id, other_id = (world.target_of(subject) for subject in SUBJECTS)
    targets[own_id].tells, targets[other_id].tells = own, other
    # Each target has a message, so each is connected to.
    world.send([row for subject in SUBJECTS for row in wanted(1, 10, subject.decode(), subject)])
    world.pass_ms(500)
    policy = RunPolicy(overlap="skip")
    spec = RecurringSpec(Recurrence(every=timedelta(seconds=1)), policy, SUBJECTS[0].decode(), b"body")
    put = RecurringRequest(RecurringWish.PUT, NAME.encode(), spec=spec)
    world.ask(RequestType.RECUR, put.to_head(world.server.log_id), b"".join(body_of(spec.encode())))
    world.pass_ms(3_200)
    assert all(target.asked for target in targets.values())
    # A schedule that is not paused stays as it is, and the answer has its record.
    resume = RecurringRequest(RecurringWish.RESUME, NAME.encode())
    return RecurringRecord.decode(read_body(world.ask(RequestType.RECUR, resume.to_head(world.server.log_id))[1]))


def test_an_occurrence_runs_when_nobody_has_a_message() -> None:
    record = record_after(DONE, DONE)
    assert record.sent >= 2 and not record.skipped


@pytest.mark.parametrize(("own", "other"), [(BUSY, DONE), (UNGROUPED, DONE), (DONE, BUSY)])
def test_it_is_skipped_while_any_target_has_one(own: Unfinished, other: Unfinished) -> None:
    record = record_after(own, other)
    assert not record.sent and record.skipped.keys() == {"overlap"} and record.skipped["overlap"] >= 2


def test_what_a_target_keeps_without_a_group_counts_only_where_the_subject_is_now() -> None:
    assert record_after(DONE, UNGROUPED).sent >= 2


@pytest.mark.parametrize("own", [UNKNOWN, NotReady("it starts")])
def test_nothing_is_decided_while_its_target_can_not_tell(own: Unfinished | DelaydError) -> None:
    record = record_after(own, DONE)
    assert not record.sent and not record.skipped


def test_a_target_that_can_not_be_asked_and_is_not_the_subjects_own_is_not_waited_for() -> None:
    assert record_after(DONE, NotReady("it starts")).sent >= 2
