"""Rule S8: what is undelivered when it expires ends as EXPIRED; nothing else does, and nothing of it is handed over."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ProducerPart
from delayd.batch.validate import check_expiry, refused_rows
from delayd.delay.books.outcomes import list_dispatch_logs, read_outcomes
from delayd.delay.producers import AcceptedBatch
from delayd.errors import BadExpiry, BatchMalformed, DelaydError
from delayd.hours import INSTANT_MS_MAX
from delayd.log.hour import Outcome
from delayd.log.segment import FileKind, open_segment
from delayd.reading.books import AuditReport, audit_directory
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import Asked
from tests.batches import messages
from tests.worlds.delay import DATA, FOLDER, PRODUCER_ID, TARGET_IDS, World

HOUR_MS = 3_600_000
TARGET = TARGET_IDS[0]


def _send(world: World, number: int, due: list[int], expires: list[int] | None) -> list[AcceptedBatch | DelaydError]:
    heard: list[AcceptedBatch | DelaydError] = []
    bodies = [b"%d-%d" % (number, row) for row in range(len(due))]
    data = messages(bodies, due=due, expires=expires, part=ProducerPart(PRODUCER_ID, number, 0))
    world.core.send(parse(data), lambda what, _: heard.append(what))
    world.settle()
    return heard


def _at_target(world: World) -> set[bytes]:
    return {body for kept in world.outside.targets[TARGET].log for body in kept.bodies}


def _expired(world: World) -> dict[int, int]:
    """By sequence: when rows were claimed whose outcome is EXPIRED."""
    found: dict[int, int] = {}
    for _, path in list_dispatch_logs(world.disk, FOLDER):
        rows = read_outcomes(open_segment(world.disk, path, FileKind.DISPATCH, None, write=False))
        parts = rows.parts[rows.part_of]
        expired = parts["outcome"] == Outcome.EXPIRED
        assert len(np.unique(rows.sequences)) == len(rows.sequences), "a row has two outcomes"
        claims = parts["claimed_at_ms"][expired].tolist()
        found |= dict(zip(rows.sequences[expired].tolist(), claims, strict=True))
    return found


def _audit(world: World) -> AuditReport:
    report = audit_directory(DATA, now_ms=world.clock.now_ms(), disk=world.disk)
    assert not [finding for finding in report.findings if finding.kind.name not in ("LATE", "LOST")], report.findings
    return report


def test_rows_that_expire_while_their_target_is_away_are_not_handed_over_and_the_others_are() -> None:
    world = World()
    world.pass_ms(1_000)
    world.crash_target(TARGET)
    now = world.clock.now_ms()
    due = [now + 100 + row for row in range(40)]
    # Of each four: one expires while the target is away, one soon after it is back, one never, and one just in time.
    _send(world, 1, due, [(now + 5_000, now + HOUR_MS, 0, now + 30_000)[row % 4] for row in range(40)])
    _send(world, 2, due[:1], [now + 5_000])
    _send(world, 3, due[:2], None)
    world.pass_ms(20_000)
    assert _expired(world) == {}, "nobody knows yet what the target holds"
    world.outside.targets[TARGET].restart()
    world.pass_ms(5_000)
    kept = {b"1-%d" % row for row in range(40) if row % 4} | {b"3-0", b"3-1"}
    assert _at_target(world) == kept
    claims = _expired(world)
    assert set(claims) == {*range(1, 41, 4), 41} and min(claims.values()) >= now + 5_000
    assert world.core.standing.counters()["expired_rows"] == 11
    world.checkpoint()
    assert _audit(world).total.expired == 11


@pytest.mark.parametrize("rows", [1, 60])
def test_a_row_filed_for_a_later_hour_keeps_its_expiry(rows: int) -> None:
    world = World()
    due = START_MS + 3 * HOUR_MS
    _send(world, 1, [due] * rows, [due + 60_000] * rows)
    _send(world, 2, [due] * rows, [due + 2 * HOUR_MS] * rows)
    world.checkpoint()
    world.pass_ms(2 * HOUR_MS)
    world.crash_target(TARGET)
    world.pass_ms(HOUR_MS + 120_000)
    world.outside.targets[TARGET].restart()
    world.pass_ms(10_000)
    assert _at_target(world) == {b"2-%d" % row for row in range(rows)}
    assert set(_expired(world)) == set(range(1, rows + 1))
    for _ in range(3):
        world.pass_ms(HOUR_MS // 2)
        world.checkpoint()
        world.core.sweep()
        world.settle()
    report = _audit(world)
    assert report.total.expired == rows and report.seals, "the hour seals, and its seal is that of these books"


@pytest.mark.parametrize("loss", list(PowerLoss))
def test_a_crash_at_any_step_ends_the_row_once(loss: PowerLoss) -> None:
    """From the moment at which it is sent until its outcome is durable."""
    for steps in range(200):
        world = World()
        _send(world, 1, [START_MS - 1_000], None)
        data = messages([b"2-0"], due=[START_MS - 1_000], expires=[START_MS], part=ProducerPart(PRODUCER_ID, 2, 0))
        heard: list[object] = []
        world.core.send(parse(data), lambda what, _, heard=heard: heard.append(what))  # type: ignore[misc]
        for _ in range(steps):
            world.core.wake()
            move = world.next_move()
            if move is None:
                world.clock.advance(5)
            else:
                move()
        is_over = bool(world.core.standing.counters()["expired_rows"]) and world.core.logs.outcomes.idle
        again = world.after_crash(loss)
        again.pass_ms(5_000)
        assert b"2-0" not in _at_target(again)
        assert set(_expired(again)) == {2} or not heard
        if is_over:
            assert steps > 5
            return
    raise AssertionError("its outcome was never durable")


def test_a_row_that_is_moved_beyond_its_expiry_ends_when_it_is_due() -> None:
    world = World()
    now = world.clock.now_ms()
    (heard,) = _send(world, 1, [now + 60_000] * 2, [now + 120_000] * 2)
    assert isinstance(heard, AcceptedBatch)
    for row, to_ms in enumerate((now + 1_000, now + 600_000)):
        asked = np.array([1 + row], np.uint64), np.array([now + 60_000]), np.array([heard.appended_at_ms])
        world.core.asked.endings.reschedule(Asked(*asked), np.array([to_ms], np.int64), lambda what: None)
        world.settle()
    world.pass_ms(300_000)
    assert _at_target(world) == {b"1-0"} and not _expired(world)
    world.pass_ms(310_000)
    assert _at_target(world) == {b"1-0"}
    ((_, claimed_ms),) = _expired(world).items()
    assert claimed_ms >= now + 600_000
    world.checkpoint()
    assert _audit(world).total.expired == 1


def test_what_is_expired_when_it_is_sent_ends_at_once() -> None:
    world = World()
    now = world.clock.now_ms()
    (heard,) = _send(world, 1, [now - 2_000, now - 2_000], [now - 1_000, 0])
    assert isinstance(heard, AcceptedBatch)
    world.pass_ms(1_000)
    assert set(_expired(world)) == {1} and _at_target(world) == {b"1-1"}


def test_many_expired_rows_do_not_keep_the_server_in_one_turn() -> None:
    world = World(frame_rows_max=10)
    world.pass_ms(100)
    world.crash_target(TARGET)
    now = world.clock.now_ms()
    for number in range(1, 11):
        _send(world, number, [now] * 50, [now + 1_000] * 50)
    world.pass_ms(20_000)
    world.outside.targets[TARGET].restart()
    ended = [world.core.standing.counters()["expired_rows"]]
    pump = type(world.core.handoff.dispatcher.links[TARGET].sender).pump

    def count(self: object, *rest: object) -> None:
        pump(self, *rest)  # type: ignore[arg-type]
        ended.append(world.core.standing.counters()["expired_rows"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.core.handoff.dispatcher.links[TARGET].sender), "pump", count)
        world.pass_ms(10_000)
    assert ended[-1] == 500 and max(np.diff(ended)) <= 10


DUE = 2_000_000_000_000


def _batch(expires: list[int]) -> Batch:
    return parse(messages([b"x"] * len(expires), due=[DUE] * len(expires), expires=expires))


@pytest.mark.parametrize("wrong", [DUE, DUE - 1, 1, -1, -(2**63), INSTANT_MS_MAX + 1, 2**63 - 1])
def test_an_expiry_before_the_due_instant_is_refused_with_its_rows(wrong: int) -> None:
    world = World()
    (heard,) = _send(world, 1, [START_MS + 5_000] * 3, [0, START_MS + 5_000, START_MS + 5_001])
    assert isinstance(heard, BadExpiry) and refused_rows(heard) == [1]
    with pytest.raises(BadExpiry) as caught:
        check_expiry(_batch([0, wrong, DUE + 1, INSTANT_MS_MAX, wrong]), again=False)
    assert refused_rows(caught.value) == [1, 4]


@pytest.mark.parametrize("wrong", [-1, INSTANT_MS_MAX + 1])
def test_what_comes_again_may_be_due_later_than_it_expires(wrong: int) -> None:
    check_expiry(_batch([1, DUE, 0, INSTANT_MS_MAX]), again=True)
    with pytest.raises(BatchMalformed, match="no instant"):
        check_expiry(_batch([0, wrong]), again=True)
