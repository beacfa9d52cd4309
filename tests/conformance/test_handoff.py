"""What a delay server may count on at the other side of the handoff: the real realtime server, and the tests' fake."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from delayd.errors import DelaydError, FencedInstance, HandoffRefused, StaleEpoch, StaleSession
from delayd.testing.clock import SimClock
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_int, need_rows
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN, dispatch_batch
from tests.worlds.realtime import SimPeer, World
from tests.worlds.target import Cable, FakeTarget

Row = list[int]


class RealLine:
    """A connection to the real server's core."""

    def __init__(self, world: World) -> None:
        self._world, self._peer = world, SimPeer()

    def ask(self, kind: RequestType, head: Head, body: bytes) -> list[tuple[Head, bytes]]:
        request_id = self._world.send(self._peer, kind, head, body)
        if request_id in self._peer.errors:
            raise self._peer.errors[request_id]
        return self._peer.answers[request_id]


class FakeLine:
    """A connection to the fake: all that is sent arrives, and each answer."""

    def __init__(self, target: FakeTarget) -> None:
        self._target, self._cable = target, Cable(target, lambda error: None)

    def ask(self, kind: RequestType, head: Head, body: bytes) -> list[tuple[Head, bytes]]:
        answers: list[Frame | DelaydError] = []
        self._cable.call(kind, head, [body], answers.append)
        self._cable.carry_up()
        if self._target.can_sync:
            self._target.sync()
        while self._cable.down:
            self._cable.carry_down()
        found: list[tuple[Head, bytes]] = []
        for answer in answers:
            if isinstance(answer, DelaydError):
                raise answer
            found.append((answer.head, bytes(answer.body)))
        return found


class Target:
    """The real server or the fake, as a delay server meets it."""

    def __init__(self, kind: str) -> None:
        self._world = World() if kind == "real" else None
        self._fake = FakeTarget(0xFA4E, SimClock().now_ms)

    @property
    def log_id(self) -> int:
        return self._fake.log_id if self._world is None else self._world.core.log_id

    def line(self) -> RealLine | FakeLine:
        return FakeLine(self._fake) if self._world is None else RealLine(self._world)

    def lose_power(self) -> None:
        """Start again after a crash that took all that was not synced."""
        if self._world is not None:
            self._world = World(self._world.disk.after_crash(), self._world.state.after_crash())
        else:
            self._fake.crash(Random(0))
            self._fake.restart()

    def hello(
        self,
        session: int,
        *,
        epoch: int = 1,
        instance: int = 7,
        w: tuple[int, int] = (0, 0),
        target: int | None = None,
        line: RealLine | FakeLine | None = None,
    ) -> list[Row]:
        """The rows of the window."""
        return self.window(session, epoch=epoch, instance=instance, w=w, target=target, line=line)[0]

    def window(
        self,
        session: int,
        *,
        epoch: int = 1,
        instance: int = 7,
        w: tuple[int, int] = (0, 0),
        target: int | None = None,
        line: RealLine | FakeLine | None = None,
    ) -> tuple[list[Row], bytes]:
        """The rows of the window, and the columns of its messages."""
        head: Head = {
            "log_id": ORIGIN,
            "target": self.log_id if target is None else target,
            "epoch": epoch,
            "instance": instance,
            "session": session,
            "w": list(w),
        }
        answers = (line or self.line()).ask(RequestType.HELLO, head, b"")
        rows = [row for answer, _ in answers for row in need_rows(answer, "batches", 7)]
        return rows, b"".join(body for _, body in answers)


def hand_over(line: RealLine | FakeLine, session: int, *batches: bytes, epoch: int = 1) -> tuple[int, list[Row]]:
    """When the batches were appended, and (batch id, offset) of each."""
    ((head, _),) = line.ask(RequestType.DISPATCH, {"session": session, "epoch": epoch}, b"".join(batches))
    return need_int(head, "appended_at_ms"), need_rows(head, "batches", 2)


@pytest.fixture(params=["real", "fake"])
def target(request: pytest.FixtureRequest) -> Target:
    return Target(request.param)


def test_a_window_says_all_that_a_lost_answer_would_have_said(target: Target) -> None:
    line = target.line()
    assert target.hello(1, line=line) == []
    appended_at_ms, ((batch_id, offset),) = hand_over(line, 1, dispatch_batch(1, [b"a", b"b"]))
    rows, columns = target.window(2)
    ((epoch, found_id, hour, found_offset, found_at_ms, claimed_at_ms, count),) = rows
    assert (epoch, found_id, found_offset, found_at_ms, count) == (1, batch_id, offset, appended_at_ms, 2)
    assert hour == DUE_MS // 3_600_000 and claimed_at_ms == DUE_MS + 1
    assert np.frombuffer(columns, np.int64)[:4].tolist() == [1_000, 1_001, DUE_MS, DUE_MS]


def test_rule_H2_a_batch_is_remembered_until_w_passes_it(target: Target) -> None:
    line = target.line()
    target.hello(1, line=line)
    hand_over(line, 1, *(dispatch_batch(number, [b"a"]) for number in (1, 2, 3)))
    hand_over(line, 1, dispatch_batch(4, [b"d"], w=(1, 1)))
    assert [row[1] for row in target.hello(2)] == [2, 3, 4]
    assert [row[1] for row in target.hello(3, w=(1, 3))] == [4]
    # An older W takes nothing back.
    assert [row[1] for row in target.hello(4, w=(1, 1))] == [4]


def test_rule_H2_a_new_epoch_forgets_nothing_of_an_older_one(target: Target) -> None:
    line, later = target.line(), target.line()
    target.hello(1, line=line)
    hand_over(line, 1, dispatch_batch(1, [b"a"]), dispatch_batch(2, [b"b"]))
    assert [row[:2] for row in target.hello(1, epoch=2, line=later)] == [[1, 1], [1, 2]]
    hand_over(later, 1, dispatch_batch(1, [b"c"], epoch=2), epoch=2)
    assert [row[:2] for row in target.hello(2, epoch=2)] == [[1, 1], [1, 2], [2, 1]]
    assert [row[:2] for row in target.hello(3, epoch=2, w=(1, 2))] == [[2, 1]]


def test_rule_H3_a_hello_that_is_not_newer_is_refused(target: Target) -> None:
    target.hello(5, epoch=3)
    with pytest.raises(StaleEpoch):
        target.hello(9, epoch=2)
    with pytest.raises(FencedInstance):
        target.hello(6, epoch=3, instance=8)
    with pytest.raises(StaleSession):
        target.hello(5, epoch=3)


def test_rule_H3_frames_of_an_older_session_are_refused_and_leave_nothing(target: Target) -> None:
    older, newer = target.line(), target.line()
    target.hello(1, line=older)
    target.hello(2, line=newer)
    with pytest.raises(StaleSession):
        hand_over(older, 1, dispatch_batch(1, [b"a"]))
    hand_over(newer, 2, dispatch_batch(2, [b"b"]))
    assert [row[1] for row in target.hello(3)] == [2]


def test_rule_H7_a_hello_for_another_server_is_refused(target: Target) -> None:
    with pytest.raises(HandoffRefused):
        target.hello(1, target=target.log_id + 1)


def test_rule_L1_what_was_answered_outlives_a_crash_and_so_does_the_epoch(target: Target) -> None:
    line = target.line()
    target.hello(1, epoch=4, line=line)
    _, ((batch_id, offset),) = hand_over(line, 1, dispatch_batch(1, [b"a"], epoch=4), epoch=4)
    target.lose_power()
    with pytest.raises(StaleEpoch):
        target.hello(2, epoch=3)
    ((epoch, found_id, _, found_offset, *_),) = target.hello(2, epoch=4)
    assert (epoch, found_id, found_offset) == (4, batch_id, offset)


def test_rule_E1_a_batch_that_was_changed_on_its_way_is_refused_and_leaves_nothing(target: Target) -> None:
    line = target.line()
    target.hello(1, line=line)
    changed = dispatch_batch(1, [b"abcdefgh"]).replace(b"abcdefgh", b"abcdefgx")
    with pytest.raises(DelaydError):
        hand_over(line, 1, changed)
    assert target.hello(2) == []
