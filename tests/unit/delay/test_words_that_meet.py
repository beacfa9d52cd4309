"""Operator's words and requests that meet others, or the same thing removed, while they are being stored.

Whatever meets whatever at whichever step of the disks, each word is answered once and by a named error at most, no
message is lost or sent twice, and what the server says afterwards is what the next start reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

from delayd.delay.producers import AcceptedBatch
from delayd.errors import BadArgument, DelaydError, DiskFull, NotReady, SlowDown, UnknownServer
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.schedule import schedule_path
from delayd.testing.clock import START_MS
from delayd.testing.executor import StepExecutor
from delayd.wire.meta import Move
from tests.unit.delay.answers import outcomes
from tests.unit.delay.handoff import TARGET, link_of, ready_world, target_of
from tests.worlds.delay import FOLDER, PRODUCER_ID, TARGET_IDS, World, new_world, wanted
from tests.worlds.target import FakeTarget

SUBJECTS = (b"orders.eu", b"orders.us", b"mail")
SPARE = 0x7777
FAR_MS = 5 * HOUR_MS
FAR = hour_of_ms(START_MS + FAR_MS)


class Facts(NamedTuple):
    """What must be the same after the next start."""

    targets: dict[bytes, int]
    lost: dict[int, tuple[int, bool]]
    next_sequence: int
    moves_seen: int


class Meeting:
    """One life of a server with two targets and a spare one, and an hour whose file is gone."""

    def __init__(self) -> None:
        world = self.world = World(new_world(TARGET_IDS[:2]))
        for subject in SUBJECTS:
            world.send(wanted(2, 0, f"first-{subject.decode()}", subject))
        world.send(wanted(3, FAR_MS, "far"))
        world.pass_ms(2_000)
        world.checkpoint()
        world.disk.remove(schedule_path(FOLDER, FAR))
        world.send(wanted(2, FAR_MS, "beside"))
        world.settle()
        world.checkpoint()
        self.said = self.heard = 0
        self.number = 0
        world.live_again = self._live_again  # type: ignore[method-assign]
        self.does: list[Callable[[int], None]] = [
            *[self._step] * 8,
            self._send,
            self._send,
            self._send_again,
            self._ask_outcome,
            self._lose,
            self._accept,
            self._release,
            self._drop,
            self._move,
            self._move,
            self._trust_clock,
            self._lose_data,
            self._pass_time,
            lambda number: self._say(lambda: world.core.checkpoint(self._hear)),
        ]

    def _live_again(self) -> None:
        """Who waits for an answer while the server begins anew asks again."""
        before = self.world.server
        World.live_again(self.world)
        if self.world.server is not before:
            self.said = self.heard

    def _hear(self, *told: object) -> None:
        self.heard += 1

    def _say(self, word: Callable[[], None]) -> None:
        """One word: it is answered once, or refused at once by name."""
        self.said += 1
        try:
            word()
        except (BadArgument, NotReady, UnknownServer, SlowDown):
            self.heard += 1

    def _step(self, number: int) -> None:
        moves = self.world.moves()
        if moves:
            moves[number % len(moves)]()
        else:
            self.world.core.wake()

    def _send(self, number: int) -> None:
        self.number += 1
        due_ms = self.world.clock.now_ms() - START_MS + (0, 100, 3_000, FAR_MS)[number // 3 % 4]
        self.world.send(wanted(1 + number % 2, due_ms, f"m{self.number}", SUBJECTS[number % 3]))

    def _send_again(self, number: int) -> None:
        self.world.send_again(1 + number % self.world.outside.last_number)

    def _ask_outcome(self, number: int) -> None:
        # Also of one that was never sent: it is called not kept, and the number is never used here.
        asked = 1 + number % self.world.outside.last_number if number % 4 else 1 << 40

        def heard(found: AcceptedBatch | None) -> None:
            self.heard += 1
            known = self.world.outside.accepted.get(asked)
            assert found is None or known is None or known[1] == found

        self._say(lambda: self.world.core.ask_outcome(PRODUCER_ID, asked, heard))

    def _lose(self, number: int) -> None:
        self._say(partial(self.world.core.targets.lose, TARGET_IDS[number % 2], self._hear))

    def _accept(self, number: int) -> None:
        self._say(partial(self.world.core.targets.accept, TARGET_IDS[number % 2], self._hear))

    def _release(self, number: int) -> None:
        self._say(partial(self.world.core.release, f"schedule/{hour_name(FAR)}", self._hear))

    def _drop(self, number: int) -> None:
        self._say(partial(self.world.core.drop, f"schedule/{hour_name(FAR)}", self._hear))

    def _move(self, number: int) -> None:
        if SPARE not in self.world.outside.targets:
            self.world.outside.targets[SPARE] = FakeTarget(SPARE, self.world.clock.now_ms)
        to = (*TARGET_IDS[:2], SPARE)[number // 3 % 3]
        self.number += 1
        self.world.core.moves.take([Move(self.number, SUBJECTS[number % 3].decode(), to)])

    def _trust_clock(self, number: int) -> None:
        self._say(partial(self.world.core.follow_clock, self._hear))

    def _lose_data(self, number: int) -> None:
        """A target whose log is not what it was: it has an alarm, until an operator decides."""
        target = self.world.outside.targets[TARGET_IDS[number % 2]]
        target.log.clear()
        target.synced = 0
        self.world.cut(target.log_id)

    def _pass_time(self, number: int) -> None:
        self.world.clock.advance((1, 50, 1_000, 31_000)[number % 4])
        self.world.look_around()
        self.world.core.wake()

    def check(self) -> None:
        """Every word was answered, and nothing is other than the next start finds it."""
        world = self.world
        world.pass_ms(40_000)
        world.checkpoint()
        world.settle()
        assert self.said == self.heard
        again = world.after_crash(late=False)
        assert facts(again) == facts(world)
        # A start looks at an hour's file when its rows are needed, so it may not have missed it yet.
        assert {entry.id for entry in again.core.quarantine} <= {entry.id for entry in world.core.quarantine}
        assert outcomes(again) == outcomes(world)


def facts(world: World) -> Facts:
    """What a server says of targets, and of what is set aside."""
    core = world.core
    lost = {log_id: (each.until_ms, each.freed) for log_id, each in core.targets._words.lost.items()}
    targets = {subject: target for subject, target in core.dispatcher.targets.items() if target not in lost}
    return Facts(targets, lost, core.intake.next_sequence, core.moves.seen)


@given(steps=lists(tuples(integers(0, 21), integers(0, 59)), min_size=30, max_size=90))
def test_whatever_meets_while_it_is_stored_is_what_the_next_start_reads(steps: list[tuple[int, int]]) -> None:
    meeting = Meeting()
    for kind, number in steps:
        meeting.does[kind % len(meeting.does)](number)
    meeting.check()


def run_all_but_commits(world: World) -> None:
    """All that happens without time passing, while the message log's disk takes its time."""
    for _ in range(100):
        for executor in world.executors()[1:]:
            executor.run_all()
        world.core.wake()


def worker_of(world: World) -> StepExecutor:
    return world.executors()[2]


def test_rule_H5_a_subject_whose_note_is_stored_while_its_target_is_given_up_goes_elsewhere() -> None:
    world = ready_world()
    world.send(wanted(2, 1_000, "late", b"mail"))
    world.settle()
    world.core.dispatcher.targets.pop(b"mail")
    world.core.dispatcher._asked.add(b"mail")
    world.core.dispatcher.routed({b"mail": TARGET}, [])
    told: list[DelaydError | str] = []
    world.core.targets.lose(TARGET, told.append)
    run_all_but_commits(world)
    assert len(told) == 1 and world.core.targets._words.is_freed(TARGET)
    del world.outside.targets[TARGET]
    world.outside.targets[SPARE] = FakeTarget(SPARE, world.clock.now_ms)
    world.pass_ms(5_000)
    assert world.core.dispatcher.targets[b"mail"] == SPARE
    assert [body for kept in world.outside.targets[SPARE].log for body in kept.bodies] == [b"late-0", b"late-1"]


def test_rule_H5_a_subject_is_not_moved_to_a_target_that_was_given_up() -> None:
    world = ready_world()
    world.core.targets.lose(TARGET, lambda told: None)
    world.settle()
    del world.outside.targets[TARGET]
    world.outside.targets[SPARE] = FakeTarget(SPARE, world.clock.now_ms)
    world.pass_ms(5_000)
    for life in (world, world.after_crash()):
        number = 1 + life.core.moves.seen
        life.core.moves.take([Move(number, "orders.eu", TARGET)])
        life.send(wanted(1, life.clock.now_ms() - START_MS, f"after-{number}"))
        life.pass_ms(2_000)
        assert life.core.moves.seen == number
        assert life.outside.targets[SPARE].log[-1].bodies == (f"after-{number}-0".encode(),)


def test_a_loss_that_a_full_disk_refuses_has_not_happened_and_may_be_said_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ready_world()
    told: list[DelaydError | str] = []
    with monkeypatch.context() as full:
        full.setattr(world.state, "commit", _full)
        world.core.targets.lose(TARGET, told.append)
        world.settle()
    assert isinstance(told.pop(), DelaydError) and not link_of(world).is_lost
    world.send(wanted(1, 0, "goes on"))
    world.pass_ms(2_000)
    assert target_of(world).log[-1].bodies == (b"goes on-0",)
    world.core.targets.lose(TARGET, told.append)
    world.settle()
    assert "is given up" in str(told)


def test_the_subjects_of_a_lost_target_are_freed_as_soon_as_the_disk_has_space_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ready_world()
    told: list[DelaydError | str] = []
    world.core.targets.lose(TARGET, told.append)
    worker_of(world).run_one()
    with monkeypatch.context() as full:
        full.setattr(world.state, "commit", _full)
        world.settle()
    assert isinstance(told[0], DelaydError) and len(told) == 1
    del world.outside.targets[TARGET]
    world.outside.targets[SPARE] = FakeTarget(SPARE, world.clock.now_ms)
    world.send(wanted(1, 0, "elsewhere"))
    world.pass_ms(5_000)
    assert [kept.bodies for kept in world.outside.targets[SPARE].log] == [(b"elsewhere-0",)]
    assert world.core.targets._words.is_freed(TARGET)


def test_a_target_that_is_lost_while_it_is_being_accepted_is_not_called_spoken_to() -> None:
    world = ready_world()
    target_of(world).log.clear()
    target_of(world).synced = 0
    world.cut(TARGET)
    world.send(wanted(1, 0, "a"))
    world.pass_ms(10_000)
    accepted: list[DelaydError | str] = []
    world.core.targets.accept(TARGET, accepted.append)
    world.core.targets.lose(TARGET, lambda told: None)
    world.settle()
    assert [type(each) for each in accepted] == [UnknownServer]


def test_words_that_come_while_an_hour_is_looked_at_are_answered_one_behind_the_other() -> None:
    world, told = Meeting().world, list[tuple[str, bool]]()
    id_, commit = f"schedule/{hour_name(FAR)}", world.executors()[0]
    for word, decide in (("release", world.core.release), ("drop", world.core.drop), ("late", world.core.release)):
        decide(id_, lambda done, text, word=word: told.append((word, done)))  # type: ignore[misc]
        commit.run_all()
    world.settle()
    assert told[0] == ("release", False) and ("drop", True) in told and len(told) == 3
    assert not len(world.core.quarantine)


def _full(*what: object) -> None:
    raise DiskFull("/data/delay/state.lmdb")
